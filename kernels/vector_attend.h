/*
 * vector_attend.h - attend_block and score_f16 for any vector width.
 *
 * Queries are taken in tiles of up to TILE_QUERIES whose accumulators stay in registers; tiling changes only which
 * sums are in flight together, never the order within one sum:
 *     score    one accumulator vector over head_dim in order, then vector.h's tree
 *     sum      lane i adds tokens i, i + width, ... of the block, then the tree
 *     out      per dimension, fused multiply-adds in token order
 * A token outside a query's mask adds nothing to any of the three, whatever its row holds.
 * Rows are read as f16, or decoded first into a zero-padded buffer (the same numbers) where many queries share them
 * or head_dim is not a multiple of the width.
 */
#pragma once

#include <float.h>
#include <string.h>

#include "kernels/kernels.h"
#include "kernels/vector.h"
#include "kernels/vector_exp.h"
#include "kernels/vector_partial.h"

/* 12 accumulators, 3 + 1 operands: the 16 registers of AVX2. */
#define TILE_QUERIES    3u
#define TILE_TOKENS     4u
#define TILE_DIMENSIONS 4u /* vectors of out */
#define DECODE_QUERIES  7u /* from this many queries on, rows are decoded once */
#define MAX_VECTORS     (KERNELS_MAX_HEAD_DIM / VECTOR_WIDTH)

_Static_assert(KERNELS_MAX_HEAD_DIM % VECTOR_WIDTH == 0, "padding must fit");

/* Rows as elements of 2 bytes (f16) or 4 (decoded). */
struct attend_rows {
    const char *rows;
    size_t stride_bytes;
    size_t value_bytes; /* from a row's start to its V */
    uint32_t n_vectors;
};

VECTOR_INLINE vf attend_load(const char *row, uint32_t i, const int decoded)
{
    if (decoded)
        return vf_load((const float *)(const void *)row + (size_t)i * VECTOR_WIDTH);
    return vf_decode((const uint16_t *)(const void *)row + (size_t)i * VECTOR_WIDTH);
}

/* Scores of n_q queries against 4 rows (or 1: then only element 0 counts), not scaled. */
VECTOR_INLINE void attend_dots(const uint32_t n_q, const uint32_t n_rows, const int decoded, const float *q,
                               size_t q_stride, const char *const *rows, uint32_t n_vectors, __m128 *dots)
{
    vf sums[TILE_QUERIES][TILE_TOKENS];
#pragma GCC unroll 4
    for (uint32_t a = 0; a < n_q; a++)
#pragma GCC unroll 4
        for (uint32_t j = 0; j < n_rows; j++)
            sums[a][j] = vf_zero();
    for (uint32_t i = 0; i < n_vectors; i++) {
        vf query[TILE_QUERIES];
#pragma GCC unroll 4
        for (uint32_t a = 0; a < n_q; a++)
            query[a] = vf_load(q + a * q_stride + (size_t)i * VECTOR_WIDTH);
#pragma GCC unroll 4
        for (uint32_t j = 0; j < n_rows; j++) {
            vf key = attend_load(rows[j], i, decoded);
#pragma GCC unroll 4
            for (uint32_t a = 0; a < n_q; a++)
                sums[a][j] = vf_fma(query[a], key, sums[a][j]);
        }
    }
#pragma GCC unroll 4
    for (uint32_t a = 0; a < n_q; a++)
        dots[a] =
            n_rows == 4 ? vf_sum4(sums[a][0], sums[a][1], sums[a][2], sums[a][3]) : _mm_set_ss(vf_sum(sums[a][0]));
}

/* Keeps sums of exponentials finite for any finite row; NaN stays NaN (min and max return their second operand then). */
VECTOR_INLINE __m128 attend_scale(__m128 dots, float scale)
{
    __m128 s = _mm_mul_ps(dots, _mm_set1_ps(scale));
    return _mm_max_ps(_mm_set1_ps(-FLT_MAX), _mm_min_ps(_mm_set1_ps(FLT_MAX), s));
}

