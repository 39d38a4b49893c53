/*
 * test_moves.c - stores that join and leave while sessions run: the streams end in the tokens and log-probabilities of an
 * undisturbed run, also when any process is killed while lanes are on their way; nothing stays behind.
 */
#include "tests/system/jobs.h"
#include "tests/system/programs.h"
#include "tests/system/rows.h"
#include "tests/system/service.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/clock.h"
#include "proto/layout.h"

enum { N_PROMPT = 900, N_TOKENS = 100, N_STORES = 3, CALL_MS = 600000, JOINED = 2 };

struct fixture {
    struct service service;
    struct hcattn *operator; /* a client for what is done beside the streams */
    pid_t joined;            /* supervisor of the store that joins; 0: none */
    uint32_t ids[N_PROMPT];
    struct answer truth;
};

#define usual     "default"
#define residency "klt1,deviation=0.05,fastgen=0.67"

static void join(struct fixture *fixture)
{
    char log[96], runtime_dir[96];
    snprintf(runtime_dir, sizeof(runtime_dir), "%s", fixture->service.directory);
    snprintf(log, sizeof(log), "%s/log", fixture->service.directory);
    struct program program = {.runtime_dir = runtime_dir};
    fixture->joined = programs_start(
        &program, ARGUMENTS("run", "--index", "2", "value-store", "--", "--memory", "64MiB", "--node", "0"), log);
}

static int set_up(void **state)
{
    const char *policy = *state;
    struct fixture *fixture = calloc(1, sizeof(*fixture));
    const char *model = service_tiny_model("--layers 3 --heads 6 --kv-heads 2 --embd 96 --ff 128 --context 2048");
    service_start(&fixture->service,
                  (const char *const[]){"--model", model, "--stores", "2", "--memory", "64MiB", "--exact-tokens", "0",
                                        "--policy", policy, NULL},
                  (const char *const[]){"HCATTN_PREFILL_CHUNK=32", NULL});
    struct hcattn_config config = {.runtime_dir = fixture->service.directory};
    assert_int_equal(hcattn_open(&config, &fixture->operator, NULL), 0);
    for (uint32_t i = 0; i < N_PROMPT; i++)
        fixture->ids[i] = (i * 7919 + 13) % 256;
    service_generate_ids(fixture->service.client, fixture->ids, N_PROMPT, N_TOKENS, &fixture->truth);
    assert_int_equal(fixture->truth.n, N_TOKENS);
    join(fixture);
    *state = fixture;
    return 0;
}

static int tear_down(void **state)
{
    struct fixture *fixture = *state;
    if (fixture->joined) {
        assert_int_equal(kill(fixture->joined, SIGTERM), 0);
        assert_int_equal(programs_wait(fixture->joined, 30 * PATIENCE), 0);
    }
    hcattn_close(fixture->operator);
    service_answer_free(&fixture->truth);
    service_stop(&fixture->service);
    free(fixture);
    return 0;
}

/* ---- what is looked at ---- */

static void store_state(struct fixture *fixture, uint32_t store, char text[32], uint64_t *ret_used)
{
    struct hcattn_stats stats;
    struct hcattn_error error;
    if (hcattn_stats(fixture->operator, CALL_MS, &stats, &error) < 0)
        fail_msg("stats: %s", error.sentence);
    text[0] = 0;
    for (size_t i = 0; i < stats.n_processes; i++)
        if (strcmp(stats.processes[i].program, "hc-value-store") == 0 && stats.processes[i].index == store) {
            snprintf(text, 32, "%s", stats.processes[i].state);
            *ret_used = stats.processes[i].bytes_used;
        }
    hcattn_stats_free(&stats);
}

static void await_state(struct fixture *fixture, uint32_t store, const char *wanted)
{
    uint64_t deadline_us = clock_deadline_us(60000000u * PATIENCE), used = 0;
    char text[32] = "";
    do {
        store_state(fixture, store, text, &used);
        clock_sleep_us(20000);
    } while (strcmp(text, wanted) != 0 && clock_now_us() < deadline_us);
    if (strcmp(text, wanted) != 0)
        service_show_log(&fixture->service);
    assert_string_equal(text, wanted);
}

static uint64_t bytes_used(struct fixture *fixture)
{
    uint64_t n = 0;
    for (uint32_t store = 0; store < N_STORES; store++) {
        uint64_t used = 0;
        char text[32];
        store_state(fixture, store, text, &used);
        n += used;
    }
    return n;
}

