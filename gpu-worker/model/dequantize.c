/*
 * dequantize.c - plain loops, one function a type; clarity before speed.
 *
 * Threads    pure functions, any thread.
 */
#include "gpu-worker/model/dequantize.h"

#include <errno.h>
#include <string.h>

float dequantize_f16(uint16_t bits)
{
    uint32_t sign = (uint32_t)(bits & 0x8000u) << 16;
    uint32_t exponent = (bits >> 10) & 31u;
    uint32_t mantissa = bits & 1023u;
    uint32_t word;
    float value;
    if (exponent == 0) {
        /* Zero or subnormal: mantissa x 2^-24 is exact in f32. */
        value = (float)mantissa * 0x1p-24f;
        return sign ? -value : value;
    }
    if (exponent == 31)
        word = sign | 0x7f800000u | mantissa << 13;
    else
        word = sign | (exponent + 112) << 23 | mantissa << 13;
    memcpy(&value, &word, sizeof value);
    return value;
}

static float f16_at(const uint8_t *bytes)
{
    return dequantize_f16((uint16_t)(bytes[0] | bytes[1] << 8));
}

static void f32_block(const uint8_t *in, float *out)
{
    memcpy(out, in, sizeof *out);
}

static void f16_block(const uint8_t *in, float *out)
{
    *out = f16_at(in);
}

static void bf16_block(const uint8_t *in, float *out)
{
    uint32_t word = (uint32_t)in[0] << 16 | (uint32_t)in[1] << 24;
    memcpy(out, &word, sizeof *out);
}

/* 32-column types: low nibbles are columns 0..15, high nibbles 16..31. */

static void q4_0_block(const uint8_t *in, float *out)
{
    float scale = f16_at(in);
    const uint8_t *q = in + 2;
    for (int j = 0; j < 16; j++) {
        out[j] = (float)((q[j] & 15) - 8) * scale;
        out[j + 16] = (float)((q[j] >> 4) - 8) * scale;
    }
}

static void q4_1_block(const uint8_t *in, float *out)
{
    float scale = f16_at(in), minimum = f16_at(in + 2);
    const uint8_t *q = in + 4;
    for (int j = 0; j < 16; j++) {
        out[j] = (float)(q[j] & 15) * scale + minimum;
        out[j + 16] = (float)(q[j] >> 4) * scale + minimum;
    }
}

/* Fifth bits: bit j of a little-endian word belongs to column j. */
static int fifth_bit(const uint8_t *bits, int column)
{
    return (bits[column / 8] >> (column % 8) & 1) << 4;
}

static void q5_0_block(const uint8_t *in, float *out)
{
    float scale = f16_at(in);
    const uint8_t *high = in + 2, *q = in + 6;
    for (int j = 0; j < 16; j++) {
        out[j] = (float)(((q[j] & 15) | fifth_bit(high, j)) - 16) * scale;
        out[j + 16] = (float)((q[j] >> 4 | fifth_bit(high, j + 16)) - 16) * scale;
    }
}

static void q5_1_block(const uint8_t *in, float *out)
{
    float scale = f16_at(in), minimum = f16_at(in + 2);
    const uint8_t *high = in + 4, *q = in + 8;
    for (int j = 0; j < 16; j++) {
        out[j] = (float)((q[j] & 15) | fifth_bit(high, j)) * scale + minimum;
        out[j + 16] = (float)(q[j] >> 4 | fifth_bit(high, j + 16)) * scale + minimum;
    }
}

static void q8_0_block(const uint8_t *in, float *out)
{
    float scale = f16_at(in);
    for (int j = 0; j < 32; j++)
        out[j] = (float)(int8_t)in[2 + j] * scale;
}

/* 256-column types. Q4_K and Q5_K: 8 sub-blocks of 32 with 6-bit scales and minima packed in 12 bytes. */

static void scale_and_minimum(const uint8_t *packed, int i, int *ret_scale, int *ret_minimum)
{
    if (i < 4) {
        *ret_scale = packed[i] & 63;
        *ret_minimum = packed[i + 4] & 63;
    } else {
        *ret_scale = (packed[i + 4] & 15) | (packed[i - 4] >> 6) << 4;
        *ret_minimum = packed[i + 4] >> 4 | (packed[i] >> 6) << 4;
    }
}

/* `high` is NULL for Q4_K; otherwise bit i of high[l] is the fifth bit of column l of sub-block i. */
static void q45_k_block(const uint8_t *in, const uint8_t *high, const uint8_t *q, float *out)
{
    float scale = f16_at(in), minimum = f16_at(in + 2);
    for (int i = 0; i < 8; i++) {
        int sub_scale, sub_minimum;
        scale_and_minimum(in + 4, i, &sub_scale, &sub_minimum);
        float d = scale * (float)sub_scale, m = minimum * (float)sub_minimum;
        for (int l = 0; l < 32; l++) {
            int byte = q[32 * (i / 2) + l];
            int value = i % 2 ? byte >> 4 : byte & 15;
            if (high)
                value |= (high[l] >> i & 1) << 4;
            out[32 * i + l] = d * (float)value - m;
        }
    }
}

static void q4_k_block(const uint8_t *in, float *out)
{
    q45_k_block(in, NULL, in + 16, out);
}

static void q5_k_block(const uint8_t *in, float *out)
{
    q45_k_block(in, in + 16, in + 48, out);
}

/* Two halves of 128 columns; in each, four groups of 32 share ql (4 low bits) and qh (2 high bits). */
static void q6_k_block(const uint8_t *in, float *out)
{
    const uint8_t *low = in, *high = in + 128;
    const int8_t *scales = (const int8_t *)in + 192;
    float scale = f16_at(in + 208);
    for (int half = 0; half < 2; half++) {
        for (int l = 0; l < 32; l++) {
            for (int group = 0; group < 4; group++) {
                int byte = low[64 * half + 32 * (group % 2) + l];
                int value = group < 2 ? byte & 15 : byte >> 4;
                value |= (high[32 * half + l] >> (2 * group) & 3) << 4;
                int sub_scale = scales[8 * half + 2 * group + l / 16];
                out[128 * half + 32 * group + l] = scale * (float)sub_scale * (float)(value - 32);
            }
        }
    }
}

static void (*const block_functions[])(const uint8_t *in, float *out) = {
    [TENSOR_F32] = f32_block,   [TENSOR_F16] = f16_block,   [TENSOR_BF16] = bf16_block, [TENSOR_Q4_0] = q4_0_block,
    [TENSOR_Q4_1] = q4_1_block, [TENSOR_Q5_0] = q5_0_block, [TENSOR_Q5_1] = q5_1_block, [TENSOR_Q8_0] = q8_0_block,
    [TENSOR_Q4_K] = q4_k_block, [TENSOR_Q5_K] = q5_k_block, [TENSOR_Q6_K] = q6_k_block,
};

int dequantize_row(enum tensor_type type, const void *data, uint32_t n_columns, float *out)
{
    const struct tensor_block *block = tensor_block((uint32_t)type);
    if (!block || n_columns == 0 || n_columns % block->n_columns != 0)
        return -EINVAL;
    const uint8_t *in = data;
    for (uint32_t column = 0; column < n_columns; column += block->n_columns, in += block->n_bytes)
        block_functions[type](in, out + column);
    return 0;
}
