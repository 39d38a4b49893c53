/*
 * cuda_prefill_query.cu - the two ends of prefill attention: queries by KV head, states that are empty, outputs by position.
 *
 * Grid       x: numbers (or states), one a thread, 256 threads a block (any whole warps). No shared memory. Bytes: read and
 *            written once.
 */
#include "gpu-worker/backend/cuda/cuda_prefill_ops.h"

#include "gpu-worker/backend/cuda/cuda.cuh"

static __device__ __forceinline__ size_t thread_number()
{
    return static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}

/* Where the query of row `row` of [n][n_heads] is among those of all KV heads. */
static __device__ __forceinline__ size_t query_of(size_t row, uint32_t n, uint32_t n_heads, uint32_t group)
{
    const size_t position = row / n_heads, head = row % n_heads;
    return head / group * n * group + position * group + head % group;
}

static __global__ void __launch_bounds__(1024) empty(float *__restrict__ states, uint32_t stride, size_t n)
{
    const size_t i = thread_number();
    if (i < n * stride)
        states[i] = i % stride ? 0.0f : -INFINITY;
}

static __global__ void __launch_bounds__(1024) queries(const float *__restrict__ q, uint32_t n, uint32_t n_heads,
                                                       uint32_t group, uint32_t head_dim, float *__restrict__ out)
{
    const size_t i = thread_number();
    if (i < static_cast<size_t>(n) * n_heads * head_dim)
        out[query_of(i / head_dim, n, n_heads, group) * head_dim + i % head_dim] = q[i];
}

static __global__ void __launch_bounds__(1024)
    finish(const float *__restrict__ values, uint32_t values_stride, const float *__restrict__ sums,
           uint32_t sums_stride, uint32_t n, uint32_t n_heads, uint32_t group, uint32_t head_dim,
           float *__restrict__ out)
{
    const size_t i = thread_number();
    if (i >= static_cast<size_t>(n) * n_heads * head_dim)
        return;
    const size_t query = query_of(i / head_dim, n, n_heads, group);
    out[i] = __fdiv_rn(values[query * values_stride + i % head_dim], sums[query * sums_stride]);
}

static unsigned int threads_of(const struct cuda_queue *queue)
{
    return queue->n_threads ? queue->n_threads : 256;
}

cudaError_t cuda_prefill_empty(const struct cuda_queue *queue, float *states, uint32_t stride, size_t n)
{
    if (!n || !stride)
        return cudaSuccess;
    CUDA_LAUNCH(empty, cuda_blocks(n * stride, threads_of(queue)), threads_of(queue), 0, queue->stream)
    (states, stride, n);
    return cudaGetLastError();
}

cudaError_t cuda_prefill_queries(const struct cuda_queue *queue, const float *q, uint32_t n, uint32_t n_heads,
                                 uint32_t group, uint32_t head_dim, float *out)
{
    const size_t n_numbers = static_cast<size_t>(n) * n_heads * head_dim;
    if (!n_numbers)
        return cudaSuccess;
    CUDA_LAUNCH(queries, cuda_blocks(n_numbers, threads_of(queue)), threads_of(queue), 0, queue->stream)
    (q, n, n_heads, group, head_dim, out);
    return cudaGetLastError();
}

cudaError_t cuda_prefill_finish(const struct cuda_queue *queue, const float *values, uint32_t values_stride,
                                const float *sums, uint32_t sums_stride, uint32_t n, uint32_t n_heads, uint32_t group,
                                uint32_t head_dim, float *out)
{
    const size_t n_numbers = static_cast<size_t>(n) * n_heads * head_dim;
    if (!n_numbers)
        return cudaSuccess;
    CUDA_LAUNCH(finish, cuda_blocks(n_numbers, threads_of(queue)), threads_of(queue), 0, queue->stream)
    (values, values_stride, sums, sums_stride, n, n_heads, group, head_dim, out);
    return cudaGetLastError();
}
