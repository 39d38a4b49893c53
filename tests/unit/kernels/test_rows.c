/* test_rows.c - conversions of f16, rows of both codecs, sums of a block, exp, CRC-32C, the choice of a table. */
#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "proto/layout.h"
#include "tests/unit/kernels/halves.h"

static_assert((int)KERNELS_ROWS_F16 == (int)ROW_CODEC_F16 && (int)KERNELS_ROWS_Q8_0 == (int)ROW_CODEC_Q8_0,
              "kernels/ repeats the codecs of proto/layout.h");

static const enum kernels_rows codecs[] = {KERNELS_ROWS_F16, KERNELS_ROWS_Q8_0};

static uint32_t word_of(float value)
{
    uint32_t word;
    memcpy(&word, &value, sizeof word);
    return word;
}

/* The compiler's own conversion. */
static float half_value(uint16_t bits)
{
    _Float16 half;
    memcpy(&half, &bits, sizeof half);
    return (float)half;
}

static uint16_t half_bits(float value)
{
    _Float16 half = (_Float16)value;
    uint16_t bits;
    memcpy(&bits, &half, sizeof bits);
    return bits;
}

static void every_half_decodes_and_returns(void **unused)
{
    (void)unused;
    static uint16_t all[65536], back[65536];
    static float values[65536];
    for (uint32_t i = 0; i < 65536; i++)
        all[i] = (uint16_t)i;
    for (const struct kernels *const *table = halves_tables(); *table; table++) {
        (*table)->f16_decode(all, 65536, values);
        (*table)->f16_encode(values, 65536, back);
        for (uint32_t i = 0; i < 65536; i++) {
            float expected = half_value((uint16_t)i);
            if (isnan(expected)) {
                assert_true(isnan(values[i]) && isnan(half_value(back[i])));
            } else {
                assert_int_equal(word_of(values[i]), word_of(expected));
                assert_int_equal(back[i], i);
            }
        }
    }
}

static void encoding_rounds_to_nearest_even(void **unused)
{
    (void)unused;
    for (const struct kernels *const *table = halves_tables(); *table; table++) {
        /* around every half, the midpoint to the next and its neighbours; both signs; then what lies far outside */
        for (uint32_t i = 0; i < 0x7c00; i++) {
            float low = half_value((uint16_t)i);
            float high = i + 1 == 0x7c00 ? 65536.0f : half_value((uint16_t)(i + 1));
            float middle = low + (high - low) / 2;
            float cases[8] = {low, middle, nextafterf(middle, 0), nextafterf(middle, 1e6f)};
            for (int c = 0; c < 4; c++)
                cases[4 + c] = -cases[c];
            uint16_t out[8];
            (*table)->f16_encode(cases, 8, out);
            for (int c = 0; c < 8; c++)
                assert_int_equal(out[c], half_bits(cases[c]));
        }
        const float far[] = {1e-10f, -1e-38f, 1e6f, -3e38f, INFINITY, -INFINITY, 65519.99f, 65520.0f, -0.0f};
        uint16_t out[9];
        (*table)->f16_encode(far, 9, out);
        for (int c = 0; c < 9; c++)
            assert_int_equal(out[c], half_bits(far[c]));
    }
}

static void conversions_of_any_length(void **unused)
{
    (void)unused;
    uint16_t from[41], to[42];
    float values[42];
    for (uint32_t i = 0; i < 41; i++)
        from[i] = half_bits((float)i * 0.37f - 5.0f);
    for (const struct kernels *const *table = halves_tables(); *table; table++) {
        for (uint32_t n = 0; n <= 41; n++) {
            values[n] = 99.0f;
            to[n] = 99;
            (*table)->f16_decode(from, n, values);
            (*table)->f16_encode(values, n, to);
            assert_memory_equal(from, to, n * sizeof *to);
            assert_true(values[n] == 99.0f && to[n] == 99);
        }
    }
}

static void rows_are_as_long_as_the_layout_says(void **unused)
{
    (void)unused;
    for (uint32_t head_dim = 1; head_dim <= KERNELS_MAX_HEAD_DIM; head_dim++) {
        for (int c = 0; c < 2; c++) {
            struct row_shape shape = {.n_layers = 1, .n_kv_heads = 1, .head_dim = head_dim, .codec = codecs[c]};
            assert_int_equal(kernels_row_bytes(head_dim, codecs[c]), layout_row_bytes(&shape));
        }
    }
    assert_int_equal(kernels_row_bytes(64, KERNELS_ROWS_F16), 256);
    assert_int_equal(kernels_row_bytes(64, KERNELS_ROWS_Q8_0), 136);
    assert_int_equal(kernels_row_bytes(20, KERNELS_ROWS_Q8_0), 44);
}

