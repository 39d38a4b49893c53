/*
 * main.c - how fast the kernels are on this machine: products with packed weights, attention over blocks and rows.
 *
 *     bench-kernels [--isa plain|avx2|avx512|auto] [--threads N] [--only matmul|attend|rows]
 *
 * Every line is the best of several rounds, so that a neighbour's work on a shared machine disturbs little.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "common/pool.h"
#include "gpu-worker/backend/backend.h"

#define ROUND_SECONDS 0.0005
#define ROUNDS        400
#define MOST_SECONDS  0.7

static const struct backend_ops *const ops = &backend_cpu;
static struct backend *backend;
static struct pool *pool;
static const struct kernels *kernels;

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

/* Seconds of one call. */
static double measure(void (*call)(void *context), void *context)
{
    double best = INFINITY;
    call(context);
    const double until = now() + MOST_SECONDS;
    for (int round = 0; round < ROUNDS && now() < until; round++) {
        int n = 0;
        double start = now(), end = start;
        for (; end - start < ROUND_SECONDS; n++, end = now())
            call(context);
        best = fmin(best, (end - start) / n);
    }
    return best;
}

static void thread_setup(void *context, uint32_t thread)
{
    (void)context;
    (void)thread;
    kernels_thread_setup();
}

static void *filled(size_t n_bytes)
{
    uint8_t *memory = aligned_alloc(64, (n_bytes + 63) / 64 * 64);
    if (!memory)
        exit(1);
    for (size_t i = 0; i < n_bytes; i++)
        memory[i] = (uint8_t)(i * 2654435761u >> 13) & 0x3f; /* small positive f16 and f32 numbers, too */
    return memory;
}

static float *filled_floats(size_t n)
{
    float *numbers = filled(n * sizeof *numbers);
    for (size_t i = 0; i < n; i++)
        numbers[i] = (float)((i * 7919) % 1009) / 504.0f - 1.0f;
    return numbers;
}

struct matmul {
    struct weight **weights; /* more than the caches hold, taken in turn */
    uint32_t n_weights, next, n_tokens;
    const float *x;
    float *y;
};

static void run_matmul(void *context)
{
    struct matmul *matmul = context;
    const struct weight *weight = matmul->weights[matmul->next++ % matmul->n_weights];
    ops->matmul(backend, &weight, 1, matmul->x, matmul->n_tokens, &matmul->y);
}

static void bench_matmul(enum tensor_type type, uint32_t n_rows, uint32_t n_columns)
{
    const size_t n_bytes = tensor_row_bytes(type, n_columns) * n_rows;
    const uint32_t n_weights = (uint32_t)(100000000 / n_bytes) + 1;
    struct tensor tensor = {.type = type, .n_rows = n_rows, .n_columns = n_columns, .n_bytes = n_bytes};
    struct weight **weights = calloc(n_weights, sizeof(struct weight *));
    tensor.data = filled(n_bytes);
    for (uint32_t i = 0; weights && i < n_weights; i++)
        if (ops->weight_new(backend, &tensor, &weights[i]) != 0)
            exit(1);
    struct matmul matmul = {.weights = weights, .n_weights = n_weights};
    matmul.x = filled_floats((size_t)512 * n_columns);
    matmul.y = filled_floats((size_t)512 * n_rows);
    static const uint32_t n_tokens[] = {1, 4, 16, 64, 512};
    for (size_t i = 0; i < sizeof n_tokens / sizeof *n_tokens; i++) {
        matmul.n_tokens = n_tokens[i];
        double seconds = measure(run_matmul, &matmul);
        double products = (double)n_rows * n_columns * n_tokens[i];
        printf("matmul %-5s %5ux%-5u tokens %4u  %8.1f us  %7.1f GMAC/s", tensor_type_name((uint32_t)type), n_rows,
               n_columns, n_tokens[i], seconds * 1e6, products / seconds * 1e-9);
        if (n_tokens[i] == 1)
            printf("  %6.1f GB/s of weights", (double)ops->weight_bytes(weights[0]) / seconds * 1e-9);
        printf("\n");
    }
    for (uint32_t i = 0; i < n_weights; i++)
        ops->weight_free(backend, weights[i]);
    free(weights);
    free((void *)(uintptr_t)tensor.data);
    free((void *)(uintptr_t)matmul.x);
    free(matmul.y);
}

struct block_attend {
    const float *q;
    const uint16_t *rows;
    uint64_t masks[256];
    float *partials;
    uint32_t n_queries, head_dim, n_blocks, next;
};

