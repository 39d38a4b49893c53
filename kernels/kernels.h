/*
 * kernels.h - the CPU kernels that value-stores and workers share.
 *
 * Owner      nobody: pure functions on the caller's memory; no state but the table chosen at start.
 * Threads    any; every thread that calls a kernel has called kernels_thread_setup() once.
 * Invariant  one table per instruction set. `plain` (C loops) is the truth the others are tested against.
 *            For one table the result for a query does not depend on which other queries, heads or blocks
 *            are computed by the same call: bits are equal whatever the batch.
 *
 * Words      row: K and V of one token, layer and KV head, stored as [K head_dim | V head_dim].
 *            partial: [max, sum, out[head_dim]] of a softmax over some tokens, un-normalised:
 *            max = largest score, sum = sum of exp(score - max), out = sum of exp(score - max) * v.
 *            An empty partial is [-INFINITY, 0, 0...]. FlashAttention / FlashDecoding; merge by log-sum-exp.
 */
#pragma once

#include <stdint.h>
#include <stddef.h>

#define KERNELS_BLOCK_TOKENS             64
#define KERNELS_MAX_HEAD_DIM             256
#define KERNELS_PARTIAL_FLOATS(head_dim) (2u + (head_dim))

enum kernels_isa { KERNELS_ISA_AUTO, KERNELS_ISA_PLAIN, KERNELS_ISA_AVX2, KERNELS_ISA_AVX512, KERNELS_N_ISA };

struct kernels {
    enum kernels_isa isa;
    const char *name; /* "plain", "avx2", "avx512" */

    /*
     * Attention of n_queries queries over one block of up to 64 f16 rows, merged into their partials.
     *   q         [n_queries][head_dim], not scaled
     *   rows      [64][K|V] f16, contiguous: 2 * 2 * head_dim bytes a row; rows outside every mask are not read
     *   masks     [n_queries]: bit j set = token j of the block is attended to by that query; 0 leaves its partial as it is
     *   scale     multiplies q . k (1 / sqrt(head_dim))
     *   partials  [n_queries][2 + head_dim], in and out: the block's own partial is computed first, then merged by
     *             the same arithmetic as partial_merge
     */
    void (*attend_block)(const float *q, uint32_t n_queries, uint32_t head_dim, const uint16_t *rows,
                         const uint64_t *masks, float scale, float *partials);

    /* into <- merge(into, from); either may be empty. Both [2 + head_dim]. */
    void (*partial_merge)(float *into, const float *from, uint32_t head_dim);

    /* out[head_dim] = partial's out / sum. The partial must not be empty. */
    void (*partial_finish)(const float *partial, uint32_t head_dim, float *out);

    /* f32 -> f16 (round to nearest even, overflow to infinity) and back; n elements, any alignment. */
    void (*f16_encode)(const float *from, size_t n, uint16_t *to);
    void (*f16_decode)(const uint16_t *from, size_t n, float *to);

    /* Sums of K and of V over the n_tokens rows of a block, in token order: sums is [K|V][head_dim] f32. */
    void (*block_sums)(const uint16_t *rows, uint32_t n_tokens, uint32_t head_dim, float *sums);

    /* scores[n_keys] = scale * (q . k_j), keys [n_keys][head_dim] f16 contiguous. */
    void (*score_f16)(const float *q, uint32_t head_dim, const uint16_t *keys, uint32_t n_keys, float scale,
                      float *scores);
};

/* The table for an instruction set; AUTO = the best this CPU has. NULL: this CPU (or build) does not have it. */
const struct kernels *kernels_get(enum kernels_isa isa);

/* "auto", "plain", "avx2", "avx512" -> value; -EINVAL for anything else. */
int kernels_isa_parse(const char *name, enum kernels_isa *ret_isa);

/* Flush-to-zero and denormals-are-zero, so that a row's bits do not depend on which thread computed it. */
void kernels_thread_setup(void);

/* CRC-32C (Castagnoli), continuing from `crc` (0 to start). */
uint32_t kernels_crc32c(uint32_t crc, const void *bytes, size_t n_bytes);
