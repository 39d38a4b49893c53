/*
 * test_quantize.c - tiles of sealed blocks, their sides and prepared queries as the device makes them: the bytes of the CPU, for
 * every codec but f16, odd shapes, and keys and queries as no model should have them.
 */
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

static uint32_t rot_bits(const struct keys_case *it) /* 0: a pair codec */
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
    return rot_bits(it) ? cuda_quantize_rot(queue, rot_bits(it), it->head_dim, blocks, KEYS_N_KINDS)
                        : cuda_quantize_pair(queue, it->head_dim, blocks, KEYS_N_KINDS);
}

static cudaError_t prepare(const struct cuda_queue *queue, const struct keys_case *it,
                           const struct cuda_key_query *queries)
{
    if (it->codec == POLICY_CODEC_PQ)
        return cuda_prepare_pq(queue, it->head_dim, N_QUERIES, 0.125f, queries, KEYS_N_KINDS);
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
        if (it.codec == POLICY_CODEC_PQ)
            centroids = device_new(((const struct pq_table *)head.table)->centroids,
                                   (size_t)it.head_dim * it.n_centroids * sizeof *centroids);
        else if (!rot_bits(&it))
            assert_int_equal(cuda_prepare_pair_table(head.table, &table), cudaSuccess);
        for (int order = (int)(i % 2); order < DEVICE_N_RUNS; order += 2) {
            check_blocks(&it, &head, table, centroids, order);
            check_queries(&it, &head, table, order);
        }
        device_free(table);
        device_free(centroids);
        keys_head_free(&it, head);
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
        cmocka_unit_test(what_is_empty_or_unknown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
