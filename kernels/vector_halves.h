/* vector_halves.h - vector.h's 16 lanes as two AVX2 registers; see there. Included by it alone. */
#pragma once

typedef struct {
    __m256 low, high;
} vf;

typedef struct {
    __m256i low, high;
} vi;

VECTOR_INLINE vf vf_zero(void)
{
    return (vf){_mm256_setzero_ps(), _mm256_setzero_ps()};
}
VECTOR_INLINE vf vf_set(float a)
{
    return (vf){_mm256_set1_ps(a), _mm256_set1_ps(a)};
}
VECTOR_INLINE vf vf_load(const float *p)
{
    return (vf){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
}
VECTOR_INLINE void vf_store(float *p, vf a)
{
    _mm256_storeu_ps(p, a.low);
    _mm256_storeu_ps(p + 8, a.high);
}
VECTOR_INLINE __m128i halves_load16(const uint16_t *p)
{
    return _mm_loadu_si128((const __m128i *)(const void *)p);
}
VECTOR_INLINE vf vf_decode(const uint16_t *p)
{
    return (vf){_mm256_cvtph_ps(halves_load16(p)), _mm256_cvtph_ps(halves_load16(p + 8))};
}
VECTOR_INLINE __m256 halves_bytes(const int8_t *p)
{
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)p)));
}
VECTOR_INLINE vf vf_bytes(const int8_t *p)
{
    return (vf){halves_bytes(p), halves_bytes(p + 8)};
}
VECTOR_INLINE void vf_encode(uint16_t *p, vf a)
{
    _mm_storeu_si128((__m128i *)(void *)p, _mm256_cvtps_ph(a.low, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128((__m128i *)(void *)(p + 8), _mm256_cvtps_ph(a.high, _MM_FROUND_TO_NEAREST_INT));
}
VECTOR_INLINE vf vf_decode_bf16(const uint16_t *p)
{
    return (vf){_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves_load16(p)), 16)),
                _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves_load16(p + 8)), 16))};
}

#define HALVES_BINARY(name, operation)                                                                                 \
    VECTOR_INLINE vf name(vf a, vf b)                                                                                  \
    {                                                                                                                  \
        return (vf){operation(a.low, b.low), operation(a.high, b.high)};                                               \
    }
HALVES_BINARY(vf_add, _mm256_add_ps)
HALVES_BINARY(vf_sub, _mm256_sub_ps)
HALVES_BINARY(vf_mul, _mm256_mul_ps)
HALVES_BINARY(vf_div, _mm256_div_ps)
HALVES_BINARY(vf_max, _mm256_max_ps)
HALVES_BINARY(vf_min, _mm256_min_ps)
#undef HALVES_BINARY

VECTOR_INLINE vf vf_fma(vf a, vf b, vf c)
{
    return (vf){_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
VECTOR_INLINE vf vf_abs(vf a)
{
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return (vf){_mm256_andnot_ps(sign, a.low), _mm256_andnot_ps(sign, a.high)};
}
VECTOR_INLINE vf vf_less(vf a, vf b, vf yes, vf no)
{
    return (vf){_mm256_blendv_ps(no.low, yes.low, _mm256_cmp_ps(a.low, b.low, _CMP_LT_OQ)),
                _mm256_blendv_ps(no.high, yes.high, _mm256_cmp_ps(a.high, b.high, _CMP_LT_OQ))};
}
VECTOR_INLINE vf vf_bits(uint32_t bits, vf yes, vf no)
{
    return (vf){_mm256_blendv_ps(no.low, yes.low, _mm256_castsi256_ps(lanes8_bits(bits))),
                _mm256_blendv_ps(no.high, yes.high, _mm256_castsi256_ps(lanes8_bits(bits >> 8)))};
}
VECTOR_INLINE vi vf_to_int(vf a)
{
    return (vi){_mm256_cvtps_epi32(a.low), _mm256_cvtps_epi32(a.high)};
}
VECTOR_INLINE vf vi_to_float(vi a)
{
    return (vf){_mm256_cvtepi32_ps(a.low), _mm256_cvtepi32_ps(a.high)};
}
VECTOR_INLINE vf vf_exponent_add(vf a, vi n)
{
    return (vf){lanes8_exponent_add(a.low, n.low), lanes8_exponent_add(a.high, n.high)};
}
VECTOR_INLINE float vf_sum(vf a)
{
    return lanes8_sum(_mm256_add_ps(a.low, a.high));
}
VECTOR_INLINE __m128 vf_sum4(vf a, vf b, vf c, vf d)
{
    return lanes8_sum4(_mm256_add_ps(a.low, a.high), _mm256_add_ps(b.low, b.high), _mm256_add_ps(c.low, c.high),
                       _mm256_add_ps(d.low, d.high));
}
VECTOR_INLINE float vf_max_across(vf a)
{
    return lanes8_max(_mm256_max_ps(a.low, a.high));
}
