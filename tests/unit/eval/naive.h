/* naive.h - a forward pass in double precision over the whole text, as plain as it can be written; F32 models only. */
#pragma once

#include "tests/unit/eval/worker_fixture.h"

#include <math.h>

struct naive {
    uint32_t n;
    double *x;        /* [n][n_embd] */
    double *q;        /* [n_layers][n][n_heads][head_dim], after RoPE */
    double *k, *v;    /* [n_layers][n][n_kv_heads][head_dim], as half precision keeps them */
    double *logprobs; /* [n][n_vocab] */
};

static inline double *naive_array(size_t n)
{
    double *array = calloc(n, sizeof(double));
    assert_non_null(array);
    return array;
}

static inline const float *naive_weights(const struct tensor *tensor)
{
    assert_int_equal(tensor->type, TENSOR_F32);
    return tensor->data;
}

static inline void naive_norm(const double *x, const struct tensor *weight, double eps, double *out)
{
    double sum = 0;
    uint32_t n = weight->n_columns;
    for (uint32_t i = 0; i < n; i++)
        sum += x[i] * x[i];
    for (uint32_t i = 0; i < n; i++)
        out[i] = x[i] / sqrt(sum / n + eps) * (double)naive_weights(weight)[i];
}

static inline void naive_matvec(const struct tensor *weight, const double *x, double *y)
{
    const float *w = naive_weights(weight);
    for (uint32_t r = 0; r < weight->n_rows; r++) {
        y[r] = 0;
        for (uint32_t c = 0; c < weight->n_columns; c++)
            y[r] += (double)w[(size_t)r * weight->n_columns + c] * x[c];
    }
}

static inline void naive_rope(const struct model_rope *rope, double *x, uint32_t position)
{
    for (uint32_t i = 0; i < rope->n_rotated / 2; i++) {
        double angle = position * (double)rope->frequencies[i], a = x[2 * i], b = x[2 * i + 1];
        x[2 * i] = (a * cos(angle) - b * sin(angle)) * (double)rope->magnitude;
        x[2 * i + 1] = (a * sin(angle) + b * cos(angle)) * (double)rope->magnitude;
    }
}

static inline void naive_round(const struct kernels *kernels, double *x, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        float value = (float)x[i];
        uint16_t half;
        kernels->f16_encode(&value, 1, &half);
        kernels->f16_decode(&half, 1, &value);
        x[i] = (double)value;
    }
}

static inline void naive_attend(const struct model_shape *shape, const double *q, const double *k, const double *v,
                                uint32_t n_seen, double *out)
{
    uint32_t d = shape->head_dim, group = shape->n_heads / shape->n_kv_heads;
    double *scores = naive_array(n_seen);
    for (uint32_t h = 0; h < shape->n_heads; h++) {
        double max = -INFINITY, sum = 0;
        for (uint32_t j = 0; j < n_seen; j++) {
            scores[j] = 0;
            for (uint32_t i = 0; i < d; i++)
                scores[j] += q[h * d + i] * k[((size_t)j * shape->n_kv_heads + h / group) * d + i] / sqrt(d);
            max = fmax(max, scores[j]);
        }
        for (uint32_t i = 0; i < d; i++)
            out[h * d + i] = 0;
        for (uint32_t j = 0; j < n_seen; j++) {
            double weight = exp(scores[j] - max);
            sum += weight;
            for (uint32_t i = 0; i < d; i++)
                out[h * d + i] += weight * v[((size_t)j * shape->n_kv_heads + h / group) * d + i];
        }
        for (uint32_t i = 0; i < d; i++)
            out[h * d + i] /= sum;
    }
    free(scores);
}

