/*
 * vector_weigh.h - sums of V with given weights, for any vector width.
 *
 * Every number is one chain of fused multiply-adds in the order of rows (or of calls), so its bits depend on nothing else.
 */
#pragma once

#include <math.h>
#include <string.h>

#include "kernels/kernels.h"
#include "kernels/vector.h"
#include "kernels/vector_rows.h"

#define WEIGH_QUERIES    4u
#define WEIGH_DIMENSIONS 2u /* vectors */

/* Like weigh_rows, over V of up to 64 rows: f16 where it lies, or decoded and zero-padded. totals [n_q][KERNELS_MAX_HEAD_DIM]. */
VECTOR_INLINE void weigh_tile(const uint32_t n_q, const uint32_t n_d, const int decoded, const char *const *values,
                              uint32_t n_rows, uint32_t d, const float *weights, size_t weights_stride,
                              float (*totals)[KERNELS_MAX_HEAD_DIM])
{
    vf sums[WEIGH_QUERIES][WEIGH_DIMENSIONS];
#pragma GCC unroll 4
    for (uint32_t a = 0; a < n_q; a++)
#pragma GCC unroll 2
        for (uint32_t j = 0; j < n_d; j++)
            sums[a][j] = vf_load(totals[a] + d + j * VECTOR_WIDTH);
    for (uint32_t t = 0; t < n_rows; t++) {
        vf v[WEIGH_DIMENSIONS];
#pragma GCC unroll 2
        for (uint32_t j = 0; j < n_d; j++)
            v[j] = decoded ? vf_load((const float *)(const void *)values[t] + d + j * VECTOR_WIDTH)
                           : vf_decode((const uint16_t *)(const void *)values[t] + d + j * VECTOR_WIDTH);
#pragma GCC unroll 4
        for (uint32_t a = 0; a < n_q; a++) {
            vf weight = vf_set(weights[a * weights_stride + t]);
#pragma GCC unroll 2
            for (uint32_t j = 0; j < n_d; j++)
                sums[a][j] = vf_fma(weight, v[j], sums[a][j]);
        }
    }
#pragma GCC unroll 4
    for (uint32_t a = 0; a < n_q; a++)
#pragma GCC unroll 2
        for (uint32_t j = 0; j < n_d; j++)
            vf_store(totals[a] + d + j * VECTOR_WIDTH, sums[a][j]);
}

VECTOR_INLINE void weigh_queries(const uint32_t n_q, const int decoded, const char *const *values, uint32_t n_rows,
                                 uint32_t head_dim, const float *weights, size_t weights_stride, float *sums)
{
    _Alignas(64) float totals[WEIGH_QUERIES][KERNELS_MAX_HEAD_DIM];
    for (uint32_t a = 0; a < n_q; a++) {
        float *row = sums + a * (size_t)(1 + head_dim);
        for (uint32_t t = 0; t < n_rows; t++)
            row[0] += weights[a * weights_stride + t];
        memset(totals[a], 0, sizeof totals[a]);
        memcpy(totals[a], row + 1, head_dim * sizeof *row);
    }
    uint32_t d = 0;
    for (; d + WEIGH_DIMENSIONS * VECTOR_WIDTH <= head_dim; d += WEIGH_DIMENSIONS * VECTOR_WIDTH)
        weigh_tile(n_q, WEIGH_DIMENSIONS, decoded, values, n_rows, d, weights, weights_stride, totals);
    for (; d < head_dim; d += VECTOR_WIDTH)
        weigh_tile(n_q, 1, decoded, values, n_rows, d, weights, weights_stride, totals);
    for (uint32_t a = 0; a < n_q; a++)
        memcpy(sums + a * (size_t)(1 + head_dim) + 1, totals[a], head_dim * sizeof *sums);
}

VECTOR_INLINE void weigh_values(const int decoded, const char *const *values, uint32_t n_rows, uint32_t n_queries,
                                uint32_t head_dim, const float *weights, size_t weights_stride, float *sums)
{
    uint32_t i = 0;
    for (; i + WEIGH_QUERIES <= n_queries; i += WEIGH_QUERIES)
        weigh_queries(WEIGH_QUERIES, decoded, values, n_rows, head_dim, weights + i * weights_stride, weights_stride,
                      sums + i * (size_t)(1 + head_dim));
    for (; i < n_queries; i++)
        weigh_queries(1, decoded, values, n_rows, head_dim, weights + i * weights_stride, weights_stride,
                      sums + i * (size_t)(1 + head_dim));
}

static __attribute__((noinline)) void weigh_decoded(uint32_t n_queries, uint32_t head_dim, enum kernels_rows codec,
                                                    const void *const *rows, uint32_t n_rows, const float *weights,
                                                    size_t weights_stride, float *sums)
{
    _Alignas(64) float numbers[KERNELS_BLOCK_TOKENS][KERNELS_MAX_HEAD_DIM];
    const char *values[KERNELS_BLOCK_TOKENS];
    for (uint32_t t = 0; t < n_rows; t++) {
        if (codec == KERNELS_ROWS_F16)
            row_decode(KERNELS_ROWS_F16, rows[t], head_dim, 1, 0, head_dim, numbers[t]);
        else
            row_decode(KERNELS_ROWS_Q8_0, rows[t], head_dim, 1, 0, head_dim, numbers[t]);
        values[t] = (const char *)numbers[t];
    }
    weigh_values(1, values, n_rows, n_queries, head_dim, weights, weights_stride, sums);
}

static void weigh_rows(uint32_t n_queries, uint32_t head_dim, enum kernels_rows codec, const void *const *rows,
                       uint32_t n_rows, const float *weights, size_t weights_stride, float *sums)
{
    for (uint32_t t = 0, n; t < n_rows; t += n) {
        n = n_rows - t < KERNELS_BLOCK_TOKENS ? n_rows - t : KERNELS_BLOCK_TOKENS;
        if (codec != KERNELS_ROWS_F16 || head_dim % VECTOR_WIDTH != 0) {
            weigh_decoded(n_queries, head_dim, codec, rows + t, n, weights + t, weights_stride, sums);
            continue;
        }
        const char *values[KERNELS_BLOCK_TOKENS];
        for (uint32_t j = 0; j < n; j++)
            values[j] = (const char *)rows[t + j] + (size_t)head_dim * sizeof(uint16_t);
        weigh_values(0, values, n, n_queries, head_dim, weights + t, weights_stride, sums);
    }
}

static void weigh_mean(uint32_t n_queries, uint32_t head_dim, const float *v_sums, const float *masses,
                       size_t masses_stride, float *sums)
{
    const float share = 1.0f / KERNELS_BLOCK_TOKENS; /* exact */
    for (uint32_t i = 0; i < n_queries; i++, masses += masses_stride, sums += 1 + head_dim) {
        const float mass = *masses;
        if (mass == 0)
            continue;
        sums[0] += mass;
        float *to = sums + 1;
        uint32_t d = 0;
        for (; d + VECTOR_WIDTH <= head_dim; d += VECTOR_WIDTH)
            vf_store(to + d, vf_fma(vf_set(mass), vf_mul(vf_load(v_sums + d), vf_set(share)), vf_load(to + d)));
        for (; d < head_dim; d++)
            to[d] = fmaf(mass, v_sums[d] * share, to[d]);
    }
}
