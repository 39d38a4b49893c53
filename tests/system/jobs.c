#include "tests/system/jobs.h"

#include <stdio.h>
#include <string.h>

#ifdef HCATTN_SANITIZED
enum { CALL_MS = 1800000 };
#else
enum { CALL_MS = 300000 };
#endif

static int generate(struct hcattn *client, struct job *job)
{
    struct hcattn_session session = {.session = job->session};
    struct hcattn_session_config config = {.policy = job->policy, .exact_tokens = job->exact_tokens, .ephemeral = true};
    if (job->session == 0) {
        int r = hcattn_open_session(client, &config, CALL_MS, &session, &job->error);
        if (r < 0)
            return r;
    }
    struct hcattn_generate request = {.session = session.session,
                                      .input = {.ids = job->ids, .n_ids = job->n_ids},
                                      .at = job->session == 0 ? 0 : HCATTN_AT_ANY,
                                      .max_tokens = job->max_tokens,
                                      .logprobs = true,
                                      .ignore_end = true};
    int r = service_generate(client, &request, &job->answer, &job->error);
    if (job->session == 0) {
        struct hcattn_error error;
        int closed = hcattn_close_session(client, session.session, CALL_MS, NULL, r < 0 ? &error : &job->error);
        r = r < 0 ? r : closed;
    }
    return r;
}

static void *run(void *context)
{
    struct job *job = context;
    struct hcattn_config config = {.runtime_dir = job->directory};
    struct hcattn *client;
    job->result = hcattn_open(&config, &client, &job->error);
    if (job->result < 0)
        return NULL;
    job->result = generate(client, job);
    hcattn_close(client);
    return NULL;
}

void jobs_start(const struct service *service, struct job *job)
{
    snprintf(job->directory, sizeof(job->directory), "%s", service->directory);
    assert_int_equal(pthread_create(&job->thread, NULL, run, job), 0);
}

static void check(const struct job *job)
{
    if (job->result < 0 && !job->may_fail)
        fail_msg("policy %s, %zu ids: %s", job->policy == NULL ? "-" : job->policy, job->n_ids, job->error.sentence);
}

void jobs_wait(struct job *job)
{
    pthread_join(job->thread, NULL);
    check(job);
}

void jobs_run(const struct service *service, struct job *jobs, uint32_t n_jobs)
{
    for (uint32_t i = 0; i < n_jobs; i++)
        jobs_start(service, &jobs[i]);
    for (uint32_t i = 0; i < n_jobs; i++)
        pthread_join(jobs[i].thread, NULL);
    for (uint32_t i = 0; i < n_jobs; i++)
        check(&jobs[i]);
}

void jobs_run_alone(const struct service *service, struct job *jobs, uint32_t n_jobs)
{
    for (uint32_t i = 0; i < n_jobs; i++) {
        jobs_start(service, &jobs[i]);
        jobs_wait(&jobs[i]);
    }
}

void jobs_free(struct job *jobs, uint32_t n_jobs)
{
    for (uint32_t i = 0; i < n_jobs; i++)
        service_answer_free(&jobs[i].answer);
}

uint64_t jobs_open_session(struct hcattn *client, const char *policy, uint32_t exact_tokens)
{
    struct hcattn_session_config config = {.policy = policy, .exact_tokens = exact_tokens};
    struct hcattn_session session;
    struct hcattn_error error = {0};
    if (hcattn_open_session(client, &config, CALL_MS, &session, &error) < 0)
        fail_msg("open session: %s", error.sentence);
    return session.session;
}

void jobs_close_session(struct hcattn *client, uint64_t session)
{
    struct hcattn_error error = {0};
    if (hcattn_close_session(client, session, CALL_MS, NULL, &error) < 0)
        fail_msg("close session: %s", error.sentence);
}

void jobs_make_ids(uint32_t seed, uint32_t *ids, size_t n_ids)
{
    uint64_t state = seed;
    for (size_t i = 0; i < n_ids; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        ids[i] = (uint32_t)(state >> 33) % 256;
    }
}
