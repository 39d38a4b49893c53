/* cuda_bf16.h - bfloat16 for kernels on the CPU: stands in for NVIDIA's header of this name. Conversions only. */
#pragma once

#include <cuda_runtime.h>

struct __nv_bfloat16 {
    unsigned short bits;
};

static inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits)
{
    return {bits};
}

static inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 value)
{
    return value.bits;
}

static inline float __bfloat162float(__nv_bfloat16 value)
{
    return __uint_as_float((unsigned int)value.bits << 16);
}

/* To nearest even; NaNs become 0x7fff, as the device gives. */
static inline __nv_bfloat16 __float2bfloat16_rn(float value)
{
    const unsigned int word = __float_as_uint(value);
    if (value != value)
        return {0x7fff};
    return {(unsigned short)((word + 0x7fffu + (word >> 16 & 1u)) >> 16)};
}
