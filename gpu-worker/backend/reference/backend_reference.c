/*
 * backend_reference.c - every operation as plain loops, sums in double: the truth of the other back ends.
 *
 * Owner      the engine's thread; no other thread takes part.
 * Invariant  weights are read from the mapped tensor by dequantize_row(); nothing is repacked, nothing approximated.
 */
#include "gpu-worker/backend/backend.h"

#include <errno.h>
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpu-worker/backend/memory.h"
#include "gpu-worker/model/dequantize.h"

struct backend {
    const struct kernels *kernels; /* plain: for the formats of rows only */
    size_t n_bytes;
};

struct weight {
    struct tensor tensor;
    size_t row_bytes;
    float row[]; /* [n_columns] scratch of one dequantized row */
};

static int reference_open(const struct backend_options *options, struct backend **ret_backend, char *error,
                          size_t error_size)
{
    (void)options;
    struct backend *backend = calloc(1, sizeof *backend);
    if (!backend) {
        snprintf(error, error_size, "no memory for the reference back end");
        return -ENOMEM;
    }
    backend->kernels = kernels_get(KERNELS_ISA_PLAIN);
    *ret_backend = backend;
    return 0;
}

static struct backend *reference_close(struct backend *backend)
{
    free(backend);
    return NULL;
}

static const char *reference_describe(const struct backend *backend)
{
    (void)backend;
    return "reference, plain C, 1 thread";
}

static void *reference_alloc(struct backend *backend, size_t n_bytes)
{
    void *memory = memory_alloc(n_bytes);
    backend->n_bytes += memory_bytes(memory);
    return memory;
}

static void reference_free(struct backend *backend, void *memory)
{
    backend->n_bytes -= memory_bytes(memory);
    memory_free(memory);
}

static size_t reference_bytes(const struct backend *backend)
{
    return backend->n_bytes;
}

static size_t reference_weight_bytes(const struct weight *weight)
{
    return sizeof *weight + (size_t)weight->tensor.n_columns * sizeof(float) +
           weight->row_bytes * weight->tensor.n_rows;
}

static int reference_weight_new(struct backend *backend, const struct tensor *tensor, struct weight **ret_weight)
{
    size_t row_bytes = tensor_row_bytes(tensor->type, tensor->n_columns);
    if (!row_bytes)
        return -ENOTSUP;
    struct weight *weight = malloc(sizeof *weight + (size_t)tensor->n_columns * sizeof(float));
    if (!weight)
        return -ENOMEM;
    weight->tensor = *tensor;
    weight->row_bytes = row_bytes;
    backend->n_bytes += reference_weight_bytes(weight);
    *ret_weight = weight;
    return 0;
}

static struct weight *reference_weight_free(struct backend *backend, struct weight *weight)
{
    if (weight)
        backend->n_bytes -= reference_weight_bytes(weight);
    free(weight);
    return NULL;
}

static void read_row(const struct weight *weight, uint32_t row, float *out)
{
    /* weight_new() saw to the only thing that can fail, the number of columns */
    (void)dequantize_row(weight->tensor.type, (const char *)weight->tensor.data + row * weight->row_bytes,
                         weight->tensor.n_columns, out);
}

static void reference_embed(struct backend *backend, const struct weight *weight, const uint32_t *ids,
                            uint32_t n_tokens, float *out)
{
    (void)backend;
    for (uint32_t t = 0; t < n_tokens; t++)
        read_row(weight, ids[t], out + (size_t)t * weight->tensor.n_columns);
}

static void reference_rms_norm(struct backend *backend, const float *x, uint32_t n_tokens, uint32_t n,
                               const struct weight *weight, float eps, float *out)
{
    (void)backend;
    float *factors = ((struct weight *)(uintptr_t)weight)->row;
    read_row(weight, 0, factors);
    for (uint32_t t = 0; t < n_tokens; t++, x += n, out += n) {
        double sum = 0;
        for (uint32_t i = 0; i < n; i++)
            sum += (double)x[i] * (double)x[i];
        double scale = 1.0 / sqrt(sum / n + (double)eps);
        for (uint32_t i = 0; i < n; i++)
            out[i] = (float)((double)x[i] * scale * (double)factors[i]);
    }
}

static void reference_matmul(struct backend *backend, const struct weight *const *weights, uint32_t n_weights,
                             const float *x, uint32_t n_tokens, float *const *y)
{
    (void)backend;
    for (uint32_t w = 0; w < n_weights; w++) {
        uint32_t n_rows = weights[w]->tensor.n_rows, n_columns = weights[w]->tensor.n_columns;
        float *row = ((struct weight *)(uintptr_t)weights[w])->row;
        for (uint32_t r = 0; r < n_rows; r++) {
            read_row(weights[w], r, row);
            for (uint32_t t = 0; t < n_tokens; t++) {
                double sum = 0;
                for (uint32_t c = 0; c < n_columns; c++)
                    sum += (double)row[c] * (double)x[(size_t)t * n_columns + c];
                y[w][(size_t)t * n_rows + r] = (float)sum;
            }
        }
    }
}

static void reference_rope(struct backend *backend, float *x, uint32_t n_tokens, uint32_t n_heads, uint32_t head_dim,
                           const uint32_t *positions, const struct backend_rope *rope)
{
    (void)backend;
    for (uint32_t t = 0; t < n_tokens; t++) {
        for (uint32_t h = 0; h < n_heads; h++, x += head_dim) {
            for (uint32_t i = 0; i < rope->n_rotated / 2; i++) {
                double angle = (double)positions[t] * (double)rope->frequencies[i];
                double c = cos(angle) * (double)rope->magnitude, s = sin(angle) * (double)rope->magnitude;
                double a = (double)x[2 * i], b = (double)x[2 * i + 1];
                x[2 * i] = (float)(a * c - b * s);
                x[2 * i + 1] = (float)(a * s + b * c);
            }
        }
    }
}

