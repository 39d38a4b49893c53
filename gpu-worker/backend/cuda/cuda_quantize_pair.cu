/*
 * cuda_quantize_pair.cu - keys of sealed blocks -> tiles of the pair codecs, to the byte as codec_pair_quantize.c.
 *
 * Grid       one block a tile; 256 threads (64 .. 1024, whole warps).
 * Shared     4 * 65 bytes a dimension for what is left of the keys (65: no two dimensions meet in a bank), and 2 KiB: 35 KiB at 128
 *            dimensions, 67 KiB at 256. Coordinates lie in the caller's memory: they would not fit beside them.
 * Algorithm  mean (a thread a dimension), coordinates (a thread a number), sizes (a thread a key), nearest codewords of two groups
 *            of a key at a time, then sums of a key's codewords in order. Runs once a block and head.
 *            Operations: klt 2 x 64 head_dim n_coordinates for the axes; 32 x 64 n_coordinates for the codewords.
 */
#include "gpu-worker/backend/cuda/cuda_keys.h"

#include "gpu-worker/backend/cuda/cuda_keys.cuh"
#include "gpu-worker/backend/cuda/cuda_pair_table.cuh"

#define STRIDE 65u

struct pair_block_memory {
    float means[KERNELS_MAX_HEAD_DIM];
    float inverse[KEYS_OF_TILE], t[KEYS_OF_TILE];
};

/* Takes the mean away from r; returns its step. The whole block takes part. */
static __device__ __forceinline__ float take_mean(float *r, uint32_t head_dim, struct pair_block_memory *memory,
                                                  uint8_t *mean)
{
    for (uint32_t i = threadIdx.x; i < head_dim; i += blockDim.x) {
        float sums[8] = {};
        for (uint32_t j = 0; j < KEYS_OF_TILE; j += 8)
#pragma unroll
            for (uint32_t lane = 0; lane < 8; lane++)
                sums[lane] += r[i * STRIDE + j + lane];
        memory->means[i] = (((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]))) /
                           static_cast<float>(KEYS_OF_TILE);
    }
    __syncthreads();
    float largest = 0; /* each warp finds it for itself */
    for (uint32_t i = cuda_lane(); i < head_dim; i += CUDA_WARP)
        largest = fmaxf(largest, fabsf(memory->means[i]));
    largest = cuda_warp_max(largest);
    __syncthreads();
    const float step = __uint_as_float(__float_as_uint(largest < SMALLEST ? SMALLEST : largest / 127.0f) & ~255u);
    for (uint32_t i = threadIdx.x; i < (head_dim + 63) / 64 * 64; i += blockDim.x) {
        float steps = 0;
        if (i < head_dim)
            steps = (memory->means[i] / step + ROUND_MAGIC) - ROUND_MAGIC;
        steps = steps > 127 ? 127 : steps < -127 ? -127 : steps;
        mean[i] = static_cast<uint8_t>(static_cast<int8_t>(steps));
        if (i < head_dim)
            memory->means[i] = step * steps;
    }
    __syncthreads();
    for (uint32_t at = threadIdx.x; at < head_dim * KEYS_OF_TILE; at += blockDim.x)
        r[at / KEYS_OF_TILE * STRIDE + at % KEYS_OF_TILE] -= memory->means[at / KEYS_OF_TILE];
    __syncthreads();
    return step;
}

/* y [n_coordinates][64] = A r */
static __device__ __forceinline__ void analyse(const struct cuda_pair_table &table, const float *r, float *y)
{
    for (uint32_t at = threadIdx.x; at < table.n_coordinates * KEYS_OF_TILE; at += blockDim.x) {
        const uint32_t c = at / KEYS_OF_TILE, j = at % KEYS_OF_TILE;
        float sum = 0;
        if (table.dense)
            for (uint32_t i = 0; i < table.head_dim; i++)
                sum += table.analysis[static_cast<size_t>(c) * table.head_dim + i] * r[i * STRIDE + j];
        else
            sum += table.analysis[c] * r[table.dimension[c] * STRIDE + j];
        y[at] = fabsf(sum) < SMALLEST ? 0 : sum;
    }
    __syncthreads();
}

/* The nearest codeword of group g for key j: least |z - codeword|^2 = |z|^2 + 2 (|codeword|^2 / 2 - <z, codeword>) */
static __device__ __forceinline__ uint32_t choose(const struct cuda_pair_table &table, uint32_t g, uint32_t j,
                                                  const float *y, float inverse)
{
    const struct pair_group group = table.groups[g];
    const float *codeword = table.codewords + group.codewords;
    float nearest = 0;
    uint32_t best = 0;
    for (uint32_t c = 0; c < PAIR_CODEWORDS; c++, codeword += group.n) {
        float towards = 0;
        for (uint32_t i = 0; i < group.n; i++)
            towards += codeword[i] * y[(group.first + i) * KEYS_OF_TILE + j];
        const float distance = table.half_squares[g * PAIR_CODEWORDS + c] - towards * inverse;
        if (c == 0 || distance < nearest) {
            nearest = distance;
            best = c;
        }
    }
    return best;
}

