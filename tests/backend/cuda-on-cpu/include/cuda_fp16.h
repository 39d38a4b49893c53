/*
 * cuda_fp16.h - half precision for kernels on the CPU: stands in for NVIDIA's header of this name. Conversions only: kernels
 * compute in f32. Exact to the bit, NaNs included (0x7fff, as the device gives).
 */
#pragma once

#include <cuda_runtime.h>

#include "kernels/half.h"

struct __half {
    unsigned short bits;
};
struct __align__(4) __half2
{
    __half x, y;
};
typedef __half half;
typedef __half2 half2;

static inline __half __ushort_as_half(unsigned short bits)
{
    return {bits};
}

static inline unsigned short __half_as_ushort(__half value)
{
    return value.bits;
}

static inline float __half2float(__half value)
{
    return half_decode(value.bits);
}

static inline __half __float2half_rn(float value)
{
    return {value != value ? (unsigned short)0x7fff : half_encode(value)};
}

static inline float __low2float(__half2 value)
{
    return __half2float(value.x);
}

static inline float __high2float(__half2 value)
{
    return __half2float(value.y);
}

static inline float2 __half22float2(__half2 value)
{
    return {__half2float(value.x), __half2float(value.y)};
}

static inline __half2 __floats2half2_rn(float x, float y)
{
    return {__float2half_rn(x), __float2half_rn(y)};
}
