/* test_cache.c - the key cache: chunks, room, bytes, runs, memory that runs out, and that rebuilding gives the same bytes. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "gpu-worker/keys/key_cache.h"
#include "tests/unit/keys/fixture.h"

#define N_LAYERS   3u
#define N_KV_HEADS 2u
#define MOST       40u /* blocks */

static const struct kernels *kernels;

/* Counts, and refuses the call after `allowed` ones. */
struct counted {
    size_t n_bytes, n_calls, allowed;
};

static void *count_alloc(void *context, size_t n_bytes)
{
    struct counted *counted = context;
    if (counted->n_calls == counted->allowed)
        return NULL;
    assert_int_equal(n_bytes % 64, 0);
    counted->n_calls++;
    counted->n_bytes += n_bytes;
    return aligned_alloc(64, n_bytes);
}

static void count_free(void *context, void *memory, size_t n_bytes)
{
    ((struct counted *)context)->n_bytes -= n_bytes;
    free(memory);
}

/* The rows of block after block, all of them different. */
struct source {
    struct row_shape shape;
    uint32_t block, n_calls;
    uint8_t rows[64 * (2 * 2 * 64)];
};

static const void *source_rows(void *context, uint32_t layer, uint32_t kv_head)
{
    struct source *source = context;
    const uint32_t n = source->shape.head_dim;
    float k[64], v[64];
    fixture_seed(((uint64_t)source->block * N_LAYERS + layer) * N_KV_HEADS + kv_head);
    const size_t row_bytes = layout_row_bytes(&source->shape);
    for (uint32_t t = 0; t < 64; t++) {
        fixture_normals(k, n, 1.0);
        fixture_normals(v, n, 1.0);
        kernels->encode_row(k, v, n, (enum kernels_rows)source->shape.codec, source->rows + t * row_bytes);
    }
    source->n_calls++;
    return source->rows;
}

static int add(struct key_cache *cache, struct source *source)
{
    source->block = key_cache_n_blocks(cache);
    return key_cache_add(cache, kernels, source_rows, source);
}

static struct row_shape shape_of(uint32_t head_dim, uint32_t codec)
{
    return (struct row_shape){.n_layers = N_LAYERS, .n_kv_heads = N_KV_HEADS, .head_dim = head_dim, .codec = codec};
}

static const struct key_quantizer *quantizer_of(const struct key_codec *codec, const struct row_shape *shape)
{
    return fixture_quantizer(codec, shape->n_layers, shape->n_kv_heads, shape->head_dim);
}

static void check_tile(const struct key_cache *cache, const struct key_codec *codec, struct source *source,
                       uint32_t layer, uint32_t head, uint32_t block)
{
    static _Alignas(64) uint8_t tile[FIXTURE_MAX_TILE];
    static float keys[64 * 64];
    const void *tiles;
    const float *sides;
    float side;
    const uint32_t n_run = key_cache_run(cache, layer, head, block, &tiles, &sides);
    assert_in_range(n_run, 1, key_cache_n_blocks(cache) - block);
    assert_int_equal((uintptr_t)tiles % 64, 0);
    source->block = block;
    kernels->decode_keys(source_rows(source, layer, head), 64, source->shape.head_dim,
                         (enum kernels_rows)source->shape.codec, keys);
    codec->quantize(kernels, fixture_head(source->shape.head_dim), keys, tile, &side);
    assert_memory_equal(tiles, tile, codec->tile_bytes(fixture_head(source->shape.head_dim)));
    assert_memory_equal(sides, &side, sizeof side);
}

static void check_block(const struct key_cache *cache, const struct key_codec *codec, struct source *source,
                        uint32_t block)
{
    for (uint32_t layer = 0; layer < N_LAYERS; layer++)
        for (uint32_t head = 0; head < N_KV_HEADS; head++)
            check_tile(cache, codec, source, layer, head, block);
}

