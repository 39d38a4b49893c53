/*
 * cuda_elementwise.cu - operations on one number at a time: the gate of the FFN, the residual's sum.
 *
 * Grid       at most 65535 blocks of 256 threads (any whole warps), each thread every (grid x block)-th number. No shared memory.
 *            Bound by memory: swiglu and add read two numbers and write one.
 */
#include "gpu-worker/backend/cuda/cuda_ops.h"

#include "gpu-worker/backend/cuda/cuda.cuh"

static __device__ __forceinline__ size_t first_index()
{
    return static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}

static __device__ __forceinline__ size_t index_step()
{
    return static_cast<size_t>(gridDim.x) * blockDim.x;
}

CUDA_HOT static __global__ void __launch_bounds__(1024) swiglu(float *gate, const float *__restrict__ up, size_t n)
{
    for (size_t i = first_index(); i < n; i += index_step()) {
        const float x = gate[i];
        gate[i] = x / (1.0f + expf(-x)) * up[i];
    }
}

CUDA_HOT static __global__ void __launch_bounds__(1024) add(float *x, const float *__restrict__ y, size_t n)
{
    for (size_t i = first_index(); i < n; i += index_step())
        x[i] += y[i];
}

static unsigned int grid_of(size_t n, unsigned int n_threads)
{
    const size_t n_blocks = (n + n_threads - 1) / n_threads;
    return static_cast<unsigned int>(n_blocks < 65535 ? n_blocks : 65535);
}

cudaError_t cuda_swiglu(const struct cuda_queue *queue, float *gate, const float *up, size_t n)
{
    if (!n)
        return cudaSuccess;
    const unsigned int n_threads = queue->n_threads ? queue->n_threads : 256;
    CUDA_LAUNCH(swiglu, grid_of(n, n_threads), n_threads, 0, queue->stream)(gate, up, n);
    return cudaGetLastError();
}

cudaError_t cuda_add(const struct cuda_queue *queue, float *x, const float *y, size_t n)
{
    if (!n)
        return cudaSuccess;
    const unsigned int n_threads = queue->n_threads ? queue->n_threads : 256;
    CUDA_LAUNCH(add, grid_of(n, n_threads), n_threads, 0, queue->stream)(x, y, n);
    return cudaGetLastError();
}
