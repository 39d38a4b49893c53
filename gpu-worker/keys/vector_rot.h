/*
 * vector_rot.h - scores of the rotated codecs for any vector width; codec_rot.h states tiles, queries and every rounding.
 *
 * The file that includes this defines VECTOR_WIDTH first, as kernels/vector.h asks. One lane per key: the codes of 16
 * dimensions become four registers of level bytes, which up to ROT_MAX_TOGETHER queries share.
 */
#pragma once

#include <string.h>

#include "gpu-worker/keys/codec_rot.h"
#include "kernels/vector.h"

#define ROT_MAX_TOGETHER 4u

/* Tiles lie one after the other: this many ahead memory is asked for, line by line; past the last that does nothing. Without
 * it scoring from memory takes twice as long. */
#define ROT_PREFETCH_TILES 3u

/* ---- 8 lanes ---- */

VECTOR_INLINE __m256i rot8_load(const void *p)
{
    return _mm256_loadu_si256((const __m256i *)p);
}
VECTOR_INLINE __m256i rot8_table(const uint8_t *p)
{
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)p));
}
VECTOR_INLINE __m256i rot8_and(__m256i a, int byte)
{
    return _mm256_and_si256(a, _mm256_set1_epi8((char)byte));
}
/* Sums of products of levels and integers: in 32 bits, and in 16 what is not added to them yet. */
struct rot8_sum {
    __m256i wide, narrow;
};

/* Do it now: left to itself the compiler multiplies everything first and spills. */
#define ROT_NOW(a) __asm__("" : "+x"(a))

/* Adds 16 dimensions. With 2 bits they stay narrow for two such steps, `first` and the other one. */
VECTOR_INLINE struct rot8_sum rot8_dot(const uint32_t bits, const int first, struct rot8_sum sum, const __m256i *levels,
                                       const uint8_t *integers)
{
#pragma GCC unroll 4
    for (int s = 0; s < 4; s++) {
        __m256i products = _mm256_maddubs_epi16(levels[s], rot8_load(integers + s * 32));
        const int fresh = bits == 2 ? first && s == 0 : s % 2 == 0;
        sum.narrow = fresh ? products : _mm256_add_epi16(sum.narrow, products);
        ROT_NOW(sum.narrow);
        if (bits > 2 && s % 2) {
            sum.wide = _mm256_add_epi32(sum.wide, _mm256_madd_epi16(sum.narrow, _mm256_set1_epi16(1)));
            ROT_NOW(sum.wide);
        }
    }
    return sum;
}
VECTOR_INLINE struct rot8_sum rot8_widen(const uint32_t bits, struct rot8_sum sum)
{
    if (bits == 2) {
        sum.wide = _mm256_add_epi32(sum.wide, _mm256_madd_epi16(sum.narrow, _mm256_set1_epi16(1)));
        ROT_NOW(sum.wide);
    }
    return sum;
}
_Static_assert(ROT2_TOP * 127 * 2 * 8 <= INT16_MAX, "the sum of eight pairs of products fits");
_Static_assert(ROT3_TOP * 127 * 2 * 2 <= INT16_MAX && ROT4_TOP * 127 * 2 * 2 <= INT16_MAX, "that of two does");

VECTOR_INLINE __m256 rot8_scales(const uint8_t *p)
{
    static const uint32_t table[8] = ROT_SCALE_TABLE;
    __m256i codes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)p));
    __m256i a = _mm256_add_epi32(_mm256_permutevar8x32_epi32(rot8_load(table), codes), _mm256_slli_epi32(codes, 20));
    return _mm256_castsi256_ps(_mm256_andnot_si256(_mm256_cmpeq_epi32(codes, _mm256_setzero_si256()), a));
}
VECTOR_INLINE __m256 rot8_bytes(const int8_t *p) /* as floats */
{
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)p)));
}

/* ---- VECTOR_WIDTH lanes ---- */

#if VECTOR_WIDTH == 8

