/*
 * passes_loops.h - passes.h in 16 lanes; the file that includes this gives the lanes (lanes_plain.h; kernels/vector.h at
 * VECTOR_WIDTH 16, which without AVX-512 is two AVX2 registers) and then defines its table with PASSES_TABLE.
 *
 * A block is four vectors. Sums: (0 + 1) + (2 + 3) of them, then across lanes by vf_sum's tree.
 */
#pragma once

#include <assert.h>
#include <math.h>
#include <stdbool.h>

#include "gpu-worker/policy/passes.h"

#define PASSES_VECTORS (PASSES_BLOCK_TOKENS / PASSES_LANES)
#define PASSES_RUN     16u /* blocks summed before they are added to the total: sums of many blocks stay precise */

#ifdef VECTOR_WIDTH
/* Bit i: a < b in lane i. */
VECTOR_INLINE uint32_t vf_less_bits(vf a, vf b)
{
#ifdef __AVX512F__
    return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ);
#else
    return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(a.low, b.low, _CMP_LT_OQ)) |
           (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(a.high, b.high, _CMP_LT_OQ)) << 8;
#endif
}
VECTOR_INLINE vi vf_word(vf a) /* the bits as an integer */
{
#ifdef __AVX512F__
    return _mm512_castps_si512(a);
#else
    return (vi){_mm256_castps_si256(a.low), _mm256_castps_si256(a.high)};
#endif
}
VECTOR_INLINE vf vf_sqrt(vf a) /* correctly rounded */
{
#ifdef __AVX512F__
    return _mm512_sqrt_ps(a);
#else
    return (vf){_mm256_sqrt_ps(a.low), _mm256_sqrt_ps(a.high)};
#endif
}
/* a < b ? value : 0. (vf_less() costs a comparison more, since compilers do not see what its mask is made of.) */
VECTOR_INLINE vf vf_where_less(vf a, vf b, vf value)
{
#ifdef __AVX512F__
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), value);
#else
    return (vf){_mm256_and_ps(_mm256_cmp_ps(a.low, b.low, _CMP_LT_OQ), value.low),
                _mm256_and_ps(_mm256_cmp_ps(a.high, b.high, _CMP_LT_OQ), value.high)};
#endif
}
/* The vf_sum of each of four vectors, by the same tree. */
VECTOR_INLINE void vf_store_sums(float to[4], const vf v[4])
{
    _mm_storeu_ps(to, vf_sum4(v[0], v[1], v[2], v[3]));
}
#endif

VECTOR_INLINE vf sum_of_four(const vf v[PASSES_VECTORS])
{
    static_assert(PASSES_VECTORS == 4, "the sum of a block is of four vectors");
    return vf_add(vf_add(v[0], v[1]), vf_add(v[2], v[3]));
}

/*
 * vf_exp() of kernels/vector_exp.h for x <= 0 only, with 0 for NaN, in fewer operations: adding 1.5 x 2^23 leaves the rounded
 * x / ln 2 in the low bits of the sum.
 */
VECTOR_INLINE vf exp_of_negative(vf x)
{
    vf shifted = vf_fma(x, vf_set(1.44269504f), vf_set(0x1.8p23f));
    vf whole = vf_sub(shifted, vf_set(0x1.8p23f));
    vf r = vf_fma(whole, vf_set(-0.693147182f), x);
    r = vf_fma(whole, vf_set(1.90465429e-9f), r);
    vf p = vf_fma(vf_set(0.0013926184f), r, vf_set(0.00836317893f));
    p = vf_fma(p, r, vf_set(0.0416665561f));
    p = vf_fma(p, r, vf_set(0.166665763f));
    p = vf_fma(p, r, vf_set(0.5f));
    vf y = vf_add(vf_fma(p, vf_mul(r, r), r), vf_set(1.0f));
    return vf_where_less(vf_set(-87.3365402f), x, vf_exponent_add(y, vf_word(shifted)));
}

