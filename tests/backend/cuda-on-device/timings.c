/*
 * timings.c - see timings.h: times of the CUDA back end's kernels and of copies.
 *
 * usage: timings [--describe] [--tiny] [--seconds N]
 * --describe says what the device is, and nothing else. Exit status 1: no device, or a case failed.
 */
#include "tests/backend/cuda-on-device/timings.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MAX_SAMPLES  101u
#define CASE_SECONDS 0.1 /* of sampling a case; at least three samples */
#define BATCH_US     200.0
#define MAX_BATCH    64u
#define POOL_BYTES   ((size_t)4 << 30)
#define TINY_BYTES   ((size_t)4 << 20)
#define SEED_BYTES   ((size_t)1 << 20) /* of random data, repeated through the pool */

double timings_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void print_name(const struct timing *timing)
{
    printf("{\"kernel\": \"%s\", \"type\": \"%s\", \"shape\": \"%s\"", timing->kernel, timing->type, timing->shape);
}

void timings_skip(const struct timing *timing, const char *why)
{
    print_name(timing);
    printf(", \"skipped\": \"%s\"}\n", why);
    fflush(stdout);
}

void *timings_new(const struct timing *timing, size_t n_bytes)
{
    void *memory = NULL;
    if (cudaMalloc(&memory, n_bytes) || cudaMemset(memory, 0, n_bytes) || cudaDeviceSynchronize()) {
        (void)cudaGetLastError();
        (void)cudaFree(memory);
        timings_skip(timing, "memory");
        return NULL;
    }
    return memory;
}

void *timings_copy(const struct timings *timings, size_t n_bytes, uint32_t i)
{
    const size_t stride = (n_bytes + 255) & ~(size_t)255, n_copies = timings->pool_bytes / stride;
    return timings->pool + (n_copies ? i % n_copies : 0) * stride;
}

/* Seconds that a batch takes on the device (or by the host's clock); negative: *ret_error says why not. */
static double batch(struct timings *timings, const struct timing *timing, timings_launch *launch, void *context,
                    uint32_t first, uint32_t n, cudaError_t *ret_error)
{
    float milliseconds = 0;
    const double began = timings_now();
    cudaError_t error = timing->on_host_clock ? cudaSuccess : cudaEventRecord(timings->before, timings->queue.stream);
    for (uint32_t i = 0; i < n && !error; i++)
        error = launch(timings, context, first + i);
    if (!error && !timing->on_host_clock)
        error = cudaEventRecord(timings->after, timings->queue.stream);
    if (!error)
        error = cudaStreamSynchronize(timings->queue.stream);
    const double took = timings_now() - began;
    if (!error && !timing->on_host_clock)
        error = cudaEventElapsedTime(&milliseconds, timings->before, timings->after);
    *ret_error = error;
    return error ? -1 : timing->on_host_clock ? took : 1e-3 * (double)milliseconds;
}

