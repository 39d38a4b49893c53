/* plain.c - the table in plain C loops: the truth that the other tables are tested against. */
#include "kernels/tables.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "kernels/half.h"
#include "kernels/row_format.h"

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

/* Number i of a row, [K | V]. */
static float number_of(const void *row, uint32_t head_dim, enum kernels_rows codec, uint32_t i)
{
    if (codec == KERNELS_ROWS_F16)
        return half_decode(row_bits_at(row, 2 * (size_t)i));
    const uint32_t part = i >= head_dim;
    float scale = half_decode(row_bits_at(row, row_scale_offset(head_dim, part, i - part * head_dim)));
    return (float)((const int8_t *)row)[i] * scale;
}

/* Rows of a block as numbers: [K | V] of each token. */
typedef float numbers[KERNELS_BLOCK_TOKENS][2 * KERNELS_MAX_HEAD_DIM];

static void attend_query(const float *q, uint32_t head_dim, float (*rows)[2 * KERNELS_MAX_HEAD_DIM], uint64_t mask,
                         float scale, float *partial)
{
    float scores[KERNELS_BLOCK_TOKENS];
    float max = -INFINITY, sum = 0;
    for (uint32_t t = 0; t < KERNELS_BLOCK_TOKENS; t++) {
        if (!(mask >> t & 1))
            continue;
        float score = 0;
        for (uint32_t d = 0; d < head_dim; d++)
            score += q[d] * rows[t][d];
        score *= scale;
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
        sum += weight;
        for (uint32_t d = 0; d < head_dim; d++)
            out[d] += weight * rows[t][head_dim + d];
    }
    merge_parts(partial, max, sum, out, head_dim);
}

static void read_row(const void *row, uint32_t head_dim, enum kernels_rows codec, float *to)
{
    for (uint32_t i = 0; i < 2 * head_dim; i++)
        to[i] = number_of(row, head_dim, codec, i);
}

static void attend_block(const float *q, uint32_t n_queries, uint32_t head_dim, enum kernels_rows codec,
                         const void *rows, const uint64_t *masks, float scale, float *partials)
{
    numbers block;
    uint64_t any = 0;
    for (uint32_t i = 0; i < n_queries; i++)
        any |= masks[i];
    for (uint32_t t = 0; t < KERNELS_BLOCK_TOKENS; t++)
        if (any >> t & 1)
            read_row((const char *)rows + t * row_bytes(head_dim, codec), head_dim, codec, block[t]);
    for (uint32_t i = 0; i < n_queries; i++)
        if (masks[i])
            attend_query(q + (size_t)i * head_dim, head_dim, block, masks[i], scale,
                         partials + (size_t)i * KERNELS_PARTIAL_FLOATS(head_dim));
}

static void attend_rows(const float *q, uint32_t n_queries, uint32_t head_dim, enum kernels_rows codec,
                        const void *const *rows, uint32_t n_rows, uint32_t fetch_from, uint32_t n_fetch, float scale,
                        float *partials)
{
    numbers block;
    (void)fetch_from;
    (void)n_fetch;
    for (uint32_t t = 0; t < n_rows; t++)
        read_row(rows[t], head_dim, codec, block[t]);
    for (uint32_t i = 0; i < n_queries; i++)
        attend_query(q + (size_t)i * head_dim, head_dim, block, ~UINT64_C(0) >> (KERNELS_BLOCK_TOKENS - n_rows), scale,
                     partials + (size_t)i * KERNELS_PARTIAL_FLOATS(head_dim));
}

static void weigh_rows(uint32_t n_queries, uint32_t head_dim, enum kernels_rows codec, const void *const *rows,
                       uint32_t n_rows, const float *weights, size_t weights_stride, float *sums)
{
    for (uint32_t i = 0; i < n_queries; i++, weights += weights_stride, sums += 1 + head_dim) {
        for (uint32_t t = 0; t < n_rows; t++) {
            sums[0] += weights[t];
            for (uint32_t d = 0; d < head_dim; d++)
                sums[1 + d] += weights[t] * number_of(rows[t], head_dim, codec, head_dim + d);
        }
    }
}

