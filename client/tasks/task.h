/*
 * task.h - long-context tasks of any length whose answers are known: made from a seed, scored by the generated text.
 *
 * The tasks follow the definitions of RULER (Hsieh et al. 2024, arXiv:2404.06654, section 3 and appendix B) in wording of our
 * own: retrieval of needles, tracing of variables, aggregation of words. Two more: key-value retrieval and copying. A prompt
 * ends with the first words of its answer, and tasks that are hard to understand show solved examples first, so that small
 * models can do them.
 *
 * Owner      samples are the caller's: task_sample_fini(). Threads: any; pure functions.
 * Invariant  the same task, seed and size make the same sample, on every machine.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#define TASK_MAX_ANSWERS 10u
#define TASK_ANSWER_SIZE 64u

struct task_sample {
    char *prompt; /* ASCII */
    char answers[TASK_MAX_ANSWERS][TASK_ANSWER_SIZE];
    size_t n_answers;
};

struct task {
    const char *name; /* "niah_single" */
    const char *meaning;
    uint32_t max_tokens; /* enough for the answer */
    size_t n_min;        /* smallest size */
};

/* The i-th task; NULL after the last. */
const struct task *task_at(size_t i);
const struct task *task_find(const char *name); /* NULL: there is none */

/* `size` counts what the task's text is made of: sentences, lines, words. At least task->n_min. -ENOMEM */
int task_make(const struct task *task, uint64_t seed, size_t size, struct task_sample *ret_sample);
void task_sample_fini(struct task_sample *sample); /* accepts a zeroed one; leaves it zeroed */

/* Share of the expected answers that are in the text, whatever the case of letters: 0 .. 1. */
double task_score(const struct task_sample *sample, const char *text);

/*
 * The largest sample whose prompt has at most n_tokens tokens. count tells the tokens of a text, or a negative error, which ends
 * the search and is returned. Some ten texts are counted. -E2BIG: even the smallest one is longer; -ENOMEM.
 */
int task_fit(const struct task *task, uint64_t seed, size_t n_tokens,
             int (*count)(void *context, const char *text, size_t *ret_n_tokens), void *context,
             struct task_sample *ret_sample, size_t *ret_n_tokens);
