/* keys.c - see keys.h. */
#include "tests/backend/cuda-on-cpu/keys.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "gpu-worker/keys/key_codebook.h"
#include "gpu-worker/keys/key_statistics.h"

static const enum policy_codec codecs[] = {
    POLICY_CODEC_F16,   POLICY_CODEC_ROT4,  POLICY_CODEC_ROT3, POLICY_CODEC_ROT2, POLICY_CODEC_PAIR3,
    POLICY_CODEC_PAIR2, POLICY_CODEC_PAIR1, POLICY_CODEC_KLT2, POLICY_CODEC_KLT1, POLICY_CODEC_KLT0};
static const uint32_t head_dims[] = {1, 3, 16, 20, 48, 64, 100, 128, 256};
static const struct keys_case pq_cases[] = {{POLICY_CODEC_PQ, 2, 2, 256},   {POLICY_CODEC_PQ, 20, 2, 512},
                                            {POLICY_CODEC_PQ, 36, 2, 1024}, {POLICY_CODEC_PQ, 36, 4, 2048},
                                            {POLICY_CODEC_PQ, 40, 8, 256},  {POLICY_CODEC_PQ, 16, 8, 4096},
                                            {POLICY_CODEC_PQ, 12, 4, 4096}};
#define N_DIMS (sizeof head_dims / sizeof *head_dims)
#define N_PQ   (sizeof pq_cases / sizeof *pq_cases)

static uint64_t seed;

static double uniform(void) /* -1 .. 1 */
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (double)(seed >> 11) * 0x1p-52 - 1;
}

static double normal(void)
{
    double sum = 0;
    for (int i = 0; i < 12; i++)
        sum += uniform();
    return sum / 2;
}

static bool is_klt(enum policy_codec codec)
{
    return codec == POLICY_CODEC_KLT2 || codec == POLICY_CODEC_KLT1 || codec == POLICY_CODEC_KLT0;
}

bool keys_case(size_t i, struct keys_case *ret_case)
{
    const size_t n = sizeof codecs / sizeof *codecs * N_DIMS;
    if (i >= n + N_PQ)
        return false;
    if (i >= n)
        *ret_case = pq_cases[i - n];
    else
        *ret_case = (struct keys_case){.codec = codecs[i / N_DIMS], .head_dim = head_dims[i % N_DIMS]};
    return true;
}

static struct key_head pair_head(const struct keys_case *it)
{
    const uint32_t n = it->head_dim;
    const struct row_shape shape = {1, 1, n, ROW_CODEC_F16};
    const uint8_t hash[16] = {0};
    struct key_statistics *statistics;
    struct pair_table *table = NULL;
    assert_int_equal(key_statistics_new(&shape, hash, &statistics), 0);
    const struct key_statistics_head head = key_statistics_head(statistics, 0, 0);
    for (uint32_t i = 0; i < n; i++) {
        head.q_mean[i] = (float)normal();
        head.q_square[i * n + i] = (float)pow(10, uniform());
        head.k_spread[i * n + i] = (float)pow(10, uniform());
    }
    for (uint32_t i = 1; i < n; i++) /* some of what differs together */
        head.k_spread[i * n + i - 1] = head.k_spread[(i - 1) * n + i] =
            0.3f * sqrtf(head.k_spread[i * n + i] * head.k_spread[(i - 1) * n + i - 1]);
    const double tile_bytes = it->codec == POLICY_CODEC_KLT2 ? 18 : it->codec == POLICY_CODEC_KLT1 ? 10 : 6.3;
    const uint32_t bits = it->codec == POLICY_CODEC_PAIR3 ? 3 : it->codec == POLICY_CODEC_PAIR2 ? 2 : 1;
    if (is_klt(it->codec))
        assert_int_equal(codec_pair_klt_tables(statistics, tile_bytes * n, &table), 0);
    else
        assert_int_equal(codec_pair_table_new(statistics, 0, 0, codec_pair_table_groups(n, bits), &table), 0);
    key_statistics_free(statistics);
    return (struct key_head){n, table};
}

static struct key_head pq_head(const struct keys_case *it)
{
    const struct row_shape shape = {1, 1, it->head_dim, ROW_CODEC_F16};
    const uint8_t hash[16] = {0};
    struct key_codebook *codebook;
    struct pq_table *table;
    assert_int_equal(key_codebook_new(&shape, hash, it->n_dims, it->n_centroids, &codebook), 0);
    for (size_t i = 0; i < (size_t)it->head_dim * it->n_centroids; i++)
        codebook->centroids[i] = (float)(it->n_dims == 2 ? rint(8 * normal()) / 4 : 2 * normal()); /* 2: many alike */
    assert_int_equal(codec_pq_table_new(codebook, 0, 0, &table), 0);
    key_codebook_free(codebook);
    return (struct key_head){it->head_dim, table};
}

struct key_head keys_head(const struct keys_case *it)
{
    seed = it->head_dim + 1000u * (uint64_t)it->codec;
    if (it->codec == POLICY_CODEC_PQ)
        return pq_head(it);
    if (it->codec == POLICY_CODEC_F16 || it->codec == POLICY_CODEC_ROT4 || it->codec == POLICY_CODEC_ROT3 ||
        it->codec == POLICY_CODEC_ROT2)
        return (struct key_head){it->head_dim, NULL};
    return pair_head(it);
}

void keys_head_free(const struct keys_case *it, struct key_head head)
{
    if (it->codec == POLICY_CODEC_PQ)
        codec_pq_table_free((struct pq_table *)(uintptr_t)head.table);
    else
        free((void *)(uintptr_t)head.table);
}

void keys_fill(float *keys, uint32_t n, uint32_t head_dim, uint32_t kind)
{
    static const float broken[] = {NAN, INFINITY, -INFINITY, 1e30f, -1e30f, 1e-42f, -0.0f, 7e4f};
    for (uint32_t i = 0; i < head_dim; i++) {
        const double mean = 4 * normal();
        for (uint32_t j = 0; j < n; j++) {
            float *it = &keys[(size_t)j * head_dim + i];
            *it = (float)(mean + (1 + i % 3) * normal());
            if (kind == 1)
                *it = 0;
            else if (kind == 2) /* all alike */
                *it = (float)mean;
            else if (kind == 3 && uniform() > 0.7)
                *it = broken[(i + 3 * j) % 8];
            else if (kind == 4) /* near the least a row can say */
                *it *= 0x1p-22f;
            else if (kind == 5)
                *it = uniform() > 0 ? 65504.0f : -65504.0f;
            else if (kind == 6) /* one key unlike the others */
                *it = j == 17 ? 100.0f * *it : (float)mean;
        }
    }
}

void *keys_memory(size_t n_bytes)
{
    void *memory = aligned_alloc(64, (n_bytes + 63) / 64 * 64);
    assert_non_null(memory);
    memset(memory, 0x5a, (n_bytes + 63) / 64 * 64);
    return memory;
}