static void assert_nothing_left(struct fixture *fixture)
{
    uint64_t deadline_us = clock_deadline_us(30000000u * PATIENCE), used;
    do {
        used = bytes_used(fixture);
        clock_sleep_us(20000);
    } while (used != 0 && clock_now_us() < deadline_us);
    assert_int_equal(used, 0);
}

/* Stores that the session's blocks live in, bit each. */
static uint32_t stores_of(struct fixture *fixture, uint64_t session)
{
    struct hcattn_description description;
    struct hcattn_error error;
    if (hcattn_describe_session(fixture->operator, session, CALL_MS, &description, &error) < 0)
        fail_msg("describe: %s", error.sentence);
    uint32_t stores = 0;
    for (size_t i = 0; i < description.stats.n_stores; i++)
        stores |= UINT32_C(1) << description.stats.stores[i].store;
    hcattn_description_free(&description);
    return stores;
}

static void drain(struct fixture *fixture, uint32_t store, bool resume)
{
    struct hcattn_error error;
    int result = hcattn_drain_store(fixture->operator, store, resume, NULL, NULL, CALL_MS, NULL, &error);
    if (result < 0) {
        service_show_log(&fixture->service);
        fail_msg("drain of store %u: %s", store, error.sentence);
    }
}

/* ---- streams ---- */

struct disturbance {
    struct fixture *fixture;
    uint32_t every, n; /* a drain after each `every` tokens; how many there were */
};

/* Away from one store and back, in turn: the sessions go from two stores to two others. */
static void drain_in_turn(void *context, uint32_t n)
{
    struct disturbance *disturbance = context;
    if (n % disturbance->every != 0)
        return;
    uint32_t store = disturbance->n++ % N_STORES;
    drain(disturbance->fixture, store, false);
    drain(disturbance->fixture, store, true);
}

static void stores_leave_during_a_generation(void **state)
{
    struct fixture *fixture = *state;
    await_state(fixture, JOINED, "ready");
    for (uint32_t every = PATIENCE > 1 ? 23 : 9; every <= 23; every += 7) {
        struct disturbance disturbance = {.fixture = fixture, .every = every};
        struct answer answer = {.on_token = drain_in_turn, .context = &disturbance};
        service_generate_ids(fixture->service.client, fixture->ids, N_PROMPT, N_TOKENS, &answer);
        assert_true(disturbance.n >= N_TOKENS / every);
        service_answer_assert_equal(&fixture->truth, &answer);
        service_answer_free(&answer);
    }
    assert_nothing_left(fixture);
}

static int drain_at_progress(void *context, uint64_t n_done, uint64_t n_total)
{
    struct disturbance *disturbance = context;
    (void)n_total;
    if (n_done / 200 > disturbance->n)
        drain_in_turn(context, disturbance->every);
    return 0;
}

/* In the prefill; then the session says where it is, and the stores' rows say that nothing is missing. */
static void stores_leave_during_a_prefill(void **state)
{
    struct fixture *fixture = *state;
    await_state(fixture, JOINED, "ready");
    struct disturbance disturbance = {.fixture = fixture, .every = 1};
    struct hcattn_events events = {.context = &disturbance, .progress = drain_at_progress};
    struct hcattn_input input = {.ids = fixture->ids, .n_ids = N_PROMPT};
    struct hcattn_error error = {0};
    uint64_t session = jobs_open_session(fixture->service.client, NULL, 0);
    if (hcattn_append(fixture->service.client, session, &input, 0, &events, CALL_MS, NULL, &error) < 0)
        fail_msg("append: %s", error.sentence);
    assert_true(disturbance.n > 1);
    drain(fixture, 0, false);
    assert_int_equal(stores_of(fixture, session) & 1, 0);
    size_t n_bytes = 0;
    struct answer answer = {0};
    struct hcattn_generate generate = {
        .session = session, .at = N_PROMPT, .max_tokens = N_TOKENS, .logprobs = true, .ignore_end = true};
    if (service_generate(fixture->service.client, &generate, &answer, &error) < 0)
        fail_msg("generate: %s", error.sentence);
    service_answer_assert_equal(&fixture->truth, &answer);
    service_answer_free(&answer);
    drain(fixture, 0, true);
    drain(fixture, JOINED, false);
    assert_int_equal(stores_of(fixture, session) >> JOINED & 1, 0);
    uint8_t *rows = rows_of_session(&fixture->service, 2, session, N_PROMPT, &n_bytes);
    assert_true(n_bytes > 0);
    free(rows);
    jobs_close_session(fixture->service.client, session);
    drain(fixture, JOINED, true);
    assert_nothing_left(fixture);
}

