/*
 * test_ring.c - rings granted, revoked and granted again while generations run, and lost with the process at one end: not one
 * token or log-probability changes.
 */
#include "tests/system/jobs.h"
#include "tests/system/rows.h"

#include <signal.h>
#include <stdatomic.h>
#include <string.h>

#include "common/clock.h"

#ifdef HCATTN_SANITIZED
enum { N_TOKENS = 80 };
#else
enum { N_TOKENS = 300 };
#endif
enum { N_PROMPT = 330, N_SESSIONS = 4, CALL_MS = 600000, PAUSE_US = 3000 };

static const char *const policies[N_SESSIONS] = {"default", "full", "rot4,mass=0.9,weights", "quality"};
static uint32_t ids[N_SESSIONS][N_PROMPT];

struct fixture {
    struct service service;
    struct job alone[N_SESSIONS];
};

static void make_jobs(struct job jobs[N_SESSIONS])
{
    for (uint32_t i = 0; i < N_SESSIONS; i++)
        jobs[i] =
            (struct job){.policy = policies[i], .ids = ids[i], .n_ids = N_PROMPT - 60 * i, .max_tokens = N_TOKENS};
}

/* What is right: routed, one session at a time. */
static int set_up(void **state)
{
    static struct fixture fixture;
    const char *model = service_tiny_model("--layers 3 --heads 4 --kv-heads 2 --embd 64 --head-dim 32 --ff 64 "
                                           "--context 1024");
    service_start(&fixture.service,
                  (const char *const[]){"--model", model, "--stores", "2", "--memory", "64MiB", "--exact-tokens", "0",
                                        "--transport", "routed", "--micro-batches", "2", NULL},
                  (const char *const[]){"HCATTN_PREFILL_CHUNK=40", NULL});
    for (uint32_t i = 0; i < N_SESSIONS; i++)
        jobs_make_ids(i + 1, ids[i], N_PROMPT);
    make_jobs(fixture.alone);
    jobs_run_alone(&fixture.service, fixture.alone, N_SESSIONS);
    *state = &fixture;
    return 0;
}

static int tear_down(void **state)
{
    struct fixture *fixture = *state;
    jobs_free(fixture->alone, N_SESSIONS);
    service_stop(&fixture->service);
    return 0;
}

static void set_transport(struct service *service, const char *transport)
{
    struct hcattn_error error = {0};
    if (hcattn_set_transport(service->client, transport, CALL_MS, &error) < 0)
        fail_msg("set transport: %s", error.sentence);
}

static void assert_transport(struct service *service, const char *transport)
{
    struct hcattn_stats stats;
    assert_int_equal(hcattn_stats(service->client, CALL_MS, &stats, NULL), 0);
    assert_string_equal(stats.transport, transport);
    hcattn_stats_free(&stats);
}

static _Atomic uint32_t n_running, n_tokens;

static void count(void *context, uint32_t n)
{
    (void)context;
    atomic_fetch_add(&n_tokens, 1);
    if (n == N_TOKENS)
        atomic_fetch_sub(&n_running, 1);
}

static void start(struct fixture *fixture, struct job jobs[N_SESSIONS])
{
    make_jobs(jobs);
    atomic_store(&n_running, N_SESSIONS);
    atomic_store(&n_tokens, 0);
    for (uint32_t i = 0; i < N_SESSIONS; i++) {
        jobs[i].answer.on_token = count;
        jobs_start(&fixture->service, &jobs[i]);
    }
}

static void finish(struct fixture *fixture, struct job jobs[N_SESSIONS])
{
    for (uint32_t i = 0; i < N_SESSIONS; i++)
        jobs_wait(&jobs[i]);
    for (uint32_t i = 0; i < N_SESSIONS; i++)
        service_answer_assert_equal(&fixture->alone[i].answer, &jobs[i].answer);
    jobs_free(jobs, N_SESSIONS);
}

