/*
 * vector_attend.h - attend_block and score_f16 for any vector width.
 *
 * Queries are taken in tiles of up to TILE_QUERIES whose accumulators stay in registers; tiling changes only which
 * sums are in flight together, never the order within one sum:
 *     score    one accumulator vector over head_dim in order, then vector.h's tree
 *     sum      lane i adds tokens i, i + width, ... of the block, then the tree
 *     out      per dimension, fused multiply-adds in token order
 * A token outside a query's mask adds nothing to any of the three, whatever its row holds.
 * f16 rows are read where they lie, or decoded first into a zero-padded buffer (the same numbers) where many queries share them
 * or head_dim is not a multiple of the width; q8_0 rows are always decoded first.
 */
#pragma once

#include <float.h>
#include <string.h>

#include "kernels/kernels.h"
#include "kernels/vector.h"
#include "kernels/vector_exp.h"
#include "kernels/vector_partial.h"
#include "kernels/vector_rows.h"

/* 12 accumulators, 3 + 1 operands: the 16 registers of AVX2. */
#define TILE_QUERIES    3u
#define TILE_TOKENS     4u
#define TILE_DIMENSIONS 4u                  /* vectors of out */
#define DECODE_QUERIES  (BATCH_QUERIES + 1) /* from this many queries on, rows are decoded once */
#define BATCH_QUERIES   24u                 /* with 16 keys or a panel of values they fill the first-level cache */
#define BATCH_TILES     (BATCH_QUERIES / TILE_QUERIES + 1)
#define SCORE_TOKENS    16u
#define BLOCK_AHEAD     16u /* rows of a dense block that are asked for before they are used */

_Static_assert(KERNELS_MAX_HEAD_DIM % (TILE_DIMENSIONS * VECTOR_WIDTH) == 0, "padding must fit");

/* K and V of up to 64 rows as elements of 2 bytes (f16, in place) or 4 (decoded); only those attended to are set. V is read in
 * panels of TILE_DIMENSIONS vectors; decoded ones lie apart, so that a panel of all tokens stays in the first-level cache. */
struct attend_rows {
    const char *keys[KERNELS_BLOCK_TOKENS], *values[KERNELS_BLOCK_TOKENS];
    size_t panel_stride_bytes;
    uint32_t n_vectors;
    const void *const *fetch; /* rows to ask for meanwhile */
    uint32_t n_fetch;
    uint32_t fetch_step; /* with every TILE_TOKENS scores, or with as many rows decoded */
    size_t fetch_bytes;  /* of one row */
};

/* Up to TILE_QUERIES queries that are computed together, and the tokens any of them attends to. */
struct attend_tile {
    uint32_t first, n_q;
    uint32_t n_tokens, n_scored;
    uint32_t n_fetched; /* of `fetch`; past its end in all tiles but a call's first */
    uint64_t all;       /* tokens that all of them attend to */
    uint8_t tokens[KERNELS_BLOCK_TOKENS];
};

