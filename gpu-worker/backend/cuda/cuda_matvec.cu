/*
 * cuda_matvec.cu - products of a matrix of any type with few vectors.
 *
 * Grid       x: rows of the matrix, one warp a row, 128 threads a block (any whole warps); y: tokens, up to 8 a block.
 *            No shared memory: the vectors come from L1.
 * Algorithm  each lane takes every 32nd unit of 8 weights (cuda_blocks.cuh), turns it into f32 in registers once and
 *            multiplies it with the tokens' numbers; the warp adds up. A token's sum is in the same order whatever the batch.
 *            Bytes: the matrix once for 8 tokens. Operations: about 4 a weight to unpack it, one multiply-add a token.
 */
#include "gpu-worker/backend/cuda/cuda_ops.h"

#include "gpu-worker/backend/cuda/cuda_blocks.cuh"

#define MAX_TOKENS 8u
#define MAX_GRID_Y 65535u

/* Row of this warp; rows beyond the last one's are not there, as a whole warp. */
static __device__ __forceinline__ uint32_t row_of_warp()
{
    return (blockIdx.x * blockDim.x + threadIdx.x) / CUDA_WARP;
}

/* After all lanes added their part: lane t writes token first_token + t. */
template <uint32_t n_tokens_at_once>
static __device__ __forceinline__ void finish(const float *sums, uint32_t row, uint32_t n_rows, uint32_t first_token,
                                              uint32_t n_tokens, float *y)
{
#pragma unroll
    for (uint32_t t = 0; t < n_tokens_at_once; t++) {
        const float sum = cuda_warp_sum(sums[t]);
        if (cuda_lane() == t && first_token + t < n_tokens)
            y[static_cast<size_t>(first_token + t) * n_rows + row] = sum;
    }
}

template <int type, uint32_t n_tokens_at_once>
static __device__ __forceinline__ void multiply_row(const uint8_t *__restrict__ matrix, uint32_t n_rows,
                                                    uint32_t n_columns, const float *__restrict__ x,
                                                    uint32_t first_token, uint32_t n_tokens, float *__restrict__ y)
{
    using block = cuda_block<type>;
    const uint32_t row = row_of_warp(), n_blocks = n_columns / block::n_columns;
    const uint8_t *blocks = matrix + static_cast<size_t>(row) * n_blocks * block::n_bytes;
    float sums[n_tokens_at_once] = {};
    for (uint32_t at = cuda_lane(); at < n_blocks * block::n_units; at += CUDA_WARP) {
        const uint32_t unit = at % block::n_units, column = at / block::n_units * block::n_columns;
        const cuda_unit w = block::read(blocks + static_cast<size_t>(at / block::n_units) * block::n_bytes, unit);
#pragma unroll
        for (uint32_t t = 0; t < n_tokens_at_once; t++) {
            /* a batch that is not full reads its last token again */
            const uint32_t token = min(first_token + t, n_tokens - 1);
            const float *in = x + static_cast<size_t>(token) * n_columns + column;
            const float4 a = *reinterpret_cast<const float4 *>(in + block::first(unit));
            const float4 b = *reinterpret_cast<const float4 *>(in + block::second(unit));
            float sum = sums[t];
            sum = fmaf(w.weights[0], a.x, sum);
            sum = fmaf(w.weights[1], a.y, sum);
            sum = fmaf(w.weights[2], a.z, sum);
            sum = fmaf(w.weights[3], a.w, sum);
            sum = fmaf(w.weights[4], b.x, sum);
            sum = fmaf(w.weights[5], b.y, sum);
            sum = fmaf(w.weights[6], b.z, sum);
            sums[t] = fmaf(w.weights[7], b.w, sum);
        }
    }
    finish<n_tokens_at_once>(sums, row, n_rows, first_token, n_tokens, y);
}

template <int type, uint32_t n_tokens_at_once>
static __device__ __forceinline__ void multiply_numbers(const uint8_t *__restrict__ matrix, uint32_t n_rows,
                                                        uint32_t n_columns, const float *__restrict__ x,
                                                        uint32_t first_token, uint32_t n_tokens, float *__restrict__ y)
{
    const uint32_t row = row_of_warp();
    float sums[n_tokens_at_once] = {};
    for (uint32_t c = cuda_lane(); c < n_columns; c += CUDA_WARP) {
        const float w = cuda_number_at(type, matrix, static_cast<size_t>(row) * n_columns + c);
#pragma unroll
        for (uint32_t t = 0; t < n_tokens_at_once; t++)
            sums[t] = fmaf(w, x[static_cast<size_t>(min(first_token + t, n_tokens - 1)) * n_columns + c], sums[t]);
    }
    finish<n_tokens_at_once>(sums, row, n_rows, first_token, n_tokens, y);
}

template <int type, uint32_t n_tokens_at_once>
CUDA_HOT static __global__ void __launch_bounds__(256, 2)
    matvec(const uint8_t *__restrict__ matrix, uint32_t n_rows, uint32_t n_columns, const float *__restrict__ x,
           uint32_t n_tokens, float *__restrict__ y)
{
    if (row_of_warp() >= n_rows)
        return;
    for (uint32_t first = blockIdx.y * n_tokens_at_once; first < n_tokens; first += gridDim.y * n_tokens_at_once) {
        if constexpr (type == TENSOR_F32 || type == TENSOR_F16 || type == TENSOR_BF16)
            multiply_numbers<type, n_tokens_at_once>(matrix, n_rows, n_columns, x, first, n_tokens, y);
        else
            multiply_row<type, n_tokens_at_once>(matrix, n_rows, n_columns, x, first, n_tokens, y);
    }
}

/* One kernel for 1, 2, 4 and 8 tokens at once. */
template <int type, uint32_t n_tokens_at_once>
static void launch(const struct cuda_queue *queue, const void *matrix, uint32_t n_rows, uint32_t n_columns,
                   const float *x, uint32_t n_tokens, float *y)
{
    if constexpr (n_tokens_at_once < MAX_TOKENS) {
        if (n_tokens > n_tokens_at_once) {
            launch<type, 2 * n_tokens_at_once>(queue, matrix, n_rows, n_columns, x, n_tokens, y);
            return;
        }
    }
    const unsigned int n_threads = queue->n_threads ? queue->n_threads : 128;
    const unsigned int n_passes = cuda_blocks(n_tokens, n_tokens_at_once);
    const dim3 grid(cuda_blocks(n_rows, n_threads / CUDA_WARP), n_passes < MAX_GRID_Y ? n_passes : MAX_GRID_Y);
    CUDA_LAUNCH((matvec<type, n_tokens_at_once>), grid, n_threads, 0, queue->stream)
    (static_cast<const uint8_t *>(matrix), n_rows, n_columns, x, n_tokens, y);
}

cudaError_t cuda_matvec(const struct cuda_queue *queue, enum tensor_type type, const void *matrix, uint32_t n_rows,
                        uint32_t n_columns, const float *x, uint32_t n_tokens, float *y)
{
    if (!n_rows || !n_tokens)
        return cudaSuccess;
    switch (type) {
#define CASE(TYPE)                                                                                                     \
    case TYPE:                                                                                                         \
        launch<TYPE, 1>(queue, matrix, n_rows, n_columns, x, n_tokens, y);                                             \
        break;
        CUDA_BLOCK_TYPES(CASE)
        CASE(TENSOR_F32)
        CASE(TENSOR_F16)
        CASE(TENSOR_BF16)
#undef CASE
    default:
        return cudaErrorInvalidValue;
    }
    return cudaGetLastError();
}
