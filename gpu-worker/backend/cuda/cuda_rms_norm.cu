/*
 * cuda_rms_norm.cu - root mean square normalisation.
 *
 * Grid       one block a token; 256 threads (64 .. 1024, whole warps). Shared memory: 128 bytes.
 * Algorithm  each thread sums the squares of every blockDim-th number, the block adds them up, each thread scales its own.
 *            Bytes: x is read twice (the second time from cache) and written once.
 */
#include "gpu-worker/backend/cuda/cuda_ops.h"

#include "gpu-worker/backend/cuda/cuda.cuh"

/* x and out may be the same */
CUDA_HOT static __global__ void __launch_bounds__(1024)
    rms_norm(const float *x, uint32_t n, const float *__restrict__ weight, float eps, float *out)
{
    __shared__ float scratch[32];
    x += static_cast<size_t>(blockIdx.x) * n;
    out += static_cast<size_t>(blockIdx.x) * n;
    float sum = 0;
    for (uint32_t i = threadIdx.x; i < n; i += blockDim.x)
        sum = fmaf(x[i], x[i], sum);
    sum = cuda_block_sum(sum, scratch);
    const float scale = 1.0f / sqrtf(sum / static_cast<float>(n) + eps);
    for (uint32_t i = threadIdx.x; i < n; i += blockDim.x)
        out[i] = x[i] * scale * weight[i];
}

cudaError_t cuda_rms_norm(const struct cuda_queue *queue, const float *x, uint32_t n_tokens, uint32_t n,
                          const float *weight, float eps, float *out)
{
    if (!n_tokens || !n)
        return cudaSuccess;
    const unsigned int n_threads = queue->n_threads ? queue->n_threads : 256;
    CUDA_LAUNCH(rms_norm, n_tokens, n_threads, 0, queue->stream)(x, n, weight, eps, out);
    return cudaGetLastError();
}
