/*
 * vector_integer.h - exact integer products of VECTOR_WIDTH weight rows x 32 columns with the columns of some tokens.
 *
 * Weights become 16-bit words, two columns of a row side by side; a dot adds the two products of words in 32 bits.
 * Nothing can overflow: 128 x 32767 x 32 < 2^31 (the asserts below). Three forms of the same operations, as in
 * kernels/vector.h: AVX2, AVX-512 (where vpdpwssd is multiply and add in one), and 16 lanes as two AVX2 halves.
 */
#pragma once

#include <string.h>

#include "gpu-worker/backend/cpu/cpu_kernels.h"
#include "kernels/vector.h"

#define INTEGER_MAX_TOKENS  8u
#define INTEGER_GROUP_BYTES (VECTOR_WIDTH * 4) /* 4 bytes of every row */

_Static_assert(INT64_C(128) * CPU_LARGEST * CPU_BLOCK <= INT32_MAX, "the sum of a block fits, whatever the weights");

VECTOR_INLINE __m256i lanes8_words(const uint8_t *p)
{
    return _mm256_loadu_si256((const __m256i *)(const void *)p);
}
VECTOR_INLINE __m256i lanes8_nibble(__m256i words, const int i)
{
    __m256i low = i ? _mm256_srli_epi16(words, 4 * i) : words;
    return i < 3 ? _mm256_and_si256(low, _mm256_set1_epi16(15)) : low;
}
VECTOR_INLINE __m256i lanes8_byte(__m256i words, const int i)
{
    return i ? _mm256_srli_epi16(words, 8) : _mm256_and_si256(words, _mm256_set1_epi16(255));
}
VECTOR_INLINE __m256i lanes8_signed_byte(__m256i words, const int i)
{
    return _mm256_srai_epi16(i ? words : _mm256_slli_epi16(words, 8), 8);
}
VECTOR_INLINE __m256i lanes8_dot(__m256i sum, __m256i weights, __m256i columns)
{
    return _mm256_add_epi32(sum, _mm256_madd_epi16(weights, columns));
}

#if VECTOR_WIDTH == 8

VECTOR_INLINE vi integer_load(const uint8_t *p)
{
    return lanes8_words(p);
}
VECTOR_INLINE vi integer_set(int32_t a)
{
    return _mm256_set1_epi32(a);
}
VECTOR_INLINE vi integer_nibble(vi words, const int i) /* bits 4i.. of each word */
{
    return lanes8_nibble(words, i);
}
VECTOR_INLINE vi integer_byte(vi words, const int i) /* the lower or the upper byte of each word */
{
    return lanes8_byte(words, i);
}
VECTOR_INLINE vi integer_signed_byte(vi words, const int i)
{
    return lanes8_signed_byte(words, i);
}
VECTOR_INLINE vi integer_dot(vi sum, vi weights, vi columns)
{
    sum = lanes8_dot(sum, weights, columns);
    __asm__("" : "+x"(sum)); /* add now: left to itself the compiler multiplies everything first and spills */
    return sum;
}
VECTOR_INLINE void integer_store(int16_t *p, vi a) /* lanes that fit into 16 bits */
{
    __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    _mm_storeu_si128((__m128i *)(void *)p, words);
}

#elif defined(__AVX512VNNI__)

VECTOR_INLINE vi integer_load(const uint8_t *p)
{
    return _mm512_loadu_si512(p);
}
VECTOR_INLINE vi integer_set(int32_t a)
{
    return _mm512_set1_epi32(a);
}
VECTOR_INLINE vi integer_nibble(vi words, const int i)
{
    vi low = i ? _mm512_srli_epi16(words, 4 * i) : words;
    return i < 3 ? _mm512_and_si512(low, _mm512_set1_epi16(15)) : low;
}
VECTOR_INLINE vi integer_byte(vi words, const int i)
{
    return i ? _mm512_srli_epi16(words, 8) : _mm512_and_si512(words, _mm512_set1_epi16(255));
}
VECTOR_INLINE vi integer_signed_byte(vi words, const int i)
{
    return _mm512_srai_epi16(i ? words : _mm512_slli_epi16(words, 8), 8);
}
VECTOR_INLINE vi integer_dot(vi sum, vi weights, vi columns)
{
    return _mm512_dpwssd_epi32(sum, weights, columns);
}
VECTOR_INLINE void integer_store(int16_t *p, vi a)
{
    _mm256_storeu_si256((__m256i *)(void *)p, _mm512_cvtsepi32_epi16(a));
}

