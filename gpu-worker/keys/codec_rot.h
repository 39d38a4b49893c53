/*
 * codec_rot.h - inside of the rotated codecs rot4, rot3 and rot2: what a tile and a query hold, and the tables of kernels.
 *
 * Owner      gpu-worker/keys; tests look inside. Threads: any.
 * Invariant  a score is, in this order and with these roundings, on every instruction set
 *                x = dot of unsigned levels and the query's integers, exact
 *                base = (scale * side) * dot16(query, mean bytes)      dot16: lane i mod 16 by fma, lanes i and i + 8 added,
 *                                                                      then the tree ((0+2)+(1+3)) + ((4+6)+(5+7))
 *                score = fma(a * (x - offset), factor, base)
 *            so that plain, AVX2 and AVX-512 give the same bits.
 *
 * A tile of 64 keys, head_dim d, G = d / 16 rounded up (dimensions past d have query 0):
 *     words    32 bits a key, one key beside the other: no sum across lanes is ever needed. Dimension 16 g + 4 s + b:
 *              rot2   word g [64], byte b, bits 2s
 *              rot3   the lower two bits as rot2; the upper one in word G + g / 2, byte b, bit 4 (g mod 2) + {2, 0, 3, 1}[s]
 *              rot4   word 2g + s / 2, byte b, bits 4 (s mod 2)
 *     scales   64 bytes: a = 2^((byte - 128) / 8); 0: a key equal to the mean
 *     mean     int8 [d], times the tile's side; zeros up to a multiple of 64
 */
#pragma once

#include <assert.h>

#include "gpu-worker/keys/codec.h"

#define ROT_KEYS        KERNELS_BLOCK_TOKENS
#define ROT_MAX_GROUPS  (KERNELS_MAX_HEAD_DIM / 16u)
#define ROT_WORD_BYTES  (ROT_KEYS * 4u) /* the same word of 64 keys */
#define ROT_QUERY_LANES 32u             /* bytes: four integers of a query, eight times */

/*
 * Levels of N(0, 1) by Lloyd and Max as small unsigned integers, so that sums of products of levels and a query's 8 bits stay
 * exact in 16 bits for some terms: 8 pairs with top 14, 2 with tops 52 and 59. A level stands for unit * (level - top / 2).
 */
#define ROT_PICK4(c, a0, a1, a2, a3) ((c) == 0 ? (a0) : (c) == 1 ? (a1) : (c) == 2 ? (a2) : (a3))
#define ROT_PICK8(c, a0, a1, a2, a3, a4, a5, a6, a7)                                                                   \
    ((c) < 4 ? ROT_PICK4(c, a0, a1, a2, a3) : ROT_PICK4((c)-4, a4, a5, a6, a7))
#define ROT2_LEVEL(c) ROT_PICK4(c, 0, 5, 9, 14)
#define ROT2_TOP      14
#define ROT2_UNIT     0.216175f
#define ROT3_LEVEL(c) ROT_PICK8(c, 0, 10, 17, 23, 29, 35, 42, 52)
#define ROT3_TOP      52
#define ROT3_UNIT     0.083067f
#define ROT4_LEVEL(c)                                                                                                  \
    ((c) < 8 ? ROT_PICK8(c, 0, 7, 12, 16, 19, 22, 25, 28) : ROT_PICK8((c)-8, 31, 34, 37, 40, 43, 47, 52, 59))
#define ROT4_TOP    59
#define ROT4_UNIT   0.092055f
#define ROT_SELF(i) (i)

/* Entry i of 16 is level(index(i)): tables for a look-up by four bits. */
#define ROT_TABLE(level, index)                                                                                        \
    {                                                                                                                  \
        level(index(0)), level(index(1)), level(index(2)), level(index(3)), level(index(4)), level(index(5)),          \
            level(index(6)), level(index(7)), level(index(8)), level(index(9)), level(index(10)), level(index(11)),    \
            level(index(12)), level(index(13)), level(index(14)), level(index(15))                                     \
    }

