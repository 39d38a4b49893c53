/* timings_step.c - see timings.h: what ends a layer and a step: partials of the stores merged, new rows copied, a token chosen. */
#include <stdio.h>
#include <stdlib.h>

#include "gpu-worker/backend/cuda/cuda_sample.h"
#include "tests/backend/cuda-on-device/timings.h"

struct launched {
    uint32_t n_items, n_vocab;
    void *items; /* on the device */
    void *scratch;
};

/* ---- a token of each row ---- */

static cudaError_t launch_sample(struct timings *timings, void *context, uint32_t i)
{
    (void)i; /* logits come from the product before, out of the cache */
    const struct launched *l = context;
    return cuda_sample(&timings->queue, l->items, l->n_items, l->n_vocab, l->scratch);
}

/* Logits as models have them, about normal with a deviation of 3. */
static cudaError_t fill(float *logits, size_t n)
{
    float *host = malloc(n * sizeof *host);
    if (!host)
        return cudaErrorMemoryAllocation;
    uint32_t random = 1;
    for (size_t i = 0; i < n; i++) {
        float sum = 0;
        for (int k = 0; k < 4; k++) {
            random = random * 1664525u + 1013904223u;
            sum += (float)(random >> 8) * 0x1p-24f - 0.5f;
        }
        host[i] = 5.2f * sum;
    }
    const cudaError_t error = cudaMemcpy(logits, host, n * sizeof *host, cudaMemcpyHostToDevice);
    free(host);
    return error;
}

static void sample(struct timings *timings, uint32_t n_rows, uint32_t n_vocab, bool is_greedy)
{
    const size_t n = (size_t)n_rows * n_vocab;
    struct timing timing = {
        .kernel = "sample", .type = is_greedy ? "greedy" : "top-p", .bytes = 4.0 * (double)n * (is_greedy ? 1 : 2)};
    snprintf(timing.shape, sizeof timing.shape, "T%u of %u", n_rows, n_vocab);
    struct launched l = {.n_items = n_rows, .n_vocab = n_vocab};
    float *logits = timings_new(&timing, n * sizeof *logits);
    uint32_t *ids = logits ? timings_new(&timing, n_rows * sizeof *ids) : NULL;
    struct backend_sample *rows = calloc(n_rows, sizeof *rows);
    l.items = ids ? timings_new(&timing, n_rows * sizeof *rows) : NULL;
    l.scratch = l.items ? timings_new(&timing, cuda_sample_bytes(n_rows)) : NULL;
    for (uint32_t i = 0; rows && i < n_rows; i++)
        rows[i] = (struct backend_sample){.logits = logits + (size_t)i * n_vocab,
                                          .temperature = is_greedy ? 0 : 0.8f,
                                          .top_p = 0.95f,
                                          .uniform = 0.5,
                                          .id = ids + i};
    if (l.scratch &&
        (!rows || fill(logits, n) || cudaMemcpy(l.items, rows, n_rows * sizeof *rows, cudaMemcpyHostToDevice)))
        timings_skip(&timing, "memory");
    else if (l.scratch)
        timings_case(timings, &timing, launch_sample, &l);
    free(rows);
    (void)cudaFree(logits);
    (void)cudaFree(ids);
    (void)cudaFree(l.items);
    (void)cudaFree(l.scratch);
}

/* ---- partials, in memory of the host, of KV heads with four query heads of 128 dimensions ---- */

enum { GROUP = 4, HEAD_DIM = 128, PARTIAL_FLOATS = GROUP * (2 + HEAD_DIM), ROW_BYTES = 512 };

static cudaError_t launch_merge(struct timings *timings, void *context, uint32_t i)
{
    (void)i;
    const struct launched *l = context;
    return cuda_merge(&timings->queue, l->items, l->n_items, GROUP, HEAD_DIM);
}

