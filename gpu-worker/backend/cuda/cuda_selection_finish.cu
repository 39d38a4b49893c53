/*
 * cuda_selection_finish.cu - selection, third part: masks, masses of what is not selected, how many are, and their weights.
 *
 * Launches   finish: x: 32 blocks of tokens at a time, half a warp a block; y: items; 256 threads (32 .. 256). Where weights are
 *            asked for: gather (a warp a block of tokens).
 * Shared     8.7 KiB: masks and masses of 32 blocks.
 * Algorithm  a mask of 64 tokens is put together from four ballots; masses are summed in the order of passes_loops.h. Blocks are taken
 *            in the order of lanes, and what 32 of them gave is written side by side: results may lie in the host's memory, behind
 *            a link that likes whole lines. The last block of an item says how many are selected, and where each block's weights begin.
 *            Bytes: weights and exponentials once, masks and masses written.
 */
#include "gpu-worker/backend/cuda/cuda_selection.cuh"

#define AT_ONCE 32u

struct finish_memory {
    uint64_t masks[AT_ONCE];
    float masses[CUDA_SELECTION_MAX_GROUP][AT_ONCE + 1];
    uint32_t of_warps[32];
    uint32_t is_last;
};

/* A block's mask; both halves of the warp, each for its own block. */
static __device__ __forceinline__ uint64_t mask_of(const float *weights, float threshold, uint32_t block)
{
    const uint32_t half = cuda_lane() / 16, lane = cuda_lane() % 16;
    uint64_t below = 0;
#pragma unroll
    for (uint32_t k = 0; k < 4; k++) {
        const float w = weights[static_cast<size_t>(block) * PASSES_BLOCK_TOKENS + k * PASSES_LANES + lane];
        const uint32_t both = __ballot_sync(CUDA_ALL_LANES, w < threshold);
        below |= static_cast<uint64_t>(both >> 16 * half & 0xffffu) << 16 * k;
    }
    return ~below & (block == 0 ? ~static_cast<uint64_t>(0) << SELECTION_SINKS : ~static_cast<uint64_t>(0));
}

/* Masks and masses of the blocks at `first` and behind in the order of lanes, to shared memory. */
static __device__ __forceinline__ void look_at(const struct cuda_selection_item &item, const float *weights,
                                               float threshold, uint32_t first, uint32_t n_lanes, uint32_t group,
                                               size_t stride, struct finish_memory *memory)
{
    const uint32_t lane = cuda_lane() % 16;
#pragma unroll 1
    for (uint32_t i = threadIdx.x / 16; i < AT_ONCE; i += blockDim.x / 16) { /* the last one again behind it */
        const uint32_t block = selection_block_at(min(first + i, item.n_blocks - 1), item.n_blocks, n_lanes);
        const uint64_t mask = mask_of(weights, threshold, block);
        if (lane == 0)
            memory->masks[i] = mask;
#pragma unroll 2
        for (uint32_t head = 0; item.masses && head < group; head++) {
            const float *e = item.scores + head * stride + static_cast<size_t>(block) * PASSES_BLOCK_TOKENS + lane;
            float part[4];
#pragma unroll
            for (uint32_t k = 0; k < 4; k++) /* sinks weigh nothing */
                part[k] = mask >> (k * PASSES_LANES + lane) & 1 ? 0.0f : e[k * PASSES_LANES];
            const float mass = selection_sum((part[0] + part[1]) + (part[2] + part[3]));
            if (lane == 0)
                memory->masses[head][i] = mass;
        }
    }
}

/* offsets [n_blocks]: how many are selected in the blocks before. The whole block. */
static __device__ __forceinline__ void count(const uint64_t *masks, uint32_t n_blocks, uint32_t *offsets,
                                             uint32_t *of_warps)
{
    uint32_t before = 0;
    for (uint32_t first = 0; first < n_blocks; first += blockDim.x) {
        const uint32_t at = first + threadIdx.x;
        const uint32_t own = at < n_blocks ? static_cast<uint32_t>(__popcll(masks[at])) : 0;
        uint32_t sum = own; /* of the warp up to this lane */
        for (unsigned int distance = 1; distance < CUDA_WARP; distance *= 2) {
            const uint32_t other = __shfl_up_sync(CUDA_ALL_LANES, sum, distance);
            sum += cuda_lane() >= distance ? other : 0;
        }
        if (cuda_lane() == CUDA_WARP - 1)
            of_warps[threadIdx.x / CUDA_WARP] = sum;
        __syncthreads();
        uint32_t of_earlier = 0, of_all = 0;
        for (uint32_t warp = 0; warp < blockDim.x / CUDA_WARP; warp++) {
            of_earlier += warp < threadIdx.x / CUDA_WARP ? of_warps[warp] : 0;
            of_all += of_warps[warp];
        }
        if (at < n_blocks)
            offsets[at] = before + of_earlier + sum - own;
        before += of_all;
        __syncthreads();
    }
}

