/* cuda_rotation.cuh - the rotation of rot4, rot3 and rot2 (codec_rot_quantize.c): random signs, Hadamard. */
#pragma once

#include "gpu-worker/backend/cuda/cuda_keys.cuh"
#include "gpu-worker/keys/codec_rot.h"

/* The sign of dimension i: bit 31 of a hash. */
static __device__ __forceinline__ float cuda_rotation_sign(uint32_t i)
{
    uint32_t h = (i + 1) * 0x9e3779b9u;
    h = (h ^ h >> 16) * 0x85ebca6bu;
    h = (h ^ h >> 13) * 0xc2b2ae35u;
    return (h ^ h >> 16) & 0x80000000u ? -1.0f : 1.0f;
}

static __device__ __forceinline__ uint32_t cuda_rotation_size(uint32_t head_dim)
{
    return head_dim & (0u - head_dim);
}

/* Hadamard, not normalised, of `width` vectors that lie side by side in shared memory x [n][stride]; the whole block takes part. */
static __device__ __forceinline__ void cuda_rotation_hadamard(float *x, uint32_t n, uint32_t width, uint32_t stride)
{
    const uint32_t size = cuda_rotation_size(n);
    for (uint32_t half = 1; half < size; half *= 2) {
        __syncthreads();
        for (uint32_t at = threadIdx.x; at < n / 2 * width; at += blockDim.x) {
            const uint32_t pair = at / width, i = pair / half * 2 * half + pair % half;
            float *low = x + i * stride + at % width, *high = low + half * stride;
            const float a = *low, b = *high;
            *low = a + b;
            *high = a - b;
        }
    }
    __syncthreads();
}

struct cuda_rot_format {
    float unit;
    int32_t top;
};

template <uint32_t bits> static __device__ __forceinline__ cuda_rot_format cuda_rotation_format()
{
    return bits == 2   ? cuda_rot_format{ROT2_UNIT, ROT2_TOP}
           : bits == 3 ? cuda_rot_format{ROT3_UNIT, ROT3_TOP}
                       : cuda_rot_format{ROT4_UNIT, ROT4_TOP};
}
