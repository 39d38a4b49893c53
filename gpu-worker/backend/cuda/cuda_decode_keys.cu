/*
 * cuda_decode_keys.cu - K of rows as the value-stores have them -> f32, to the bit as decode_keys() of kernels/.
 *
 * Grid       a thread a number, 256 threads a block (any whole warps), at most 65535 blocks. No shared memory.
 * Algorithm  f16 widened; q8_0: integer times the scale of its group of 32. Rows are those of a cache of rows, or their K alone: as
 *            long as `row_bytes`, scales at `scales_at`. Bytes: K once, the numbers written.
 */
#include "gpu-worker/backend/cuda/cuda_keys.h"

#include "gpu-worker/backend/cuda/cuda_keys.cuh"

CUDA_HOT static __global__ void __launch_bounds__(1024)
    decode_keys(float *__restrict__ keys, struct cuda_key_rows rows, size_t n, uint32_t head_dim)
{
    for (size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < n;
         i += static_cast<size_t>(gridDim.x) * blockDim.x)
        keys[i] = cuda_key_number(static_cast<const uint8_t *>(rows.rows) + i / head_dim * rows.row_bytes, rows.codec,
                                  rows.scales_at, static_cast<uint32_t>(i % head_dim));
}

cudaError_t cuda_decode_keys(const struct cuda_queue *queue, const struct cuda_key_rows *rows, size_t n_rows,
                             uint32_t head_dim, float *keys)
{
    const unsigned int n_threads = queue->n_threads ? queue->n_threads : 256;
    const size_t n = n_rows * head_dim, n_blocks = (n + n_threads - 1) / n_threads;
    if (!n)
        return cudaSuccess;
    CUDA_LAUNCH(decode_keys, (n_blocks < 65535 ? static_cast<unsigned int>(n_blocks) : 65535u), n_threads, 0,
                queue->stream)
    (keys, *rows, n, head_dim);
    return cudaGetLastError();
}
