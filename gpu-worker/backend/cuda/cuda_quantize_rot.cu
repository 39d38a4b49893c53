/*
 * cuda_quantize_rot.cu - keys of sealed blocks -> tiles of rot4, rot3 and rot2, to the byte as codec_rot_quantize.c.
 *
 * Grid       one block a tile; 256 threads (64 .. 1024, whole warps).
 * Shared     4 * 65 bytes a dimension for the keys, dimension by dimension (65: no two dimensions meet in a bank), and 2.5 KiB: 35
 *            KiB at 128 dimensions, 67.5 KiB at 256.
 * Algorithm  mean (a thread a dimension), differences with their signs, Hadamard (a thread a pair of numbers), size (a thread a key),
 *            codes of 32 dimensions of a key at a time; what each number adds to a sum takes its place, and a thread a key sums up in
 *            order. Runs once a block and head: nothing here is worth more than being exact.
 */
#include "gpu-worker/backend/cuda/cuda_keys.h"

#include "gpu-worker/backend/cuda/cuda_rotation.cuh"

#define STRIDE 65u

struct quantize_shape {
    uint32_t head_dim, n_groups, scales_offset, mean_offset;
};

struct rot_block_memory {
    float means[KERNELS_MAX_HEAD_DIM]; /* then as the tile says them */
    float squares[KEYS_OF_TILE], inverse[KEYS_OF_TILE];
};

template <uint32_t bits> static __device__ __forceinline__ constexpr int32_t level_of(uint32_t code)
{
    return bits == 2 ? ROT2_LEVEL(code) : bits == 3 ? ROT3_LEVEL(code) : ROT4_LEVEL(code);
}

/* The mean in 8 bits; memory->means as decoded. The whole block takes part. */
static __device__ __forceinline__ void take_mean(const float *y, const struct quantize_shape &shape,
                                                 struct rot_block_memory *memory, uint8_t *tile, float *ret_side)
{
    for (uint32_t i = threadIdx.x; i < shape.head_dim; i += blockDim.x) {
        float sum = 0;
        for (uint32_t j = 0; j < KEYS_OF_TILE; j++)
            sum += y[i * STRIDE + j];
        memory->means[i] = sum * (1.0f / KEYS_OF_TILE);
    }
    __syncthreads();
    float largest = 0; /* each warp finds it for itself */
    for (uint32_t i = cuda_lane(); i < shape.head_dim; i += CUDA_WARP)
        largest = fmaxf(largest, fabsf(memory->means[i]));
    largest = cuda_warp_max(largest);
    __syncthreads();
    const float side = largest < SMALLEST ? 0.0f : largest / 127.0f;
    for (uint32_t i = threadIdx.x; i < (shape.head_dim + 63) / 64 * 64; i += blockDim.x) {
        float rounded = 0;
        if (side > 0 && i < shape.head_dim)
            rounded = (memory->means[i] / side + ROUND_MAGIC) - ROUND_MAGIC;
        tile[shape.mean_offset + i] = static_cast<uint8_t>(static_cast<int8_t>(rounded));
        if (i < shape.head_dim)
            memory->means[i] = side * rounded;
    }
    if (threadIdx.x == 0)
        *ret_side = side;
    __syncthreads();
}

/* Dimensions [32 two, 32 two + 32) of key j: their words; what they add to the key's sum takes their place in y. */
template <uint32_t bits>
static __device__ __forceinline__ void encode(float *y, const struct quantize_shape &shape, uint32_t two, uint32_t j,
                                              float inverse, uint32_t *tile)
{
    constexpr uint32_t half = 1u << (bits - 1);
    const float unit = cuda_rotation_format<bits>().unit;
    const int32_t top = cuda_rotation_format<bits>().top;
    uint32_t upper = 0;
    for (uint32_t g = 2 * two; g < 2 * two + 2 && g < shape.n_groups; g++) {
        uint32_t words[2] = {0, 0};
        for (uint32_t k = 0; k < 16 && 16 * g + k < shape.head_dim; k++) {
            const uint32_t s = k / 4, b = k % 4;
            float *at = y + (16 * g + k) * STRIDE + j;
            const float size = fabsf(*at), z = size * inverse;
            int32_t level = 2 * level_of<bits>(half) - top; /* twice, in units */
            uint32_t code = 0;
#pragma unroll
            for (uint32_t c = 1; c < half; c++) {
                const int32_t above = 2 * level_of<bits>(half + c) - top,
                              below = 2 * level_of<bits>(half + c - 1) - top;
                if (z >= unit * 0.25f * static_cast<float>(above + below)) {
                    code++;
                    level += above - below;
                }
            }
            code = *at < 0 ? half - 1 - code : half + code;
            *at = static_cast<float>(level) * size;
            if constexpr (bits == 4) {
                words[s / 2] |= code << (8 * b + 4 * (s % 2));
            } else {
                words[0] |= (code & 3u) << (8 * b + 2 * s);
                if constexpr (bits == 3) /* bits 2, 0, 3, 1 for s = 0 .. 3 */
                    upper |= code >> 2 << (8 * b + 4 * (g % 2) + (0x1302u >> 4 * s & 15u));
            }
        }
        if constexpr (bits == 4) {
            tile[2 * g * KEYS_OF_TILE + j] = words[0];
            tile[(2 * g + 1) * KEYS_OF_TILE + j] = words[1];
        } else {
            tile[g * KEYS_OF_TILE + j] = words[0];
        }
    }
    if constexpr (bits == 3)
        tile[(shape.n_groups + two) * KEYS_OF_TILE + j] = upper;
}

