/*
 * codec_pair.h - inside of the codecs that give bits to where queries look (pair3, pair2, pair1, klt1, klt0): tables, tiles,
 * queries, and the tables of kernels.
 *
 * A key is its block's mean plus a residual r. Some coordinates y = A r, scaled such that an error in any of them costs the same
 * in scores, are coded in groups that share 4 bits: a group is 1 .. 4 (or more) coordinates and 16 codewords. So coordinates of
 * 1, 2, 3 and 4 bits, and vectors, look the same to who scores, and a score is a sum of look-ups: one shuffle for 32 keys.
 *     k^ = m + a B' c + t u      a: the key's size, t: what is left of r along the mean query's direction u
 *     q . k^ = q . m + a sum over groups of (B q) . codeword + t (q . u)
 * pair: the coordinates are the key's dimensions, scaled. klt: A and B turn keys to the axes along which they differ most in
 * scores (Karhunen and Loeve), groups are vectors, heads where more is to be lost have more of them; no t is needed then.
 *
 * Owner      gpu-worker/keys; tests look inside. A table is immutable. Threads: any.
 * Invariant  a score is, in this order and with these roundings, on every instruction set
 *                x = sum of the groups' look-ups in the query's table of 8-bit numbers, exact
 *                base = (scale * mean's step) * dot16(query, mean bytes)    dot16: see codec_rot.h
 *                score = fma(a, fma(x, factor, offset), fma(t, along * t's step, base))
 *            so that plain, AVX2 and AVX-512 give the same bits.
 *
 * A tile of 64 keys, G groups, head_dim d:
 *     groups   [G / 2, rounded up][64] bytes: key j's code of group 2 p in the lower four bits of byte j, of group 2 p + 1 in the
 *              upper; klt: G is odd, the last upper four are a: 0, or 2^((code - 8) / 4)
 *     scales   64 bytes: a (key_scale.h); not in klt
 *     along    int8 [64]: t, in steps that the side gives; not in klt
 *     mean     int8 [d], in steps that the side gives; zeros up to a multiple of 64
 * Its side is a float whose lowest 8 bits are cleared: the mean's step; these 8 bits: the code of t's step.
 */
#pragma once

#include <assert.h>
#include <string.h>

#include "gpu-worker/keys/codec.h"
#include "gpu-worker/keys/key_scale.h"

#define PAIR_KEYS       KERNELS_BLOCK_TOKENS
#define PAIR_CODEWORDS  16u
#define PAIR_MAX_GROUPS 256u /* sums of their look-ups fit 16 bits */
static_assert(PAIR_MAX_GROUPS * 255u <= UINT16_MAX, "sums fit");

struct key_statistics;

struct pair_group {
    uint16_t first, n;  /* coordinates */
    uint32_t codewords; /* where its [16][n] begin */
};

/* What tiles and queries look like. */
struct pair_layout {
    uint32_t head_dim;
    uint32_t n_groups; /* klt: odd, else even */
    bool is_klt;
};

struct pair_table {
    struct pair_layout layout;
    uint32_t n_coordinates;    /* coded ones */
    bool dense;                /* A and B are matrices, else each coordinate is one dimension of the key */
    uint16_t *dimension;       /* [n_coordinates], not dense: A and B's only column */
    float *analysis;           /* A [n_coordinates][head_dim]; not dense: [n_coordinates] */
    float *synthesis;          /* B' [head_dim][n_coordinates]; not dense: [n_coordinates] */
    float *inverse_spread;     /* [n_coordinates]: 1 / (E[y^2] n_coordinates) */
    float *along;              /* B u [n_coordinates] */
    float *direction;          /* u [head_dim], of length 1 or 0 */
    struct pair_group *groups; /* [n_groups]; those past the coordinates are empty */
    float *codewords;          /* [group][16][n] */
    float *half_squares;       /* [group][16]: |codeword|^2 / 2 */
    size_t n_bytes;            /* of all this */
};

/*
 * codec_pair_table.c: the table of pair from what the statistics say of a head, for so many groups (even, 2 ..
 * PAIR_MAX_GROUPS). Freed by free(). -ENOMEM.
 */
int codec_pair_table_new(const struct key_statistics *statistics, uint32_t layer, uint32_t kv_head, uint32_t n_groups,
                         struct pair_table **ret_table);
