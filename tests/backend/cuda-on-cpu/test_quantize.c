/*
 * test_quantize.c - tiles of sealed blocks, their sides and prepared queries as the device makes them: the bytes of the CPU, for
 * every codec, odd shapes, and keys and queries as no model should have them.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "gpu-worker/backend/cuda/cuda_keys.h"
#include "tests/backend/cuda-on-cpu/device.h"
#include "tests/backend/cuda-on-cpu/keys.h"

#define N_QUERIES 3u

static float keys[KEYS_N_KINDS][64 * KERNELS_MAX_HEAD_DIM], q[KEYS_N_KINDS][N_QUERIES * KERNELS_MAX_HEAD_DIM];

static uint32_t rot_bits(const struct keys_case *it) /* 0: another codec */
{
    return it->codec == POLICY_CODEC_ROT4   ? 4
           : it->codec == POLICY_CODEC_ROT3 ? 3
           : it->codec == POLICY_CODEC_ROT2 ? 2
                                            : 0;
}

static void compare(const char *what, const struct keys_case *it, uint32_t kind, const uint8_t *got,
                    const uint8_t *expected, size_t n_bytes)
{
    for (size_t i = 0; i < n_bytes; i++)
        if (got[i] != expected[i])
            fail_msg("%s of %s, %u dimensions, kind %u: byte %zu of %zu is %02x, not %02x", what,
                     key_codec_find(it->codec)->name, it->head_dim, kind, i, n_bytes, got[i], expected[i]);
}

static cudaError_t quantize(const struct cuda_queue *queue, const struct keys_case *it,
                            const struct cuda_key_block *blocks)
{
    if (it->codec == POLICY_CODEC_PQ)
        return cuda_quantize_pq(queue, it->n_dims, it->n_centroids, it->head_dim, blocks, KEYS_N_KINDS);
    if (it->codec == POLICY_CODEC_F16)
        return cuda_quantize_f16(queue, it->head_dim, blocks, KEYS_N_KINDS);
    return rot_bits(it) ? cuda_quantize_rot(queue, rot_bits(it), it->head_dim, blocks, KEYS_N_KINDS)
                        : cuda_quantize_pair(queue, it->head_dim, blocks, KEYS_N_KINDS);
}

static cudaError_t prepare(const struct cuda_queue *queue, const struct keys_case *it,
                           const struct cuda_key_query *queries)
{
    if (it->codec == POLICY_CODEC_PQ)
        return cuda_prepare_pq(queue, it->head_dim, N_QUERIES, 0.125f, queries, KEYS_N_KINDS);
    if (it->codec == POLICY_CODEC_F16)
        return cuda_prepare_f16(queue, it->head_dim, N_QUERIES, 0.125f, queries, KEYS_N_KINDS);
    return rot_bits(it) ? cuda_prepare_rot(queue, rot_bits(it), it->head_dim, N_QUERIES, 0.125f, queries, KEYS_N_KINDS)
                        : cuda_prepare_pair(queue, N_QUERIES, 0.125f, queries, KEYS_N_KINDS);
}

/* All kinds of blocks in one call. */
static void check_blocks(const struct keys_case *it, const struct key_head *head, struct cuda_pair_table *table,
                         const uint16_t *centroids, int order)
{
    const struct key_codec *codec = key_codec_find(it->codec);
    const struct device_run run = device_run(order);
    const size_t tile_bytes = codec->tile_bytes(head), key_bytes = (size_t)64 * it->head_dim * sizeof(float);
    uint8_t *tile = keys_memory(tile_bytes), *got = keys_memory(tile_bytes);
    struct cuda_key_block blocks[KEYS_N_KINDS];
    for (uint32_t kind = 0; kind < KEYS_N_KINDS; kind++) {
        keys_fill(keys[kind], 64, it->head_dim, kind);
        blocks[kind] = (struct cuda_key_block){.keys = device_new(keys[kind], key_bytes),
                                               .tile = device_new(NULL, tile_bytes),
                                               .side = device_new(NULL, sizeof(float)),
                                               .table = table,
                                               .centroids = centroids,
                                               .work = device_new(NULL, key_bytes)};
    }
    struct cuda_key_block *there = device_new(blocks, sizeof blocks);
    assert_int_equal(quantize(&run.queue, it, there), cudaSuccess);
    for (uint32_t kind = 0; kind < KEYS_N_KINDS; kind++) {
        float side, got_side;
        codec->quantize(kernels_get(KERNELS_ISA_PLAIN), head, keys[kind], tile, &side);
        device_read(got, blocks[kind].tile, tile_bytes);
        device_read(&got_side, blocks[kind].side, sizeof got_side);
        compare("tile", it, kind, got, tile, tile_bytes);
        compare("side", it, kind, (uint8_t *)&got_side, (uint8_t *)&side, sizeof side);
        device_free((void *)(uintptr_t)blocks[kind].keys);
        device_free(blocks[kind].tile);
        device_free(blocks[kind].side);
        device_free(blocks[kind].work);
    }
    device_free(there);
    free(tile);
    free(got);
}

