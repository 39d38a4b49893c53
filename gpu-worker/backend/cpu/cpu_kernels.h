/*
 * cpu_kernels.h - what the cpu back end asks of an instruction set: one table each, tested against `plain`.
 *
 * Threads    any; functions write only to the outputs named.
 * Invariant  a row's result has one summation order along the columns, whatever the number of tokens or the range:
 *                packed weights   exact integers within 32 columns (16 for U6), rounded to float where above 2^24, block
 *                                 after block: y = fma(integer, w_scale * x_scale, y); y = fma(w_minimum, x_scale * sum of x's integers, y)
 *                                 (the same bits on every instruction set)
 *                float weights    one accumulator vector in column order, then the fixed tree of kernels/vector.h
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "gpu-worker/backend/cpu/cpu_packed.h"

#define CPU_BLOCK    32u       /* columns that share an activation scale */
#define CPU_LARGEST  32767     /* of an activation's integers */
#define CPU_SMALLEST 0x1p-100f /* a block whose numbers are all smaller is zero; keeps CPU_LARGEST / largest finite */

/* 32 columns of one input row: x[i] is about scale * q[i], q in 16 bits, because 8 are too few for a model to give the answers
 * of its float form. A block with a NaN or infinity has q = 0 and scale NaN, so that it shows in that row's results and
 * nowhere else. */
struct cpu_activation {
    int16_t q[CPU_BLOCK]; /* -CPU_LARGEST..CPU_LARGEST */
    float scale;
    float sum;          /* scale * (sum of q) */
    float half_sums[2]; /* the same for each 16 */
};
_Static_assert(sizeof(struct cpu_activation) == 80, "q, then four numbers");

struct cpu_kernels {
    const char *name;
    uint32_t tile_rows; /* output rows interleaved in a packed weight */

    /* x [n_columns] (whole blocks) -> out [n_columns / 32] */
    void (*quantize)(const float *x, uint32_t n_columns, struct cpu_activation *out);

    /* y[t * y_stride + row] for the rows of tiles [first_tile, first_tile + n_tiles); x [n_tokens][blocks of a row] */
    void (*matmul_packed)(const struct cpu_packed *weight, uint32_t first_tile, uint32_t n_tiles,
                          const struct cpu_activation *x, uint32_t n_tokens, float *y, size_t y_stride);

    /* y[t * y_stride + row] for rows [first_row, first_row + n_rows) of a row-major f32, f16 or bf16 matrix */
    void (*matmul_float)(enum tensor_type type, const void *weight, uint32_t n_columns, uint32_t first_row,
                         uint32_t n_rows, const float *x, uint32_t n_tokens, float *y, size_t y_stride);

    void (*rms_norm)(const float *x, uint32_t n, const float *factors, float eps, float *out);
    void (*swiglu)(float *gate, const float *up, size_t n);
    void (*add)(float *x, const float *y, size_t n);
};

extern const struct cpu_kernels cpu_plain_kernels;
extern const struct cpu_kernels cpu_avx2_kernels;
extern const struct cpu_kernels cpu_avx512_kernels;
