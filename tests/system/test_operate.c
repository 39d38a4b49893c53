/*
 * test_operate.c - drain and resume, the line for room in the stores with numbers in every refusal, two workers of which one
 * is lost.
 */
#include "tests/system/jobs.h"
#include "tests/system/rows.h"

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>

#include "common/clock.h"

#define MODEL "--layers 2 --heads 4 --kv-heads 2 --embd 64 --head-dim 32 --ff 64 --context 1024"
enum { N_PROMPT = 150, CALL_MS = 600000 };

static uint32_t ids[N_PROMPT];

static void start(struct service *service, const char *const *more)
{
    const char *arguments[24] = {"--model", service_tiny_model(MODEL), "--exact-tokens", "0"};
    uint32_t n = 4;
    for (; *more != NULL; more++)
        arguments[n++] = *more;
    assert_true(n < sizeof(arguments) / sizeof(arguments[0]));
    jobs_make_ids(21, ids, N_PROMPT);
    service_start(service, arguments, NULL);
}

static struct hcattn_stats stats_of(struct service *service)
{
    struct hcattn_stats stats;
    assert_int_equal(hcattn_stats(service->client, CALL_MS, &stats, NULL), 0);
    return stats;
}

/* ---- drain ---- */

struct drain {
    const struct service *service;
    pthread_t thread;
    struct hcattn_drained drained;
    int result;
    _Atomic bool done;
    _Atomic uint32_t n_told, least_running;
};

static int told(void *context, uint32_t n_running, uint32_t n_queued)
{
    struct drain *drain = context;
    (void)n_queued;
    atomic_fetch_add(&drain->n_told, 1);
    if (n_running < atomic_load(&drain->least_running))
        atomic_store(&drain->least_running, n_running);
    return 0;
}

static void *run_drain(void *context)
{
    struct drain *drain = context;
    struct hcattn_config config = {.runtime_dir = drain->service->directory};
    struct hcattn *client;
    drain->result = hcattn_open(&config, &client, NULL);
    if (drain->result == 0) {
        drain->result = hcattn_drain(client, false, told, drain, CALL_MS, &drain->drained, NULL);
        hcattn_close(client);
    }
    atomic_store(&drain->done, true);
    return NULL;
}

static bool is_draining(struct service *service)
{
    struct hcattn_stats stats = stats_of(service);
    bool draining = stats.draining;
    hcattn_stats_free(&stats);
    return draining;
}

static void assert_unavailable(struct service *service, uint64_t session)
{
    struct hcattn_error error = {0};
    struct hcattn_session opened;
    struct hcattn_forked forked;
    struct hcattn_input input = {.ids = ids, .n_ids = 1};
    struct hcattn_fork fork = {.session = session};
    assert_int_equal(hcattn_open_session(service->client, NULL, CALL_MS, &opened, &error), -ENOTCONN);
    assert_int_equal(error.code, HCATTN_UNAVAILABLE);
    assert_non_null(strstr(error.sentence, "drain"));
    assert_int_equal(hcattn_append(service->client, session, &input, HCATTN_AT_ANY, NULL, CALL_MS, NULL, &error),
                     -ENOTCONN);
    assert_int_equal(error.code, HCATTN_UNAVAILABLE);
    assert_int_equal(hcattn_fork(service->client, &fork, CALL_MS, &forked, &error), -ENOTCONN);
    assert_int_equal(error.code, HCATTN_UNAVAILABLE);
}

static void note_token(void *context, uint32_t n)
{
    atomic_store((_Atomic uint32_t *)context, n);
}

static void wait_for(_Atomic uint32_t *n_there, uint32_t n)
{
    uint64_t deadline = clock_deadline_us((uint64_t)CALL_MS * 1000);
    while (atomic_load(n_there) < n && clock_now_us() < deadline)
        clock_sleep_us(500);
    assert_true(atomic_load(n_there) >= n);
}