/* Each kind of queries is of a head of its own. */
static void check_queries(const struct keys_case *it, const struct key_head *head, struct cuda_pair_table *table,
                          int order)
{
    const struct key_codec *codec = key_codec_find(it->codec);
    const struct device_run run = device_run(order);
    const size_t query_bytes = it->codec == POLICY_CODEC_PQ /* what follows is not written */
                                   ? (size_t)N_QUERIES * it->head_dim * sizeof(float)
                                   : codec->query_bytes(head, N_QUERIES);
    uint8_t *query = keys_memory(query_bytes), *got = keys_memory(query_bytes);
    struct cuda_key_query queries[KEYS_N_KINDS];
    for (uint32_t kind = 0; kind < KEYS_N_KINDS; kind++) {
        keys_fill(q[kind], N_QUERIES, it->head_dim, kind);
        queries[kind] =
            (struct cuda_key_query){.q = device_new(q[kind], (size_t)N_QUERIES * it->head_dim * sizeof(float)),
                                    .query = device_new(NULL, query_bytes),
                                    .table = table};
    }
    struct cuda_key_query *there = device_new(queries, sizeof queries);
    assert_int_equal(prepare(&run.queue, it, there), cudaSuccess);
    for (uint32_t kind = 0; kind < KEYS_N_KINDS; kind++) {
        codec->prepare(kernels_get(KERNELS_ISA_PLAIN), head, q[kind], N_QUERIES, 0.125f, query);
        device_read(got, queries[kind].query, query_bytes);
        compare("query", it, kind, got, query, query_bytes);
        device_free((void *)(uintptr_t)queries[kind].q);
        device_free(queries[kind].query);
    }
    device_free(there);
    free(query);
    free(got);
}

static void bytes_are_those_of_the_cpu(void **state)
{
    (void)state;
    struct keys_case it;
    for (size_t i = 0; keys_case(i, &it); i++) {
        const struct key_head head = keys_head(&it);
        struct cuda_pair_table *table = NULL;
        uint16_t *centroids = NULL;
        if (it.codec == POLICY_CODEC_PQ) {
            centroids = device_new(((const struct pq_table *)head.table)->centroids,
                                   (size_t)it.head_dim * it.n_centroids * sizeof *centroids);
        } else if (head.table != NULL) {
            table = device_new(NULL, cuda_prepare_pair_table_bytes(head.table));
            assert_int_equal(cuda_prepare_pair_table(&(struct cuda_queue){0}, head.table, table), cudaSuccess);
        }
        for (int order = (int)(i % 2); order < DEVICE_N_RUNS; order += 2) {
            check_blocks(&it, &head, table, centroids, order);
            check_queries(&it, &head, table, order);
        }
        device_free(table);
        device_free(centroids);
        keys_head_free(&it, head);
    }
}

