/*
 * test_policies.c - what must not make a difference, under every policy: transport, stores, threads, chunks, micro-batches,
 * neighbours. Identical tokens and bits of log-probabilities; aggregates from the first old token on.
 */
#include "tests/system/jobs.h"
#include "tests/system/service.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MODEL "--layers 3 --heads 6 --kv-heads 2 --embd 96 --head-dim 32 --ff 128 --context 1024"

static const char *const policies[] = {
    "full",
    "default",
    "quality",
    "rot3,deviation=0.05",
    "rot2,mass=0.9",
    "rot4,mass=0.95,weights",
    "rot4,mass=0.9,weights,notail",
    "f16,deviation=0.02,notail",
    "pair2,deviation=0.05",
    "rot3,deviation=0.05,fastgen=0.5",
    "rot4,mass=0.9,weights,notail,fastgen=0.6",
};
/* N_PROMPT + N_TOKENS: old blocks in all twelve lanes, two in some. */
enum { N_POLICIES = sizeof(policies) / sizeof(policies[0]), N_PROMPT = 890, N_TOKENS = 24, N_SESSIONS = 16 };

struct fixture {
    uint32_t ids[N_PROMPT];
    struct job truth[N_POLICIES];
};

static void make_jobs(const struct fixture *fixture, struct job jobs[N_POLICIES])
{
    for (uint32_t i = 0; i < N_POLICIES; i++)
        jobs[i] = (struct job){.policy = policies[i], .ids = fixture->ids, .n_ids = N_PROMPT, .max_tokens = N_TOKENS};
}

/* `more` is added to what every service here has; closed by NULL. */
static void start(struct service *service, const char *const *more, const char *const *environment)
{
    const char *arguments[24] = {"--model", service_tiny_model(MODEL), "--memory", "64MiB", "--exact-tokens", "0"};
    uint32_t n = 6;
    for (; *more != NULL; more++)
        arguments[n++] = *more;
    assert_true(n < sizeof(arguments) / sizeof(arguments[0]));
    service_start(service, arguments, environment);
}

/* The truth of a row codec: the plainest service, one session at a time. */
static void make_truth(struct fixture *fixture, const char *rows)
{
    struct service service;
    jobs_make_ids(7, fixture->ids, N_PROMPT);
    start(
        &service,
        (const char *const[]){"--rows", rows, "--transport", "routed", "--threads", "1", "--micro-batches", "1", NULL},
        NULL);
    make_jobs(fixture, fixture->truth);
    jobs_run_alone(&service, fixture->truth, N_POLICIES);
    service_stop(&service);
}

/* Policies that lose something differ from full attention, and from each other: the tests would show nothing otherwise. */
static void assert_policies_differ(const struct fixture *fixture)
{
    for (uint32_t i = 0; i < N_POLICIES; i++)
        for (uint32_t k = 0; k < i; k++)
            if (memcmp(fixture->truth[i].answer.logprobs, fixture->truth[k].answer.logprobs,
                       N_TOKENS * sizeof(float)) == 0)
                fail_msg("policies %s and %s do the same", policies[i], policies[k]);
}

/* All policies side by side in a service that is different in the ways given. */
static void check(const struct fixture *fixture, const char *const *arguments, const char *const *environment)
{
    struct service service;
    struct job jobs[N_POLICIES];
    start(&service, arguments, environment);
    make_jobs(fixture, jobs);
    jobs_run(&service, jobs, N_POLICIES);
    for (uint32_t i = 0; i < N_POLICIES; i++) {
        if (memcmp(jobs[i].answer.logprobs, fixture->truth[i].answer.logprobs, N_TOKENS * sizeof(float)) != 0)
            print_error("policy %s differs\n", policies[i]);
        service_answer_assert_equal(&fixture->truth[i].answer, &jobs[i].answer);
    }
    jobs_free(jobs, N_POLICIES);
    service_stop(&service);
}

static void f16_rows(void **state)
{
    struct fixture fixture = {0};
    (void)state;
    make_truth(&fixture, "f16");
    assert_policies_differ(&fixture);
    check(&fixture, (const char *const[]){"--transport", "ring", "--stores", "1", "--micro-batches", "1", NULL}, NULL);
    check(&fixture,
          (const char *const[]){"--transport", "ring", "--stores", "2", "--threads", "2", "--micro-batches", "2", NULL},
          (const char *const[]){"HCATTN_PREFILL_CHUNK=7", NULL});
    check(&fixture, (const char *const[]){"--transport", "ring", "--stores", "3", "--micro-batches", "2", NULL},
          (const char *const[]){"HCATTN_PREFILL_CHUNK=1000", NULL});
    check(
        &fixture,
        (const char *const[]){"--transport", "routed", "--stores", "3", "--threads", "1", "--micro-batches", "2", NULL},
        (const char *const[]){"HCATTN_PREFILL_CHUNK=64", NULL});
    check(
        &fixture,
        (const char *const[]){"--transport", "direct", "--stores", "2", "--threads", "2", "--micro-batches", "1", NULL},
        NULL);
    check(&fixture,
          (const char *const[]){"--transport", "direct", "--stores", "1", "--threads", "1", "--micro-batches", "2",
                                "--max-step-ms", "0", NULL},
          (const char *const[]){"HCATTN_PREFILL_CHUNK=100", "HCATTN_MAX_BATCH=3", NULL});
    jobs_free(fixture.truth, N_POLICIES);
}