static void test_blocks_come_back(void **unused)
{
    (void)unused;
    static const enum policy_codec which[] = {POLICY_CODEC_F16, POLICY_CODEC_ROT4, POLICY_CODEC_ROT3,
                                              POLICY_CODEC_ROT2};
    static const uint32_t head_dims[] = {20, 64};
    for (size_t w = 0; w < 4; w++)
        for (uint32_t i = 0; i < 4; i++) {
            const struct key_codec *codec = key_codec_find(which[w]);
            struct source source = {.shape = shape_of(head_dims[i % 2], i / 2 ? ROW_CODEC_Q8_0 : ROW_CODEC_F16)};
            struct counted counted = {.allowed = SIZE_MAX};
            const struct key_cache_memory memory = {.alloc = count_alloc, .free = count_free, .context = &counted};
            struct key_cache *cache = NULL;
            assert_int_equal(key_cache_new(quantizer_of(codec, &source.shape), &source.shape, NULL, &memory, &cache),
                             0);
            assert_int_equal(key_cache_n_blocks(cache), 0);
            assert_int_equal(key_cache_bytes(cache), 0);
            for (uint32_t n = 1; n <= MOST; n++) {
                assert_int_equal(add(cache, &source), 0);
                assert_int_equal(key_cache_n_blocks(cache), n);
                assert_int_equal(key_cache_bytes(cache), key_cache_bytes_for(quantizer_of(codec, &source.shape), n));
                assert_int_equal(key_cache_bytes(cache), counted.n_bytes);
            }
            assert_int_equal(counted.n_calls, (MOST + KEY_CACHE_CHUNK_BLOCKS - 1) / KEY_CACHE_CHUNK_BLOCKS);
            for (uint32_t block = 0; block < MOST; block += block < 14 || block > 33 ? 1 : 3)
                check_block(cache, codec, &source, block);
            assert_null(key_cache_free(cache));
            assert_int_equal(counted.n_bytes, 0);
        }
}

/* Runs cover every block once, side by side, and end where a chunk does. */
static void test_runs(void **unused)
{
    (void)unused;
    const struct key_codec *codec = key_codec_find(POLICY_CODEC_ROT2);
    struct source source = {.shape = shape_of(64, ROW_CODEC_F16)};
    struct counted counted = {.allowed = SIZE_MAX};
    const struct key_cache_memory memory = {.alloc = count_alloc, .free = count_free, .context = &counted};
    struct key_cache *cache = NULL;
    assert_int_equal(key_cache_new(quantizer_of(codec, &source.shape), &source.shape, NULL, &memory, &cache), 0);
    for (uint32_t n = 0; n < MOST; n++)
        assert_int_equal(add(cache, &source), 0);
    for (uint32_t first = 0; first < MOST; first++) {
        const void *tiles, *tile;
        const float *sides, *side;
        const uint32_t n = key_cache_run(cache, 1, 1, first, &tiles, &sides);
        const uint32_t end = first / KEY_CACHE_CHUNK_BLOCKS * KEY_CACHE_CHUNK_BLOCKS + KEY_CACHE_CHUNK_BLOCKS;
        assert_int_equal(n, (end < MOST ? end : MOST) - first);
        for (uint32_t i = 0; i < n; i++) {
            key_cache_run(cache, 1, 1, first + i, &tile, &side);
            assert_ptr_equal(tile, (const uint8_t *)tiles + i * codec->tile_bytes(fixture_head(64)));
            assert_ptr_equal(side, sides + i);
        }
    }
    key_cache_free(cache);
}

static void test_reserve_and_clear(void **unused)
{
    (void)unused;
    const struct key_codec *codec = key_codec_find(POLICY_CODEC_ROT2);
    struct source source = {.shape = shape_of(64, ROW_CODEC_F16)};
    struct counted counted = {.allowed = SIZE_MAX};
    const struct key_cache_memory memory = {.alloc = count_alloc, .free = count_free, .context = &counted};
    struct key_cache *cache = NULL;
    assert_int_equal(key_cache_new(quantizer_of(codec, &source.shape), &source.shape, NULL, &memory, &cache), 0);
    assert_int_equal(key_cache_reserve(cache, 0), 0);
    assert_int_equal(counted.n_calls, 0);
    assert_int_equal(key_cache_reserve(cache, 33), 0);
    assert_int_equal(counted.n_calls, 3);
    assert_int_equal(key_cache_bytes(cache), key_cache_bytes_for(quantizer_of(codec, &source.shape), 33));
    assert_int_equal(key_cache_reserve(cache, 17), 0); /* there already */
    counted.allowed = counted.n_calls;
    for (uint32_t round = 0; round < 2; round++) { /* the second after clearing: rebuilt to the same bytes */
        for (uint32_t n = 0; n < 48; n++)
            assert_int_equal(add(cache, &source), 0);
        for (uint32_t block = 0; block < 48; block += 5)
            check_block(cache, codec, &source, block);
        assert_int_equal(add(cache, &source), -ENOMEM);
        assert_int_equal(key_cache_n_blocks(cache), 48);
        key_cache_clear(cache);
        assert_int_equal(key_cache_n_blocks(cache), 0);
        assert_int_equal(key_cache_bytes(cache), key_cache_bytes_for(quantizer_of(codec, &source.shape), 48));
    }
    key_cache_free(cache);
    assert_int_equal(counted.n_bytes, 0);
}

