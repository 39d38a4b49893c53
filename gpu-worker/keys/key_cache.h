/*
 * key_cache.h - quantized keys of one session's old blocks: one pool per (layer, KV head), in chunks of blocks.
 *
 * Owner      a device session; changed by one thread (the engine), read by any while it waits for them.
 * Memory     chunk: KEY_CACHE_CHUNK_BLOCKS blocks, [layer][kv_head][block][tile], sides apart; from the allocator given, so
 *            that the device's budget counts it.
 * Invariant  holds blocks 0 .. n_blocks - 1 for every layer and KV head; a pure function of the sealed blocks.
 */
#pragma once

#include "gpu-worker/keys/codec.h"
#include "proto/layout.h"

#define KEY_CACHE_CHUNK_BLOCKS 16u

struct key_cache;

struct key_cache_memory {
    void *(*alloc)(void *context, size_t n_bytes); /* 64-byte aligned; NULL: no memory */
    void (*free)(void *context, void *memory, size_t n_bytes);
    void *context;
};

/* codec NULL: nothing is kept (adding only counts). */
int key_cache_new(const struct key_codec *codec, const struct row_shape *shape, const struct key_cache_memory *memory,
                  struct key_cache **ret_cache);
struct key_cache *key_cache_free(struct key_cache *cache); /* accepts NULL, returns NULL */

uint32_t key_cache_n_blocks(const struct key_cache *cache);
size_t key_cache_bytes(const struct key_cache *cache); /* allocated */
/* What a cache of n_blocks allocates. */
size_t key_cache_bytes_for(const struct key_codec *codec, const struct row_shape *shape, uint32_t n_blocks);
/* Bytes per old token, all layers and KV heads together; tiles and sides. */
size_t key_cache_bytes_per_token(const struct key_codec *codec, const struct row_shape *shape);

/* Room for n_blocks in all, so that adding them does not allocate. -ENOMEM. */
int key_cache_reserve(struct key_cache *cache, uint32_t n_blocks);
/* Takes the next block; rows(context, layer, kv_head) gives its 64 rows as the row codec has them. -ENOMEM. */
int key_cache_add(struct key_cache *cache, const struct kernels *kernels,
                  const void *(*rows)(void *context, uint32_t layer, uint32_t kv_head), void *context);
/* The cache holds nothing any more; its memory stays. */
void key_cache_clear(struct key_cache *cache);
/* The same, and its memory goes back too. */
void key_cache_release(struct key_cache *cache);

/*
 * Tiles and sides of blocks [first_block, first_block + n) of one layer and KV head; returns n, as many as lie together
 * (at least 1). first_block < n_blocks.
 */
uint32_t key_cache_run(const struct key_cache *cache, uint32_t layer, uint32_t kv_head, uint32_t first_block,
                       const void **ret_tiles, const float **ret_sides);