static int by_size(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

void timings_case(struct timings *timings, const struct timing *timing, timings_launch *launch, void *context)
{
    if (timings_now() >= timings->until) {
        timings_skip(timing, "deadline");
        return;
    }
    double samples[MAX_SAMPLES];
    uint32_t n = 0, first = 0, n_batch = 1;
    cudaError_t error = cudaSuccess;
    double took = 0;
    for (uint32_t warm_up = 0; warm_up < (timings->tiny ? 1u : 3u) && !error; warm_up++)
        took = batch(timings, timing, launch, context, first++, 1, &error);
    if (!timing->on_host_clock && !timings->tiny && took * 1e6 < BATCH_US)
        n_batch = took * 1e6 * MAX_BATCH < BATCH_US ? MAX_BATCH : (uint32_t)(BATCH_US / (took * 1e6)) + 1;
    const uint32_t n_most = timings->tiny ? 1 : MAX_SAMPLES, n_least = timings->tiny ? 1 : 3;
    const double until = timings_now() + CASE_SECONDS;
    while (!error && n < n_most && (n < n_least || timings_now() < until)) {
        samples[n] = batch(timings, timing, launch, context, first, n_batch, &error) / n_batch;
        first += n_batch;
        n += !error;
    }
    print_name(timing);
    if (error) {
        printf(", \"error\": \"%s\"}\n", cudaGetErrorName(error));
        timings->n_failed++;
        (void)cudaGetLastError();
    } else {
        qsort(samples, n, sizeof *samples, by_size);
        const double median = samples[n / 2], bytes = timing->bytes, peak = timings->properties.bytes_per_second;
        printf(", \"bytes\": %.0f, \"operations\": %.0f, \"n_samples\": %u, \"batch\": %u, \"us\": %.3f, "
               "\"us_least\": %.3f, \"us_most\": %.3f",
               bytes, timing->operations, n, n_batch, median * 1e6, samples[0] * 1e6, samples[n - 1] * 1e6);
        if (median > 0 && bytes > 0) {
            printf(", \"gb_s\": %.3f", bytes / median * 1e-9);
            if (peak > 0 && !timing->on_host_clock)
                printf(", \"share_of_peak\": %.4f", bytes / median / peak);
        }
        if (median > 0 && timing->operations > 0)
            printf(", \"gflop_s\": %.3f", timing->operations / median * 1e-9);
        printf("}\n");
    }
    fflush(stdout);
}

/* Bits as of weights: no exponent of a half or of a float in them is that of infinity, whatever the type. */
static cudaError_t fill_pool(struct timings *timings)
{
    unsigned char *seed = malloc(SEED_BYTES);
    if (!seed)
        return cudaErrorMemoryAllocation;
    uint64_t random = 88172645463325252u;
    for (size_t i = 0; i < SEED_BYTES; i++) {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        seed[i] = (unsigned char)(random >> 24 & 0xbf);
    }
    cudaError_t error = cudaSuccess;
    for (size_t at = 0; at < timings->pool_bytes && !error; at += SEED_BYTES)
        error = cudaMemcpy(timings->pool + at, seed, SEED_BYTES, cudaMemcpyHostToDevice);
    free(seed);
    return error;
}

static cudaError_t open_device(struct timings *timings)
{
    int n_devices = 0;
    cudaError_t error = cudaGetDeviceCount(&n_devices);
    if (!error && !n_devices)
        error = cudaErrorNoDevice;
    if (!error)
        error = cudaSetDevice(0);
    if (!error)
        error = properties_read(&timings->properties);
    return error;
}

static cudaError_t prepare(struct timings *timings)
{
    size_t n_free = 0, n_total = 0;
    cudaError_t error = cudaMemGetInfo(&n_free, &n_total);
    timings->pool_bytes = timings->tiny ? TINY_BYTES : POOL_BYTES;
    while (!error && timings->pool_bytes > n_free / 2 && timings->pool_bytes > TINY_BYTES)
        timings->pool_bytes /= 2;
    void *pool = NULL;
    if (!error)
        error = cudaMalloc(&pool, timings->pool_bytes);
    timings->pool = pool;
    if (!error)
        error = cudaStreamCreateWithFlags(&timings->queue.stream, cudaStreamNonBlocking);
    if (!error)
        error = cudaEventCreateWithFlags(&timings->before, 0);
    return error ? error : cudaEventCreateWithFlags(&timings->after, 0);
}

static void describe(const struct properties *p)
{
    printf("{\"name\": \"%s\", \"compute_capability\": \"%d.%d\", \"multiprocessors\": %d, \"l2_bytes\": %.0f, "
           "\"clock_mhz\": %.0f, \"memory_clock_mhz\": %.0f, \"memory_bus_bits\": %d, \"memory_peak_gb_s\": %.1f, "
           "\"ecc\": %s, \"pci\": \"%s\", \"driver_cuda\": %d, \"runtime_cuda\": %d",
           p->name, p->major, p->minor, p->n_multiprocessors, p->l2_bytes, p->clock_hz * 1e-6,
           p->memory_clock_hz * 1e-6, p->bus_bits, p->bytes_per_second * 1e-9, p->ecc ? "true" : "false", p->pci,
           p->driver, p->runtime);
    size_t n_free = 0, n_total = 0;
    if (!cudaMemGetInfo(&n_free, &n_total))
        printf(", \"memory_bytes\": %zu, \"memory_free_bytes\": %zu", n_total, n_free);
    printf("}\n");
}

int main(int argc, char **argv)
{
    static struct timings timings;
    double seconds = 120;
    bool only_describe = false;
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--describe")) {
            only_describe = true;
        } else if (!strcmp(argv[i], "--tiny")) {
            timings.tiny = true;
        } else if (!strcmp(argv[i], "--seconds") && i + 1 < argc) {
            seconds = strtod(argv[++i], NULL);
        } else {
            fprintf(stderr, "usage: timings [--describe] [--tiny] [--seconds N]\n");
            return 2;
        }
    }
    timings.until = timings_now() + seconds;
    cudaError_t error = open_device(&timings);
    if (!error && only_describe) {
        describe(&timings.properties);
        return 0;
    }
    if (!error)
        error = prepare(&timings);
    if (!error) {
        timings_copies(&timings); /* they write to the pool */
        error = fill_pool(&timings);
    }
    if (error) {
        fprintf(stderr, "%s: %s\n", cudaGetErrorName(error), cudaGetErrorString(error));
        return 1;
    }
    timings_rows(&timings);
    timings_step(&timings);
    timings_attention(&timings);
    timings_keys(&timings);
    timings_products(&timings);
    timings_blas(&timings);
    (void)cudaEventDestroy(timings.before);
    (void)cudaEventDestroy(timings.after);
    (void)cudaStreamDestroy(timings.queue.stream);
    (void)cudaFree(timings.pool);
    return timings.n_failed ? 1 : 0;
}