/* A refusal leaves everything as it was; what a failed reservation got is given back. */
static void test_no_memory(void **unused)
{
    (void)unused;
    const struct key_codec *codec = key_codec_find(POLICY_CODEC_ROT4);
    struct source source = {.shape = shape_of(20, ROW_CODEC_Q8_0)};
    for (size_t allowed = 0; allowed < 4; allowed++) {
        struct counted counted = {.allowed = allowed};
        const struct key_cache_memory memory = {.alloc = count_alloc, .free = count_free, .context = &counted};
        struct key_cache *cache = NULL;
        assert_int_equal(key_cache_new(quantizer_of(codec, &source.shape), &source.shape, NULL, &memory, &cache), 0);
        assert_int_equal(key_cache_reserve(cache, 80), -ENOMEM);
        assert_int_equal(counted.n_bytes, 0);
        assert_int_equal(key_cache_bytes(cache), 0);
        counted.allowed = counted.n_calls + allowed;
        uint32_t n = 0;
        while (add(cache, &source) == 0)
            n++;
        assert_int_equal(n, allowed * KEY_CACHE_CHUNK_BLOCKS);
        assert_int_equal(key_cache_n_blocks(cache), n);
        if (n) {
            check_block(cache, codec, &source, 0);
            check_block(cache, codec, &source, n - 1);
        }
        counted.allowed = SIZE_MAX;
        assert_int_equal(add(cache, &source), 0);
        check_block(cache, codec, &source, n);
        key_cache_free(cache);
        assert_int_equal(counted.n_bytes, 0);
    }
}

static void test_no_codec_only_counts(void **unused)
{
    (void)unused;
    struct source source = {.shape = shape_of(64, ROW_CODEC_F16)};
    struct key_cache *cache = NULL;
    assert_int_equal(key_cache_new(NULL, &source.shape, NULL, NULL, &cache), 0);
    assert_int_equal(key_cache_reserve(cache, 1000), 0);
    for (uint32_t n = 0; n < MOST; n++)
        assert_int_equal(add(cache, &source), 0);
    assert_int_equal(source.n_calls, 0);
    assert_int_equal(key_cache_n_blocks(cache), MOST);
    assert_int_equal(key_cache_bytes(cache), 0);
    assert_int_equal(key_cache_bytes_for(NULL, MOST), 0);
    assert_int_equal((uint64_t)key_cache_bytes_per_token(NULL, NULL), 0);
    key_cache_clear(cache);
    assert_int_equal(key_cache_n_blocks(cache), 0);
    key_cache_free(cache);
}

static void test_sizes(void **unused)
{
    (void)unused;
    const struct key_codec *codec = key_codec_find(POLICY_CODEC_ROT2);
    const struct key_quantizer *quantizer = fixture_quantizer(codec, 20, 3, 64);
    bool absent[60] = {[7] = true, [59] = true};
    assert_float_equal(key_cache_bytes_per_token(quantizer, NULL), 60 * (1152 + 4) / 64.0, 1e-9);
    assert_float_equal(key_cache_bytes_per_token(quantizer, absent), 58 * (1152 + 4) / 64.0, 1e-9);
    assert_int_equal(key_cache_bytes_for(quantizer, 16), 16 * 60 * (1152 + 4));
    assert_int_equal(key_cache_bytes_for(quantizer, 17), 32 * 60 * (1152 + 4));
    const struct row_shape too_wide = {.n_layers = 1, .n_kv_heads = 1, .head_dim = 258, .codec = ROW_CODEC_F16};
    const struct key_cache_memory memory = {.alloc = count_alloc, .free = count_free, .context = NULL};
    struct key_cache *cache = NULL;
    assert_int_equal(key_cache_new(quantizer_of(codec, &too_wide), &too_wide, NULL, &memory, &cache), -EINVAL);
    assert_null(cache);
    assert_null(key_cache_free(NULL));
}

