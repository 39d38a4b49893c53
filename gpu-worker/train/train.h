/*
 * train.h - what key codecs learn from a model, as jobs: statistics (pair) and codebooks (pq).
 *
 * Both run texts through the model (eval/pass.h, in contexts (of up to TRAIN_CONTEXT tokens for codebooks)) and look at queries and keys.
 * The result goes to the quantizers, which keep it beside the model.
 *
 * Owner      job.h.
 */
#pragma once

#include "gpu-worker/job.h"

enum { TRAIN_CONTEXT = 4096 };

/* The text that the worker brings along: prose, code, law, a list, a dialogue; its own words. */
const char *train_own_text(void);

struct train_statistics_request {
    uint32_t n_texts; /* 0: train_own_text() */
    struct job_text *texts;
    bool again; /* although there are some */
};
int train_statistics_job_new(struct train_statistics_request *request, struct job *ret_job, char *sentence);

struct train_codebook_request {
    uint32_t n_texts;
    struct job_text *texts;
    uint32_t n_dims, n_centroids;
    uint64_t seed;
    uint32_t max_iterations; /* 0: 200 */
    bool again;
};
/* -EINVAL with a sentence. Both take over what the request points to, also on failure. */
int train_codebook_job_new(struct train_codebook_request *request, struct job *ret_job, char *sentence);
