/*
 * vector_pq_nearest.h - the search for nearest centroids, 8 centroids at a time with AVX2; see codec_pq.h. The numbers are those
 * of the plain table: same operations, same tree.
 */
#pragma once

#include <immintrin.h>
#include <limits.h>
#include <math.h>

#include "gpu-worker/keys/codec_pq.h"
#include "kernels/vector.h"

/* Lane k of pq8_distances() is centroid number pq8_lanes()[k] of the eight. */
VECTOR_INLINE __m256i pq8_lanes(const uint32_t n_dims)
{
    return n_dims == 2   ? _mm256_setr_epi32(0, 1, 4, 5, 2, 3, 6, 7)
           : n_dims == 4 ? _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7)
                         : _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
}

/* x: the vector again and again, 8 numbers. */
VECTOR_INLINE __m256 pq8_distances(const uint32_t n_dims, const uint16_t *centroids, __m256 x)
{
    __m256 squares[8];
    for (uint32_t i = 0; i < n_dims; i++) {
        __m256 c = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(centroids + (size_t)8 * i)));
        squares[i] = _mm256_sub_ps(x, c);
        squares[i] = _mm256_mul_ps(squares[i], squares[i]);
    }
    for (uint32_t i = 0; i < n_dims / 2; i++)
        squares[i] = _mm256_hadd_ps(squares[2 * i], squares[2 * i + 1]);
    for (uint32_t i = 0; i < n_dims / 4; i++)
        squares[i] = _mm256_hadd_ps(squares[2 * i], squares[2 * i + 1]);
    if (n_dims == 8)
        squares[0] = _mm256_add_ps(_mm256_permute2f128_ps(squares[0], squares[1], 0x20),
                                   _mm256_permute2f128_ps(squares[0], squares[1], 0x31));
    return squares[0];
}

/* Square distance of the boxes of leaves [l, l + 8). */
VECTOR_INLINE __m256 pq8_boxes(const uint32_t n_dims, const float *boxes, uint32_t n_leaves, const float *x)
{
    __m256 squares[8];
    for (uint32_t i = 0; i < n_dims; i++) {
        const __m256 at = _mm256_set1_ps(x[i]);
        __m256 below = _mm256_sub_ps(_mm256_loadu_ps(boxes + (size_t)2 * i * n_leaves), at);
        __m256 above = _mm256_sub_ps(at, _mm256_loadu_ps(boxes + (size_t)(2 * i + 1) * n_leaves));
        squares[i] = _mm256_max_ps(_mm256_max_ps(below, above), _mm256_setzero_ps());
        squares[i] = _mm256_mul_ps(squares[i], squares[i]);
    }
    for (uint32_t n = n_dims / 2; n > 0; n /= 2)
        for (uint32_t i = 0; i < n; i++)
            squares[i] = _mm256_add_ps(squares[2 * i], squares[2 * i + 1]);
    return squares[0];
}

VECTOR_INLINE __m256 lanes8_min(__m256 a) /* in every lane */
{
    a = _mm256_min_ps(a, _mm256_permute2f128_ps(a, a, 1));
    a = _mm256_min_ps(a, _mm256_permute_ps(a, 0x4e));
    return _mm256_min_ps(a, _mm256_permute_ps(a, 0xb1));
}
VECTOR_INLINE uint32_t lanes8_lowest(__m256i a)
{
    __m128i m = _mm_min_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    m = _mm_min_epi32(m, _mm_shuffle_epi32(m, 0x4e));
    return (uint32_t)_mm_cvtsi128_si32(_mm_min_epi32(m, _mm_shuffle_epi32(m, 0xb1)));
}
/* The lowest of the numbers where a is the least. */
VECTOR_INLINE uint32_t lanes8_at(__m256 a, __m256 least, __m256i numbers)
{
    __m256i equal = _mm256_castps_si256(_mm256_cmp_ps(a, least, _CMP_EQ_OQ));
    return lanes8_lowest(_mm256_blendv_epi8(_mm256_set1_epi32(INT_MAX), numbers, equal));
}

