/*
 * test_tables.c - every instruction set gives the bits of the plain table, and a score's bits do not depend on the other
 * queries and tiles of the call, nor a tile's bytes on how the thread treats denormal numbers.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/unit/keys/fixture.h"

#define N_TILES     3u
#define MAX_QUERIES 9u
#define STRIDE      (N_TILES * 64 + 8)

static float keys[64 * KERNELS_MAX_HEAD_DIM];
static float q[MAX_QUERIES * KERNELS_MAX_HEAD_DIM];
static float sides[N_TILES], expected[MAX_QUERIES * STRIDE], scores[MAX_QUERIES * STRIDE];
static uint8_t *tiles, *query; /* exactly as large as promised, so that a sanitizer sees a read past the end */
static size_t tile_bytes;

static void *exactly(size_t n_bytes)
{
    void *memory = aligned_alloc(64, n_bytes);
    assert_non_null(memory);
    return memory;
}

static void set_up(uint32_t bits, uint32_t head_dim, double size)
{
    const struct key_codec *codec = fixture_rot(bits);
    fixture_seed(bits * 1000 + head_dim);
    tile_bytes = codec->tile_bytes(fixture_head(head_dim));
    tiles = exactly(N_TILES * tile_bytes);
    query = exactly(codec->query_bytes(fixture_head(head_dim), MAX_QUERIES));
    for (uint32_t t = 0; t < N_TILES; t++) {
        fixture_normals(keys, 64 * head_dim, size);
        for (uint32_t j = 0; j < 64; j++)
            keys[j * head_dim] += (float)(3 * size);
        for (uint32_t i = 0; i < head_dim && t == 1;
             i++) /* a scale of 0 among others: key 5 is the decoded mean, nearly */
            keys[5 * head_dim + i] = 0;
        codec->quantize(kernels_get(KERNELS_ISA_PLAIN), fixture_head(head_dim), keys, tiles + t * tile_bytes,
                        &sides[t]);
        if (t == 1)
            tiles[t * tile_bytes + rot_scales_offset(bits, rot_groups(head_dim)) + 5] = 0;
    }
    fixture_normals(q, MAX_QUERIES * head_dim, 2.0);
    for (uint32_t i = 0; i < head_dim; i++) /* one that uses the whole range of its integers */
        q[head_dim + i] = i % 2 ? 1.0f : -1.0f;
    codec->prepare(kernels_get(KERNELS_ISA_PLAIN), fixture_head(head_dim), q, MAX_QUERIES, 0.125f, query);
}

static void tear_down(void)
{
    free(tiles);
    free(query);
}

static void test_tables_agree(void **unused)
{
    (void)unused;
    for (const uint32_t *d = fixture_head_dims; *d; d++)
        for (uint32_t bits = 2; bits <= 4; bits++) {
            set_up(bits, *d, 1.0);
            for (uint32_t n = 1; n <= MAX_QUERIES; n++) {
                for (const struct fixture_table *table = fixture_tables(); table->name; table++) {
                    const int first = table->rot == &codec_rot_plain;
                    memset(first ? expected : scores, 0x77, sizeof scores);
                    table->rot->score[bits](query, n, *d, tiles, sides, N_TILES, first ? expected : scores, STRIDE);
                    if (!first)
                        assert_memory_equal(scores, expected, sizeof scores); /* what lies between rows, too */
                }
            }
            tear_down();
        }
}

/* The largest sums there can be: all codes at the top and all integers at +-127. */
static void test_nothing_saturates(void **unused)
{
    (void)unused;
    for (const uint32_t *d = fixture_head_dims; *d; d++)
        for (uint32_t bits = 2; bits <= 4; bits++) {
            set_up(bits, *d, 1.0);
            const size_t query_bytes = rot_query_bytes(rot_groups(*d));
            for (uint32_t n = 0; n < MAX_QUERIES; n++) {
                uint8_t *integers = (uint8_t *)(uintptr_t)rot_query_integers(query + n * query_bytes, rot_groups(*d));
                memset(integers, n % 2 ? 0x81 : 0x7f, (size_t)4 * rot_groups(*d) * ROT_QUERY_LANES);
            }
            for (uint32_t t = 0; t < N_TILES; t++)
                memset(tiles + t * tile_bytes, 0xff, rot_scales_offset(bits, rot_groups(*d)));
            for (const struct fixture_table *table = fixture_tables(); table->name; table++) {
                float *to = table->rot == &codec_rot_plain ? expected : scores;
                table->rot->score[bits](query, MAX_QUERIES, *d, tiles, sides, N_TILES, to, STRIDE);
                for (uint32_t n = 0; n < MAX_QUERIES; n++)
                    assert_memory_equal(to + n * STRIDE, expected + n * STRIDE, N_TILES * 64 * sizeof(float));
            }
            tear_down();
        }
}

