/* timings_products.c - see timings.h: matrices of every type, at the shapes of SmolLM2-135M and of a layer of Llama-3-8B. */
#include <stdio.h>

#include "tests/backend/cuda-on-device/timings.h"

#define MAX_TOKENS 8u

static const enum tensor_type types[] = {
    TENSOR_F32,  TENSOR_F16,  TENSOR_BF16, TENSOR_Q4_0, TENSOR_Q4_1, TENSOR_Q5_0,
    TENSOR_Q5_1, TENSOR_Q8_0, TENSOR_Q4_K, TENSOR_Q5_K, TENSOR_Q6_K,
};
#define N_TYPES (sizeof types / sizeof *types)

/* A layer's matrices, a shape once; the widest last one of SmolLM2 is its output. */
static const struct {
    uint32_t n_rows, n_columns;
} shapes[] = {{576, 576},   {192, 576},   {1536, 576},   {576, 1536},  {49152, 576},
              {4096, 4096}, {1024, 4096}, {14336, 4096}, {4096, 14336}};

struct product {
    enum tensor_type type;
    uint32_t n_rows, n_columns, n_tokens;
    size_t n_bytes; /* of the matrix */
    const uint32_t *ids;
    float *x, *y;
    uint16_t *halves;
};

static cudaError_t launch_matvec(struct timings *timings, void *context, uint32_t i)
{
    const struct product *p = context;
    return cuda_matvec(&timings->queue, p->type, timings_copy(timings, p->n_bytes, i), p->n_rows, p->n_columns, p->x,
                       p->n_tokens, p->y);
}

static cudaError_t launch_dequantize(struct timings *timings, void *context, uint32_t i)
{
    const struct product *p = context;
    return cuda_dequantize_f16(&timings->queue, p->type, timings_copy(timings, p->n_bytes, i), p->n_rows, p->n_columns,
                               1, p->halves);
}

static cudaError_t launch_embed(struct timings *timings, void *context, uint32_t i)
{
    const struct product *p = context;
    return cuda_embed(&timings->queue, p->type, timings_copy(timings, p->n_bytes, i), p->n_columns, p->ids, p->n_tokens,
                      p->y);
}

static void shrink(const struct timings *timings, struct product *p)
{
    if (timings->tiny) {
        p->n_rows = 8;
        p->n_columns = p->n_columns > 1024 ? 512 : 64;
    }
}

/* False: the type has no rows of this length, or the pool does not hold the matrix; said. */
static bool size_of(struct timings *timings, struct product *p, struct timing *timing)
{
    timing->type = tensor_block(p->type)->name;
    p->n_bytes = p->n_rows * tensor_row_bytes(p->type, p->n_columns);
    if (p->n_bytes && p->n_bytes <= timings->pool_bytes)
        return true;
    timings_skip(timing, p->n_bytes ? "memory" : "shape");
    return false;
}

static void matvec(struct timings *timings, struct product *p)
{
    struct timing timing = {.kernel = "matvec"};
    shrink(timings, p);
    snprintf(timing.shape, sizeof timing.shape, "%ux%u T%u", p->n_rows, p->n_columns, p->n_tokens);
    if (!size_of(timings, p, &timing))
        return;
    const double n = (double)p->n_rows * p->n_columns;
    timing.bytes = (double)p->n_bytes + 4.0 * p->n_tokens * ((double)p->n_rows + p->n_columns);
    timing.operations = 2 * n * p->n_tokens;
    p->x = timings_new(&timing, (size_t)MAX_TOKENS * p->n_columns * sizeof *p->x);
    p->y = p->x ? timings_new(&timing, (size_t)MAX_TOKENS * p->n_rows * sizeof *p->y) : NULL;
    if (p->y)
        timings_case(timings, &timing, launch_matvec, p);
    (void)cudaFree(p->x);
    (void)cudaFree(p->y);
}

static void dequantize(struct timings *timings, struct product *p)
{
    struct timing timing = {.kernel = "dequantize_f16"};
    shrink(timings, p);
    snprintf(timing.shape, sizeof timing.shape, "%ux%u", p->n_rows, p->n_columns);
    if (!size_of(timings, p, &timing))
        return;
    const size_t n = (size_t)p->n_rows * p->n_columns;
    timing.bytes = (double)p->n_bytes + 2.0 * (double)n;
    p->halves = timings_new(&timing, n * sizeof *p->halves);
    if (p->halves)
        timings_case(timings, &timing, launch_dequantize, p);
    (void)cudaFree(p->halves);
}

static void embed(struct timings *timings, struct product *p)
{
    struct timing timing = {.kernel = "embed"};
    shrink(timings, p);
    snprintf(timing.shape, sizeof timing.shape, "%u of %ux%u", p->n_tokens, p->n_rows, p->n_columns);
    if (!size_of(timings, p, &timing))
        return;
    timing.bytes =
        p->n_tokens * ((double)tensor_row_bytes(p->type, p->n_columns) + 4.0 * p->n_columns + sizeof *p->ids);
    uint32_t ids[512];
    for (uint32_t t = 0; t < p->n_tokens; t++)
        ids[t] = t * 97 % p->n_rows;
    uint32_t *on_device = timings_new(&timing, sizeof ids);
    p->y = on_device ? timings_new(&timing, (size_t)p->n_tokens * p->n_columns * sizeof *p->y) : NULL;
    if (p->y && !cudaMemcpy(on_device, ids, sizeof ids, cudaMemcpyHostToDevice)) {
        p->ids = on_device;
        timings_case(timings, &timing, launch_embed, p);
    }
    (void)cudaFree(on_device);
    (void)cudaFree(p->y);
}

void timings_products(struct timings *timings)
{
    const uint32_t n_shapes = sizeof shapes / sizeof *shapes;
    for (uint32_t s = 0; s < n_shapes; s++)
        for (uint32_t k = 0; k < N_TYPES; k++)
            for (uint32_t n_tokens = 1; n_tokens <= MAX_TOKENS; n_tokens *= MAX_TOKENS)
                if (!timings->tiny || s == 0 || s == n_shapes - 1) /* shapes shrink to two */
                    matvec(timings, &(struct product){.type = types[k],
                                                      .n_rows = shapes[s].n_rows,
                                                      .n_columns = shapes[s].n_columns,
                                                      .n_tokens = n_tokens});
    for (uint32_t k = 0; k < N_TYPES; k++)
        dequantize(timings, &(struct product){.type = types[k], .n_rows = 4096, .n_columns = 4096});
    for (uint32_t k = 0; k < N_TYPES; k++)
        embed(timings, &(struct product){
                           .type = types[k], .n_rows = 4096, .n_columns = 4096, .n_tokens = timings->tiny ? 2 : 512});
}
