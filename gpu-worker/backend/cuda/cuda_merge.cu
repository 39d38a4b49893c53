/*
 * cuda_merge.cu - what the stores found, merged into the worker's own partials, and attention's output of them.
 *
 * Grid       x: query heads of all items, one a warp; 128 threads. No shared memory.
 * Algorithm  a lane keeps every 32nd number of the partials of all lanes of a session in registers: all of them are asked for
 *            before the first is waited for, so that partials in host memory cost one way over the link, and cross it once.
 *            Then as merge_parts() and partial_finish() of kernels/plain.c, lane by lane in order, to the bit (exponentials in
 *            double precision, one a merge).
 *            Bytes: 4 (2 + head_dim) of each partial that there is, read once.
 */
#include "gpu-worker/backend/cuda/cuda_ops.h"

#include "gpu-worker/backend/cuda/cuda.cuh"

#define MAX_DIM 256u

/* head_dim <= 32 n_dims */
template <uint32_t n_dims>
CUDA_HOT static __global__ void __launch_bounds__(256)
    merge(const struct backend_merge *__restrict__ items, uint32_t n_items, uint32_t group, uint32_t head_dim)
{
    const uint32_t index = blockIdx.x * (blockDim.x / CUDA_WARP) + threadIdx.x / CUDA_WARP, lane = cuda_lane();
    if (index / group >= n_items)
        return; /* the whole warp */
    const struct backend_merge *item = items + index / group;
    const size_t at = static_cast<size_t>(index % group) * (2 + head_dim);

    float max[BACKEND_N_LANES], sum[BACKEND_N_LANES], out[BACKEND_N_LANES][n_dims];
#pragma unroll
    for (uint32_t l = 0; l < BACKEND_N_LANES; l++) {
        const float *from = item->from[l];
        max[l] = -INFINITY;
        sum[l] = 0;
        if (from) {
            max[l] = from[at];
            sum[l] = from[at + 1];
        }
#pragma unroll
        for (uint32_t k = 0; k < n_dims; k++) {
            const uint32_t d = lane + CUDA_WARP * k;
            out[l][k] = from && d < head_dim ? from[at + 2 + d] : 0.0f;
        }
    }
    float *partial = item->partials + at;
    float into_max = partial[0], into_sum = partial[1], into[n_dims];
#pragma unroll
    for (uint32_t k = 0; k < n_dims; k++)
        into[k] = lane + CUDA_WARP * k < head_dim ? partial[2 + lane + CUDA_WARP * k] : 0.0f;
    __syncwarp(); /* all have read what some write */

#pragma unroll
    for (uint32_t l = 0; l < BACKEND_N_LANES; l++) {
        if (max[l] == -INFINITY)
            continue;
        /* an empty one becomes what comes, whatever it held; the larger maximum's factor is exactly 1 */
        const bool is_empty = into_max == -INFINITY, keeps = into_max >= max[l];
        const float factor = static_cast<float>(keeps ? exp(static_cast<double>(max[l]) - into_max)
                                                      : exp(static_cast<double>(into_max) - max[l]));
        const float ours = keeps ? 1.0f : factor, theirs = keeps ? factor : 1.0f;
        into_max = keeps ? into_max : max[l];
        into_sum = is_empty ? sum[l] : into_sum * ours + sum[l] * theirs;
#pragma unroll
        for (uint32_t k = 0; k < n_dims; k++)
            into[k] = is_empty ? out[l][k] : into[k] * ours + out[l][k] * theirs;
    }

    if (lane < 2)
        partial[lane] = lane ? into_sum : into_max;
    float *to = item->out + static_cast<size_t>(index % group) * head_dim;
#pragma unroll
    for (uint32_t k = 0; k < n_dims; k++) {
        const uint32_t d = lane + CUDA_WARP * k;
        if (d < head_dim) {
            partial[2 + d] = into[k];
            to[d] = __fdiv_rn(into[k], into_sum);
        }
    }
}

cudaError_t cuda_merge(const struct cuda_queue *queue, const struct backend_merge *items, uint32_t n_items,
                       uint32_t group, uint32_t head_dim)
{
    if (!n_items || !group)
        return cudaSuccess;
    if (!head_dim || head_dim > MAX_DIM || queue->n_threads > 256)
        return cudaErrorInvalidValue;
    const unsigned int n_threads = queue->n_threads ? queue->n_threads : 128;
    const unsigned int grid = cuda_blocks(static_cast<size_t>(n_items) * group, n_threads / CUDA_WARP);
    if (head_dim <= 64)
        CUDA_LAUNCH((merge<2>), grid, n_threads, 0, queue->stream)(items, n_items, group, head_dim);
    else if (head_dim <= 128)
        CUDA_LAUNCH((merge<4>), grid, n_threads, 0, queue->stream)(items, n_items, group, head_dim);
    else
        CUDA_LAUNCH((merge<8>), grid, n_threads, 0, queue->stream)(items, n_items, group, head_dim);
    return cudaGetLastError();
}
