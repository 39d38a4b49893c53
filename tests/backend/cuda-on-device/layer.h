/*
 * layer.h - one layer's attention of one session of Llama-3-8B's shape: what the parts of the program (layer*.c) share.
 *
 * How rows are made: keys of a head are a constant, a mean that differs from block to block and a rest, independent normal numbers
 * of variance 1 / (1 + i / 8) in dimension i (block means: a quarter of it); values are normal. A KV head's queries share 4/5 of
 * their variance and are as long as it takes for scores to have a standard deviation of LAYER_DEVIATION nats. N distinct blocks are
 * repeated through the context. For each step's queries LAYER_SHARE of the attention of each query head goes to some keys of
 * their own, moved along the queries so that their weights fall as 1 / rank, in blocks all over the context.
 *
 * Owner      the main thread; a pool makes and reads rows.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/pool.h"
#include "gpu-worker/keys/key_statistics.h"
#include "kernels/kernels.h"

#define LAYER_N_KV_HEADS   8u
#define LAYER_GROUP        4u
#define LAYER_N_HEADS      (LAYER_N_KV_HEADS * LAYER_GROUP)
#define LAYER_DIM          128u
#define LAYER_TOKENS       64u /* of a block */
#define LAYER_WIDTH        (2u + LAYER_DIM)
#define LAYER_ROW_BYTES    512u /* f16 */
#define LAYER_HEAD_BYTES   ((size_t)LAYER_TOKENS * LAYER_ROW_BYTES)
#define LAYER_BLOCK_BYTES  (LAYER_N_KV_HEADS * LAYER_HEAD_BYTES)
#define LAYER_BLOCK_SUMS   (LAYER_N_KV_HEADS * LAYER_DIM) /* floats */
#define LAYER_MOST_QUERIES 4u
#define LAYER_DEVIATION    3.0
#define LAYER_SHARE        0.5

struct layer_size {
    uint32_t n_distinct; /* blocks; a multiple of KEY_CACHE_CHUNK_BLOCKS */
    uint32_t
        n_queries; /* different ones, taken in turn: no step finds its rows in the CPU's caches because of the one before */
    uint32_t n_peaks; /* keys of their own of each of them */
};

/* layer_rows.c: rows of the session in memory of the host, block by block as stores have them. */
struct layer_rows {
    struct layer_size size;
    const struct kernels *kernels;
    struct pool *pool; /* not owned */
    uint8_t *rows;     /* [most_blocks][KV head][64 rows] */
    float *sums;       /* [most_blocks][KV head][dim]: of V */
    uint32_t n_blocks; /* that are filled */
    uint32_t most_blocks;
    float *q;         /* [n_queries][head][dim] */
    double *log_sums; /* [n_queries][head]: of the distinct blocks' exponentials */
    float *constants; /* [KV head][dim] */
};

/* Room (address space) for most_blocks; the distinct blocks are made. -ENOMEM. */
int layer_rows_new(const struct layer_size *size, uint32_t most_blocks, struct pool *pool,
                   const struct kernels *kernels, struct layer_rows **ret_rows);
struct layer_rows *layer_rows_free(struct layer_rows *rows); /* accepts NULL, returns NULL */
/* Blocks up to n_blocks, as repeated; what was there stays. */
void layer_rows_extend(struct layer_rows *rows, uint32_t n_blocks);
/* Puts the queries' own keys into blocks of a context of n_blocks, or the distinct block's rows back; blocks_of says which. */
void layer_rows_put_peaks(struct layer_rows *rows, uint32_t n_blocks);
void layer_rows_remove_peaks(struct layer_rows *rows, uint32_t n_blocks);
/* The i-th block with such a key, i < n_queries x n_peaks; may come several times. */
uint32_t layer_rows_peak_block(const struct layer_rows *rows, uint32_t n_blocks, uint32_t i);

static inline uint8_t *layer_rows_of(const struct layer_rows *rows, uint32_t block, uint32_t kv_head)
{
    return rows->rows + block * LAYER_BLOCK_BYTES + kv_head * LAYER_HEAD_BYTES;
}
static inline const float *layer_sums_of(const struct layer_rows *rows, uint32_t block, uint32_t kv_head)
{
    return rows->sums + (size_t)block * LAYER_BLOCK_SUMS + kv_head * LAYER_DIM;
}
static inline const float *layer_q_of(const struct layer_rows *rows, uint32_t query, uint32_t kv_head)
{
    return rows->q + ((size_t)query * LAYER_N_KV_HEADS + kv_head) * LAYER_GROUP * LAYER_DIM;
}
static inline float layer_scale(void)
{
    return 0.08838834764831845f; /* 1 / sqrt(128) */
}

/* layer_statistics.c: what the pair and klt codecs are made from, as the keys and queries above have it. -ENOMEM. */
int layer_statistics(const struct layer_rows *rows, struct key_statistics **ret_statistics);

/* layer_gather.c: what the stores do, by the pool: one lane of one KV head an item. */
struct layer_gather {
    const struct layer_rows *rows;
    uint32_t n_blocks;
    const void **row_lists; /* [KV head][n_blocks]: blocks' rows by lane, then by block */
    const float **sum_lists;
};
int layer_gather_new(const struct layer_rows *rows, uint32_t n_blocks, struct layer_gather **ret_gather); /* -ENOMEM */
struct layer_gather *layer_gather_free(struct layer_gather *gather); /* accepts NULL, returns NULL */

/* One step's selection, as backend_device.h has it; masses NULL: no tail. */
struct layer_selection {
    const float *q;          /* [head][dim] */
    const uint64_t *masks;   /* [KV head][n_blocks] */
    const float *masses;     /* [head][n_blocks] */
    const float *references; /* [head] */
    float *partials;         /* out: [lane][head][LAYER_WIDTH] */
};
void layer_gather_run(const struct layer_gather *gather, const struct layer_selection *selection);
/* Bytes of rows and sums that it reads. */
double layer_gather_bytes(const struct layer_gather *gather, const struct layer_selection *selection);