CUDA_HOT static __global__ void __launch_bounds__(256)
    finish(const struct cuda_selection_item *__restrict__ items, size_t stride, uint32_t group, uint32_t n_lanes,
           struct selection_work work)
{
    __shared__ struct finish_memory memory;
    const struct cuda_selection_item &item = items[blockIdx.y];
    selection_state *state = selection_state_of(item);
    const float threshold = state->threshold, *weights = selection_floats(item, work.w);
    uint64_t *masks = reinterpret_cast<uint64_t *>(selection_floats(item, work.masks));
    uint32_t n_kept = 0;
    for (uint32_t first = blockIdx.x * AT_ONCE; first < item.n_blocks; first += gridDim.x * AT_ONCE) {
        const uint32_t n = min(item.n_blocks - first, AT_ONCE);
        look_at(item, weights, threshold, first, n_lanes, group, stride, &memory);
        __syncthreads();
        if (threadIdx.x < n) {
            const uint64_t mask = memory.masks[threadIdx.x];
            item.masks[first + threadIdx.x] = mask;
            if (item.weights)
                masks[first + threadIdx.x] = mask;
            n_kept += static_cast<uint32_t>(__popcll(mask));
        }
        for (uint32_t at = threadIdx.x; item.masses && at < group * AT_ONCE; at += blockDim.x)
            if (at % AT_ONCE < n)
                item.masses[static_cast<size_t>(at / AT_ONCE) * item.n_blocks + first + at % AT_ONCE] =
                    memory.masses[at / AT_ONCE][at % AT_ONCE];
        __syncthreads();
    }
    if (threadIdx.x < CUDA_WARP) {
        n_kept = __reduce_add_sync(CUDA_ALL_LANES, n_kept);
        if (threadIdx.x == 0 && n_kept)
            atomicAdd(&state->n_kept, n_kept);
    }
    if (!selection_is_last(&state->finished, gridDim.x, &memory.is_last))
        return;
    if (threadIdx.x == 0)
        *item.n_kept = atomicAdd(&state->n_kept, 0u);
    if (item.weights)
        count(masks, item.n_blocks, reinterpret_cast<uint32_t *>(selection_floats(item, work.offsets)),
              memory.of_warps);
}

static __global__ void __launch_bounds__(1024)
    gather(const struct cuda_selection_item *__restrict__ items, size_t stride, uint32_t group, uint32_t n_lanes,
           struct selection_work work)
{
    const struct cuda_selection_item item = items[blockIdx.y];
    if (!item.weights)
        return;
    const uint32_t *offsets = reinterpret_cast<const uint32_t *>(selection_floats(item, work.offsets));
    const uint64_t *masks = reinterpret_cast<const uint64_t *>(selection_floats(item, work.masks));
    const uint32_t n_warps = gridDim.x * blockDim.x / CUDA_WARP;
    for (uint32_t at = (blockIdx.x * blockDim.x + threadIdx.x) / CUDA_WARP; at < item.n_blocks; at += n_warps) {
        const uint64_t mask = masks[at];
        const uint32_t block = selection_block_at(at, item.n_blocks, n_lanes);
        for (uint32_t j = cuda_lane(); j < PASSES_BLOCK_TOKENS; j += CUDA_WARP) {
            const uint64_t before = mask & ((static_cast<uint64_t>(1) << j) - 1);
            const size_t to = offsets[at] + static_cast<uint32_t>(__popcll(before));
            if (!(mask >> j & 1) || to >= item.weights_stride)
                continue;
            for (uint32_t head = 0; head < group; head++)
                item.weights[head * item.weights_stride + to] =
                    item.scores[head * stride + static_cast<size_t>(block) * PASSES_BLOCK_TOKENS + j];
        }
    }
}

cudaError_t cuda_selection_finish(const struct cuda_queue *queue, const struct cuda_selection *selection,
                                  const struct cuda_selection_item *items, uint32_t n_items)
{
    const struct selection_work work = selection_work_of(selection);
    const unsigned int n_threads = queue->n_threads ? queue->n_threads : 256;
    CUDA_LAUNCH(finish, dim3(selection_grid(selection->most_blocks, AT_ONCE), n_items), n_threads, 0, queue->stream)
    (items, selection->stride, selection->group, selection->n_lanes, work);
    if (selection->weights)
        CUDA_LAUNCH(gather, dim3(selection_grid(selection->most_blocks, n_threads / CUDA_WARP), n_items), n_threads, 0,
                    queue->stream)
    (items, selection->stride, selection->group, selection->n_lanes, work);
    return cudaGetLastError();
}
