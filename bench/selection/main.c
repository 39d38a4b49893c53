/*
 * main.c - how long a selection takes on this machine, one thread, without the codec's scoring.
 *
 *     bench-selection [--isa plain|avx2|avx512|auto] [--blocks N] [--group N]
 *
 * The codec of this program copies scores that were made before (normal, different from block to block, as attention has
 * them); the time of the copies alone is taken off. Every line is the best of several rounds.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "gpu-worker/policy/selection.h"

#define HEAD_DIM     64u
#define N_EXACT      100u
#define N_KINDS      8u /* of scores, taken in turn */
#define ROUNDS       200
#define CALLS        40
#define MOST_SECONDS 1.0

static struct {
    uint32_t group, n_blocks;
    float *scores; /* [N_KINDS][group][n_blocks * 64] */
    uint32_t kind;
} copies;

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

static float normal(void)
{
    double u = (rand() + 1.0) / (RAND_MAX + 1.0), v = rand() / (RAND_MAX + 1.0);
    return (float)(sqrt(-2 * log(u)) * cos(6.283185307179586 * v));
}

static size_t copy_tile_bytes(const struct key_head *keys)
{
    (void)keys;
    return 64;
}
static void copy_quantize(const struct kernels *kernels, const struct key_head *head, const float *keys, void *tile,
                          float *ret_side)
{
    (void)kernels, (void)keys, (void)head;
    static uint32_t n_tiles;
    memcpy(tile, &n_tiles, sizeof n_tiles);
    n_tiles++;
    *ret_side = 0;
}
static size_t copy_query_bytes(const struct key_head *head, uint32_t n_queries)
{
    (void)head, (void)n_queries;
    return 64;
}
static void copy_prepare(const struct kernels *kernels, const struct key_head *head, const float *q, uint32_t n_queries,
                         float scale, void *query)
{
    (void)kernels, (void)q, (void)n_queries, (void)head, (void)scale, (void)query;
}
static void copy_score(const struct kernels *kernels, const struct key_head *keys, const void *query,
                       uint32_t n_queries, const void *tiles, const float *sides, uint32_t n_tiles, float *scores,
                       size_t stride)
{
    (void)kernels, (void)query, (void)keys, (void)sides;
    uint32_t first;
    memcpy(&first, tiles, sizeof first);
    const size_t n = (size_t)copies.n_blocks * 64;
    for (uint32_t head = 0; head < n_queries; head++)
        memcpy(scores + head * stride, copies.scores + (copies.kind * copies.group + head) * n + (size_t)first * 64,
               (size_t)n_tiles * 64 * sizeof(float));
}
static const struct key_codec copy_codec = {"copy",           copy_tile_bytes, copy_quantize,
                                            copy_query_bytes, copy_prepare,    copy_score};
static const struct key_head copy_head = {.head_dim = HEAD_DIM};
static const struct key_quantizer copy_quantizer = {
    .codec = &copy_codec, .n_layers = 1, .n_kv_heads = 1, .heads = &copy_head};

static const void *no_rows(void *context, uint32_t layer, uint32_t kv_head)
{
    (void)layer, (void)kv_head;
    return context;
}
static void *cache_alloc(void *context, size_t n_bytes)
{
    (void)context;
    return aligned_alloc(64, (n_bytes + 63) / 64 * 64);
}
static void cache_free(void *context, void *memory, size_t n_bytes)
{
    (void)context, (void)n_bytes;
    free(memory);
}

static void *memory(size_t n_bytes)
{
    void *result = aligned_alloc(64, (n_bytes + 63) / 64 * 64);
    if (result == NULL)
        exit(1);
    memset(result, 0, n_bytes);
    return result;
}

static void make_scores(uint32_t group, uint32_t n_blocks)
{
    copies.group = group;
    copies.n_blocks = n_blocks;
    copies.scores = memory(N_KINDS * group * (size_t)n_blocks * 64 * sizeof(float));
    float *score = copies.scores;
    for (uint32_t i = 0; i < N_KINDS * group; i++)
        for (uint32_t block = 0; block < n_blocks; block++) {
            float level = 1.5f * normal();
            for (uint32_t j = 0; j < 64; j++)
                *score++ = level + 2.8f * normal();
        }
}

static double best_of(void (*call)(void *context), void *context)
{
    double best = INFINITY;
    const double until = now() + MOST_SECONDS;
    for (int round = 0; round < ROUNDS && now() < until; round++) {
        double start = now();
        for (int i = 0; i < CALLS; i++, copies.kind = (copies.kind + 1) % N_KINDS)
            call(context);
        best = fmin(best, (now() - start) / CALLS);
    }
    return best;
}

struct bench {
    const struct kernels *kernels;
    struct selection_item item;
    void *scratch;
    uint64_t n_kept, n_calls;
};

static void run_selection(void *context)
{
    struct bench *bench = context;
    selection_run(bench->kernels, &bench->item, bench->scratch);
    bench->n_kept += bench->item.n_kept;
    bench->n_calls++;
}

static void run_copies(void *context)
{
    struct bench *bench = context;
    for (uint32_t first = 0, n; first < bench->item.n_blocks; first += n) {
        const void *tiles;
        const float *sides;
        n = key_cache_run(bench->item.keys, 0, 0, first, &tiles, &sides);
        n = n < bench->item.n_blocks - first ? n : bench->item.n_blocks - first;
        copy_score(NULL, NULL, NULL, bench->item.group, tiles, sides, n, (float *)bench->scratch + (size_t)first * 64,
                   (size_t)bench->item.n_blocks * 64 + 16);
    }
}