template <uint32_t bits>
CUDA_HOT static __global__ void __launch_bounds__(1024)
    quantize_rot(const struct cuda_key_block *__restrict__ blocks, struct quantize_shape shape)
{
    CUDA_DYNAMIC_SHARED(float, y); /* [head_dim][STRIDE] */
    __shared__ struct rot_block_memory memory;
    const struct cuda_key_block block = blocks[blockIdx.x];
    uint8_t *tile = static_cast<uint8_t *>(block.tile);
    const uint32_t n = shape.head_dim * KEYS_OF_TILE;
    for (uint32_t at = threadIdx.x; at < n; at += blockDim.x)
        y[at % shape.head_dim * STRIDE + at / shape.head_dim] = cuda_cleaned(block.keys[at], KEY_LARGEST);
    __syncthreads();
    take_mean(y, shape, &memory, tile, block.side);
    for (uint32_t at = threadIdx.x; at < n; at += blockDim.x) {
        const uint32_t i = at / KEYS_OF_TILE;
        float *it = y + i * STRIDE + at % KEYS_OF_TILE;
        *it = (*it - memory.means[i]) * cuda_rotation_sign(i);
    }
    cuda_rotation_hadamard(y, shape.head_dim, KEYS_OF_TILE, STRIDE);

    for (uint32_t j = threadIdx.x; j < KEYS_OF_TILE; j += blockDim.x) {
        float squares = 0;
        for (uint32_t i = 0; i < shape.head_dim; i++)
            squares += y[i * STRIDE + j] * y[i * STRIDE + j];
        memory.squares[j] = squares;
        memory.inverse[j] = squares > 0 ? 1.0f / sqrtf(squares / static_cast<float>(shape.head_dim)) : 0.0f;
    }
    __syncthreads();
    for (uint32_t at = threadIdx.x; at < (shape.n_groups + 1) / 2 * KEYS_OF_TILE; at += blockDim.x)
        encode<bits>(y, shape, at / KEYS_OF_TILE, at % KEYS_OF_TILE, memory.inverse[at % KEYS_OF_TILE],
                     reinterpret_cast<uint32_t *>(tile));
    __syncthreads();
    const float normal = 1.0f / sqrtf(static_cast<float>(cuda_rotation_size(shape.head_dim)));
    for (uint32_t j = threadIdx.x; j < KEYS_OF_TILE; j += blockDim.x) {
        float sum = 0;
        for (uint32_t i = 0; i < shape.head_dim; i++)
            sum += y[i * STRIDE + j];
        const float squares = memory.squares[j], unit = cuda_rotation_format<bits>().unit;
        tile[shape.scales_offset + j] =
            squares > 0 ? static_cast<uint8_t>(cuda_scale_code(squares / (0.5f * unit * sum) * normal)) : 0;
    }
}

template <uint32_t bits>
static cudaError_t launch(const struct cuda_queue *queue, uint32_t head_dim, const struct cuda_key_block *blocks,
                          uint32_t n_blocks)
{
    const uint32_t n_groups = rot_groups(head_dim);
    const struct quantize_shape shape = {head_dim, n_groups, static_cast<uint32_t>(rot_scales_offset(bits, n_groups)),
                                         static_cast<uint32_t>(rot_mean_offset(bits, n_groups))};
    const size_t shared = head_dim * STRIDE * sizeof(float);
    const cudaError_t error =
        cudaFuncSetAttribute(reinterpret_cast<const void *>(quantize_rot<bits>),
                             cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
    if (error != cudaSuccess)
        return error;
    CUDA_LAUNCH((quantize_rot<bits>), n_blocks, (queue->n_threads ? queue->n_threads : 256), shared, queue->stream)
    (blocks, shape);
    return cudaGetLastError();
}

cudaError_t cuda_quantize_rot(const struct cuda_queue *queue, uint32_t bits, uint32_t head_dim,
                              const struct cuda_key_block *blocks, uint32_t n_blocks)
{
    if (head_dim == 0 || head_dim > KERNELS_MAX_HEAD_DIM || bits < 2 || bits > 4)
        return cudaErrorInvalidValue;
    if (!n_blocks)
        return cudaSuccess;
    return bits == 2   ? launch<2>(queue, head_dim, blocks, n_blocks)
           : bits == 3 ? launch<3>(queue, head_dim, blocks, n_blocks)
                       : launch<4>(queue, head_dim, blocks, n_blocks);
}
