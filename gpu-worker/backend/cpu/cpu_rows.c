/* cpu_rows.c - operations row by row or element by element; large batches are spread over the pool by rows. */
#include "gpu-worker/backend/cpu/cpu_internal.h"

#include <assert.h>
#include <math.h>
#include <string.h>

#include "common/pool.h"
#include "gpu-worker/model/dequantize.h"

#define ADD_SLICE 8192u

struct rows {
    struct backend *backend;
    const struct weight *weight;
    const uint32_t *ids;
    const float *in;
    const float *other;
    float *out;
    char *encoded;
    enum kernels_rows codec;
    uint32_t n; /* numbers of a row */
    uint32_t n_heads;
    uint32_t n_rotated;
    float eps;
    size_t n_all;
};

/* The pool where there is enough to do. */
static struct pool *pool_for(const struct backend *backend, size_t n_numbers)
{
    return n_numbers >= CPU_WORTH_SHARING ? backend->pool : NULL;
}

static void embed_row(void *context, uint32_t item, uint32_t thread)
{
    (void)thread;
    const struct rows *rows = context;
    const struct tensor *tensor = &rows->weight->tensor;
    assert(rows->ids[item] < tensor->n_rows);
    size_t row_bytes = tensor_row_bytes(tensor->type, tensor->n_columns);
    /* weight_new() saw to the only thing that can fail, the number of columns */
    (void)dequantize_row(tensor->type, (const char *)tensor->data + rows->ids[item] * row_bytes, tensor->n_columns,
                         rows->out + (size_t)item * tensor->n_columns);
}

void cpu_rows_embed(struct backend *backend, const struct weight *weight, const uint32_t *ids, uint32_t n_tokens,
                    float *out)
{
    struct rows rows = {.weight = weight, .ids = ids, .out = out};
    pool_run(pool_for(backend, (size_t)n_tokens * weight->tensor.n_columns), n_tokens, embed_row, &rows);
}

static void norm_row(void *context, uint32_t item, uint32_t thread)
{
    (void)thread;
    const struct rows *rows = context;
    rows->backend->ops->rms_norm(rows->in + (size_t)item * rows->n, rows->n, rows->weight->vector, rows->eps,
                                 rows->out + (size_t)item * rows->n);
}

void cpu_rows_rms_norm(struct backend *backend, const float *x, uint32_t n_tokens, uint32_t n,
                       const struct weight *weight, float eps, float *out)
{
    assert(weight->vector && weight->tensor.n_columns == n);
    struct rows rows = {.backend = backend, .weight = weight, .in = x, .out = out, .n = n, .eps = eps};
    pool_run(pool_for(backend, (size_t)n_tokens * n), n_tokens, norm_row, &rows);
}

static void swiglu_row(void *context, uint32_t item, uint32_t thread)
{
    (void)thread;
    const struct rows *rows = context;
    rows->backend->ops->swiglu(rows->out + (size_t)item * rows->n, rows->in + (size_t)item * rows->n, rows->n);
}

void cpu_rows_swiglu(struct backend *backend, float *gate, const float *up, uint32_t n_tokens, uint32_t n)
{
    struct rows rows = {.backend = backend, .in = up, .out = gate, .n = n};
    pool_run(pool_for(backend, (size_t)n_tokens * n), n_tokens, swiglu_row, &rows);
}

static void add_slice(void *context, uint32_t item, uint32_t thread)
{
    (void)thread;
    const struct rows *rows = context;
    size_t from = (size_t)item * ADD_SLICE;
    size_t n = rows->n_all - from < ADD_SLICE ? rows->n_all - from : ADD_SLICE;
    rows->backend->ops->add(rows->out + from, rows->in + from, n);
}

void cpu_rows_add(struct backend *backend, float *x, const float *y, size_t n)
{
    struct rows rows = {.backend = backend, .in = y, .out = x, .n_all = n};
    pool_run(pool_for(backend, n), (uint32_t)((n + ADD_SLICE - 1) / ADD_SLICE), add_slice, &rows);
}

