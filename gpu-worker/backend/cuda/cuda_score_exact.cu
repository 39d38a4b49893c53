/*
 * cuda_score_exact.cu - scores of the exact set's tokens for selector mass, to the bit as score_exact() of step_select.c.
 *
 * Grid       x: query heads, y: items; 256 threads (any whole warps). Shared memory: 1 KiB.
 * Algorithm  a thread a token, dimension by dimension in order; the tokens of all pieces are numbered one after the other, a thread
 *            finds its own by counting bits: there are four pieces or so. Sums of at most 256 tokens, each a row that the cache has
 *            had for the partial of the exact set.
 */
#include "gpu-worker/backend/cuda/cuda_keys.h"

#include "gpu-worker/backend/cuda/cuda_keys.cuh"

/* Bit number `n` of those that are set; there are more. */
static __device__ __forceinline__ uint32_t bit_of(uint64_t mask, uint32_t n)
{
    uint32_t at = 0;
#pragma unroll
    for (uint32_t width = 32; width; width /= 2) {
        const uint32_t lower = static_cast<uint32_t>(__popcll(mask >> at & ((static_cast<uint64_t>(1) << width) - 1)));
        if (n >= lower) {
            n -= lower;
            at += width;
        }
    }
    return at;
}

CUDA_HOT static __global__ void __launch_bounds__(1024)
    score_exact(const struct cuda_exact_item *__restrict__ items, uint32_t head_dim, struct cuda_key_rows rows,
                float scale, size_t stride)
{
    __shared__ float q[KERNELS_MAX_HEAD_DIM];
    const struct cuda_exact_item item = items[blockIdx.y];
    for (uint32_t i = threadIdx.x; i < head_dim; i += blockDim.x)
        q[i] = item.q[static_cast<size_t>(blockIdx.x) * head_dim + i];
    __syncthreads();
    for (uint32_t token = threadIdx.x; token < item.n_tokens; token += blockDim.x) {
        uint32_t before = 0, p = 0, n = 0;
        for (; p < item.n_pieces; before += n, p++) {
            n = static_cast<uint32_t>(__popcll(item.pieces[p].mask));
            if (token < before + n)
                break;
        }
        if (p == item.n_pieces)
            break;
        const uint8_t *row = static_cast<const uint8_t *>(item.pieces[p].rows) +
                             bit_of(item.pieces[p].mask, token - before) * rows.row_bytes;
        float sum = 0;
        for (uint32_t i = 0; i < head_dim; i++)
            sum += q[i] * cuda_key_number(row, rows.codec, rows.scales_at, i);
        item.scores[blockIdx.x * stride + token] = sum * scale;
    }
}

cudaError_t cuda_score_exact(const struct cuda_queue *queue, const struct cuda_exact_item *items, uint32_t n_items,
                             uint32_t group, uint32_t head_dim, const struct cuda_key_rows *rows, float scale,
                             size_t stride)
{
    if (head_dim > KERNELS_MAX_HEAD_DIM)
        return cudaErrorInvalidValue;
    if (!n_items || !group || !head_dim)
        return cudaSuccess;
    CUDA_LAUNCH(score_exact, dim3(group, n_items), (queue->n_threads ? queue->n_threads : 256), 0, queue->stream)
    (items, head_dim, *rows, scale, stride);
    return cudaGetLastError();
}