static float loops_largest(const float *scores, uint32_t n_blocks)
{
    vf largest[PASSES_VECTORS];
    for (uint32_t k = 0; k < PASSES_VECTORS; k++)
        largest[k] = vf_set(-INFINITY);
    for (uint32_t block = 0; block < n_blocks; block++, scores += PASSES_BLOCK_TOKENS)
        for (uint32_t k = 0; k < PASSES_VECTORS; k++)
            largest[k] = vf_max(vf_load(scores + k * PASSES_LANES), largest[k]);
    return vf_max_across(vf_max(vf_max(largest[0], largest[1]), vf_max(largest[2], largest[3])));
}

static float loops_exponentials(float *scores, uint32_t n_blocks, float largest)
{
    const vf reference = vf_set(largest);
    vf total = vf_zero();
    for (uint32_t first = 0; first < n_blocks; first += PASSES_RUN) {
        const uint32_t end = n_blocks - first < PASSES_RUN ? n_blocks : first + PASSES_RUN;
        vf run = vf_zero();
        for (uint32_t block = first; block < end; block++, scores += PASSES_BLOCK_TOKENS) {
            vf e[PASSES_VECTORS];
            for (uint32_t k = 0; k < PASSES_VECTORS; k++) {
                e[k] = exp_of_negative(vf_sub(vf_load(scores + k * PASSES_LANES), reference));
                vf_store(scores + k * PASSES_LANES, e[k]);
            }
            run = vf_add(run, sum_of_four(e));
        }
        total = vf_add(total, run);
    }
    return vf_sum(total);
}

VECTOR_INLINE float average_or_root(bool is_root, const float *exponentials, size_t stride, const float *factors,
                                    uint32_t group, uint32_t n_blocks, float *w, float *block_max)
{
    vf top = vf_zero();
    for (uint32_t block = 0; block < n_blocks; block++) {
        vf sum[PASSES_VECTORS];
        for (uint32_t k = 0; k < PASSES_VECTORS; k++)
            sum[k] = vf_zero();
        for (uint32_t head = 0; head < group; head++) {
            const vf factor = vf_set(is_root ? factors[head] * PASSES_BEFORE_SQUARE : factors[head]);
            const float *e = exponentials + head * stride + (size_t)block * PASSES_BLOCK_TOKENS;
            for (uint32_t k = 0; k < PASSES_VECTORS; k++) {
                vf of_head = vf_load(e + k * PASSES_LANES), scaled = is_root ? vf_mul(of_head, factor) : factor;
                sum[k] = vf_fma(is_root ? scaled : of_head, scaled, sum[k]);
            }
        }
        for (uint32_t k = 0; is_root && k < PASSES_VECTORS; k++)
            sum[k] = vf_mul(vf_sqrt(sum[k]), vf_set(1.0f / PASSES_BEFORE_SQUARE));
        for (uint32_t k = 0; k < PASSES_VECTORS; k++)
            vf_store(w + (size_t)block * PASSES_BLOCK_TOKENS + k * PASSES_LANES, sum[k]);
        vf largest = vf_max(vf_max(sum[0], sum[1]), vf_max(sum[2], sum[3]));
        block_max[block] = vf_max_across(largest);
        top = vf_max(top, largest);
    }
    return vf_max_across(top);
}

static float loops_average(const float *exponentials, size_t stride, const float *factors, uint32_t group,
                           uint32_t n_blocks, float *w, float *block_max)
{
    return average_or_root(false, exponentials, stride, factors, group, n_blocks, w, block_max);
}

static float loops_root(const float *exponentials, size_t stride, const float *factors, uint32_t group,
                        uint32_t n_blocks, float *w, float *block_max)
{
    return average_or_root(true, exponentials, stride, factors, group, n_blocks, w, block_max);
}

VECTOR_INLINE float sum_of_values(const float *values, uint32_t n_blocks)
{
    vf total = vf_zero();
    for (uint32_t block = 0; block < n_blocks; block += PASSES_LANES)
        total = vf_add(total, vf_load(values + block));
    return vf_sum(total);
}

