/*
 * vector_cpu.h - the table of the cpu back end for any vector width; cpu_kernels.h states the order of every sum.
 *
 * Included after one of integer_*.h, which supply the integer products of a block.
 */
#pragma once

#include <math.h>
#include <string.h>

#include "gpu-worker/backend/cpu/cpu_kernels.h"
#include "kernels/kernels.h"
#include "kernels/vector.h"
#include "kernels/vector_exp.h"

#define FLOAT_TILE_ROWS   4u
#define FLOAT_TILE_TOKENS 3u

/* n < VECTOR_WIDTH numbers, then zeros. */
VECTOR_INLINE vf vector_load_tail(const float *p, uint32_t n)
{
    float lanes[VECTOR_WIDTH] = {0};
    memcpy(lanes, p, n * sizeof *p);
    return vf_load(lanes);
}

VECTOR_INLINE void vector_store_tail(float *p, uint32_t n, vf a)
{
    float lanes[VECTOR_WIDTH];
    vf_store(lanes, a);
    memcpy(p, lanes, n * sizeof *p);
}

static void quantize(const float *x, uint32_t n_columns, struct cpu_activation *out)
{
    for (uint32_t b = 0; b < n_columns / CPU_BLOCK; b++, x += CPU_BLOCK, out++) {
        vf largest = vf_zero(), finite = vf_zero();
        for (uint32_t i = 0; i < CPU_BLOCK; i += VECTOR_WIDTH) {
            vf values = vf_load(x + i);
            largest = vf_max(vf_abs(values), largest);
            finite = vf_add(finite, vf_sub(values, values)); /* 0, or NaN for what is not finite */
        }
        const float maximum = vf_max_across(largest);
        memset(out, 0, sizeof *out);
        if (isnan(vf_sum(finite))) {
            out->scale = out->sum = out->half_sums[0] = out->half_sums[1] = NAN;
            continue;
        }
        if (maximum < CPU_SMALLEST)
            continue;
        const vf inverse = vf_set(127.0f / maximum);
        for (uint32_t i = 0; i < CPU_BLOCK; i += VECTOR_WIDTH)
            integer_store8(out->q + i, vf_to_int(vf_mul(vf_load(x + i), inverse)));
        int32_t totals[2] = {0, 0};
        for (uint32_t i = 0; i < 16; i++) {
            totals[0] += out->q[i];
            totals[1] += out->q[16 + i];
        }
        out->scale = maximum / 127.0f;
        out->total = totals[0] + totals[1];
        out->sum = out->scale * (float)out->total;
        out->half_sums[0] = out->scale * (float)totals[0];
        out->half_sums[1] = out->scale * (float)totals[1];
    }
}

/* ---- packed weights ---- */

VECTOR_INLINE vf packed_f16(const uint8_t *block, uint32_t which)
{
    return vf_decode((const uint16_t *)(const void *)block + (size_t)which * VECTOR_WIDTH);
}

VECTOR_INLINE vf packed_f32(const uint8_t *block, uint32_t which)
{
    return vf_load((const float *)(const void *)block + (size_t)which * VECTOR_WIDTH);
}

VECTOR_INLINE void packed_scale(const uint32_t n_tokens, const vi *integers, vf scale,
                                const struct cpu_activation *const *x, uint32_t b, vf *sums)
{
#pragma GCC unroll 4
    for (uint32_t t = 0; t < n_tokens; t++)
        sums[t] = vf_fma(vi_to_float(integers[t]), vf_mul(scale, vf_set(x[t][b].scale)), sums[t]);
}

