/* key_cache.c - see key_cache.h. */
#include "gpu-worker/keys/key_cache.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct key_cache {
    const struct key_quantizer *quantizer; /* NULL: blocks are only counted */
    struct row_shape shape;
    struct key_cache_memory memory;
    uint32_t n_blocks;
    uint32_t n_chunks; /* allocated; never fewer than n_blocks need */
    uint32_t capacity; /* of the array */
    uint8_t **chunks;  /* each: tiles [pool][KEY_CACHE_CHUNK_BLOCKS], then sides in the same order */
    size_t *tiles_at;  /* [n_pools + 1]: where a pool's tiles begin in a chunk; a pool that is absent has none */
};

/* (layer, KV head) pairs */
static size_t n_pools(const struct key_quantizer *quantizer)
{
    return (size_t)quantizer->n_layers * quantizer->n_kv_heads;
}

static size_t tile_bytes(const struct key_quantizer *quantizer, size_t pool)
{
    return quantizer->codec->tile_bytes(&quantizer->heads[pool]);
}

/* Tiles of one block, those of absent pools left out; `absent` may be NULL. */
static size_t block_tiles_bytes(const struct key_quantizer *quantizer, const bool *absent, size_t *ret_n_present)
{
    size_t n_bytes = 0, n_present = 0;
    for (size_t pool = 0; pool < n_pools(quantizer); pool++)
        if (absent == NULL || !absent[pool]) {
            n_bytes += tile_bytes(quantizer, pool);
            n_present++;
        }
    *ret_n_present = n_present;
    return n_bytes;
}

/* Sides lie by pool, also of absent ones: four bytes a block. */
static size_t chunk_bytes_of(size_t tiles_bytes, size_t n)
{
    return tiles_bytes + n * KEY_CACHE_CHUNK_BLOCKS * sizeof(float);
}
_Static_assert(KEY_CACHE_CHUNK_BLOCKS * sizeof(float) % 64 == 0, "a chunk is a multiple of 64 bytes");

static size_t chunk_bytes(const struct key_cache *cache)
{
    const size_t n = n_pools(cache->quantizer);
    return chunk_bytes_of(cache->tiles_at[n], n);
}

static uint32_t chunks_for(uint32_t n_blocks)
{
    return n_blocks / KEY_CACHE_CHUNK_BLOCKS + (n_blocks % KEY_CACHE_CHUNK_BLOCKS != 0);
}

static int divide(struct key_cache *cache, const bool *absent)
{
    const size_t n = n_pools(cache->quantizer);
    cache->tiles_at = calloc(n + 1, sizeof *cache->tiles_at);
    if (!cache->tiles_at)
        return -ENOMEM;
    for (size_t pool = 0; pool < n; pool++) {
        const size_t n_bytes = absent && absent[pool] ? 0 : tile_bytes(cache->quantizer, pool);
        cache->tiles_at[pool + 1] = cache->tiles_at[pool] + KEY_CACHE_CHUNK_BLOCKS * n_bytes;
    }
    return 0;
}

int key_cache_new(const struct key_quantizer *quantizer, const struct row_shape *shape, const bool *absent,
                  const struct key_cache_memory *memory, struct key_cache **ret_cache)
{
    if (quantizer && (shape->head_dim == 0 || shape->head_dim > KERNELS_MAX_HEAD_DIM))
        return -EINVAL;
    struct key_cache *cache = calloc(1, sizeof *cache);
    if (!cache)
        return -ENOMEM;
    cache->quantizer = quantizer;
    cache->shape = *shape;
    if (quantizer) {
        assert(quantizer->n_layers == shape->n_layers && quantizer->n_kv_heads == shape->n_kv_heads);
        cache->memory = *memory;
        int error = divide(cache, absent);
        if (error) {
            key_cache_free(cache);
            return error;
        }
    }
    *ret_cache = cache;
    return 0;
}