/* The blocks whose values have to be computed, in trial->blocks, padded to a multiple of 4 by the last; the others' values. */
VECTOR_INLINE uint32_t unknown_blocks(const struct passes_trial *trial, float *values)
{
    uint32_t *const blocks = trial->blocks, n = 0;
    const struct passes_trial t = *trial; /* a copy: no store to values can change it */
    for (uint32_t block = 0; block < t.n_blocks; block++) {
        bool known = false;
        if (t.above != NULL) {
            values[block] = t.above[block];
            known = (t.block_max[block] < t.threshold) | (t.above[block] == t.below[block]);
        }
        blocks[n] = block;
        n += !known;
    }
    while (n % 4 != 0) {
        blocks[n] = blocks[n - 1];
        n++;
    }
    return n;
}

/* Rolled: four blocks at once do not fit the registers. */
static float loops_mass(const struct passes_trial *trial, float *values)
{
    const vf threshold = vf_set(trial->threshold);
    const uint32_t n = unknown_blocks(trial, values);
    for (uint32_t i = 0; i < n; i += 4) {
        vf sums[4];
        float mass[4];
#pragma GCC unroll 1
        for (uint32_t q = 0; q < 4; q++) {
            const float *w = trial->w + (size_t)trial->blocks[i + q] * PASSES_BLOCK_TOKENS;
            vf part[PASSES_VECTORS];
            for (uint32_t k = 0; k < PASSES_VECTORS; k++) {
                vf of_lane = vf_load(w + k * PASSES_LANES);
                part[k] = vf_sub(of_lane, vf_where_less(of_lane, threshold, of_lane)); /* exact: 0 or w */
            }
            sums[q] = sum_of_four(part);
        }
        vf_store_sums(mass, sums);
        for (uint32_t q = 0; q < 4; q++)
            values[trial->blocks[i + q]] = mass[q];
    }
    return sum_of_values(values, trial->n_blocks);
}

/* Of the w < threshold of the four blocks from trial->blocks[i] on; 0 where there is none. */
VECTOR_INLINE void means_below(const struct passes_trial *trial, uint32_t i, float mean[4])
{
    const vf threshold = vf_set(trial->threshold);
    vf sums[4];
    float n_below[4];
#pragma GCC unroll 1
    for (uint32_t q = 0; q < 4; q++) {
        const float *w = trial->w + (size_t)trial->blocks[i + q] * PASSES_BLOCK_TOKENS;
        vf part[PASSES_VECTORS];
        uint64_t below = 0;
        for (uint32_t k = 0; k < PASSES_VECTORS; k++) {
            vf of_lane = vf_load(w + k * PASSES_LANES);
            part[k] = vf_where_less(of_lane, threshold, of_lane);
            below |= (uint64_t)vf_less_bits(of_lane, threshold) << (k * PASSES_LANES);
        }
        sums[q] = sum_of_four(part);
        n_below[q] = (float)__builtin_popcountll(below);
    }
    vf_store_sums(mean, sums);
    for (uint32_t q = 0; q < 4; q++)
        mean[q] /= n_below[q] > 0 ? n_below[q] : 1.0f;
}

/*
 * The sum of |w - mean| is twice the sum of mean - w over the w below the mean - which are all below the threshold, too, so that
 * only the mean needs to ask. A rounded mean may lie above weights that are all equal; the factor, larger than all roundings
 * together, makes their deviation 0.
 */