#else

VECTOR_INLINE vi integer_load(const uint8_t *p)
{
    return (vi){lanes8_words(p), lanes8_words(p + 32)};
}
VECTOR_INLINE vi integer_set(int32_t a)
{
    return (vi){_mm256_set1_epi32(a), _mm256_set1_epi32(a)};
}
VECTOR_INLINE vi integer_nibble(vi words, const int i)
{
    return (vi){lanes8_nibble(words.low, i), lanes8_nibble(words.high, i)};
}
VECTOR_INLINE vi integer_byte(vi words, const int i)
{
    return (vi){lanes8_byte(words.low, i), lanes8_byte(words.high, i)};
}
VECTOR_INLINE vi integer_signed_byte(vi words, const int i)
{
    return (vi){lanes8_signed_byte(words.low, i), lanes8_signed_byte(words.high, i)};
}
VECTOR_INLINE vi integer_dot(vi sum, vi weights, vi columns)
{
    return (vi){lanes8_dot(sum.low, weights.low, columns.low), lanes8_dot(sum.high, weights.high, columns.high)};
}
VECTOR_INLINE void integer_store(int16_t *p, vi a)
{
    __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a.low, a.high), 0xd8);
    _mm256_storeu_si256((__m256i *)(void *)p, words);
}

#endif

/* Columns 2i and 2i + 1 of one token, for every row. */
VECTOR_INLINE vi integer_columns(const struct cpu_activation *x, uint32_t i)
{
    int32_t two;
    memcpy(&two, x->q + 2 * i, sizeof two);
    return integer_set(two);
}

VECTOR_INLINE void integer_zero(const uint32_t n_tokens, vi *sums)
{
#pragma GCC unroll 8
    for (uint32_t t = 0; t < n_tokens; t++)
        sums[t] = integer_set(0);
}

/* sums[t] += weights x columns 2i and 2i + 1 of block b of token t. */
VECTOR_INLINE void integer_add(const uint32_t n_tokens, vi weights, const struct cpu_activation *const *x, uint32_t b,
                               uint32_t i, vi *sums)
{
#pragma GCC unroll 8
    for (uint32_t t = 0; t < n_tokens; t++)
        sums[t] = integer_dot(sums[t], weights, integer_columns(x[t] + b, i));
}

/* Nibbles: all 32 columns. */
VECTOR_INLINE void integer_u4(const uint32_t n_tokens, const uint8_t *quants, const struct cpu_activation *const *x,
                              uint32_t b, vi *sums)
{
    integer_zero(n_tokens, sums);
#pragma GCC unroll 4
    for (uint32_t g = 0; g < 4; g++) {
        vi words = integer_load(quants + g * INTEGER_GROUP_BYTES);
        integer_add(n_tokens, integer_nibble(words, 0), x, b, 2 * g, sums);
        integer_add(n_tokens, integer_nibble(words, 1), x, b, 2 * g + 8, sums);
        integer_add(n_tokens, integer_nibble(words, 2), x, b, 2 * g + 1, sums);
        integer_add(n_tokens, integer_nibble(words, 3), x, b, 2 * g + 9, sums);
    }
}

/* Bytes: n_groups groups of 4 columns. */
VECTOR_INLINE void integer_bytes(const uint32_t n_tokens, const int with_sign, const uint32_t first_group,
                                 const uint32_t n_groups, const uint8_t *quants, const struct cpu_activation *const *x,
                                 uint32_t b, vi *sums)
{
    integer_zero(n_tokens, sums);
#pragma GCC unroll 8
    for (uint32_t g = first_group; g < first_group + n_groups; g++) {
        vi words = integer_load(quants + g * INTEGER_GROUP_BYTES);
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++)
            integer_add(n_tokens, with_sign ? integer_signed_byte(words, i) : integer_byte(words, i), x, b,
                        2 * g + (uint32_t)i, sums);
    }
}