void key_cache_release(struct key_cache *cache)
{
    for (uint32_t i = 0; i < cache->n_chunks; i++)
        cache->memory.free(cache->memory.context, cache->chunks[i], chunk_bytes(cache));
    cache->n_blocks = cache->n_chunks = 0;
}

struct key_cache *key_cache_free(struct key_cache *cache)
{
    if (!cache)
        return NULL;
    key_cache_release(cache);
    free(cache->chunks);
    free(cache->tiles_at);
    free(cache);
    return NULL;
}

const struct key_quantizer *key_cache_quantizer(const struct key_cache *cache)
{
    return cache->quantizer;
}

bool key_cache_has(const struct key_cache *cache, uint32_t layer, uint32_t kv_head)
{
    const size_t pool = (size_t)layer * cache->shape.n_kv_heads + kv_head;
    return cache->quantizer && cache->tiles_at[pool + 1] > cache->tiles_at[pool];
}

uint32_t key_cache_n_blocks(const struct key_cache *cache)
{
    return cache->n_blocks;
}

size_t key_cache_bytes(const struct key_cache *cache)
{
    return cache->quantizer ? cache->n_chunks * chunk_bytes(cache) : 0;
}

size_t key_cache_bytes_for(const struct key_quantizer *quantizer, uint32_t n_blocks)
{
    size_t n_present;
    if (!quantizer)
        return 0;
    const size_t tiles_bytes = KEY_CACHE_CHUNK_BLOCKS * block_tiles_bytes(quantizer, NULL, &n_present);
    return chunks_for(n_blocks) * chunk_bytes_of(tiles_bytes, n_pools(quantizer));
}

double key_cache_bytes_per_token(const struct key_quantizer *quantizer, const bool *absent)
{
    size_t n_present;
    if (!quantizer)
        return 0;
    const size_t n_bytes = block_tiles_bytes(quantizer, absent, &n_present);
    return (double)(n_bytes + n_present * sizeof(float)) / LAYOUT_BLOCK_TOKENS;
}

int key_cache_reserve(struct key_cache *cache, uint32_t n_blocks)
{
    const uint32_t n_chunks = chunks_for(n_blocks);
    if (!cache->quantizer || n_chunks <= cache->n_chunks)
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
        void *chunk = cache->memory.alloc(cache->memory.context, chunk_bytes(cache));
        if (!chunk)
            break;
        cache->chunks[cache->n_chunks++] = chunk;
    }
    if (cache->n_chunks == n_chunks)
        return 0;
    while (cache->n_chunks > had) /* all or nothing: the rest may serve another session */
        cache->memory.free(cache->memory.context, cache->chunks[--cache->n_chunks], chunk_bytes(cache));
    return -ENOMEM;
}

/* Where block's tile and side of one (layer, KV head) lie. */
static uint8_t *tile_of(const struct key_cache *cache, uint32_t layer, uint32_t kv_head, uint32_t block,
                        float **ret_side)
{
    const size_t pool = (size_t)layer * cache->shape.n_kv_heads + kv_head, in_chunk = block % KEY_CACHE_CHUNK_BLOCKS;
    uint8_t *chunk = cache->chunks[block / KEY_CACHE_CHUNK_BLOCKS];
    float *sides = (float *)(void *)(chunk + cache->tiles_at[n_pools(cache->quantizer)]);
    *ret_side = sides + pool * KEY_CACHE_CHUNK_BLOCKS + in_chunk;
    return chunk + cache->tiles_at[pool] + in_chunk * tile_bytes(cache->quantizer, pool);
}

int key_cache_extend(struct key_cache *cache, uint32_t n_blocks)
{
    int error = key_cache_reserve(cache, n_blocks);
    if (!error && n_blocks > cache->n_blocks)
        cache->n_blocks = n_blocks;
    return error;
}

