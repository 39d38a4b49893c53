/* half.h - IEEE 754 half precision in integer arithmetic, for tables and tails without F16C. Exact, any rounding mode. */
#pragma once

#include <stdint.h>
#include <string.h>

static inline float half_decode(uint16_t bits)
{
    uint32_t sign = (uint32_t)(bits & 0x8000u) << 16;
    uint32_t exponent = (bits >> 10) & 31u;
    uint32_t mantissa = bits & 1023u;
    uint32_t word;
    if (exponent == 31) {
        /* infinity; a NaN keeps its payload and becomes quiet, as the hardware does */
        word = sign | 0x7f800000u | mantissa << 13 | (mantissa ? 0x00400000u : 0u);
    } else if (exponent != 0) {
        word = sign | (exponent + 112u) << 23 | mantissa << 13;
    } else if (mantissa == 0) {
        word = sign;
    } else {
        uint32_t shift = (uint32_t)__builtin_clz(mantissa) - 21u; /* brings the leading one to bit 10 */
        word = sign | (113u - shift) << 23 | ((mantissa << shift) & 1023u) << 13;
    }
    float value;
    memcpy(&value, &word, sizeof value);
    return value;
}

/* Round to nearest even; overflow becomes infinity. */
static inline uint16_t half_encode(float value)
{
    uint32_t word;
    memcpy(&word, &value, sizeof word);
    uint32_t sign = (word >> 16) & 0x8000u;
    uint32_t magnitude = word & 0x7fffffffu;
    if (magnitude > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00u | ((magnitude >> 13) & 1023u));
    if (magnitude >= 0x477ff000u) /* 65520 and above round to infinity */
        return (uint16_t)(sign | 0x7c00u);
    if (magnitude < 0x33000000u) /* below half of the smallest subnormal */
        return (uint16_t)sign;
    uint32_t kept, dropped, half;
    if (magnitude < 0x38800000u) { /* subnormal result: in units of 2^-24 */
        uint32_t shift = 126u - (magnitude >> 23);
        uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
        kept = mantissa >> shift;
        dropped = mantissa & ((1u << shift) - 1u);
        half = 1u << (shift - 1u);
    } else {
        kept = (magnitude - 0x38000000u) >> 13;
        dropped = magnitude & 0x1fffu;
        half = 0x1000u;
    }
    if (dropped > half || (dropped == half && (kept & 1u)))
        kept++; /* may carry into the exponent, which is right */
    return (uint16_t)(sign | kept);
}
