/* codec_f16.c - see codec.h: keys as the rows have them. */
#include "gpu-worker/keys/codec.h"

#include <string.h>

#include "proto/layout.h"

static size_t block_bytes(uint32_t head_dim)
{
    return (size_t)LAYOUT_BLOCK_TOKENS * head_dim * sizeof(uint16_t);
}

static void quantize(const struct kernels *kernels, const uint16_t *rows, uint32_t head_dim, void *keys)
{
    (void)kernels;
    for (uint32_t token = 0; token < LAYOUT_BLOCK_TOKENS; token++)
        memcpy((uint16_t *)keys + (size_t)token * head_dim, rows + (size_t)token * 2 * head_dim,
               head_dim * sizeof(uint16_t));
}

static void score(const struct kernels *kernels, const float *q, uint32_t head_dim, const void *keys, float scale,
                  float *scores)
{
    kernels->score_f16(q, head_dim, keys, LAYOUT_BLOCK_TOKENS, scale, scores);
}

const struct key_codec codec_f16 = {.name = "f16", .block_bytes = block_bytes, .quantize = quantize, .score = score};
