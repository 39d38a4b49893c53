/*
 * vector_pair.h - scores of the pair codecs for any vector width; codec_pair.h states tiles, queries and every rounding.
 *
 * The file that includes this defines VECTOR_WIDTH first, as kernels/vector.h asks. One byte lane per key: 4 VECTOR_WIDTH keys'
 * codes look themselves up in a query's table of 16 bytes, and sums stay in 16 bits (Quick ADC and its kin). Up to
 * PAIR_MAX_TOGETHER queries share the codes.
 */
#pragma once

#include "gpu-worker/keys/codec_pair.h"
#include "kernels/vector.h"

#define PAIR_MAX_TOGETHER 4u
#define PAIR_STEP         (4u * VECTOR_WIDTH) /* keys at a time */

/* Tiles lie one after the other: this many ahead memory is asked for, line by line; past the last that does nothing. */
#define PAIR_PREFETCH_TILES 3u

/* Sums of look-ups: of all bytes as 16-bit numbers, and of the upper bytes alone. */
struct pair_sum {
    vi all, upper;
};

VECTOR_INLINE __m256i pair8_load(const void *p)
{
    return _mm256_loadu_si256((const __m256i *)p);
}
VECTOR_INLINE __m256i pair8_table(const uint8_t *p)
{
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)p));
}
VECTOR_INLINE __m256i pair8_nibble(__m256i bytes)
{
    return _mm256_and_si256(bytes, _mm256_set1_epi8(15));
}
/* all, upper -> 32 sums in the order of the keys */
VECTOR_INLINE void pair8_store(__m256i all, __m256i upper, uint16_t *sums)
{
    const __m256i lower = _mm256_sub_epi16(all, _mm256_slli_epi16(upper, 8));
    const __m256i a = _mm256_unpacklo_epi16(lower, upper), b = _mm256_unpackhi_epi16(lower, upper);
    _mm256_storeu_si256((__m256i *)(void *)sums, _mm256_permute2x128_si256(a, b, 0x20));
    _mm256_storeu_si256((__m256i *)(void *)(sums + 16), _mm256_permute2x128_si256(a, b, 0x31));
}
VECTOR_INLINE __m256 pair8_floats(const uint16_t *p)
{
    return _mm256_cvtepi32_ps(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)p)));
}
/* pair_scale_of() */
VECTOR_INLINE __m128i pair_codes(__m128i bytes, const bool is_klt)
{
    if (!is_klt)
        return bytes;
    const __m128i four = _mm_and_si128(_mm_srli_epi16(bytes, 4), _mm_set1_epi8(15));
    const __m128i code = _mm_add_epi8(_mm_add_epi8(four, four), _mm_set1_epi8(112));
    return _mm_andnot_si128(_mm_cmpeq_epi8(four, _mm_setzero_si128()), code);
}
VECTOR_INLINE __m256 pair8_scales(const uint8_t *p, const bool is_klt)
{
    static const uint32_t table[8] = KEY_SCALE_TABLE;
    __m256i codes = _mm256_cvtepu8_epi32(pair_codes(_mm_loadl_epi64((const __m128i *)(const void *)p), is_klt));
    __m256i a = _mm256_add_epi32(_mm256_permutevar8x32_epi32(pair8_load(table), codes), _mm256_slli_epi32(codes, 20));
    return _mm256_castsi256_ps(_mm256_andnot_si256(_mm256_cmpeq_epi32(codes, _mm256_setzero_si256()), a));
}

#if VECTOR_WIDTH == 8