static void drain_and_resume(void **state)
{
    enum { N = 2, N_LONG = 800 };
    (void)state;
    struct service service;
    struct job alone = {.ids = ids, .n_ids = N_PROMPT, .max_tokens = N_LONG}, running[N];
    _Atomic uint32_t n_there[N] = {0};
    struct drain drain = {.service = &service, .least_running = UINT32_MAX};
    start(&service, (const char *const[]){"--memory", "32MiB", "--stores", "2", NULL});
    jobs_run_alone(&service, &alone, 1);
    uint64_t idle = jobs_open_session(service.client, NULL, 0);
    struct job before = {.session = idle, .ids = ids, .n_ids = N_PROMPT, .max_tokens = 100};
    jobs_run_alone(&service, &before, 1);
    for (uint32_t i = 0; i < N; i++) {
        running[i] = (struct job){.ids = ids, .n_ids = N_PROMPT, .max_tokens = N_LONG};
        running[i].answer.on_token = note_token;
        running[i].answer.context = &n_there[i];
        jobs_start(&service, &running[i]);
    }
    for (uint32_t i = 0; i < N; i++)
        wait_for(&n_there[i], 1);
    assert_int_equal(pthread_create(&drain.thread, NULL, run_drain, &drain), 0);
    while (!is_draining(&service))
        clock_sleep_us(1000);
    assert_unavailable(&service, idle);
    bool ended_first = atomic_load(&drain.done);
    for (uint32_t i = 0; i < N; i++)
        jobs_wait(&running[i]);
    pthread_join(drain.thread, NULL);
    assert_false(ended_first);
    assert_int_equal(drain.result, 0);
    assert_int_equal(drain.drained.n_finished, N);
    assert_true(drain.drained.n_sessions >= 1); /* of those that end, some may still be being closed */
    for (uint32_t i = 0; i < N; i++)
        service_answer_assert_equal(&alone.answer, &running[i].answer);
    assert_true(is_draining(&service));
    assert_unavailable(&service, idle);
    assert_int_equal(hcattn_drain(service.client, true, NULL, NULL, CALL_MS, NULL, NULL), 0);
    assert_false(is_draining(&service));
    struct job after = {.session = idle, .max_tokens = 100};
    jobs_run_alone(&service, &after, 1);
    assert_memory_equal(after.answer.logprobs, alone.answer.logprobs + 100, 100 * sizeof(float));
    /* with nothing to wait for it is answered at once */
    assert_int_equal(hcattn_drain(service.client, false, NULL, NULL, CALL_MS, &drain.drained, NULL), 0);
    assert_int_equal(drain.drained.n_finished, 0);
    assert_int_equal(drain.drained.n_sessions, 1);
    assert_int_equal(hcattn_drain(service.client, true, NULL, NULL, CALL_MS, NULL, NULL), 0);
    jobs_close_session(service.client, idle);
    jobs_free(running, N);
    jobs_free(&alone, 1);
    jobs_free(&before, 1);
    jobs_free(&after, 1);
    service_stop(&service);
}

/* ---- the line for room ---- */

/* Room for about two of these at a time. */
static struct job job_of_the_line(void)
{
    return (struct job){.ids = ids, .n_ids = N_PROMPT, .max_tokens = 100, .may_fail = true};
}

static void all_have_their_turn(void **state)
{
    enum { N = 12 };
    (void)state;
    struct service service;
    struct job jobs[N], alone = job_of_the_line();
    start(&service, (const char *const[]){"--memory", "600KiB", "--stores", "1", NULL});
    jobs_run_alone(&service, &alone, 1);
    assert_int_equal(alone.result, 0);
    for (uint32_t i = 0; i < N; i++)
        jobs[i] = job_of_the_line();
    jobs_run(&service, jobs, N);
    uint64_t queued_us = 0;
    for (uint32_t i = 0; i < N; i++) {
        if (jobs[i].result < 0)
            fail_msg("%s", jobs[i].error.sentence);
        service_answer_assert_equal(&alone.answer, &jobs[i].answer);
        queued_us += jobs[i].answer.finished.timings.queued_us;
    }
    assert_true(queued_us > 0);
    assert_int_equal(rows_n_used_blocks(&service, 1), 0);
    jobs_free(jobs, N);
    jobs_free(&alone, 1);
    service_stop(&service);
}

