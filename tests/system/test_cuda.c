/*
 * test_cuda.c - the whole service with workers of the CUDA back end, on the emulated device (tests/backend/cuda-on-cpu): tokens are
 * the reference back end's within a tolerance, under every policy; whatever dies, or is lost, changes nothing.
 */
#include "tests/system/jobs.h"
#include "tests/system/service.h"

#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MODEL "--layers 2 --heads 4 --kv-heads 2 --embd 64 --head-dim 32 --ff 96 --context 1024"

static const char *const policies[] = {
    "full",
    "default",
    "quality",
    "f16,deviation=0.02,notail",
    "small",
    "rot4,l2=0.001",
    "rot3,deviation=0.05",
    "rot2,mass=0.9",
    "rot4,mass=0.95,weights",
    "pair2,deviation=0.05",
    "klt1,deviation=0.05",
    "rot3,deviation=0.05,fastgen=0.5",
};
/* Old blocks in four lanes. */
enum { N_POLICIES = sizeof(policies) / sizeof(policies[0]), N_PROMPT = 330, N_TOKENS = 8 };

/*
 * How far log-probabilities may be from the reference's. Without cuBLAS the device computes in single precision; where attention
 * weights lie close to a threshold another token may be read, which is most of the difference. With cuBLAS products of prefills
 * have inputs of half precision (docs/cuda.md), and a random model's flat attention makes much of other thresholds: the policies
 * that read least say nothing then.
 */
struct tolerance {
    const char *const *environment; /* closed by NULL */
    uint32_t n_policies;
    float difference;
};
static const struct tolerance single = {(const char *const[]){"HCATTN_TEST_CUDA_NO_BLAS=1", NULL}, N_POLICIES, 0.005F};
static const struct tolerance half = {(const char *const[]){NULL}, 4, 0.02F};
/* Rows in eight bits round such differences up to whole steps, of some of their numbers. */
static const struct tolerance half_of_eight_bits = {(const char *const[]){NULL}, 4, 0.06F};

static void start(struct service *service, const char *backend, const char *const *more, const char *const *environment)
{
    const char *arguments[24] = {"--model", service_tiny_model(MODEL), "--memory", "64MiB", "--backend",
                                 backend,   "--exact-tokens",          "0"};
    uint32_t n = 8;
    for (; *more != NULL; more++)
        arguments[n++] = *more;
    assert_true(n < sizeof(arguments) / sizeof(arguments[0]));
    service_start(service, arguments, environment);
}

static const char *const *nothing(void)
{
    static const char *const none[] = {NULL};
    return none;
}

static void make_jobs(const uint32_t *ids, struct job jobs[N_POLICIES])
{
    for (uint32_t i = 0; i < N_POLICIES; i++)
        jobs[i] = (struct job){.policy = policies[i], .ids = ids, .n_ids = N_PROMPT, .max_tokens = N_TOKENS};
}

/* Returns how many tokens could be compared: up to the first that is another one, which must have been as likely. */
static uint32_t assert_near(const char *what, float tolerance, const struct answer *expected, const struct answer *got)
{
    assert_int_equal(got->n, expected->n);
    for (uint32_t i = 0; i < got->n; i++) {
        float difference = fabsf(got->logprobs[i] - expected->logprobs[i]);
        if (!(difference < tolerance))
            fail_msg("%s: token %u is %u (%f), expected %u (%f)", what, i, got->ids[i], (double)got->logprobs[i],
                     expected->ids[i], (double)expected->logprobs[i]);
        if (got->ids[i] != expected->ids[i])
            return i;
    }
    return got->n;
}

static void make_truth(const uint32_t *ids, const char *rows, struct job jobs[N_POLICIES])
{
    struct service service;
    start(&service, "reference", (const char *const[]){"--rows", rows, NULL}, NULL);
    make_jobs(ids, jobs);
    jobs_run_alone(&service, jobs, N_POLICIES);
    service_stop(&service);
}

