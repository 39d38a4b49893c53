/*
 * cuda_prefill_rows.cu - rows of spans brought together: as halves for cuBLAS, or as they are for cuda_attend.
 *
 * Grid       x: chunks of up to 64 tokens; y: KV heads. 256 threads (any whole warps), each number or pair of bytes by one.
 * Algorithm  decode: f16 is copied, q8_0 is int8 times the scale of its group, rounded to a half. Neighbouring threads read and
 *            write neighbouring numbers. Bytes: each row read once, 4 head_dim written.
 */
#include "gpu-worker/backend/cuda/cuda_prefill_ops.h"

#include "gpu-worker/backend/cuda/cuda.cuh"

#define ROW_GROUP    32u
#define LARGEST_HALF 65504.0f
#define MAX_GRID_Y   65535u

static __device__ __forceinline__ const uint8_t *row_of(const struct cuda_prefill_chunk &chunk, uint32_t head,
                                                        uint32_t token)
{
    return static_cast<const uint8_t *>(chunk.rows) + head * chunk.head_bytes + token * chunk.token_bytes;
}

/* Number d of K (part 0) or V (part 1) of a row: row_format.h of kernels/. A NaN stays one. */
template <bool q8_0>
static __device__ __forceinline__ uint16_t half_of(const uint8_t *row, uint32_t head_dim, uint32_t part, uint32_t d)
{
    const uint16_t *halves = reinterpret_cast<const uint16_t *>(row);
    if constexpr (!q8_0)
        return halves[part * head_dim + d];
    const uint32_t n_groups = (head_dim + ROW_GROUP - 1) / ROW_GROUP;
    const float scale = __half2float(__ushort_as_half(halves[head_dim + part * n_groups + d / ROW_GROUP]));
    float number = static_cast<float>(static_cast<int8_t>(row[part * head_dim + d])) * scale;
    if (number > LARGEST_HALF)
        number = LARGEST_HALF;
    if (number < -LARGEST_HALF)
        number = -LARGEST_HALF;
    return __half_as_ushort(__float2half_rn(number));
}

template <bool q8_0>
static __global__ void __launch_bounds__(1024)
    decode(const struct cuda_prefill_chunk *__restrict__ chunks, uint32_t head_dim, uint16_t *__restrict__ keys,
           uint16_t *__restrict__ values)
{
    const struct cuda_prefill_chunk chunk = chunks[blockIdx.x];
    const size_t to = (static_cast<size_t>(blockIdx.y) * CUDA_PREFILL_PIECE + chunk.first) * head_dim;
    for (uint32_t i = threadIdx.x; i < chunk.n_tokens * 2 * head_dim; i += blockDim.x) {
        const uint32_t token = i / (2 * head_dim), part = i / head_dim % 2, d = i % head_dim;
        uint16_t bits = 0;
        if (chunk.rows)
            bits = half_of<q8_0>(row_of(chunk, blockIdx.y, token), head_dim, part, d);
        (part ? values : keys)[to + token * head_dim + d] = bits;
    }
}

/* rows have an even number of bytes, and are aligned to 2 */
static __global__ void __launch_bounds__(1024)
    gather(const struct cuda_prefill_chunk *__restrict__ chunks, uint32_t row_halves, uint16_t *__restrict__ rows)
{
    const struct cuda_prefill_chunk chunk = chunks[blockIdx.x];
    for (uint32_t i = threadIdx.x; i < chunk.n_tokens * row_halves; i += blockDim.x) {
        const uint32_t token = i / row_halves, at = chunk.first + token;
        const size_t row = (static_cast<size_t>(at / 64) * gridDim.y + blockIdx.y) * 64 + at % 64;
        rows[row * row_halves + i % row_halves] =
            reinterpret_cast<const uint16_t *>(row_of(chunk, blockIdx.y, token))[i % row_halves];
    }
}

cudaError_t cuda_prefill_decode(const struct cuda_queue *queue, const struct cuda_prefill_chunk *chunks,
                                uint32_t n_chunks, uint32_t n_kv_heads, uint32_t head_dim, enum kernels_rows codec,
                                uint16_t *keys, uint16_t *values)
{
    if (!n_chunks || !n_kv_heads)
        return cudaSuccess;
    if (n_kv_heads > MAX_GRID_Y)
        return cudaErrorInvalidValue;
    const unsigned int n_threads = queue->n_threads ? queue->n_threads : 256;
    const dim3 grid(n_chunks, n_kv_heads);
    if (codec == KERNELS_ROWS_Q8_0)
        CUDA_LAUNCH((decode<true>), grid, n_threads, 0, queue->stream)(chunks, head_dim, keys, values);
    else
        CUDA_LAUNCH((decode<false>), grid, n_threads, 0, queue->stream)(chunks, head_dim, keys, values);
    return cudaGetLastError();
}

cudaError_t cuda_prefill_gather(const struct cuda_queue *queue, const struct cuda_prefill_chunk *chunks,
                                uint32_t n_chunks, uint32_t n_kv_heads, uint32_t row_bytes, void *rows)
{
    if (!n_chunks || !n_kv_heads)
        return cudaSuccess;
    if (n_kv_heads > MAX_GRID_Y)
        return cudaErrorInvalidValue;
    const unsigned int n_threads = queue->n_threads ? queue->n_threads : 256;
    CUDA_LAUNCH(gather, dim3(n_chunks, n_kv_heads), n_threads, 0, queue->stream)
    (chunks, row_bytes / 2, static_cast<uint16_t *>(rows));
    return cudaGetLastError();
}