static void check_rows(enum kernels_rows codec, uint32_t head_dim, bool only_keys, int order)
{
    const struct kernels *plain = kernels_get(KERNELS_ISA_PLAIN);
    const struct device_run run = device_run(order);
    const size_t row_bytes = kernels_row_bytes(head_dim, codec), n = (size_t)64 * head_dim;
    const uint32_t n_groups = (head_dim + 31) / 32;
    struct cuda_key_rows there = {.row_bytes = row_bytes, .codec = codec, .scales_at = 2 * head_dim};
    uint8_t *rows = keys_memory(64 * row_bytes), *given = keys_memory(64 * row_bytes);
    keys_fill(keys[0], 64, head_dim, (uint32_t)order % KEYS_N_KINDS);
    for (size_t t = 0; t < 64; t++)
        plain->encode_row(keys[0] + t * head_dim, keys[0] + t * head_dim, head_dim, codec, rows + t * row_bytes);
    plain->decode_keys(rows, 64, head_dim, codec, keys[1]);
    memcpy(given, rows, 64 * row_bytes);
    if (only_keys) { /* K by itself, scales behind it */
        there.scales_at = (head_dim + 1) / 2 * 2;
        there.row_bytes = codec == KERNELS_ROWS_F16 ? 2 * (size_t)head_dim : there.scales_at + 2 * (size_t)n_groups;
        for (size_t t = 0; t < 64; t++) {
            uint8_t *to = given + t * there.row_bytes;
            memcpy(to, rows + t * row_bytes, codec == KERNELS_ROWS_F16 ? 2 * head_dim : head_dim);
            if (codec == KERNELS_ROWS_Q8_0)
                memcpy(to + there.scales_at, rows + t * row_bytes + 2 * head_dim, 2 * n_groups);
        }
    }
    void *rows_there = device_new(given, 64 * there.row_bytes);
    float *keys_there = device_new(NULL, n * sizeof *keys_there);
    there.rows = rows_there;
    assert_int_equal(cuda_decode_keys(&run.queue, &there, 64, head_dim, keys_there), cudaSuccess);
    device_read(keys[2], keys_there, n * sizeof(float));
    for (size_t i = 0; i < n; i++)
        if (memcmp(&keys[1][i], &keys[2][i], 4) != 0 && !(isnan(keys[1][i]) && isnan(keys[2][i])))
            fail_msg("key %zu of codec %d, %u dimensions: %.9g, not %.9g", i, codec, head_dim, (double)keys[2][i],
                     (double)keys[1][i]);
    device_free(rows_there);
    device_free(keys_there);
    free(rows);
    free(given);
}

static void rows_are_decoded_as_on_the_cpu(void **state)
{
    (void)state;
    static const uint32_t head_dims[] = {1, 20, 64, 100, 128, 256};
    for (uint32_t i = 0; i < 6; i++)
        for (int order = 0; order < DEVICE_N_RUNS; order++) {
            check_rows(KERNELS_ROWS_F16, head_dims[i], order % 2 != 0, order);
            check_rows(KERNELS_ROWS_Q8_0, head_dims[i], order % 2 != 0, order);
        }
}

static void what_is_empty_or_unknown(void **state)
{
    (void)state;
    const struct device_run run = device_run(0);
    struct cuda_key_block *blocks = device_new(NULL, sizeof *blocks);
    struct cuda_key_query *queries = device_new(NULL, sizeof *queries);
    assert_int_equal(cuda_quantize_rot(&run.queue, 3, 64, blocks, 0), cudaSuccess);
    assert_int_equal(cuda_quantize_rot(&run.queue, 1, 64, blocks, 1), cudaErrorInvalidValue);
    assert_int_equal(cuda_quantize_rot(&run.queue, 3, 257, blocks, 1), cudaErrorInvalidValue);
    assert_int_equal(cuda_quantize_f16(&run.queue, 64, blocks, 0), cudaSuccess);
    assert_int_equal(cuda_quantize_f16(&run.queue, 257, blocks, 1), cudaErrorInvalidValue);
    assert_int_equal(cuda_prepare_f16(&run.queue, 64, 0, 1, queries, 1), cudaSuccess);
    assert_int_equal(cuda_quantize_pair(&run.queue, 64, blocks, 0), cudaSuccess);
    assert_int_equal(cuda_quantize_pair(&run.queue, 0, blocks, 1), cudaErrorInvalidValue);
    assert_int_equal(cuda_quantize_pq(&run.queue, 4, 256, 64, blocks, 0), cudaSuccess);
    assert_int_equal(cuda_quantize_pq(&run.queue, 5, 256, 64, blocks, 1), cudaErrorInvalidValue);
    assert_int_equal(cuda_quantize_pq(&run.queue, 4, 8192, 64, blocks, 1), cudaErrorInvalidValue);
    assert_int_equal(cuda_prepare_pq(&run.queue, 64, 0, 1, queries, 1), cudaSuccess);
    assert_int_equal(cuda_prepare_rot(&run.queue, 4, 64, 0, 1, queries, 1), cudaSuccess);
    assert_int_equal(cuda_prepare_rot(&run.queue, 5, 64, 1, 1, queries, 1), cudaErrorInvalidValue);
    assert_int_equal(cuda_prepare_pair(&run.queue, 1, 1, queries, 0), cudaSuccess);
    device_free(blocks);
    device_free(queries);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bytes_are_those_of_the_cpu),
        cmocka_unit_test(rows_are_decoded_as_on_the_cpu),
        cmocka_unit_test(what_is_empty_or_unknown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
