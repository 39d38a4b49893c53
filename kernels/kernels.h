/*
 * kernels.h - the CPU kernels that value-stores and workers share.
 *
 * Owner      nobody: pure functions on the caller's memory; no state but the table chosen at start.
 * Threads    any; every thread that calls a kernel has called kernels_thread_setup() once.
 * Invariant  one table per instruction set. `plain` (C loops) is the truth the others are tested against.
 *            For one table the result for a query does not depend on which other queries, heads or blocks
 *            are computed by the same call: bits are equal whatever the batch.
 *
 * Words      row: K and V of one token, layer and KV head, as its codec stores them (proto/layout.h: enum row_codec has the
 *            same numbers as enum kernels_rows).
 *            partial: [max, sum, out[head_dim]] of a softmax over some tokens, un-normalised:
 *            max = largest score, sum = sum of exp(score - max), out = sum of exp(score - max) * v.
 *            An empty partial is [-INFINITY, 0, 0...]. FlashAttention / FlashDecoding; merge by log-sum-exp.
 */
#pragma once

#include <stdint.h>
#include <stddef.h>

#define KERNELS_BLOCK_TOKENS             64
#define KERNELS_MAX_HEAD_DIM             256
#define KERNELS_DENSE_ROWS               32 /* a block with so many selected rows is one that is read as a whole */
#define KERNELS_PARTIAL_FLOATS(head_dim) (2u + (head_dim))

enum kernels_rows { KERNELS_ROWS_F16 = 1, KERNELS_ROWS_Q8_0 = 2 };

enum kernels_isa { KERNELS_ISA_AUTO, KERNELS_ISA_PLAIN, KERNELS_ISA_AVX2, KERNELS_ISA_AVX512, KERNELS_N_ISA };

struct kernels {
    enum kernels_isa isa;
    const char *name; /* "plain", "avx2", "avx512" */

    /*
     * Attention of n_queries queries over one block of up to 64 rows, merged into their partials.
     *   q         [n_queries][head_dim], not scaled
     *   rows      [64] rows, contiguous; rows outside every mask are not read
     *   masks     [n_queries]: bit j set = token j of the block is attended to by that query; 0 leaves its partial as it is
     *   scale     multiplies q . k (1 / sqrt(head_dim))
     *   partials  [n_queries][2 + head_dim], in and out: the block's own partial is computed first, then merged by
     *             the same arithmetic as partial_merge
     */
    void (*attend_block)(const float *q, uint32_t n_queries, uint32_t head_dim, enum kernels_rows codec,
                         const void *rows, const uint64_t *masks, float scale, float *partials);

    /*
     * The same over n_rows (1 .. 64) rows that lie anywhere, for all queries: as a block of just these rows.
     * rows [n_fetch], n_fetch >= n_rows: those from `fetch_from` on, of this call and of a later one, are asked for while the
     * scores are computed, so that they come from memory at the rate that memory has.
     */
    void (*attend_rows)(const float *q, uint32_t n_queries, uint32_t head_dim, enum kernels_rows codec,
                        const void *const *rows, uint32_t n_rows, uint32_t fetch_from, uint32_t n_fetch, float scale,
                        float *partials);

    /* sums [n_queries][1 + head_dim] += weight x (1, V) over n_rows rows; weights [n_queries][weights_stride]. */
    void (*weigh_rows)(uint32_t n_queries, uint32_t head_dim, enum kernels_rows codec, const void *const *rows,
                       uint32_t n_rows, const float *weights, size_t weights_stride, float *sums);

    /*
     * sums [n_queries][1 + head_dim] += mass x (1, v_sums / 64): a block's masses, of query i at masses[i * masses_stride].
     * A mass of 0 adds nothing, whatever the block holds.
     */
    void (*weigh_mean)(uint32_t n_queries, uint32_t head_dim, const float *v_sums, const float *masses,
                       size_t masses_stride, float *sums);

    /* into <- merge(into, from); either may be empty. Both [2 + head_dim]. */
    void (*partial_merge)(float *into, const float *from, uint32_t head_dim);

    /* out[head_dim] = partial's out / sum. The partial must not be empty. */
    void (*partial_finish)(const float *partial, uint32_t head_dim, float *out);

    /* f32 -> f16 (round to nearest even, overflow to infinity) and back; n elements, any alignment. */
    void (*f16_encode)(const float *from, size_t n, uint16_t *to);
    void (*f16_decode)(const uint16_t *from, size_t n, float *to);

    /* k, v [head_dim] f32 -> one row, and the keys of n_rows contiguous rows -> f32 [n_rows][head_dim]. */
    void (*encode_row)(const float *k, const float *v, uint32_t head_dim, enum kernels_rows codec, void *row);
    void (*decode_keys)(const void *rows, uint32_t n_rows, uint32_t head_dim, enum kernels_rows codec, float *keys);

    /* Sums of K and of V over the n_tokens rows of a block, in token order: sums is [K|V][head_dim] f32. */
    void (*block_sums)(const void *rows, uint32_t n_tokens, uint32_t head_dim, enum kernels_rows codec, float *sums);

    /* scores[n_keys] = scale * (q . k_j), keys [n_keys][head_dim] f16 contiguous. */
    void (*score_f16)(const float *q, uint32_t head_dim, const uint16_t *keys, uint32_t n_keys, float scale,
                      float *scores);
};

/* Bytes of a row: as layout_row_bytes(). */
size_t kernels_row_bytes(uint32_t head_dim, enum kernels_rows codec);

/* The table for an instruction set; AUTO = the best this CPU has. NULL: this CPU (or build) does not have it. */
const struct kernels *kernels_get(enum kernels_isa isa);

/* "auto", "plain", "avx2", "avx512" -> value; -EINVAL for anything else. */
int kernels_isa_parse(const char *name, enum kernels_isa *ret_isa);

/* Flush-to-zero and denormals-are-zero, so that a row's bits do not depend on which thread computed it. */
void kernels_thread_setup(void);

/* CRC-32C (Castagnoli), continuing from `crc` (0 to start). */
uint32_t kernels_crc32c(uint32_t crc, const void *bytes, size_t n_bytes);