/* One after the other, or side by side: batches of rows under several policies. */
static void check(const uint32_t *ids, const struct job *truth, const char *const *arguments,
                  const struct tolerance *tolerance, bool side_by_side)
{
    struct service service;
    struct job jobs[N_POLICIES];
    uint32_t n_near = 0, n = tolerance->n_policies;
    start(&service, "cuda", arguments, tolerance->environment);
    make_jobs(ids, jobs);
    if (side_by_side)
        jobs_run(&service, jobs, n);
    else
        jobs_run_alone(&service, jobs, n);
    for (uint32_t i = 0; i < n; i++)
        n_near += assert_near(policies[i], tolerance->difference, &truth[i].answer, &jobs[i].answer);
    assert_true(n_near >= n * N_TOKENS * 9 / 10);
    assert_true(service_log_contains(&service, "emulated on the CPU"));
    jobs_free(jobs, n);
    service_stop(&service);
}

static void policies_f16(void **state)
{
    uint32_t ids[N_PROMPT];
    struct job truth[N_POLICIES];
    (void)state;
    jobs_make_ids(7, ids, N_PROMPT);
    make_truth(ids, "f16", truth);
    check(ids, truth, (const char *const[]){"--stores", "2", "--micro-batches", "2", NULL}, &single, true);
    check(ids, truth, (const char *const[]){"--stores", "1", "--micro-batches", "1", NULL}, &half, false);
    check(ids, truth, (const char *const[]){"--stores", "2", "--transport", "direct", NULL}, &half, true);
    jobs_free(truth, N_POLICIES);
}

static void policies_q8_0(void **state)
{
    uint32_t ids[N_PROMPT];
    struct job truth[N_POLICIES];
    (void)state;
    jobs_make_ids(8, ids, N_PROMPT);
    make_truth(ids, "q8_0", truth);
    check(ids, truth, (const char *const[]){"--rows", "q8_0", "--stores", "1", "--micro-batches", "1", NULL}, &single,
          true);
    check(ids, truth, (const char *const[]){"--rows", "q8_0", "--stores", "2", "--micro-batches", "2", NULL},
          &half_of_eight_bits, true);
    jobs_free(truth, N_POLICIES);
}

#define LAUNCHES_UNTIL_LOST "300"

/* Kills once the third token is there. */
struct killer {
    struct service *service;
    const char *program;
    bool is_done;
};

static void kill_at_third(void *context, uint32_t n)
{
    struct killer *killer = context;
    if (n != 3 || killer->is_done)
        return;
    killer->is_done = true;
    kill(service_process(killer->service, killer->program, 0), SIGKILL);
}

/* The same bits as without: a rebuilt session is the lost one. */
static void survives(const char *const *arguments, const char *const *environment, const char *program)
{
    enum { N_KILL_TOKENS = 12 };
    struct service service;
    uint32_t ids[N_PROMPT];
    jobs_make_ids(9, ids, N_PROMPT);
    struct job truth = {.ids = ids, .n_ids = N_PROMPT, .max_tokens = N_KILL_TOKENS};
    start(&service, "cuda", arguments, NULL);
    jobs_run(&service, &truth, 1);
    service_stop(&service);

    struct job job = {.ids = ids, .n_ids = N_PROMPT, .max_tokens = N_KILL_TOKENS};
    start(&service, "cuda", arguments, environment);
    struct killer killer = {.service = &service, .program = program, .is_done = program == NULL};
    job.answer.on_token = kill_at_third;
    job.answer.context = &killer;
    jobs_run(&service, &job, 1);
    assert_true(killer.is_done);
    service_answer_assert_equal(&truth.answer, &job.answer);
    if (program == NULL) { /* and it was lost, indeed */
        assert_true(service_log_contains(&service, "the device is lost"));
        assert_true(service_log_contains(&service, "cudaErrorIllegalAddress"));
    }
    service_answer_free(&truth.answer);
    service_answer_free(&job.answer);
    service_stop(&service);
}

static void worker_killed(void **state)
{
    (void)state;
    survives(nothing(), NULL, "hc-gpu-worker");
}

static void store_killed(void **state)
{
    (void)state;
    survives((const char *const[]){"--stores", "2", NULL}, NULL, "hc-value-store");
}

/* Each worker's device is lost after so many launches: the first one's in the middle of the generation. */
static void device_lost(void **state)
{
    (void)state;
    survives(nothing(), (const char *const[]){"HCATTN_TEST_CUDA_FAIL_AFTER=" LAUNCHES_UNTIL_LOST, NULL}, NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(policies_f16), cmocka_unit_test(policies_q8_0), cmocka_unit_test(worker_killed),
        cmocka_unit_test(store_killed), cmocka_unit_test(device_lost),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