typedef struct rot8_sum rot_sum;
VECTOR_INLINE rot_sum rot_zero(void)
{
    return (rot_sum){_mm256_setzero_si256(), _mm256_setzero_si256()};
}
VECTOR_INLINE vi rot_load(const uint8_t *p)
{
    return rot8_load(p);
}
VECTOR_INLINE vi rot_table(const uint8_t *p)
{
    return rot8_table(p);
}
VECTOR_INLINE vi rot_and(vi a, int byte)
{
    return rot8_and(a, byte);
}
VECTOR_INLINE vi rot_or(vi a, vi b)
{
    return _mm256_or_si256(a, b);
}
VECTOR_INLINE vi rot_upper(vi a) /* the upper nibble of each byte comes down; rubbish above */
{
    return _mm256_srli_epi32(a, 4);
}
VECTOR_INLINE vi rot_look_up(vi table, vi indices)
{
    return _mm256_shuffle_epi8(table, indices);
}
VECTOR_INLINE rot_sum rot_dot(const uint32_t bits, const int first, rot_sum sum, const vi *levels,
                              const uint8_t *integers)
{
    return rot8_dot(bits, first, sum, levels, integers);
}
VECTOR_INLINE rot_sum rot_widen(const uint32_t bits, rot_sum sum)
{
    return rot8_widen(bits, sum);
}
VECTOR_INLINE vf rot_float(rot_sum sum)
{
    return vi_to_float(sum.wide);
}
VECTOR_INLINE vf rot_scales(const uint8_t *p)
{
    return rot8_scales(p);
}
/* Sums of q . mean, 16 dimensions at a time. */
struct rot_mean {
    vf low, high;
};
VECTOR_INLINE struct rot_mean rot_mean_load(const int8_t *p)
{
    return (struct rot_mean){rot8_bytes(p), rot8_bytes(p + 8)};
}
VECTOR_INLINE struct rot_mean rot_mean_add(struct rot_mean sum, struct rot_mean mean, const float *q)
{
    return (struct rot_mean){vf_fma(vf_load(q), mean.low, sum.low), vf_fma(vf_load(q + 8), mean.high, sum.high)};
}
VECTOR_INLINE float rot_mean_sum(struct rot_mean sum)
{
    return vf_sum(vf_add(sum.low, sum.high));
}

#elif defined(__AVX512VNNI__)

typedef vi rot_sum;
VECTOR_INLINE rot_sum rot_zero(void)
{
    return _mm512_setzero_si512();
}
VECTOR_INLINE vi rot_load(const uint8_t *p)
{
    return _mm512_loadu_si512(p);
}
VECTOR_INLINE vi rot_table(const uint8_t *p)
{
    return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(const void *)p));
}
VECTOR_INLINE vi rot_and(vi a, int byte)
{
    return _mm512_and_si512(a, _mm512_set1_epi8((char)byte));
}
VECTOR_INLINE vi rot_or(vi a, vi b)
{
    return _mm512_or_si512(a, b);
}
VECTOR_INLINE vi rot_upper(vi a)
{
    return _mm512_srli_epi32(a, 4);
}
VECTOR_INLINE vi rot_look_up(vi table, vi indices)
{
    return _mm512_shuffle_epi8(table, indices);
}
VECTOR_INLINE rot_sum rot_dot(const uint32_t bits, const int first, rot_sum sum, const vi *levels,
                              const uint8_t *integers)
{
    (void)bits, (void)first;
#pragma GCC unroll 4
    for (uint32_t s = 0; s < 4; s++) {
        int32_t four;
        memcpy(&four, integers + s * ROT_QUERY_LANES, sizeof four);
        sum = _mm512_dpbusd_epi32(sum, levels[s], _mm512_set1_epi32(four));
    }
    return sum;
}
VECTOR_INLINE rot_sum rot_widen(const uint32_t bits, rot_sum sum) /* they are wide at once */
{
    (void)bits;
    return sum;
}
VECTOR_INLINE vf rot_float(rot_sum sum)
{
    return vi_to_float(sum);
}
VECTOR_INLINE vf rot_scales(const uint8_t *p)
{
    static const uint32_t table[8] = ROT_SCALE_TABLE;
    const __m512i all = _mm512_broadcast_i64x4(rot8_load(table));
    __m512i codes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)p));
    __m512i a = _mm512_add_epi32(_mm512_permutexvar_epi32(codes, all), _mm512_slli_epi32(codes, 20));
    return _mm512_castsi512_ps(_mm512_maskz_mov_epi32(_mm512_test_epi32_mask(codes, codes), a));
}
struct rot_mean {
    vf all;
};
VECTOR_INLINE struct rot_mean rot_mean_load(const int8_t *p)
{
    __m128i bytes = _mm_loadu_si128((const __m128i *)(const void *)p);
    return (struct rot_mean){_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))};
}
VECTOR_INLINE struct rot_mean rot_mean_add(struct rot_mean sum, struct rot_mean mean, const float *q)
{
    return (struct rot_mean){vf_fma(vf_load(q), mean.all, sum.all)};
}
VECTOR_INLINE float rot_mean_sum(struct rot_mean sum)
{
    return vf_sum(sum.all);
}

