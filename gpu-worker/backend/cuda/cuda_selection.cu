/*
 * cuda_selection.cu - selection, first part: softmax over old tokens and the exact set, weights.
 *
 * Launches   exponentials: x: tokens, y: query heads, z: items; 256 threads (any whole warps). weigh: x: tokens, y: items. Shared
 *            memory: 4 bytes.
 * Algorithm  the sums of passes_loops.h in its order: half a warp adds up a run of 16 blocks in 16 lanes; the last block of a query
 *            head adds the runs one after the other (at 4M tokens 4096 of them: some 20 us, all heads side by side). The largest
 *            scores came with the scores, the largest weight by atomics, which no order changes.
 *            Bytes: scores read and written once; exponentials read once and weights written.
 */
#include "gpu-worker/backend/cuda/cuda_selection.cuh"

#define NO_SCORE (-INFINITY)
#define AT_ONCE  4u /* blocks of a run */

/* The float that cuda_keys_order() made this of. */
static __device__ __forceinline__ float selection_unorder(uint32_t order)
{
    return order == 0 ? NO_SCORE : __uint_as_float(order & 0x80000000u ? order & 0x7fffffffu : ~order);
}

/* exp_of_negative() of passes_loops.h. */
static __device__ __forceinline__ float exp_of_negative(float x)
{
    const float shifted = fmaf(x, 1.44269504f, 0x1.8p23f), whole = shifted - 0x1.8p23f;
    float r = fmaf(whole, -0.693147182f, x);
    r = fmaf(whole, 1.90465429e-9f, r);
    float p = fmaf(0.0013926184f, r, 0.00836317893f);
    p = fmaf(p, r, 0.0416665561f);
    p = fmaf(p, r, 0.166665763f);
    p = fmaf(p, r, 0.5f);
    const float y = fmaf(p, r * r, r) + 1.0f;
    return -87.3365402f < x ? __uint_as_float(__float_as_uint(y) + (__float_as_uint(shifted) << 23)) : 0.0f;
}

/* Largest score of a query head over old tokens and exact set, finite where it is not -infinity. */
static __device__ __forceinline__ float reference_of(const struct cuda_selection_item &item, uint32_t head,
                                                     uint32_t head_dim)
{
    const float largest = selection_unorder(selection_largest(item)[head]);
    return fminf(fmaxf(largest, item.exact[static_cast<size_t>(head) * KERNELS_PARTIAL_FLOATS(head_dim)]), FLT_MAX);
}

/*
 * What the exponentials of a query head are divided by: their sum, run by run in order, and the exact set's. Both halves of the
 * first warp do the same; the exact set's own exponentials (mass only) are everyone's.
 */
static __device__ __forceinline__ void total(const struct cuda_selection_item &item, uint32_t group, uint32_t head_dim,
                                             size_t exact_stride, float divisor, const struct selection_work &work)
{
    const uint32_t head = blockIdx.y, n_runs = (item.n_blocks + PASSES_LANES - 1) / PASSES_LANES;
    const float *partial = item.exact + static_cast<size_t>(head) * KERNELS_PARTIAL_FLOATS(head_dim);
    const float reference = reference_of(item, head, head_dim);
    float *exact = selection_floats(item, work.exact) + static_cast<size_t>(head) * CUDA_SELECTION_MAX_EXACT;
    const uint32_t n_exact = (item.n_exact + PASSES_BLOCK_TOKENS - 1) / PASSES_BLOCK_TOKENS * PASSES_BLOCK_TOKENS;
    for (uint32_t i = threadIdx.x; i < n_exact; i += blockDim.x) {
        float e = 0;
        if (i < item.n_exact && reference > NO_SCORE)
            e = exp_of_negative(fminf(item.exact_scores[head * exact_stride + i], reference) - reference);
        exact[i] = e;
    }
    if (threadIdx.x >= CUDA_WARP)
        return;
    float sum = selection_sum(
        selection_serial_sum(selection_floats(item, work.runs) + static_cast<size_t>(head) * work.n_runs * PASSES_LANES,
                             n_runs * PASSES_LANES, cuda_lane() % PASSES_LANES));
    if (threadIdx.x != 0)
        return;
    if (reference > NO_SCORE) { /* an empty partial gives NaN */
        const float of_exact =
            partial[1] * static_cast<float>(exp(static_cast<double>(fminf(partial[0], FLT_MAX) - reference)));
        sum += of_exact > 0 ? of_exact : 0;
    }
    selection_factors(item, group)[head] = sum > 0 ? 1.0f / (sum * divisor) : 0;
    if (item.references)
        item.references[head] = reference;
}