static float random_float(void)
{
    static uint32_t state = 12345;
    state = state * 1664525u + 1013904223u;
    return (float)(int32_t)state * 0x1p-30f;
}

static void f16_rows_are_k_then_v(void **unused)
{
    (void)unused;
    float k[KERNELS_MAX_HEAD_DIM], v[KERNELS_MAX_HEAD_DIM];
    uint16_t row[2 * KERNELS_MAX_HEAD_DIM + 1];
    for (const struct kernels *const *table = halves_tables(); *table; table++) {
        for (uint32_t head_dim = 1; head_dim <= KERNELS_MAX_HEAD_DIM; head_dim += head_dim < 40 ? 1 : 31) {
            for (uint32_t d = 0; d < head_dim; d++) {
                k[d] = random_float();
                v[d] = random_float();
            }
            row[2 * head_dim] = 99;
            (*table)->encode_row(k, v, head_dim, KERNELS_ROWS_F16, row);
            for (uint32_t d = 0; d < head_dim; d++)
                assert_true(row[d] == half_bits(k[d]) && row[head_dim + d] == half_bits(v[d]));
            assert_int_equal(row[2 * head_dim], 99);
        }
    }
}

/* One group by the words of proto/layout.h: scale = largest magnitude / 127 as f16, number = int8 x scale, to nearest. */
static void check_group(const float *numbers, const int8_t *q, uint16_t scale_bits, uint32_t n)
{
    float largest = 0;
    for (uint32_t i = 0; i < n; i++)
        largest = fmaxf(largest, fabsf(numbers[i]));
    assert_int_equal(scale_bits, half_bits(fminf(largest / 127.0f, 65504.0f)));
    const double scale = (double)half_value(scale_bits);
    for (uint32_t i = 0; i < n; i++) {
        assert_true(q[i] >= -127);
        if (scale == 0)
            assert_int_equal(q[i], 0);
        else if (fabs((double)numbers[i]) <= 127 * scale)
            assert_true(fabs(scale * q[i] - (double)numbers[i]) <= 0.5001 * scale);
        else
            assert_int_equal(q[i], numbers[i] > 0 ? 127 : -127);
    }
}

static void q8_0_rows_are_near_and_the_same_in_every_table(void **unused)
{
    (void)unused;
    static const uint32_t dims[] = {1, 2, 8, 20, 31, 32, 33, 64, 72, 80, 96, 128, 255, 256};
    static const float sizes[] = {1.0f, 100.0f, 1e-3f, 1e-6f, 1e-9f, 0.0f, 60000.0f, 1e7f, 1e30f};
    for (size_t h = 0; h < sizeof dims / sizeof *dims; h++) {
        const uint32_t head_dim = dims[h], n_groups = (head_dim + 31) / 32;
        const size_t n_bytes = kernels_row_bytes(head_dim, KERNELS_ROWS_Q8_0);
        for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
            float kv[2][KERNELS_MAX_HEAD_DIM];
            char row[1024], expected[1024];
            for (uint32_t d = 0; d < head_dim; d++) {
                kv[0][d] = random_float() * sizes[s];
                kv[1][d] = random_float() * sizes[(s + d / 32) % (sizeof sizes / sizeof *sizes)];
            }
            for (const struct kernels *const *table = halves_tables(); *table; table++) {
                memset(row, 99, sizeof row);
                (*table)->encode_row(kv[0], kv[1], head_dim, KERNELS_ROWS_Q8_0, row);
                assert_int_equal(row[n_bytes], 99);
                if (table == halves_tables())
                    memcpy(expected, row, n_bytes);
                assert_memory_equal(row, expected, n_bytes);
            }
            for (uint32_t part = 0; part < 2; part++) {
                for (uint32_t g = 0; g < n_groups; g++) {
                    uint16_t bits;
                    memcpy(&bits, row + 2 * head_dim + 2 * (part * n_groups + g), sizeof bits);
                    check_group(kv[part] + 32 * g, (const int8_t *)row + part * head_dim + 32 * g, bits,
                                head_dim - 32 * g < 32 ? head_dim - 32 * g : 32);
                }
            }
        }
    }
}

