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
#define SELECTION_PASSES       3u
#define SELECTION_EXACT_BLOCKS (CUDA_SELECTION_MAX_EXACT / PASSES_BLOCK_TOKENS)

/* Zeros before a run. Behind it [group] of each: largest scores (cuda_keys_order()), factors 1 / (Z divisor), blocks that came. */
struct selection_state {
    uint32_t top;             /* bits of the largest weight of an old token */
    uint32_t failed, missing; /* the threshold lies between steps failed - 1 and SELECTION_STEPS + 1 - missing */
    float bound, threshold;
    uint32_t found;
    uint32_t n_kept;
    uint32_t finished, tried[SELECTION_PASSES]; /* blocks that came */
    uint32_t padding[1];
};

/* Where the parts of an item's work memory are; sizes are of most_blocks. */
struct selection_work {
    size_t runs, w, values, exact, masks, offsets,
        n_bytes; /* [group][n_runs][16], [blocks][64], [8][n_values], [group][256], [n_blocks] in the order of lanes: twice */
    uint32_t n_runs, n_values;
};

static inline selection_work selection_work_of(const struct cuda_selection *selection)
{
    selection_work work = {};
    const size_t n_all = static_cast<size_t>(selection->most_blocks) + SELECTION_EXACT_BLOCKS;
    work.n_runs = (selection->most_blocks + PASSES_LANES - 1) / PASSES_LANES;
    work.n_values = static_cast<uint32_t>((n_all + PASSES_LANES - 1) / PASSES_LANES * PASSES_LANES);
    work.runs = 0;
    work.w = work.runs + static_cast<size_t>(selection->group) * work.n_runs * PASSES_LANES * sizeof(float);
    work.values = work.w + n_all * PASSES_BLOCK_TOKENS * sizeof(float);
    work.exact = work.values + static_cast<size_t>(SELECTION_AT_ONCE) * work.n_values * sizeof(float);
    work.masks = work.exact + static_cast<size_t>(selection->group) * CUDA_SELECTION_MAX_EXACT * sizeof(float);
    work.offsets = work.masks + static_cast<size_t>(selection->most_blocks) * sizeof(uint64_t);
    work.n_bytes = work.offsets + static_cast<size_t>(selection->most_blocks) * sizeof(uint32_t);
    return work;
}

static __device__ __forceinline__ selection_state *selection_state_of(const struct cuda_selection_item &item)
{
    return static_cast<selection_state *>(item.state);
}
static __device__ __forceinline__ uint32_t *selection_largest(const struct cuda_selection_item &item)
{
    return reinterpret_cast<uint32_t *>(selection_state_of(item) + 1);
}
static __device__ __forceinline__ float *selection_factors(const struct cuda_selection_item &item, uint32_t group)
{
    return reinterpret_cast<float *>(selection_largest(item) + group);
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

/*
 * Did all `n_blocks` blocks of the launch that count here come? True in the last one alone, which sees what the others wrote before.
 * All threads of the block; `flag` in shared memory.
 */
static __device__ __forceinline__ bool selection_is_last(uint32_t *came, uint32_t n_blocks, uint32_t *flag)
{
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0)
        *flag = atomicAdd(came, 1u) + 1 == n_blocks;
    __syncthreads();
    __threadfence();
    return *flag;
}

/* Sum of values [n] in 16 lanes, each in order; many are asked for at a time. */
static __device__ __forceinline__ float selection_serial_sum(const float *values, uint32_t n, uint32_t lane)
{
    constexpr uint32_t at_once = 32;
    float total = 0;
    uint32_t i = lane;
    for (; i + (at_once - 1) * PASSES_LANES < n; i += at_once * PASSES_LANES) {
        float x[at_once];
#pragma unroll
        for (uint32_t k = 0; k < at_once; k++)
            x[k] = values[i + k * PASSES_LANES];
#pragma unroll
        for (uint32_t k = 0; k < at_once; k++)
            total += x[k];
    }
    for (; i < n; i += PASSES_LANES)
        total += values[i];
    return total;
}

/* The block at `position` in the order of lanes. */
static __device__ __forceinline__ uint32_t selection_block_at(uint32_t position, uint32_t n_blocks, uint32_t n_lanes)
{
    const uint32_t each = n_blocks / n_lanes, n_longer = n_blocks % n_lanes, in_longer = n_longer * (each + 1);
    if (position < in_longer)
        return position / (each + 1) + position % (each + 1) * n_lanes;
    position -= in_longer;
    return n_longer + position / each + position % each * n_lanes;
}

static inline unsigned int selection_grid(size_t n, unsigned int per_block)
{
    const unsigned int n_blocks = cuda_blocks(n, per_block);
    return n_blocks < 1024 ? n_blocks : 1024;
}
