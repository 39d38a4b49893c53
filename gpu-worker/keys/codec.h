/*
 * codec.h - key codecs: how the keys of an old block are kept on the device, and how queries are scored on them.
 *
 * Owner      constant tables. Threads: any.
 * Invariant  a block is quantized once, when it leaves the window, from its sealed rows: the bytes are a pure function of
 *            the block, which is what makes a rebuilt key cache equal to the lost one.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "kernels/kernels.h"

struct key_codec {
    const char *name;
    /* Bytes of one block (64 keys) of one layer and KV head. */
    size_t (*block_bytes)(uint32_t head_dim);
    /* rows [64][K|V] f16 -> keys */
    void (*quantize)(const struct kernels *kernels, const uint16_t *rows, uint32_t head_dim, void *keys);
    /* scores [64] = scale * (q . k^_j) */
    void (*score)(const struct kernels *kernels, const float *q, uint32_t head_dim, const void *keys, float scale,
                  float *scores);
};

/* Keys as the rows have them: 64 consecutive keys of head_dim f16. */
extern const struct key_codec codec_f16;
