/*
 * key_cache.h - quantized keys of one session's old blocks.
 *
 * Owner      a device session; one thread (the engine).
 * Invariant  holds blocks 0 .. n_blocks - 1 for every layer and KV head; a pure function of the sealed blocks.
 */
#pragma once

#include "gpu-worker/keys/codec.h"
#include "proto/layout.h"

struct key_cache;

int key_cache_new(const struct key_codec *codec, const struct row_shape *shape, struct key_cache **ret_cache);
struct key_cache *key_cache_free(struct key_cache *cache); /* accepts NULL, returns NULL */

uint32_t key_cache_n_blocks(const struct key_cache *cache);
size_t key_cache_bytes(const struct key_cache *cache);
/* Bytes per old token, all layers and KV heads together. */
size_t key_cache_bytes_per_token(const struct key_codec *codec, const struct row_shape *shape);

/* Takes the next block; rows(context, layer, kv_head) gives its 64 rows [64][K|V]. -ENOMEM. */
int key_cache_add(struct key_cache *cache, const struct kernels *kernels,
                  const uint16_t *(*rows)(void *context, uint32_t layer, uint32_t kv_head), void *context);

/* Keys of a block as the codec keeps them. block < n_blocks. */
const void *key_cache_keys(const struct key_cache *cache, uint32_t block, uint32_t layer, uint32_t kv_head);
