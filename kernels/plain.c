/* plain.c - the table in plain C loops: the truth that the other tables are tested against. */
#include "kernels/tables.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "kernels/half.h"

static void merge_parts(float *into, float max, float sum, const float *out, uint32_t head_dim)
{
    if (max == -INFINITY)
        return;
    if (into[0] == -INFINITY) {
        into[0] = max;
        into[1] = sum;
        memcpy(into + 2, out, head_dim * sizeof *out);
        return;
    }
    float new_max = into[0] >= max ? into[0] : max;
    float ours = (float)exp((double)into[0] - (double)new_max);
    float theirs = (float)exp((double)max - (double)new_max);
    into[0] = new_max;
    into[1] = into[1] * ours + sum * theirs;
    for (uint32_t d = 0; d < head_dim; d++)
        into[2 + d] = into[2 + d] * ours + out[d] * theirs;
}

static float dot_f16(const float *q, const uint16_t *key, uint32_t head_dim)
{
    float sum = 0;
    for (uint32_t d = 0; d < head_dim; d++)
        sum += q[d] * half_decode(key[d]);
    return sum;
}

static void attend_query(const float *q, uint32_t head_dim, const uint16_t *rows, uint64_t mask, float scale,
                         float *partial)
{
    float scores[KERNELS_BLOCK_TOKENS];
    float max = -INFINITY, sum = 0;
    for (uint32_t t = 0; t < KERNELS_BLOCK_TOKENS; t++) {
        if (!(mask >> t & 1))
            continue;
        float score = scale * dot_f16(q, rows + (size_t)t * 2 * head_dim, head_dim);
        /* finite, so that a huge score cannot turn into infinity - infinity; a NaN passes both and shows */
        if (score > FLT_MAX)
            score = FLT_MAX;
        if (score < -FLT_MAX)
            score = -FLT_MAX;
        scores[t] = score;
        if (!(score <= max))
            max = score;
    }
    float out[KERNELS_MAX_HEAD_DIM] = {0};
    for (uint32_t t = 0; t < KERNELS_BLOCK_TOKENS; t++) {
        if (!(mask >> t & 1))
            continue;
        float weight = (float)exp((double)scores[t] - (double)max);
        const uint16_t *value = rows + ((size_t)t * 2 + 1) * head_dim;
        sum += weight;
        for (uint32_t d = 0; d < head_dim; d++)
            out[d] += weight * half_decode(value[d]);
    }
    merge_parts(partial, max, sum, out, head_dim);
}

static void attend_block(const float *q, uint32_t n_queries, uint32_t head_dim, const uint16_t *rows,
                         const uint64_t *masks, float scale, float *partials)
{
    for (uint32_t i = 0; i < n_queries; i++)
        if (masks[i])
            attend_query(q + (size_t)i * head_dim, head_dim, rows, masks[i], scale,
                         partials + (size_t)i * KERNELS_PARTIAL_FLOATS(head_dim));
}

static void partial_merge(float *into, const float *from, uint32_t head_dim)
{
    merge_parts(into, from[0], from[1], from + 2, head_dim);
}

static void partial_finish(const float *partial, uint32_t head_dim, float *out)
{
    for (uint32_t d = 0; d < head_dim; d++)
        out[d] = partial[2 + d] / partial[1];
}

static void f16_encode(const float *from, size_t n, uint16_t *to)
{
    for (size_t i = 0; i < n; i++)
        to[i] = half_encode(from[i]);
}

static void f16_decode(const uint16_t *from, size_t n, float *to)
{
    for (size_t i = 0; i < n; i++)
        to[i] = half_decode(from[i]);
}

static void block_sums(const uint16_t *rows, uint32_t n_tokens, uint32_t head_dim, float *sums)
{
    const size_t width = (size_t)2 * head_dim;
    for (size_t i = 0; i < width; i++)
        sums[i] = 0;
    for (uint32_t t = 0; t < n_tokens; t++)
        for (size_t i = 0; i < width; i++)
            sums[i] += half_decode(rows[t * width + i]);
}

static void score_f16(const float *q, uint32_t head_dim, const uint16_t *keys, uint32_t n_keys, float scale,
                      float *scores)
{
    for (uint32_t k = 0; k < n_keys; k++)
        scores[k] = scale * dot_f16(q, keys + (size_t)k * head_dim, head_dim);
}

const struct kernels plain_table = {
    .isa = KERNELS_ISA_PLAIN,
    .name = "plain",
    .attend_block = attend_block,
    .partial_merge = partial_merge,
    .partial_finish = partial_finish,
    .f16_encode = f16_encode,
    .f16_decode = f16_decode,
    .block_sums = block_sums,
    .score_f16 = score_f16,
};
