#include "gpu-worker/keys/key_cache.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>

struct key_cache {
    const struct key_codec *codec;
    struct row_shape shape;
    size_t head_bytes; /* of one block, layer and KV head */
    uint8_t **blocks;  /* [n_blocks], each [layer][kv_head][head_bytes] */
    uint32_t n_blocks;
    uint32_t capacity;
};

static size_t block_bytes(const struct key_cache *cache)
{
    return (size_t)cache->shape.n_layers * cache->shape.n_kv_heads * cache->head_bytes;
}

int key_cache_new(const struct key_codec *codec, const struct row_shape *shape, struct key_cache **ret_cache)
{
    struct key_cache *cache = calloc(1, sizeof(*cache));
    if (cache == NULL)
        return -ENOMEM;
    cache->codec = codec;
    cache->shape = *shape;
    cache->head_bytes = codec->block_bytes(shape->head_dim);
    *ret_cache = cache;
    return 0;
}

struct key_cache *key_cache_free(struct key_cache *cache)
{
    if (cache == NULL)
        return NULL;
    for (uint32_t i = 0; i < cache->n_blocks; i++)
        free(cache->blocks[i]);
    free(cache->blocks);
    free(cache);
    return NULL;
}

uint32_t key_cache_n_blocks(const struct key_cache *cache)
{
    return cache->n_blocks;
}

size_t key_cache_bytes(const struct key_cache *cache)
{
    return cache->n_blocks * block_bytes(cache);
}

size_t key_cache_bytes_per_token(const struct key_codec *codec, const struct row_shape *shape)
{
    return (size_t)shape->n_layers * shape->n_kv_heads * codec->block_bytes(shape->head_dim) / LAYOUT_BLOCK_TOKENS;
}

int key_cache_add(struct key_cache *cache, const struct kernels *kernels,
                  const uint16_t *(*rows)(void *context, uint32_t layer, uint32_t kv_head), void *context)
{
    if (cache->n_blocks == cache->capacity) {
        uint32_t capacity = cache->capacity == 0 ? 16 : cache->capacity * 2;
        uint8_t **blocks = realloc(cache->blocks, capacity * sizeof(*blocks));
        if (blocks == NULL)
            return -ENOMEM;
        cache->blocks = blocks;
        cache->capacity = capacity;
    }
    size_t bytes = (block_bytes(cache) + 63) / 64 * 64;
    uint8_t *block = aligned_alloc(64, bytes);
    if (block == NULL)
        return -ENOMEM;
    uint8_t *keys = block;
    for (uint32_t layer = 0; layer < cache->shape.n_layers; layer++)
        for (uint32_t head = 0; head < cache->shape.n_kv_heads; head++, keys += cache->head_bytes)
            cache->codec->quantize(kernels, rows(context, layer, head), cache->shape.head_dim, keys);
    cache->blocks[cache->n_blocks++] = block;
    return 0;
}

const void *key_cache_keys(const struct key_cache *cache, uint32_t block, uint32_t layer, uint32_t kv_head)
{
    assert(block < cache->n_blocks && layer < cache->shape.n_layers && kv_head < cache->shape.n_kv_heads);
    return cache->blocks[block] + ((size_t)layer * cache->shape.n_kv_heads + kv_head) * cache->head_bytes;
}
