/*
 * eval_progress.h - how much of an evaluation is done, by the time that its parts took so far.
 *
 * Each text has the same parts in the same order: the pass, full attention's distributions, then two for each preset: its
 * tail, and its distributions. What was not measured yet is taken to be as long as its like.
 *
 * Owner      an evaluation. Threads: one.
 */
#pragma once

#include <stdint.h>

struct eval_progress {
    uint32_t n_texts, n_parts; /* of a text */
    uint32_t text, part;       /* at hand */
    uint64_t *part_us;         /* [n_parts]: as measured last; 0: never */
    uint64_t spent_us;         /* on all parts that are done */
    uint64_t at_hand_us;
    double done; /* never falls */
};

int eval_progress_init(struct eval_progress *progress, uint32_t n_texts, uint32_t n_presets); /* -ENOMEM */
void eval_progress_fini(struct eval_progress *progress);

void eval_progress_work(struct eval_progress *progress, uint64_t us); /* on the part at hand */
void eval_progress_next(struct eval_progress *progress);              /* it is done */
/* 0 .. 1; fraction: of the part at hand. */
double eval_progress_done(struct eval_progress *progress, double fraction);