struct pq_best {
    __m256 distance; /* in every lane */
    uint32_t number;
};

VECTOR_INLINE struct pq_best pq8_look(const struct pq_space *space, const uint32_t n_dims, uint32_t leaf, __m256 x,
                                      struct pq_best best)
{
    const uint32_t size = pq_leaf(space->n_centroids), first = leaf * size;
    const uint16_t *centroids = space->centroids + (size_t)first * n_dims;
    __m256 least = _mm256_set1_ps(INFINITY);
    __m256i numbers = _mm256_setzero_si256();
    __m256i at = _mm256_add_epi32(pq8_lanes(n_dims), _mm256_set1_epi32((int)first));
    for (uint32_t i = 0; i < size; i += 8, at = _mm256_add_epi32(at, _mm256_set1_epi32(8))) {
        __m256 distances = pq8_distances(n_dims, centroids + (size_t)i * n_dims, x);
        __m256 less = _mm256_cmp_ps(distances, least, _CMP_LT_OQ);
        least = _mm256_min_ps(distances, least);
        numbers = _mm256_blendv_epi8(numbers, at, _mm256_castps_si256(less));
    }
    if (!_mm256_movemask_ps(_mm256_cmp_ps(least, best.distance, _CMP_LE_OQ)))
        return best;
    const __m256 distance = lanes8_min(least);
    const uint32_t number = lanes8_at(least, distance, numbers);
    const bool closer = _mm256_cvtss_f32(distance) < _mm256_cvtss_f32(best.distance);
    return closer || number < best.number ? (struct pq_best){distance, number} : best;
}

VECTOR_INLINE void pq8_nearest_dims(const struct pq_space *space, const uint32_t n_dims, const float *x, uint32_t n,
                                    uint16_t *numbers, float *distances)
{
    const uint32_t n_leaves = pq_n_leaves(space->n_centroids);
    for (uint32_t j = 0; j < n; j++, x += n_dims) {
        __m256 boxes[PQ_MAX_LEAVES / 8], least = _mm256_set1_ps(INFINITY);
        __m256i at = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), leaves = at;
        for (uint32_t l = 0; l < n_leaves; l += 8, at = _mm256_add_epi32(at, _mm256_set1_epi32(8))) {
            boxes[l / 8] = pq8_boxes(n_dims, space->boxes + l, n_leaves, x);
            __m256 less = _mm256_cmp_ps(boxes[l / 8], least, _CMP_LT_OQ);
            least = _mm256_min_ps(boxes[l / 8], least);
            leaves = _mm256_blendv_epi8(leaves, at, _mm256_castps_si256(less));
        }
        const uint32_t first = lanes8_at(least, lanes8_min(least), leaves);

        float eight[8];
        for (uint32_t i = 0; i < 8; i++)
            eight[i] = x[i % n_dims];
        const __m256 again = _mm256_loadu_ps(eight);
        struct pq_best best = {_mm256_set1_ps(INFINITY), UINT32_MAX};
        best = pq8_look(space, n_dims, first, again, best);
        for (uint32_t l = 0; l < n_leaves; l += 8) {
            uint32_t near = (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(boxes[l / 8], best.distance, _CMP_LE_OQ));
            for (; near; near &= near - 1) {
                const uint32_t leaf = l + (uint32_t)__builtin_ctz(near);
                if (leaf != first)
                    best = pq8_look(space, n_dims, leaf, again, best);
            }
        }
        numbers[j] = (uint16_t)best.number;
        if (distances)
            distances[j] = _mm256_cvtss_f32(best.distance);
    }
}

VECTOR_INLINE void pq8_nearest(const struct pq_space *space, const float *x, uint32_t n, uint16_t *numbers,
                               float *distances)
{
    if (space->n_dims == 2)
        pq8_nearest_dims(space, 2, x, n, numbers, distances);
    else if (space->n_dims == 4)
        pq8_nearest_dims(space, 4, x, n, numbers, distances);
    else
        pq8_nearest_dims(space, 8, x, n, numbers, distances);
}