/* scores [n_q][64] of the listed tokens; the others are left as they are. */
VECTOR_INLINE void attend_scores(const uint32_t n_q, const int decoded, const struct attend_rows *in, const float *q,
                                 size_t q_stride, const uint8_t *tokens, uint32_t n_tokens, float scale,
                                 float (*scores)[KERNELS_BLOCK_TOKENS])
{
    uint32_t t = 0;
    __m128 dots[TILE_QUERIES];
    for (; t + TILE_TOKENS <= n_tokens; t += TILE_TOKENS) {
        const char *rows[TILE_TOKENS];
        for (uint32_t j = 0; j < TILE_TOKENS; j++)
            rows[j] = in->rows + tokens[t + j] * in->stride_bytes;
        attend_dots(n_q, 4, decoded, q, q_stride, rows, in->n_vectors, dots);
        int in_a_row = tokens[t + 3] == tokens[t] + 3;
#pragma GCC unroll 4
        for (uint32_t a = 0; a < n_q; a++) {
            __m128 s = attend_scale(dots[a], scale);
            if (in_a_row) {
                _mm_storeu_ps(&scores[a][tokens[t]], s);
            } else {
                scores[a][tokens[t]] = _mm_cvtss_f32(s);
                scores[a][tokens[t + 1]] = _mm_cvtss_f32(_mm_shuffle_ps(s, s, 1));
                scores[a][tokens[t + 2]] = _mm_cvtss_f32(_mm_shuffle_ps(s, s, 2));
                scores[a][tokens[t + 3]] = _mm_cvtss_f32(_mm_shuffle_ps(s, s, 3));
            }
        }
    }
    for (; t < n_tokens; t++) {
        const char *row = in->rows + tokens[t] * in->stride_bytes;
        attend_dots(n_q, 1, decoded, q, q_stride, &row, in->n_vectors, dots);
#pragma GCC unroll 4
        for (uint32_t a = 0; a < n_q; a++)
            scores[a][tokens[t]] = _mm_cvtss_f32(attend_scale(dots[a], scale));
    }
}

/* scores [64] -> exp(score - max) of the masked tokens; only they are meaningful before and after. */
VECTOR_INLINE void attend_softmax(float *scores, uint64_t mask, float *ret_max, float *ret_sum)
{
    const uint32_t lanes = (1u << VECTOR_WIDTH) - 1u;
    const vf none = vf_set(-INFINITY);
    vf max = none;
    for (uint32_t g = 0; g < KERNELS_BLOCK_TOKENS; g += VECTOR_WIDTH) {
        uint32_t bits = (uint32_t)(mask >> g) & lanes;
        if (bits)
            max = vf_max(max, vf_bits(bits, vf_load(scores + g), none));
    }
    float block_max = vf_max_across(max);
    vf sum = vf_zero();
    for (uint32_t g = 0; g < KERNELS_BLOCK_TOKENS; g += VECTOR_WIDTH) {
        uint32_t bits = (uint32_t)(mask >> g) & lanes;
        if (!bits)
            continue;
        vf weight = vf_exp(vf_sub(vf_load(scores + g), vf_set(block_max)));
        weight = vf_bits(bits, weight, vf_zero());
        sum = vf_add(sum, weight);
        vf_store(scores + g, weight);
    }
    *ret_max = block_max;
    *ret_sum = vf_sum(sum);
}

/* out[a][from, from + n_d) vectors <- sum of weight x V over the listed tokens, in their order. */
VECTOR_INLINE void attend_values(const uint32_t n_q, const uint32_t n_d, const int decoded,
                                 const struct attend_rows *in, uint32_t from, const uint8_t *tokens, uint32_t n_tokens,
                                 const uint64_t *masks, const int shared_mask, float (*weights)[KERNELS_BLOCK_TOKENS],
                                 float (*out)[KERNELS_MAX_HEAD_DIM])
{
    vf sums[TILE_QUERIES][TILE_DIMENSIONS];
#pragma GCC unroll 4
    for (uint32_t a = 0; a < n_q; a++)
#pragma GCC unroll 4
        for (uint32_t d = 0; d < n_d; d++)
            sums[a][d] = vf_zero();
    for (uint32_t t = 0; t < n_tokens; t++) {
        const uint32_t token = tokens[t];
        const char *value = in->rows + token * in->stride_bytes + in->value_bytes;
        vf weight[TILE_QUERIES];
#pragma GCC unroll 4
        for (uint32_t a = 0; a < n_q; a++)
            weight[a] = vf_set(weights[a][token]);
        if (shared_mask) {
#pragma GCC unroll 4
            for (uint32_t d = 0; d < n_d; d++) {
                vf v = attend_load(value, from + d, decoded);
#pragma GCC unroll 4
                for (uint32_t a = 0; a < n_q; a++)
                    sums[a][d] = vf_fma(weight[a], v, sums[a][d]);
            }
        } else {
#pragma GCC unroll 4
            for (uint32_t a = 0; a < n_q; a++) {
                if (!(masks[a] >> token & 1u))
                    continue;
#pragma GCC unroll 4
                for (uint32_t d = 0; d < n_d; d++)
                    sums[a][d] = vf_fma(weight[a], attend_load(value, from + d, decoded), sums[a][d]);
            }
        }
    }
#pragma GCC unroll 4
    for (uint32_t a = 0; a < n_q; a++)
#pragma GCC unroll 4
        for (uint32_t d = 0; d < n_d; d++)
            vf_store(out[a] + (size_t)(from + d) * VECTOR_WIDTH, sums[a][d]);
}

