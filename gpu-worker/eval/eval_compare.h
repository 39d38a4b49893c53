/*
 * eval_compare.h - how far a method's distributions are from full attention's, position by position.
 *
 * Full attention's log-probabilities of the whole tail are kept, as single precision (half is too coarse for the divergences
 * of good presets): tail x n_vocab x 4 bytes, the largest thing in an evaluation's memory.
 *
 * Owner      an evaluation. Threads: one.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

struct eval_compare;

/* What came of a tail's positions. */
struct eval_compared {
    double kld_mean, kld_p99; /* nats, D(full || method); p99 by nearest rank */
    double top1;              /* share of positions with the same most likely token */
    double perplexity, full_perplexity;
};

/*
 * n positions; ids [n_ids]: of the tokens that follow them, the first of them behind the first position (n_ids <= n). Copied.
 * -ENOMEM.
 */
int eval_compare_new(uint32_t n, uint32_t n_vocab, const uint32_t *ids, uint32_t n_ids,
                     struct eval_compare **ret_compare);
struct eval_compare *eval_compare_free(struct eval_compare *compare); /* accepts NULL, returns NULL */

/* Where full attention's log-probabilities [n_vocab] of the i-th position go, before anything is compared. */
float *eval_compare_full(struct eval_compare *compare, uint32_t i);

/* A method's log-probabilities [n_vocab] of the i-th position. */
void eval_compare_add(struct eval_compare *compare, uint32_t i, const float *logprobs);
/* Of the positions that were added, all of them; then the next method may begin. */
void eval_compare_finish(struct eval_compare *compare, struct eval_compared *ret_compared);