static void run_block(void *context)
{
    struct block_attend *attend = context;
    const uint16_t *rows = attend->rows + (size_t)(attend->next++ % attend->n_blocks) * 128 * attend->head_dim;
    kernels->attend_block(attend->q, attend->n_queries, attend->head_dim, KERNELS_ROWS_F16, rows, attend->masks, 0.125f,
                          attend->partials);
}

static void bench_block(uint32_t n_queries, uint32_t head_dim, const char *kind, uint64_t mask, int causal)
{
    struct block_attend attend = {.n_queries = n_queries, .head_dim = head_dim, .n_blocks = 64};
    attend.q = filled_floats((size_t)n_queries * head_dim);
    attend.rows = filled((size_t)attend.n_blocks * 128 * head_dim * sizeof(uint16_t));
    attend.partials = filled_floats((size_t)n_queries * KERNELS_PARTIAL_FLOATS(head_dim));
    double tokens = 0;
    for (uint32_t i = 0; i < n_queries; i++) {
        attend.masks[i] = causal ? ~UINT64_C(0) >> (63 - i * 64 / n_queries) : mask;
        tokens += __builtin_popcountll(attend.masks[i]);
    }
    double seconds = measure(run_block, &attend);
    double row_bytes = 4.0 * head_dim * __builtin_popcountll(attend.masks[n_queries - 1]);
    printf("attend_block %-7s head_dim %3u queries %3u  %8.2f us  %6.1f GMAC/s  %6.1f GB/s of rows, 1 thread\n", kind,
           head_dim, n_queries, seconds * 1e6, tokens * 2 * head_dim / seconds * 1e-9, row_bytes / seconds * 1e-9);
    free((void *)(uintptr_t)attend.q);
    free((void *)(uintptr_t)attend.rows);
    free(attend.partials);
}

/* Rows of one codec that lie at random in far more memory than the caches hold. */
struct far_rows {
    const float *q;
    char *memory;
    const void **rows; /* [FAR_ROWS + 128] */
    float *partials, *weights;
    uint32_t n_queries, head_dim, next;
    enum kernels_rows codec;
};

#define FAR_BYTES ((size_t)256 << 20)
#define FAR_ROWS  (1u << 16)

/* The next 64 rows, those after them announced or not. */
static void run_far(struct far_rows *far, uint32_t fetch_from, uint32_t n_fetch)
{
    const uint32_t first = far->next % FAR_ROWS;
    far->next += 64;
    kernels->attend_rows(far->q, far->n_queries, far->head_dim, far->codec, far->rows + first, 64, fetch_from, n_fetch,
                         0.125f, far->partials);
}

static void run_far_alone(void *context)
{
    run_far(context, 64, 64);
}

static void run_far_in_turn(void *context)
{
    run_far(context, 64, 128);
}

static void run_far_weighed(void *context)
{
    struct far_rows *far = context;
    const uint32_t first = far->next % FAR_ROWS;
    far->next += 64;
    kernels->weigh_rows(far->n_queries, far->head_dim, far->codec, far->rows + first, 64, far->weights, 64,
                        far->partials);
}

static void run_near(void *context)
{
    struct far_rows *far = context;
    kernels->attend_rows(far->q, far->n_queries, far->head_dim, far->codec, far->rows, 64, 64, 64, 0.125f,
                         far->partials);
}

static void run_mean(void *context)
{
    struct far_rows *far = context;
    for (uint32_t b = 0; b < 64; b++)
        kernels->weigh_mean(far->n_queries, far->head_dim, (const float *)(const void *)far->rows[b], far->weights + b,
                            64, far->partials);
}

