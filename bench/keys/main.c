/*
 * main.c - how fast keys are quantized and scored on this machine, one thread.
 *
 *     bench-keys [--isa plain|avx2|avx512|auto] [--layers N] [--kv-heads N] [--group N] [--head-dim N] [--blocks N]
 *               [--codec f16|rot4|rot3|rot2|pair3|pair2|pair1|klt2|klt1|klt0]
 *
 * Time is the thread's own, and the best of several rounds, so that work beside it disturbs little. The default
 * shape is a small model over 32,768 old tokens. Tiles come in runs of a chunk, as a key cache gives them. The statistics that
 * pair codecs ask for are made up.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "gpu-worker/keys/key_cache.h"
#include "gpu-worker/keys/quantizers.h"

#define MOST_SECONDS 0.4
#define MOST_ROUNDS  200

static struct {
    uint32_t n_layers, n_kv_heads, group, head_dim, n_blocks;
} shape = {30, 3, 3, 64, 512};
static const struct kernels *kernels;
static struct quantizers *quantizers;

struct work {
    const struct key_codec *codec;
    const struct key_head *heads; /* [pool] */
    size_t tile_bytes, query_bytes;
    float *keys, *q, *sides, *scores;
    uint8_t *tiles, *queries; /* tiles [chunk][pool][KEY_CACHE_CHUNK_BLOCKS] */
};

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

static double measure(void (*call)(const struct work *work), const struct work *work)
{
    double best = INFINITY;
    call(work);
    const double until = now() + MOST_SECONDS;
    for (int round = 0; round < MOST_ROUNDS && now() < until; round++) {
        const double start = now();
        call(work);
        best = fmin(best, now() - start);
    }
    return best;
}

static void *memory_of(size_t n_bytes)
{
    void *memory = aligned_alloc(64, (n_bytes + 63) / 64 * 64);
    if (!memory)
        exit(1);
    memset(memory, 0, n_bytes);
    return memory;
}

static float *floats_of(size_t n)
{
    float *numbers = memory_of(n * sizeof *numbers);
    uint64_t state = 88172645463325252u;
    for (size_t i = 0; i < n; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        numbers[i] = (float)(state >> 40) * 0x1p-23f - 1.0f;
    }
    return numbers;
}

static uint32_t n_pools(void)
{
    return shape.n_layers * shape.n_kv_heads;
}

/* One block of every layer and KV head. */
static void quantize(const struct work *work)
{
    for (uint32_t pool = 0; pool < n_pools(); pool++)
        work->codec->quantize(kernels, &work->heads[pool], work->keys,
                              work->tiles + (size_t)pool * KEY_CACHE_CHUNK_BLOCKS * work->tile_bytes,
                              work->sides + pool);
}

/* The queries of a step. */
static void prepare(const struct work *work)
{
    for (uint32_t pool = 0; pool < n_pools(); pool++)
        work->codec->prepare(kernels, &work->heads[pool], work->q + (size_t)pool * shape.group * shape.head_dim,
                             shape.group, 0.125f, work->queries + pool * work->query_bytes);
}

/* All tiles of a step. */
static void score(const struct work *work)
{
    for (uint32_t pool = 0; pool < n_pools(); pool++)
        for (uint32_t block = 0; block < shape.n_blocks; block += KEY_CACHE_CHUNK_BLOCKS) {
            const uint32_t left = shape.n_blocks - block;
            const size_t first = ((size_t)block / KEY_CACHE_CHUNK_BLOCKS * n_pools() + pool) * KEY_CACHE_CHUNK_BLOCKS;
            work->codec->score(kernels, &work->heads[pool], work->queries + pool * work->query_bytes, shape.group,
                               work->tiles + first * work->tile_bytes, work->sides + first,
                               left < KEY_CACHE_CHUNK_BLOCKS ? left : KEY_CACHE_CHUNK_BLOCKS,
                               work->scores + (size_t)block * KERNELS_BLOCK_TOKENS,
                               (size_t)shape.n_blocks * KERNELS_BLOCK_TOKENS);
        }
}

/* Spreads and moments fall off over the dimensions, as a model's do. */
static void make_statistics(void)
{
    const struct row_shape rows = {shape.n_layers, shape.n_kv_heads, shape.head_dim, ROW_CODEC_F16};
    const uint8_t hash[16] = {0};
    struct key_statistics *statistics;
    bool kept;
    if (quantizers_new(&rows, hash, NULL, &quantizers) != 0 || key_statistics_new(&rows, hash, &statistics) != 0)
        exit(1);
    for (uint32_t pool = 0; pool < n_pools(); pool++) {
        const struct key_statistics_head head =
            key_statistics_head(statistics, pool / shape.n_kv_heads, pool % shape.n_kv_heads);
        for (uint32_t i = 0; i < shape.head_dim; i++) {
            head.q_mean[i] = 1.0f;
            head.q_square[(size_t)i * shape.head_dim + i] = 1.0f + 1.0f / (float)(1 + i);
            head.k_spread[(size_t)i * shape.head_dim + i] = exp2f(-4.0f * (float)i / (float)shape.head_dim);
        }
    }
    if (quantizers_take_statistics(quantizers, statistics, &kept, NULL, 0) != 0)
        exit(1);
}