/* What a batch of queries needs between the passes over K and over V. */
struct attend_batch {
    const struct attend_rows *in;
    const float *q;
    size_t q_stride;
    const uint64_t *masks;
    float scale;
    size_t out_stride;
    _Alignas(64) float scores[BATCH_QUERIES][KERNELS_BLOCK_TOKENS];
    _Alignas(64) float out[BATCH_QUERIES * KERNELS_MAX_HEAD_DIM];
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

/* Asks for the next few rows: a handful at a time, since a CPU keeps only so many requests and forgets the rest. */
VECTOR_INLINE void attend_fetch(const struct attend_rows *in, struct attend_tile *tile)
{
    for (uint32_t i = 0; i < in->fetch_step && tile->n_fetched < in->n_fetch; i++)
        row_prefetch(in->fetch[tile->n_fetched++], in->fetch_bytes);
}

/* Scores of the tile's tokens below `end`, from where the last call stopped. Other elements are left as they are. */
VECTOR_INLINE void attend_scores(const uint32_t n_q, const int decoded, struct attend_batch *batch,
                                 struct attend_tile *tile, uint32_t end)
{
    const struct attend_rows *in = batch->in;
    const float *q = batch->q + tile->first * batch->q_stride;
    const size_t q_stride = batch->q_stride;
    const float scale = batch->scale;
    const uint8_t *tokens = tile->tokens;
    float(*scores)[KERNELS_BLOCK_TOKENS] = &batch->scores[tile->first];
    uint32_t t = tile->n_scored, n_tokens = tile->n_tokens;
    __m128 dots[TILE_QUERIES];
    for (; t + TILE_TOKENS <= n_tokens && tokens[t + 3] < end; t += TILE_TOKENS) {
        const char *rows[TILE_TOKENS];
        for (uint32_t j = 0; j < TILE_TOKENS; j++)
            rows[j] = in->keys[tokens[t + j]];
        if (tile->n_fetched < in->n_fetch)
            attend_fetch(in, tile);
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
    for (; t < n_tokens && tokens[t] < end; t++) {
        const char *row = in->keys[tokens[t]];
        attend_dots(n_q, 1, decoded, q, q_stride, &row, in->n_vectors, dots);
#pragma GCC unroll 4
        for (uint32_t a = 0; a < n_q; a++)
            scores[a][tokens[t]] = _mm_cvtss_f32(attend_scale(dots[a], scale));
    }
    tile->n_scored = t;
}

/* scores [64] -> exp(score - max) of the masked tokens; only they are meaningful before and after. */
VECTOR_INLINE void attend_softmax(float *scores, uint64_t mask, float *ret_max, float *ret_sum)
{
    const uint32_t lanes = (1u << VECTOR_WIDTH) - 1u;
    const vf none = vf_set(-INFINITY);
    vf max = none;
    for (uint32_t g = 0; g < KERNELS_BLOCK_TOKENS; g += VECTOR_WIDTH) {
        uint32_t bits = (uint32_t)(mask >> g) & lanes;
        if (bits == lanes)
            max = vf_max(max, vf_load(scores + g));
        else if (bits)
            max = vf_max(max, vf_bits(bits, vf_load(scores + g), none));
    }
    float block_max = vf_max_across(max);
    vf sum = vf_zero();
    for (uint32_t g = 0; g < KERNELS_BLOCK_TOKENS; g += VECTOR_WIDTH) {
        uint32_t bits = (uint32_t)(mask >> g) & lanes;
        if (!bits)
            continue;
        vf weight = vf_exp(vf_sub(vf_load(scores + g), vf_set(block_max)));
        if (bits != lanes)
            weight = vf_bits(bits, weight, vf_zero());
        sum = vf_add(sum, weight);
        vf_store(scores + g, weight);
    }
    *ret_max = block_max;
    *ret_sum = vf_sum(sum);
}

/* out of vectors [from, from + n_d) of a panel <- sum of weight x V over the tile's tokens, in their order. */
VECTOR_INLINE void attend_values(const uint32_t n_q, const uint32_t n_d, const int decoded, struct attend_batch *batch,
                                 const struct attend_tile *tile, uint32_t panel, uint32_t from)
{
    const struct attend_rows *in = batch->in;
    const size_t panel_offset = panel * in->panel_stride_bytes;
    const uint64_t *masks = batch->masks + tile->first;
    const uint64_t all = tile->all;
    float(*weights)[KERNELS_BLOCK_TOKENS] = &batch->scores[tile->first];
    vf sums[TILE_QUERIES][TILE_DIMENSIONS];
#pragma GCC unroll 4
    for (uint32_t a = 0; a < n_q; a++)
#pragma GCC unroll 4
        for (uint32_t d = 0; d < n_d; d++)
            sums[a][d] = vf_zero();
    for (uint32_t t = 0; t < tile->n_tokens; t++) {
        const uint32_t token = tile->tokens[t];
        const char *value = in->values[token] + panel_offset;
        if (all >> token & 1u) {
            vf weight[TILE_QUERIES];
#pragma GCC unroll 4
            for (uint32_t a = 0; a < n_q; a++)
                weight[a] = vf_set(weights[a][token]);
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
                vf weight = vf_set(weights[a][token]);
#pragma GCC unroll 4
                for (uint32_t d = 0; d < n_d; d++)
                    sums[a][d] = vf_fma(weight, attend_load(value, from + d, decoded), sums[a][d]);
            }
        }
    }
    float *out = batch->out + tile->first * batch->out_stride + (panel * TILE_DIMENSIONS + from) * VECTOR_WIDTH;
#pragma GCC unroll 4
    for (uint32_t a = 0; a < n_q; a++)
#pragma GCC unroll 4
        for (uint32_t d = 0; d < n_d; d++)
            vf_store(out + a * batch->out_stride + (size_t)d * VECTOR_WIDTH, sums[a][d]);
}

VECTOR_INLINE void attend_panel(const uint32_t n_q, const int decoded, struct attend_batch *batch,
                                const struct attend_tile *tile, uint32_t panel)
{
    const uint32_t left = batch->in->n_vectors - panel * TILE_DIMENSIONS;
    if (left >= TILE_DIMENSIONS) {
        attend_values(n_q, TILE_DIMENSIONS, decoded, batch, tile, panel, 0);
        return;
    }
    if (left >= 2)
        attend_values(n_q, 2, decoded, batch, tile, panel, 0);
    if (left % 2)
        attend_values(n_q, 1, decoded, batch, tile, panel, left - 1);
}

/* One function a tile size and row format, so that each gets its own registers. */
#define ATTEND_TILE(name, n_q, decoded)                                                                                \
    static __attribute__((noinline)) void name##_scores(struct attend_batch *batch, struct attend_tile *tile,          \
                                                        uint32_t end)                                                  \
    {                                                                                                                  \
        attend_scores(n_q, decoded, batch, tile, end);                                                                 \
    }                                                                                                                  \
    static __attribute__((noinline)) void name##_panel(struct attend_batch *batch, struct attend_tile *tile,           \
                                                       uint32_t panel)                                                 \
    {                                                                                                                  \
        attend_panel(n_q, decoded, batch, tile, panel);                                                                \
    }