#else

typedef struct {
    struct rot8_sum low, high;
} rot_sum;
VECTOR_INLINE rot_sum rot_zero(void)
{
    const struct rot8_sum zero = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    return (rot_sum){zero, zero};
}
VECTOR_INLINE vi rot_load(const uint8_t *p)
{
    return (vi){rot8_load(p), rot8_load(p + 32)};
}
VECTOR_INLINE vi rot_table(const uint8_t *p)
{
    return (vi){rot8_table(p), rot8_table(p)};
}
VECTOR_INLINE vi rot_and(vi a, int byte)
{
    return (vi){rot8_and(a.low, byte), rot8_and(a.high, byte)};
}
VECTOR_INLINE vi rot_or(vi a, vi b)
{
    return (vi){_mm256_or_si256(a.low, b.low), _mm256_or_si256(a.high, b.high)};
}
VECTOR_INLINE vi rot_upper(vi a)
{
    return (vi){_mm256_srli_epi32(a.low, 4), _mm256_srli_epi32(a.high, 4)};
}
VECTOR_INLINE vi rot_look_up(vi table, vi indices)
{
    return (vi){_mm256_shuffle_epi8(table.low, indices.low), _mm256_shuffle_epi8(table.high, indices.high)};
}
VECTOR_INLINE rot_sum rot_dot(const uint32_t bits, const int first, rot_sum sum, const vi *levels,
                              const uint8_t *integers)
{
    const __m256i low[4] = {levels[0].low, levels[1].low, levels[2].low, levels[3].low};
    const __m256i high[4] = {levels[0].high, levels[1].high, levels[2].high, levels[3].high};
    return (rot_sum){rot8_dot(bits, first, sum.low, low, integers), rot8_dot(bits, first, sum.high, high, integers)};
}
VECTOR_INLINE rot_sum rot_widen(const uint32_t bits, rot_sum sum)
{
    return (rot_sum){rot8_widen(bits, sum.low), rot8_widen(bits, sum.high)};
}
VECTOR_INLINE vf rot_float(rot_sum sum)
{
    return vi_to_float((vi){sum.low.wide, sum.high.wide});
}
VECTOR_INLINE vf rot_scales(const uint8_t *p)
{
    return (vf){rot8_scales(p), rot8_scales(p + 8)};
}
struct rot_mean {
    vf all;
};
VECTOR_INLINE struct rot_mean rot_mean_load(const int8_t *p)
{
    return (struct rot_mean){{rot8_bytes(p), rot8_bytes(p + 8)}};
}
VECTOR_INLINE struct rot_mean rot_mean_add(struct rot_mean sum, struct rot_mean mean, const float *q)
{
    return (struct rot_mean){vf_fma(vf_load(q), mean.all, sum.all)};
}
VECTOR_INLINE float rot_mean_sum(struct rot_mean sum)
{
    return vf_sum(sum.all);
}

#endif

#define ROT_LOWER2(i)  ((i)&3)                            /* the code is the two lower bits of a nibble */
#define ROT_UPPER2(i)  ((i) >> 2)                         /* the two upper bits */
#define ROT_LOWER3A(i) (((i)&3) | ((i) >> 2 & 1) << 2)    /* rot3: the lower two and, as third bit, bit 2 */
#define ROT_LOWER3B(i) (((i)&3) | ((i) >> 3 & 1) << 2)    /*                                        bit 3 */
#define ROT_UPPER3A(i) (((i) >> 2) | ((i)&1) << 2)        /* rot3: the upper two and, as third bit, bit 0 */
#define ROT_UPPER3B(i) (((i) >> 2) | ((i) >> 1 & 1) << 2) /*                                     bit 1 */

static const uint8_t rot2_tables[4][16] = {ROT_TABLE(ROT2_LEVEL, ROT_LOWER2), ROT_TABLE(ROT2_LEVEL, ROT_UPPER2)};
static const uint8_t rot3_tables[4][16] = {ROT_TABLE(ROT3_LEVEL, ROT_LOWER3A), ROT_TABLE(ROT3_LEVEL, ROT_UPPER3A),
                                           ROT_TABLE(ROT3_LEVEL, ROT_LOWER3B), ROT_TABLE(ROT3_LEVEL, ROT_UPPER3B)};
