/*
 * layer.c - how long one layer's attention of a decode step takes at 128k to 4M tokens: old keys on the device, rows in memory of the
 * host. layer.h says how they are made.
 *
 * usage: layer [--tiny] [--seconds N] [--threads N]
 * A line of JSON per context and policy on stdout. Exit status 1: no device, a call failed, or attention is not what it should be.
 */
#include "tests/backend/cuda-on-device/layer.h"

#include <errno.h>
#include <math.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "common/cgroup.h"
#include "gpu-worker/keys/key_cache.h"
#include "tests/backend/cuda-on-device/layer_device.h"

#define N_LAYERS     32u
#define MOST_STEPS   51u
#define STEP_SECONDS 0.7 /* of steps at one context and policy */
#define MOST_ERROR   0.5 /* of the length of what full attention gives; the policies' own is a tenth of it */

/* Of two policies with the same codec. */
static const char *const policies[] = {"default", "klt1,mass=0.9"};
static const uint32_t contexts[] = {131072, 524288, 1048576, 2097152, 4194304}, tiny_contexts[] = {2048, 4096};
static const struct layer_size size = {512, 4, 32}, tiny_size = {16, 2, 8};
#define N_POLICIES (sizeof policies / sizeof *policies)
#define N_CONTEXTS (sizeof contexts / sizeof *contexts)

struct app {
    bool tiny;
    double until;
    struct pool *pool;
    const struct kernels *kernels;
    struct layer_rows *rows;
    struct quantizers *quantizers;
    struct policy found[N_POLICIES];
    struct layer_device *device;
    bool failed;
};

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static void skip(const char *policy, uint32_t n_tokens, const char *why)
{
    printf("{\"policy\": \"%s\", \"tokens\": %u, \"skipped\": \"%s\"}\n", policy, n_tokens, why);
    fflush(stdout);
}

/* Tokens whose rows and sums the host has memory for, with a tenth left. */
static uint32_t most_tokens(void)
{
    struct cgroup_memory group;
    cgroup_memory(&group);
    const uint64_t kib = cgroup_read_number("/proc/meminfo", "MemAvailable:");
    const uint64_t free_bytes = kib > UINT64_MAX / 1024 ? UINT64_MAX : 1024 * kib;
    const uint64_t bytes = (free_bytes < group.left_bytes ? free_bytes : group.left_bytes) / 10 * 9;
    const uint64_t n_blocks = bytes / (LAYER_BLOCK_BYTES + LAYER_BLOCK_SUMS * sizeof(float));
    return n_blocks > UINT32_MAX / LAYER_TOKENS ? UINT32_MAX : (uint32_t)n_blocks * LAYER_TOKENS;
}

/* ---- a context ---- */

