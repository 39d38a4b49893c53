/*
 * vector_cpu.h - the table of the cpu back end for any vector width; cpu_kernels.h states the order of every sum.
 *
 * The file that includes this defines VECTOR_WIDTH first, as kernels/vector.h asks.
 */
#pragma once

#include <math.h>
#include <string.h>

#include "gpu-worker/backend/cpu/cpu_kernels.h"
#include "gpu-worker/backend/cpu/vector_integer.h"
#include "kernels/kernels.h"
#include "kernels/vector.h"
#include "kernels/vector_exp.h"

#define FLOAT_TILE_ROWS   4u
#define FLOAT_TILE_TOKENS 3u
#define PACKED_MAX_TILES  4u

/* Tiles lie one after the other, so this far ahead is what comes next; past the end a prefetch does nothing. */
#define PACKED_PREFETCH_BYTES 1536u

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
        const vf inverse = vf_set(CPU_LARGEST / maximum);
        for (uint32_t i = 0; i < CPU_BLOCK; i += VECTOR_WIDTH)
            integer_store(out->q + i, vf_to_int(vf_mul(vf_load(x + i), inverse)));
        int32_t totals[2] = {0, 0};
        for (uint32_t i = 0; i < 16; i++) {
            totals[0] += out->q[i];
            totals[1] += out->q[16 + i];
        }
        out->scale = maximum / CPU_LARGEST;
        out->sum = out->scale * (float)(totals[0] + totals[1]);
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
#pragma GCC unroll 8
    for (uint32_t t = 0; t < n_tokens; t++)
        sums[t] = vf_fma(vi_to_float(integers[t]), vf_mul(scale, vf_set(x[t][b].scale)), sums[t]);
}

/* Adds one block of one tile to the sums of n_tokens tokens. */
VECTOR_INLINE void packed_block(const enum cpu_packing packing, const uint32_t n_tokens, const uint8_t *block,
                                const struct cpu_activation *const *x, uint32_t b, vf *sums)
{
    const uint8_t *quants = block + VECTOR_WIDTH * cpu_packed_scale_bytes(packing);
    vi integers[INTEGER_MAX_TOKENS];
    if (packing == CPU_U6) {
#pragma GCC unroll 2
        for (uint32_t half = 0; half < 2; half++) {
            vf scale = packed_f32(block, half);
            integer_bytes(n_tokens, 0, half * 4, 4, quants, x, b, integers);
            packed_scale(n_tokens, integers, scale, x, b, sums);
            vf minimum = vf_mul(scale, vf_set(-32.0f));
#pragma GCC unroll 8
            for (uint32_t t = 0; t < n_tokens; t++)
                sums[t] = vf_fma(minimum, vf_set(x[t][b].half_sums[half]), sums[t]);
        }
        return;
    }
    if (packing == CPU_U4 || packing == CPU_U4_MIN || packing == CPU_U4_K)
        integer_u4(n_tokens, quants, x, b, integers);
    else if (packing == CPU_S8)
        integer_bytes(n_tokens, 1, 0, 8, quants, x, b, integers);
    else
        integer_bytes(n_tokens, 0, 0, 8, quants, x, b, integers);
    const int wide = packing == CPU_U4_K || packing == CPU_U5_K;
    vf scale = wide ? packed_f32(block, 0) : packed_f16(block, 0);
    packed_scale(n_tokens, integers, scale, x, b, sums);
    if (packing == CPU_S8)
        return;
    vf minimum;
    if (wide)
        minimum = packed_f32(block, 1);
    else if (packing == CPU_U4_MIN || packing == CPU_U5_MIN)
        minimum = packed_f16(block, 1);
    else
        minimum = vf_mul(scale, vf_set(packing == CPU_U4 ? -8.0f : -16.0f));
#pragma GCC unroll 8
    for (uint32_t t = 0; t < n_tokens; t++)
        sums[t] = vf_fma(minimum, vf_set(x[t][b].sum), sums[t]);
}

/*
 * n_tiles tiles, `step` apart, x n_tokens tokens over all blocks, written out; y is at the first tile's first row.
 * One or two tokens wait for memory, and one stream does not get out of it what several do: they take tiles that lie far apart
 * together, each followed by its neighbour in the next call.
 */