ATTEND_TILE(attend_1_f16, 1, 0)
ATTEND_TILE(attend_2_f16, 2, 0)
ATTEND_TILE(attend_3_f16, 3, 0)
ATTEND_TILE(attend_1_f32, 1, 1)
ATTEND_TILE(attend_2_f32, 2, 1)
ATTEND_TILE(attend_3_f32, 3, 1)
#undef ATTEND_TILE

/* Cuts n queries into tiles, leaving out those that attend to nothing. Returns how many. */
static uint32_t attend_cut(const uint64_t *masks, uint32_t n, struct attend_tile *tiles)
{
    uint32_t n_tiles = 0;
    const struct attend_tile *before = NULL; /* whose tokens are those of `listed` */
    uint64_t listed = 0;
    for (uint32_t i = 0, n_q; i < n; i += n_q) {
        struct attend_tile *tile = &tiles[n_tiles];
        n_q = n - i;
        n_q = n_q > 4 || n_q == 3 ? 3 : n_q > 2 ? 2 : n_q; /* 4 = 2 + 2 */
        uint64_t any = 0;
        tile->all = ~UINT64_C(0);
        for (uint32_t a = 0; a < n_q; a++) {
            any |= masks[i + a];
            tile->all &= masks[i + a];
        }
        tile->first = i;
        tile->n_q = n_q;
        tile->n_scored = 0;
        tile->n_fetched = UINT32_MAX;
        if (!any)
            continue;
        if (before && any == listed) { /* most often all queries attend to the same tokens */
            tile->n_tokens = before->n_tokens;
            memcpy(tile->tokens, before->tokens, sizeof tile->tokens);
        } else {
            tile->n_tokens = 0;
            for (uint64_t left = any; left; left &= left - 1)
                tile->tokens[tile->n_tokens++] = (uint8_t)__builtin_ctzll(left);
            listed = any;
        }
        before = tile;
        n_tiles++;
    }
    return n_tiles;
}

/* Up to BATCH_QUERIES queries: all scores, in steps of few tokens so that their keys stay near; all weights; all values,
 * panel by panel; the merges. */
static void attend_batch(const struct attend_rows *in, int decoded, int fetch, const float *q, size_t q_stride,
                         uint32_t n, uint32_t head_dim, const uint64_t *masks, float scale, float *partials)
{
    typedef void tile_function(struct attend_batch *, struct attend_tile *, uint32_t);
    static tile_function *const score[2][TILE_QUERIES] = {
        {attend_1_f16_scores, attend_2_f16_scores, attend_3_f16_scores},
        {attend_1_f32_scores, attend_2_f32_scores, attend_3_f32_scores},
    };
    static tile_function *const panels[2][TILE_QUERIES] = {
        {attend_1_f16_panel, attend_2_f16_panel, attend_3_f16_panel},
        {attend_1_f32_panel, attend_2_f32_panel, attend_3_f32_panel},
    };
    struct attend_tile tiles[BATCH_TILES];
    struct attend_batch batch;
    float max[BATCH_QUERIES], sum[BATCH_QUERIES];
    const uint32_t n_tiles = attend_cut(masks, n, tiles);
    if (n_tiles && fetch)
        tiles[0].n_fetched = 0;
    batch.in = in;
    batch.q = q;
    batch.q_stride = q_stride;
    batch.masks = masks;
    batch.scale = scale;
    batch.out_stride = (size_t)in->n_vectors * VECTOR_WIDTH;
    const uint32_t step = n_tiles > 1 ? SCORE_TOKENS : KERNELS_BLOCK_TOKENS;
    for (uint32_t end = step; end <= KERNELS_BLOCK_TOKENS; end += step)
        for (uint32_t i = 0; i < n_tiles; i++)
            score[decoded][tiles[i].n_q - 1](&batch, &tiles[i], end);
    for (uint32_t i = 0; i < n; i++)
        if (masks[i])
            attend_softmax(batch.scores[i], masks[i], &max[i], &sum[i]);
    for (uint32_t panel = 0; panel * TILE_DIMENSIONS < in->n_vectors; panel++)
        for (uint32_t i = 0; i < n_tiles; i++)
            panels[decoded][tiles[i].n_q - 1](&batch, &tiles[i], panel);

    const size_t width = KERNELS_PARTIAL_FLOATS(head_dim);
    float factors[BATCH_QUERIES + VECTOR_WIDTH] = {0};
    for (uint32_t i = 0; i < n; i++)
        if (masks[i])
            factors[i] = partial_distance(partials + i * width, max[i]);
    for (uint32_t i = 0; i < n; i += VECTOR_WIDTH)
        vf_store(factors + i, vf_exp(vf_load(factors + i)));
    for (uint32_t i = 0; i < n; i++)
        if (masks[i])
            partial_merge_parts(partials + i * width, max[i], sum[i], batch.out + i * batch.out_stride, factors[i],
                                head_dim);
}