static void merge(struct timings *timings, uint32_t n_items)
{
    const size_t n_floats = (size_t)n_items * PARTIAL_FLOATS, n_bytes = n_items * sizeof(struct backend_merge);
    struct timing timing = {
        .kernel = "merge", .type = "12 lanes, host", .bytes = 4.0 * (double)n_floats * BACKEND_N_LANES};
    snprintf(timing.shape, sizeof timing.shape, "%u KV heads", n_items);
    struct launched l = {.n_items = n_items};
    float *lanes = NULL;
    if (cudaMallocHost((void **)&lanes, n_floats * BACKEND_N_LANES * sizeof *lanes)) {
        timings_skip(&timing, "memory");
        return;
    }
    for (size_t i = 0; i < n_floats * BACKEND_N_LANES; i++)
        lanes[i] = 1.0f + (float)(i % 7);
    float *partials = timings_new(&timing, n_floats * sizeof *partials);
    float *out = partials ? timings_new(&timing, n_floats * sizeof *out) : NULL;
    struct backend_merge *items = calloc(1, n_bytes);
    l.items = out ? timings_new(&timing, n_bytes) : NULL;
    for (uint32_t i = 0; items && i < n_items; i++) {
        items[i].partials = partials + (size_t)i * PARTIAL_FLOATS;
        items[i].out = out + (size_t)i * GROUP * HEAD_DIM;
        for (uint32_t lane = 0; lane < BACKEND_N_LANES; lane++)
            items[i].from[lane] = lanes + ((size_t)i * BACKEND_N_LANES + lane) * PARTIAL_FLOATS;
    }
    if (l.items && (!items || cudaMemcpy(l.items, items, n_bytes, cudaMemcpyHostToDevice)))
        timings_skip(&timing, "memory");
    else if (l.items)
        timings_case(timings, &timing, launch_merge, &l);
    free(items);
    (void)cudaFree(partials);
    (void)cudaFree(out);
    (void)cudaFree(l.items);
    (void)cudaFreeHost(lanes);
}

/* ---- copies of single rows ---- */

static cudaError_t launch_copy(struct timings *timings, void *context, uint32_t i)
{
    (void)i;
    const struct launched *l = context;
    return cuda_copy(&timings->queue, l->items, l->n_items, ROW_BYTES);
}

static void copy(struct timings *timings, uint32_t n_items)
{
    struct timing timing = {.kernel = "copy", .type = "f16 rows", .bytes = 2.0 * ROW_BYTES * n_items};
    snprintf(timing.shape, sizeof timing.shape, "%u of %d bytes", n_items, ROW_BYTES);
    struct launched l = {.n_items = n_items};
    struct backend_copy *items = calloc(n_items, sizeof *items);
    unsigned char *to = timings_new(&timing, (size_t)n_items * ROW_BYTES);
    l.items = to ? timings_new(&timing, n_items * sizeof *items) : NULL;
    for (uint32_t i = 0; items && i < n_items; i++)
        items[i] =
            (struct backend_copy){to + (size_t)i * ROW_BYTES, timings_copy(timings, ROW_BYTES, 2 * i), ROW_BYTES};
    if (l.items && (!items || cudaMemcpy(l.items, items, n_items * sizeof *items, cudaMemcpyHostToDevice)))
        timings_skip(&timing, "memory");
    else if (l.items)
        timings_case(timings, &timing, launch_copy, &l);
    free(items);
    (void)cudaFree(to);
    (void)cudaFree(l.items);
}

void timings_step(struct timings *timings)
{
    static const uint32_t vocabularies[] = {49152, 128256}, batches[] = {1, 8};
    if (timings->tiny) {
        sample(timings, 2, 100, false);
        merge(timings, 2);
        copy(timings, 3);
        return;
    }
    for (uint32_t k = 0; k < 8; k++)
        sample(timings, batches[k / 2 % 2], vocabularies[k / 4], k % 2 == 0);
    for (uint32_t k = 0; k < 2; k++) {
        merge(timings, 8 * batches[k]);
        copy(timings, 8 * batches[k]);
    }
}
