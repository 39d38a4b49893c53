/*
 * vector.h - the few vector operations that the kernels are written in, for VECTOR_WIDTH 8 or 16 floats.
 *
 * The file that includes this defines VECTOR_WIDTH first and is compiled with the flags of its instruction set:
 *     8              AVX2, FMA, F16C
 *     16             AVX-512 F, BW, VL, DQ
 *     16, without    the same 16 lanes as two AVX2 halves. Nothing ships with it: it lets a machine without AVX-512
 *     AVX-512        run, bit for bit, the algorithms of the 16-wide tables.
 *
 * Invariant  every operation is IEEE 754 exact (no approximate instruction), so the three give equal bits lane by lane;
 *            the sums across lanes use one fixed tree: ((0+2)+(1+3)) + ((4+6)+(5+7)), and at width 16 first
 *            lane i + lane i+8.
 */
#pragma once

#include <immintrin.h>
#include <stdint.h>

#ifndef VECTOR_WIDTH
#error "define VECTOR_WIDTH before this include"
#endif

#define VECTOR_INLINE static inline __attribute__((always_inline, unused))

/* ---- 8 lanes: the base of all three ---- */

VECTOR_INLINE float lanes8_sum(__m256 a)
{
    __m256 twos = _mm256_add_ps(a, _mm256_permute_ps(a, 0x4e));
    __m256 fours = _mm256_add_ps(twos, _mm256_permute_ps(twos, 0xb1));
    return _mm_cvtss_f32(_mm_add_ss(_mm256_castps256_ps128(fours), _mm256_extractf128_ps(fours, 1)));
}

/* In each half: a0 + a2, a1 + a3, b2 + b0, b3 + b1. */
VECTOR_INLINE __m256 lanes8_twos(__m256 a, __m256 b)
{
    return _mm256_add_ps(_mm256_blend_ps(a, b, 0xcc), _mm256_shuffle_ps(a, b, 0x4e));
}

/* The lanes8_sum of each of four vectors, by the same tree. */
VECTOR_INLINE __m128 lanes8_sum4(__m256 a, __m256 b, __m256 c, __m256 d)
{
    __m256 ab = lanes8_twos(a, b), cd = lanes8_twos(c, d);
    __m256 fours = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x88), _mm256_shuffle_ps(ab, cd, 0xdd));
    return _mm_add_ps(_mm256_castps256_ps128(fours), _mm256_extractf128_ps(fours, 1));
}

VECTOR_INLINE float lanes8_max(__m256 a)
{
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}

/* All ones in lane i where bit i is set. */
VECTOR_INLINE __m256i lanes8_bits(uint32_t bits)
{
    const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32((int)bits), lane), lane);
}

VECTOR_INLINE __m256 lanes8_exponent_add(__m256 a, __m256i n)
{
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), _mm256_slli_epi32(n, 23)));
}

#if VECTOR_WIDTH == 8

typedef __m256 vf;
typedef __m256i vi;