static void refusals_carry_numbers(void **state)
{
    enum { N = 8, MAX_QUEUED = 2 };
    (void)state;
    struct service service;
    struct job jobs[N], large = job_of_the_line();
    uint32_t n_done = 0, n_busy = 0, n_late = 0;
    start(&service, (const char *const[]){"--memory", "400KiB", "--stores", "1", "--max-queue", "2", "--queue-timeout",
                                          "1500ms", NULL});
    struct hcattn_stats stats = stats_of(&service);
    uint64_t total = 0, block_bytes = stats.store_bytes_per_token * 64;
    for (size_t i = 0; i < stats.n_processes; i++)
        total += stats.processes[i].bytes_total;
    assert_int_equal(stats.max_queued, MAX_QUEUED);
    hcattn_stats_free(&stats);
    assert_true(total >= 4 * block_bytes && total < 12 * block_bytes);
    /* more than there will ever be: at once */
    large.max_tokens = 800;
    uint64_t begun = clock_now_us();
    jobs_run_alone(&service, &large, 1);
    assert_int_equal(large.result, -ENOMEM);
    assert_int_equal(large.error.code, HCATTN_NO_MEMORY);
    assert_true(large.error.bytes_asked >= 14 * block_bytes);
    assert_true(large.error.bytes_free > 0 && large.error.bytes_free <= total);
    assert_int_equal(large.error.n_prompt_tokens, N_PROMPT);
    assert_int_equal(large.error.max_tokens, 800);
    assert_true(clock_now_us() - begun < 1000000);
    /* one that sits on the room; the line is short and patience too */
    uint64_t session = jobs_open_session(service.client, NULL, 0);
    struct job seated = {.session = session, .ids = ids, .n_ids = N_PROMPT, .max_tokens = 50};
    jobs_run_alone(&service, &seated, 1);
    for (uint32_t i = 0; i < N; i++) {
        jobs[i] = job_of_the_line();
        jobs[i].max_tokens = (uint32_t)(total / block_bytes) * 64 - 64 - N_PROMPT; /* all but one block */
    }
    jobs_run(&service, jobs, N);
    for (uint32_t i = 0; i < N; i++) {
        const struct hcattn_error *error = &jobs[i].error;
        n_done += jobs[i].result == 0;
        if (jobs[i].result == 0)
            continue;
        assert_true(error->bytes_asked > error->bytes_free);
        assert_int_equal(error->max_queued, MAX_QUEUED);
        if (error->code == HCATTN_BUSY) {
            n_busy++;
            assert_int_equal(jobs[i].result, -EBUSY);
            assert_int_equal(error->n_queued, MAX_QUEUED);
        } else {
            n_late++;
            assert_int_equal(jobs[i].result, -ENOMEM);
            assert_int_equal(error->code, HCATTN_NO_MEMORY);
        }
    }
    print_message("%u done, %u refused at once, %u after waiting\n", n_done, n_busy, n_late);
    assert_int_equal(n_done, 0);
    assert_int_equal(n_busy, N - MAX_QUEUED);
    assert_int_equal(n_late, MAX_QUEUED);
    /* what was refused left nothing behind */
    jobs_close_session(service.client, session);
    struct job last = jobs[0];
    last.answer = (struct answer){0};
    jobs_run_alone(&service, &last, 1);
    assert_int_equal(last.result, 0);
    assert_int_equal(rows_n_used_blocks(&service, 1), 0);
    jobs_free(jobs, N);
    jobs_free(&large, 1);
    jobs_free(&seated, 1);
    jobs_free(&last, 1);
    service_stop(&service);
}

/* ---- two workers ---- */