void key_cache_put(struct key_cache *cache, const struct kernels *kernels, uint32_t layer, uint32_t kv_head,
                   uint32_t block, const void *rows)
{
    if (!key_cache_has(cache, layer, kv_head))
        return;
    assert(block < cache->n_blocks);
    _Alignas(64) float keys[LAYOUT_BLOCK_TOKENS * KERNELS_MAX_HEAD_DIM]; /* not the cache's: many threads may put */
    float *side;
    uint8_t *tile = tile_of(cache, layer, kv_head, block, &side);
    kernels->decode_keys(rows, LAYOUT_BLOCK_TOKENS, cache->shape.head_dim, (enum kernels_rows)cache->shape.codec, keys);
    cache->quantizer->codec->quantize(kernels, key_quantizer_head(cache->quantizer, layer, kv_head), keys, tile, side);
}

/* Of a cache in a device's memory: all heads' tiles at once. */
static int put_on_device(struct key_cache *cache, const void *(*rows)(void *context, uint32_t layer, uint32_t kv_head),
                         void *context)
{
    const uint32_t n_kv_heads = cache->shape.n_kv_heads, block = cache->n_blocks - 1;
    struct key_cache_tile *tiles = calloc(n_pools(cache->quantizer), sizeof *tiles);
    uint32_t n = 0;
    if (!tiles)
        return -ENOMEM;
    for (uint32_t pool = 0; pool < n_pools(cache->quantizer); pool++) {
        const uint32_t layer = pool / n_kv_heads, kv_head = pool % n_kv_heads;
        if (!key_cache_has(cache, layer, kv_head))
            continue;
        tiles[n].head = key_quantizer_head(cache->quantizer, layer, kv_head);
        tiles[n].rows = rows(context, layer, kv_head);
        tiles[n].tile = tile_of(cache, layer, kv_head, block, &tiles[n].side);
        n++;
    }
    cache->memory.quantize(cache->memory.context, cache->quantizer, tiles, n);
    free(tiles);
    return 0;
}

int key_cache_add(struct key_cache *cache, const struct kernels *kernels,
                  const void *(*rows)(void *context, uint32_t layer, uint32_t kv_head), void *context)
{
    int error = key_cache_extend(cache, cache->n_blocks + 1);
    if (error || !cache->quantizer)
        return error;
    if (cache->memory.quantize)
        return put_on_device(cache, rows, context);
    for (uint32_t layer = 0; layer < cache->shape.n_layers; layer++)
        for (uint32_t kv_head = 0; kv_head < cache->shape.n_kv_heads; kv_head++)
            if (key_cache_has(cache, layer, kv_head))
                key_cache_put(cache, kernels, layer, kv_head, cache->n_blocks - 1, rows(context, layer, kv_head));
    return 0;
}

void key_cache_clear(struct key_cache *cache)
{
    cache->n_blocks = 0;
}

uint32_t key_cache_run(const struct key_cache *cache, uint32_t layer, uint32_t kv_head, uint32_t first_block,
                       const void **ret_tiles, const float **ret_sides)
{
    assert(first_block < cache->n_blocks);
    assert(layer < cache->shape.n_layers && kv_head < cache->shape.n_kv_heads && key_cache_has(cache, layer, kv_head));
    float *sides;
    *ret_tiles = tile_of(cache, layer, kv_head, first_block, &sides);
    *ret_sides = sides;
    const uint32_t in_chunk = KEY_CACHE_CHUNK_BLOCKS - first_block % KEY_CACHE_CHUNK_BLOCKS;
    const uint32_t left = cache->n_blocks - first_block;
    return left < in_chunk ? left : in_chunk;
}

struct key_cache_place key_cache_place(const struct key_cache *cache, uint32_t layer, uint32_t kv_head)
{
    assert(key_cache_has(cache, layer, kv_head));
    const size_t pool = (size_t)layer * cache->shape.n_kv_heads + kv_head;
    const size_t sides = cache->tiles_at[n_pools(cache->quantizer)];
    return (struct key_cache_place){.tiles = cache->tiles_at[pool],
                                    .sides = sides + pool * KEY_CACHE_CHUNK_BLOCKS * sizeof(float)};
}

const uint8_t *const *key_cache_chunks(const struct key_cache *cache)
{
    return (const uint8_t *const *)cache->chunks;
}