/* Groups of a head for `bits` and a quarter bits a dimension, of which mean, a and t take 3/8 at head_dim 64. */
uint32_t codec_pair_table_groups(uint32_t head_dim, uint32_t bits);
/* Room for a table: sizes and pointers set, numbers 0. NULL: no memory. */
struct pair_table *codec_pair_table_alloc(const struct pair_layout *layout, uint32_t n_coordinates, bool dense);
/* Of N(0, 1) by Lloyd and Max, in 0 .. 4 bits: the levels, and the mean square that is lost. */
float codec_pair_table_level(uint32_t bits, uint32_t code);
double codec_pair_table_distortion(uint32_t bits);

/*
 * codec_pair_klt.c: the tables of klt for all heads [layer][kv_head], such that a tile takes tile_bytes in the mean over the heads.
 * tables: NULLs, owned by the caller also on failure. -ENOMEM.
 */
int codec_pair_klt_tables(const struct key_statistics *statistics, double tile_bytes, struct pair_table **tables);

static inline size_t pair_scales_offset(const struct pair_layout *layout)
{
    return (size_t)layout->n_groups / 2 * PAIR_KEYS; /* klt: where they share the last group's bytes */
}
static inline size_t pair_along_offset(const struct pair_layout *layout)
{
    return pair_scales_offset(layout) + PAIR_KEYS;
}
static inline size_t pair_mean_offset(const struct pair_layout *layout)
{
    return pair_along_offset(layout) + (layout->is_klt ? 0 : PAIR_KEYS);
}
static inline size_t pair_tile_bytes(const struct pair_layout *layout)
{
    return pair_mean_offset(layout) + ((size_t)layout->head_dim + 63) / 64 * 64;
}
/* A byte at the scales' offset -> code of key_scale.h; and the nearest such byte's upper four bits for a code. */
static inline uint32_t pair_scale_of(const struct pair_layout *layout, uint8_t byte)
{
    return !layout->is_klt ? byte : byte >> 4 ? 112u + 2u * (byte >> 4) : 0;
}
static inline uint8_t pair_scale_nibble(uint32_t code)
{
    return (uint8_t)(code == 0 ? 0 : code < 114 ? 1 : code > 142 ? 15 : (code - 112 + 1) / 2);
}

static inline float pair_side(float mean_step, uint32_t along_code)
{
    uint32_t bits;
    memcpy(&bits, &mean_step, sizeof bits);
    bits = (bits & ~255u) | along_code;
    memcpy(&mean_step, &bits, sizeof bits);
    return mean_step;
}
static inline float pair_mean_step(float side)
{
    return pair_side(side, 0);
}
static inline float pair_along_step(float side)
{
    uint32_t bits;
    memcpy(&bits, &side, sizeof bits);
    return key_scale_value(bits & 255u);
}

/* A prepared query: this, then float [16 x 16ths of head_dim] as given, then the look-ups: uint8 [n_groups][16]. */
struct pair_query {
    float factor; /* scale * the step of the look-ups */
    float offset; /* scale * the sum of the groups' least values */
    float scale;
    float along; /* scale * q . u */
    float padding[12];
};
static_assert(sizeof(struct pair_query) == 64, "what follows is aligned");

static inline uint32_t pair_sixteenths(uint32_t head_dim)
{
    return (head_dim + 15) / 16;
}
static inline size_t pair_query_bytes(const struct pair_layout *layout)
{
    const size_t tables = ((size_t)layout->n_groups * PAIR_CODEWORDS + 63) / 64 * 64;
    return sizeof(struct pair_query) + pair_sixteenths(layout->head_dim) * 16 * sizeof(float) + tables;
}
static inline const float *pair_query_floats(const void *query)
{
    return (const float *)(const void *)((const uint8_t *)query + sizeof(struct pair_query));
}
static inline const uint8_t *pair_query_tables(const void *query, const struct pair_layout *layout)
{
    return (const uint8_t *)query + sizeof(struct pair_query) + pair_sixteenths(layout->head_dim) * 16 * sizeof(float);
}

/* As key_codec.score. One file per instruction set. */
struct pair_kernels {
    void (*score)(const struct pair_layout *layout, const void *query, uint32_t n_queries, const void *tiles,
                  const float *sides, uint32_t n_tiles, float *scores, size_t stride);
};
extern const struct pair_kernels codec_pair_plain;
extern const struct pair_kernels codec_pair_avx2;
extern const struct pair_kernels codec_pair_avx512;

/* codec_pair_quantize.c: keys -> tile and side, the same bytes on every instruction set. */
void codec_pair_quantize(const struct pair_table *table, const float *keys, void *tile, float *ret_side);
void codec_pair_quantize_avx2(const struct pair_table *table, const float *keys, void *tile, float *ret_side);
