/*
 * cuda_halves.cu - see cuda_halves.h.
 *
 * Grid       rows: x: rows, a block each, 32 .. 256 threads by the row's length; scale: x: columns, y: rows; largest: up to 4096
 *            blocks go through the matrix.
 * Shared     a number a warp.
 * Algorithm  a row is read twice, the second time out of the cache: its largest magnitude, then halves.
 *            Bytes: rows 4 + 2 a number; scale 8; largest those of the matrix.
 */
#include "gpu-worker/backend/cuda/cuda_halves.h"

#include <string.h>

#include "gpu-worker/backend/cuda/cuda_blocks.cuh"

#define MAX_GRID_Y 65535u
#define MAX_BLOCKS 4096u
#define LARGEST                                                                                                        \
    14 /* exponent of a row's largest number as a half: below 2^15, so that rounding does not reach infinity */
#define MAX_SHIFT   126 /* the factor back is a number that is not subnormal */
#define BIAS        127
#define NO_EXPONENT 23 /* bits below an f32's exponent */

static __host__ __device__ __forceinline__ int shift_of(uint32_t bits)
{
    const int shift = LARGEST + BIAS - static_cast<int>(bits >> NO_EXPONENT);
    return shift < MAX_SHIFT ? shift : MAX_SHIFT;
}

static __device__ __forceinline__ float power_of_two(int exponent)
{
    return __uint_as_float(static_cast<uint32_t>(exponent + BIAS) << NO_EXPONENT);
}

static __device__ __forceinline__ uint32_t magnitude_of(float x)
{
    return isfinite(x) ? __float_as_uint(x) & 0x7fffffffu : 0u;
}

/* The largest of a block, in every thread; `scratch` [32] in shared memory, free again behind the next barrier. */
static __device__ __forceinline__ uint32_t block_max(uint32_t x, uint32_t *scratch)
{
    x = __reduce_max_sync(CUDA_ALL_LANES, x);
    if (cuda_lane() == 0)
        scratch[threadIdx.x / CUDA_WARP] = x;
    __syncthreads();
    return __reduce_max_sync(CUDA_ALL_LANES, cuda_lane() < blockDim.x / CUDA_WARP ? scratch[cuda_lane()] : 0u);
}

static __global__ void __launch_bounds__(1024)
    rows(const float *__restrict__ x, uint32_t n_rows, uint32_t n_heads, uint32_t group, uint32_t n_columns,
         __half *__restrict__ out, float *__restrict__ factors)
{
    __shared__ uint32_t scratch[32];
    const uint32_t row = blockIdx.x; /* of out */
    __half *to = out + static_cast<size_t>(row) * n_columns;
    if (row >= n_rows) { /* the whole block */
        for (uint32_t c = threadIdx.x; c < n_columns; c += blockDim.x)
            to[c] = __float2half_rn(0.0f);
        return;
    }
    const uint32_t per_head = n_rows / (n_heads / group), kv_head = row / per_head;
    const uint32_t token = row % per_head / group, head = kv_head * group + row % group;
    const float *from = x + (static_cast<size_t>(token) * n_heads + head) * n_columns;
    uint32_t largest = 0;
    for (uint32_t c = threadIdx.x; c < n_columns; c += blockDim.x)
        largest = max(largest, magnitude_of(from[c]));
    const int shift = shift_of(block_max(largest, scratch));
    const float factor = power_of_two(shift);
    for (uint32_t c = threadIdx.x; c < n_columns; c += blockDim.x)
        to[c] = __float2half_rn(from[c] * factor);
    if (threadIdx.x == 0)
        factors[row] = power_of_two(-shift);
}

static __global__ void __launch_bounds__(1024)
    scale(const float *__restrict__ c, const float *__restrict__ factors, uint32_t n_rows, uint32_t n_columns,
          float *__restrict__ y, size_t y_stride)
{
    const uint32_t column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= n_columns)
        return;
    for (uint32_t r = blockIdx.y; r < n_rows; r += gridDim.y)
        y[r * y_stride + column] = c[static_cast<size_t>(r) * n_columns + column] * factors[r];
}

static __device__ __forceinline__ void give_largest(uint32_t largest, uint32_t *bits)
{
    largest = __reduce_max_sync(CUDA_ALL_LANES, largest);
    if (cuda_lane() == 0 && largest)
        atomicMax(bits, largest);
}

