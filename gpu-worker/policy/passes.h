/*
 * passes.h - the loops of selection.c over scores and weights, one table per instruction set. Internal to this folder.
 *
 * Owner      nobody: constant tables; work on the caller's memory. Threads: any that has called kernels_thread_setup().
 * Invariant  every table gives the same bits: one algorithm (passes_loops.h) in 16 lanes, every operation exact by IEEE 754,
 *            sums in one order.
 *
 * Words      w [n_blocks][64]: mean, or root mean square, of the normalised weights over the group's query heads.
 *            values [n_blocks]: what a threshold costs or gains block by block; the array is rounded up to 16 floats, which are
 *            0 behind the last block.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#define PASSES_BLOCK_TOKENS 64u
#define PASSES_LANES        16u /* also what arrays of values are rounded up to */

/* What weights are multiplied by before they are squared: squares of 2^-126 .. 1 are normal numbers then, and so are sums. */
#define PASSES_BEFORE_SQUARE 0x1p63f

/*
 * A threshold tried between two that were tried before: of a block whose values at both are equal, and of one that has no token
 * above the threshold, the value is known. `above` and `below` NULL: nothing is known.
 */
struct passes_trial {
    const float *w;
    const float *block_max; /* largest w of each block */
    uint32_t n_blocks;
    float threshold;
    const float *above; /* values at a higher threshold */
    const float *below; /* values at a lower one */
    uint32_t *blocks;   /* [n_blocks + 3], to work in */
};

struct passes {
    /* Largest of the scores of n_blocks blocks; NaN is passed over; -INFINITY if there is none. */
    float (*largest)(const float *scores, uint32_t n_blocks);

    /* scores <- exp(score - largest), 0 for NaN and -infinity and below 2^-126; returns their sum. No score > largest. */
    float (*exponentials)(float *scores, uint32_t n_blocks, float largest);

    /* w_j = sum over heads of factors[h] x exponentials[h][j]; largest of each block; returns the largest of all. */
    float (*average)(const float *exponentials, size_t stride, const float *factors, uint32_t group, uint32_t n_blocks,
                     float *w, float *block_max);

    /* The same with w_j = square root of the sum of (factors[h] x exponentials[h][j])^2, which is at most 1. */
    float (*root)(const float *exponentials, size_t stride, const float *factors, uint32_t group, uint32_t n_blocks,
                  float *w, float *block_max);

    /* values: sum of w >= threshold; returns the sum over blocks. Never falls when the threshold falls. */
    float (*mass)(const struct passes_trial *trial, float *values);

    /* values: sum of |w - mean of w| over the w < threshold of a block; returns the sum over blocks. */
    float (*deviation)(const struct passes_trial *trial, float *values);

    /* values: sum of (PASSES_BEFORE_SQUARE x (w - mean of w))^2 over the w < threshold of a block; returns their sum. */
    float (*squares)(const struct passes_trial *trial, float *values);

    /*
     * Bit j of masks: w >= threshold; of block 0 only those of first_block. masses [group][n_blocks]: sums of the exponentials
     * with w < threshold; may be NULL. Returns the number of bits.
     */
    uint32_t (*finish)(const float *w, uint32_t n_blocks, float threshold, uint64_t first_block,
                       const float *exponentials, size_t stride, uint32_t group, uint64_t *masks, float *masses);
};

extern const struct passes passes_plain;
#if defined(__x86_64__)
extern const struct passes passes_avx2, passes_avx512;
#endif
