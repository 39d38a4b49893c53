/*
 * cuda_key_tables.h - what quantizers have learnt, on the device: tables of pair and klt, centroids of pq.
 *
 * Lifetime   made when an operation first names a quantizer, all its heads at once, and known by the quantizer's id, which no other
 *            one ever has: what became of the quantizer does not matter. Those that nothing named for ten minutes go when another
 *            quantizer's are made, and all that the operation at hand does not use when there is no memory: they can be made again.
 * Owner      the back end. Threads: its own.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "gpu-worker/keys/codec.h"

struct backend;

/* A quantizer as the kernels want it. */
struct cuda_key_codec {
    enum policy_codec codec;
    uint32_t n_dims, n_centroids; /* pq */
    uint32_t most_groups;         /* pair, klt: of all heads */
    const void *const *tables;    /* [n_layers x n_kv_heads] on the device; NULL: this codec has none */
};

/* Of rot4, rot3 and rot2. */
static inline uint32_t cuda_key_tables_rot_bits(enum policy_codec codec)
{
    return 4 - (uint32_t)(codec - POLICY_CODEC_ROT4);
}

/* An operation begins: what earlier ones found may go. */
void cuda_key_tables_begin(struct backend *backend);
/* False: no memory, the back end has failed. *ret_codec is good until the next operation begins. */
bool cuda_key_tables_find(struct backend *backend, const struct key_quantizer *quantizer,
                          struct cuda_key_codec *ret_codec);
void cuda_key_tables_free(struct backend *backend); /* accepts that there are none */
