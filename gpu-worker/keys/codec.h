/*
 * codec.h - key codecs: how the keys of an old block are kept on the device, and how queries are scored on them.
 *
 * Owner      constant tables. Threads: any.
 * Invariant  a block is quantized once, when it leaves the window, from its sealed rows: the bytes are a pure function of
 *            the block and of what the codec learnt from the model, which is what makes a rebuilt key cache equal to the lost
 *            one - byte for byte, on every instruction set. For one instruction set a score does not depend on the other
 *            queries or tiles of the call.
 *
 * Words      tile: the 64 keys of one block, layer and KV head, in the codec's form.
 *            side: what a tile needs besides (the scale of the block's mean key); kept apart so that tiles stay aligned.
 *            head: what a codec knows of one (layer, KV head): its head_dim and, for a codec that learns, its table.
 *            quantizer: a codec with its heads, for one model (quantizers.h makes them).
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "kernels/kernels.h"
#include "proto/policy.h"

struct key_head {
    uint32_t head_dim;
    const void *table; /* the codec's own; NULL: it learns nothing */
};

struct key_codec {
    const char *name;
    size_t (*tile_bytes)(const struct key_head *head); /* a multiple of 64; may differ from head to head */

    /* keys [64][head_dim] f32, as the row codec decodes them -> tile (64-byte aligned) and side */
    void (*quantize)(const struct kernels *kernels, const struct key_head *head, const float *keys, void *tile,
                     float *ret_side);

    /* What score() needs of the queries of one KV head (n_queries <= KEY_CODEC_MAX_QUERIES), computed once a step. */
    size_t (*query_bytes)(const struct key_head *head, uint32_t n_queries);
    void (*prepare)(const struct kernels *kernels, const struct key_head *head, const float *q, uint32_t n_queries,
                    float scale, void *query);

    /* scores [n_queries][stride]: 64 for each of n_tiles consecutive tiles = scale * (q . k^_j) */
    void (*score)(const struct kernels *kernels, const struct key_head *head, const void *query, uint32_t n_queries,
                  const void *tiles, const float *sides, uint32_t n_tiles, float *scores, size_t stride);
};

#define KEY_CODEC_MAX_QUERIES 64u

/* NULL for POLICY_CODEC_NONE. */
const struct key_codec *key_codec_find(enum policy_codec codec);

/* A codec for one model. Immutable. */
struct key_quantizer {
    const struct key_codec *codec;
    uint32_t n_layers, n_kv_heads;
    const struct key_head *heads; /* [n_layers][n_kv_heads] */
    size_t table_bytes;           /* on the device, all heads together: codebooks, statistics' tables */
    uint64_t id; /* not 0, and of no other one that this process makes or made; 0 only where heads have no table */
};

static inline const struct key_head *key_quantizer_head(const struct key_quantizer *quantizer, uint32_t layer,
                                                        uint32_t kv_head)
{
    return &quantizer->heads[(size_t)layer * quantizer->n_kv_heads + kv_head];
}
