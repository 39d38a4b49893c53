/*
 * key_scale.h - sizes of keys in 8 bits, on a logarithmic scale: code -> 2^((code - 128) / 8), and code 0 -> 0.
 *
 * Invariant  exact comparisons and table look-ups only: the same codes and values on every instruction set. Threads: any.
 */
#pragma once

#include <stdint.h>
#include <string.h>

/* Bits of 2^(i / 8) for i = 0 .. 7, less i << 20 and 16 octaves, so that adding code << 20 to entry code % 8 gives the value. */
#define KEY_SCALE_BITS(mantissa, i) (((127u - 16u) << 23) + (mantissa) - ((i) << 20))
#define KEY_SCALE_TABLE                                                                                                \
    {                                                                                                                  \
        KEY_SCALE_BITS(0x000000u, 0u), KEY_SCALE_BITS(0x0b95c2u, 1u), KEY_SCALE_BITS(0x1837f0u, 2u),                   \
            KEY_SCALE_BITS(0x25fed7u, 3u), KEY_SCALE_BITS(0x3504f3u, 4u), KEY_SCALE_BITS(0x45672au, 5u),               \
            KEY_SCALE_BITS(0x5744fdu, 6u), KEY_SCALE_BITS(0x6ac0c7u, 7u)                                               \
    }

static inline float key_scale_value(uint32_t code) /* <= 255 */
{
    static const uint32_t table[8] = KEY_SCALE_TABLE;
    const uint32_t bits = code ? table[code % 8] + (code << 20) : 0;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* The nearest, in the logarithm; below half of the smallest, and for NaN: 0. */
static inline uint32_t key_scale_code(float value)
{
    static const float halfway[8] = {1.04427378f, 1.13878863f, 1.24185781f, 1.35425555f,
                                     1.47682615f, 1.61049033f, 1.75625216f, 1.91520656f}; /* 2^((i + 1/2) / 8) */
    if (!(value >= 8.31991373e-06f))                                                      /* 2^(-127/8 - 1) */
        return 0;
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    const int32_t exponent = (int32_t)(bits >> 23) - 127;
    bits = (bits & 0x7fffffu) | 0x3f800000u;
    float mantissa;
    memcpy(&mantissa, &bits, sizeof mantissa);
    int32_t code = exponent * 8 + 128;
    for (int i = 0; i < 8; i++)
        code += mantissa >= halfway[i];
    return (uint32_t)(code < 1 ? 1 : code > 255 ? 255 : code);
}