static void weigh_mean(uint32_t n_queries, uint32_t head_dim, const float *v_sums, const float *masses,
                       size_t masses_stride, float *sums)
{
    for (uint32_t i = 0; i < n_queries; i++, masses += masses_stride, sums += 1 + head_dim) {
        if (*masses == 0) /* adds nothing, whatever the block holds */
            continue;
        sums[0] += *masses;
        for (uint32_t d = 0; d < head_dim; d++)
            sums[1 + d] += *masses * (v_sums[d] / KERNELS_BLOCK_TOKENS);
    }
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

static void encode_part(const float *from, uint32_t head_dim, uint32_t part, void *row)
{
    int8_t *to = (int8_t *)row + part * (size_t)head_dim;
    for (uint32_t first = 0; first < head_dim; first += ROW_GROUP) {
        const uint32_t end = head_dim - first < ROW_GROUP ? head_dim : first + ROW_GROUP;
        float largest = 0;
        for (uint32_t d = first; d < end; d++)
            if (!(fabsf(from[d]) <= largest)) /* a NaN stays: nothing is larger */
                largest = isnan(largest) ? largest : fabsf(from[d]);
        const uint16_t bits = row_scale_bits(largest);
        const float scale = half_decode(bits);
        memcpy((char *)row + row_scale_offset(head_dim, part, first), &bits, sizeof bits);
        for (uint32_t d = first; d < end; d++) {
            to[d] = 0;
            if (isnan(scale) || scale == 0)
                continue;
            float number = from[d] / scale;
            number = fmaxf(-ROW_LARGEST_NUMBER, fminf(ROW_LARGEST_NUMBER, number));
            to[d] = (int8_t)rintf(number);
        }
    }
}

static void encode_row(const float *k, const float *v, uint32_t head_dim, enum kernels_rows codec, void *row)
{
    if (codec == KERNELS_ROWS_Q8_0) {
        encode_part(k, head_dim, 0, row);
        encode_part(v, head_dim, 1, row);
        return;
    }
    f16_encode(k, head_dim, row);
    f16_encode(v, head_dim, (uint16_t *)row + head_dim);
}

static void decode_keys(const void *rows, uint32_t n_rows, uint32_t head_dim, enum kernels_rows codec, float *keys)
{
    for (uint32_t t = 0; t < n_rows; t++)
        for (uint32_t d = 0; d < head_dim; d++)
            keys[(size_t)t * head_dim + d] =
                number_of((const char *)rows + t * row_bytes(head_dim, codec), head_dim, codec, d);
}

static void block_sums(const void *rows, uint32_t n_tokens, uint32_t head_dim, enum kernels_rows codec, float *sums)
{
    for (uint32_t i = 0; i < 2 * head_dim; i++) {
        sums[i] = 0;
        for (uint32_t t = 0; t < n_tokens; t++)
            sums[i] += number_of((const char *)rows + t * row_bytes(head_dim, codec), head_dim, codec, i);
    }
}

static void score_f16(const float *q, uint32_t head_dim, const uint16_t *keys, uint32_t n_keys, float scale,
                      float *scores)
{
    for (uint32_t k = 0; k < n_keys; k++) {
        float sum = 0;
        for (uint32_t d = 0; d < head_dim; d++)
            sum += q[d] * half_decode(keys[(size_t)k * head_dim + d]);
        scores[k] = scale * sum;
    }
}

const struct kernels plain_table = {
    .isa = KERNELS_ISA_PLAIN,
    .name = "plain",
    .attend_block = attend_block,
    .attend_rows = attend_rows,
    .weigh_rows = weigh_rows,
    .weigh_mean = weigh_mean,
    .partial_merge = partial_merge,
    .partial_finish = partial_finish,
    .f16_encode = f16_encode,
    .f16_decode = f16_decode,
    .encode_row = encode_row,
    .decode_keys = decode_keys,
    .block_sums = block_sums,
    .score_f16 = score_f16,
};