/* ---- deaths ---- */

static int32_t delay_us;

static void *drain_and_back(void *context)
{
    struct fixture *fixture = context;
    drain(fixture, 1, false);
    return NULL;
}

struct death {
    struct fixture *fixture;
    pid_t pid;
    bool done;
    pthread_t thread;
};

/* A drain begins, and a moment later one of those that take part is killed. */
static void kill_during_a_drain(void *context, uint32_t n)
{
    struct death *death = context;
    if (death->done || n < 40)
        return;
    death->done = true;
    assert_int_equal(pthread_create(&death->thread, NULL, drain_and_back, death->fixture), 0);
    clock_sleep_us((uint64_t)delay_us);
    (void)kill(death->pid, SIGKILL); /* the store that left may have ended by itself */
}

static void deaths_during_a_drain(void **state)
{
    struct fixture *fixture = *state;
    static const struct {
        const char *program;
        uint32_t index;
    } victims[] = {{"hc-coordinator", 0}, {"hc-value-store", 1}, {"hc-value-store", 0}, {"hc-gpu-worker", 0}};
    static const int32_t delays_us[] = {500, 3000, 9000, 25000};
    for (size_t i = 0; i<16; i += PATIENCE> 1 ? 3 : 1) { /* sanitized: each victim and each delay, not every pair */
        await_state(fixture, JOINED, "ready");
        await_state(fixture, 1, "ready");
        service_wait_ready(&fixture->service);
        delay_us = delays_us[i % 4] * PATIENCE;
        struct death death = {.fixture = fixture,
                              .pid = service_process(&fixture->service, victims[i / 4].program, victims[i / 4].index)};
        struct answer answer = {.on_token = kill_during_a_drain, .context = &death};
        service_generate_ids(fixture->service.client, fixture->ids, N_PROMPT, N_TOKENS, &answer);
        assert_true(death.done);
        pthread_join(death.thread, NULL);
        service_answer_assert_equal(&fixture->truth, &answer);
        service_answer_free(&answer);
        await_state(fixture, 1, "drained");
        drain(fixture, 1, true);
        assert_nothing_left(fixture);
    }
}

/* ---- many ---- */

static void sessions_side_by_side(void **state)
{
    enum { N_JOBS = 6 };
    struct fixture *fixture = *state;
    static uint32_t ids[N_JOBS][N_PROMPT];
    struct job alone[N_JOBS] = {0}, jobs[N_JOBS] = {0};
    struct disturbance disturbance = {.fixture = fixture, .every = 10};
    await_state(fixture, JOINED, "ready");
    for (uint32_t i = 0; i < N_JOBS; i++) {
        jobs_make_ids(i + 1, ids[i], N_PROMPT);
        alone[i] = (struct job){.ids = ids[i], .n_ids = 150 + 100 * i, .max_tokens = 40};
        jobs[i] = alone[i];
    }
    jobs_run_alone(&fixture->service, alone, N_JOBS);
    jobs[0].answer = (struct answer){.on_token = drain_in_turn, .context = &disturbance};
    jobs_run(&fixture->service, jobs, N_JOBS);
    assert_int_equal(disturbance.n, 4);
    for (uint32_t i = 0; i < N_JOBS; i++)
        service_answer_assert_equal(&alone[i].answer, &jobs[i].answer);
    jobs_free(alone, N_JOBS);
    jobs_free(jobs, N_JOBS);
    assert_nothing_left(fixture);
}

int main(void)
{
#define TEST(function, policy)                                                                                         \
    {                                                                                                                  \
#function " " policy, function, set_up, tear_down, (void *)(uintptr_t)policy                                   \
    }
    const struct CMUnitTest tests[] = {
        TEST(stores_leave_during_a_generation, usual),
        TEST(stores_leave_during_a_generation, residency),
        TEST(stores_leave_during_a_prefill, usual),
        TEST(deaths_during_a_drain, usual),
        TEST(sessions_side_by_side, usual),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