/* One tile of rows x n_tokens tokens over all blocks. */
VECTOR_INLINE void packed_tile(const enum cpu_packing packing, const uint32_t n_tokens, const struct cpu_packed *weight,
                               uint32_t tile, const struct cpu_activation *const *x, vf *sums)
{
    const uint8_t *block = weight->data + tile * weight->tile_bytes;
    const uint32_t n_blocks = weight->n_blocks;
    const size_t scale_bytes = VECTOR_WIDTH * cpu_packed_scale_bytes(packing);
    const size_t block_bytes = scale_bytes + VECTOR_WIDTH * cpu_packed_quant_bytes(packing);
    vi integers[INTEGER_MAX_TOKENS];
#pragma GCC unroll 4
    for (uint32_t t = 0; t < n_tokens; t++)
        sums[t] = vf_zero();
    for (uint32_t b = 0; b < n_blocks; b++, block += block_bytes) {
        const uint8_t *quants = block + scale_bytes;
        if (packing == CPU_U6) {
#pragma GCC unroll 2
            for (uint32_t half = 0; half < 2; half++) {
                vf scale = packed_f32(block, half);
                integer_u6_half(n_tokens, half, quants, x, b, integers);
                packed_scale(n_tokens, integers, scale, x, b, sums);
                vf minimum = vf_mul(scale, vf_set(-32.0f));
#pragma GCC unroll 4
                for (uint32_t t = 0; t < n_tokens; t++)
                    sums[t] = vf_fma(minimum, vf_set(x[t][b].half_sums[half]), sums[t]);
            }
            continue;
        }
        if (packing == CPU_U4 || packing == CPU_U4_MIN || packing == CPU_U4_K)
            integer_u4(n_tokens, quants, x, b, integers);
        else if (packing == CPU_S8)
            integer_s8(n_tokens, quants, x, b, integers);
        else
            integer_u5(n_tokens, quants, x, b, integers);
        const int wide = packing == CPU_U4_K || packing == CPU_U5_K;
        vf scale = wide ? packed_f32(block, 0) : packed_f16(block, 0);
        packed_scale(n_tokens, integers, scale, x, b, sums);
        if (packing == CPU_S8)
            continue;
        vf minimum = wide ? packed_f32(block, 1)
                     : packing == CPU_U4_MIN || packing == CPU_U5_MIN
                         ? packed_f16(block, 1)
                         : vf_mul(scale, vf_set(packing == CPU_U4 ? -8.0f : -16.0f));
#pragma GCC unroll 4
        for (uint32_t t = 0; t < n_tokens; t++)
            sums[t] = vf_fma(minimum, vf_set(x[t][b].sum), sums[t]);
    }
}

/* One tile x n_tokens tokens, written out; y is at the tile's first row. */
#define PACKED_TILE(name, packing, n_tokens)                                                                           \
    static __attribute__((noinline)) void name(const struct cpu_packed *weight, uint32_t tile,                         \
                                               const struct cpu_activation *x, float *y, size_t y_stride)              \
    {                                                                                                                  \
        const struct cpu_activation *rows[n_tokens];                                                                   \
        vf sums[n_tokens];                                                                                             \
        uint32_t n_rows = weight->n_rows - tile * VECTOR_WIDTH;                                                        \
        for (uint32_t t = 0; t < n_tokens; t++)                                                                        \
            rows[t] = x + (size_t)t * weight->n_blocks;                                                                \
        packed_tile(packing, n_tokens, weight, tile, rows, sums);                                                      \
        for (uint32_t t = 0; t < n_tokens; t++) {                                                                      \
            if (n_rows >= VECTOR_WIDTH)                                                                                \
                vf_store(y + t * y_stride, sums[t]);                                                                   \
            else                                                                                                       \
                vector_store_tail(y + t * y_stride, n_rows, sums[t]);                                                  \
        }                                                                                                              \
    }
