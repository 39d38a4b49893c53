/* lanes_plain.h - the operations of kernels/vector.h that passes_loops.h uses and of those it adds, 16 lanes in plain C: equal bits. */
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#define VECTOR_INLINE static inline __attribute__((always_inline, unused))

typedef struct {
    float lane[16];
} vf;

typedef struct {
    int32_t lane[16];
} vi;

#define LANES(type, expression)                                                                                        \
    do {                                                                                                               \
        type result;                                                                                                   \
        for (int i = 0; i < 16; i++)                                                                                   \
            result.lane[i] = (expression);                                                                             \
        return result;                                                                                                 \
    } while (0)

VECTOR_INLINE vf vf_set(float a)
{
    LANES(vf, a);
}
VECTOR_INLINE vf vf_zero(void)
{
    return vf_set(0.0f);
}
VECTOR_INLINE vf vf_load(const float *p)
{
    LANES(vf, p[i]);
}
VECTOR_INLINE void vf_store(float *p, vf a)
{
    memcpy(p, a.lane, sizeof a.lane);
}
VECTOR_INLINE vf vf_add(vf a, vf b)
{
    LANES(vf, a.lane[i] + b.lane[i]);
}
VECTOR_INLINE vf vf_sub(vf a, vf b)
{
    LANES(vf, a.lane[i] - b.lane[i]);
}
VECTOR_INLINE vf vf_mul(vf a, vf b)
{
    LANES(vf, a.lane[i] * b.lane[i]);
}
VECTOR_INLINE vf vf_fma(vf a, vf b, vf c)
{
    LANES(vf, fmaf(a.lane[i], b.lane[i], c.lane[i]));
}
VECTOR_INLINE vf vf_sqrt(vf a)
{
    LANES(vf, sqrtf(a.lane[i]));
}
VECTOR_INLINE vf vf_max(vf a, vf b) /* b where either is NaN */
{
    LANES(vf, a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]);
}
VECTOR_INLINE vf vf_where_less(vf a, vf b, vf value) /* a < b ? value : 0 */
{
    LANES(vf, a.lane[i] < b.lane[i] ? value.lane[i] : 0.0f);
}
VECTOR_INLINE vi vf_word(vf a)
{
    vi result;
    memcpy(&result, &a, sizeof result);
    return result;
}
VECTOR_INLINE vf vf_exponent_add(vf a, vi n)
{
    vf result;
    for (int i = 0; i < 16; i++) {
        uint32_t word;
        memcpy(&word, &a.lane[i], sizeof word);
        word += (uint32_t)n.lane[i] << 23;
        memcpy(&result.lane[i], &word, sizeof word);
    }
    return result;
}
VECTOR_INLINE uint32_t vf_less_bits(vf a, vf b)
{
    uint32_t bits = 0;
    for (int i = 0; i < 16; i++)
        bits |= (uint32_t)(a.lane[i] < b.lane[i]) << i;
    return bits;
}
VECTOR_INLINE float vf_sum(vf a)
{
    float s[8];
    for (int i = 0; i < 8; i++)
        s[i] = a.lane[i] + a.lane[i + 8];
    return ((s[0] + s[2]) + (s[1] + s[3])) + ((s[4] + s[6]) + (s[5] + s[7]));
}
VECTOR_INLINE void vf_store_sums(float to[4], const vf v[4])
{
    for (int i = 0; i < 4; i++)
        to[i] = vf_sum(v[i]);
}
VECTOR_INLINE float vf_max_across(vf a)
{
    float largest = a.lane[0];
    for (int i = 1; i < 16; i++)
        largest = a.lane[i] > largest ? a.lane[i] : largest;
    return largest;
}
#undef LANES
