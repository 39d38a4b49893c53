/*
 * cuda_blocks.cuh - the tensor types of GGUF in device code: eight weights at a time, out of a block as it lies in the file.
 *
 * A block (tensor_block()) is `n_units` units of 8 weights; unit u gives the columns first + 0..3 and second + 0..3 of the
 * block: the two groups share their bytes (low and high nibbles), so a lane reads every byte once. Lanes that take units in
 * order read neighbouring bytes. The arithmetic is dequantize.c's, operation by operation: the bits are the same.
 *
 * Alignment  blocks are aligned to 2 bytes (Q4_1, Q5_1: 4; Q4_K, Q5_K: 16), the matrix to 256.
 * Source     block layouts are those of the GGUF files (format of ggml's quantized types).
 */
#pragma once

#include "gpu-worker/backend/cuda/cuda.cuh"
#include "gpu-worker/model/tensor.h"

struct cuda_unit {
    float weights[8];
};

static __device__ __forceinline__ float cuda_half_at(const uint8_t *bytes)
{
    return __half2float(__ushort_as_half(*reinterpret_cast<const uint16_t *>(bytes)));
}

/* 4 bytes at an address aligned to 2 */
static __device__ __forceinline__ uint32_t cuda_word_at(const uint8_t *bytes)
{
    const uint16_t *halves = reinterpret_cast<const uint16_t *>(bytes);
    return halves[0] | static_cast<uint32_t>(halves[1]) << 16;
}

static __device__ __forceinline__ float cuda_nibble(uint32_t word, int nibble, int high, int offset)
{
    return static_cast<float>(static_cast<int>((word >> 4 * nibble & 15u) | static_cast<uint32_t>(high) << 4) - offset);
}

/* What each type says: columns and bytes of a block, where the columns of a unit are, and its weights. */
template <int type> struct cuda_block;

/* Types of 32 columns: unit u holds bytes 4u .. 4u + 3 of the nibbles: columns 4u and 16 + 4u on. */
struct cuda_block_nibbles {
    static constexpr uint32_t n_columns = 32, n_units = 4;
    static __device__ __forceinline__ uint32_t first(uint32_t unit)
    {
        return 4 * unit;
    }
    static __device__ __forceinline__ uint32_t second(uint32_t unit)
    {
        return 16 + 4 * unit;
    }
};

template <> struct cuda_block<TENSOR_Q4_0> : cuda_block_nibbles {
    static constexpr uint32_t n_bytes = 18;
    static __device__ __forceinline__ cuda_unit read(const uint8_t *in, uint32_t unit)
    {
        const float scale = cuda_half_at(in);
        const uint32_t q = cuda_word_at(in + 2 + 4 * unit);
        cuda_unit out;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            out.weights[j] = cuda_nibble(q, 2 * j, 0, 8) * scale;
            out.weights[4 + j] = cuda_nibble(q, 2 * j + 1, 0, 8) * scale;
        }
        return out;
    }
};

template <> struct cuda_block<TENSOR_Q4_1> : cuda_block_nibbles {
    static constexpr uint32_t n_bytes = 20;
    static __device__ __forceinline__ cuda_unit read(const uint8_t *in, uint32_t unit)
    {
        const float scale = cuda_half_at(in), minimum = cuda_half_at(in + 2);
        const uint32_t q = cuda_word_at(in + 4 + 4 * unit);
        cuda_unit out;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            out.weights[j] = cuda_nibble(q, 2 * j, 0, 0) * scale + minimum;
            out.weights[4 + j] = cuda_nibble(q, 2 * j + 1, 0, 0) * scale + minimum;
        }
        return out;
    }
};

