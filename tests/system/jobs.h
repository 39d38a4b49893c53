/*
 * jobs.h - generations that run side by side: each in a thread of its own, with a client and a session of its own.
 *
 * Owner      the test: jobs_start() to jobs_wait(); ids outlive that. Failures assert (cmocka), in jobs_wait().
 */
#pragma once

#include <pthread.h>

#include "tests/system/service.h"

struct job {
    const char *policy;    /* NULL: the service's default */
    uint32_t exact_tokens; /* as in struct hcattn_session_config */
    const uint32_t *ids;
    size_t n_ids;
    uint32_t max_tokens;
    uint64_t session; /* 0: one of its own, which is closed afterwards; else it stays, and holds what `at` says */
    bool may_fail;    /* then `result` and `error` say how it ended */

    struct answer answer; /* answer.on_token may be set before; service_answer_free() afterwards */
    int result;
    struct hcattn_error error;

    /* private */
    char directory[64];
    pthread_t thread;
};

void jobs_start(const struct service *service, struct job *job);
void jobs_wait(struct job *job);
/* All of them side by side. */
void jobs_run(const struct service *service, struct job *jobs, uint32_t n_jobs);
/* One after the other. */
void jobs_run_alone(const struct service *service, struct job *jobs, uint32_t n_jobs);
void jobs_free(struct job *jobs, uint32_t n_jobs); /* the answers */

/* A session of the test's own. */
uint64_t jobs_open_session(struct hcattn *client, const char *policy, uint32_t exact_tokens);
void jobs_close_session(struct hcattn *client, uint64_t session);

/* n ids that look like nothing in particular, the same for a seed in every run. */
void jobs_make_ids(uint32_t seed, uint32_t *ids, size_t n_ids);
