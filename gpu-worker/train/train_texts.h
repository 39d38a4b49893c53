/*
 * train_texts.h - what a training reads: texts as token ids, cut into contexts.
 *
 * Owner      a job. Threads: the engine thread.
 */
#pragma once

#include <stdint.h>

#include "gpu-worker/job.h"

struct train_context {
    uint32_t *ids; /* begins with BOS where the model wants one */
    uint32_t n;
};

struct train_texts {
    uint32_t n_contexts;
    struct train_context *contexts;
    uint64_t n_tokens; /* of all contexts */
    uint64_t hash;     /* of their ids */
};

/*
 * n_texts 0: train_own_text(). Contexts of up to max_context tokens (and what the worker and the model allow) are taken from
 * the texts in turn, the first of each, then the second of each, until max_tokens are reached or the texts end.
 * With a sentence (JOB_SENTENCE_SIZE): -EINVAL a text is not UTF-8 or too large; -E2BIG no text has a whole block of tokens.
 * -ENOMEM.
 */
int train_texts_new(const struct job_tools *tools, const struct job_text *texts, uint32_t n_texts, uint32_t max_context,
                    uint64_t max_tokens, struct train_texts **ret_texts, char *sentence);
/* Offsets at which every context could have begun, in the model's context or the worker's if that is longer; at least 1. */
uint32_t train_texts_n_offsets(const struct train_texts *texts, const struct job_tools *tools);
struct train_texts *train_texts_free(struct train_texts *texts); /* accepts NULL, returns NULL */