static void reference_swiglu(struct backend *backend, float *gate, const float *up, uint32_t n_tokens, uint32_t n)
{
    (void)backend;
    for (size_t i = 0; i < (size_t)n_tokens * n; i++)
        gate[i] = (float)((double)gate[i] / (1.0 + exp(-(double)gate[i])) * (double)up[i]);
}

static void reference_add(struct backend *backend, float *x, const float *y, size_t n)
{
    (void)backend;
    for (size_t i = 0; i < n; i++)
        x[i] += y[i];
}

static void reference_encode_rows(struct backend *backend, const float *k, const float *v, uint32_t n_tokens,
                                  uint32_t n_kv_heads, uint32_t head_dim, enum kernels_rows codec, void *rows)
{
    for (size_t i = 0; i < (size_t)n_tokens * n_kv_heads; i++)
        backend->kernels->encode_row(k + i * head_dim, v + i * head_dim, head_dim, codec,
                                     (char *)rows + i * kernels_row_bytes(head_dim, codec));
}

/* K and V of one row. */
static void decode_row(const void *row, uint32_t head_dim, enum kernels_rows codec, double *k, double *v)
{
    const uint32_t n_groups = (head_dim + 31) / 32;
    for (uint32_t i = 0; i < 2 * head_dim; i++) {
        const uint32_t d = i % head_dim;
        double *to = i < head_dim ? &k[d] : &v[d];
        uint16_t half;
        if (codec == KERNELS_ROWS_F16) {
            memcpy(&half, (const char *)row + 2 * (size_t)i, sizeof half);
            *to = (double)dequantize_f16(half);
        } else {
            memcpy(&half, (const char *)row + 2 * (size_t)(head_dim + i / head_dim * n_groups + d / 32), sizeof half);
            *to = (double)dequantize_f16(half) * ((const int8_t *)row)[i];
        }
    }
}

static uint64_t mask_of(const struct backend_attend *item, uint32_t piece, uint32_t query)
{
    uint64_t mask = item->pieces[piece].mask;
    if (piece == item->causal_piece) {
        uint32_t last = item->causal_first + query / item->group;
        if (last < 63)
            mask &= (UINT64_C(2) << last) - 1;
    }
    return mask;
}

static double score_of(const float *q, const double *key, uint32_t head_dim, float scale)
{
    double sum = 0;
    for (uint32_t d = 0; d < head_dim; d++)
        sum += (double)q[d] * key[d];
    return fmax(-(double)FLT_MAX, fmin((double)FLT_MAX, sum * (double)scale)); /* like the kernels */
}

static void attend_query(const struct backend_attend *item, uint32_t query, uint32_t head_dim, enum kernels_rows codec,
                         float scale)
{
    const float *q = item->q + (size_t)query * head_dim;
    float *partial = item->partials + (size_t)query * KERNELS_PARTIAL_FLOATS(head_dim);
    double k[KERNELS_MAX_HEAD_DIM], v[KERNELS_MAX_HEAD_DIM], out[KERNELS_MAX_HEAD_DIM];
    double max = (double)partial[0], sum = (double)partial[1];
    for (uint32_t d = 0; d < head_dim; d++)
        out[d] = (double)partial[2 + d];
    for (uint32_t p = 0; p < item->n_pieces; p++) {
        for (uint64_t mask = mask_of(item, p, query); mask; mask &= mask - 1) {
            const size_t token = (size_t)__builtin_ctzll(mask);
            decode_row((const char *)item->pieces[p].rows + token * kernels_row_bytes(head_dim, codec), head_dim, codec,
                       k, v);
            const double score = score_of(q, k, head_dim, scale);
            const double new_max = fmax(max, score), before = exp(max - new_max), weight = exp(score - new_max);
            max = new_max;
            sum = sum * before + weight;
            for (uint32_t d = 0; d < head_dim; d++)
                out[d] = out[d] * before + weight * v[d];
        }
    }
    if (max == -INFINITY)
        return;
    partial[0] = (float)max;
    partial[1] = (float)sum;
    for (uint32_t d = 0; d < head_dim; d++)
        partial[2 + d] = (float)out[d];
}

static void reference_attend(struct backend *backend, const struct backend_attend *items, uint32_t n_items,
                             uint32_t head_dim, enum kernels_rows codec, float scale)
{
    (void)backend;
    for (uint32_t i = 0; i < n_items; i++) {
        if (items[i].is_first)
            backend_make_empty(items[i].partials, items[i].n_queries, head_dim);
        for (uint32_t query = 0; query < items[i].n_queries; query++)
            attend_query(&items[i], query, head_dim, codec, scale);
    }
}

const struct backend_ops backend_reference = {
    .name = "reference",
    .open = reference_open,
    .close = reference_close,
    .describe = reference_describe,
    .alloc = reference_alloc,
    .free = reference_free,
    .bytes = reference_bytes,
    .weight_new = reference_weight_new,
    .weight_free = reference_weight_free,
    .weight_bytes = reference_weight_bytes,
    .embed = reference_embed,
    .rms_norm = reference_rms_norm,
    .matmul = reference_matmul,
    .rope = reference_rope,
    .swiglu = reference_swiglu,
    .add = reference_add,
    .copy = backend_copy_in_host,
    .encode_rows = reference_encode_rows,
    .attend = reference_attend,
};
