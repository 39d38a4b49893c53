/* key_cache.c - see key_cache.h. */
#include "gpu-worker/keys/key_cache.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct key_cache {
    const struct key_codec *codec; /* NULL: blocks are only counted */
    struct row_shape shape;
    struct key_cache_memory memory;
    uint32_t n_blocks;
    uint32_t n_chunks; /* allocated; never fewer than n_blocks need */
    uint32_t capacity; /* of the array */
    uint8_t **chunks;  /* each: tiles [layer][kv_head][KEY_CACHE_CHUNK_BLOCKS], then sides in the same order */
    float *keys;       /* [64][head_dim]: of the tile being made */
};

/* (layer, KV head) pairs */
static size_t n_pools(const struct row_shape *shape)
{
    return (size_t)shape->n_layers * shape->n_kv_heads;
}

static size_t sides_offset(const struct key_codec *codec, const struct row_shape *shape)
{
    return n_pools(shape) * KEY_CACHE_CHUNK_BLOCKS * codec->tile_bytes(shape->head_dim);
}

static size_t chunk_bytes(const struct key_codec *codec, const struct row_shape *shape)
{
    return sides_offset(codec, shape) + n_pools(shape) * KEY_CACHE_CHUNK_BLOCKS * sizeof(float);
}
_Static_assert(KEY_CACHE_CHUNK_BLOCKS * sizeof(float) % 64 == 0, "a chunk is a multiple of 64 bytes");

static uint32_t chunks_for(uint32_t n_blocks)
{
    return n_blocks / KEY_CACHE_CHUNK_BLOCKS + (n_blocks % KEY_CACHE_CHUNK_BLOCKS != 0);
}

int key_cache_new(const struct key_codec *codec, const struct row_shape *shape, const struct key_cache_memory *memory,
                  struct key_cache **ret_cache)
{
    if (codec && (shape->head_dim == 0 || shape->head_dim > KERNELS_MAX_HEAD_DIM))
        return -EINVAL;
    struct key_cache *cache = calloc(1, sizeof *cache);
    if (!cache)
        return -ENOMEM;
    cache->codec = codec;
    cache->shape = *shape;
    if (codec) {
        cache->memory = *memory;
        cache->keys = malloc((size_t)LAYOUT_BLOCK_TOKENS * shape->head_dim * sizeof *cache->keys);
        if (!cache->keys) {
            free(cache);
            return -ENOMEM;
        }
    }
    *ret_cache = cache;
    return 0;
}

void key_cache_release(struct key_cache *cache)
{
    for (uint32_t i = 0; i < cache->n_chunks; i++)
        cache->memory.free(cache->memory.context, cache->chunks[i], chunk_bytes(cache->codec, &cache->shape));
    cache->n_blocks = cache->n_chunks = 0;
}

struct key_cache *key_cache_free(struct key_cache *cache)
{
    if (!cache)
        return NULL;
    key_cache_release(cache);
    free(cache->chunks);
    free(cache->keys);
    free(cache);
    return NULL;
}

uint32_t key_cache_n_blocks(const struct key_cache *cache)
{
    return cache->n_blocks;
}

size_t key_cache_bytes(const struct key_cache *cache)
{
    return key_cache_bytes_for(cache->codec, &cache->shape, cache->n_chunks * KEY_CACHE_CHUNK_BLOCKS);
}

size_t key_cache_bytes_for(const struct key_codec *codec, const struct row_shape *shape, uint32_t n_blocks)
{
    return codec ? chunks_for(n_blocks) * chunk_bytes(codec, shape) : 0;
}

size_t key_cache_bytes_per_token(const struct key_codec *codec, const struct row_shape *shape)
{
    if (!codec)
        return 0;
    const size_t block = n_pools(shape) * (codec->tile_bytes(shape->head_dim) + sizeof(float));
    return (block + LAYOUT_BLOCK_TOKENS - 1) / LAYOUT_BLOCK_TOKENS;
}