template <int type>
static __global__ void __launch_bounds__(1024)
    largest_of_blocks(const uint8_t *__restrict__ matrix, size_t n_units, uint32_t *__restrict__ bits)
{
    using block = cuda_block<type>;
    uint32_t largest = 0;
    for (size_t at = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; at < n_units;
         at += static_cast<size_t>(gridDim.x) * blockDim.x) {
        const cuda_unit unit =
            block::read(matrix + at / block::n_units * block::n_bytes, static_cast<uint32_t>(at % block::n_units));
#pragma unroll
        for (int j = 0; j < 8; j++)
            largest = max(largest, magnitude_of(unit.weights[j]));
    }
    give_largest(largest, bits);
}

static __global__ void __launch_bounds__(1024)
    largest_of_numbers(int type, const uint8_t *__restrict__ matrix, size_t n, uint32_t *__restrict__ bits)
{
    uint32_t largest = 0;
    for (size_t at = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; at < n;
         at += static_cast<size_t>(gridDim.x) * blockDim.x)
        largest = max(largest, magnitude_of(cuda_number_at(type, matrix, at)));
    give_largest(largest, bits);
}

cudaError_t cuda_halves_rows(const struct cuda_queue *queue, const float *x, uint32_t n_tokens, uint32_t n_heads,
                             uint32_t group, uint32_t n_columns, uint32_t n_rows_out, uint16_t *out, float *factors)
{
    if (!n_rows_out || !n_columns)
        return cudaSuccess;
    const unsigned int whole_warps = cuda_blocks(n_columns, CUDA_WARP) * CUDA_WARP;
    const unsigned int n_threads = queue->n_threads ? queue->n_threads : whole_warps < 256 ? whole_warps : 256;
    CUDA_LAUNCH(rows, n_rows_out, n_threads, 0, queue->stream)
    (x, n_tokens * n_heads, n_heads, group, n_columns, reinterpret_cast<__half *>(out), factors);
    return cudaGetLastError();
}

cudaError_t cuda_halves_scale(const struct cuda_queue *queue, const float *c, const float *factors, uint32_t n_rows,
                              uint32_t n_columns, float *y, size_t y_stride)
{
    if (!n_rows || !n_columns)
        return cudaSuccess;
    const unsigned int n_threads = queue->n_threads ? queue->n_threads : 256;
    const dim3 grid(cuda_blocks(n_columns, n_threads), n_rows < MAX_GRID_Y ? n_rows : MAX_GRID_Y);
    CUDA_LAUNCH(scale, grid, n_threads, 0, queue->stream)(c, factors, n_rows, n_columns, y, y_stride);
    return cudaGetLastError();
}

cudaError_t cuda_halves_largest(const struct cuda_queue *queue, enum tensor_type type, const void *matrix,
                                uint32_t n_rows, uint32_t n_columns, uint32_t *bits)
{
    const size_t n = static_cast<size_t>(n_rows) * n_columns;
    if (!n)
        return cudaSuccess;
    const uint8_t *bytes = static_cast<const uint8_t *>(matrix);
    const unsigned int n_threads = queue->n_threads ? queue->n_threads : 256;
    const size_t n_blocks = (n + 8 * n_threads - 1) / (8 * n_threads);
    const unsigned int grid = static_cast<unsigned int>(n_blocks < MAX_BLOCKS ? n_blocks : MAX_BLOCKS);
    switch (type) {
#define CASE(TYPE)                                                                                                     \
    case TYPE:                                                                                                         \
        CUDA_LAUNCH((largest_of_blocks<TYPE>), grid, n_threads, 0, queue->stream)                                      \
        (bytes, n / cuda_block<TYPE>::n_columns * cuda_block<TYPE>::n_units, bits);                                    \
        break;
        CUDA_BLOCK_TYPES(CASE)
#undef CASE
    case TENSOR_F32:
    case TENSOR_F16:
    case TENSOR_BF16:
        CUDA_LAUNCH(largest_of_numbers, grid, n_threads, 0, queue->stream)(static_cast<int>(type), bytes, n, bits);
        break;
    default:
        return cudaErrorInvalidValue;
    }
    return cudaGetLastError();
}

float cuda_halves_factor(uint32_t bits, float *ret_back)
{
    const int shift = shift_of(bits);
    const uint32_t to = static_cast<uint32_t>(BIAS + shift) << NO_EXPONENT;
    const uint32_t back = static_cast<uint32_t>(BIAS - shift) << NO_EXPONENT;
    float factor;
    memcpy(&factor, &to, sizeof factor);
    memcpy(ret_back, &back, sizeof back);
    return factor;
}
