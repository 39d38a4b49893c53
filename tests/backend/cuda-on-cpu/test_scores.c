/*
 * test_scores.c - scores of old keys on the device, for every codec, odd shapes and several runs a call: bits of the plain loops
 * of the CPU, the largest of them, and nothing written beside them.
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

#define MOST_TILES 19u  /* two chunks */
#define TILES_AT   128u /* in a chunk; sides follow the tiles */
#define N_RUNS     2u
#define STRIDE     (MOST_TILES * 64 + 8)

static const uint32_t zeros[KEYS_MOST_GROUP];
static float block[64 * KERNELS_MAX_HEAD_DIM], q[KEYS_MOST_GROUP * KERNELS_MAX_HEAD_DIM];
static float sides[MOST_TILES], expected[KEYS_MOST_GROUP * STRIDE], scores[KEYS_MOST_GROUP * STRIDE];

static cudaError_t score(const struct cuda_queue *queue, const struct keys_case *it, const struct key_head *head,
                         uint32_t n_queries, const struct cuda_key_run *runs, uint32_t n_runs, uint32_t most_tiles)
{
    const struct pair_table *table = head->table;
    switch (it->codec) {
    case POLICY_CODEC_F16:
        return cuda_score_f16(queue, it->head_dim, n_queries, runs, n_runs, most_tiles, STRIDE);
    case POLICY_CODEC_ROT4:
    case POLICY_CODEC_ROT3:
    case POLICY_CODEC_ROT2:
        return cuda_score_rot(queue,
                              it->codec == POLICY_CODEC_ROT4   ? 4
                              : it->codec == POLICY_CODEC_ROT3 ? 3
                                                               : 2,
                              it->head_dim, n_queries, runs, n_runs, most_tiles, STRIDE);
    case POLICY_CODEC_PQ:
        return cuda_score_pq(queue, it->n_dims, it->n_centroids, it->head_dim, n_queries, runs, n_runs, most_tiles,
                             STRIDE);
    default:
        return cuda_score_pair(queue, table->layout.is_klt, it->head_dim, table->layout.n_groups, n_queries, runs,
                               n_runs, most_tiles, STRIDE);
    }
}

/* Tiles and their sides as a key cache has them; chunks [2], on the device. */
static void put_in_chunks(const uint8_t *tiles, size_t tile_bytes, uint32_t n_tiles, uint8_t **chunks)
{
    const size_t n_bytes = TILES_AT + CUDA_KEY_CHUNK_TILES * (tile_bytes + sizeof(float));
    uint8_t *chunk = keys_memory(n_bytes);
    chunks[0] = chunks[1] = NULL;
    for (uint32_t first = 0; first < n_tiles; first += CUDA_KEY_CHUNK_TILES) {
        const uint32_t n = n_tiles - first < CUDA_KEY_CHUNK_TILES ? n_tiles - first : CUDA_KEY_CHUNK_TILES;
        memset(chunk, 0x7e, n_bytes);
        memcpy(chunk + TILES_AT, tiles + first * tile_bytes, n * tile_bytes);
        memcpy(chunk + TILES_AT + CUDA_KEY_CHUNK_TILES * tile_bytes, sides + first, n * sizeof *sides);
        chunks[first / CUDA_KEY_CHUNK_TILES] = device_new(chunk, n_bytes);
    }
    free(chunk);
}

/* The largest of a query's expected scores, sinks left out. */
static uint32_t largest_of(const float *of_query, uint32_t n_tiles)
{
    uint32_t most = 0;
    for (uint32_t j = CUDA_KEY_SINKS; j < n_tiles * 64; j++)
        if (of_query[j] > -INFINITY && cuda_keys_order(of_query[j]) > most)
            most = cuda_keys_order(of_query[j]);
    return most;
}