static void what_is_not_finite_shows_in_its_group(void **unused)
{
    (void)unused;
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    for (const struct kernels *const *table = halves_tables(); *table; table++) {
        for (int b = 0; b < 3; b++) {
            float k[80], keys[80];
            char row[512];
            for (uint32_t d = 0; d < 80; d++)
                k[d] = random_float();
            k[40] = bad[b];
            (*table)->encode_row(k, k, 80, KERNELS_ROWS_Q8_0, row);
            (*table)->decode_keys(row, 1, 80, KERNELS_ROWS_Q8_0, keys);
            for (uint32_t d = 0; d < 80; d++)
                assert_int_equal(isnan(keys[d]), d / 32 == 1);
        }
    }
}

static void keys_decode_alike(void **unused)
{
    (void)unused;
    static char rows[64 * 1024];
    static float keys[64 * KERNELS_MAX_HEAD_DIM + 1], expected[64 * KERNELS_MAX_HEAD_DIM];
    const struct kernels *plain = kernels_get(KERNELS_ISA_PLAIN);
    for (const struct kernels *const *table = halves_tables(); *table; table++) {
        for (uint32_t head_dim = 1; head_dim <= KERNELS_MAX_HEAD_DIM; head_dim += head_dim < 40 ? 1 : 8) {
            for (int c = 0; c < 2; c++) {
                const size_t n_bytes = kernels_row_bytes(head_dim, codecs[c]);
                const uint32_t n_rows = 1 + head_dim % 64;
                for (uint32_t t = 0; t < n_rows; t++) {
                    float k[KERNELS_MAX_HEAD_DIM];
                    for (uint32_t d = 0; d < head_dim; d++)
                        k[d] = random_float();
                    plain->encode_row(k, k, head_dim, codecs[c], rows + t * n_bytes);
                    for (uint32_t d = 0; d < head_dim; d++) {
                        const char *row = rows + t * n_bytes;
                        uint16_t bits;
                        memcpy(&bits, row + (c ? 2 * head_dim + 2 * (d / 32) : 2 * d), sizeof bits);
                        expected[t * head_dim + d] = half_value(bits) * (c ? (float)(signed char)row[d] : 1.0f);
                    }
                }
                keys[n_rows * head_dim] = 99.0f;
                (*table)->decode_keys(rows, n_rows, head_dim, codecs[c], keys);
                assert_memory_equal(keys, expected, n_rows * head_dim * sizeof *keys);
                assert_true(keys[n_rows * head_dim] == 99.0f);
            }
        }
    }
}

static void sums_of_a_block_equal_plain(void **unused)
{
    (void)unused;
    static const uint32_t head_dims[] = {1, 3, 8, 20, 64, 80, 256};
    static char rows[64 * 1024];
    const struct kernels *plain = kernels_get(KERNELS_ISA_PLAIN);
    float kv[2][KERNELS_MAX_HEAD_DIM], expected[512], sums[513];
    for (int c = 0; c < 2; c++) {
        for (size_t h = 0; h < sizeof head_dims / sizeof *head_dims; h++) {
            const uint32_t head_dim = head_dims[h];
            double last[65] = {0}; /* of the first n rows: their last number */
            for (uint32_t t = 0; t < 64; t++) {
                char *row = rows + t * kernels_row_bytes(head_dim, codecs[c]);
                for (uint32_t d = 0; d < 2 * head_dim; d++)
                    kv[d / head_dim][d % head_dim] = random_float();
                plain->encode_row(kv[0], kv[1], head_dim, codecs[c], row);
                last[t + 1] = last[t] + (double)kv[1][head_dim - 1];
            }
            for (const struct kernels *const *table = halves_tables(); *table; table++) {
                for (uint32_t n = 0; n <= 64; n += 16) {
                    plain->block_sums(rows, n, head_dim, codecs[c], expected);
                    sums[2 * head_dim] = 99.0f;
                    (*table)->block_sums(rows, n, head_dim, codecs[c], sums);
                    assert_memory_equal(sums, expected, 2 * head_dim * sizeof *sums);
                    assert_true(sums[2 * head_dim] == 99.0f);
                    assert_true(fabs((double)sums[2 * head_dim - 1] - last[n]) <= n * (c ? 0.009 : 0.001));
                }
            }
        }
    }
}