#define PACKED_TILES(name, packing)                                                                                    \
    PACKED_TILE(name##_1, packing, 1)                                                                                  \
    PACKED_TILE(name##_2, packing, 2)                                                                                  \
    PACKED_TILE(name##_3, packing, 3)                                                                                  \
    PACKED_TILE(name##_4, packing, 4)
PACKED_TILES(packed_u4, CPU_U4)
PACKED_TILES(packed_u4_min, CPU_U4_MIN)
PACKED_TILES(packed_u4_k, CPU_U4_K)
PACKED_TILES(packed_u5, CPU_U5)
PACKED_TILES(packed_u5_min, CPU_U5_MIN)
PACKED_TILES(packed_u5_k, CPU_U5_K)
PACKED_TILES(packed_s8, CPU_S8)
PACKED_TILES(packed_u6, CPU_U6)

static void matmul_packed(const struct cpu_packed *weight, uint32_t first_tile, uint32_t n_tiles,
                          const struct cpu_activation *x, uint32_t n_tokens, float *y, size_t y_stride)
{
#define PACKED_ROW(name)                                                                                               \
    {                                                                                                                  \
        name##_1, name##_2, name##_3, name##_4                                                                         \
    }
    static void (*const tiles[CPU_N_PACKINGS][INTEGER_MAX_TOKENS])(const struct cpu_packed *, uint32_t,
                                                                   const struct cpu_activation *, float *, size_t) = {
        [CPU_U4] = PACKED_ROW(packed_u4),         [CPU_U4_MIN] = PACKED_ROW(packed_u4_min),
        [CPU_U4_K] = PACKED_ROW(packed_u4_k),     [CPU_U5] = PACKED_ROW(packed_u5),
        [CPU_U5_MIN] = PACKED_ROW(packed_u5_min), [CPU_U5_K] = PACKED_ROW(packed_u5_k),
        [CPU_S8] = PACKED_ROW(packed_s8),         [CPU_U6] = PACKED_ROW(packed_u6),
    };
    for (uint32_t tile = first_tile; tile < first_tile + n_tiles; tile++) {
        for (uint32_t t = 0, n; t < n_tokens; t += n) {
            n = n_tokens - t < INTEGER_MAX_TOKENS ? n_tokens - t : INTEGER_MAX_TOKENS;
            tiles[weight->packing][n - 1](weight, tile, x + (size_t)t * weight->n_blocks,
                                          y + t * y_stride + (size_t)tile * VECTOR_WIDTH, y_stride);
        }
    }
}

/* ---- f32, f16, bf16 weights ---- */

VECTOR_INLINE vf float_load(const enum tensor_type type, const char *row, uint32_t column)
{
    if (type == TENSOR_F32)
        return vf_load((const float *)(const void *)row + column);
    const uint16_t *half = (const uint16_t *)(const void *)row + column;
    return type == TENSOR_F16 ? vf_decode(half) : vf_decode_bf16(half);
}

VECTOR_INLINE vf float_load_tail(const enum tensor_type type, const char *row, uint32_t column, uint32_t n)
{
    if (type == TENSOR_F32)
        return vector_load_tail((const float *)(const void *)row + column, n);
    uint16_t halves[VECTOR_WIDTH] = {0};
    memcpy(halves, (const uint16_t *)(const void *)row + column, n * sizeof *halves);
    return type == TENSOR_F16 ? vf_decode(halves) : vf_decode_bf16(halves);
}

VECTOR_INLINE void float_tile(const enum tensor_type type, const uint32_t n_tokens, const char *const *rows,
                              const float *x, uint32_t n_columns, __m128 *dots)
{
    vf sums[FLOAT_TILE_TOKENS][FLOAT_TILE_ROWS], in[FLOAT_TILE_TOKENS];
#pragma GCC unroll 4
    for (uint32_t t = 0; t < n_tokens; t++)
#pragma GCC unroll 4
        for (uint32_t r = 0; r < FLOAT_TILE_ROWS; r++)
            sums[t][r] = vf_zero();
    const uint32_t whole = n_columns / VECTOR_WIDTH * VECTOR_WIDTH;
    for (uint32_t c = 0; c < whole; c += VECTOR_WIDTH) {
#pragma GCC unroll 4
        for (uint32_t t = 0; t < n_tokens; t++)
            in[t] = vf_load(x + (size_t)t * n_columns + c);
#pragma GCC unroll 4
        for (uint32_t r = 0; r < FLOAT_TILE_ROWS; r++) {
            vf weight = float_load(type, rows[r], c);
#pragma GCC unroll 4
            for (uint32_t t = 0; t < n_tokens; t++)
                sums[t][r] = vf_fma(weight, in[t], sums[t][r]);
        }
    }
    if (whole < n_columns) {
#pragma GCC unroll 4
        for (uint32_t r = 0; r < FLOAT_TILE_ROWS; r++) {
            vf weight = float_load_tail(type, rows[r], whole, n_columns - whole);
#pragma GCC unroll 4
            for (uint32_t t = 0; t < n_tokens; t++)
                sums[t][r] =
                    vf_fma(weight, vector_load_tail(x + (size_t)t * n_columns + whole, n_columns - whole), sums[t][r]);
        }
    }
#pragma GCC unroll 4
    for (uint32_t t = 0; t < n_tokens; t++)
        dots[t] = vf_sum4(sums[t][0], sums[t][1], sums[t][2], sums[t][3]);
}

VECTOR_INLINE void float_rows(const enum tensor_type type, const char *weight, uint32_t n_columns, uint32_t first_row,
                              uint32_t n_rows, const float *x, uint32_t n_tokens, float *y, size_t y_stride)
{
    const size_t row_bytes = (size_t)n_columns * (type == TENSOR_F32 ? 4 : 2);
    for (uint32_t row = 0; row < n_rows; row += FLOAT_TILE_ROWS) {
        const uint32_t n = n_rows - row < FLOAT_TILE_ROWS ? n_rows - row : FLOAT_TILE_ROWS;
        const char *rows[FLOAT_TILE_ROWS];
        for (uint32_t r = 0; r < FLOAT_TILE_ROWS; r++) /* a short tile repeats its first row */
            rows[r] = weight + (first_row + row + (r < n ? r : 0)) * row_bytes;
        for (uint32_t t = 0; t < n_tokens;) {
            __m128 dots[FLOAT_TILE_TOKENS];
            const float *in = x + (size_t)t * n_columns;
            uint32_t n_t = FLOAT_TILE_TOKENS;
            if (n_tokens - t >= FLOAT_TILE_TOKENS) {
                float_tile(type, FLOAT_TILE_TOKENS, rows, in, n_columns, dots);
            } else {
                n_t = 1;
                float_tile(type, 1, rows, in, n_columns, dots);
            }
            for (uint32_t i = 0; i < n_t; i++, t++) {
                float four[FLOAT_TILE_ROWS];
                _mm_storeu_ps(four, dots[i]);
                memcpy(y + t * y_stride + first_row + row, four, n * sizeof *four);
            }
        }
    }
}

static void matmul_float(enum tensor_type type, const void *weight, uint32_t n_columns, uint32_t first_row,
                         uint32_t n_rows, const float *x, uint32_t n_tokens, float *y, size_t y_stride)
{
    if (type == TENSOR_F32)
        float_rows(TENSOR_F32, weight, n_columns, first_row, n_rows, x, n_tokens, y, y_stride);
    else if (type == TENSOR_F16)
        float_rows(TENSOR_F16, weight, n_columns, first_row, n_rows, x, n_tokens, y, y_stride);
    else
        float_rows(TENSOR_BF16, weight, n_columns, first_row, n_rows, x, n_tokens, y, y_stride);
}

/* ---- element by element ---- */

static void rms_norm(const float *x, uint32_t n, const float *factors, float eps, float *out)
{
    const uint32_t whole = n / VECTOR_WIDTH * VECTOR_WIDTH;
    vf sum = vf_zero();
    for (uint32_t i = 0; i < whole; i += VECTOR_WIDTH) {
        vf values = vf_load(x + i);
        sum = vf_fma(values, values, sum);
    }
    vf tail = vector_load_tail(x + whole, n - whole);
    sum = vf_fma(tail, tail, sum);
    const float scale = 1.0f / sqrtf(vf_sum(sum) / (float)n + eps);
    uint32_t i = 0;
    for (; i < whole; i += VECTOR_WIDTH)
        vf_store(out + i, vf_mul(vf_mul(vf_load(x + i), vf_set(scale)), vf_load(factors + i)));
    for (; i < n; i++)
        out[i] = x[i] * scale * factors[i];
}

VECTOR_INLINE vf vector_swiglu(vf gate, vf up)
{
    vf denominator = vf_add(vf_set(1.0f), vf_exp(vf_sub(vf_zero(), gate)));
    return vf_mul(vf_div(gate, denominator), up);
}

static void swiglu(float *gate, const float *up, size_t n)
{
    size_t i = 0;
    for (; i + VECTOR_WIDTH <= n; i += VECTOR_WIDTH)
        vf_store(gate + i, vector_swiglu(vf_load(gate + i), vf_load(up + i)));
    if (i < n) {
        uint32_t left = (uint32_t)(n - i);
        vector_store_tail(gate + i, left,
                          vector_swiglu(vector_load_tail(gate + i, left), vector_load_tail(up + i, left)));
    }
}

static void add(float *x, const float *y, size_t n)
{
    size_t i = 0;
    for (; i + VECTOR_WIDTH <= n; i += VECTOR_WIDTH)
        vf_store(x + i, vf_add(vf_load(x + i), vf_load(y + i)));
    for (; i < n; i++)
        x[i] += y[i];
}

#define CPU_TABLE(symbol, its_name)                                                                                    \
    const struct cpu_kernels symbol = {                                                                                \
        .name = its_name,                                                                                              \
        .tile_rows = VECTOR_WIDTH,                                                                                     \
        .quantize = quantize,                                                                                          \
        .matmul_packed = matmul_packed,                                                                                \
        .matmul_float = matmul_float,                                                                                  \
        .rms_norm = rms_norm,                                                                                          \
        .swiglu = swiglu,                                                                                              \
        .add = add,                                                                                                    \
    }