VECTOR_INLINE void packed_tiles(const enum cpu_packing packing, const uint32_t n_tiles, const uint32_t n_tokens,
                                const struct cpu_packed *weight, uint32_t tile, uint32_t step,
                                const struct cpu_activation *x, float *y, size_t y_stride)
{
    const size_t block_bytes = VECTOR_WIDTH * (cpu_packed_scale_bytes(packing) + cpu_packed_quant_bytes(packing));
    const size_t step_bytes = step * weight->tile_bytes;
    const uint32_t n_blocks = weight->n_blocks, n_rows = weight->n_rows - tile * VECTOR_WIDTH;
    const uint8_t *block = weight->data + tile * weight->tile_bytes;
    const struct cpu_activation *rows[INTEGER_MAX_TOKENS];
    vf sums[PACKED_MAX_TILES][INTEGER_MAX_TOKENS];
#pragma GCC unroll 8
    for (uint32_t t = 0; t < n_tokens; t++)
        rows[t] = x + (size_t)t * n_blocks;
#pragma GCC unroll 4
    for (uint32_t i = 0; i < n_tiles; i++)
#pragma GCC unroll 8
        for (uint32_t t = 0; t < n_tokens; t++)
            sums[i][t] = vf_zero();
    for (uint32_t b = 0; b < n_blocks; b++, block += block_bytes) {
#pragma GCC unroll 4
        for (uint32_t i = 0; i < n_tiles; i++) {
            const uint8_t *at = block + i * step_bytes;
#pragma GCC unroll 8
            for (size_t line = 0; line < block_bytes; line += 64)
                __builtin_prefetch(at + PACKED_PREFETCH_BYTES + line);
            packed_block(packing, n_tokens, at, rows, b, sums[i]);
        }
    }
#pragma GCC unroll 4
    for (uint32_t i = 0; i < n_tiles; i++) {
#pragma GCC unroll 8
        for (uint32_t t = 0; t < n_tokens; t++) {
            float *to = y + t * y_stride + (size_t)i * step * VECTOR_WIDTH;
            if (n_rows >= (i * step + 1) * VECTOR_WIDTH)
                vf_store(to, sums[i][t]);
            else
                vector_store_tail(to, n_rows - i * step * VECTOR_WIDTH, sums[i][t]);
        }
    }
}

#define PACKED_TILE(name, packing, n_tiles, n_tokens)                                                                  \
    static __attribute__((noinline)) void name(const struct cpu_packed *weight, uint32_t tile, uint32_t step,          \
                                               const struct cpu_activation *x, float *y, size_t y_stride)              \
    {                                                                                                                  \
        packed_tiles(packing, n_tiles, n_tokens, weight, tile, step, x, y, y_stride);                                  \
    }
#define PACKED_TILES(name, packing)                                                                                    \
    PACKED_TILE(name##_many_1, packing, PACKED_MAX_TILES, 1)                                                           \
    PACKED_TILE(name##_many_2, packing, PACKED_MAX_TILES, 2)                                                           \
    PACKED_TILE(name##_1, packing, 1, 1)                                                                               \
    PACKED_TILE(name##_2, packing, 1, 2)                                                                               \
    PACKED_TILE(name##_3, packing, 1, 3)                                                                               \
    PACKED_TILE(name##_4, packing, 1, 4)                                                                               \
    PACKED_TILE(name##_8, packing, 1, INTEGER_MAX_TOKENS)
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
    typedef void tile_function(const struct cpu_packed *, uint32_t, uint32_t, const struct cpu_activation *, float *,
                               size_t);
#define PACKED_ROW(name)                                                                                               \
    {                                                                                                                  \
        name##_many_1, name##_many_2, name##_1, name##_2, name##_3, name##_4, name##_8                                 \
    }
    static tile_function *const functions[CPU_N_PACKINGS][7] = {
        [CPU_U4] = PACKED_ROW(packed_u4),         [CPU_U4_MIN] = PACKED_ROW(packed_u4_min),
        [CPU_U4_K] = PACKED_ROW(packed_u4_k),     [CPU_U5] = PACKED_ROW(packed_u5),
        [CPU_U5_MIN] = PACKED_ROW(packed_u5_min), [CPU_U5_K] = PACKED_ROW(packed_u5_k),
        [CPU_S8] = PACKED_ROW(packed_s8),         [CPU_U6] = PACKED_ROW(packed_u6),
    };
#undef PACKED_ROW
    tile_function *const *function = functions[weight->packing];
    uint32_t tile = first_tile;
    if (n_tokens <= 2) {
        const uint32_t step = n_tiles / PACKED_MAX_TILES;
        for (uint32_t i = 0; i < step; i++, tile++)
            function[n_tokens - 1](weight, tile, step, x, y + (size_t)tile * VECTOR_WIDTH, y_stride);
        tile = first_tile + step * PACKED_MAX_TILES;
    }
    for (; tile < first_tile + n_tiles; tile++) {
        for (uint32_t t = 0, n; t < n_tokens; t += n) {
            const uint32_t left = n_tokens - t;
            n = left >= INTEGER_MAX_TOKENS ? INTEGER_MAX_TOKENS : left < 4 ? left : 4;
            function[n <= 4 ? n + 1 : 6](weight, tile, 1, x + (size_t)t * weight->n_blocks,
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
