/*
 * cuda_encode_rows.cu - K and V of new tokens as rows of the value-stores, to the bit as kernels/ does (row_format.h there).
 *
 * Grid       one warp for 32 numbers of K or of V of one row (a group of q8_0); 256 threads a block (any whole warps).
 *            No shared memory.
 * Algorithm  f16: one number a lane. q8_0: the group's largest magnitude by shuffles, its scale, one number a lane.
 */
#include "gpu-worker/backend/cuda/cuda_ops.h"

#include "gpu-worker/backend/cuda/cuda.cuh"

#define GROUP          32u
#define LARGEST_NUMBER 127.0f
#define LARGEST_SCALE  65504.0f
#define NAN_SCALE      0x7e00u

/* As half_encode() of kernels/half.h; the device's own conversion forgets what a NaN carries. */
static __device__ __forceinline__ uint16_t half_bits(float value)
{
    const uint32_t word = __float_as_uint(value), magnitude = word & 0x7fffffffu;
    if (magnitude > 0x7f800000u)
        return static_cast<uint16_t>((word >> 16 & 0x8000u) | 0x7e00u | (magnitude >> 13 & 1023u));
    return __half_as_ushort(__float2half_rn(value));
}

/* Group `group` of K (part 0) or V (part 1) of row `row`; false: this warp has none. */
static __device__ __forceinline__ bool place(size_t n_rows, uint32_t n_groups, size_t *ret_row, uint32_t *ret_part,
                                             uint32_t *ret_d)
{
    const size_t warp = (static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x) / CUDA_WARP;
    const uint32_t group = static_cast<uint32_t>(warp % (2 * n_groups));
    *ret_row = warp / (2 * n_groups);
    *ret_part = group / n_groups;
    *ret_d = group % n_groups * GROUP + cuda_lane();
    return *ret_row < n_rows;
}

CUDA_HOT static __global__ void __launch_bounds__(1024)
    encode_f16(const float *__restrict__ k, const float *__restrict__ v, size_t n_rows, uint32_t n_groups,
               uint32_t head_dim, uint16_t *__restrict__ rows)
{
    size_t row;
    uint32_t part, d;
    if (!place(n_rows, n_groups, &row, &part, &d) || d >= head_dim)
        return;
    rows[(2 * row + part) * head_dim + d] = half_bits((part ? v : k)[row * head_dim + d]);
}

CUDA_HOT static __global__ void __launch_bounds__(1024)
    encode_q8_0(const float *__restrict__ k, const float *__restrict__ v, size_t n_rows, uint32_t n_groups,
                uint32_t head_dim, uint8_t *__restrict__ rows)
{
    size_t row;
    uint32_t part, d;
    if (!place(n_rows, n_groups, &row, &part, &d))
        return; /* a whole warp */
    const bool inside = d < head_dim;
    const float number = inside ? (part ? v : k)[row * head_dim + d] : 0.0f;
    const float largest = cuda_warp_max(fabsf(number));
    const bool finite = __all_sync(CUDA_ALL_LANES, isfinite(number) ? 1 : 0) != 0;
    const uint16_t bits =
        finite ? half_bits(fminf(__fdiv_rn(largest, LARGEST_NUMBER), LARGEST_SCALE)) : static_cast<uint16_t>(NAN_SCALE);
    const float scale = __half2float(__ushort_as_half(bits));
    uint8_t *to = rows + row * 2 * (head_dim + 2 * static_cast<size_t>(n_groups));
    if (inside) {
        float rounded = 0;
        if (finite && scale != 0)
            rounded = rintf(fmaxf(-LARGEST_NUMBER, fminf(LARGEST_NUMBER, __fdiv_rn(number, scale))));
        to[part * head_dim + d] = static_cast<uint8_t>(static_cast<int8_t>(rounded));
    }
    if (cuda_lane() == 0) /* rows have an even number of bytes */
        reinterpret_cast<uint16_t *>(to + 2 * static_cast<size_t>(head_dim))[part * n_groups + d / GROUP] = bits;
}

cudaError_t cuda_encode_rows(const struct cuda_queue *queue, const float *k, const float *v, uint32_t n_tokens,
                             uint32_t n_kv_heads, uint32_t head_dim, enum kernels_rows codec, void *rows)
{
    const size_t n_rows = static_cast<size_t>(n_tokens) * n_kv_heads;
    if (!n_rows || !head_dim)
        return cudaSuccess;
    const uint32_t n_groups = (head_dim + GROUP - 1) / GROUP;
    const unsigned int n_threads = queue->n_threads ? queue->n_threads : 256;
    const unsigned int grid = cuda_blocks(n_rows * 2 * n_groups, n_threads / CUDA_WARP);
    if (codec == KERNELS_ROWS_Q8_0) {
        CUDA_LAUNCH(encode_q8_0, grid, n_threads, 0, queue->stream)
        (k, v, n_rows, n_groups, head_dim, static_cast<uint8_t *>(rows));
    } else {
        CUDA_LAUNCH(encode_f16, grid, n_threads, 0, queue->stream)
        (k, v, n_rows, n_groups, head_dim, static_cast<uint16_t *>(rows));
    }
    return cudaGetLastError();
}
