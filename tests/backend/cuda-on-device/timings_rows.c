/* timings_rows.c - see timings.h: what works on rows of numbers: norm, rotation, gates, sums, coding of K,V rows. */
#include <stdio.h>

#include "tests/backend/cuda-on-device/timings.h"

/* SmolLM2-135M and Llama-3-8B. */
static const struct model {
    uint32_t n, n_heads, n_kv_heads, head_dim, n_gates;
} models[] = {{576, 9, 3, 64, 1536}, {4096, 32, 8, 128, 14336}};

/* Of a decode step, of a small batch, of a prefill tile. */
static const uint32_t batches[] = {1, 8, 512};

struct rows {
    const struct model *model;
    uint32_t n_tokens;
    enum kernels_rows codec;
    size_t n_bytes;   /* of an input */
    float *small;     /* norm weights or frequencies, zeros */
    uint32_t *places; /* positions, zeros */
    void *out;
};

/* In the pool, input number i; those of launches in a row lie apart. */
static float *input(const struct timings *timings, const struct rows *rows, uint32_t i)
{
    return timings_copy(timings, rows->n_bytes, i);
}

static cudaError_t launch_rms_norm(struct timings *timings, void *context, uint32_t i)
{
    const struct rows *rows = context;
    return cuda_rms_norm(&timings->queue, input(timings, rows, i), rows->n_tokens, rows->model->n, rows->small, 1e-5f,
                         rows->out);
}

static cudaError_t launch_rope(struct timings *timings, void *context, uint32_t i)
{
    const struct rows *rows = context;
    const struct model *m = rows->model;
    return cuda_rope(&timings->queue, input(timings, rows, i), rows->n_tokens, m->n_heads, m->head_dim, rows->places,
                     m->head_dim, rows->small, 1.0f);
}

static cudaError_t launch_swiglu(struct timings *timings, void *context, uint32_t i)
{
    const struct rows *rows = context;
    return cuda_swiglu(&timings->queue, rows->out, input(timings, rows, i),
                       (size_t)rows->n_tokens * rows->model->n_gates);
}

static cudaError_t launch_add(struct timings *timings, void *context, uint32_t i)
{
    const struct rows *rows = context;
    return cuda_add(&timings->queue, rows->out, input(timings, rows, i), (size_t)rows->n_tokens * rows->model->n);
}

static cudaError_t launch_encode_rows(struct timings *timings, void *context, uint32_t i)
{
    const struct rows *rows = context;
    const struct model *m = rows->model;
    return cuda_encode_rows(&timings->queue, input(timings, rows, 2 * i), input(timings, rows, 2 * i + 1),
                            rows->n_tokens, m->n_kv_heads, m->head_dim, rows->codec, rows->out);
}

/* One kernel: `n` numbers a token come out of the pool, n_out bytes a token go to memory of its own. */
static void row_case(struct timings *timings, struct rows *rows, const char *kernel, uint32_t n, size_t n_out,
                     double bytes, double operations, timings_launch *launch)
{
    struct timing timing = {.kernel = kernel,
                            .type = rows->codec == KERNELS_ROWS_Q8_0  ? "q8_0"
                                    : rows->codec == KERNELS_ROWS_F16 ? "f16"
                                                                      : "f32",
                            .bytes = bytes * rows->n_tokens,
                            .operations = operations * rows->n_tokens};
    snprintf(timing.shape, sizeof timing.shape, "T%u x %u", rows->n_tokens, n);
    rows->n_bytes = (size_t)rows->n_tokens * n * sizeof(float);
    const size_t n_small = (size_t)(n > rows->n_tokens ? n : rows->n_tokens) * sizeof(float);
    if (rows->n_bytes > timings->pool_bytes) {
        timings_skip(&timing, "memory");
        return;
    }
    rows->small = timings_new(&timing, n_small);
    rows->places = rows->small ? timings_new(&timing, n_small) : NULL;
    rows->out = rows->places ? timings_new(&timing, rows->n_tokens * n_out) : NULL;
    if (rows->out)
        timings_case(timings, &timing, launch, rows);
    (void)cudaFree(rows->small);
    (void)cudaFree(rows->places);
    (void)cudaFree(rows->out);
}

static void model_rows(struct timings *timings, const struct model *m, uint32_t n_tokens)
{
    struct rows rows = {.model = m, .n_tokens = n_tokens};
    const uint32_t n_queries = m->n_heads * m->head_dim, n_keys = m->n_kv_heads * m->head_dim;
    row_case(timings, &rows, "rms_norm", m->n, m->n * sizeof(float), 8.0 * m->n, 4.0 * m->n, launch_rms_norm);
    row_case(timings, &rows, "rope", n_queries, 4, 8.0 * n_queries, 3.0 * n_queries, launch_rope);
    row_case(timings, &rows, "swiglu", m->n_gates, m->n_gates * sizeof(float), 12.0 * m->n_gates, 5.0 * m->n_gates,
             launch_swiglu);
    row_case(timings, &rows, "add", m->n, m->n * sizeof(float), 12.0 * m->n, m->n, launch_add);
    static const enum kernels_rows codecs[] = {KERNELS_ROWS_F16, KERNELS_ROWS_Q8_0};
    for (uint32_t c = 0; c < 2; c++) {
        rows.codec = codecs[c];
        const size_t row_bytes = m->n_kv_heads * kernels_row_bytes(m->head_dim, rows.codec);
        row_case(timings, &rows, "encode_rows", n_keys, row_bytes, 8.0 * n_keys + (double)row_bytes, 0,
                 launch_encode_rows);
    }
}

void timings_rows(struct timings *timings)
{
    static const struct model tiny = {64, 2, 1, 32, 96};
    if (timings->tiny) {
        model_rows(timings, &tiny, 3);
        return;
    }
    for (uint32_t m = 0; m < sizeof models / sizeof *models; m++)
        for (uint32_t b = 0; b < sizeof batches / sizeof *batches; b++)
            model_rows(timings, &models[m], batches[b]);
}
