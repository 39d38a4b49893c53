/*
 * integer_vnni.h - exact integer products of 16 weight rows x 32 columns with the columns of up to 4 tokens.
 *
 * vpdpbusd adds four products of unsigned weights and signed activations in 32 bits. Without AVX-512 (tests of the
 * 16-wide logic) the same sum is made of AVX2 halves. S8 is read as q + 128 and corrected by the activations' sum.
 */
#pragma once

#include <string.h>

#include "gpu-worker/backend/cpu/cpu_kernels.h"
#include "kernels/vector.h"

#define INTEGER_MAX_TOKENS 4u

#ifdef __AVX512VNNI__

VECTOR_INLINE vi integer_load(const uint8_t *p)
{
    return _mm512_loadu_si512(p);
}
VECTOR_INLINE vi integer_set(int32_t a)
{
    return _mm512_set1_epi32(a);
}
VECTOR_INLINE vi integer_and(vi a, vi b)
{
    return _mm512_and_si512(a, b);
}
VECTOR_INLINE vi integer_xor(vi a, vi b)
{
    return _mm512_xor_si512(a, b);
}
VECTOR_INLINE vi integer_high_nibbles(vi a)
{
    return _mm512_and_si512(_mm512_srli_epi16(a, 4), _mm512_set1_epi8(15));
}
VECTOR_INLINE vi integer_dot(vi sum, vi weights, vi columns)
{
    return _mm512_dpbusd_epi32(sum, weights, columns);
}
VECTOR_INLINE void integer_store8(int8_t *p, vi a)
{
    _mm_storeu_si128((__m128i *)(void *)p, _mm512_cvtsepi32_epi8(a));
}

#else

VECTOR_INLINE vi integer_load(const uint8_t *p)
{
    return (vi){_mm256_loadu_si256((const __m256i *)(const void *)p),
                _mm256_loadu_si256((const __m256i *)(const void *)(p + 32))};
}
VECTOR_INLINE vi integer_set(int32_t a)
{
    return (vi){_mm256_set1_epi32(a), _mm256_set1_epi32(a)};
}
VECTOR_INLINE vi integer_and(vi a, vi b)
{
    return (vi){_mm256_and_si256(a.low, b.low), _mm256_and_si256(a.high, b.high)};
}
VECTOR_INLINE vi integer_xor(vi a, vi b)
{
    return (vi){_mm256_xor_si256(a.low, b.low), _mm256_xor_si256(a.high, b.high)};
}
VECTOR_INLINE vi integer_high_nibbles(vi a)
{
    const __m256i mask = _mm256_set1_epi8(15);
    return (vi){_mm256_and_si256(_mm256_srli_epi16(a.low, 4), mask),
                _mm256_and_si256(_mm256_srli_epi16(a.high, 4), mask)};
}
VECTOR_INLINE __m256i integer_dot_half(__m256i sum, __m256i weights, __m256i columns)
{
    /* even and odd bytes as 16-bit numbers, whose products of pairs cannot overflow 32 bits */
    __m256i even = _mm256_madd_epi16(_mm256_and_si256(weights, _mm256_set1_epi16(255)),
                                     _mm256_srai_epi16(_mm256_slli_epi16(columns, 8), 8));
    __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(weights, 8), _mm256_srai_epi16(columns, 8));
    return _mm256_add_epi32(sum, _mm256_add_epi32(even, odd));
}
VECTOR_INLINE vi integer_dot(vi sum, vi weights, vi columns)
{
    return (vi){integer_dot_half(sum.low, weights.low, columns.low),
                integer_dot_half(sum.high, weights.high, columns.high)};
}
VECTOR_INLINE void integer_store8(int8_t *p, vi a)
{
    __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a.low, a.high), 0xd8);
    __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128((__m128i *)(void *)p, bytes);
}

#endif

/* Columns 4g..4g+3 of one token, for every row. */
VECTOR_INLINE vi integer_columns(const struct cpu_activation *x, uint32_t g)
{
    int32_t four;
    memcpy(&four, x->q + 4 * g, sizeof four);
    return integer_set(four);
}

VECTOR_INLINE void integer_zero(const uint32_t n_tokens, vi *sums)
{
#pragma GCC unroll 4
    for (uint32_t t = 0; t < n_tokens; t++)
        sums[t] = integer_set(0);
}

VECTOR_INLINE void integer_add(const uint32_t n_tokens, vi weights, const struct cpu_activation *const *x, uint32_t b,
                               uint32_t g, vi *sums)
{
#pragma GCC unroll 4
    for (uint32_t t = 0; t < n_tokens; t++)
        sums[t] = integer_dot(sums[t], weights, integer_columns(x[t] + b, g));
}

VECTOR_INLINE void integer_u4(const uint32_t n_tokens, const uint8_t *quants, const struct cpu_activation *const *x,
                              uint32_t b, vi *sums)
{
    integer_zero(n_tokens, sums);
#pragma GCC unroll 4
    for (uint32_t g = 0; g < 4; g++) {
        vi bytes = integer_load(quants + g * 64);
        integer_add(n_tokens, integer_and(bytes, integer_set(0x0f0f0f0f)), x, b, g, sums);
        integer_add(n_tokens, integer_high_nibbles(bytes), x, b, g + 4, sums);
    }
}

VECTOR_INLINE void integer_u5(const uint32_t n_tokens, const uint8_t *quants, const struct cpu_activation *const *x,
                              uint32_t b, vi *sums)
{
    integer_zero(n_tokens, sums);
#pragma GCC unroll 8
    for (uint32_t g = 0; g < 8; g++)
        integer_add(n_tokens, integer_load(quants + g * 64), x, b, g, sums);
}

VECTOR_INLINE void integer_u6_half(const uint32_t n_tokens, const uint32_t half, const uint8_t *quants,
                                   const struct cpu_activation *const *x, uint32_t b, vi *sums)
{
    integer_zero(n_tokens, sums);
#pragma GCC unroll 4
    for (uint32_t g = half * 4; g < half * 4 + 4; g++)
        integer_add(n_tokens, integer_load(quants + g * 64), x, b, g, sums);
}

VECTOR_INLINE void integer_s8(const uint32_t n_tokens, const uint8_t *quants, const struct cpu_activation *const *x,
                              uint32_t b, vi *sums)
{
#pragma GCC unroll 4
    for (uint32_t t = 0; t < n_tokens; t++)
        sums[t] = integer_set(x[t][b].total * -128);
#pragma GCC unroll 8
    for (uint32_t g = 0; g < 8; g++) {
        vi bytes = integer_load(quants + g * 64);
        integer_add(n_tokens, integer_xor(bytes, integer_set((int32_t)0x80808080u)), x, b, g, sums);
    }
}