/* Fifth bits: bit j of a little-endian word belongs to column j. */
template <> struct cuda_block<TENSOR_Q5_0> : cuda_block_nibbles {
    static constexpr uint32_t n_bytes = 22;
    static __device__ __forceinline__ cuda_unit read(const uint8_t *in, uint32_t unit)
    {
        const float scale = cuda_half_at(in);
        const uint32_t high = cuda_word_at(in + 2) >> 4 * unit, q = cuda_word_at(in + 6 + 4 * unit);
        cuda_unit out;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            out.weights[j] = cuda_nibble(q, 2 * j, high >> j & 1, 16) * scale;
            out.weights[4 + j] = cuda_nibble(q, 2 * j + 1, high >> (16 + j) & 1, 16) * scale;
        }
        return out;
    }
};

template <> struct cuda_block<TENSOR_Q5_1> : cuda_block_nibbles {
    static constexpr uint32_t n_bytes = 24;
    static __device__ __forceinline__ cuda_unit read(const uint8_t *in, uint32_t unit)
    {
        const float scale = cuda_half_at(in), minimum = cuda_half_at(in + 2);
        const uint32_t high = cuda_word_at(in + 4) >> 4 * unit, q = cuda_word_at(in + 8 + 4 * unit);
        cuda_unit out;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            out.weights[j] = cuda_nibble(q, 2 * j, high >> j & 1, 0) * scale + minimum;
            out.weights[4 + j] = cuda_nibble(q, 2 * j + 1, high >> (16 + j) & 1, 0) * scale + minimum;
        }
        return out;
    }
};

template <> struct cuda_block<TENSOR_Q8_0> {
    static constexpr uint32_t n_columns = 32, n_units = 4, n_bytes = 34;
    static __device__ __forceinline__ uint32_t first(uint32_t unit)
    {
        return 8 * unit;
    }
    static __device__ __forceinline__ uint32_t second(uint32_t unit)
    {
        return 8 * unit + 4;
    }
    static __device__ __forceinline__ cuda_unit read(const uint8_t *in, uint32_t unit)
    {
        const float scale = cuda_half_at(in);
        const uint32_t q[2] = {cuda_word_at(in + 2 + 8 * unit), cuda_word_at(in + 6 + 8 * unit)};
        cuda_unit out;
#pragma unroll
        for (int j = 0; j < 8; j++)
            out.weights[j] = static_cast<float>(static_cast<int8_t>(q[j / 4] >> 8 * (j % 4) & 255u)) * scale;
        return out;
    }
};

/*
 * Q4_K and Q5_K: 8 sub-blocks of 32 with 6-bit scales and minima packed in 12 bytes. Unit u holds 4 bytes of the nibbles that
 * sub-blocks 2p (low) and 2p + 1 (high) share, p = u / 8.
 */
template <bool has_fifth> struct cuda_block_k {
    static constexpr uint32_t n_columns = 256, n_units = 32, n_bytes = has_fifth ? 176 : 144;
    static __device__ __forceinline__ uint32_t first(uint32_t unit)
    {
        return 64 * (unit / 8) + 4 * (unit % 8);
    }
    static __device__ __forceinline__ uint32_t second(uint32_t unit)
    {
        return first(unit) + 32;
    }
    static __device__ __forceinline__ void scale_and_minimum(const uint8_t *packed, uint32_t i, float *ret_scale,
                                                             float *ret_minimum)
    {
        uint32_t scale, minimum;
        if (i < 4) {
            scale = packed[i] & 63u;
            minimum = packed[i + 4] & 63u;
        } else {
            scale = (packed[i + 4] & 15u) | static_cast<uint32_t>(packed[i - 4] >> 6) << 4;
            minimum = static_cast<uint32_t>(packed[i + 4] >> 4) | static_cast<uint32_t>(packed[i] >> 6) << 4;
        }
        *ret_scale = static_cast<float>(scale);
        *ret_minimum = static_cast<float>(minimum);
    }
    static __device__ __forceinline__ cuda_unit read(const uint8_t *in, uint32_t unit)
    {
        const uint32_t pair = unit / 8, l = 4 * (unit % 8);
        const float scale = cuda_half_at(in), minimum = cuda_half_at(in + 2);
        float scales[2], minima[2];
        scale_and_minimum(in + 4, 2 * pair, &scales[0], &minima[0]);
        scale_and_minimum(in + 4, 2 * pair + 1, &scales[1], &minima[1]);
        const float d0 = scale * scales[0], d1 = scale * scales[1];
        const float m0 = minimum * minima[0], m1 = minimum * minima[1];
        const uint32_t q = *reinterpret_cast<const uint32_t *>(in + (has_fifth ? 48 : 16) + 32 * pair + l);
        const uint32_t high = has_fifth ? *reinterpret_cast<const uint32_t *>(in + 16 + l) >> 2 * pair : 0;
        cuda_unit out;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            out.weights[j] = d0 * cuda_nibble(q, 2 * j, high >> 8 * j & 1, 0) - m0;
            out.weights[4 + j] = d1 * cuda_nibble(q, 2 * j + 1, high >> (8 * j + 1) & 1, 0) - m1;
        }
        return out;
    }
};