/* Scores to exponentials; half a warp for each run of 16 blocks. The last block of a query head adds up. */
CUDA_HOT static __global__ void __launch_bounds__(1024)
    exponentials(const struct cuda_selection_item *__restrict__ items, size_t stride, uint32_t group, uint32_t head_dim,
                 size_t exact_stride, float divisor, struct selection_work work)
{
    __shared__ uint32_t is_last;
    const struct cuda_selection_item item = items[blockIdx.z];
    const float reference = reference_of(item, blockIdx.y, head_dim);
    float *scores = item.scores + blockIdx.y * stride;
    const uint32_t n_runs = (item.n_blocks + PASSES_LANES - 1) / PASSES_LANES, lane = threadIdx.x % PASSES_LANES;
    for (uint32_t run = (blockIdx.x * blockDim.x + threadIdx.x) / PASSES_LANES; run < n_runs;
         run += gridDim.x * blockDim.x / PASSES_LANES) {
        float sum = 0;
        for (uint32_t first = run * PASSES_LANES; first < (run + 1) * PASSES_LANES; first += AT_ONCE) {
            float e[AT_ONCE][4]; /* all are asked for before any is written: a context of few runs waits for memory */
#pragma unroll
            for (uint32_t b = 0; b < AT_ONCE; b++)
#pragma unroll
                for (uint32_t k = 0; k < 4; k++)
                    e[b][k] = scores[min(first + b, item.n_blocks - 1) * PASSES_BLOCK_TOKENS + k * PASSES_LANES + lane];
#pragma unroll
            for (uint32_t b = 0; b < AT_ONCE; b++) {
                const uint32_t at = (first + b) * PASSES_BLOCK_TOKENS + lane;
#pragma unroll
                for (uint32_t k = 0; k < 4; k++) {
                    const float score = e[b][k];
                    e[b][k] = exp_of_negative((score > FLT_MAX ? FLT_MAX : score) - reference);
                    if (at + k * PASSES_LANES < SELECTION_SINKS || !(reference > NO_SCORE)) /* no token has a weight */
                        e[b][k] = 0;
                    if (first + b < item.n_blocks)
                        scores[at + k * PASSES_LANES] = e[b][k];
                }
                if (first + b < item.n_blocks)
                    sum += (e[b][0] + e[b][1]) + (e[b][2] + e[b][3]);
            }
        }
        selection_floats(item, work.runs)[(static_cast<size_t>(blockIdx.y) * work.n_runs + run) * PASSES_LANES + lane] =
            sum;
    }
    uint32_t *came = reinterpret_cast<uint32_t *>(selection_factors(item, group) + group);
    if (selection_is_last(&came[blockIdx.y], gridDim.x, &is_last))
        total(item, group, head_dim, exact_stride, divisor, work);
}