/* Back and forth as fast as it goes, in prefills and in decode steps. */
static void back_and_forth(void **state)
{
    struct fixture *fixture = *state;
    struct job jobs[N_SESSIONS];
    uint32_t n_changes = 0, n_after_first = 0;
    start(fixture, jobs);
    while (atomic_load(&n_running) > 0) {
        uint32_t before = atomic_load(&n_tokens);
        set_transport(&fixture->service, n_changes % 2 == 0 ? "ring" : "routed");
        n_changes++;
        n_after_first += before > 0;
        clock_sleep_us(PAUSE_US);
    }
    finish(fixture, jobs);
    print_message("%u changes of the transport, %u of them between tokens\n", n_changes, n_after_first);
    assert_true(n_after_first >= 4);
    set_transport(&fixture->service, "ring");
    assert_transport(&fixture->service, "ring");
}

static void stays_with_a_ring(void **state)
{
    struct fixture *fixture = *state;
    struct job jobs[N_SESSIONS];
    set_transport(&fixture->service, "ring");
    set_transport(&fixture->service, "ring"); /* again: nothing to do */
    start(fixture, jobs);
    finish(fixture, jobs);
}

static void wait_for_tokens(uint32_t n)
{
    uint64_t deadline = clock_deadline_us((uint64_t)CALL_MS * 1000);
    while (atomic_load(&n_tokens) < n && clock_now_us() < deadline)
        clock_sleep_us(500);
    assert_true(atomic_load(&n_tokens) >= n);
}

/* Each process in turn, in the middle of all generations; what comes up anew has its rings again. */
static void one_end_is_killed(void **state)
{
    static const struct {
        const char *program;
        uint32_t index;
    } victims[] = {{"hc-value-store", 0}, {"hc-gpu-worker", 0}, {"hc-coordinator", 0}, {"hc-value-store", 1}};
    struct fixture *fixture = *state;
    struct job jobs[N_SESSIONS];
    set_transport(&fixture->service, "ring");
    for (size_t i = 0; i < sizeof(victims) / sizeof(victims[0]); i++) {
        pid_t pid = service_process(&fixture->service, victims[i].program, victims[i].index);
        start(fixture, jobs);
        wait_for_tokens(N_TOKENS);
        assert_int_equal(kill(pid, SIGKILL), 0);
        finish(fixture, jobs);
        service_wait_ready(&fixture->service);
        assert_int_not_equal(service_process(&fixture->service, victims[i].program, victims[i].index), pid);
    }
    set_transport(&fixture->service, "ring"); /* a new coordinator has what it was started with */
    assert_transport(&fixture->service, "ring");
}

/* A change of the transport that is under way when one end of it dies. */
static void killed_while_it_changes(void **state)
{
    struct fixture *fixture = *state;
    struct job jobs[N_SESSIONS];
    static const char *const programs[] = {"hc-value-store", "hc-gpu-worker"};
    for (size_t i = 0; i < 2; i++) {
        pid_t pid = service_process(&fixture->service, programs[i], 0);
        start(fixture, jobs);
        wait_for_tokens(10);
        set_transport(&fixture->service, "routed");
        assert_int_equal(kill(pid, SIGKILL), 0);
        set_transport(&fixture->service, "ring");
        set_transport(&fixture->service, "routed");
        set_transport(&fixture->service, "ring");
        finish(fixture, jobs);
        service_wait_ready(&fixture->service);
        assert_transport(&fixture->service, "ring");
    }
    uint64_t deadline = clock_deadline_us(20000000);
    while (rows_n_used_blocks(&fixture->service, 2) != 0 && clock_now_us() < deadline)
        clock_sleep_us(50000);
    assert_int_equal(rows_n_used_blocks(&fixture->service, 2), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(back_and_forth),
        cmocka_unit_test(stays_with_a_ring),
        cmocka_unit_test(one_end_is_killed),
        cmocka_unit_test(killed_while_it_changes),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