static uint32_t sessions_at(struct service *service, uint32_t worker)
{
    struct hcattn_stats stats = stats_of(service);
    uint32_t n = 0;
    for (size_t i = 0; i < stats.n_processes; i++)
        if (strcmp(stats.processes[i].program, "hc-gpu-worker") == 0 && stats.processes[i].index == worker)
            n = stats.processes[i].n_sessions;
    hcattn_stats_free(&stats);
    return n;
}

static void wait_for_workers(struct service *service)
{
    uint64_t deadline = clock_deadline_us(UINT64_C(120000000));
    uint32_t n = 0;
    while (n < 2 && clock_now_us() < deadline) {
        struct hcattn_stats stats = stats_of(service);
        n = 0;
        for (size_t i = 0; i < stats.n_processes; i++)
            n += strcmp(stats.processes[i].program, "hc-gpu-worker") == 0 &&
                 strcmp(stats.processes[i].state, "ready") == 0;
        hcattn_stats_free(&stats);
        clock_sleep_us(20000);
    }
    assert_int_equal(n, 2);
}

static void one_of_two_workers_is_lost(void **state)
{
    enum { N = 6, N_LONG = 400 };
    static const char *const policies[] = {"default", "full", "rot4,mass=0.9,weights"};
    (void)state;
    struct service service;
    struct job alone[3], jobs[N];
    _Atomic uint32_t n_there[N] = {0};
    uint64_t sessions[N];
    start(&service, (const char *const[]){"--memory", "32MiB", "--stores", "2", "--workers", "2", NULL});
    wait_for_workers(&service);
    for (uint32_t i = 0; i < 3; i++)
        alone[i] = (struct job){.policy = policies[i], .ids = ids, .n_ids = N_PROMPT, .max_tokens = N_LONG};
    jobs_run_alone(&service, alone, 3);
    for (uint32_t i = 0; i < N; i++) {
        sessions[i] = jobs_open_session(service.client, policies[i % 3], 0);
        jobs[i] = (struct job){.session = sessions[i], .ids = ids, .n_ids = N_PROMPT, .max_tokens = N_LONG - 100};
        jobs[i].answer.on_token = note_token;
        jobs[i].answer.context = &n_there[i];
        jobs_start(&service, &jobs[i]);
        wait_for(&n_there[i], 1);
    }
    uint32_t at[2] = {sessions_at(&service, 0), sessions_at(&service, 1)};
    print_message("sessions at the workers: %u and %u\n", at[0], at[1]);
    assert_int_equal(at[0] + at[1], N);
    assert_true(at[0] >= N / 3 && at[1] >= N / 3);
    pid_t pid = service_process(&service, "hc-gpu-worker", 0);
    assert_int_equal(kill(pid, SIGKILL), 0);
    for (uint32_t i = 0; i < N; i++)
        jobs_wait(&jobs[i]);
    for (uint32_t i = 0; i < N; i++)
        assert_memory_equal(jobs[i].answer.logprobs, alone[i % 3].answer.logprobs, (N_LONG - 100) * sizeof(float));
    /* they go on wherever they are, also after the other one has gone */
    wait_for_workers(&service);
    pid_t other = service_process(&service, "hc-gpu-worker", 1);
    assert_int_equal(kill(other, SIGKILL), 0);
    for (uint32_t i = 0; i < N; i++) {
        struct job more = {.session = sessions[i], .max_tokens = 100};
        jobs_run_alone(&service, &more, 1);
        assert_memory_equal(more.answer.logprobs, alone[i % 3].answer.logprobs + N_LONG - 100, 100 * sizeof(float));
        jobs_free(&more, 1);
        jobs_close_session(service.client, sessions[i]);
    }
    wait_for_workers(&service);
    jobs_free(alone, 3);
    jobs_free(jobs, N);
    service_stop(&service);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(drain_and_resume),
        cmocka_unit_test(all_have_their_turn),
        cmocka_unit_test(refusals_carry_numbers),
        cmocka_unit_test(one_of_two_workers_is_lost),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
