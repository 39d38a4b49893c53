/*
 * cuda_selection_finish.cu - selection, third part: masks, masses of what is not selected, how many are, and their weights.
 *
 * Launches   finish: x: blocks of tokens, half a warp a block; y: items; 256 threads (32 .. 256). Where weights are asked for:
 *            count (an item a block, 256 threads: where each block's weights begin) and gather (a warp a block of tokens).
 * Algorithm  a mask of 64 tokens is put together from four ballots; masses are summed in the order of passes_loops.h.
 *            Bytes: weights and exponentials once, masks and masses written.
 */
#include "gpu-worker/backend/cuda/cuda_selection.cuh"

#define COUNT_THREADS 256u

CUDA_HOT static __global__ void __launch_bounds__(256) finish(const struct cuda_selection_item *__restrict__ items,
                                                              size_t stride, uint32_t group, struct selection_work work)
{
    const struct cuda_selection_item item = items[blockIdx.y];
    const float threshold = selection_state_of(item)->threshold, *weights = selection_floats(item, work.w);
    const uint32_t half = cuda_lane() / 16, lane = cuda_lane() % 16, n_warps = gridDim.x * blockDim.x / CUDA_WARP;
    uint32_t n_kept = 0;
    for (uint32_t first = (blockIdx.x * blockDim.x + threadIdx.x) / CUDA_WARP * 2; first < item.n_blocks;
         first += 2 * n_warps) {
        const uint32_t block = min(first + half, item.n_blocks - 1); /* an odd last one twice */
        const bool is_there = first + half < item.n_blocks;
        const size_t at = static_cast<size_t>(block) * PASSES_BLOCK_TOKENS + lane;
        bool is_below[4];
        uint64_t below = 0;
#pragma unroll
        for (uint32_t k = 0; k < 4; k++) {
            is_below[k] = weights[at + k * PASSES_LANES] < threshold;
            const uint32_t both = __ballot_sync(CUDA_ALL_LANES, is_below[k]);
            below |= static_cast<uint64_t>(both >> 16 * half & 0xffffu) << 16 * k;
        }
        const uint64_t mask =
            ~below & (block == 0 ? ~static_cast<uint64_t>(0) << SELECTION_SINKS : ~static_cast<uint64_t>(0));
        if (lane == 0 && is_there) {
            item.masks[block] = mask;
            n_kept += static_cast<uint32_t>(__popcll(mask));
        }
        for (uint32_t head = 0; item.masses && head < group; head++) {
            const float *e = item.scores + head * stride + at;
            float part[4];
#pragma unroll
            for (uint32_t k = 0; k < 4; k++)
                part[k] = is_below[k] ? e[k * PASSES_LANES] : 0.0f;
            const float mass = selection_sum((part[0] + part[1]) + (part[2] + part[3]));
            if (lane == 0 && is_there)
                item.masses[static_cast<size_t>(head) * item.n_blocks + block] = mass;
        }
    }
    if (n_kept)
        atomicAdd(item.n_kept, n_kept);
}

/* offsets [n_blocks]: how many are selected in the blocks before. */
static __global__ void __launch_bounds__(COUNT_THREADS)
    count(const struct cuda_selection_item *__restrict__ items, struct selection_work work)
{
    __shared__ uint32_t of_warps[COUNT_THREADS / CUDA_WARP];
    const struct cuda_selection_item item = items[blockIdx.x];
    uint32_t *offsets = reinterpret_cast<uint32_t *>(selection_floats(item, work.offsets)), before = 0;
    if (!item.weights)
        return;
    for (uint32_t first = 0; first < item.n_blocks; first += COUNT_THREADS) {
        const uint32_t block = first + threadIdx.x;
        const uint32_t own = block < item.n_blocks ? static_cast<uint32_t>(__popcll(item.masks[block])) : 0;
        uint32_t sum = own; /* of the warp up to this lane */
        for (unsigned int distance = 1; distance < CUDA_WARP; distance *= 2) {
            const uint32_t other = __shfl_up_sync(CUDA_ALL_LANES, sum, distance);
            sum += cuda_lane() >= distance ? other : 0;
        }
        if (cuda_lane() == CUDA_WARP - 1)
            of_warps[threadIdx.x / CUDA_WARP] = sum;
        __syncthreads();
        uint32_t of_earlier = 0, of_all = 0;
        for (uint32_t warp = 0; warp < COUNT_THREADS / CUDA_WARP; warp++) {
            of_earlier += warp < threadIdx.x / CUDA_WARP ? of_warps[warp] : 0;
            of_all += of_warps[warp];
        }
        if (block < item.n_blocks)
            offsets[block] = before + of_earlier + sum - own;
        before += of_all;
        __syncthreads();
    }
}

static __global__ void __launch_bounds__(1024) gather(const struct cuda_selection_item *__restrict__ items,
                                                      size_t stride, uint32_t group, struct selection_work work)
{
    const struct cuda_selection_item item = items[blockIdx.y];
    const uint32_t *offsets = reinterpret_cast<const uint32_t *>(selection_floats(item, work.offsets));
    const uint32_t n_warps = gridDim.x * blockDim.x / CUDA_WARP;
    for (uint32_t block = (blockIdx.x * blockDim.x + threadIdx.x) / CUDA_WARP; item.weights && block < item.n_blocks;
         block += n_warps)
        for (uint32_t j = cuda_lane(); j < PASSES_BLOCK_TOKENS; j += CUDA_WARP) {
            const uint64_t mask = item.masks[block], before = mask & ((static_cast<uint64_t>(1) << j) - 1);
            const size_t to = offsets[block] + static_cast<uint32_t>(__popcll(before));
            if (!(mask >> j & 1) || to >= item.weights_stride)
                continue;
            for (uint32_t head = 0; head < group; head++)
                item.weights[head * item.weights_stride + to] =
                    item.scores[head * stride + static_cast<size_t>(block) * PASSES_BLOCK_TOKENS + j];
        }
}

cudaError_t cuda_selection_finish(const struct cuda_queue *queue, const struct cuda_selection *selection,
                                  const struct cuda_selection_item *items, uint32_t n_items)
{
    const struct selection_work work = selection_work_of(selection);
    const unsigned int n_threads = queue->n_threads ? queue->n_threads : 256;
    CUDA_LAUNCH(finish, dim3(selection_grid(selection->most_blocks, n_threads / 16), n_items), n_threads, 0,
                queue->stream)
    (items, selection->stride, selection->group, work);
    CUDA_LAUNCH(count, n_items, COUNT_THREADS, 0, queue->stream)(items, work);
    CUDA_LAUNCH(gather, dim3(selection_grid(selection->most_blocks, n_threads / CUDA_WARP), n_items), n_threads, 0,
                queue->stream)
    (items, selection->stride, selection->group, work);
    return cudaGetLastError();
}
