/*
 * test_pq.c - product-quantized keys: the search is that of a loop over all centroids, tiles hold its numbers, scores are those of
 * the centroids they name, and every instruction set gives the same bits.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "gpu-worker/keys/key_codebook.h"
#include "gpu-worker/keys/codec_pq.h"
#include "kernels/half.h"
#include "tests/unit/keys/fixture.h"
#include "tests/unit/keys/halves_pq.h"

#define N_TILES     3u
#define MAX_QUERIES 9u
#define STRIDE      (N_TILES * 64 + 8)

static const uint8_t hash[16] = {1, 2, 3};

struct shape {
    uint32_t head_dim, n_dims, n_centroids;
};
#ifdef HCATTN_SANITIZED
static const struct shape shapes[] = {{2, 2, 256}, {20, 4, 512}, {16, 8, 1024}, {0, 0, 0}};
#else
static const struct shape shapes[] = {{2, 2, 256},  {64, 2, 4096},  {64, 4, 2048},  {64, 8, 4096},
                                      {20, 2, 512}, {20, 4, 1024},  {8, 8, 256},    {24, 8, 512},
                                      {6, 2, 2048}, {256, 8, 1024}, {128, 4, 4096}, {0, 0, 0}};
#endif

/* Those that this machine can run, plain first; ends with NULL. */
static const struct pq_kernels *const *tables(void)
{
    static const struct pq_kernels *list[5];
    int n = 0;
    list[n++] = &codec_pq_plain;
    if (kernels_get(KERNELS_ISA_AVX2)) {
        list[n++] = &codec_pq_avx2;
        list[n++] = &halves_pq;
    }
    if (kernels_get(KERNELS_ISA_AVX512))
        list[n++] = &codec_pq_avx512;
    list[n] = NULL;
    return list;
}

static struct key_codebook *codebook;
static struct pq_table *table;
static struct key_head head;

static void set_up(struct shape shape, double size)
{
    const struct row_shape rows = {.n_layers = 1, .n_kv_heads = 2, .head_dim = shape.head_dim, .codec = ROW_CODEC_F16};
    assert_int_equal(key_codebook_new(&rows, hash, shape.n_dims, shape.n_centroids, &codebook), 0);
    fixture_seed(shape.head_dim * 7 + shape.n_dims + shape.n_centroids);
    fixture_normals(codebook->centroids, (size_t)2 * shape.head_dim * shape.n_centroids, size);
    assert_int_equal(codec_pq_table_new(codebook, 0, 1, &table), 0);
    head = (struct key_head){.head_dim = shape.head_dim, .table = table};
}

static void tear_down(void)
{
    table = codec_pq_table_free(table);
    codebook = key_codebook_free(codebook);
}

static const struct key_codec *codec(void)
{
    return key_codec_find(POLICY_CODEC_PQ);
}

static void *exactly(size_t n_bytes)
{
    void *memory = aligned_alloc(64, n_bytes);
    assert_non_null(memory);
    return memory;
}

static float distance_of(const struct pq_space *space, const float *x, uint32_t number)
{
    float squares[PQ_MAX_DIMS];
    for (uint32_t i = 0; i < space->n_dims; i++) {
        const float difference = x[i] - half_decode(space->centroids[(size_t)number * space->n_dims + i]);
        squares[i] = difference * difference;
    }
    for (uint32_t n = space->n_dims / 2; n > 0; n /= 2)
        for (uint32_t i = 0; i < n; i++)
            squares[i] = squares[2 * i] + squares[2 * i + 1];
    return squares[0];
}

static uint32_t nearest_of(const struct pq_space *space, const float *x)
{
    uint32_t best = 0;
    for (uint32_t i = 1; i < space->n_centroids; i++)
        if (distance_of(space, x, i) < distance_of(space, x, best))
            best = i;
    return best;
}

static void check_search(const struct pq_space *space, const float *x, uint32_t n)
{
    uint16_t numbers[256];
    float distances[256];
    for (const struct pq_kernels *const *pq = tables(); *pq; pq++) {
        memset(numbers, 0xff, sizeof numbers);
        (*pq)->nearest(space, x, n, numbers, distances);
        for (uint32_t j = 0; j < n; j++) {
            const float *one = x + (size_t)j * space->n_dims;
            assert_int_equal(numbers[j], nearest_of(space, one));
            assert_true(distances[j] == distance_of(space, one, numbers[j]));
        }
        uint16_t again[256];
        (*pq)->nearest(space, x, n, again, NULL);
        assert_memory_equal(again, numbers, n * sizeof *numbers);
    }
}

