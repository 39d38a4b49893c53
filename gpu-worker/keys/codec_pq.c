/* codec_pq.c - see codec_pq.h: quantized and prepared the same on every instruction set, and which one searches and scores. */
#include "gpu-worker/keys/codec_pq.h"

#include <string.h>

#include "gpu-worker/keys/codecs.h"

#define QUERY_LARGEST 0x1p40f
#define SMALLEST      0x1p-40f

const struct pq_kernels *codec_pq_kernels(const struct kernels *kernels)
{
#if defined(__x86_64__)
    if (kernels->isa == KERNELS_ISA_AVX512)
        return &codec_pq_avx512;
    if (kernels->isa == KERNELS_ISA_AVX2)
        return &codec_pq_avx2;
#endif
    (void)kernels;
    return &codec_pq_plain;
}

float codec_pq_cleaned(float x, float largest)
{
    uint32_t bits, smallest_bits;
    const float smallest = SMALLEST;
    memcpy(&bits, &x, sizeof bits);
    memcpy(&smallest_bits, &smallest, sizeof smallest_bits);
    bits &= 0x7fffffffu;
    if (bits > 0x7f800000u || bits < smallest_bits) /* not a number, or nothing; compared as integers: denormals */
        return 0;
    return x > largest ? largest : x < -largest ? -largest : x;
}

static size_t tile_bytes(const struct key_head *head)
{
    return pq_tile_bytes(head->table);
}

static void pack(const uint16_t *numbers, uint32_t n_high, uint8_t *packed)
{
    for (uint32_t j = 0; j < PQ_KEYS; j += 8) {
        uint32_t high = 0;
        for (uint32_t k = 0; k < 8; k++)
            high |= (uint32_t)(numbers[j + k] >> 8) << (k * n_high);
        for (uint32_t i = 0; i < n_high; i++)
            packed[j / 8 * n_high + i] = (uint8_t)(high >> (8 * i));
    }
    for (uint32_t j = 0; j < PQ_KEYS; j++)
        packed[(size_t)8 * n_high + j] = (uint8_t)numbers[j];
}

static void quantize(const struct kernels *kernels, const struct key_head *head, const float *keys, void *tile,
                     float *ret_side)
{
    const struct pq_table *table = head->table;
    const struct pq_kernels *pq = codec_pq_kernels(kernels);
    const uint32_t n_dims = table->n_dims;
    uint8_t *packed = tile;
    memset(tile, 0, pq_tile_bytes(table));
    for (uint32_t s = 0; s < table->n_spaces; s++, packed += pq_space_bytes(table->n_centroids)) {
        const struct pq_space space = pq_table_space(table, s);
        float x[PQ_KEYS * PQ_MAX_DIMS];
        uint16_t numbers[PQ_KEYS];
        for (uint32_t j = 0; j < PQ_KEYS; j++)
            for (uint32_t i = 0; i < n_dims; i++)
                x[j * n_dims + i] =
                    codec_pq_cleaned(keys[(size_t)j * table->head_dim + s * n_dims + i], PQ_KEY_LARGEST);
        pq->nearest(&space, x, PQ_KEYS, numbers, NULL);
        pack(numbers, pq_bits(table->n_centroids) - 8, packed);
    }
    *ret_side = 0;
}

static size_t query_bytes(const struct key_head *head, uint32_t n_queries)
{
    return ((size_t)n_queries * head->head_dim * sizeof(float) + 63) / 64 * 64;
}

static void prepare(const struct kernels *kernels, const struct key_head *head, const float *q, uint32_t n_queries,
                    float scale, void *query)
{
    (void)kernels;
    float *scaled = query;
    for (size_t i = 0; i < (size_t)n_queries * head->head_dim; i++)
        scaled[i] = codec_pq_cleaned(q[i], QUERY_LARGEST) * scale;
}

static void score(const struct kernels *kernels, const struct key_head *head, const void *query, uint32_t n_queries,
                  const void *tiles, const float *sides, uint32_t n_tiles, float *scores, size_t stride)
{
    (void)sides;
    codec_pq_kernels(kernels)->score(head->table, query, n_queries, tiles, n_tiles, scores, stride);
}

const struct key_codec codec_pq = {.name = "pq",
                                   .tile_bytes = tile_bytes,
                                   .quantize = quantize,
                                   .query_bytes = query_bytes,
                                   .prepare = prepare,
                                   .score = score};