static float loops_deviation(const struct passes_trial *trial, float *values)
{
    const uint32_t n = unknown_blocks(trial, values);
    for (uint32_t i = 0; i < n; i += 4) {
        vf sums[4];
        float mean[4], deviation[4];
        means_below(trial, i, mean);
        for (uint32_t q = 0; q < 4; q++)
            mean[q] *= 1.0f - 0x1p-20f;
#pragma GCC unroll 1
        for (uint32_t q = 0; q < 4; q++) {
            const float *w = trial->w + (size_t)trial->blocks[i + q] * PASSES_BLOCK_TOKENS;
            const vf mean_of_block = vf_set(mean[q]);
            vf part[PASSES_VECTORS];
            for (uint32_t k = 0; k < PASSES_VECTORS; k++)
                part[k] = vf_max(vf_sub(mean_of_block, vf_load(w + k * PASSES_LANES)), vf_zero());
            sums[q] = sum_of_four(part);
        }
        vf_store_sums(deviation, sums);
        for (uint32_t q = 0; q < 4; q++)
            values[trial->blocks[i + q]] = 2.0f * deviation[q];
    }
    return sum_of_values(values, trial->n_blocks);
}

/* A block that deviates from its rounded mean by no more than all roundings together deviates by 0. */
static float loops_squares(const struct passes_trial *trial, float *values)
{
    const vf threshold = vf_set(trial->threshold), scale = vf_set(PASSES_BEFORE_SQUARE);
    const uint32_t n = unknown_blocks(trial, values);
    for (uint32_t i = 0; i < n; i += 4) {
        vf sums[4];
        float mean[4], squares[4], rounding[4];
        means_below(trial, i, mean);
#pragma GCC unroll 1
        for (uint32_t q = 0; q < 4; q++) {
            const float *w = trial->w + (size_t)trial->blocks[i + q] * PASSES_BLOCK_TOKENS;
            const float scaled = mean[q] * PASSES_BEFORE_SQUARE;
            const vf minus_mean = vf_set(-scaled);
            vf d[PASSES_VECTORS];
            for (uint32_t k = 0; k < PASSES_VECTORS; k++) {
                vf of_lane = vf_load(w + k * PASSES_LANES);
                d[k] = vf_where_less(of_lane, threshold, vf_fma(of_lane, scale, minus_mean));
            }
            sums[q] = vf_add(vf_fma(d[0], d[0], vf_mul(d[1], d[1])), vf_fma(d[2], d[2], vf_mul(d[3], d[3])));
            rounding[q] = scaled * (0x1p-20f * 8.0f); /* of each of 64 */
        }
        vf_store_sums(squares, sums);
        for (uint32_t q = 0; q < 4; q++)
            values[trial->blocks[i + q]] = squares[q] > rounding[q] * rounding[q] ? squares[q] : 0.0f;
    }
    return sum_of_values(values, trial->n_blocks);
}

static uint32_t loops_finish(const float *w, uint32_t n_blocks, float threshold, uint64_t first_block,
                             const float *exponentials, size_t stride, uint32_t group, uint64_t *masks, float *masses)
{
    const vf limit = vf_set(threshold);
    uint32_t n_kept = 0;
    for (uint32_t block = 0; block < n_blocks; block++) {
        const size_t first = (size_t)block * PASSES_BLOCK_TOKENS;
        vf of_block[PASSES_VECTORS];
        uint64_t below = 0;
        for (uint32_t k = 0; k < PASSES_VECTORS; k++) {
            of_block[k] = vf_load(w + first + k * PASSES_LANES);
            below |= (uint64_t)vf_less_bits(of_block[k], limit) << (k * PASSES_LANES);
        }
        masks[block] = block == 0 ? ~below & first_block : ~below;
        n_kept += (uint32_t)__builtin_popcountll(masks[block]);
        for (uint32_t head = 0; masses != NULL && head < group; head++) {
            vf part[PASSES_VECTORS];
            for (uint32_t k = 0; k < PASSES_VECTORS; k++) {
                vf e = vf_load(exponentials + head * stride + first + k * PASSES_LANES);
                part[k] = vf_where_less(of_block[k], limit, e);
            }
            masses[(size_t)head * n_blocks + block] = vf_sum(sum_of_four(part));
        }
    }
    return n_kept;
}

#define PASSES_TABLE(name)                                                                                             \
    const struct passes name = {loops_largest, loops_exponentials, loops_average, loops_root,                          \
                                loops_mass,    loops_deviation,    loops_squares, loops_finish}