static void encode_row(void *context, uint32_t item, uint32_t thread)
{
    (void)thread;
    const struct rows *rows = context;
    const struct kernels *kernels = rows->backend->kernels;
    for (uint32_t h = 0; h < rows->n_heads; h++) {
        size_t i = (size_t)item * rows->n_heads + h;
        kernels->encode_row(rows->in + i * rows->n, rows->other + i * rows->n, rows->n, rows->codec,
                            rows->encoded + i * kernels_row_bytes(rows->n, rows->codec));
    }
}

void cpu_rows_encode(struct backend *backend, const float *k, const float *v, uint32_t n_tokens, uint32_t n_kv_heads,
                     uint32_t head_dim, enum kernels_rows codec, void *out)
{
    struct rows rows = {
        .backend = backend,
        .in = k,
        .other = v,
        .encoded = out,
        .codec = codec,
        .n = head_dim,
        .n_heads = n_kv_heads,
    };
    pool_run(pool_for(backend, (size_t)n_tokens * n_kv_heads * head_dim), n_tokens, encode_row, &rows);
}

/* ---- rotary embedding ---- */

static void fill_angles(struct cpu_rope_cache *cache, const uint32_t *positions, uint32_t n_tokens,
                        const struct backend_rope *rope)
{
    const uint32_t n_angles = rope->n_rotated / 2;
    if (cache->n_tokens == n_tokens && cache->n_angles == n_angles && cache->magnitude == rope->magnitude &&
        memcmp(cache->positions, positions, n_tokens * sizeof *positions) == 0 &&
        memcmp(cache->frequencies, rope->frequencies, n_angles * sizeof *rope->frequencies) == 0)
        return;
    cache->n_tokens = n_tokens;
    cache->n_angles = n_angles;
    cache->magnitude = rope->magnitude;
    memcpy(cache->positions, positions, n_tokens * sizeof *positions);
    memcpy(cache->frequencies, rope->frequencies, n_angles * sizeof *rope->frequencies);
    for (uint32_t t = 0; t < n_tokens; t++) {
        for (uint32_t i = 0; i < n_angles; i++) {
            /* in double: at position 100,000 a float angle would be off by 0.004 */
            double angle = (double)positions[t] * (double)rope->frequencies[i];
            float *to = cache->angles[(size_t)t * n_angles + i];
            to[0] = (float)(cos(angle) * (double)rope->magnitude);
            to[1] = (float)(sin(angle) * (double)rope->magnitude);
        }
    }
}

static void rope_row(void *context, uint32_t item, uint32_t thread)
{
    (void)thread;
    const struct rows *rows = context;
    const uint32_t n_angles = rows->n_rotated / 2;
    const float(*angles)[2] = (const float(*)[2])rows->backend->rope.angles + (size_t)item * n_angles;
    float *x = rows->out + (size_t)item * rows->n_heads * rows->n;
    for (uint32_t h = 0; h < rows->n_heads; h++, x += rows->n) {
        for (uint32_t i = 0; i < n_angles; i++) {
            float a = x[2 * i], b = x[2 * i + 1];
            x[2 * i] = a * angles[i][0] - b * angles[i][1];
            x[2 * i + 1] = a * angles[i][1] + b * angles[i][0];
        }
    }
}

void cpu_rows_rope(struct backend *backend, float *x, uint32_t n_tokens, uint32_t n_heads, uint32_t head_dim,
                   const uint32_t *positions, const struct backend_rope *rope)
{
    assert(rope->n_rotated % 2 == 0 && rope->n_rotated <= head_dim && head_dim <= KERNELS_MAX_HEAD_DIM);
    for (uint32_t t = 0, n; t < n_tokens; t += n) {
        n = n_tokens - t < CPU_ROPE_TOKENS ? n_tokens - t : CPU_ROPE_TOKENS;
        fill_angles(&backend->rope, positions + t, n, rope);
        struct rows rows = {
            .backend = backend,
            .out = x + (size_t)t * n_heads * head_dim,
            .n = head_dim,
            .n_heads = n_heads,
            .n_rotated = rope->n_rotated,
        };
        pool_run(pool_for(backend, (size_t)n * n_heads * head_dim), n, rope_row, &rows);
    }
}
