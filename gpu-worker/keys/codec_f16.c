/*
 * codec_f16.c - see codec.h: keys in half precision, as f16 rows have them (q8_0 rows are rounded). What is not finite in the
 * rows of a broken model is made so: NaN 0, the rest the largest half.
 */
#include "gpu-worker/keys/codecs.h"

#include <string.h>

#define F16_LARGEST 65504.0f

struct f16_query {
    float scale;
    float padding[15];
};
_Static_assert(sizeof(struct f16_query) == 64, "the queries that follow are aligned");

static size_t tile_bytes(const struct key_head *head)
{
    return (size_t)KERNELS_BLOCK_TOKENS * head->head_dim * sizeof(uint16_t);
}

static void quantize(const struct kernels *kernels, const struct key_head *head, const float *keys, void *tile,
                     float *ret_side)
{
    const uint32_t head_dim = head->head_dim;
    for (uint32_t key = 0; key < KERNELS_BLOCK_TOKENS; key++, keys += head_dim) {
        float finite[KERNELS_MAX_HEAD_DIM];
        for (uint32_t i = 0; i < head_dim; i++) {
            const float x = keys[i] == keys[i] ? keys[i] : 0;
            finite[i] = x > F16_LARGEST ? F16_LARGEST : x < -F16_LARGEST ? -F16_LARGEST : x;
        }
        kernels->f16_encode(finite, head_dim, (uint16_t *)tile + (size_t)key * head_dim);
    }
    *ret_side = 0;
}

static size_t query_bytes(const struct key_head *head, uint32_t n_queries)
{
    return sizeof(struct f16_query) + (size_t)n_queries * head->head_dim * sizeof(float);
}

static void prepare(const struct kernels *kernels, const struct key_head *head, const float *q, uint32_t n_queries,
                    float scale, void *query)
{
    (void)kernels;
    const struct f16_query header = {.scale = scale};
    memcpy(query, &header, sizeof header);
    memcpy((uint8_t *)query + sizeof header, q, (size_t)n_queries * head->head_dim * sizeof *q);
}

static void score(const struct kernels *kernels, const struct key_head *head, const void *query, uint32_t n_queries,
                  const void *tiles, const float *sides, uint32_t n_tiles, float *scores, size_t stride)
{
    const uint32_t head_dim = head->head_dim;
    (void)sides;
    const struct f16_query *header = query;
    const float *q = (const float *)(const void *)((const uint8_t *)query + sizeof *header);
    const uint16_t *tile = tiles;
    for (uint32_t t = 0; t < n_tiles; t++, tile += (size_t)KERNELS_BLOCK_TOKENS * head_dim)
        for (uint32_t i = 0; i < n_queries; i++)
            kernels->score_f16(q + (size_t)i * head_dim, head_dim, tile, KERNELS_BLOCK_TOKENS, header->scale,
                               scores + i * stride + (size_t)t * KERNELS_BLOCK_TOKENS);
}

const struct key_codec codec_f16 = {.name = "f16",
                                    .tile_bytes = tile_bytes,
                                    .quantize = quantize,
                                    .query_bytes = query_bytes,
                                    .prepare = prepare,
                                    .score = score};