static const uint8_t rot4_tables[4][16] = {ROT_TABLE(ROT4_LEVEL, ROT_SELF)};

/* Levels of dimensions 16 g + 4 s .. + 3 of VECTOR_WIDTH keys, for s = 0 .. 3; words: of these keys. */
VECTOR_INLINE void rot_unpack(const uint32_t bits, const uint8_t *words, uint32_t n_groups, uint32_t g,
                              const vi *tables, vi *levels)
{
    if (bits == 4) {
#pragma GCC unroll 2
        for (uint32_t i = 0; i < 2; i++) {
            vi word = rot_load(words + (size_t)(2 * g + i) * ROT_WORD_BYTES);
            levels[2 * i] = rot_look_up(tables[0], rot_and(word, 15));
            levels[2 * i + 1] = rot_look_up(tables[0], rot_and(rot_upper(word), 15));
        }
        return;
    }
    vi word = rot_load(words + (size_t)g * ROT_WORD_BYTES), next = rot_upper(word);
    if (bits == 2) {
        word = rot_and(word, 15);
        next = rot_and(next, 15);
        levels[0] = rot_look_up(tables[0], word);
        levels[1] = rot_look_up(tables[1], word);
        levels[2] = rot_look_up(tables[0], next);
        levels[3] = rot_look_up(tables[1], next);
        return;
    }
    vi third = rot_load(words + (size_t)(n_groups + g / 2) * ROT_WORD_BYTES);
    if (g % 2)
        third = rot_upper(third);
    const vi third_lower = rot_and(third, 3), third_upper = rot_and(third, 12);
    levels[0] = rot_look_up(tables[0], rot_or(rot_and(word, 3), third_upper));
    levels[1] = rot_look_up(tables[1], rot_or(rot_and(word, 12), third_lower));
    levels[2] = rot_look_up(tables[2], rot_or(rot_and(next, 3), third_upper));
    levels[3] = rot_look_up(tables[3], rot_or(rot_and(next, 12), third_lower));
}

/* dots += levels . integers over the 16 dimensions of group g, for n queries. */
VECTOR_INLINE void rot_group_dot(const uint32_t bits, const int first, const uint32_t n, const uint8_t *words,
                                 const uint8_t *integers, size_t query_bytes, uint32_t n_groups, uint32_t g,
                                 const vi *tables, rot_sum *dots)
{
    vi levels[4];
    rot_unpack(bits, words, n_groups, g, tables, levels);
#pragma GCC unroll 4
    for (uint32_t i = 0; i < n; i++)
        dots[i] = rot_dot(bits, first, dots[i], levels, integers + i * query_bytes + (size_t)g * 4 * ROT_QUERY_LANES);
}

/* One tile, n queries of `query_bytes` each; n and bits are constants where this is inlined. */
VECTOR_INLINE void rot_tile(const uint32_t bits, const uint32_t n, const uint8_t *query, size_t query_bytes,
                            uint32_t n_groups, const vi *tables, const uint8_t *tile, size_t tile_bytes, float side,
                            float *scores, size_t stride)
{
    const uint8_t *scales = tile + rot_scales_offset(bits, n_groups);
    const int8_t *mean = (const int8_t *)tile + rot_mean_offset(bits, n_groups);
    const uint8_t *integers = rot_query_integers(query, n_groups);
    const struct rot_query *numbers[ROT_MAX_TOGETHER];
    struct rot_mean sums[ROT_MAX_TOGETHER];
    vf base[ROT_MAX_TOGETHER];
#pragma GCC unroll 4
    for (uint32_t i = 0; i < n; i++) {
        numbers[i] = (const struct rot_query *)(const void *)(query + i * query_bytes);
        memset(&sums[i], 0, sizeof sums[i]);
    }
    for (uint32_t g = 0; g < n_groups; g++) {
        const struct rot_mean part = rot_mean_load(mean + 16 * g);
#pragma GCC unroll 4
        for (uint32_t i = 0; i < n; i++)
            sums[i] = rot_mean_add(sums[i], part, rot_query_floats(query + i * query_bytes) + 16 * g);
    }
#pragma GCC unroll 4
    for (uint32_t i = 0; i < n; i++)
        base[i] = vf_set((numbers[i]->scale * side) * rot_mean_sum(sums[i]));

    const uint8_t *ahead = tile + ROT_PREFETCH_TILES * tile_bytes;
    for (uint32_t key = 0; key < ROT_KEYS; key += VECTOR_WIDTH) {
        for (size_t line = 0; line < tile_bytes; line += ROT_KEYS / VECTOR_WIDTH * 64)
            _mm_prefetch((const char *)ahead + line, _MM_HINT_T0);
        ahead += 64;
        rot_sum dots[ROT_MAX_TOGETHER];
#pragma GCC unroll 4
        for (uint32_t i = 0; i < n; i++)
            dots[i] = rot_zero();
        for (uint32_t g = 0; g < n_groups; g += 2) {
            rot_group_dot(bits, 1, n, tile + key * 4, integers, query_bytes, n_groups, g, tables, dots);
            if (g + 1 < n_groups)
                rot_group_dot(bits, 0, n, tile + key * 4, integers, query_bytes, n_groups, g + 1, tables, dots);
#pragma GCC unroll 4
            for (uint32_t i = 0; i < n; i++)
                dots[i] = rot_widen(bits, dots[i]);
        }
        const vf a = rot_scales(scales + key);
#pragma GCC unroll 4
        for (uint32_t i = 0; i < n; i++) {
            vf x = vf_sub(rot_float(dots[i]), vf_set(numbers[i]->offset));
            vf_store(scores + i * stride + key, vf_fma(vf_mul(a, x), vf_set(numbers[i]->factor), base[i]));
        }
    }
}