VECTOR_INLINE void attend_all_values(const uint32_t n_q, const int decoded, const struct attend_rows *in,
                                     const uint8_t *tokens, uint32_t n_tokens, const uint64_t *masks,
                                     const int shared_mask, float (*weights)[KERNELS_BLOCK_TOKENS],
                                     float (*out)[KERNELS_MAX_HEAD_DIM])
{
    uint32_t from = 0;
    for (; from + TILE_DIMENSIONS <= in->n_vectors; from += TILE_DIMENSIONS)
        attend_values(n_q, TILE_DIMENSIONS, decoded, in, from, tokens, n_tokens, masks, shared_mask, weights, out);
    for (; from < in->n_vectors; from++)
        attend_values(n_q, 1, decoded, in, from, tokens, n_tokens, masks, shared_mask, weights, out);
}

VECTOR_INLINE void attend_tile(const uint32_t n_q, const int decoded, const struct attend_rows *in, const float *q,
                               size_t q_stride, uint32_t head_dim, const uint64_t *masks, float scale, float *partials)
{
    uint64_t any = 0, all = ~UINT64_C(0);
    for (uint32_t a = 0; a < n_q; a++) {
        any |= masks[a];
        all &= masks[a];
    }
    if (!any)
        return;
    uint8_t tokens[KERNELS_BLOCK_TOKENS];
    uint32_t n_tokens = 0;
    for (uint64_t left = any; left; left &= left - 1)
        tokens[n_tokens++] = (uint8_t)__builtin_ctzll(left);

    _Alignas(64) float scores[TILE_QUERIES][KERNELS_BLOCK_TOKENS];
    _Alignas(64) float out[TILE_QUERIES][KERNELS_MAX_HEAD_DIM];
    float max[TILE_QUERIES], sum[TILE_QUERIES];
    attend_scores(n_q, decoded, in, q, q_stride, tokens, n_tokens, scale, scores);
    for (uint32_t a = 0; a < n_q; a++)
        if (masks[a])
            attend_softmax(scores[a], masks[a], &max[a], &sum[a]);
    if (any == all)
        attend_all_values(n_q, decoded, in, tokens, n_tokens, masks, 1, scores, out);
    else
        attend_all_values(n_q, decoded, in, tokens, n_tokens, masks, 0, scores, out);
    for (uint32_t a = 0; a < n_q; a++)
        if (masks[a])
            partial_merge_parts(partials + (size_t)a * KERNELS_PARTIAL_FLOATS(head_dim), max[a], sum[a], out[a],
                                head_dim);
}

/* One function a tile size and row format, so that each gets its own registers. */
#define ATTEND_TILE(name, n_q, decoded)                                                                                \
    static __attribute__((noinline)) void name(const struct attend_rows *in, const float *q, size_t q_stride,          \
                                               uint32_t head_dim, const uint64_t *masks, float scale, float *partials) \
    {                                                                                                                  \
        attend_tile(n_q, decoded, in, q, q_stride, head_dim, masks, scale, partials);                                  \
    }
ATTEND_TILE(attend_tile_1_f16, 1, 0)
ATTEND_TILE(attend_tile_2_f16, 2, 0)
ATTEND_TILE(attend_tile_3_f16, 3, 0)
ATTEND_TILE(attend_tile_1_f32, 1, 1)
ATTEND_TILE(attend_tile_2_f32, 2, 1)
ATTEND_TILE(attend_tile_3_f32, 3, 1)
#undef ATTEND_TILE

static void attend_tiles(const struct attend_rows *in, int decoded, const float *q, uint32_t n_queries,
                         uint32_t head_dim, const uint64_t *masks, float scale, float *partials)
{
    static void (*const tiles[2][TILE_QUERIES])(const struct attend_rows *, const float *, size_t, uint32_t,
                                                const uint64_t *, float, float *) = {
        {attend_tile_1_f16, attend_tile_2_f16, attend_tile_3_f16},
        {attend_tile_1_f32, attend_tile_2_f32, attend_tile_3_f32},
    };
    const int padded = head_dim % VECTOR_WIDTH != 0;
    for (uint32_t i = 0, n; i < n_queries; i += n) {
        n = n_queries - i;
        n = n > 4 || n == 3 ? 3 : n > 2 ? 2 : n; /* 4 = 2 + 2 */
        const float *tile_q = q + (size_t)i * head_dim;
        float *tile_partials = partials + (size_t)i * KERNELS_PARTIAL_FLOATS(head_dim);
        if (padded) {
            float copy[TILE_QUERIES][KERNELS_MAX_HEAD_DIM];
            memset(copy, 0, sizeof copy);
            for (uint32_t a = 0; a < n; a++)
                memcpy(copy[a], tile_q + (size_t)a * head_dim, head_dim * sizeof(float));
            tiles[decoded][n - 1](in, copy[0], KERNELS_MAX_HEAD_DIM, head_dim, masks + i, scale, tile_partials);
        } else {
            tiles[decoded][n - 1](in, tile_q, head_dim, head_dim, masks + i, scale, tile_partials);
        }
    }
}

