/*
 * vector_pq.h - scores of product-quantized keys, VECTOR_WIDTH keys at a time; see codec_pq.h and kernels/vector.h.
 *
 * Sub-spaces are outermost over the run of tiles, so that the centroids in use stay in the nearest cache; those of the next one
 * are asked for meanwhile (without that a score takes twice as long). Two dimensions of a centroid are one 32-bit look-up.
 */
#pragma once

#include <string.h>

#include "gpu-worker/keys/codec_pq.h"
#include "kernels/vector.h"

#define PQ_QUERIES 4u /* at a time */

/* ---- 8 lanes ---- */

/* Numbers of keys j .. j + 7, j a multiple of 8. Reads 4 bytes of high bits, however few are meant: low bytes follow. */
VECTOR_INLINE __m256i pq8_numbers(const uint8_t *packed, uint32_t n_high, uint32_t j)
{
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    __m256i low = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)(packed + 8 * n_high + j)));
    uint32_t bits;
    memcpy(&bits, packed + j / 8 * n_high, sizeof bits);
    __m256i high =
        _mm256_srlv_epi32(_mm256_set1_epi32((int)bits), _mm256_mullo_epi32(lane, _mm256_set1_epi32((int)n_high)));
    high = _mm256_and_si256(high, _mm256_set1_epi32((1 << n_high) - 1));
    return _mm256_or_si256(low, _mm256_slli_epi32(high, 8));
}
/* Two halves of each of 8 centroids. */
VECTOR_INLINE void pq8_look_up(const uint16_t *centroids, const uint32_t n_dims, __m256i numbers, __m256 *x, __m256 *y)
{
    const __m256i order = _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15, 0, 1, 4, 5, 8, 9, 12,
                                           13, 2, 3, 6, 7, 10, 11, 14, 15);
    const int *from = (const int *)(const void *)centroids;
    __m256i two = n_dims == 2   ? _mm256_i32gather_epi32(from, numbers, 4)
                  : n_dims == 4 ? _mm256_i32gather_epi32(from, numbers, 8)
                                : _mm256_i32gather_epi32(from, _mm256_add_epi32(numbers, numbers), 8);
    two = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(two, order), 0xd8);
    *x = _mm256_cvtph_ps(_mm256_castsi256_si128(two));
    *y = _mm256_cvtph_ps(_mm256_extracti128_si256(two, 1));
}

/* ---- VECTOR_WIDTH lanes ---- */

#if VECTOR_WIDTH == 8

VECTOR_INLINE vi pq_numbers(const uint8_t *packed, uint32_t n_high, uint32_t j)
{
    return pq8_numbers(packed, n_high, j);
}
VECTOR_INLINE void pq_look_up(const uint16_t *centroids, const uint32_t n_dims, vi numbers, vf *x, vf *y)
{
    pq8_look_up(centroids, n_dims, numbers, x, y);
}

#elif defined(__AVX512F__)

VECTOR_INLINE vi pq_numbers(const uint8_t *packed, uint32_t n_high, uint32_t j)
{
    return _mm512_inserti64x4(_mm512_castsi256_si512(pq8_numbers(packed, n_high, j)),
                              pq8_numbers(packed, n_high, j + 8), 1);
}
VECTOR_INLINE void pq_look_up(const uint16_t *centroids, const uint32_t n_dims, vi numbers, vf *x, vf *y)
{
    vi two = n_dims == 2   ? _mm512_i32gather_epi32(numbers, centroids, 4)
             : n_dims == 4 ? _mm512_i32gather_epi32(numbers, centroids, 8)
                           : _mm512_i32gather_epi32(_mm512_add_epi32(numbers, numbers), centroids, 8);
    *x = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(two));
    *y = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(two, 16)));
}

#else

VECTOR_INLINE vi pq_numbers(const uint8_t *packed, uint32_t n_high, uint32_t j)
{
    return (vi){pq8_numbers(packed, n_high, j), pq8_numbers(packed, n_high, j + 8)};
}
VECTOR_INLINE void pq_look_up(const uint16_t *centroids, const uint32_t n_dims, vi numbers, vf *x, vf *y)
{
    pq8_look_up(centroids, n_dims, numbers.low, &x->low, &y->low);
    pq8_look_up(centroids, n_dims, numbers.high, &x->high, &y->high);
}

#endif

struct pq_run {
    const uint16_t *centroids, *next; /* of the sub-space, of the one after it */
    size_t next_bytes;
    const uint8_t *packed; /* the sub-space in the first tile */
    size_t tile_bytes;
    uint32_t n_tiles, n_high;
};

