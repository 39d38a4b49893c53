/*
 * integer_avx2.h - exact integer products of 8 weight rows x 32 columns with the columns of up to 4 tokens, in AVX2.
 *
 * maddubs multiplies unsigned weights with signed activations (|a| <= 127) and adds pairs in 16 bits. That never
 * saturates here, and how many of its results fit into one 16-bit sum follows from the weights' range:
 *     u4  2 x 15 x 127 x 8 = 30480        u5  2 x 31 x 127 x 4 = 31496        u6  2 x 63 x 127 x 2 = 32004
 *     s8  2 x 128 x 127 = 32512, of |q| and the activation with q's sign
 */
#pragma once

#include <string.h>

#include "gpu-worker/backend/cpu/cpu_kernels.h"
#include "kernels/vector.h"

#define INTEGER_MAX_TOKENS 4u

VECTOR_INLINE vi integer_load(const uint8_t *p)
{
    return _mm256_loadu_si256((const __m256i *)(const void *)p);
}

/* Columns 4g..4g+3 of one token, for every row. */
VECTOR_INLINE vi integer_columns(const struct cpu_activation *x, uint32_t g)
{
    int32_t four;
    memcpy(&four, x->q + 4 * g, sizeof four);
    return _mm256_set1_epi32(four);
}

VECTOR_INLINE vi integer_widen(vi pairs)
{
    return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}

VECTOR_INLINE void integer_zero(const uint32_t n_tokens, vi *sums)
{
#pragma GCC unroll 4
    for (uint32_t t = 0; t < n_tokens; t++)
        sums[t] = _mm256_setzero_si256();
}

/* pairs[t] += weights x columns of group g, in 16 bits. */
VECTOR_INLINE void integer_add(const uint32_t n_tokens, vi weights, const struct cpu_activation *const *x, uint32_t b,
                               uint32_t g, vi *pairs)
{
#pragma GCC unroll 4
    for (uint32_t t = 0; t < n_tokens; t++) {
        pairs[t] = _mm256_add_epi16(pairs[t], _mm256_maddubs_epi16(weights, integer_columns(x[t] + b, g)));
        /* add now: left to itself the compiler multiplies everything first and spills */
        __asm__("" : "+x"(pairs[t]));
    }
}

VECTOR_INLINE void integer_u4(const uint32_t n_tokens, const uint8_t *quants, const struct cpu_activation *const *x,
                              uint32_t b, vi *sums)
{
    const vi low = _mm256_set1_epi8(15);
    integer_zero(n_tokens, sums);
#pragma GCC unroll 4
    for (uint32_t g = 0; g < 4; g++) {
        vi bytes = integer_load(quants + g * 32);
        integer_add(n_tokens, _mm256_and_si256(bytes, low), x, b, g, sums);
        integer_add(n_tokens, _mm256_and_si256(_mm256_srli_epi16(bytes, 4), low), x, b, g + 4, sums);
    }
#pragma GCC unroll 4
    for (uint32_t t = 0; t < n_tokens; t++)
        sums[t] = integer_widen(sums[t]);
}

VECTOR_INLINE void integer_u5(const uint32_t n_tokens, const uint8_t *quants, const struct cpu_activation *const *x,
                              uint32_t b, vi *sums)
{
    vi pairs[INTEGER_MAX_TOKENS];
    integer_zero(n_tokens, sums);
#pragma GCC unroll 2
    for (uint32_t half = 0; half < 2; half++) {
        integer_zero(n_tokens, pairs);
#pragma GCC unroll 4
        for (uint32_t g = half * 4; g < half * 4 + 4; g++)
            integer_add(n_tokens, integer_load(quants + g * 32), x, b, g, pairs);
#pragma GCC unroll 4
        for (uint32_t t = 0; t < n_tokens; t++)
            sums[t] = _mm256_add_epi32(sums[t], integer_widen(pairs[t]));
    }
}

/* 16 columns, the lower or the upper half of the block. */
VECTOR_INLINE void integer_u6_half(const uint32_t n_tokens, const uint32_t half, const uint8_t *quants,
                                   const struct cpu_activation *const *x, uint32_t b, vi *sums)
{
    vi pairs[INTEGER_MAX_TOKENS];
    integer_zero(n_tokens, sums);
#pragma GCC unroll 2
    for (uint32_t g = half * 4; g < half * 4 + 4; g += 2) {
        integer_zero(n_tokens, pairs);
        integer_add(n_tokens, integer_load(quants + g * 32), x, b, g, pairs);
        integer_add(n_tokens, integer_load(quants + (g + 1) * 32), x, b, g + 1, pairs);
#pragma GCC unroll 4
        for (uint32_t t = 0; t < n_tokens; t++)
            sums[t] = _mm256_add_epi32(sums[t], integer_widen(pairs[t]));
    }
}

VECTOR_INLINE void integer_s8(const uint32_t n_tokens, const uint8_t *quants, const struct cpu_activation *const *x,
                              uint32_t b, vi *sums)
{
    integer_zero(n_tokens, sums);
#pragma GCC unroll 8
    for (uint32_t g = 0; g < 8; g++) {
        vi weights = integer_load(quants + g * 32);
        vi size = _mm256_abs_epi8(weights); /* 128 for -128, as unsigned */
#pragma GCC unroll 4
        for (uint32_t t = 0; t < n_tokens; t++) {
            vi columns = _mm256_sign_epi8(integer_columns(x[t] + b, g), weights);
            sums[t] = _mm256_add_epi32(sums[t], integer_widen(_mm256_maddubs_epi16(size, columns)));
            __asm__("" : "+x"(sums[t]));
        }
    }
}

/* 8 integers in -127..127 as bytes. */
VECTOR_INLINE void integer_store8(int8_t *p, vi a)
{
    __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    _mm_storel_epi64((__m128i *)(void *)p, _mm_packs_epi16(words, words));
}
