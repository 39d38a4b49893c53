/*
 * lane.h - what a step asks over the blocks of one lane, for the query heads of one KV head: the one definition of what a
 * value-store computes (and of what transport direct computes in its place).
 *
 * A block with at least KERNELS_DENSE_ROWS selected rows is attended to as a block of its own (so that reading everything gives
 * the bits of a prefill); all of these come first, in order. Rows of the other blocks are gathered in order of blocks and tokens
 * and attended to 64 at a time. With `weights` the rows are summed with the weights given.
 * Then the tail of all blocks, as one partial (reference, sum of masses, sum of masses x mean V), is merged.
 *
 * Owner      nobody: works on the caller's memory. Threads: any.
 */
#pragma once

#include "kernels/kernels.h"

struct lane {
    uint32_t n_queries, head_dim, n_blocks;
    enum kernels_rows codec;
    const float *q; /* [n_queries][head_dim]; NULL with weights */
    float scale;
    const void *const *rows;    /* [n_blocks]: 64 contiguous rows of the KV head in each block */
    const float *const *v_sums; /* [n_blocks]: [head_dim], sums of V over 64 tokens; NULL without masses */
    const uint64_t *masks;      /* [n_blocks] */
    const float *masses;        /* [n_queries][masses_stride], first of them of the lane's first block; NULL: no tail */
    size_t masses_stride;
    const float *weights; /* [n_queries][weights_stride], first of them of the first selected row; NULL: from q . K */
    size_t weights_stride;
    const float *references; /* [n_queries]; NULL without masses and weights */
};
/* partials [n_queries][2 + head_dim], out; empty where nothing has weight. */
void lane_attend(const struct kernels *kernels, const struct lane *lane, float *partials);
