/* vector_rows.h - conversions of f16, rows of both codecs and the sums of a block, for any vector width. */
#pragma once

#include <math.h>
#include <string.h>

#include "kernels/kernels.h"
#include "kernels/row_format.h"
#include "kernels/vector.h"

static void f16_encode(const float *from, size_t n, uint16_t *to)
{
    size_t i = 0;
    for (; i + VECTOR_WIDTH <= n; i += VECTOR_WIDTH)
        vf_encode(to + i, vf_load(from + i));
    if (i < n) {
        float in[VECTOR_WIDTH] = {0};
        uint16_t out[VECTOR_WIDTH];
        memcpy(in, from + i, (n - i) * sizeof *in);
        vf_encode(out, vf_load(in));
        memcpy(to + i, out, (n - i) * sizeof *out);
    }
}

static void f16_decode(const uint16_t *from, size_t n, float *to)
{
    size_t i = 0;
    for (; i + VECTOR_WIDTH <= n; i += VECTOR_WIDTH)
        vf_store(to + i, vf_decode(from + i));
    if (i < n) {
        uint16_t in[VECTOR_WIDTH] = {0};
        float out[VECTOR_WIDTH];
        memcpy(in, from + i, (n - i) * sizeof *in);
        vf_store(out, vf_decode(in));
        memcpy(to + i, out, (n - i) * sizeof *out);
    }
}

/* ---- rows ---- */

/*
 * n numbers of K (part 0) or V (part 1) of a row from number `from` on (a multiple of 32 for q8_0), zero-padded to whole vectors.
 * Both codecs decode exactly, so every table has the same numbers.
 */
VECTOR_INLINE void row_decode(const enum kernels_rows codec, const void *row, uint32_t head_dim, uint32_t part,
                              uint32_t from, uint32_t n, float *to)
{
    uint32_t i = 0;
    if (codec == KERNELS_ROWS_F16) {
        const uint16_t *halves = (const uint16_t *)row + part * (size_t)head_dim + from;
        for (; i + VECTOR_WIDTH <= n; i += VECTOR_WIDTH)
            vf_store(to + i, vf_decode(halves + i));
        if (i < n) {
            uint16_t tail[VECTOR_WIDTH] = {0};
            memcpy(tail, halves + i, (n - i) * sizeof *tail);
            vf_store(to + i, vf_decode(tail));
        }
        return;
    }
    const int8_t *bytes = (const int8_t *)row + part * (size_t)head_dim + from;
    vf scale = vf_zero();
    for (; i + VECTOR_WIDTH <= n; i += VECTOR_WIDTH) {
        if (i % ROW_GROUP == 0)
            scale = vf_set(_cvtsh_ss(row_bits_at(row, row_scale_offset(head_dim, part, from + i))));
        vf_store(to + i, vf_mul(vf_bytes(bytes + i), scale));
    }
    if (i < n) {
        int8_t tail[VECTOR_WIDTH] = {0};
        memcpy(tail, bytes + i, n - i);
        scale = vf_set(_cvtsh_ss(row_bits_at(row, row_scale_offset(head_dim, part, from + i))));
        vf_store(to + i, vf_mul(vf_bytes(tail), scale));
    }
}

static void decode_keys(const void *rows, uint32_t n_rows, uint32_t head_dim, enum kernels_rows codec, float *keys)
{
    const size_t n_bytes = row_bytes(head_dim, codec);
    for (uint32_t t = 0; t < n_rows; t++, keys += head_dim) {
        const void *row = (const char *)rows + t * n_bytes;
        float numbers[KERNELS_MAX_HEAD_DIM];
        float *to = head_dim % VECTOR_WIDTH == 0 ? keys : numbers;
        if (codec == KERNELS_ROWS_F16)
            row_decode(KERNELS_ROWS_F16, row, head_dim, 0, 0, head_dim, to);
        else
            row_decode(KERNELS_ROWS_Q8_0, row, head_dim, 0, 0, head_dim, to);
        if (to == numbers)
            memcpy(keys, numbers, head_dim * sizeof *numbers);
    }
}

/* K or V as q8_0; the same bits as the plain table's. */
static void encode_part(const float *from, uint32_t head_dim, uint32_t part, void *row)
{
    int8_t *to = (int8_t *)row + part * (size_t)head_dim;
    for (uint32_t first = 0; first < head_dim; first += ROW_GROUP) {
        const uint32_t n = head_dim - first < ROW_GROUP ? head_dim - first : ROW_GROUP;
        float in[ROW_GROUP] = {0}, rounded[ROW_GROUP];
        memcpy(in, from + first, n * sizeof *in);
        vf largest = vf_zero(), finite = vf_zero();
        for (uint32_t i = 0; i < ROW_GROUP; i += VECTOR_WIDTH) {
            vf values = vf_load(in + i);
            largest = vf_max(vf_abs(values), largest);
            finite = vf_add(finite, vf_sub(values, values)); /* 0, or NaN for what is not finite */
        }
        const uint16_t bits = row_scale_bits(isnan(vf_sum(finite)) ? NAN : vf_max_across(largest));
        memcpy((char *)row + row_scale_offset(head_dim, part, first), &bits, sizeof bits);
        if (bits == 0 || bits == ROW_NAN_SCALE) {
            memset(to + first, 0, n);
            continue;
        }
        const vf scale = vf_set(_cvtsh_ss(bits));
        for (uint32_t i = 0; i < ROW_GROUP; i += VECTOR_WIDTH) {
            vf number = vf_div(vf_load(in + i), scale);
            number = vf_max(vf_set(-ROW_LARGEST_NUMBER), vf_min(vf_set(ROW_LARGEST_NUMBER), number));
            vf_store(rounded + i, vi_to_float(vf_to_int(number)));
        }
        for (uint32_t i = 0; i < n; i++)
            to[first + i] = (int8_t)rounded[i];
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

/* Plain additions in token order: the same bits as the plain table's. */
static void block_sums(const void *rows, uint32_t n_tokens, uint32_t head_dim, enum kernels_rows codec, float *sums)
{
    const size_t n_bytes = row_bytes(head_dim, codec);
    for (uint32_t part = 0; part < 2; part++, sums += head_dim) {
        _Alignas(64) float totals[KERNELS_MAX_HEAD_DIM] = {0}, numbers[KERNELS_MAX_HEAD_DIM];
        for (uint32_t t = 0; t < n_tokens; t++) {
            const void *row = (const char *)rows + t * n_bytes;
            if (codec == KERNELS_ROWS_F16)
                row_decode(KERNELS_ROWS_F16, row, head_dim, part, 0, head_dim, numbers);
            else
                row_decode(KERNELS_ROWS_Q8_0, row, head_dim, part, 0, head_dim, numbers);
            for (uint32_t i = 0; i < head_dim; i += VECTOR_WIDTH)
                vf_store(totals + i, vf_add(vf_load(totals + i), vf_load(numbers + i)));
        }
        memcpy(sums, totals, head_dim * sizeof *sums);
    }
}

/* Asks for all lines of a row. */
VECTOR_INLINE void row_prefetch(const void *row, size_t n_bytes)
{
    const uintptr_t first = (uintptr_t)row & ~(uintptr_t)63;
    for (uintptr_t line = first; line < (uintptr_t)row + n_bytes; line += 64)
        __builtin_prefetch((const void *)line);
}
