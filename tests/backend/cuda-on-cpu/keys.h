/* keys.h - heads of every key codec for tests of kernels: tables made up, keys and queries to go with them. */
#pragma once

#include "gpu-worker/keys/codec.h"
#include "gpu-worker/keys/codec_pair.h"
#include "gpu-worker/keys/codec_pq.h"
#include "gpu-worker/keys/codec_rot.h"

#define KEYS_MOST_GROUP 64u

struct keys_case {
    enum policy_codec codec;
    uint32_t head_dim, n_dims, n_centroids; /* pq's sub-spaces */
};

/* Case i, false: no more. Every codec with odd head_dims and usual ones. */
bool keys_case(size_t i, struct keys_case *ret_case);
struct key_head keys_head(const struct keys_case *it); /* with its table; keys_head_free() frees it */
void keys_head_free(const struct keys_case *it, struct key_head head);

/* Keys of a block [64][head_dim] or queries, seeded; kind 0: usual ones; others: zeros, equal keys, broken numbers ... */
#define KEYS_N_KINDS 7u
void keys_fill(float *keys, uint32_t n, uint32_t head_dim, uint32_t kind);

/* Aligned to 64, filled with rubbish. */
void *keys_memory(size_t n_bytes);