VECTOR_INLINE void rot_score_together(const uint32_t bits, const uint32_t n, const uint8_t *query, uint32_t head_dim,
                                      const uint8_t *tiles, const float *sides, uint32_t n_tiles, float *scores,
                                      size_t stride)
{
    const uint8_t(*bytes)[16] = bits == 2 ? rot2_tables : bits == 3 ? rot3_tables : rot4_tables;
    const uint32_t n_groups = rot_groups(head_dim);
    const size_t tile_bytes = rot_tile_bytes(bits, head_dim);
    vi tables[4];
#pragma GCC unroll 4
    for (uint32_t i = 0; i < 4; i++)
        tables[i] = rot_table(bytes[i]);
    for (uint32_t t = 0; t < n_tiles; t++)
        rot_tile(bits, n, query, rot_query_bytes(n_groups), n_groups, tables, tiles + t * tile_bytes, tile_bytes,
                 sides[t], scores + (size_t)t * ROT_KEYS, stride);
}

VECTOR_INLINE void rot_score_bits(const uint32_t bits, const void *query, uint32_t n_queries, uint32_t head_dim,
                                  const void *tiles, const float *sides, uint32_t n_tiles, float *scores, size_t stride)
{
    for (uint32_t i = 0; i < n_queries;) {
        const uint32_t n = n_queries - i < ROT_MAX_TOGETHER ? n_queries - i : ROT_MAX_TOGETHER;
        const uint8_t *first = (const uint8_t *)query + i * rot_query_bytes(rot_groups(head_dim));
        float *to = scores + i * stride;
        if (n == 4)
            rot_score_together(bits, 4, first, head_dim, tiles, sides, n_tiles, to, stride);
        else if (n == 3)
            rot_score_together(bits, 3, first, head_dim, tiles, sides, n_tiles, to, stride);
        else if (n == 2)
            rot_score_together(bits, 2, first, head_dim, tiles, sides, n_tiles, to, stride);
        else
            rot_score_together(bits, 1, first, head_dim, tiles, sides, n_tiles, to, stride);
        i += n;
    }
}

static void rot_score2(const void *query, uint32_t n_queries, uint32_t head_dim, const void *tiles, const float *sides,
                       uint32_t n_tiles, float *scores, size_t stride)
{
    rot_score_bits(2, query, n_queries, head_dim, tiles, sides, n_tiles, scores, stride);
}
static void rot_score3(const void *query, uint32_t n_queries, uint32_t head_dim, const void *tiles, const float *sides,
                       uint32_t n_tiles, float *scores, size_t stride)
{
    rot_score_bits(3, query, n_queries, head_dim, tiles, sides, n_tiles, scores, stride);
}
static void rot_score4(const void *query, uint32_t n_queries, uint32_t head_dim, const void *tiles, const float *sides,
                       uint32_t n_tiles, float *scores, size_t stride)
{
    rot_score_bits(4, query, n_queries, head_dim, tiles, sides, n_tiles, scores, stride);
}

#define VECTOR_ROT(symbol)                                                                                             \
    const struct rot_kernels symbol = {.score = {[2] = rot_score2, [3] = rot_score3, [4] = rot_score4}}