static void test_search_is_exact(void **unused)
{
    (void)unused;
    float x[100 * PQ_MAX_DIMS];
    for (const struct shape *shape = shapes; shape->head_dim; shape++) {
        set_up(*shape, 3.0);
        const struct pq_space space = pq_table_space(table, table->n_spaces - 1);
        fixture_normals(x, 100 * shape->n_dims, 3.0);
        for (uint32_t i = 0; i < 10 * shape->n_dims; i++)
            x[i] *= 1000; /* outside of all boxes */
        for (uint32_t i = 0; i < 5 * shape->n_dims; i++)
            x[10 * shape->n_dims + i] = half_decode(space.centroids[i]); /* on a centroid */
        check_search(&space, x, 100);
        tear_down();
    }
}

/* Centroids on a lattice, each several times: many are equally near. */
static void test_ties_go_to_the_lowest(void **unused)
{
    (void)unused;
    for (uint32_t n_dims = 2; n_dims <= 8; n_dims *= 2) {
        const uint32_t n = 1024;
        float centroids[1024 * 8], x[60 * 8];
        uint16_t order[1024], halves[1024 * 8];
        fixture_seed(n_dims);
        for (uint32_t i = 0; i < n * n_dims; i++)
            centroids[i] = (float)(int)(fixture_uniform() * 3);
        for (uint32_t i = 0; i < 60 * n_dims; i++)
            x[i] = (float)(int)(fixture_uniform() * 8) / 2;
        float *boxes = exactly((pq_box_floats(n_dims, n) * sizeof(float) + 63) / 64 * 64);
        codec_pq_sort(n_dims, n, centroids, order);
        codec_pq_fill(n_dims, n, centroids, order, halves, boxes);
        const struct pq_space space = {n_dims, n, halves, boxes};
        check_search(&space, x, 60);
        /* one value everywhere: the first */
        for (uint32_t i = 0; i < n * n_dims; i++)
            centroids[i] = 1.5f;
        codec_pq_fill(n_dims, n, centroids, order, halves, boxes);
        check_search(&space, x, 60);
        free(boxes);
    }
}

static void test_an_order_is_a_permutation_in_leaves(void **unused)
{
    (void)unused;
    for (uint32_t n = 256; n <= 4096; n *= 2) {
        static float centroids[4096 * 4];
        static uint16_t order[4096], again[4096];
        static uint8_t seen[4096];
        fixture_seed(n);
        fixture_normals(centroids, (size_t)n * 4, 1.0);
        for (uint32_t i = 0; i < n; i++)
            centroids[(size_t)4 * i + 2] *= 1000; /* the widest: the tree's root cuts it */
        codec_pq_sort(4, n, centroids, order);
        codec_pq_sort(4, n, centroids, again);
        assert_memory_equal(order, again, n * sizeof *order);
        memset(seen, 0, sizeof seen);
        float lower = -INFINITY, upper = INFINITY;
        for (uint32_t i = 0; i < n; i++) {
            const float x = centroids[(size_t)4 * order[i] + 2];
            assert_false(seen[order[i]]++);
            if (i % pq_leaf(n))
                assert_true(order[i] > order[i - 1]);
            lower = i < n / 2 && x > lower ? x : lower;
            upper = i >= n / 2 && x < upper ? x : upper;
        }
        assert_true(lower <= upper);
    }
}

static uint32_t number_at(const uint8_t *packed, uint32_t bits, uint32_t key)
{
    uint32_t number = packed[(bits - 8) * 8 + key];
    for (uint32_t i = 8; i < bits; i++) {
        const uint32_t bit = key * (bits - 8) + i - 8;
        number += (uint32_t)(packed[bit / 8] >> bit % 8 & 1) << i;
    }
    return number;
}

/* What the tile says of key j. */
static void decode(const uint8_t *tile, uint32_t j, double *key)
{
    const uint32_t bits = pq_bits(table->n_centroids);
    for (uint32_t s = 0; s < table->n_spaces; s++) {
        const uint32_t number = number_at(tile + (size_t)s * 8 * bits, bits, j);
        for (uint32_t i = 0; i < table->n_dims; i++)
            key[s * table->n_dims + i] = half_decode(pq_table_space(table, s).centroids[number * table->n_dims + i]);
    }
}

