/*
 * lane.c - what a step asks over the blocks of one lane: which rows are attended to together, and the tail.
 *
 * Threads    any.
 * Invariant  which rows share a call depends on the masks alone (dense blocks first, in order; then the gathered rows, 64 at a
 *            time), so the bits of a lane are the same wherever it is computed.
 */
#include "kernels/lane.h"

#include <math.h>
#include <string.h>

#define LANE_QUERIES  8u /* sums of so many queries are made together, on the stack */
#define LANE_MASKS    32u
#define LANE_GATHERED (3u * KERNELS_BLOCK_TOKENS) /* a batch, the one after it, and what a block adds */
#define LANE_FIRST    12u                         /* rows asked for at once: more requests a CPU would forget */
#define LANE_AHEAD    16u                         /* blocks whose sums are asked for early */

/* Selected rows of a lane's blocks in order: pointers to them, taken out a batch at a time. */
struct gather {
    const struct lane *lane;
    size_t n_bytes; /* of a row */
    uint32_t dense; /* blocks with so many selected rows are left out */
    uint32_t block; /* next to look at */
    uint32_t n;
    const void *rows[LANE_GATHERED];
};

static uint32_t least(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

static void fetch(const void *from, size_t n_bytes)
{
    const uintptr_t first = (uintptr_t)from & ~(uintptr_t)63;
    for (uintptr_t line = first; line < (uintptr_t)from + n_bytes; line += 64)
        __builtin_prefetch((const void *)line);
}

/* Until there are two batches or no more blocks. */
static void gather_fill(struct gather *gather)
{
    const struct lane *lane = gather->lane;
    for (; gather->n < 2 * KERNELS_BLOCK_TOKENS && gather->block < lane->n_blocks; gather->block++) {
        uint64_t left = lane->masks[gather->block];
        if ((uint32_t)__builtin_popcountll(left) >= gather->dense)
            continue;
        for (; left; left &= left - 1)
            gather->rows[gather->n++] =
                (const char *)lane->rows[gather->block] + (size_t)__builtin_ctzll(left) * gather->n_bytes;
    }
}

/* The first n rows are done with. */
static void gather_drop(struct gather *gather, uint32_t n)
{
    gather->n -= n;
    memmove(gather->rows, gather->rows + n, gather->n * sizeof *gather->rows);
}

static void attend_dense(const struct kernels *kernels, const struct lane *lane, float *partials)
{
    for (uint32_t b = 0; b < lane->n_blocks; b++) {
        uint64_t masks[LANE_MASKS];
        if (__builtin_popcountll(lane->masks[b]) < KERNELS_DENSE_ROWS)
            continue;
        for (uint32_t i = 0; i < LANE_MASKS; i++)
            masks[i] = lane->masks[b];
        for (uint32_t i = 0; i < lane->n_queries; i += LANE_MASKS)
            kernels->attend_block(lane->q + (size_t)i * lane->head_dim, least(lane->n_queries - i, LANE_MASKS),
                                  lane->head_dim, lane->codec, lane->rows[b], masks, lane->scale,
                                  partials + (size_t)i * KERNELS_PARTIAL_FLOATS(lane->head_dim));
    }
}

static void attend_gathered(const struct kernels *kernels, const struct lane *lane, float *partials)
{
    struct gather gather = {
        .lane = lane, .n_bytes = kernels_row_bytes(lane->head_dim, lane->codec), .dense = KERNELS_DENSE_ROWS};
    gather_fill(&gather);
    uint32_t n_fetched = least(gather.n, LANE_FIRST);
    for (uint32_t i = 0; i < n_fetched; i++)
        fetch(gather.rows[i], gather.n_bytes);
    while (gather.n) {
        const uint32_t n = least(gather.n, KERNELS_BLOCK_TOKENS);
        const uint32_t n_fetch = least(gather.n, 2 * KERNELS_BLOCK_TOKENS);
        kernels->attend_rows(lane->q, lane->n_queries, lane->head_dim, lane->codec, gather.rows, n, n_fetched, n_fetch,
                             lane->scale, partials);
        n_fetched = n_fetch - n;
        gather_drop(&gather, n);
        gather_fill(&gather);
    }
}

/* sums [n][1 + head_dim] of a few queries -> merged into their partials; sums of nothing are left out. */
static void merge_sums(const struct kernels *kernels, const struct lane *lane, uint32_t first, uint32_t n,
                       const float *sums, float *partials)
{
    for (uint32_t i = 0; i < n; i++, sums += 1 + lane->head_dim) {
        float partial[KERNELS_PARTIAL_FLOATS(KERNELS_MAX_HEAD_DIM)];
        if (sums[0] == 0)
            continue;
        partial[0] = lane->references[first + i];
        memcpy(partial + 1, sums, (1 + lane->head_dim) * sizeof *sums);
        kernels->partial_merge(partials + (size_t)(first + i) * KERNELS_PARTIAL_FLOATS(lane->head_dim), partial,
                               lane->head_dim);
    }
}

static void weigh_selected(const struct kernels *kernels, const struct lane *lane, uint32_t first, uint32_t n,
                           float *sums)
{
    struct gather gather = {
        .lane = lane,
        .n_bytes = kernels_row_bytes(lane->head_dim, lane->codec),
        .dense = KERNELS_BLOCK_TOKENS + 1,
    };
    const size_t v_offset = (size_t)lane->head_dim * (lane->codec == KERNELS_ROWS_F16 ? sizeof(uint16_t) : 1);
    const float *weights = lane->weights + first * lane->weights_stride;
    gather_fill(&gather);
    for (uint32_t done = 0, n_rows; gather.n; done += n_rows) {
        n_rows = gather.n;
        for (uint32_t i = 0; i < n_rows; i++) /* from V on */
            fetch((const char *)gather.rows[i] + v_offset, gather.n_bytes - v_offset);
        kernels->weigh_rows(n, lane->head_dim, lane->codec, gather.rows, n_rows, weights + done, lane->weights_stride,
                            sums);
        gather.n = 0;
        gather_fill(&gather);
    }
}

static void weigh_tail(const struct kernels *kernels, const struct lane *lane, uint32_t first, uint32_t n, float *sums)
{
    const float *masses = lane->masses + first * lane->masses_stride;
    for (uint32_t b = 0; b < lane->n_blocks; b++) {
        if (b + LANE_AHEAD < lane->n_blocks)
            fetch(lane->v_sums[b + LANE_AHEAD], lane->head_dim * sizeof(float));
        kernels->weigh_mean(n, lane->head_dim, lane->v_sums[b], masses + b, lane->masses_stride, sums);
    }
}

/* A few queries at a time: their sums with the weights given, or of the tail, merged into their partials. */
static void merge_weighed(const struct kernels *kernels, const struct lane *lane,
                          void (*weigh)(const struct kernels *kernels, const struct lane *lane, uint32_t first,
                                        uint32_t n, float *sums),
                          float *partials)
{
    for (uint32_t first = 0, n; first < lane->n_queries; first += n) {
        float sums[LANE_QUERIES * (1 + KERNELS_MAX_HEAD_DIM)];
        n = least(lane->n_queries - first, LANE_QUERIES);
        memset(sums, 0, n * (size_t)(1 + lane->head_dim) * sizeof *sums);
        weigh(kernels, lane, first, n, sums);
        merge_sums(kernels, lane, first, n, sums, partials);
    }
}

void lane_attend(const struct kernels *kernels, const struct lane *lane, float *partials)
{
    const size_t width = KERNELS_PARTIAL_FLOATS(lane->head_dim);
    memset(partials, 0, lane->n_queries * width * sizeof *partials);
    for (uint32_t i = 0; i < lane->n_queries; i++)
        partials[i * width] = -INFINITY;
    if (lane->weights) {
        merge_weighed(kernels, lane, weigh_selected, partials);
    } else {
        for (uint32_t b = 0; lane->masses && b < least(lane->n_blocks, LANE_AHEAD); b++)
            fetch(lane->v_sums[b], lane->head_dim * sizeof(float));
        attend_dense(kernels, lane, partials);
        attend_gathered(kernels, lane, partials);
    }
    if (lane->masses)
        merge_weighed(kernels, lane, weigh_tail, partials);
}
