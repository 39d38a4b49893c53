/*
 * row_format.h - where the numbers of a row lie, and how q8_0 rounds them: the same in every table. Private to kernels/.
 *
 * Rows are [K | V]; number i of a row is K[i] below head_dim and V[i - head_dim] from there on.
 *     f16    the numbers in half precision
 *     q8_0   [K int8 | V int8 | K scales | V scales], one f16 scale a group of 32 numbers of K or of V (the last may be shorter);
 *            number = int8 x scale, exact in f32; scale = largest magnitude / 127, rounded to f16, at most 65504 (larger numbers
 *            saturate). A group with a NaN or an infinity decodes to NaN, so that it shows.
 */
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "kernels/half.h"
#include "kernels/kernels.h"

#define ROW_GROUP          32u
#define ROW_LARGEST_SCALE  65504.0f
#define ROW_NAN_SCALE      0x7e00u
#define ROW_LARGEST_NUMBER 127.0f

static inline uint32_t row_n_groups(uint32_t head_dim)
{
    return (head_dim + ROW_GROUP - 1) / ROW_GROUP;
}

static inline size_t row_bytes(uint32_t head_dim, enum kernels_rows codec)
{
    return codec == KERNELS_ROWS_Q8_0 ? 2 * ((size_t)head_dim + 2 * (size_t)row_n_groups(head_dim))
                                      : (size_t)head_dim * 4;
}

/* q8_0: where the f16 scale of the group of number d of K (part 0) or V (part 1) lies in a row. */
static inline size_t row_scale_offset(uint32_t head_dim, uint32_t part, uint32_t d)
{
    return 2 * ((size_t)head_dim + part * (size_t)row_n_groups(head_dim) + d / ROW_GROUP);
}

static inline uint16_t row_bits_at(const void *row, size_t offset)
{
    uint16_t bits;
    memcpy(&bits, (const char *)row + offset, sizeof bits);
    return bits;
}

/* The scale of a group, as it will be decoded, from its largest magnitude (NaN or infinite: it holds such a number). */
static inline uint16_t row_scale_bits(float largest)
{
    if (!isfinite(largest))
        return ROW_NAN_SCALE;
    float scale = largest / ROW_LARGEST_NUMBER;
    return half_encode(scale < ROW_LARGEST_SCALE ? scale : ROW_LARGEST_SCALE);
}
