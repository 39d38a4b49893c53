/*
 * cuda_prefill_ops.h - the kernels of prefill attention (cuda_prefill.h); entry points as cuda_ops.h says.
 *
 * Words      queries of a KV head: [n x group], those of one position together; n_queries of them. A piece: up to
 *            CUDA_PREFILL_PIECE tokens whose keys and values lie together; a tile: some of the queries.
 */
#pragma once

#include "gpu-worker/backend/cuda/cuda_ops.h"

#ifdef __cplusplus
extern "C" {
#endif

#define CUDA_PREFILL_PIECE 2048u
#define CUDA_PREFILL_CHUNK 64u /* tokens of a chunk, at most */

/* Rows of consecutive tokens, of all KV heads, and where they go in the piece. rows NULL: zeros. */
struct cuda_prefill_chunk {
    const void *rows;
    size_t head_bytes, token_bytes;
    uint32_t n_tokens, first;
};

/* keys and values [n_kv_heads][CUDA_PREFILL_PIECE][head_dim] halves, of n_chunks chunks in device memory; numbers of q8_0 beyond
 * those of halves become the largest of these. */
cudaError_t cuda_prefill_decode(const struct cuda_queue *queue, const struct cuda_prefill_chunk *chunks,
                                uint32_t n_chunks, uint32_t n_kv_heads, uint32_t head_dim, enum kernels_rows codec,
                                uint16_t *keys, uint16_t *values);

/* rows [CUDA_PREFILL_PIECE / 64][n_kv_heads][64][row_bytes] as they are: pieces of cuda_attend */
cudaError_t cuda_prefill_gather(const struct cuda_queue *queue, const struct cuda_prefill_chunk *chunks,
                                uint32_t n_chunks, uint32_t n_kv_heads, uint32_t row_bytes, void *rows);

/* n states [stride] that are empty: -infinity and zeros */
cudaError_t cuda_prefill_empty(const struct cuda_queue *queue, float *states, uint32_t stride, size_t n);

/* out [n_kv_heads][n x group][head_dim] = q [n][n_heads][head_dim] */
cudaError_t cuda_prefill_queries(const struct cuda_queue *queue, const float *q, uint32_t n, uint32_t n_heads,
                                 uint32_t group, uint32_t head_dim, float *out);

/*
 * Scores of a tile's queries with a piece become weights: exponentials of what is above the queries' largest score so far, times
 * 2^15 as halves; the states and the outputs so far follow the largest score.
 */
struct cuda_prefill_softmax {
    const float
        *scores;       /* [n_kv_heads][tile_queries][CUDA_PREFILL_PIECE], of queries as cuda_halves_rows() made them */
    uint16_t *weights; /* the same shape; columns up to n_columns are written */
    float *states;     /* [n_kv_heads][n_queries][2]: maximum, sum of weights */
    float *out;        /* [n_kv_heads][n_queries][head_dim] */
    const float *factors; /* [n_kv_heads][n_queries]: of the queries */
    uint32_t n_kv_heads, n_queries, tile_queries, first_query, group, head_dim;
    uint32_t n_tokens, n_columns; /* of the piece */
    uint32_t causal_first; /* position of the piece's first token, if is_causal: query i sees those up to i / group */
    bool is_causal, is_first; /* is_first: there is no output yet */
    float scale;
};
cudaError_t cuda_prefill_weigh(const struct cuda_queue *queue, const struct cuda_prefill_softmax *softmax);

/* out [n][n_heads][head_dim] = values [n_kv_heads][n x group][values_stride] / sums [..][sums_stride], the first of each */
cudaError_t cuda_prefill_finish(const struct cuda_queue *queue, const float *values, uint32_t values_stride,
                                const float *sums, uint32_t sums_stride, uint32_t n, uint32_t n_heads, uint32_t group,
                                uint32_t head_dim, float *out);

#ifdef __cplusplus
}
#endif