static inline void naive_layer(struct naive *naive, const struct worker_fixture *fixture, uint32_t layer)
{
    const struct model_shape *shape = &fixture->model->shape;
    const struct model_layer *weights = &fixture->model->layers[layer];
    size_t d = shape->head_dim, n_q = shape->n_heads * d, n_kv = shape->n_kv_heads * d;
    double *q = naive->q + layer * naive->n * n_q, *k = naive->k + layer * naive->n * n_kv;
    double *v = naive->v + layer * naive->n * n_kv;
    double *h = naive_array(shape->n_embd), *out = naive_array(n_q);
    double *gate = naive_array(shape->n_ff), *up = naive_array(shape->n_ff);
    for (uint32_t t = 0; t < naive->n; t++) {
        double *x = naive->x + (size_t)t * shape->n_embd;
        naive_norm(x, weights->attn_norm, (double)shape->rms_eps, h);
        naive_matvec(weights->attn_q, h, q + t * n_q);
        naive_matvec(weights->attn_k, h, k + t * n_kv);
        naive_matvec(weights->attn_v, h, v + t * n_kv);
        for (uint32_t i = 0; i < shape->n_heads; i++)
            naive_rope(&fixture->model->rope, q + t * n_q + i * d, t);
        for (uint32_t i = 0; i < shape->n_kv_heads; i++)
            naive_rope(&fixture->model->rope, k + t * n_kv + i * d, t);
        naive_round(fixture->tools.kernels, k + t * n_kv, (uint32_t)n_kv);
        naive_round(fixture->tools.kernels, v + t * n_kv, (uint32_t)n_kv);
        naive_attend(shape, q + t * n_q, k, v, t + 1, out);
        naive_matvec(weights->attn_output, out, h);
        for (uint32_t i = 0; i < shape->n_embd; i++)
            x[i] += h[i];
        naive_norm(x, weights->ffn_norm, (double)shape->rms_eps, h);
        naive_matvec(weights->ffn_gate, h, gate);
        naive_matvec(weights->ffn_up, h, up);
        for (uint32_t i = 0; i < shape->n_ff; i++)
            gate[i] = gate[i] / (1 + exp(-gate[i])) * up[i];
        naive_matvec(weights->ffn_down, gate, h);
        for (uint32_t i = 0; i < shape->n_embd; i++)
            x[i] += h[i];
    }
    free(h);
    free(out);
    free(gate);
    free(up);
}

static inline struct naive naive_new(const struct worker_fixture *fixture, const uint32_t *ids, uint32_t n)
{
    const struct model *model = fixture->model;
    const struct model_shape *shape = &model->shape;
    size_t rows = (size_t)shape->n_layers * n * shape->head_dim, embd = shape->n_embd;
    struct naive naive = {
        .n = n,
        .x = naive_array(n * embd),
        .q = naive_array(rows * shape->n_heads),
        .k = naive_array(rows * shape->n_kv_heads),
        .v = naive_array(rows * shape->n_kv_heads),
        .logprobs = naive_array((size_t)n * shape->n_vocab),
    };
    for (size_t t = 0; t < n; t++)
        for (size_t i = 0; i < embd; i++)
            naive.x[t * embd + i] = (double)naive_weights(model->token_embd)[ids[t] * embd + i];
    for (uint32_t layer = 0; layer < shape->n_layers; layer++)
        naive_layer(&naive, fixture, layer);
    double *h = naive_array(embd);
    for (size_t t = 0; t < n; t++) {
        double *logprobs = naive.logprobs + t * shape->n_vocab, sum = 0;
        naive_norm(naive.x + t * embd, model->output_norm, (double)shape->rms_eps, h);
        naive_matvec(model->output, h, logprobs);
        for (uint32_t i = 0; i < shape->n_vocab; i++)
            sum += exp(logprobs[i]);
        for (uint32_t i = 0; i < shape->n_vocab; i++)
            logprobs[i] -= log(sum);
    }
    free(h);
    return naive;
}

static inline void naive_free(struct naive *naive)
{
    free(naive->x);
    free(naive->q);
    free(naive->k);
    free(naive->v);
    free(naive->logprobs);
}