static void bench(enum policy_codec which)
{
    const struct policy_terms terms = {.codec = which};
    const struct key_quantizer *quantizer;
    if (quantizers_find(quantizers, &terms, &quantizer, NULL, 0) != 0)
        exit(1);
    struct work work = {.codec = quantizer->codec, .heads = quantizer->heads};
    size_t head_bytes = 0; /* one tile of each head; they may differ */
    for (uint32_t pool = 0; pool < n_pools(); pool++) {
        const size_t tile = work.codec->tile_bytes(&work.heads[pool]);
        const size_t query = (work.codec->query_bytes(&work.heads[pool], shape.group) + 63) / 64 * 64;
        work.tile_bytes = tile > work.tile_bytes ? tile : work.tile_bytes;
        work.query_bytes = query > work.query_bytes ? query : work.query_bytes;
        head_bytes += tile;
    }
    const size_t n_chunks = (shape.n_blocks + KEY_CACHE_CHUNK_BLOCKS - 1) / KEY_CACHE_CHUNK_BLOCKS;
    const size_t n_tiles = n_chunks * KEY_CACHE_CHUNK_BLOCKS * n_pools();
    work.keys = floats_of((size_t)KERNELS_BLOCK_TOKENS * shape.head_dim);
    work.q = floats_of((size_t)n_pools() * shape.group * shape.head_dim);
    work.sides = memory_of(n_tiles * sizeof *work.sides);
    work.tiles = memory_of(n_tiles * work.tile_bytes);
    work.queries = memory_of(n_pools() * work.query_bytes);
    work.scores = memory_of((size_t)shape.group * shape.n_blocks * KERNELS_BLOCK_TOKENS * sizeof *work.scores);
    work.codec->quantize(kernels, work.heads, work.keys, work.tiles, work.sides);
    for (size_t t = 1; t < n_tiles; t++) {
        memcpy(work.tiles + t * work.tile_bytes, work.tiles, work.tile_bytes);
        work.sides[t] = work.sides[0];
    }
    const double quantize_s = measure(quantize, &work), prepare_s = measure(prepare, &work);
    const double score_s = measure(score, &work), bytes = (double)shape.n_blocks * (double)head_bytes;
    printf("%-5s tile %5zu bytes  quantize %7.3f ms a block  prepare %7.3f ms a step  score %8.3f ms a step  %5.1f "
           "GB/s  %5.3f ns a key\n",
           work.codec->name, head_bytes / n_pools(), quantize_s * 1e3, prepare_s * 1e3, score_s * 1e3,
           bytes / score_s * 1e-9, score_s * 1e9 / ((double)n_pools() * shape.n_blocks * KERNELS_BLOCK_TOKENS));
    free(work.keys);
    free(work.q);
    free(work.sides);
    free(work.tiles);
    free(work.queries);
    free(work.scores);
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        uint32_t *number;
    } options[] = {{"--layers", &shape.n_layers},
                   {"--kv-heads", &shape.n_kv_heads},
                   {"--group", &shape.group},
                   {"--head-dim", &shape.head_dim},
                   {"--blocks", &shape.n_blocks}};
    enum kernels_isa isa = KERNELS_ISA_AUTO;
    const char *only = NULL;
    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--isa") == 0 && kernels_isa_parse(argv[i + 1], &isa) != 0)
            return 2;
        if (strcmp(argv[i], "--codec") == 0)
            only = argv[i + 1];
        for (size_t j = 0; j < sizeof options / sizeof *options; j++)
            if (strcmp(argv[i], options[j].name) == 0)
                *options[j].number = (uint32_t)strtoul(argv[i + 1], NULL, 10);
    }
    kernels = kernels_get(isa);
    if (!kernels || n_pools() == 0 || shape.group == 0 || shape.group > KEY_CODEC_MAX_QUERIES || shape.n_blocks == 0 ||
        shape.head_dim == 0 || shape.head_dim > KERNELS_MAX_HEAD_DIM) {
        fprintf(stderr, "bench-keys: this machine or this program does not do that\n");
        return 2;
    }
    kernels_thread_setup();
    make_statistics();
    printf("%s, %u layers x %u KV heads x %u queries, head_dim %u, %u old tokens, one thread\n", kernels->name,
           shape.n_layers, shape.n_kv_heads, shape.group, shape.head_dim, shape.n_blocks * KERNELS_BLOCK_TOKENS);
    static const enum policy_codec codecs[] = {
        POLICY_CODEC_ROT2,  POLICY_CODEC_ROT3, POLICY_CODEC_ROT4, POLICY_CODEC_PAIR1, POLICY_CODEC_PAIR2,
        POLICY_CODEC_PAIR3, POLICY_CODEC_KLT2, POLICY_CODEC_KLT1, POLICY_CODEC_KLT0,  POLICY_CODEC_F16};
    for (size_t i = 0; i < sizeof codecs / sizeof *codecs; i++)
        if (!only || strcmp(only, key_codec_find(codecs[i])->name) == 0)
            bench(codecs[i]);
    quantizers_free(quantizers);
    return 0;
}