struct rot_format {
    uint32_t bits;
    int32_t top;
    float unit;
    uint8_t levels[16]; /* by code */
};
extern const struct rot_format codec_rot_formats[5]; /* by bits: 2, 3, 4 */

static inline uint32_t rot_groups(uint32_t head_dim)
{
    return (head_dim + 15) / 16;
}
static inline uint32_t rot_words(uint32_t bits, uint32_t n_groups)
{
    return bits == 2 ? n_groups : bits == 3 ? n_groups + (n_groups + 1) / 2 : 2 * n_groups;
}
static inline size_t rot_scales_offset(uint32_t bits, uint32_t n_groups)
{
    return (size_t)rot_words(bits, n_groups) * ROT_WORD_BYTES;
}
static inline size_t rot_mean_offset(uint32_t bits, uint32_t n_groups)
{
    return rot_scales_offset(bits, n_groups) + ROT_KEYS;
}
static inline size_t rot_tile_bytes(uint32_t bits, uint32_t head_dim)
{
    return rot_mean_offset(bits, rot_groups(head_dim)) + ((size_t)head_dim + 63) / 64 * 64;
}

/* A prepared query: this, then float [16 G] as given, then the rotated one as int8 [4 G words of 4][8 times the same]. */
struct rot_query {
    float factor; /* scale * step of the integers * unit */
    float offset; /* top / 2 * sum of the integers */
    float scale;
    float padding[13];
};
static_assert(sizeof(struct rot_query) == 64, "what follows is aligned");

static inline size_t rot_query_bytes(uint32_t n_groups)
{
    return sizeof(struct rot_query) + (size_t)n_groups * 16 * (sizeof(float) + ROT_QUERY_LANES / 4);
}
static inline const float *rot_query_floats(const void *query)
{
    return (const float *)(const void *)((const uint8_t *)query + sizeof(struct rot_query));
}
static inline const uint8_t *rot_query_integers(const void *query, uint32_t n_groups)
{
    return (const uint8_t *)query + sizeof(struct rot_query) + (size_t)n_groups * 16 * sizeof(float);
}

/* Scale bytes: bits of 2^(i / 8) for i = 0 .. 7, less i << 20, so that adding byte << 20 to entry byte % 8 gives a. */
#define ROT_SCALE_BITS(mantissa, i) (((127u - 16u) << 23) + (mantissa) - ((i) << 20))
#define ROT_SCALE_TABLE                                                                                                \
    {                                                                                                                  \
        ROT_SCALE_BITS(0x000000u, 0u), ROT_SCALE_BITS(0x0b95c2u, 1u), ROT_SCALE_BITS(0x1837f0u, 2u),                   \
            ROT_SCALE_BITS(0x25fed7u, 3u), ROT_SCALE_BITS(0x3504f3u, 4u), ROT_SCALE_BITS(0x45672au, 5u),               \
            ROT_SCALE_BITS(0x5744fdu, 6u), ROT_SCALE_BITS(0x6ac0c7u, 7u)                                               \
    }

/* As key_codec.score, by bits. One file per instruction set. */
typedef void rot_score(const void *query, uint32_t n_queries, uint32_t head_dim, const void *tiles, const float *sides,
                       uint32_t n_tiles, float *scores, size_t stride);
struct rot_kernels {
    rot_score *score[5]; /* [bits] */
};
extern const struct rot_kernels codec_rot_plain;
extern const struct rot_kernels codec_rot_avx2;
extern const struct rot_kernels codec_rot_avx512;

/* codec_rot_quantize.c: keys -> tile, the same bytes on every instruction set; a query's rotation. */
void codec_rot_quantize(const struct rot_format *format, const float *keys, uint32_t head_dim, void *tile,
                        float *ret_side);
/* q [head_dim] -> rotated [head_dim] and `given`, as used for the mean (both finite, whatever q is). */
void codec_rot_rotate(const float *q, uint32_t head_dim, float *given, float *rotated);