/* masks [n_queries] with masks_step 1; [BATCH_QUERIES], all equal, with 0. */
static void attend_batches(const struct attend_rows *in, int decoded, const float *q, uint32_t n_queries,
                           uint32_t head_dim, const uint64_t *masks, uint32_t masks_step, float scale, float *partials)
{
    const int padded = head_dim % VECTOR_WIDTH != 0;
    for (uint32_t i = 0, n; i < n_queries; i += n) {
        n = n_queries - i < BATCH_QUERIES ? n_queries - i : BATCH_QUERIES;
        const float *batch_q = q + (size_t)i * head_dim;
        const uint64_t *batch_masks = masks + (size_t)i * masks_step;
        float *batch_partials = partials + (size_t)i * KERNELS_PARTIAL_FLOATS(head_dim);
        if (padded) {
            float copy[BATCH_QUERIES][KERNELS_MAX_HEAD_DIM];
            for (uint32_t a = 0; a < n; a++) {
                memcpy(copy[a], batch_q + (size_t)a * head_dim, head_dim * sizeof(float));
                memset(copy[a] + head_dim, 0, VECTOR_WIDTH * sizeof(float) - head_dim % VECTOR_WIDTH * sizeof(float));
            }
            attend_batch(in, decoded, i == 0, copy[0], KERNELS_MAX_HEAD_DIM, n, head_dim, batch_masks, scale,
                         batch_partials);
        } else {
            attend_batch(in, decoded, i == 0, batch_q, head_dim, n, head_dim, batch_masks, scale, batch_partials);
        }
    }
}

/* Decodes the tokens of `any`, no others; room_keys and room_values are theirs. */
VECTOR_INLINE void attend_decode(const enum kernels_rows codec, struct attend_rows *in, const void *const *rows,
                                 uint32_t head_dim, uint64_t any, float *room_keys, float *room_values)
{
    const uint32_t panel = TILE_DIMENSIONS * VECTOR_WIDTH;
    const size_t key_stride = (size_t)in->n_vectors * VECTOR_WIDTH;
    const uint32_t row_step = (in->fetch_step + TILE_TOKENS - 1) / TILE_TOKENS;
    for (uint32_t fetched = 0; any; any &= any - 1) {
        for (uint32_t i = 0; i < row_step && fetched < in->n_fetch; i++)
            row_prefetch(in->fetch[fetched++], in->fetch_bytes);
        const size_t token = (size_t)__builtin_ctzll(any);
        float *key = room_keys + token * key_stride, *value = room_values + token * panel;
        row_decode(codec, rows[token], head_dim, 0, 0, head_dim, key);
        for (uint32_t d = 0; d < head_dim; d += panel)
            row_decode(codec, rows[token], head_dim, 1, d, head_dim - d < panel ? head_dim - d : panel,
                       value + (size_t)d * KERNELS_BLOCK_TOKENS);
        in->keys[token] = (const char *)key;
        in->values[token] = (const char *)value;
    }
    in->panel_stride_bytes = KERNELS_BLOCK_TOKENS * panel * sizeof(float);
    in->n_fetch = 0; /* done */
}