static void q8_0_rows(void **state)
{
    struct fixture fixture = {0};
    (void)state;
    make_truth(&fixture, "q8_0");
    assert_policies_differ(&fixture);
    check(&fixture,
          (const char *const[]){"--rows", "q8_0", "--transport", "ring", "--stores", "3", "--micro-batches", "2", NULL},
          (const char *const[]){"HCATTN_PREFILL_CHUNK=64", NULL});
    check(&fixture,
          (const char *const[]){"--rows", "q8_0", "--transport", "routed", "--stores", "2", "--threads", "2", NULL},
          NULL);
    check(&fixture,
          (const char *const[]){"--rows", "q8_0", "--transport", "direct", "--stores", "2", "--threads", "1", NULL},
          NULL);
    jobs_free(fixture.truth, N_POLICIES);
}

/* Policies, lengths and exact tokens that differ, all in the same steps; each alone gives the same. */
static void sixteen_sessions(void **state)
{
    struct service service;
    struct job together[N_SESSIONS], alone[N_SESSIONS];
    static const uint32_t lengths[N_SESSIONS] = {1,   63,  64,  65,  128, 129, 200, 250,
                                                 300, 333, 448, 500, 600, 640, 800, 890};
    static const uint32_t exact[] = {0, HCATTN_EXACT_NONE, 140, 310, 600};
    uint32_t ids[N_SESSIONS][N_PROMPT];
    (void)state;
    for (uint32_t i = 0; i < N_SESSIONS; i++) {
        jobs_make_ids(i + 1, ids[i], N_PROMPT);
        alone[i] = (struct job){.policy = policies[i % N_POLICIES],
                                .exact_tokens = exact[i % 5],
                                .ids = ids[i],
                                .n_ids = lengths[i],
                                .max_tokens = 10 + i * 3};
        together[i] = alone[i];
    }
    start(&service, (const char *const[]){"--stores", "2", "--micro-batches", "2", NULL},
          (const char *const[]){"HCATTN_PREFILL_CHUNK=50", NULL});
    jobs_run(&service, together, N_SESSIONS);
    jobs_run_alone(&service, alone, N_SESSIONS);
    for (uint32_t i = 0; i < N_SESSIONS; i++)
        service_answer_assert_equal(&alone[i].answer, &together[i].answer);
    jobs_free(together, N_SESSIONS);
    jobs_free(alone, N_SESSIONS);
    service_stop(&service);
}

/* ---- exact tokens ---- */

enum { N_EXACT = 300, N_BEFORE = 270, N_ACROSS = 80 };

/* A session grows over its exact tokens in one generation, in several, and in a service that has to bring it back. */
static void across_the_exact_border(void **state)
{
    uint32_t ids[N_BEFORE];
    (void)state;
    jobs_make_ids(3, ids, N_BEFORE);
    for (uint32_t p = 0; p < N_POLICIES; p++) {
        struct service service;
        struct job whole = {
            .policy = policies[p], .exact_tokens = N_EXACT, .ids = ids, .n_ids = N_BEFORE, .max_tokens = N_ACROSS};
        struct job exact = whole, none = whole;
        exact.exact_tokens = 512;
        none.exact_tokens = HCATTN_EXACT_NONE;
        start(&service, (const char *const[]){"--stores", "2", "--rows", p % 2 ? "q8_0" : "f16", NULL}, NULL);
        jobs_run_alone(&service, &whole, 1);
        jobs_run_alone(&service, &exact, 1);
        jobs_run_alone(&service, &none, 1);
        /* before the border as if all were exact, then no more */
        const float *logprobs = whole.answer.logprobs;
        assert_memory_equal(logprobs, exact.answer.logprobs, (N_EXACT - N_BEFORE) * sizeof(float));
        if (p > 0) { /* full attention is the same but for the order of its sums */
            assert_memory_not_equal(logprobs, exact.answer.logprobs, N_ACROSS * sizeof(float));
            assert_memory_not_equal(logprobs, none.answer.logprobs, (N_EXACT - N_BEFORE) * sizeof(float));
        }
        uint32_t at = 0;
        uint64_t session = jobs_open_session(service.client, policies[p], N_EXACT);
        for (uint32_t part = 1; at < N_ACROSS; part++) {
            struct job job = {.session = session,
                              .ids = ids,
                              .n_ids = at == 0 ? N_BEFORE : 0,
                              .max_tokens = N_ACROSS - at < 9 * part ? N_ACROSS - at : 9 * part};
            jobs_run_alone(&service, &job, 1);
            assert_memory_equal(job.answer.ids, whole.answer.ids + at, job.max_tokens * sizeof(uint32_t));
            assert_memory_equal(job.answer.logprobs, logprobs + at, job.max_tokens * sizeof(float));
            at += job.max_tokens;
            jobs_free(&job, 1);
        }
        jobs_close_session(service.client, session);
        service_stop(&service);
        jobs_free(&whole, 1);
        jobs_free(&exact, 1);
        jobs_free(&none, 1);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(f16_rows),
        cmocka_unit_test(q8_0_rows),
        cmocka_unit_test(sixteen_sessions),
        cmocka_unit_test(across_the_exact_border),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
