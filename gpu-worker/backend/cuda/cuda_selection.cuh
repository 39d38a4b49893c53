/*
 * cuda_selection.cuh - what the three files of selection share: an item's work memory, and blocks of tokens in half warps.
 *
 * Words      lane i of half a warp has tokens i, i + 16, i + 32, i + 48 of a block: the 16 lanes of policy/passes_loops.h, so that
 *            sums are formed in its order.
 */
#pragma once

#include <float.h>

#include "gpu-worker/backend/cuda/cuda.cuh"
#include "gpu-worker/backend/cuda/cuda_selection.h"
#include "gpu-worker/policy/passes.h"

#define SELECTION_SINKS        4u  /* LAYOUT_N_SINKS: the first tokens are never old */
#define SELECTION_STEPS        320 /* of the grid, SELECTION_GRID_PER_OCTAVE 8 x SELECTION_GRID_OCTAVES 40 */
#define SELECTION_AT_ONCE      8u  /* thresholds */
#define SELECTION_EXACT_BLOCKS (CUDA_SELECTION_MAX_EXACT / PASSES_BLOCK_TOKENS)

struct selection_state {
    uint32_t largest[CUDA_SELECTION_MAX_GROUP]; /* order of a float, selection_order() */
    float factors[CUDA_SELECTION_MAX_GROUP];    /* 1 / (Z divisor) */
    uint32_t top;                               /* bits of the largest weight of an old token */
    int32_t failed, enough;                     /* steps that the threshold lies between */
    float bound, threshold;
    uint32_t found;
};

/* Where the parts of an item's work memory are; sizes are of most_blocks. */
struct selection_work {
    size_t runs, w, values, exact, offsets,
        n_bytes; /* [group][n_runs][16], [blocks][64], [8][n_values], [group][256], [n_blocks] */
    uint32_t n_runs, n_values;
};

static inline selection_work selection_work_of(const struct cuda_selection *selection)
{
    selection_work work = {};
    const size_t n_all = static_cast<size_t>(selection->most_blocks) + SELECTION_EXACT_BLOCKS;
    work.n_runs = (selection->most_blocks + PASSES_LANES - 1) / PASSES_LANES;
    work.n_values = static_cast<uint32_t>((n_all + PASSES_LANES - 1) / PASSES_LANES * PASSES_LANES);
    work.runs = (sizeof(selection_state) + 255) / 256 * 256;
    work.w = work.runs + static_cast<size_t>(selection->group) * work.n_runs * PASSES_LANES * sizeof(float);
    work.values = work.w + n_all * PASSES_BLOCK_TOKENS * sizeof(float);
    work.exact = work.values + static_cast<size_t>(SELECTION_AT_ONCE) * work.n_values * sizeof(float);
    work.offsets = work.exact + static_cast<size_t>(selection->group) * CUDA_SELECTION_MAX_EXACT * sizeof(float);
    work.n_bytes = work.offsets + static_cast<size_t>(selection->most_blocks) * sizeof(uint32_t);
    return work;
}

static __device__ __forceinline__ selection_state *selection_state_of(const struct cuda_selection_item &item)
{
    return static_cast<selection_state *>(item.work);
}

static __device__ __forceinline__ float *selection_floats(const struct cuda_selection_item &item, size_t at)
{
    return reinterpret_cast<float *>(static_cast<uint8_t *>(item.work) + at);
}

/* vf_sum() over the 16 lanes of half a warp; in every lane. The whole warp takes part. */
static __device__ __forceinline__ float selection_sum(float x)
{
    x += __shfl_xor_sync(CUDA_ALL_LANES, x, 8);
    x += __shfl_xor_sync(CUDA_ALL_LANES, x, 2);
    x += __shfl_xor_sync(CUDA_ALL_LANES, x, 1);
    return x + __shfl_xor_sync(CUDA_ALL_LANES, x, 4);
}

static inline unsigned int selection_grid(size_t n, unsigned int per_block)
{
    const unsigned int n_blocks = cuda_blocks(n, per_block);
    return n_blocks < 1024 ? n_blocks : 1024;
}