static __attribute__((noinline)) void attend_decoded(struct attend_rows *in, const float *q, uint32_t n_queries,
                                                     uint32_t head_dim, enum kernels_rows codec,
                                                     const void *const *rows, uint64_t any, const uint64_t *masks,
                                                     uint32_t masks_step, float scale, float *partials)
{
    _Alignas(64) float keys[KERNELS_BLOCK_TOKENS * KERNELS_MAX_HEAD_DIM];
    _Alignas(64) float values[KERNELS_BLOCK_TOKENS * KERNELS_MAX_HEAD_DIM];
    if (codec == KERNELS_ROWS_F16)
        attend_decode(KERNELS_ROWS_F16, in, rows, head_dim, any, keys, values);
    else
        attend_decode(KERNELS_ROWS_Q8_0, in, rows, head_dim, any, keys, values);
    attend_batches(in, 1, q, n_queries, head_dim, masks, masks_step, scale, partials);
}

static void attend_any(struct attend_rows *in, const float *q, uint32_t n_queries, uint32_t head_dim,
                       enum kernels_rows codec, const void *const *rows, uint64_t any, const uint64_t *masks,
                       uint32_t masks_step, float scale, float *partials)
{
    in->n_vectors = (head_dim + VECTOR_WIDTH - 1) / VECTOR_WIDTH;
    if (n_queries >= DECODE_QUERIES || head_dim % VECTOR_WIDTH != 0 || codec != KERNELS_ROWS_F16) {
        attend_decoded(in, q, n_queries, head_dim, codec, rows, any, masks, masks_step, scale, partials);
        return;
    }
    for (; any; any &= any - 1) {
        const int token = __builtin_ctzll(any);
        in->keys[token] = rows[token];
        in->values[token] = (const char *)rows[token] + (size_t)head_dim * sizeof(uint16_t);
    }
    in->panel_stride_bytes = TILE_DIMENSIONS * VECTOR_WIDTH * sizeof(uint16_t);
    attend_batches(in, 0, q, n_queries, head_dim, masks, masks_step, scale, partials);
}

static void attend_block(const float *q, uint32_t n_queries, uint32_t head_dim, enum kernels_rows codec,
                         const void *rows, const uint64_t *masks, float scale, float *partials)
{
    const size_t n_bytes = row_bytes(head_dim, codec);
    struct attend_rows in;
    const void *each[KERNELS_BLOCK_TOKENS];
    uint64_t any = 0;
    for (uint32_t i = 0; i < n_queries; i++)
        any |= masks[i];
    if (!any)
        return;
    for (uint64_t left = any; left; left &= left - 1) {
        const size_t token = (size_t)__builtin_ctzll(left);
        each[token] = (const char *)rows + token * n_bytes;
    }
    const void *ahead[KERNELS_BLOCK_TOKENS];
    in.n_fetch = in.fetch_step = 0;
    if (n_queries < DECODE_QUERIES && __builtin_popcountll(any) >= KERNELS_DENSE_ROWS) {
        /* Rows are read from memory once, K and V in different passes: ask for whole rows in time, and for the beginning of
         * what most often comes next, the block behind. */
        for (uint32_t t = 0; t < KERNELS_BLOCK_TOKENS; t++)
            ahead[t] = (const void *)((uintptr_t)rows + (t + BLOCK_AHEAD) * n_bytes);
        in.fetch = ahead;
        in.n_fetch = KERNELS_BLOCK_TOKENS;
        in.fetch_step = TILE_TOKENS;
        in.fetch_bytes = n_bytes;
    }
    attend_any(&in, q, n_queries, head_dim, codec, each, any, masks, 1, scale, partials);
}

static void attend_rows(const float *q, uint32_t n_queries, uint32_t head_dim, enum kernels_rows codec,
                        const void *const *rows, uint32_t n_rows, uint32_t fetch_from, uint32_t n_fetch, float scale,
                        float *partials)
{
    const uint64_t any = ~UINT64_C(0) >> (KERNELS_BLOCK_TOKENS - n_rows);
    struct attend_rows in;
    uint64_t masks[BATCH_QUERIES];
    for (uint32_t i = 0; i < BATCH_QUERIES; i++)
        masks[i] = any;
    const uint32_t n_steps = n_rows > TILE_TOKENS ? n_rows / TILE_TOKENS : 1;
    in.fetch = rows + fetch_from;
    in.n_fetch = n_fetch - fetch_from;
    in.fetch_step = (in.n_fetch + n_steps - 1) / n_steps;
    in.fetch_bytes = row_bytes(head_dim, codec);
    attend_any(&in, q, n_queries, head_dim, codec, rows, any, masks, 0, scale, partials);
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
                row_decode(KERNELS_ROWS_F16, key, head_dim, 0, 0, head_dim, decoded[j]);
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