/* The code of key j's size, and u' B' codewords. */
static __device__ __forceinline__ uint32_t size_of(const struct cuda_pair_table &table, const uint8_t *codes,
                                                   uint32_t j, const float *y, float inverse, float *ret_along)
{
    float products = 0, squares = 0, along = 0;
    for (uint32_t g = 0; g < table.n_groups; g++) {
        const struct pair_group group = table.groups[g];
        const uint32_t code = codes[g / 2 * KEYS_OF_TILE + j] >> 4 * (g % 2) & 15u;
        const float *codeword = table.codewords + group.codewords + code * group.n;
        for (uint32_t i = 0; i < group.n; i++) {
            products += codeword[i] * y[(group.first + i) * KEYS_OF_TILE + j];
            squares += codeword[i] * codeword[i];
            along += codeword[i] * table.along[group.first + i];
        }
    }
    *ret_along = along;
    return inverse > 0 && products > 0 && squares > 0 ? cuda_scale_code(products / squares) : 0;
}

/* memory->t in 8 bits; returns the code of their step. The whole block takes part. */
static __device__ __forceinline__ uint32_t quantize_along(const struct pair_block_memory *memory, uint8_t *along)
{
    float largest = fmaxf(fabsf(memory->t[cuda_lane()]), fabsf(memory->t[cuda_lane() + 32]));
    largest = cuda_warp_max(largest);
    uint32_t code = cuda_scale_code(largest * (1.0f / 127.0f));
    if (code && code < 255 && cuda_scale_value(code) * 127.5f < largest)
        code++;
    const float inverse = code ? cuda_scale_value(256 - code) : 0;
    for (uint32_t j = threadIdx.x; j < KEYS_OF_TILE; j += blockDim.x) {
        const float steps = memory->t[j] * inverse, clamped = steps > 127 ? 127 : steps < -127 ? -127 : steps;
        along[j] = static_cast<uint8_t>(static_cast<int8_t>((clamped + ROUND_MAGIC) - ROUND_MAGIC));
    }
    return code;
}

CUDA_HOT static __global__ void __launch_bounds__(1024) quantize_pair(const struct cuda_key_block *__restrict__ blocks)
{
    CUDA_DYNAMIC_SHARED(float, r); /* [head_dim][STRIDE] */
    __shared__ struct pair_block_memory memory;
    const struct cuda_key_block block = blocks[blockIdx.x];
    const struct cuda_pair_table table = *block.table;
    float *const y = block.work;
    uint8_t *codes = static_cast<uint8_t *>(block.tile);
    uint8_t *scales = codes + table.n_groups / 2 * KEYS_OF_TILE, *along = scales + KEYS_OF_TILE;
    uint8_t *mean = along + (table.is_klt ? 0 : KEYS_OF_TILE);
    for (uint32_t at = threadIdx.x; at < table.head_dim * KEYS_OF_TILE; at += blockDim.x)
        r[at % table.head_dim * STRIDE + at / table.head_dim] = cuda_cleaned(block.keys[at], KEY_LARGEST);
    __syncthreads();
    const float mean_step = take_mean(r, table.head_dim, &memory, mean);
    analyse(table, r, y);

    for (uint32_t j = threadIdx.x; j < KEYS_OF_TILE; j += blockDim.x) {
        float size = 0;
        for (uint32_t c = 0; c < table.n_coordinates; c++)
            size += y[c * KEYS_OF_TILE + j] * y[c * KEYS_OF_TILE + j] * table.inverse_spread[c];
        const uint32_t code = cuda_scale_code(sqrtf(size));
        memory.inverse[j] = code ? cuda_scale_value(256 - code) : 0;
    }
    __syncthreads();
    for (uint32_t at = threadIdx.x; at < (table.n_groups + 1) / 2 * KEYS_OF_TILE; at += blockDim.x) {
        const uint32_t g = at / KEYS_OF_TILE * 2, j = at % KEYS_OF_TILE;
        uint32_t two = choose(table, g, j, y, memory.inverse[j]);
        if (g + 1 < table.n_groups)
            two |= choose(table, g + 1, j, y, memory.inverse[j]) << 4;
        codes[at] = static_cast<uint8_t>(two);
    }
    __syncthreads();
    for (uint32_t j = threadIdx.x; j < KEYS_OF_TILE; j += blockDim.x) {
        float of_codewords;
        const uint32_t code = size_of(table, codes, j, y, memory.inverse[j], &of_codewords);
        if (table.is_klt) { /* as pair_scale_nibble() */
            const uint32_t nibble = code == 0 ? 0 : code < 114 ? 1 : code > 142 ? 15 : (code - 112 + 1) / 2;
            scales[j] = static_cast<uint8_t>(scales[j] | nibble << 4);
        } else {
            scales[j] = static_cast<uint8_t>(code);
            float t = 0;
            for (uint32_t i = 0; i < table.head_dim; i++)
                t += table.direction[i] * r[i * STRIDE + j];
            memory.t[j] = t - cuda_scale_value(code) * of_codewords;
        }
    }
    __syncthreads();
    uint32_t along_code = 0;
    if (!table.is_klt)
        along_code = quantize_along(&memory, along);
    if (threadIdx.x == 0)
        *block.side = __uint_as_float(__float_as_uint(mean_step) | along_code);
}

cudaError_t cuda_quantize_pair(const struct cuda_queue *queue, uint32_t head_dim, const struct cuda_key_block *blocks,
                               uint32_t n_blocks)
{
    if (head_dim == 0 || head_dim > KERNELS_MAX_HEAD_DIM)
        return cudaErrorInvalidValue;
    if (!n_blocks)
        return cudaSuccess;
    const size_t shared = head_dim * STRIDE * sizeof(float);
    const cudaError_t error =
        cudaFuncSetAttribute(reinterpret_cast<const void *>(quantize_pair), cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(shared));
    if (error != cudaSuccess)
        return error;
    CUDA_LAUNCH(quantize_pair, n_blocks, (queue->n_threads ? queue->n_threads : 256), shared, queue->stream)(blocks);
    return cudaGetLastError();
}
