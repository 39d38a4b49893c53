/*
 * codec_pq.h - product-quantized keys (HCAttention, arXiv 2507.19823): a key is cut into sub-spaces of n_dims dimensions that lie
 * side by side, each is kept as the number of its nearest centroid. No mean, no scale: the codebook is of keys as they are
 * after RoPE.
 *
 * Owner      gpu-worker/keys; quantizers.c makes tables, training searches in spaces, tests look inside. Threads: any.
 * Invariant  nearest: the smallest of the distances as computed, and of equal ones the lowest number; a distance is the tree
 *            ((s0 + s1) + (s2 + s3)) + ((s4 + s5) + (s6 + s7)) of squares of differences, each rounded: the same numbers on every
 *            instruction set. A score is, dimension by dimension from 0 on, sum = fma(q_i * scale, k^_i, sum): the same bits too.
 *
 * Table      of one (layer, KV head): centroids in half precision (rows are no finer), 2 n_dims bytes each. They are sorted: a
 *            k-d tree cuts the space at medians into leaves of equally many; a leaf's centroids lie together and have a box.
 *            The search looks only into leaves whose box is not farther than the best so far. Numbers in tiles are of this order, a
 *            pure function of the codebook.
 * Tile       by sub-space 8 bits bytes, bits = log2(centroids) = 8 .. 12: the numbers' bits from 8 on, key by key from the
 *            lowest bit of the first byte (bits - 8 bytes for 8 keys), then the 64 low bytes. Zeros up to a multiple of 64.
 * Scores     centroids are looked up and multiplied with the query, not the products themselves: a table of products has as
 *            many entries as a session of 4,096 tokens has keys, is larger (4 bytes an entry and query) and one look-up serves
 *            only one query of the KV head.
 */
#pragma once

#include <assert.h>

#include "gpu-worker/keys/codec.h"

#define PQ_KEYS          KERNELS_BLOCK_TOKENS
#define PQ_MAX_DIMS      8u
#define PQ_MIN_CENTROIDS 256u
#define PQ_MAX_CENTROIDS 4096u
#define PQ_MAX_LEAVES    64u

struct key_codebook;

/* Centroids of one sub-space in the order of its leaves. */
struct pq_space {
    uint32_t n_dims, n_centroids;
    const uint16_t *centroids; /* [n_centroids][n_dims] halves */
    const float *boxes;        /* [n_dims][low | high][n_leaves] */
};

struct pq_table {
    uint32_t head_dim, n_dims, n_centroids, n_spaces;
    size_t n_bytes;      /* of centroids and boxes: what the device keeps */
    uint16_t *centroids; /* [n_spaces][n_centroids][n_dims] */
    float *boxes;        /* [n_spaces][n_dims][low | high][n_leaves] */
};

static inline uint32_t pq_bits(uint32_t n_centroids)
{
    return 31u - (uint32_t)__builtin_clz(n_centroids);
}
static inline uint32_t pq_leaf(uint32_t n_centroids) /* centroids of a leaf, so that there are 8 .. 64 leaves */
{
    return n_centroids >= 512 ? 64 : 32;
}
static inline uint32_t pq_n_leaves(uint32_t n_centroids)
{
    return n_centroids / pq_leaf(n_centroids);
}
static_assert(PQ_MAX_CENTROIDS / 64 == PQ_MAX_LEAVES, "leaves of 64");
static inline size_t pq_box_floats(uint32_t n_dims, uint32_t n_centroids) /* of one space */
{
    return (size_t)n_dims * 2 * pq_n_leaves(n_centroids);
}
static inline size_t pq_space_bytes(uint32_t n_centroids) /* of one sub-space in a tile */
{
    return (size_t)PQ_KEYS / 8 * pq_bits(n_centroids);
}
static inline size_t pq_tile_bytes(const struct pq_table *table)
{
    return (table->n_spaces * pq_space_bytes(table->n_centroids) + 63) / 64 * 64;
}
static inline struct pq_space pq_table_space(const struct pq_table *table, uint32_t space)
{
    return (struct pq_space){table->n_dims, table->n_centroids,
                             table->centroids + (size_t)space * table->n_centroids * table->n_dims,
                             table->boxes + space * pq_box_floats(table->n_dims, table->n_centroids)};
}

/* The table of one (layer, KV head): struct key_head.table. -ENOMEM. */
int codec_pq_table_new(const struct key_codebook *codebook, uint32_t layer, uint32_t kv_head,
                       struct pq_table **ret_table);
struct pq_table *codec_pq_table_free(struct pq_table *table); /* accepts NULL, returns NULL */

/* The order of leaves: order[i] is the number in `centroids` [n_centroids][n_dims] (finite) of the i-th. n_dims 2, 4, 8. */
void codec_pq_sort(uint32_t n_dims, uint32_t n_centroids, const float *centroids, uint16_t *order);
/* Rounds centroids to halves in that order (which may be that of centroids that were near these: slower, not less exact). */
void codec_pq_fill(uint32_t n_dims, uint32_t n_centroids, const float *centroids, const uint16_t *order,
                   uint16_t *halves, float *boxes);

/* One file per instruction set. */
struct pq_kernels {
    /* Of x [n][n_dims], cleaned, the number of the nearest centroid and (unless NULL) its square distance. */
    void (*nearest)(const struct pq_space *space, const float *x, uint32_t n, uint16_t *numbers, float *distances);
    /* q [n_queries][head_dim], times scale. */
    void (*score)(const struct pq_table *table, const float *q, uint32_t n_queries, const void *tiles, uint32_t n_tiles,
                  float *scores, size_t stride);
};
extern const struct pq_kernels codec_pq_plain;
extern const struct pq_kernels codec_pq_avx2;
extern const struct pq_kernels codec_pq_avx512;
const struct pq_kernels *codec_pq_kernels(const struct kernels *kernels);

/* Finite, and 0 where it is smaller than any row holds (so that no square is a denormal number). */
float codec_pq_cleaned(float x, float largest);
#define PQ_KEY_LARGEST 65504.0f /* of f16 */
