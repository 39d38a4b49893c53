/*
 * key_codebook.h - the centroids of a product quantizer (HCAttention): one codebook per layer, KV head and sub-space.
 *
 * Owner      whoever made it. Threads: one writer; then read by any.
 * File       little endian: header (magic, version, sizes, model hash, seed, how it was trained), f32 centroids, CRC-32C of
 *            all before it. Written to a temporary file and renamed.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "proto/layout.h"

struct key_codebook {
    uint32_t n_layers, n_kv_heads, head_dim;
    uint32_t n_dims;      /* of a sub-space; divides head_dim */
    uint32_t n_centroids; /* a power of two, 256 .. 4096 */
    uint8_t model_hash[16];
    uint64_t seed, text_hash;
    uint32_t n_iterations; /* most of any sub-space */
    uint64_t n_samples;    /* keys it was trained on */
    double error;          /* mean square error relative to the keys' variance, over all sub-spaces */
    float *centroids;      /* [layer][kv_head][sub-space][n_centroids][n_dims] */
};

/* All zero. -EINVAL: sizes that are not possible; -ENOMEM. */
int key_codebook_new(const struct row_shape *shape, const uint8_t model_hash[16], uint32_t n_dims, uint32_t n_centroids,
                     struct key_codebook **ret_codebook);
struct key_codebook *key_codebook_free(struct key_codebook *codebook); /* accepts NULL, returns NULL */
/* [sub-space][n_centroids][n_dims] of one (layer, KV head). */
float *key_codebook_head(const struct key_codebook *codebook, uint32_t layer, uint32_t kv_head);

/* -ENOENT; -EBADMSG: damaged, another version, or of another model or shape, with a sentence; -ENOMEM; -EIO ... */
int key_codebook_load(const char *path, const struct row_shape *shape, const uint8_t model_hash[16],
                      struct key_codebook **ret_codebook, char *sentence, size_t sentence_size);
int key_codebook_save(const struct key_codebook *codebook, const char *path);
