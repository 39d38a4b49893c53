/*
 * key_statistics.h - what the pair codecs need to know of a model: by layer and KV head, how its queries and keys spread.
 *
 * Gathered over some text: mean query u = E[q] and second moment E[q q^T] over the positions and the query heads of the KV
 * head; spread of keys E[(k - m)(k - m)^T], m the mean key of the key's block of 64. q and k are after RoPE, in the model's order.
 * And some of these k - m themselves, evenly over the text, for the codecs whose codewords are learnt.
 *
 * Owner      whoever made it. Threads: one writer; then read by any.
 * File       little endian: header (magic, version, sizes, model hash, number of tokens, hash of the text), f32 values in the
 *            order of key_statistics_head(), samples, CRC-32C of all before it. Written to a temporary file and renamed.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "proto/layout.h"

struct key_statistics {
    uint32_t n_layers, n_kv_heads, head_dim;
    uint8_t model_hash[16];
    uint64_t n_tokens;
    uint64_t text_hash;
    float *values; /* [layer][kv_head][head_dim + 2 x head_dim x head_dim] */
    uint32_t n_samples;
    uint16_t *samples; /* [layer][kv_head][n_samples][head_dim], half precision; NULL: none */
};

#define KEY_STATISTICS_MOST_SAMPLES 1024u

struct key_statistics_head {
    float *q_mean;   /* [head_dim] */
    float *q_square; /* [head_dim][head_dim] */
    float *k_spread; /* [head_dim][head_dim] */
};

/* All zero. -ENOMEM. */
int key_statistics_new(const struct row_shape *shape, const uint8_t model_hash[16],
                       struct key_statistics **ret_statistics);
/* Room for so many samples of each head, all zero; once, at most KEY_STATISTICS_MOST_SAMPLES. -ENOMEM. */
int key_statistics_make_samples(struct key_statistics *statistics, uint32_t n_samples);
struct key_statistics *key_statistics_free(struct key_statistics *statistics); /* accepts NULL, returns NULL */
struct key_statistics_head key_statistics_head(const struct key_statistics *statistics, uint32_t layer,
                                               uint32_t kv_head);

/* [n_samples][head_dim] */
uint16_t *key_statistics_samples(const struct key_statistics *statistics, uint32_t layer, uint32_t kv_head);

/* -ENOENT; -EBADMSG: damaged, another version, or of another model or shape, with a sentence; -ENOMEM; -EIO ... */
int key_statistics_load(const char *path, const struct row_shape *shape, const uint8_t model_hash[16],
                        struct key_statistics **ret_statistics, char *sentence, size_t sentence_size);
int key_statistics_save(const struct key_statistics *statistics, const char *path);