static void test_alone_and_together(void **unused)
{
    (void)unused;
    const enum kernels_isa sets[] = {KERNELS_ISA_PLAIN, KERNELS_ISA_AVX2, KERNELS_ISA_AVX512};
    for (size_t s = 0; s < sizeof sets / sizeof *sets; s++) {
        const struct kernels *kernels = kernels_get(sets[s]);
        for (const uint32_t *d = fixture_head_dims; kernels && *d; d++)
            for (uint32_t bits = 2; bits <= 4; bits++) {
                const struct key_codec *codec = fixture_rot(bits);
                set_up(bits, *d, 1.0);
                codec->score(kernels, fixture_head(*d), query, MAX_QUERIES, tiles, sides, N_TILES, expected, STRIDE);
                uint8_t *one = exactly(codec->query_bytes(fixture_head(*d), 1));
                for (uint32_t n = 0; n < MAX_QUERIES; n++) {
                    codec->prepare(kernels, fixture_head(*d), q + n * *d, 1, 0.125f, one);
                    for (uint32_t t = 0; t < N_TILES; t++) {
                        codec->score(kernels, fixture_head(*d), one, 1, tiles + t * tile_bytes, sides + t, 1, scores,
                                     64);
                        assert_memory_equal(scores, expected + n * STRIDE + t * 64, 64 * sizeof(float));
                    }
                }
                free(one);
                tear_down();
            }
    }
}

/* Every table of kernels quantizes and prepares to the same bytes, before and after denormals are flushed. */
static void test_bytes_are_the_same_everywhere(void **unused)
{
    (void)unused;
    static const double sizes[] = {1.0, 0x1p-24, 0x1p-100, 1e-39, 60000};
    static _Alignas(64) uint8_t first[FIXTURE_MAX_TILE], again[FIXTURE_MAX_TILE];
    for (int flushed = 0; flushed < 2; flushed++) {
        for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
            for (uint32_t bits = 2; bits <= 4; bits++) {
                const struct key_codec *codec = fixture_rot(bits);
                static uint8_t kept[5][8][FIXTURE_MAX_TILE / 8];
                float first_side = -1, side = -1;
                const uint32_t n = 64;
                fixture_seed(s);
                fixture_normals(keys, 64 * n, sizes[s]);
                codec->quantize(kernels_get(KERNELS_ISA_PLAIN), fixture_head(n), keys, first, &first_side);
                codec->quantize(kernels_get(KERNELS_ISA_AUTO), fixture_head(n), keys, again, &side);
                assert_memory_equal(first, again, codec->tile_bytes(fixture_head(n)));
                assert_memory_equal(&first_side, &side, sizeof side);
                assert_true(codec->tile_bytes(fixture_head(n)) + sizeof side <= sizeof kept[bits][s]);
                memcpy(first + codec->tile_bytes(fixture_head(n)), &side, sizeof side);
                if (!flushed)
                    memcpy(kept[bits][s], first, codec->tile_bytes(fixture_head(n)) + sizeof side);
                assert_memory_equal(kept[bits][s], first, codec->tile_bytes(fixture_head(n)) + sizeof side);
            }
        kernels_thread_setup();
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(
            test_bytes_are_the_same_everywhere), /* first: it changes the thread's treatment of denormals */
        cmocka_unit_test(test_tables_agree),
        cmocka_unit_test(test_nothing_saturates),
        cmocka_unit_test(test_alone_and_together),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