static void exp_is_right_over_its_range(void **unused)
{
    (void)unused;
    if (!kernels_get(KERNELS_ISA_AVX2))
        skip();
    double worst = 0;
    float x[16], y[16];
    for (double at = -87.33; at < 88.72; at += 0.0016) {
        for (int i = 0; i < 16; i++)
            x[i] = (float)(at + 0.0001 * i);
        halves_exp(x, y);
        for (int i = 0; i < 16; i++) {
            double expected = exp((double)x[i]);
            double ulp = ldexp(1.0, ilogb(expected) - 23);
            worst = fmax(worst, fabs((double)y[i] - expected) / ulp);
        }
    }
    assert_true(worst < 1.5);
    const float edges[16] = {0.0f,  -0.0f,  -INFINITY, INFINITY, NAN,     -88.0f, 89.0f,   -1e30f,
                             1e30f, -3e38f, 3e38f,     1e-40f,   -87.34f, 88.73f, -103.0f, 88.7228317f};
    halves_exp(edges, y);
    for (int i = 0; i < 16; i++) {
        float expected = expf(edges[i]);
        if (isnan(expected))
            assert_true(isnan(y[i]));
        else if (expected < 0x1p-126f)
            assert_true(y[i] == 0.0f && !signbit(y[i]));
        else
            assert_true(y[i] == expected || fabsf(y[i] / expected - 1.0f) < 2e-7f);
    }
    assert_true(y[0] == 1.0f);
}

static void crc32c(void **unused)
{
    (void)unused;
    assert_int_equal(kernels_crc32c(0, "123456789", 9), 0xe3069283u);
    assert_int_equal(kernels_crc32c(0, "", 0), 0);
    uint8_t bytes[100];
    for (uint32_t i = 0; i < 100; i++)
        bytes[i] = (uint8_t)(i * 37 + 11);
    for (size_t n = 0; n <= 100; n++) {
        uint32_t expected = ~0u; /* bit by bit */
        for (size_t i = 0; i < n; i++) {
            expected ^= bytes[i];
            for (int bit = 0; bit < 8; bit++)
                expected = expected >> 1 ^ (expected & 1 ? 0x82f63b78u : 0);
        }
        assert_int_equal(kernels_crc32c(0, bytes, n), ~expected);
        for (size_t cut = 0; cut <= n; cut += 9)
            assert_int_equal(kernels_crc32c(kernels_crc32c(0, bytes, cut), bytes + cut, n - cut), ~expected);
    }
}

static void tables_are_chosen_by_name(void **unused)
{
    (void)unused;
    enum kernels_isa isa = KERNELS_N_ISA;
    assert_int_equal(kernels_isa_parse("avx2", &isa), 0);
    assert_int_equal(isa, KERNELS_ISA_AVX2);
    assert_int_equal(kernels_isa_parse("auto", &isa), 0);
    assert_int_equal(isa, KERNELS_ISA_AUTO);
    assert_int_equal(kernels_isa_parse("AVX2", &isa), -EINVAL);
    assert_int_equal(kernels_isa_parse("", &isa), -EINVAL);
    assert_int_equal(isa, KERNELS_ISA_AUTO);
    assert_non_null(kernels_get(KERNELS_ISA_PLAIN));
    assert_string_equal(kernels_get(KERNELS_ISA_PLAIN)->name, "plain");
    const struct kernels *best = kernels_get(KERNELS_ISA_AUTO);
    assert_non_null(best);
    assert_ptr_equal(best, kernels_get(best->isa));
    for (int other = 0; other < KERNELS_N_ISA; other++)
        if (kernels_get((enum kernels_isa)other))
            assert_true(other == KERNELS_ISA_AUTO || (int)kernels_get((enum kernels_isa)other)->isa == other);
    assert_null(kernels_get(KERNELS_N_ISA));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_half_decodes_and_returns),
        cmocka_unit_test(encoding_rounds_to_nearest_even),
        cmocka_unit_test(conversions_of_any_length),
        cmocka_unit_test(rows_are_as_long_as_the_layout_says),
        cmocka_unit_test(f16_rows_are_k_then_v),
        cmocka_unit_test(q8_0_rows_are_near_and_the_same_in_every_table),
        cmocka_unit_test(what_is_not_finite_shows_in_its_group),
        cmocka_unit_test(keys_decode_alike),
        cmocka_unit_test(sums_of_a_block_equal_plain),
        cmocka_unit_test(exp_is_right_over_its_range),
        cmocka_unit_test(crc32c),
        cmocka_unit_test(tables_are_chosen_by_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