/* Heads without keys take no memory; what the others have is what it would be with all of them. */
static void test_absent_heads(void **unused)
{
    (void)unused;
    static const bool absent[N_LAYERS * N_KV_HEADS] = {[0] = true, [3] = true, [5] = true};
    const struct key_codec *codec = key_codec_find(POLICY_CODEC_ROT3);
    struct source source = {.shape = shape_of(64, ROW_CODEC_F16)};
    struct counted counted = {.allowed = SIZE_MAX};
    const struct key_cache_memory memory = {.alloc = count_alloc, .free = count_free, .context = &counted};
    const struct key_quantizer *quantizer = quantizer_of(codec, &source.shape);
    struct key_cache *cache = NULL;
    assert_int_equal(key_cache_new(quantizer, &source.shape, absent, &memory, &cache), 0);
    assert_ptr_equal(key_cache_quantizer(cache), quantizer);
    for (uint32_t n = 0; n < 20; n++)
        assert_int_equal(add(cache, &source), 0);
    assert_int_equal(source.n_calls, 20 * 3); /* rows of the others are not asked for */
    const size_t all = key_cache_bytes_for(quantizer, 20), tile = codec->tile_bytes(fixture_head(64));
    assert_int_equal(key_cache_bytes(cache), all - 2 * KEY_CACHE_CHUNK_BLOCKS * 3 * tile);
    assert_int_equal(counted.n_bytes, key_cache_bytes(cache));
    for (uint32_t pool = 0; pool < N_LAYERS * N_KV_HEADS; pool++) {
        const uint32_t layer = pool / N_KV_HEADS, head = pool % N_KV_HEADS;
        assert_int_equal(key_cache_has(cache, layer, head), !absent[pool]);
        for (uint32_t block = 0; !absent[pool] && block < 20; block += 7)
            check_tile(cache, codec, &source, layer, head, block);
    }
    key_cache_free(cache);
    assert_int_equal(counted.n_bytes, 0);
}

/* Layer after layer, from the last to the first, gives what block after block does. */
static void test_put(void **unused)
{
    (void)unused;
    const struct key_codec *codec = key_codec_find(POLICY_CODEC_ROT2);
    struct source source = {.shape = shape_of(64, ROW_CODEC_F16)};
    struct counted counted = {.allowed = 2};
    const struct key_cache_memory memory = {.alloc = count_alloc, .free = count_free, .context = &counted};
    struct key_cache *cache = NULL;
    assert_int_equal(key_cache_new(quantizer_of(codec, &source.shape), &source.shape, NULL, &memory, &cache), 0);
    assert_int_equal(key_cache_extend(cache, 20), 0);
    assert_int_equal(key_cache_extend(cache, 33), -ENOMEM);
    assert_int_equal(key_cache_extend(cache, 5), 0);
    assert_int_equal(key_cache_n_blocks(cache), 20);
    for (uint32_t layer = N_LAYERS; layer-- > 0;)
        for (uint32_t head = 0; head < N_KV_HEADS; head++)
            for (source.block = 20; source.block-- > 0;)
                key_cache_put(cache, kernels, layer, head, source.block, source_rows(&source, layer, head));
    for (uint32_t block = 0; block < 20; block++)
        check_block(cache, codec, &source, block);
    key_cache_free(cache);
}

int main(void)
{
    kernels = kernels_get(KERNELS_ISA_AUTO);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_blocks_come_back),     cmocka_unit_test(test_runs),
        cmocka_unit_test(test_reserve_and_clear),    cmocka_unit_test(test_no_memory),
        cmocka_unit_test(test_no_codec_only_counts), cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_absent_heads),         cmocka_unit_test(test_put),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