static int by_size(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Median of a part of the steps' times. */
static double median(const struct layer_times *times, uint32_t n, size_t offset)
{
    double values[MOST_STEPS];
    for (uint32_t i = 0; i < n; i++)
        memcpy(&values[i], (const char *)&times[i] + offset, sizeof *values);
    qsort(values, n, sizeof *values, by_size);
    return values[n / 2];
}

static double whole_median(const struct layer_times *times, uint32_t n)
{
    double values[MOST_STEPS];
    for (uint32_t i = 0; i < n; i++)
        values[i] = times[i].asked + times[i].waited + times[i].gathered + times[i].merged;
    qsort(values, n, sizeof *values, by_size);
    return values[n / 2];
}

/* |out - exact| / |exact|, all heads together; NaN where there is one. */
static double error_of(const float *out, const float *exact)
{
    double error = 0, length = 0;
    for (uint32_t i = 0; i < LAYER_N_HEADS * LAYER_DIM; i++) {
        error += pow((double)out[i] - (double)exact[i], 2);
        length += pow((double)exact[i], 2);
    }
    return sqrt(error / length);
}

static void print(const struct app *app, size_t p, uint32_t n_tokens, const struct layer_times *times, uint32_t n,
                  const struct layer_times *full, double error)
{
#define MEDIAN(part) median(times, n, offsetof(struct layer_times, part))
    const double whole = whole_median(times, n), gathered = MEDIAN(gathered), n_bytes = MEDIAN(n_bytes),
                 kept = MEDIAN(n_kept) / LAYER_N_KV_HEADS;
    printf("{\"policy\": \"%s\", \"tokens\": %u, \"steps\": %u, \"ask_us\": %.1f, \"wait_us\": %.1f, "
           "\"gather_us\": %.1f, \"merge_us\": %.1f, \"layer_us\": %.1f, \"kept\": %.0f, \"kept_share\": %.5f, "
           "\"gather_bytes\": %.0f, \"gather_gb_s\": %.2f, \"ms_of_32_layers\": %.3f, \"tokens_per_s\": %.2f, "
           "\"device_bytes_per_token\": %.1f, \"full_us\": %.1f, \"full_gb_s\": %.2f, \"error\": %.4f}\n",
           policies[p], n_tokens, n, 1e6 * MEDIAN(asked), 1e6 * MEDIAN(waited), 1e6 * gathered, 1e6 * MEDIAN(merged),
           1e6 * whole, kept, kept / n_tokens, n_bytes, 1e-9 * n_bytes / gathered, 1e3 * N_LAYERS * whole,
           1 / (N_LAYERS * whole), N_LAYERS * layer_device_key_bytes(app->device) / n_tokens, 1e6 * full->gathered,
           1e-9 * full->n_bytes / full->gathered, error);
#undef MEDIAN
    fflush(stdout);
}

/* Steps under one policy, and the same attention in full. */
static int measure(struct app *app, const struct layer_gather *gather, size_t p, uint32_t n_tokens)
{
    static float out[LAYER_N_HEADS * LAYER_DIM], exact[LAYER_N_HEADS * LAYER_DIM];
    const struct policy *policy = &app->found[p];
    const uint32_t n_queries = app->rows->size.n_queries, n_most = app->tiny ? 1 : MOST_STEPS;
    struct layer_times times[MOST_STEPS], full, last;
    uint32_t n = 0;
    int r = 0;
    for (uint32_t i = 0; i < n_queries && r == 0; i++) /* warm-up */
        r = layer_device_step(app->device, policy, gather, i, out, &last);
    for (const double until = now() + STEP_SECONDS; r == 0 && n < n_most && (n < 3 || now() < until); n++)
        r = layer_device_step(app->device, policy, gather, n % n_queries, out, &times[n]);
    if (r == 0)
        r = layer_device_step(app->device, policy, gather, 0, out, &last);
    if (r < 0)
        return r;
    layer_device_full(app->device, gather, 0, exact, &full);
    const double error = error_of(out, exact);
    print(app, p, n_tokens, times, n, &full, error);
    if (!(error < MOST_ERROR)) {
        fprintf(stderr, "layer: %s at %u tokens: attention differs by %.3f of its length\n", policies[p], n_tokens,
                error);
        app->failed = true;
    }
    return 0;
}

static void put_keys(struct app *app, uint32_t n_blocks)
{
    for (uint32_t i = 0; i < app->rows->size.n_queries * app->rows->size.n_peaks; i++)
        layer_device_put(app->device, layer_rows_peak_block(app->rows, n_blocks, i));
}

static int run_context(struct app *app, uint32_t n_tokens)
{
    const uint32_t n_blocks = n_tokens / LAYER_TOKENS;
    struct layer_gather *gather = NULL;
    layer_rows_extend(app->rows, n_blocks);
    int r = layer_device_extend(app->device, n_blocks);
    if (r == 0)
        r = layer_gather_new(app->rows, n_blocks, &gather);
    if (r < 0)
        return r;
    layer_rows_put_peaks(app->rows, n_blocks);
    put_keys(app, n_blocks);
    for (size_t p = 0; p < N_POLICIES && r == 0; p++) {
        if (app->found[p].quantizer != app->found[0].quantizer)
            skip(policies[p], n_tokens, "codec");
        else
            r = measure(app, gather, p, n_tokens);
    }
    layer_rows_remove_peaks(app->rows, n_blocks);
    put_keys(app, n_blocks);
    layer_gather_free(gather);
    return r;
}

static void run_contexts(struct app *app)
{
    const uint32_t *all = app->tiny ? tiny_contexts : contexts, most = app->rows->most_blocks * LAYER_TOKENS;
    const size_t n = app->tiny ? sizeof tiny_contexts / sizeof *tiny_contexts : N_CONTEXTS;
    const char *why = NULL;
    for (size_t c = 0; c < n; c++) {
        if (!why && all[c] > most)
            why = "host-memory";
        if (!why && now() > app->until)
            why = "deadline";
        const int r = why ? 0 : run_context(app, all[c]);
        if (r == -ENOMEM) {
            why = "device-memory";
        } else if (r < 0) {
            fprintf(stderr, "layer: %s: %s\n", strerror(-r), layer_device_error(app->device));
            why = "error";
            app->failed = true;
        }
        for (size_t p = 0; p < N_POLICIES && why; p++)
            skip(policies[p], all[c], why);
    }
}

/* ---- all of it ---- */

static void setup_thread(void *context, uint32_t thread)
{
    (void)context, (void)thread;
    kernels_thread_setup();
}

static int find_policies(struct app *app, char *sentence, size_t sentence_size)
{
    const struct row_shape shape = {1, LAYER_N_KV_HEADS, LAYER_DIM, ROW_CODEC_F16};
    const uint8_t hash[16] = {0};
    struct key_statistics *statistics = NULL;
    bool kept;
    int r = quantizers_new(&shape, hash, NULL, &app->quantizers);
    if (r == 0)
        r = layer_statistics(app->rows, &statistics);
    if (r == 0)
        r = quantizers_take_statistics(app->quantizers, statistics, &kept, sentence, sentence_size);
    for (size_t p = 0; p < N_POLICIES && r == 0; p++)
        r = policy_find(app->quantizers, policies[p], &app->found[p], sentence, sentence_size);
    return r;
}

static int start(struct app *app, uint32_t n_threads, char *sentence, size_t sentence_size)
{
    cpu_set_t cpus;
    if (n_threads == 0)
        n_threads = sched_getaffinity(0, sizeof cpus, &cpus) == 0 ? (uint32_t)CPU_COUNT(&cpus) : 1;
    const uint32_t last = app->tiny ? tiny_contexts[1] : contexts[N_CONTEXTS - 1], most = most_tokens();
    const double began = now();
    kernels_thread_setup();
    app->kernels = kernels_get(KERNELS_ISA_AUTO);
    int r = pool_new(n_threads, setup_thread, NULL, &app->pool);
    if (r == 0)
        r = layer_rows_new(app->tiny ? &tiny_size : &size, (most < last ? most : last) / LAYER_TOKENS, app->pool,
                           app->kernels, &app->rows);
    if (r == 0)
        r = find_policies(app, sentence, sentence_size);
    if (r == 0)
        r = layer_device_new(app->rows, &app->found[0], &app->device, sentence, sentence_size);
    if (r < 0)
        return r;
    printf("{\"back_end\": \"%s\", \"threads\": %u, \"kernels\": \"%s\", \"seconds\": %.2f, \"deviation\": %.1f, "
           "\"distinct_tokens\": %u, \"peaks\": %u, \"peaks_share\": %.2f}\n",
           layer_device_describe(app->device), pool_n_threads(app->pool), app->kernels->name, now() - began,
           LAYER_DEVIATION, app->rows->size.n_distinct * LAYER_TOKENS, app->rows->size.n_peaks, LAYER_SHARE);
    fflush(stdout);
    return 0;
}

int main(int argc, char **argv)
{
    static struct app app;
    double seconds = 90;
    uint32_t n_threads = 0;
    char sentence[512] = "";
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--tiny")) {
            app.tiny = true;
        } else if (!strcmp(argv[i], "--seconds") && i + 1 < argc) {
            seconds = strtod(argv[++i], NULL);
        } else if (!strcmp(argv[i], "--threads") && i + 1 < argc) {
            n_threads = (uint32_t)strtoul(argv[++i], NULL, 10);
        } else {
            fprintf(stderr, "usage: layer [--tiny] [--seconds N] [--threads N]\n");
            return 2;
        }
    }
    app.until = now() + seconds;
    int r = start(&app, n_threads, sentence, sizeof sentence);
    if (r < 0)
        fprintf(stderr, "layer: %s\n", sentence[0] ? sentence : strerror(-r));
    else
        run_contexts(&app);
    layer_device_free(app.device);
    quantizers_free(app.quantizers);
    layer_rows_free(app.rows);
    pool_free(app.pool);
    return r < 0 || app.failed ? 1 : 0;
}
