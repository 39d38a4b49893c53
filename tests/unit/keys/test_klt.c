/*
 * test_klt.c - tables of klt: axes and variances, who gets how many groups, and codewords learnt from samples. (Tiles, scores and
 * broken numbers: test_pair.c.)
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "gpu-worker/keys/key_statistics.h"
#include "tests/unit/keys/fixture.h"
#include "tests/unit/keys/fixture_pair.h"

/* Statistics with full matrices: moments = M M', M [n][n] of normal numbers of falling columns. */
static void fill_moments(uint32_t n, double falling, float *moments)
{
    static double mixing[64 * 64];
    for (uint32_t i = 0; i < n * n; i++)
        mixing[i] = fixture_normal() * exp(-falling * (i % n) / n);
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t j = 0; j < n; j++) {
            double sum = i == j ? 1e-3 : 0;
            for (uint32_t k = 0; k < n; k++)
                sum += mixing[i * n + k] * mixing[j * n + k];
            moments[i * n + j] = (float)sum;
        }
}

/* Axes: B' A is the identity where all are coded, A (spread) A' is the diagonal matrix of variances, B (moments of q) B' that of
 * ones. Heads of larger variances have more groups, and the tiles are as large as asked for. */
static void test_axes(void **unused)
{
    (void)unused;
    enum { N = 48, N_HEADS = 4 };
    const struct row_shape shape = {2, 2, N, ROW_CODEC_F16};
    const uint8_t hash[16] = {0};
    struct key_statistics *statistics;
    struct pair_table *tables[N_HEADS] = {NULL};
    fixture_seed(48);
    assert_int_equal(key_statistics_new(&shape, hash, &statistics), 0);
    for (uint32_t h = 0; h < N_HEADS; h++) {
        const struct key_statistics_head head = key_statistics_head(statistics, h / 2, h % 2);
        fill_moments(N, 2, head.q_square);
        fill_moments(N, 6, head.k_spread);
        for (uint32_t i = 0; i < N * N; i++)
            head.k_spread[i] *= h == 3 ? 16.0f : 1.0f;
    }
    assert_int_equal(codec_pair_klt_tables(statistics, 500, tables), 0);
    size_t bytes = 0;
    for (uint32_t h = 0; h < N_HEADS; h++) {
        const struct pair_table *table = tables[h];
        const struct key_statistics_head head = key_statistics_head(statistics, h / 2, h % 2);
        bytes += pair_tile_bytes(&table->layout);
        assert_int_equal(table->layout.n_groups % 2, 1);
        assert_true(h == 3 || table->layout.n_groups < tables[3]->layout.n_groups);
        double largest = 0;
        for (uint32_t i = 0; i < N; i++)
            largest = fmax(largest, (double)head.q_square[i * N + i]);
        const uint32_t m = table->n_coordinates;
        for (uint32_t a = 0; a < m; a++)
            for (uint32_t b = 0; b < m; b++) {
                double spread = 0, asked = 0, both = 0;
                for (uint32_t i = 0; i < N; i++) {
                    both += (double)table->analysis[a * N + i] * (double)table->synthesis[i * m + b];
                    for (uint32_t j = 0; j < N; j++) {
                        spread += (double)table->analysis[a * N + i] * (double)table->analysis[b * N + j] *
                                  (double)head.k_spread[i * N + j];
                        asked += (double)table->synthesis[i * m + a] * (double)table->synthesis[j * m + b] *
                                 (double)head.q_square[i * N + j] / largest;
                    }
                }
                const double variance = 1 / (double)table->inverse_spread[a] / m;
                assert_true(fabs(both - (a == b)) < 1e-3);
                assert_true(fabs(spread - (a == b ? variance : 0)) < 1e-3 * variance + 1e-4);
                assert_true(fabs(asked - (a == b)) < 0.05); /* less the ridge */
            }
        free(tables[h]);
    }
    assert_true(bytes <= 4 * 500 && bytes > 4 * 500 - 64);
    key_statistics_free(statistics);
}

/* Samples of 8 kinds, which normal numbers of these variances never look like: learnt codewords know them. */
static void test_codewords_are_learnt(void **unused)
{
    (void)unused;
    enum { N = 16 };
    const struct row_shape shape = {1, 1, N, ROW_CODEC_F16};
    const uint8_t hash[16] = {0};
    double errors[2] = {0, 0};
    for (int learnt = 0; learnt < 2; learnt++) {
        struct key_statistics *statistics;
        struct pair_table *table = NULL;
        fixture_seed(16);
        assert_int_equal(key_statistics_new(&shape, hash, &statistics), 0);
        if (learnt)
            assert_int_equal(key_statistics_make_samples(statistics, KEY_STATISTICS_MOST_SAMPLES), 0);
        const struct key_statistics_head head = key_statistics_head(statistics, 0, 0);
        for (uint32_t i = 0; i < N; i++) {
            head.q_square[i * N + i] = 1;
            head.k_spread[i * N + i] = i < 4 ? 0.25f : 1e-4f;
        }
        for (uint32_t j = 0; j < statistics->n_samples; j++) {
            float numbers[N] = {0};
            for (uint32_t i = 0; i < 4; i++)
                numbers[i] = (float)((j % 8 / 2 == i ? 1 - 2.0 * (j % 2) : 0) + 0.05 * fixture_normal());
            kernels_get(KERNELS_ISA_PLAIN)->f16_encode(numbers, N, key_statistics_samples(statistics, 0, 0) + j * N);
        }
        assert_int_equal(codec_pair_klt_tables(statistics, 128, &table), 0);
        assert_int_equal(table->layout.n_groups, 1);
        struct key_head it = {N, table};
        _Alignas(64) uint8_t tile[128];
        static double decoded[64 * N];
        static float keys[64 * N];
        float side;
        memset(keys, 0, sizeof keys);
        for (uint32_t j = 0; j < 64; j++)
            keys[j * N + j % 8 / 2] = 1 - 2.0f * (float)(j % 2);
        key_codec_find(POLICY_CODEC_KLT0)->quantize(kernels_get(KERNELS_ISA_PLAIN), &it, keys, tile, &side);
        fixture_pair_decode(table, tile, side, decoded);
        for (uint32_t i = 0; i < 64 * N; i++)
            errors[learnt] += pow((double)keys[i] - decoded[i], 2) / 64;
        free(table);
        key_statistics_free(statistics);
    }
    assert_true(errors[1] < 0.25 * errors[0]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_axes),
        cmocka_unit_test(test_codewords_are_learnt),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
