/* timings_blas.c - see timings.h: what cuBLAS does for the back end, through its table: products of many tokens, prefill attention. */
#include <stdio.h>

#include "gpu-worker/backend/cuda/cuda_internal.h"
#include "tests/backend/cuda-on-device/timings.h"

#define N_HEADS    32u /* of Llama-3-8B */
#define N_KV_HEADS 8u
#define HEAD_DIM   128u

static const enum tensor_type types[] = {TENSOR_F16, TENSOR_Q8_0, TENSOR_Q4_0, TENSOR_Q4_K};
static const struct {
    uint32_t n_rows, n_columns;
} shapes[] = {{4096, 4096}, {14336, 4096}, {4096, 14336}};
static const uint32_t batches[] = {32, 128, 256, 512};

/* The table's operations are launched by a play; a failure is told here, so that the next case can go on. */
static cudaError_t play(struct backend *backend)
{
    cuda_commands_play(backend);
    const bool failed = backend->error != 0;
    if (failed)
        (void)backend_cuda.device->finish(backend);
    return failed ? cudaErrorInvalidValue : cudaSuccess;
}

/* ---- products ---- */

struct product {
    struct backend *backend;
    struct weight weight;
    float *x, *y;
    uint32_t n_tokens;
};

static cudaError_t launch_product(struct timings *timings, void *context, uint32_t i)
{
    struct product *p = context;
    const struct weight *weight = &p->weight;
    p->weight.data = timings_copy(timings, p->weight.n_bytes, i);
    backend_cuda.matmul(p->backend, &weight, 1, p->x, p->n_tokens, &p->y);
    return play(p->backend);
}

static void product(struct timings *timings, struct product *p)
{
    struct timing timing = {.kernel = "product", .type = tensor_block(p->weight.type)->name};
    if (timings->tiny) {
        p->weight.n_rows = 8;
        p->weight.n_columns = 256;
    }
    const size_t rows = p->weight.n_rows, columns = p->weight.n_columns;
    p->weight.n_bytes = rows * tensor_row_bytes(p->weight.type, p->weight.n_columns);
    p->weight.to_halves = p->weight.from_halves = 1;
    snprintf(timing.shape, sizeof timing.shape, "%zux%zu T%u", rows, columns, p->n_tokens);
    timing.bytes = (double)p->weight.n_bytes + 4.0 * p->n_tokens * (double)(rows + columns);
    timing.operations = 2.0 * p->n_tokens * (double)(rows * columns);
    p->x = timings_new(&timing, p->n_tokens * columns * sizeof *p->x);
    p->y = p->x ? timings_new(&timing, p->n_tokens * rows * sizeof *p->y) : NULL;
    if (p->y)
        timings_case(timings, &timing, launch_product, p);
    (void)cudaFree(p->x);
    (void)cudaFree(p->y);
}

/* ---- prefill attention ---- */

struct prefill {
    struct backend *backend;
    struct backend_prefill call;
    uint32_t n_context; /* with the positions' own tokens */
};

static cudaError_t launch_prefill(struct timings *timings, void *context, uint32_t i)
{
    const struct prefill *p = context;
    const size_t row_bytes = kernels_row_bytes(p->call.head_dim, p->call.codec);
    const size_t token_bytes = p->call.n_kv_heads * row_bytes;
    const uint32_t n_before = p->n_context - p->call.n;
    struct backend_span span = {.n_tokens = n_before, .head_bytes = row_bytes, .token_bytes = token_bytes};
    backend_cuda.device->prefill_begin(p->backend, &p->call);
    span.rows = timings_copy(timings, p->n_context * token_bytes, i);
    (void)backend_cuda.device->prefill_rows(p->backend, &span, 1, false, false);
    span.rows = (const char *)span.rows + n_before * token_bytes;
    span.n_tokens = p->call.n;
    (void)backend_cuda.device->prefill_rows(p->backend, &span, 1, false, true);
    backend_cuda.device->prefill_end(p->backend);
    return play(p->backend);
}

static void prefill(struct timings *timings, struct backend *backend, uint32_t n, uint32_t n_context,
                    enum kernels_rows codec)
{
    struct prefill p = {.backend = backend,
                        .call = {.n = n,
                                 .n_heads = timings->tiny ? 2 : N_HEADS,
                                 .n_kv_heads = timings->tiny ? 1 : N_KV_HEADS,
                                 .head_dim = timings->tiny ? 32 : HEAD_DIM,
                                 .codec = codec,
                                 .scale = 0.0001f}, /* the pool's numbers are large */
                        .n_context = n_context};
    struct timing timing = {.kernel = "prefill", .type = codec == KERNELS_ROWS_Q8_0 ? "q8_0" : "f16"};
    snprintf(timing.shape, sizeof timing.shape, "%s prefill S1 T%u of %u", timings->tiny ? "tiny" : "Llama-3-8B", n,
             n_context);
    const size_t q_bytes = (size_t)n * p.call.n_heads * p.call.head_dim * sizeof(float);
    timing.bytes =
        (double)n_context * p.call.n_kv_heads * (double)kernels_row_bytes(p.call.head_dim, codec) + 2 * (double)q_bytes;
    timing.operations = 4.0 * n * p.call.n_heads * (double)n_context * p.call.head_dim;
    float *q = timings_new(&timing, q_bytes);
    p.call.q = q;
    p.call.out = q ? timings_new(&timing, q_bytes) : NULL;
    if (p.call.out)
        timings_case(timings, &timing, launch_prefill, &p);
    (void)cudaFree(q);
    (void)cudaFree(p.call.out);
}

void timings_blas(struct timings *timings)
{
    static const uint32_t contexts[] = {4096, 32768};
    static const enum kernels_rows codecs[] = {KERNELS_ROWS_F16, KERNELS_ROWS_Q8_0};
    const struct cuda_queue before = timings->queue;
    const struct backend_options options = {.device = BACKEND_DEVICE_BY_WORKER};
    struct backend *backend = NULL;
    char error[256];
    const int r = backend_cuda.open(&options, &backend, error, sizeof error);
    if (r < 0 || backend->blas == NULL) {
        timings_skip(&(struct timing){.kernel = "product", .type = "all"}, r < 0 ? "device" : "cublas");
        backend_cuda.close(backend);
        return;
    }
    timings->queue.stream = backend->stream; /* events are recorded there */
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes && (!timings->tiny || s == 0); s++)
        for (size_t k = 0; k < sizeof types / sizeof *types; k++)
            for (size_t b = 0; b < sizeof batches / sizeof *batches && (!timings->tiny || b == 0); b++)
                product(timings,
                        &(struct product){
                            .backend = backend,
                            .weight = {.type = types[k], .n_rows = shapes[s].n_rows, .n_columns = shapes[s].n_columns},
                            .n_tokens = batches[b]});
    for (size_t c = 0; c < 2; c++) {
        if (timings->tiny)
            prefill(timings, backend, 8, 72, codecs[c]);
        for (size_t k = 0; k < sizeof contexts / sizeof *contexts && !timings->tiny; k++) {
            prefill(timings, backend, 64, contexts[k], codecs[c]);
            prefill(timings, backend, 256, contexts[k], codecs[c]);
        }
    }
    backend_cuda.close(backend);
    timings->queue = before;
}