int main(int argc, char **argv)
{
    enum kernels_isa isa = KERNELS_ISA_AUTO;
    uint32_t n_blocks = 126, group = 3;
    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--isa") == 0 && kernels_isa_parse(argv[i + 1], &isa) == 0)
            continue;
        if (strcmp(argv[i], "--blocks") == 0 && (n_blocks = (uint32_t)atoi(argv[i + 1])) > 0)
            continue;
        if (strcmp(argv[i], "--group") == 0 && (group = (uint32_t)atoi(argv[i + 1])) > 0 &&
            group <= KEY_CODEC_MAX_QUERIES)
            continue;
        fprintf(stderr, "usage: bench-selection [--isa plain|avx2|avx512|auto] [--blocks N] [--group N]\n");
        return 2;
    }
    kernels_thread_setup();
    struct bench bench = {.kernels = kernels_get(isa)};
    if (bench.kernels == NULL) {
        fprintf(stderr, "bench-selection: this machine does not have that instruction set\n");
        return 1;
    }
    make_scores(group, n_blocks);

    struct key_cache *keys;
    const struct row_shape shape = {.n_layers = 1, .n_kv_heads = 1, .head_dim = HEAD_DIM, .codec = ROW_CODEC_F16};
    const struct key_cache_memory allocator = {.alloc = cache_alloc, .free = cache_free};
    void *rows = memory(layout_head_rows_bytes(&shape));
    if (key_cache_new(&copy_quantizer, &shape, NULL, &allocator, &keys) != 0)
        return 1;
    for (uint32_t block = 0; block < n_blocks; block++)
        if (key_cache_add(keys, bench.kernels, no_rows, rows) != 0)
            return 1;

    const size_t n_old = (size_t)n_blocks * 64;
    float *exact = memory(group * (2 + HEAD_DIM) * sizeof(float)),
          *exact_scores = memory(group * N_EXACT * sizeof(float));
    for (uint32_t head = 0; head < group; head++) {
        exact[head * (2 + HEAD_DIM)] = 5.0f;
        for (uint32_t i = 0; i < N_EXACT; i++) {
            exact_scores[head * N_EXACT + i] = i == 0 ? 5.0f : 1.5f * normal();
            exact[head * (2 + HEAD_DIM) + 1] += expf(exact_scores[head * N_EXACT + i] - 5.0f);
        }
    }
    bench.scratch = memory(selection_scratch_bytes(&copy_quantizer, group, n_blocks));
    bench.item = (struct selection_item){
        .q = memory(group * HEAD_DIM * sizeof(float)),
        .group = group,
        .head_dim = HEAD_DIM,
        .scale = 0.125f,
        .exact = exact,
        .exact_scores = exact_scores,
        .exact_stride = N_EXACT,
        .n_exact = N_EXACT,
        .keys = keys,
        .n_blocks = n_blocks,
        .masks = memory(n_blocks * sizeof(uint64_t)),
        .masses = memory(group * n_blocks * sizeof(float)),
        .references = memory(group * sizeof(float)),
        .weights_stride = n_old,
    };
    float *weights = memory(group * n_old * sizeof(float));
    const double copying = best_of(run_copies, &bench);
    printf("%s, %u blocks, group %u; %.1f us of copying scores taken off\n", bench.kernels->name, n_blocks, group,
           copying * 1e6);
    static const struct {
        enum policy_selector selector;
        float parameter;
        bool weights;
    } lines[] = {
        {POLICY_SELECTOR_DEVIATION, 0.01f, false}, {POLICY_SELECTOR_DEVIATION, 0.02f, false},
        {POLICY_SELECTOR_DEVIATION, 0.1f, false},  {POLICY_SELECTOR_DEVIATION, 0.4f, false},
        {POLICY_SELECTOR_MASS, 0.5f, false},       {POLICY_SELECTOR_MASS, 0.9f, false},
        {POLICY_SELECTOR_MASS, 0.95f, false},      {POLICY_SELECTOR_DEVIATION, 0.02f, true},
        {POLICY_SELECTOR_L2, 0.0005f, false},      {POLICY_SELECTOR_L2, 0.00085f, false},
        {POLICY_SELECTOR_L2, 0.005f, false},
    };
    static const char *const names[] = {"full", "mass", "deviation", "l2"};
    for (size_t i = 0; i < sizeof lines / sizeof lines[0]; i++) {
        struct policy policy = {.terms = {.selector = lines[i].selector, .parameter = lines[i].parameter, .tail = true},
                                .quantizer = &copy_quantizer,
                                .mode = lines[i].weights ? AGGREGATE_WEIGHTS : AGGREGATE_RESCORE};
        bench.item.policy = &policy;
        bench.item.weights = lines[i].weights ? weights : NULL;
        bench.n_kept = bench.n_calls = 0;
        double seconds = best_of(run_selection, &bench) - copying;
        printf("%-9s %-7g%s  %6.1f us an item, %5.1f %% kept\n", names[lines[i].selector], (double)lines[i].parameter,
               lines[i].weights ? ", weights" : "         ", seconds * 1e6,
               100.0 * (double)bench.n_kept / (double)bench.n_calls / (double)(n_old - LAYOUT_N_SINKS));
    }
    return 0;
}