/* Adds one sub-space to the scores of n queries. */
VECTOR_INLINE void pq_add(const struct pq_run *run, const uint32_t n_dims, const uint32_t n, const int first,
                          const float *q, uint32_t head_dim, float *scores, size_t stride)
{
    const size_t per_vector = run->next_bytes / ((size_t)run->n_tiles * (PQ_KEYS / VECTOR_WIDTH)) / 64 + 1;
    const char *next = (const char *)run->next, *end = next + run->next_bytes;
    for (uint32_t t = 0; t < run->n_tiles; t++) {
        const uint8_t *packed = run->packed + t * run->tile_bytes;
        for (uint32_t j = 0; j < PQ_KEYS; j += VECTOR_WIDTH) {
            for (size_t i = 0; i < per_vector && next < end; i++, next += 64)
                __builtin_prefetch(next, 0, 2); /* to the second level: the first is full */
            const vi numbers = pq_numbers(packed, run->n_high, j);
            vf sums[PQ_QUERIES];
            for (uint32_t i = 0; i < n; i++)
                sums[i] = first ? vf_zero() : vf_load(scores + i * stride + (size_t)t * PQ_KEYS + j);
#pragma GCC unroll 4
            for (uint32_t d = 0; d < n_dims; d += 2) {
                vf x, y;
                pq_look_up(run->centroids + d, n_dims, numbers, &x, &y);
#pragma GCC unroll 4
                for (uint32_t i = 0; i < n; i++) {
                    sums[i] = vf_fma(vf_set(q[(size_t)i * head_dim + d]), x, sums[i]);
                    sums[i] = vf_fma(vf_set(q[(size_t)i * head_dim + d + 1]), y, sums[i]);
                }
            }
            for (uint32_t i = 0; i < n; i++)
                vf_store(scores + i * stride + (size_t)t * PQ_KEYS + j, sums[i]);
        }
    }
}

VECTOR_INLINE void pq_queries(const struct pq_table *table, const uint32_t n_dims, const uint32_t n, const float *q,
                              const void *tiles, uint32_t n_tiles, float *scores, size_t stride)
{
    const size_t space_bytes = (size_t)table->n_centroids * n_dims * sizeof(uint16_t);
    for (uint32_t s = 0; s < table->n_spaces; s++) {
        const uint16_t *centroids = table->centroids + (size_t)s * table->n_centroids * n_dims;
        const struct pq_run run = {.centroids = centroids,
                                   .next = centroids + (size_t)table->n_centroids * n_dims,
                                   .next_bytes = s + 1 < table->n_spaces ? space_bytes : 0,
                                   .packed = (const uint8_t *)tiles + s * pq_space_bytes(table->n_centroids),
                                   .tile_bytes = pq_tile_bytes(table),
                                   .n_tiles = n_tiles,
                                   .n_high = pq_bits(table->n_centroids) - 8};
        if (s == 0)
            pq_add(&run, n_dims, n, 1, q, table->head_dim, scores, stride);
        else
            pq_add(&run, n_dims, n, 0, q + (size_t)s * n_dims, table->head_dim, scores, stride);
    }
}

VECTOR_INLINE void pq_score_dims(const struct pq_table *table, const uint32_t n_dims, const float *q,
                                 uint32_t n_queries, const void *tiles, uint32_t n_tiles, float *scores, size_t stride)
{
    for (uint32_t i = 0; i < n_queries; i += PQ_QUERIES, q += PQ_QUERIES * (size_t)table->head_dim) {
        float *to = scores + i * stride;
        switch (n_queries - i) {
        case 1:
            pq_queries(table, n_dims, 1, q, tiles, n_tiles, to, stride);
            break;
        case 2:
            pq_queries(table, n_dims, 2, q, tiles, n_tiles, to, stride);
            break;
        case 3:
            pq_queries(table, n_dims, 3, q, tiles, n_tiles, to, stride);
            break;
        default:
            pq_queries(table, n_dims, 4, q, tiles, n_tiles, to, stride);
        }
    }
}

VECTOR_INLINE void pq_score(const struct pq_table *table, const float *q, uint32_t n_queries, const void *tiles,
                            uint32_t n_tiles, float *scores, size_t stride)
{
    if (table->n_dims == 2)
        pq_score_dims(table, 2, q, n_queries, tiles, n_tiles, scores, stride);
    else if (table->n_dims == 4)
        pq_score_dims(table, 4, q, n_queries, tiles, n_tiles, scores, stride);
    else
        pq_score_dims(table, 8, q, n_queries, tiles, n_tiles, scores, stride);
}