static void test_tiles_and_scores(void **unused)
{
    (void)unused;
    for (const struct shape *shape = shapes; shape->head_dim; shape++) {
        set_up(*shape, 2.0);
        const uint32_t d = shape->head_dim, bits = pq_bits(shape->n_centroids);
        const size_t tile_bytes = codec()->tile_bytes(&head);
        const struct kernels *plain = kernels_get(KERNELS_ISA_PLAIN);
        assert_int_equal(tile_bytes % 64, 0);
        assert_true(tile_bytes >= (size_t)d / shape->n_dims * 8 * bits);
        assert_true(tile_bytes < (size_t)d / shape->n_dims * 8 * bits + 64);
        static float keys[N_TILES * 64 * KERNELS_MAX_HEAD_DIM], q[MAX_QUERIES * KERNELS_MAX_HEAD_DIM];
        static float scores[MAX_QUERIES * STRIDE], expected[MAX_QUERIES * STRIDE];
        uint8_t *tiles = exactly(N_TILES * tile_bytes);
        void *query = exactly(codec()->query_bytes(&head, MAX_QUERIES));
        fixture_normals(keys, (size_t)N_TILES * 64 * d, 2.0);
        fixture_normals(q, (size_t)MAX_QUERIES * d, 2.0);
        for (uint32_t t = 0; t < N_TILES; t++) {
            float side = -1;
            codec()->quantize(plain, &head, keys + (size_t)t * 64 * d, tiles + t * tile_bytes, &side);
            assert_true(side == 0);
        }
        codec()->prepare(plain, &head, q, MAX_QUERIES, 0.125f, query);
        for (uint32_t j = 0; j < N_TILES * 64; j++) { /* numbers */
            const uint8_t *tile = tiles + j / 64 * tile_bytes;
            for (uint32_t s = 0; s < table->n_spaces; s += 5) {
                const struct pq_space space = pq_table_space(table, s);
                assert_int_equal(number_at(tile + (size_t)s * 8 * bits, bits, j % 64),
                                 nearest_of(&space, keys + (size_t)j * d + s * shape->n_dims));
            }
        }
        codec_pq_plain.score(table, query, MAX_QUERIES, tiles, N_TILES, expected, STRIDE);
        for (uint32_t j = 0; j < N_TILES * 64; j++) { /* against double */
            double key[KERNELS_MAX_HEAD_DIM];
            decode(tiles + j / 64 * tile_bytes, j % 64, key);
            for (uint32_t n = 0; n < MAX_QUERIES; n++) {
                double sum = 0, size = 0;
                for (uint32_t i = 0; i < d; i++) {
                    sum += 0.125 * q[n * d + i] * key[i];
                    size += fabs(0.125 * q[n * d + i] * key[i]);
                }
                assert_true(fabs(expected[n * STRIDE + j] - sum) <= 1e-6 * size + 1e-12);
            }
        }
        for (uint32_t n = 1; n <= MAX_QUERIES; n++) /* every table, nothing written past the rows */
            for (const struct pq_kernels *const *pq = tables(); *pq; pq++) {
                memset(scores, 0x77, sizeof scores);
                (*pq)->score(table, query, n, tiles, N_TILES, scores, STRIDE);
                for (uint32_t i = 0; i < n; i++) {
                    assert_memory_equal(scores + i * STRIDE, expected + i * STRIDE, N_TILES * 64 * sizeof(float));
                    for (uint32_t j = N_TILES * 64; j < STRIDE; j++)
                        assert_memory_equal(scores + i * STRIDE + j, "\x77\x77\x77\x77", 4);
                }
                if (n < MAX_QUERIES)
                    assert_memory_equal(scores + n * STRIDE, "\x77\x77\x77\x77", 4);
            }
        free(tiles);
        free(query);
        tear_down();
    }
}