VECTOR_INLINE vi pair_zero(void)
{
    return _mm256_setzero_si256();
}
VECTOR_INLINE vi pair_lower(const uint8_t *codes)
{
    return pair8_nibble(pair8_load(codes));
}
VECTOR_INLINE vi pair_upper(const uint8_t *codes)
{
    return pair8_nibble(_mm256_srli_epi16(pair8_load(codes), 4));
}
VECTOR_INLINE struct pair_sum pair_add(struct pair_sum sum, vi codes, const uint8_t *table)
{
    const __m256i found = _mm256_shuffle_epi8(pair8_table(table), codes);
    return (struct pair_sum){_mm256_add_epi16(sum.all, found),
                             _mm256_add_epi16(sum.upper, _mm256_srli_epi16(found, 8))};
}
VECTOR_INLINE void pair_store(struct pair_sum sum, uint16_t *sums)
{
    pair8_store(sum.all, sum.upper, sums);
}
VECTOR_INLINE vf pair_floats(const uint16_t *p)
{
    return pair8_floats(p);
}
VECTOR_INLINE vf pair_scales(const uint8_t *p, const bool is_klt)
{
    return pair8_scales(p, is_klt);
}
/* Sums of q . mean, 16 dimensions at a time. */
struct pair_mean {
    vf low, high;
};
VECTOR_INLINE struct pair_mean pair_mean_add(struct pair_mean sum, const int8_t *mean, const float *q)
{
    return (struct pair_mean){vf_fma(vf_load(q), vf_bytes(mean), sum.low),
                              vf_fma(vf_load(q + 8), vf_bytes(mean + 8), sum.high)};
}
VECTOR_INLINE float pair_mean_sum(struct pair_mean sum)
{
    return vf_sum(vf_add(sum.low, sum.high));
}

#else

struct pair_mean {
    vf all;
};
VECTOR_INLINE struct pair_mean pair_mean_add(struct pair_mean sum, const int8_t *mean, const float *q)
{
    return (struct pair_mean){vf_fma(vf_load(q), vf_bytes(mean), sum.all)};
}
VECTOR_INLINE float pair_mean_sum(struct pair_mean sum)
{
    return vf_sum(sum.all);
}

#ifdef __AVX512BW__

VECTOR_INLINE vi pair_zero(void)
{
    return _mm512_setzero_si512();
}
VECTOR_INLINE vi pair_lower(const uint8_t *codes)
{
    return _mm512_and_si512(_mm512_loadu_si512(codes), _mm512_set1_epi8(15));
}
VECTOR_INLINE vi pair_upper(const uint8_t *codes)
{
    return _mm512_and_si512(_mm512_srli_epi16(_mm512_loadu_si512(codes), 4), _mm512_set1_epi8(15));
}
VECTOR_INLINE struct pair_sum pair_add(struct pair_sum sum, vi codes, const uint8_t *table)
{
    const __m512i bytes = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(const void *)table));
    const __m512i found = _mm512_shuffle_epi8(bytes, codes);
    return (struct pair_sum){_mm512_add_epi16(sum.all, found),
                             _mm512_add_epi16(sum.upper, _mm512_srli_epi16(found, 8))};
}
VECTOR_INLINE void pair_store(struct pair_sum sum, uint16_t *sums)
{
    pair8_store(_mm512_castsi512_si256(sum.all), _mm512_castsi512_si256(sum.upper), sums);
    pair8_store(_mm512_extracti64x4_epi64(sum.all, 1), _mm512_extracti64x4_epi64(sum.upper, 1), sums + 32);
}
VECTOR_INLINE vf pair_floats(const uint16_t *p)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepu16_epi32(pair8_load(p)));
}
VECTOR_INLINE vf pair_scales(const uint8_t *p, const bool is_klt)
{
    static const uint32_t table[8] = KEY_SCALE_TABLE;
    const __m512i all = _mm512_broadcast_i64x4(pair8_load(table));
    __m512i codes = _mm512_cvtepu8_epi32(pair_codes(_mm_loadu_si128((const __m128i *)(const void *)p), is_klt));
    __m512i a = _mm512_add_epi32(_mm512_permutexvar_epi32(codes, all), _mm512_slli_epi32(codes, 20));
    return _mm512_castsi512_ps(_mm512_maskz_mov_epi32(_mm512_test_epi32_mask(codes, codes), a));
}

#else

