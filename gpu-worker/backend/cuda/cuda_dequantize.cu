/*
 * cuda_dequantize.cu - matrices of every type as numbers: rows of embeddings in f32, whole matrices in f16 for cuBLAS.
 *
 * Grid       x: units of 8 weights of a row (types without blocks: 8 columns), 256 threads a block (any whole warps);
 *            y: rows, those beyond 65535 in further rounds. No shared memory.
 * Algorithm  one unit a thread (cuda_blocks.cuh); neighbouring threads read neighbouring bytes.
 */
#include "gpu-worker/backend/cuda/cuda_ops.h"

#include "gpu-worker/backend/cuda/cuda_blocks.cuh"

#define MAX_GRID_Y 65535u

static __device__ __forceinline__ void put(float *to, float value, float factor)
{
    (void)factor; /* only of halves: a product would change the bits of a NaN */
    *to = value;
}

static __device__ __forceinline__ void put(__half *to, float value, float factor)
{
    *to = __float2half_rn(value * factor);
}

/* out [n_rows][n_columns]; row r of it is row ids[r] of the matrix (ids NULL: row r) */
template <int type, typename number>
static __global__ void __launch_bounds__(1024)
    dequantize(const uint8_t *__restrict__ matrix, uint32_t n_rows, uint32_t n_columns,
               const uint32_t *__restrict__ ids, number *__restrict__ out, float factor)
{
    using block = cuda_block<type>;
    const uint32_t n_blocks = n_columns / block::n_columns;
    const uint32_t at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= n_blocks * block::n_units)
        return;
    const uint32_t unit = at % block::n_units;
    for (uint32_t r = blockIdx.y; r < n_rows; r += gridDim.y) {
        const size_t in_row = ids ? ids[r] : r;
        const cuda_unit weights =
            block::read(matrix + (in_row * n_blocks + at / block::n_units) * block::n_bytes, unit);
        number *to = out + static_cast<size_t>(r) * n_columns + at / block::n_units * block::n_columns;
#pragma unroll
        for (uint32_t j = 0; j < 4; j++) {
            put(to + block::first(unit) + j, weights.weights[j], factor);
            put(to + block::second(unit) + j, weights.weights[4 + j], factor);
        }
    }
}

template <typename number>
static __global__ void __launch_bounds__(1024)
    convert(int type, const uint8_t *__restrict__ matrix, uint32_t n_rows, uint32_t n_columns,
            const uint32_t *__restrict__ ids, number *__restrict__ out, float factor)
{
    for (uint32_t r = blockIdx.y; r < n_rows; r += gridDim.y) {
        const size_t in_row = ids ? ids[r] : r;
        for (uint32_t c = blockIdx.x * blockDim.x + threadIdx.x; c < n_columns; c += gridDim.x * blockDim.x)
            put(out + static_cast<size_t>(r) * n_columns + c, cuda_number_at(type, matrix, in_row * n_columns + c),
                factor);
    }
}

template <typename number>
static cudaError_t launch(const struct cuda_queue *queue, enum tensor_type type, const void *matrix, uint32_t n_rows,
                          uint32_t n_columns, const uint32_t *ids, float factor, number *out)
{
    if (!n_rows || !n_columns)
        return cudaSuccess;
    const unsigned int n_threads = queue->n_threads ? queue->n_threads : 256;
    const dim3 grid(cuda_blocks(n_columns, 8 * n_threads), n_rows < MAX_GRID_Y ? n_rows : MAX_GRID_Y);
    const uint8_t *bytes = static_cast<const uint8_t *>(matrix);
    switch (type) {
#define CASE(TYPE)                                                                                                     \
    case TYPE:                                                                                                         \
        CUDA_LAUNCH((dequantize<TYPE, number>), grid, n_threads, 0, queue->stream)                                     \
        (bytes, n_rows, n_columns, ids, out, factor);                                                                  \
        break;
        CUDA_BLOCK_TYPES(CASE)
#undef CASE
    case TENSOR_F32:
    case TENSOR_F16:
    case TENSOR_BF16:
        CUDA_LAUNCH((convert<number>), grid, n_threads, 0, queue->stream)
        (static_cast<int>(type), bytes, n_rows, n_columns, ids, out, factor);
        break;
    default:
        return cudaErrorInvalidValue;
    }
    return cudaGetLastError();
}

cudaError_t cuda_embed(const struct cuda_queue *queue, enum tensor_type type, const void *matrix, uint32_t n_columns,
                       const uint32_t *ids, uint32_t n_tokens, float *out)
{
    return launch(queue, type, matrix, n_tokens, n_columns, ids, 1.0f, out);
}

cudaError_t cuda_dequantize_f16(const struct cuda_queue *queue, enum tensor_type type, const void *matrix,
                                uint32_t n_rows, uint32_t n_columns, float factor, uint16_t *out)
{
    return launch(queue, type, matrix, n_rows, n_columns, nullptr, factor, reinterpret_cast<__half *>(out));
}