int key_cache_reserve(struct key_cache *cache, uint32_t n_blocks)
{
    const uint32_t n_chunks = chunks_for(n_blocks);
    if (!cache->codec || n_chunks <= cache->n_chunks)
        return 0;
    if (n_chunks > cache->capacity) {
        const uint32_t capacity = n_chunks > 2 * cache->capacity ? n_chunks : 2 * cache->capacity;
        uint8_t **chunks = realloc(cache->chunks, capacity * sizeof *chunks);
        if (!chunks)
            return -ENOMEM;
        cache->chunks = chunks;
        cache->capacity = capacity;
    }
    const uint32_t had = cache->n_chunks;
    while (cache->n_chunks < n_chunks) {
        void *chunk = cache->memory.alloc(cache->memory.context, chunk_bytes(cache->codec, &cache->shape));
        if (!chunk)
            break;
        cache->chunks[cache->n_chunks++] = chunk;
    }
    if (cache->n_chunks == n_chunks)
        return 0;
    while (cache->n_chunks > had) /* all or nothing: the rest may serve another session */
        cache->memory.free(cache->memory.context, cache->chunks[--cache->n_chunks],
                           chunk_bytes(cache->codec, &cache->shape));
    return -ENOMEM;
}

/* Where block's tile and side of one (layer, KV head) lie. */
static uint8_t *tile_of(const struct key_cache *cache, uint32_t layer, uint32_t kv_head, uint32_t block,
                        float **ret_side)
{
    uint8_t *chunk = cache->chunks[block / KEY_CACHE_CHUNK_BLOCKS];
    const size_t index =
        ((size_t)layer * cache->shape.n_kv_heads + kv_head) * KEY_CACHE_CHUNK_BLOCKS + block % KEY_CACHE_CHUNK_BLOCKS;
    *ret_side = (float *)(void *)(chunk + sides_offset(cache->codec, &cache->shape)) + index;
    return chunk + index * cache->codec->tile_bytes(cache->shape.head_dim);
}

int key_cache_add(struct key_cache *cache, const struct kernels *kernels,
                  const void *(*rows)(void *context, uint32_t layer, uint32_t kv_head), void *context)
{
    if (cache->codec) {
        int error = key_cache_reserve(cache, cache->n_blocks + 1);
        if (error)
            return error;
        for (uint32_t layer = 0; layer < cache->shape.n_layers; layer++)
            for (uint32_t kv_head = 0; kv_head < cache->shape.n_kv_heads; kv_head++) {
                float *side;
                uint8_t *tile = tile_of(cache, layer, kv_head, cache->n_blocks, &side);
                kernels->decode_keys(rows(context, layer, kv_head), LAYOUT_BLOCK_TOKENS, cache->shape.head_dim,
                                     (enum kernels_rows)cache->shape.codec, cache->keys);
                cache->codec->quantize(kernels, cache->keys, cache->shape.head_dim, tile, side);
            }
    }
    cache->n_blocks++;
    return 0;
}

void key_cache_clear(struct key_cache *cache)
{
    cache->n_blocks = 0;
}

uint32_t key_cache_run(const struct key_cache *cache, uint32_t layer, uint32_t kv_head, uint32_t first_block,
                       const void **ret_tiles, const float **ret_sides)
{
    assert(cache->codec && first_block < cache->n_blocks);
    assert(layer < cache->shape.n_layers && kv_head < cache->shape.n_kv_heads);
    float *sides;
    *ret_tiles = tile_of(cache, layer, kv_head, first_block, &sides);
    *ret_sides = sides;
    const uint32_t in_chunk = KEY_CACHE_CHUNK_BLOCKS - first_block % KEY_CACHE_CHUNK_BLOCKS;
    const uint32_t left = cache->n_blocks - first_block;
    return left < in_chunk ? left : in_chunk;
}