VECTOR_INLINE vi pair_zero(void)
{
    return (vi){_mm256_setzero_si256(), _mm256_setzero_si256()};
}
VECTOR_INLINE vi pair_lower(const uint8_t *codes)
{
    return (vi){pair8_nibble(pair8_load(codes)), pair8_nibble(pair8_load(codes + 32))};
}
VECTOR_INLINE vi pair_upper(const uint8_t *codes)
{
    return (vi){pair8_nibble(_mm256_srli_epi16(pair8_load(codes), 4)),
                pair8_nibble(_mm256_srli_epi16(pair8_load(codes + 32), 4))};
}
VECTOR_INLINE struct pair_sum pair_add(struct pair_sum sum, vi codes, const uint8_t *table)
{
    const __m256i low = _mm256_shuffle_epi8(pair8_table(table), codes.low);
    const __m256i high = _mm256_shuffle_epi8(pair8_table(table), codes.high);
    return (struct pair_sum){{_mm256_add_epi16(sum.all.low, low), _mm256_add_epi16(sum.all.high, high)},
                             {_mm256_add_epi16(sum.upper.low, _mm256_srli_epi16(low, 8)),
                              _mm256_add_epi16(sum.upper.high, _mm256_srli_epi16(high, 8))}};
}
VECTOR_INLINE void pair_store(struct pair_sum sum, uint16_t *sums)
{
    pair8_store(sum.all.low, sum.upper.low, sums);
    pair8_store(sum.all.high, sum.upper.high, sums + 32);
}
VECTOR_INLINE vf pair_floats(const uint16_t *p)
{
    return (vf){pair8_floats(p), pair8_floats(p + 8)};
}
VECTOR_INLINE vf pair_scales(const uint8_t *p, const bool is_klt)
{
    return (vf){pair8_scales(p, is_klt), pair8_scales(p + 8, is_klt)};
}

#endif
#endif

/* One tile, n queries of `query_bytes` each; n and is_klt are constants where this is inlined. */
VECTOR_INLINE void pair_tile(const uint32_t n, const bool is_klt, const struct pair_layout *layout,
                             const uint8_t *query, size_t query_bytes, const uint8_t *tile, size_t tile_bytes,
                             float side, float *scores, size_t stride)
{
    const uint32_t n_whole = layout->n_groups / 2;
    const uint8_t *scales = tile + pair_scales_offset(layout);
    const int8_t *along = (const int8_t *)tile + pair_along_offset(layout);
    const int8_t *mean = (const int8_t *)tile + pair_mean_offset(layout);
    const uint8_t *tables = pair_query_tables(query, layout);
    const struct pair_query *numbers[PAIR_MAX_TOGETHER];
    vf base[PAIR_MAX_TOGETHER], along_scale[PAIR_MAX_TOGETHER];
#pragma GCC unroll 4
    for (uint32_t i = 0; i < n; i++) {
        numbers[i] = (const struct pair_query *)(const void *)(query + i * query_bytes);
        const float *q = pair_query_floats(numbers[i]);
        struct pair_mean sum;
        memset(&sum, 0, sizeof sum);
        for (uint32_t part = 0; part < pair_sixteenths(layout->head_dim); part++)
            sum = pair_mean_add(sum, mean + 16 * part, q + 16 * part);
        base[i] = vf_set((numbers[i]->scale * pair_mean_step(side)) * pair_mean_sum(sum));
        along_scale[i] = vf_set(numbers[i]->along * pair_along_step(side));
    }

    const uint8_t *ahead = tile + PAIR_PREFETCH_TILES * tile_bytes;
    for (uint32_t first = 0; first < PAIR_KEYS; first += PAIR_STEP) {
        for (size_t line = 0; line < tile_bytes; line += PAIR_KEYS / PAIR_STEP * 64)
            _mm_prefetch((const char *)ahead + line, _MM_HINT_T0);
        ahead += 64;
        struct pair_sum sums[PAIR_MAX_TOGETHER];
#pragma GCC unroll 4
        for (uint32_t i = 0; i < n; i++)
            sums[i] = (struct pair_sum){pair_zero(), pair_zero()};
        for (uint32_t p = 0; p < n_whole; p++) {
            const uint8_t *codes = tile + (size_t)p * PAIR_KEYS + first;
            const vi lower = pair_lower(codes), upper = pair_upper(codes);
#pragma GCC unroll 4
            for (uint32_t i = 0; i < n; i++) {
                const uint8_t *table = tables + i * query_bytes + (size_t)p * 2 * PAIR_CODEWORDS;
                sums[i] = pair_add(pair_add(sums[i], lower, table), upper, table + PAIR_CODEWORDS);
            }
        }
        if (is_klt) { /* the scales share the last group's bytes */
            const vi lower = pair_lower(scales + first);
#pragma GCC unroll 4
            for (uint32_t i = 0; i < n; i++)
                sums[i] = pair_add(sums[i], lower, tables + i * query_bytes + (size_t)n_whole * 2 * PAIR_CODEWORDS);
        }
        _Alignas(64) uint16_t found[PAIR_MAX_TOGETHER][PAIR_STEP];
#pragma GCC unroll 4
        for (uint32_t i = 0; i < n; i++)
            pair_store(sums[i], found[i]);
        for (uint32_t key = 0; key < PAIR_STEP; key += VECTOR_WIDTH) {
            const vf a = pair_scales(scales + first + key, is_klt);
            const vf t = is_klt ? vf_zero() : vf_bytes(along + first + key);
#pragma GCC unroll 4
            for (uint32_t i = 0; i < n; i++) {
                const vf x =
                    vf_fma(pair_floats(found[i] + key), vf_set(numbers[i]->factor), vf_set(numbers[i]->offset));
                vf_store(scores + i * stride + first + key, vf_fma(a, x, vf_fma(t, along_scale[i], base[i])));
            }
        }
    }
}