VECTOR_INLINE vf vf_zero(void)
{
    return _mm256_setzero_ps();
}
VECTOR_INLINE vf vf_set(float a)
{
    return _mm256_set1_ps(a);
}
VECTOR_INLINE vf vf_load(const float *p)
{
    return _mm256_loadu_ps(p);
}
VECTOR_INLINE void vf_store(float *p, vf a)
{
    _mm256_storeu_ps(p, a);
}
VECTOR_INLINE vf vf_decode(const uint16_t *p)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)p));
}
VECTOR_INLINE vf vf_bytes(const int8_t *p) /* signed */
{
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)p)));
}
VECTOR_INLINE void vf_encode(uint16_t *p, vf a)
{
    _mm_storeu_si128((__m128i *)(void *)p, _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}
VECTOR_INLINE vf vf_decode_bf16(const uint16_t *p)
{
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
VECTOR_INLINE vf vf_add(vf a, vf b)
{
    return _mm256_add_ps(a, b);
}
VECTOR_INLINE vf vf_sub(vf a, vf b)
{
    return _mm256_sub_ps(a, b);
}
VECTOR_INLINE vf vf_mul(vf a, vf b)
{
    return _mm256_mul_ps(a, b);
}
VECTOR_INLINE vf vf_div(vf a, vf b)
{
    return _mm256_div_ps(a, b);
}
VECTOR_INLINE vf vf_fma(vf a, vf b, vf c) /* a * b + c, one rounding */
{
    return _mm256_fmadd_ps(a, b, c);
}
VECTOR_INLINE vf vf_max(vf a, vf b) /* b where either is NaN */
{
    return _mm256_max_ps(a, b);
}
VECTOR_INLINE vf vf_min(vf a, vf b) /* b where either is NaN */
{
    return _mm256_min_ps(a, b);
}
VECTOR_INLINE vf vf_abs(vf a)
{
    return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a);
}
VECTOR_INLINE vf vf_less(vf a, vf b, vf yes, vf no) /* a < b ? yes : no */
{
    return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
VECTOR_INLINE vf vf_bits(uint32_t bits, vf yes, vf no) /* bit i of bits ? yes : no */
{
    return _mm256_blendv_ps(no, yes, _mm256_castsi256_ps(lanes8_bits(bits)));
}
VECTOR_INLINE vi vf_to_int(vf a) /* to nearest even; INT32_MIN for NaN and what does not fit */
{
    return _mm256_cvtps_epi32(a);
}
VECTOR_INLINE vf vi_to_float(vi a)
{
    return _mm256_cvtepi32_ps(a);
}
VECTOR_INLINE vf vf_exponent_add(vf a, vi n) /* a * 2^n while the result is a normal number */
{
    return lanes8_exponent_add(a, n);
}
VECTOR_INLINE float vf_sum(vf a)
{
    return lanes8_sum(a);
}
VECTOR_INLINE __m128 vf_sum4(vf a, vf b, vf c, vf d)
{
    return lanes8_sum4(a, b, c, d);
}
VECTOR_INLINE float vf_max_across(vf a)
{
    return lanes8_max(a);
}

#elif defined(__AVX512F__)

typedef __m512 vf;
typedef __m512i vi;

VECTOR_INLINE __m256 vf_fold(vf a)
{
    return _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
}
VECTOR_INLINE vf vf_zero(void)
{
    return _mm512_setzero_ps();
}
VECTOR_INLINE vf vf_set(float a)
{
    return _mm512_set1_ps(a);
}
VECTOR_INLINE vf vf_load(const float *p)
{
    return _mm512_loadu_ps(p);
}
VECTOR_INLINE void vf_store(float *p, vf a)
{
    _mm512_storeu_ps(p, a);
}
VECTOR_INLINE vf vf_decode(const uint16_t *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)p));
}
VECTOR_INLINE vf vf_bytes(const int8_t *p)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(const void *)p)));
}
VECTOR_INLINE void vf_encode(uint16_t *p, vf a)
{
    _mm256_storeu_si256((__m256i *)(void *)p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}
VECTOR_INLINE vf vf_decode_bf16(const uint16_t *p)
{
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
VECTOR_INLINE vf vf_add(vf a, vf b)
{
    return _mm512_add_ps(a, b);
}
VECTOR_INLINE vf vf_sub(vf a, vf b)
{
    return _mm512_sub_ps(a, b);
}
VECTOR_INLINE vf vf_mul(vf a, vf b)
{
    return _mm512_mul_ps(a, b);
}
VECTOR_INLINE vf vf_div(vf a, vf b)
{
    return _mm512_div_ps(a, b);
}
VECTOR_INLINE vf vf_fma(vf a, vf b, vf c)
{
    return _mm512_fmadd_ps(a, b, c);
}
VECTOR_INLINE vf vf_max(vf a, vf b)
{
    return _mm512_max_ps(a, b);
}
VECTOR_INLINE vf vf_min(vf a, vf b)
{
    return _mm512_min_ps(a, b);
}
VECTOR_INLINE vf vf_abs(vf a)
{
    return _mm512_abs_ps(a);
}
VECTOR_INLINE vf vf_less(vf a, vf b, vf yes, vf no)
{
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
}
VECTOR_INLINE vf vf_bits(uint32_t bits, vf yes, vf no)
{
    return _mm512_mask_blend_ps((__mmask16)bits, no, yes);
}
VECTOR_INLINE vi vf_to_int(vf a)
{
    return _mm512_cvtps_epi32(a);
}
VECTOR_INLINE vf vi_to_float(vi a)
{
    return _mm512_cvtepi32_ps(a);
}
VECTOR_INLINE vf vf_exponent_add(vf a, vi n)
{
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a), _mm512_slli_epi32(n, 23)));
}
VECTOR_INLINE float vf_sum(vf a)
{
    return lanes8_sum(vf_fold(a));
}
VECTOR_INLINE __m128 vf_sum4(vf a, vf b, vf c, vf d)
{
    return lanes8_sum4(vf_fold(a), vf_fold(b), vf_fold(c), vf_fold(d));
}
VECTOR_INLINE float vf_max_across(vf a)
{
    return lanes8_max(_mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1)));
}

#else

#include "kernels/vector_halves.h"

#endif
