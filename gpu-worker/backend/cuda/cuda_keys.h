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

#include "gpu-worker/backend/cuda/cuda_ops.h"
#include "gpu-worker/keys/codec_pair.h"
#include "gpu-worker/keys/codec_pq.h"
#include "gpu-worker/keys/codec_rot.h"

#ifdef __cplusplus
extern "C" {
#endif

struct cuda_pair_table; /* on the device */

/* Consecutive tiles of one (session, layer, KV head), 64-byte aligned, and the queries to score them for. */
struct cuda_key_run {
    const void *query; /* prepared, of n_queries query heads */
    const void *tiles;
    const float *sides;        /* not pq: one a tile */
    float *scores;             /* out: [n_queries][stride], 64 for each tile */
    const uint16_t *centroids; /* pq: [n_spaces][n_centroids][n_dims] of the head */
    uint32_t n_tiles;          /* <= most_tiles of the call */
    uint32_t n_groups;         /* pair: of the head, <= most_groups of the call */
};

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
cudaError_t cuda_quantize_rot(const struct cuda_queue *queue, uint32_t bits, uint32_t head_dim,
                              const struct cuda_key_block *blocks, uint32_t n_blocks);
cudaError_t cuda_prepare_rot(const struct cuda_queue *queue, uint32_t bits, uint32_t head_dim, uint32_t n_queries,
                             float scale, const struct cuda_key_query *queries, uint32_t n_heads);

/* n_dims and n_centroids as for cuda_score_pq(), which says what they may be */
cudaError_t cuda_quantize_pq(const struct cuda_queue *queue, uint32_t n_dims, uint32_t n_centroids, uint32_t head_dim,
                             const struct cuda_key_block *blocks, uint32_t n_blocks);
cudaError_t cuda_prepare_pq(const struct cuda_queue *queue, uint32_t head_dim, uint32_t n_queries, float scale,
                            const struct cuda_key_query *queries, uint32_t n_heads);

/* The table of a head on the device, freed by cudaFree(); waits. */
cudaError_t cuda_prepare_pair_table(const struct pair_table *table, struct cuda_pair_table **ret_table);
/* head_dim is that of all tables */
cudaError_t cuda_quantize_pair(const struct cuda_queue *queue, uint32_t head_dim, const struct cuda_key_block *blocks,
                               uint32_t n_blocks);
cudaError_t cuda_prepare_pair(const struct cuda_queue *queue, uint32_t n_queries, float scale,
                              const struct cuda_key_query *queries, uint32_t n_heads);

#ifdef __cplusplus
}
#endif
