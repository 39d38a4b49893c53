/*
 * cuda_quantize_f16.cu - keys of sealed blocks -> tiles of keys in half precision, to the byte as codec_f16.c; and queries for them.
 *
 * Grid       quantize: a block a tile; prepare: x: numbers of a KV head's queries, y: heads. 256 threads (any whole warps). No
 *            shared memory.
 * Algorithm  a thread a number; what is not finite becomes so. Bytes: the keys once.
 */
#include "gpu-worker/backend/cuda/cuda_keys.h"

#include "gpu-worker/backend/cuda/cuda_keys.cuh"

static __global__ void __launch_bounds__(1024)
    quantize_f16(const struct cuda_key_block *__restrict__ blocks, uint32_t head_dim)
{
    const struct cuda_key_block block = blocks[blockIdx.x];
    uint16_t *tile = static_cast<uint16_t *>(block.tile);
    for (uint32_t i = threadIdx.x; i < KEYS_OF_TILE * head_dim; i += blockDim.x) {
        const float key = block.keys[i], x = key == key ? key : 0.0f;
        const float finite = x > KEY_LARGEST ? KEY_LARGEST : x < -KEY_LARGEST ? -KEY_LARGEST : x;
        tile[i] = __half_as_ushort(__float2half_rn(finite));
    }
    if (threadIdx.x == 0)
        *block.side = 0;
}

static __global__ void __launch_bounds__(1024)
    prepare_f16(const struct cuda_key_query *__restrict__ queries, uint32_t n, float scale)
{
    const struct cuda_key_query head = queries[blockIdx.y];
    float *to = static_cast<float *>(head.query);
    for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < CUDA_KEY_F16_HEADER + n; i += gridDim.x * blockDim.x)
        to[i] = i == 0 ? scale : i < CUDA_KEY_F16_HEADER ? 0.0f : head.q[i - CUDA_KEY_F16_HEADER];
}

cudaError_t cuda_quantize_f16(const struct cuda_queue *queue, uint32_t head_dim, const struct cuda_key_block *blocks,
                              uint32_t n_blocks)
{
    if (head_dim == 0 || head_dim > KERNELS_MAX_HEAD_DIM)
        return cudaErrorInvalidValue;
    if (!n_blocks)
        return cudaSuccess;
    CUDA_LAUNCH(quantize_f16, n_blocks, (queue->n_threads ? queue->n_threads : 256), 0, queue->stream)
    (blocks, head_dim);
    return cudaGetLastError();
}

cudaError_t cuda_prepare_f16(const struct cuda_queue *queue, uint32_t head_dim, uint32_t n_queries, float scale,
                             const struct cuda_key_query *queries, uint32_t n_heads)
{
    if (!n_queries || !n_heads || !head_dim)
        return cudaSuccess;
    const unsigned int n_threads = queue->n_threads ? queue->n_threads : 256;
    const uint32_t n = n_queries * head_dim;
    CUDA_LAUNCH(prepare_f16, dim3(cuda_blocks(CUDA_KEY_F16_HEADER + n, n_threads), n_heads), n_threads, 0,
                queue->stream)
    (queries, n, scale);
    return cudaGetLastError();
}