static void bench_far(struct far_rows *far, uint32_t n_queries, uint32_t head_dim, enum kernels_rows codec)
{
    static const struct {
        const char *name;
        void (*run)(void *context);
    } runs[] = {
        {"attend_rows, near", run_near},
        {"attend_rows, far", run_far_alone},
        {"attend_rows, far, next announced", run_far_in_turn},
        {"weigh_rows, far", run_far_weighed},
    };
    const size_t row_bytes = kernels_row_bytes(head_dim, codec);
    far->n_queries = n_queries;
    far->head_dim = head_dim;
    far->codec = codec;
    far->q = filled_floats((size_t)n_queries * head_dim);
    far->weights = filled_floats((size_t)n_queries * 64);
    far->partials = filled_floats((size_t)n_queries * KERNELS_PARTIAL_FLOATS(head_dim));
    uint64_t random = 88172645463325252u;
    for (uint32_t i = 0; i < FAR_ROWS + 128; i++) {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        far->rows[i] = far->memory + random % (FAR_BYTES / row_bytes - 1) * row_bytes;
    }
    for (size_t i = 0; i < sizeof runs / sizeof *runs; i++) {
        double seconds = measure(runs[i].run, far);
        printf("%-33s %-4s head_dim %3u queries %3u  %8.2f us  %6.1f GMAC/s  %6.1f GB/s of rows, 1 thread\n",
               runs[i].name, codec == KERNELS_ROWS_F16 ? "f16" : "q8_0", head_dim, n_queries, seconds * 1e6,
               64.0 * (i == 3 ? 1 : 2) * head_dim * n_queries / seconds * 1e-9,
               64.0 * (double)row_bytes / seconds * 1e-9);
    }
    if (codec == KERNELS_ROWS_F16) {
        for (uint32_t i = 0; i < 64; i++)
            far->rows[i] = far->memory + (size_t)i * 4096 * 16;
        double seconds = measure(run_mean, far);
        printf("weigh_mean head_dim %3u queries %3u  %8.2f us for 64 blocks\n", head_dim, n_queries, seconds * 1e6);
    }
    free((void *)(uintptr_t)far->q);
    free(far->weights);
    free(far->partials);
}

static void bench_rows(void)
{
    struct far_rows far = {.memory = ops->alloc(backend, FAR_BYTES), .rows = calloc(FAR_ROWS + 128, sizeof *far.rows)};
    if (!far.memory || !far.rows)
        exit(1);
    for (size_t i = 0; i < FAR_BYTES; i++)
        far.memory[i] = (char)((i * 2654435761u >> 13) & 0x3f);
    for (uint32_t head_dim = 64; head_dim <= 128; head_dim += 64) {
        bench_far(&far, 3, head_dim, KERNELS_ROWS_F16);
        bench_far(&far, 3, head_dim, KERNELS_ROWS_Q8_0);
        bench_far(&far, 8, head_dim, KERNELS_ROWS_F16);
    }
    ops->free(backend, far.memory);
    free(far.rows);
}

int main(int argc, char **argv)
{
    enum kernels_isa isa = KERNELS_ISA_AUTO;
    uint32_t n_threads = 2;
    const char *only = "";
    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--isa") == 0 && kernels_isa_parse(argv[i + 1], &isa) == 0)
            continue;
        if (strcmp(argv[i], "--threads") == 0 && (n_threads = (uint32_t)atoi(argv[i + 1])) > 0)
            continue;
        if (strcmp(argv[i], "--only") == 0) {
            only = argv[i + 1];
            continue;
        }
        fprintf(stderr,
                "usage: bench-kernels [--isa plain|avx2|avx512|auto] [--threads N] [--only matmul|attend|rows]\n");
        return 2;
    }
    kernels_thread_setup();
    char error[128];
    if (pool_new(n_threads, thread_setup, NULL, &pool) != 0)
        return 1;
    struct backend_options options = {.isa = isa, .pool = pool};
    if (ops->open(&options, &backend, error, sizeof error) != 0) {
        fprintf(stderr, "bench-kernels: %s\n", error);
        return 1;
    }
    kernels = kernels_get(isa);
    printf("%s\n", ops->describe(backend));
    static const enum tensor_type types[] = {TENSOR_Q4_0, TENSOR_Q4_1, TENSOR_Q4_K, TENSOR_Q5_K,
                                             TENSOR_Q6_K, TENSOR_Q8_0, TENSOR_F16,  TENSOR_F32};
    if (strcmp(only, "attend") != 0 && strcmp(only, "rows") != 0) {
        bench_matmul(TENSOR_Q4_1, 576, 1536);
        for (size_t i = 0; i < sizeof types / sizeof *types; i++)
            bench_matmul(types[i], 1024, 2048);
    }
    for (uint32_t head_dim = 64; head_dim <= 128 && strcmp(only, "matmul") != 0 && strcmp(only, "rows") != 0;
         head_dim += 64) {
        bench_block(1, head_dim, "dense", ~UINT64_C(0), 0);
        bench_block(3, head_dim, "dense", ~UINT64_C(0), 0);
        bench_block(8, head_dim, "dense", ~UINT64_C(0), 0);
        bench_block(3, head_dim, "sparse", UINT64_C(0x0001000800040010), 0);
        bench_block(192, head_dim, "dense", ~UINT64_C(0), 0);
        bench_block(192, head_dim, "causal", 0, 1);
    }
    if (strcmp(only, "matmul") != 0 && strcmp(only, "attend") != 0)
        bench_rows();
    ops->close(backend);
    pool_free(pool);
    return 0;
}
