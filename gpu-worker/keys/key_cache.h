/*
 * key_cache.h - quantized keys of one session's old blocks: one pool per (layer, KV head), in chunks of blocks.
 *
 * Owner      a device session; changed by one thread (the engine), read by any while it waits for them.
 * Memory     chunk: KEY_CACHE_CHUNK_BLOCKS blocks, [layer][kv_head][block][tile] of the heads that are there, sides apart; from the allocator given, so
 *            that the device's budget counts it.
 * Invariant  holds blocks 0 .. n_blocks - 1 for every layer and KV head that is not absent; a pure function of the sealed blocks.
 */
#pragma once

#include <stdbool.h>

#include "gpu-worker/keys/codec.h"
#include "proto/layout.h"

#define KEY_CACHE_CHUNK_BLOCKS 16u

struct key_cache;

/* A sealed block's keys of one head: rows [64] as the row codec has them, and where they go as quantized. */
struct key_cache_tile {
    const struct key_head *head;
    const void *rows;
    void *tile;
    float *side;
};

struct key_cache_memory {
    void *(*alloc)(void *context, size_t n_bytes); /* 64-byte aligned; NULL: no memory */
    void (*free)(void *context, void *memory, size_t n_bytes);
    /* Of memory that only a device can reach: quantizes there. Rows are read before it returns. NULL: ordinary memory. */
    void (*quantize)(void *context, const struct key_quantizer *quantizer, const struct key_cache_tile *tiles,
                     uint32_t n_tiles);
    void *context;
};

/*
 * quantizer NULL: nothing is kept (adding only counts). `absent` [n_layers x n_kv_heads], copied, or NULL: heads whose keys are
 * not kept; asking for a run of one is a bug.
 */
int key_cache_new(const struct key_quantizer *quantizer, const struct row_shape *shape, const bool *absent,
                  const struct key_cache_memory *memory, struct key_cache **ret_cache);
struct key_cache *key_cache_free(struct key_cache *cache); /* accepts NULL, returns NULL */

const struct key_quantizer *key_cache_quantizer(const struct key_cache *cache);
bool key_cache_has(const struct key_cache *cache, uint32_t layer, uint32_t kv_head);
uint32_t key_cache_n_blocks(const struct key_cache *cache);
size_t key_cache_bytes(const struct key_cache *cache); /* allocated */
/* What a cache of n_blocks allocates, all heads present. */
size_t key_cache_bytes_for(const struct key_quantizer *quantizer, uint32_t n_blocks);
/* Bytes per old token, all layers and KV heads (that are not absent; NULL: none is) together; tiles and sides. */
double key_cache_bytes_per_token(const struct key_quantizer *quantizer, const bool *absent);

/* Room for n_blocks in all, so that adding them does not allocate. -ENOMEM. */
int key_cache_reserve(struct key_cache *cache, uint32_t n_blocks);
/* Takes the next block; rows(context, layer, kv_head) gives its 64 rows as the row codec has them. -ENOMEM. */
int key_cache_add(struct key_cache *cache, const struct kernels *kernels,
                  const void *(*rows)(void *context, uint32_t layer, uint32_t kv_head), void *context);
/*
 * The same head by head, for who has the rows of one layer at a time: key_cache_extend() makes n_blocks count, all of which
 * are then put before they are asked for. -ENOMEM. Threads: different tiles may be put at the same time.
 */
int key_cache_extend(struct key_cache *cache, uint32_t n_blocks);
void key_cache_put(struct key_cache *cache, const struct kernels *kernels, uint32_t layer, uint32_t kv_head,
                   uint32_t block, const void *rows);
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

/*
 * The same for who takes all of a head at once: block b's tile is at chunks[b / KEY_CACHE_CHUNK_BLOCKS] + tiles + its tile_bytes x
 * (b % KEY_CACHE_CHUNK_BLOCKS), its side at ... + sides + 4 x (b % KEY_CACHE_CHUNK_BLOCKS). ret_chunks [enough for n_blocks].
 */
struct key_cache_place {
    size_t tiles, sides; /* offsets in a chunk */
};
struct key_cache_place key_cache_place(const struct key_cache *cache, uint32_t layer, uint32_t kv_head);
const uint8_t *const *key_cache_chunks(const struct key_cache *cache);
