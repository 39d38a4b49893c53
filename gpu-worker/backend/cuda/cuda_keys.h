/*
 * cuda_keys.h - old keys on the device: tiles from sealed blocks, prepared queries, scores. C linkage; cuda_ops.h says what holds
 * for all of them.
 *
 * Tiles, sides and prepared queries have the bytes that the codecs of gpu-worker/keys give (codec_rot.h, codec_pair.h,
 * codec_pq.h), and scores the bits of their plain loops.
 *
 * Batches    each call serves many heads, of several sessions if need be: what differs from head to head is an array in device
 *            memory, whose own pointers are device memory too. At most 65535 a call.
 */
#pragma once

#include <stdbool.h>
#include <string.h>

#include "gpu-worker/backend/cuda/cuda_ops.h"
#include "gpu-worker/keys/codec_pair.h"
#include "gpu-worker/keys/codec_pq.h"
#include "gpu-worker/keys/codec_rot.h"

#ifdef __cplusplus
extern "C" {
#endif

struct cuda_pair_table; /* on the device */

/* A float as an integer: what is larger stays larger, and 0 is below all. */
static inline uint32_t cuda_keys_order(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

#define CUDA_KEY_CHUNK_TILES 16u /* KEY_CACHE_CHUNK_BLOCKS of key_cache.h */
#define CUDA_KEY_SINKS       4u  /* LAYOUT_N_SINKS: the first keys of the first tile are of no old tokens */

/*
 * The tiles of one (session, layer, KV head) from the first one on, as a key cache has them, and the queries to score them for:
 * tile t is at chunks[t / CUDA_KEY_CHUNK_TILES] + tiles + its bytes x (t % CUDA_KEY_CHUNK_TILES), 64-byte aligned, its side at
 * ... + sides + 4 x (t % CUDA_KEY_CHUNK_TILES).
 */
struct cuda_key_run {
    const void *query;            /* prepared, of n_queries query heads */
    const uint8_t *const *chunks; /* [enough for n_tiles] */
    size_t tiles, sides;          /* offsets in a chunk; pq and f16 have no use for sides */
    float *scores;                /* out: [n_queries][stride], 64 for each tile */
    uint32_t
        *largest; /* in and out: [n_queries], cuda_keys_order() of the largest score so far, 0 for none; of all keys
                                     but sinks, NaN is passed over. NULL: not asked for */
    const uint16_t *centroids; /* pq: [n_spaces][n_centroids][n_dims] of the head */
    uint32_t n_tiles;          /* <= most_tiles of the call */
    uint32_t n_groups;         /* pair: of the head, <= most_groups of the call */
};

cudaError_t cuda_score_f16(const struct cuda_queue *queue, uint32_t head_dim, uint32_t n_queries,
                           const struct cuda_key_run *runs, uint32_t n_runs, uint32_t most_tiles, size_t stride);
/* bits 4, 3 or 2 */
cudaError_t cuda_score_rot(const struct cuda_queue *queue, uint32_t bits, uint32_t head_dim, uint32_t n_queries,
                           const struct cuda_key_run *runs, uint32_t n_runs, uint32_t most_tiles, size_t stride);
/* is_klt as in the layout of all heads; most_groups <= PAIR_MAX_GROUPS */
cudaError_t cuda_score_pair(const struct cuda_queue *queue, bool is_klt, uint32_t head_dim, uint32_t most_groups,
                            uint32_t n_queries, const struct cuda_key_run *runs, uint32_t n_runs, uint32_t most_tiles,
                            size_t stride);
/* n_dims 2, 4 or 8, n_centroids 256 .. 4096 */
cudaError_t cuda_score_pq(const struct cuda_queue *queue, uint32_t n_dims, uint32_t n_centroids, uint32_t head_dim,
                          uint32_t n_queries, const struct cuda_key_run *runs, uint32_t n_runs, uint32_t most_tiles,
                          size_t stride);

/* The keys of a sealed block, [64][head_dim] as the row codec decodes them, and where their tile (64-byte aligned) goes. */
struct cuda_key_block {
    const float *keys;
    void *tile;
    float *side;
    const struct cuda_pair_table *table; /* pair */
    float *work;                         /* pair: [n_coordinates][64] */
    const uint16_t *centroids;           /* pq: as in cuda_key_run */
};

/* The queries of a KV head, [n_queries][head_dim], and where they go as prepared. */
struct cuda_key_query {
    const float *q;
    void *query;
    const struct cuda_pair_table *table; /* pair */
};

/* n_heads is that of `queries` */
cudaError_t cuda_quantize_f16(const struct cuda_queue *queue, uint32_t head_dim, const struct cuda_key_block *blocks,
                              uint32_t n_blocks);
#define CUDA_KEY_F16_HEADER 16u /* floats of a prepared query before the numbers, the first is the scale */
cudaError_t cuda_prepare_f16(const struct cuda_queue *queue, uint32_t head_dim, uint32_t n_queries, float scale,
                             const struct cuda_key_query *queries, uint32_t n_heads);

cudaError_t cuda_quantize_rot(const struct cuda_queue *queue, uint32_t bits, uint32_t head_dim,
                              const struct cuda_key_block *blocks, uint32_t n_blocks);
cudaError_t cuda_prepare_rot(const struct cuda_queue *queue, uint32_t bits, uint32_t head_dim, uint32_t n_queries,
                             float scale, const struct cuda_key_query *queries, uint32_t n_heads);

/* n_dims and n_centroids as for cuda_score_pq(), which says what they may be */
cudaError_t cuda_quantize_pq(const struct cuda_queue *queue, uint32_t n_dims, uint32_t n_centroids, uint32_t head_dim,
                             const struct cuda_key_block *blocks, uint32_t n_blocks);
cudaError_t cuda_prepare_pq(const struct cuda_queue *queue, uint32_t head_dim, uint32_t n_queries, float scale,
                            const struct cuda_key_query *queries, uint32_t n_heads);

/* Bytes of a head's table on the device (a multiple of 64), and the table in that memory (64-byte aligned): there when what follows
 * in the queue's stream runs; `table` is read before it returns. */
size_t cuda_prepare_pair_table_bytes(const struct pair_table *table);
cudaError_t cuda_prepare_pair_table(const struct cuda_queue *queue, const struct pair_table *table, void *memory);
/* head_dim is that of all tables */
cudaError_t cuda_quantize_pair(const struct cuda_queue *queue, uint32_t head_dim, const struct cuda_key_block *blocks,
                               uint32_t n_blocks);
cudaError_t cuda_prepare_pair(const struct cuda_queue *queue, uint32_t n_queries, float scale,
                              const struct cuda_key_query *queries, uint32_t n_heads);

/* Rows, or what is left of them where only K is needed. */
struct cuda_key_rows {
    const void *rows;
    size_t row_bytes;
    enum kernels_rows codec;
    uint32_t scales_at; /* q8_0: offset of K's scales in a row */
};
/* keys [n_rows][head_dim] = K of contiguous rows */
cudaError_t cuda_decode_keys(const struct cuda_queue *queue, const struct cuda_key_rows *rows, size_t n_rows,
                             uint32_t head_dim, float *keys);

/* The exact set of one (session, KV head), for selector mass. */
struct cuda_exact_item {
    const float *q; /* [group][head_dim], not scaled */
    const struct backend_piece *pieces;
    uint32_t n_pieces, n_tokens; /* bits of all masks */
    float *scores;               /* out: [group][stride], n_tokens of each, in order of pieces and tokens */
};
/* rows: how a row is made; its `rows` says nothing */
cudaError_t cuda_score_exact(const struct cuda_queue *queue, const struct cuda_exact_item *items, uint32_t n_items,
                             uint32_t group, uint32_t head_dim, const struct cuda_key_rows *rows, float scale,
                             size_t stride);

#ifdef __cplusplus
}
#endif