static void test_alone_and_together(void **unused)
{
    (void)unused;
    const struct shape shape = {20, 4, 512};
    set_up(shape, 1.0);
    const size_t tile_bytes = codec()->tile_bytes(&head);
    static float keys[64 * 20], q[MAX_QUERIES * 20], together[MAX_QUERIES * STRIDE], alone[64];
    uint8_t *tiles = exactly(N_TILES * tile_bytes);
    void *query = exactly(codec()->query_bytes(&head, MAX_QUERIES)), *one = exactly(codec()->query_bytes(&head, 1));
    const enum kernels_isa sets[] = {KERNELS_ISA_PLAIN, KERNELS_ISA_AVX2, KERNELS_ISA_AVX512};
    for (size_t s = 0; s < sizeof sets / sizeof *sets; s++) {
        const struct kernels *kernels = kernels_get(sets[s]);
        float side;
        if (!kernels)
            continue;
        for (uint32_t t = 0; t < N_TILES; t++) {
            fixture_normals(keys, 64 * 20, 1.0);
            codec()->quantize(kernels, &head, keys, tiles + t * tile_bytes, &side);
        }
        fixture_normals(q, MAX_QUERIES * 20, 1.0);
        codec()->prepare(kernels, &head, q, MAX_QUERIES, 0.3f, query);
        codec()->score(kernels, &head, query, MAX_QUERIES, tiles, &side, N_TILES, together, STRIDE);
        for (uint32_t n = 0; n < MAX_QUERIES; n++) {
            codec()->prepare(kernels, &head, q + (size_t)n * 20, 1, 0.3f, one);
            for (uint32_t t = 0; t < N_TILES; t++) {
                codec()->score(kernels, &head, one, 1, tiles + t * tile_bytes, &side, 1, alone, 64);
                assert_memory_equal(alone, together + n * STRIDE + t * 64, sizeof alone);
            }
        }
    }
    free(tiles);
    free(query);
    free(one);
    tear_down();
}

/* NaN, infinities, denormals and numbers that no row holds: bytes and scores are the same everywhere, and finite. */
static void test_broken_numbers(void **unused)
{
    (void)unused;
    static const float broken[] = {NAN,   INFINITY, -INFINITY, 1e-40f, -1e-40f, 1e-30f, 0x1p-41f,
                                   1e38f, -1e38f,   65504.0f,  -0.0f,  0.0f,    3.0f};
    const struct shape shape = {16, 2, 256};
    for (int flushed = 0; flushed < 2; flushed++) {
        static uint8_t kept[4096];
        set_up(shape, flushed ? 1.0 : 1.0);
        const size_t tile_bytes = codec()->tile_bytes(&head);
        float keys[64 * 16], q[2 * 16], scores[2 * 64];
        uint8_t *tile = exactly(tile_bytes);
        void *query = exactly(codec()->query_bytes(&head, 2));
        for (uint32_t i = 0; i < 64 * 16; i++)
            keys[i] = broken[i * 7 % 13];
        for (uint32_t i = 0; i < 32; i++)
            q[i] = broken[i * 5 % 13];
        for (enum kernels_isa isa = KERNELS_ISA_PLAIN; isa < KERNELS_N_ISA; isa++) {
            const struct kernels *kernels = kernels_get(isa);
            float side;
            if (!kernels)
                continue;
            codec()->quantize(kernels, &head, keys, tile, &side);
            if (!flushed && isa == KERNELS_ISA_PLAIN)
                memcpy(kept, tile, tile_bytes);
            assert_memory_equal(tile, kept, tile_bytes);
            codec()->prepare(kernels, &head, q, 2, 0.25f, query);
            codec()->score(kernels, &head, query, 2, tile, &side, 1, scores, 64);
            for (uint32_t i = 0; i < 2 * 64; i++)
                assert_true(isfinite(scores[i]));
        }
        free(tile);
        free(query);
        tear_down();
        kernels_thread_setup(); /* flushes denormals from now on */
    }
}

/* The published shapes: 12 bits for each 2 or 4 dimensions of a key; f16 K and V are 64 bits for 2 dimensions of both. */
static void test_sizes(void **unused)
{
    (void)unused;
    for (uint32_t n_dims = 2; n_dims <= 8; n_dims *= 2) {
        const struct shape shape = {64, n_dims, 4096};
        set_up(shape, 1.0);
        const double share = (double)codec()->tile_bytes(&head) / (64 * 64 * 4);
        assert_true(share == 0.1875 * 2 / n_dims);
        assert_int_equal(table->n_bytes, (size_t)64 * 4096 * 2 + (size_t)64 / n_dims * pq_box_floats(n_dims, 4096) * 4);
        tear_down();
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_search_is_exact),
        cmocka_unit_test(test_ties_go_to_the_lowest),
        cmocka_unit_test(test_an_order_is_a_permutation_in_leaves),
        cmocka_unit_test(test_tiles_and_scores),
        cmocka_unit_test(test_alone_and_together),
        cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_broken_numbers), /* last: it changes the thread's treatment of denormals */
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