/* Mean, or root mean square, over the query heads; the exact set's tokens (mass only) follow the old ones. */
template <int selector>
CUDA_HOT static __global__ void __launch_bounds__(1024) weigh(const struct cuda_selection_item *__restrict__ items,
                                                              size_t stride, uint32_t group, struct selection_work work)
{
    const struct cuda_selection_item item = items[blockIdx.y];
    const float *factors = selection_factors(item, group);
    const uint32_t n_old = item.n_blocks * PASSES_BLOCK_TOKENS;
    const uint32_t n_exact = (item.n_exact + PASSES_BLOCK_TOKENS - 1) / PASSES_BLOCK_TOKENS * PASSES_BLOCK_TOKENS;
    const float *exact = selection_floats(item, work.exact);
    float *w = selection_floats(item, work.w), top = 0;
    for (uint32_t j = blockIdx.x * blockDim.x + threadIdx.x; j < n_old + n_exact; j += gridDim.x * blockDim.x) {
        const float *from = j < n_old ? item.scores + j : exact + (j - n_old);
        const size_t step = j < n_old ? stride : CUDA_SELECTION_MAX_EXACT;
        float sum = 0;
        for (uint32_t head = 0; head < group; head++) {
            const float factor = factors[head], e = from[head * step];
            if constexpr (selector == POLICY_SELECTOR_L2) {
                const float scaled = e * (factor * PASSES_BEFORE_SQUARE);
                sum = fmaf(scaled, scaled, sum);
            } else {
                sum = fmaf(e, factor, sum);
            }
        }
        if constexpr (selector == POLICY_SELECTOR_L2)
            sum = sqrtf(sum) * (1.0f / PASSES_BEFORE_SQUARE);
        if (j < n_old)
            top = fmaxf(top, sum);
        /* sinks are above every threshold: no part of any sum over the unselected */
        w[j] = selector != POLICY_SELECTOR_MASS && j < SELECTION_SINKS ? INFINITY : sum;
    }
    top = cuda_warp_max(top);
    if (cuda_lane() == 0 && top > 0)
        atomicMax(&selection_state_of(item)->top, __float_as_uint(top));
}

size_t cuda_selection_work_bytes(const struct cuda_selection *selection)
{
    return selection_work_of(selection).n_bytes;
}

size_t cuda_selection_state_bytes(uint32_t group)
{
    return (sizeof(selection_state) + 3 * static_cast<size_t>(group) * sizeof(uint32_t) + 15) / 16 * 16;
}

uint32_t *cuda_selection_largest(void *state)
{
    return reinterpret_cast<uint32_t *>(static_cast<selection_state *>(state) + 1);
}

size_t cuda_selection_weights_offset(const struct cuda_selection *selection)
{
    return selection_work_of(selection).w;
}

cudaError_t cuda_selection_weigh(const struct cuda_queue *queue, const struct cuda_selection *selection,
                                 const struct cuda_selection_item *items, uint32_t n_items)
{
    const struct selection_work work = selection_work_of(selection);
    const size_t n_tokens = static_cast<size_t>(selection->most_blocks) * PASSES_BLOCK_TOKENS,
                 stride = selection->stride;
    const unsigned int n_threads = queue->n_threads ? queue->n_threads : 256;
    const uint32_t group = selection->group, head_dim = selection->head_dim;
    const float of_group = static_cast<float>(group);
    CUDA_LAUNCH(exponentials, dim3(selection_grid(work.n_runs, n_threads / PASSES_LANES), group, n_items), n_threads, 0,
                queue->stream)
    (items, stride, group, head_dim, selection->exact_stride,
     selection->selector == POLICY_SELECTOR_L2 ? sqrtf(of_group) : of_group, work);
    const dim3 grid(selection_grid(n_tokens + CUDA_SELECTION_MAX_EXACT, n_threads), n_items);
    if (selection->selector == POLICY_SELECTOR_L2)
        CUDA_LAUNCH((weigh<POLICY_SELECTOR_L2>), grid, n_threads, 0, queue->stream)(items, stride, group, work);
    else if (selection->selector == POLICY_SELECTOR_MASS)
        CUDA_LAUNCH((weigh<POLICY_SELECTOR_MASS>), grid, n_threads, 0, queue->stream)(items, stride, group, work);
    else
        CUDA_LAUNCH((weigh<POLICY_SELECTOR_DEVIATION>), grid, n_threads, 0, queue->stream)(items, stride, group, work);
    return cudaGetLastError();
}

cudaError_t cuda_selection_run(const struct cuda_queue *queue, const struct cuda_selection *selection,
                               const struct cuda_selection_item *items, uint32_t n_items)
{
    if (selection->selector == POLICY_SELECTOR_FULL || !selection->group ||
        selection->group > CUDA_SELECTION_MAX_GROUP || !selection->n_lanes)
        return cudaErrorInvalidValue;
    if (!n_items || !selection->most_blocks)
        return cudaSuccess;
    cudaError_t error = cuda_selection_weigh(queue, selection, items, n_items);
    if (error == cudaSuccess)
        error = cuda_selection_search(queue, selection, items, n_items);
    if (error == cudaSuccess)
        error = cuda_selection_finish(queue, selection, items, n_items);
    return error;
}