template <> struct cuda_block<TENSOR_Q4_K> : cuda_block_k<false> {
};
template <> struct cuda_block<TENSOR_Q5_K> : cuda_block_k<true> {
};

/*
 * Q6_K: two halves of 128 columns; in each, four groups of 32 share ql (4 low bits) and qh (2 high bits). Unit u holds 4 bytes
 * of ql: group g = u / 8 % 2 in its low nibbles, group g + 2 in its high ones.
 */
template <> struct cuda_block<TENSOR_Q6_K> {
    static constexpr uint32_t n_columns = 256, n_units = 32, n_bytes = 210;
    static __device__ __forceinline__ uint32_t first(uint32_t unit)
    {
        return 128 * (unit / 16) + 32 * (unit / 8 % 2) + 4 * (unit % 8);
    }
    static __device__ __forceinline__ uint32_t second(uint32_t unit)
    {
        return first(unit) + 64;
    }
    static __device__ __forceinline__ cuda_unit read(const uint8_t *in, uint32_t unit)
    {
        const uint32_t half = unit / 16, group = unit / 8 % 2, l = 4 * (unit % 8);
        const float scale = cuda_half_at(in + 208);
        const int8_t *scales = reinterpret_cast<const int8_t *>(in + 192) + 8 * half + 2 * group + l / 16;
        const float d0 = scale * static_cast<float>(scales[0]), d1 = scale * static_cast<float>(scales[4]);
        const uint32_t q = cuda_word_at(in + 64 * half + 32 * group + l);
        const uint32_t high = cuda_word_at(in + 128 + 32 * half + l) >> 2 * group;
        cuda_unit out;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            out.weights[j] = d0 * cuda_nibble(q, 2 * j, high >> 8 * j & 3, 32);
            out.weights[4 + j] = d1 * cuda_nibble(q, 2 * j + 1, high >> (8 * j + 4) & 3, 32);
        }
        return out;
    }
};

/* Types without blocks: one number at a time. */
static __device__ __forceinline__ float cuda_number_at(int type, const void *numbers, size_t i)
{
    if (type == TENSOR_F32)
        return static_cast<const float *>(numbers)[i];
    const uint16_t bits = static_cast<const uint16_t *>(numbers)[i];
    return type == TENSOR_F16 ? __half2float(__ushort_as_half(bits))
                              : __uint_as_float(static_cast<uint32_t>(bits) << 16);
}

static inline bool cuda_has_blocks(int type)
{
    return type != TENSOR_F32 && type != TENSOR_F16 && type != TENSOR_BF16;
}

/* CALL(type) for each type with blocks, inside a switch. */
#define CUDA_BLOCK_TYPES(CALL)                                                                                         \
    CALL(TENSOR_Q4_0)                                                                                                  \
    CALL(TENSOR_Q4_1)                                                                                                  \
    CALL(TENSOR_Q5_0)                                                                                                  \
    CALL(TENSOR_Q5_1)                                                                                                  \
    CALL(TENSOR_Q8_0)                                                                                                  \
    CALL(TENSOR_Q4_K)                                                                                                  \
    CALL(TENSOR_Q5_K)                                                                                                  \
    CALL(TENSOR_Q6_K)