/* Of the first run, of all tiles, and of a second one of one tile, which has found something larger before. */
static void check(const struct keys_case *it, const struct key_head *head, uint32_t n_queries, uint32_t n_tiles,
                  int order)
{
    const struct kernels *plain = kernels_get(KERNELS_ISA_PLAIN);
    const struct key_codec *codec = key_codec_find(it->codec);
    const size_t tile_bytes = codec->tile_bytes(head), query_bytes = codec->query_bytes(head, n_queries);
    const struct device_run run = device_run(order);
    uint8_t *tiles = keys_memory(n_tiles * tile_bytes), *query = keys_memory(query_bytes);
    for (uint32_t t = 0; t < n_tiles; t++) {
        keys_fill(block, 64, it->head_dim, (t + n_queries) % KEYS_N_KINDS);
        codec->quantize(plain, head, block, tiles + t * tile_bytes, &sides[t]);
    }
    keys_fill(q, n_queries, it->head_dim, n_tiles == 1 ? 3 : 0);
    codec->prepare(plain, head, q, n_queries, 0.125f, query);
    memset(expected, 0xff, sizeof expected);
    codec->score(plain, head, query, n_queries, tiles, sides, n_tiles, expected, STRIDE);

    uint8_t *chunks[2];
    uint32_t largest[KEYS_MOST_GROUP], expected_largest;
    put_in_chunks(tiles, tile_bytes, n_tiles, chunks);
    memset(largest, 0xff, sizeof largest);
    void *on_device[3] = {device_new(chunks, sizeof chunks), device_new(query, query_bytes), NULL};
    if (it->codec == POLICY_CODEC_PQ)
        on_device[2] = device_new(((const struct pq_table *)head->table)->centroids,
                                  (size_t)it->head_dim * it->n_centroids * sizeof(uint16_t));
    struct cuda_key_run runs[N_RUNS];
    memset(scores, 0xff, sizeof scores);
    for (uint32_t i = 0; i < N_RUNS; i++)
        runs[i] = (struct cuda_key_run){
            .query = on_device[1],
            .chunks = on_device[0],
            .tiles = TILES_AT,
            .sides = TILES_AT + CUDA_KEY_CHUNK_TILES * tile_bytes,
            .scores = device_new(scores, sizeof scores),
            .largest = device_new(i == 0 ? zeros : largest, sizeof largest),
            .centroids = on_device[2],
            .n_tiles = i == 0 ? n_tiles : 1,
            .n_groups = it->codec == POLICY_CODEC_PQ || head->table == NULL
                            ? 0
                            : ((const struct pair_table *)head->table)->layout.n_groups,
        };
    struct cuda_key_run *runs_there = device_new(runs, sizeof runs);
    assert_int_equal(score(&run.queue, it, head, n_queries, runs_there, N_RUNS, n_tiles), cudaSuccess);
    for (uint32_t i = 0; i < N_RUNS; i++) {
        device_read(scores, runs[i].scores, sizeof scores);
        for (uint32_t n = 0; n < n_queries && i == 1; n++) /* only the first tile's */
            memset(expected + n * STRIDE + 64, 0xff, (STRIDE - 64) * sizeof *expected);
        if (memcmp(scores, expected, sizeof scores) != 0)
            for (size_t k = 0; k < KEYS_MOST_GROUP * STRIDE; k++)
                if (memcmp(&scores[k], &expected[k], 4) != 0 &&
                    !(isnan(scores[k]) && isnan(expected[k]) && k % STRIDE < n_tiles * 64 && k < n_queries * STRIDE))
                    fail_msg("%s, %u dimensions, %u queries, %u tiles, order %d, run %u: query %zu, key %zu: %.9g, not "
                             "%.9g",
                             codec->name, it->head_dim, n_queries, n_tiles, order, i, k / STRIDE, k % STRIDE,
                             (double)scores[k], (double)expected[k]);
        device_read(largest, runs[i].largest, sizeof largest);
        for (uint32_t n = 0; n < KEYS_MOST_GROUP; n++) {
            expected_largest = i == 1 ? UINT32_MAX : n < n_queries ? largest_of(expected + n * STRIDE, n_tiles) : 0;
            assert_int_equal(largest[n], expected_largest);
        }
        device_free(runs[i].scores);
        device_free(runs[i].largest);
    }
    device_free(runs_there);
    for (int i = 0; i < 3; i++)
        device_free(on_device[i]);
    device_free(chunks[0]);
    device_free(chunks[1]);
    free(tiles);
    free(query);
}

static void scores_have_the_bits_of_plain_loops(void **state)
{
    (void)state;
    static const uint32_t groups[] = {1, 4, 7, 2, 9, 3, 17, 8, 5, 64};
    struct keys_case it;
    for (size_t i = 0; keys_case(i, &it); i++) {
        const struct key_head head = keys_head(&it);
        for (int order = 0; order < DEVICE_N_RUNS; order++) {
            const uint32_t n_queries = groups[(i * 3 + (size_t)order) % (it.head_dim > 128 ? 9 : 10)];
            check(&it, &head, n_queries, order % 2 ? 1 + (uint32_t)i % 5 : i % 4 == 0 ? MOST_TILES : 5, order);
        }
        keys_head_free(&it, head);
    }
}

static void what_is_empty_or_unknown(void **state)
{
    (void)state;
    const struct device_run run = device_run(0);
    struct cuda_key_run *runs = device_new(NULL, sizeof *runs);
    assert_int_equal(cuda_score_f16(&run.queue, 64, 0, runs, 1, 1, 64), cudaSuccess);
    assert_int_equal(cuda_score_f16(&run.queue, 257, 1, runs, 1, 1, 64), cudaErrorInvalidValue);
    assert_int_equal(cuda_score_rot(&run.queue, 4, 64, 0, runs, 1, 1, 64), cudaSuccess);
    assert_int_equal(cuda_score_rot(&run.queue, 4, 64, 1, runs, 0, 1, 64), cudaSuccess);
    assert_int_equal(cuda_score_rot(&run.queue, 5, 64, 1, runs, 1, 1, 64), cudaErrorInvalidValue);
    assert_int_equal(cuda_score_pair(&run.queue, true, 64, 1, 1, runs, 1, 0, 64), cudaSuccess);
    assert_int_equal(cuda_score_pair(&run.queue, false, 64, PAIR_MAX_GROUPS + 2, 1, runs, 1, 1, 64),
                     cudaErrorInvalidValue);
    assert_int_equal(cuda_score_pq(&run.queue, 4, 256, 64, 0, runs, 1, 1, 64), cudaSuccess);
    assert_int_equal(cuda_score_pq(&run.queue, 3, 256, 63, 1, runs, 1, 1, 64), cudaErrorInvalidValue);
    assert_int_equal(cuda_score_pq(&run.queue, 4, 128, 64, 1, runs, 1, 1, 64), cudaErrorInvalidValue);
    device_free(runs);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(scores_have_the_bits_of_plain_loops),
        cmocka_unit_test(what_is_empty_or_unknown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