VECTOR_INLINE void pair_score_together(const uint32_t n, const bool is_klt, const struct pair_layout *layout,
                                       const uint8_t *query, const uint8_t *tiles, const float *sides, uint32_t n_tiles,
                                       float *scores, size_t stride)
{
    const size_t tile_bytes = pair_tile_bytes(layout);
    for (uint32_t t = 0; t < n_tiles; t++)
        pair_tile(n, is_klt, layout, query, pair_query_bytes(layout), tiles + t * tile_bytes, tile_bytes, sides[t],
                  scores + (size_t)t * PAIR_KEYS, stride);
}

VECTOR_INLINE void pair_score_kind(const bool is_klt, const struct pair_layout *layout, const void *query,
                                   uint32_t n_queries, const void *tiles, const float *sides, uint32_t n_tiles,
                                   float *scores, size_t stride)
{
    for (uint32_t i = 0; i < n_queries;) {
        const uint32_t n = n_queries - i < PAIR_MAX_TOGETHER ? n_queries - i : PAIR_MAX_TOGETHER;
        const uint8_t *first = (const uint8_t *)query + i * pair_query_bytes(layout);
        float *to = scores + i * stride;
        if (n == 4)
            pair_score_together(4, is_klt, layout, first, tiles, sides, n_tiles, to, stride);
        else if (n == 3)
            pair_score_together(3, is_klt, layout, first, tiles, sides, n_tiles, to, stride);
        else if (n == 2)
            pair_score_together(2, is_klt, layout, first, tiles, sides, n_tiles, to, stride);
        else
            pair_score_together(1, is_klt, layout, first, tiles, sides, n_tiles, to, stride);
        i += n;
    }
}

static void pair_score(const struct pair_layout *layout, const void *query, uint32_t n_queries, const void *tiles,
                       const float *sides, uint32_t n_tiles, float *scores, size_t stride)
{
    if (layout->is_klt)
        pair_score_kind(true, layout, query, n_queries, tiles, sides, n_tiles, scores, stride);
    else
        pair_score_kind(false, layout, query, n_queries, tiles, sides, n_tiles, scores, stride);
}

#define VECTOR_PAIR(symbol) const struct pair_kernels symbol = {.score = pair_score}