/* n values, zero-padded to whole vectors. */
VECTOR_INLINE void attend_decode_padded(const uint16_t *from, uint32_t n, float *to)
{
    uint32_t i = 0;
    for (; i + VECTOR_WIDTH <= n; i += VECTOR_WIDTH)
        vf_store(to + i, vf_decode(from + i));
    if (i < n) {
        uint16_t tail[VECTOR_WIDTH] = {0};
        memcpy(tail, from + i, (n - i) * sizeof *tail);
        vf_store(to + i, vf_decode(tail));
    }
}

static __attribute__((noinline)) void attend_block_decoded(const float *q, uint32_t n_queries, uint32_t head_dim,
                                                           const uint16_t *rows, uint64_t any, const uint64_t *masks,
                                                           float scale, float *partials)
{
    _Alignas(64) float decoded[KERNELS_BLOCK_TOKENS * 2 * KERNELS_MAX_HEAD_DIM];
    const uint32_t n_vectors = (head_dim + VECTOR_WIDTH - 1) / VECTOR_WIDTH;
    const size_t half = (size_t)n_vectors * VECTOR_WIDTH;
    for (; any; any &= any - 1) {
        size_t token = (size_t)__builtin_ctzll(any);
        const uint16_t *row = rows + token * 2 * head_dim;
        attend_decode_padded(row, head_dim, decoded + token * 2 * half);
        attend_decode_padded(row + head_dim, head_dim, decoded + (token * 2 + 1) * half);
    }
    struct attend_rows in = {
        .rows = (const char *)decoded,
        .stride_bytes = 2 * half * sizeof(float),
        .value_bytes = half * sizeof(float),
        .n_vectors = n_vectors,
    };
    attend_tiles(&in, 1, q, n_queries, head_dim, masks, scale, partials);
}

static void attend_block(const float *q, uint32_t n_queries, uint32_t head_dim, const uint16_t *rows,
                         const uint64_t *masks, float scale, float *partials)
{
    if (n_queries >= DECODE_QUERIES || head_dim % VECTOR_WIDTH != 0) {
        uint64_t any = 0;
        for (uint32_t i = 0; i < n_queries; i++)
            any |= masks[i];
        if (any)
            attend_block_decoded(q, n_queries, head_dim, rows, any, masks, scale, partials);
        return;
    }
    struct attend_rows in = {
        .rows = (const char *)rows,
        .stride_bytes = (size_t)head_dim * 2 * sizeof(uint16_t),
        .value_bytes = (size_t)head_dim * sizeof(uint16_t),
        .n_vectors = head_dim / VECTOR_WIDTH,
    };
    attend_tiles(&in, 0, q, n_queries, head_dim, masks, scale, partials);
}

/* The same dots as attend_block's scores. */
static void score_f16(const float *q, uint32_t head_dim, const uint16_t *keys, uint32_t n_keys, float scale,
                      float *scores)
{
    const int padded = head_dim % VECTOR_WIDTH != 0;
    const uint32_t n_vectors = (head_dim + VECTOR_WIDTH - 1) / VECTOR_WIDTH;
    _Alignas(64) float query[KERNELS_MAX_HEAD_DIM];
    _Alignas(64) float decoded[TILE_TOKENS][KERNELS_MAX_HEAD_DIM];
    memset(query, 0, sizeof query);
    memcpy(query, q, head_dim * sizeof *q);
    for (uint32_t k = 0; k < n_keys; k += TILE_TOKENS) {
        uint32_t n = n_keys - k < TILE_TOKENS ? n_keys - k : TILE_TOKENS;
        const char *rows[TILE_TOKENS];
        __m128 dots;
        for (uint32_t j = 0; j < TILE_TOKENS; j++) {
            const uint16_t *key = keys + (size_t)(k + (j < n ? j : 0)) * head_dim;
            rows[j] = (const char *)key;
            if (padded) {
                attend_decode_padded(key, head_dim, decoded[j]);
                rows[j] = (const char *)decoded[j];
            }
        }
        if (padded)
            attend_dots(1, 4, 1, query, 0, rows, n_vectors, &dots);
        else
            attend_dots(1, 4, 0, query, 0, rows, n_vectors, &dots);
        float four[TILE_TOKENS];
        _mm_storeu_ps(four, _mm_mul_ps(dots, _mm_set1_ps(scale)));
        memcpy(scores + k, four, n * sizeof *four);
    }
}
