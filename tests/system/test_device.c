/*
 * test_device.c - the device's memory: what is counted is what is taken, idle sessions lend theirs, nobody gets more than
 * there is, and no token changes because of it.
 */
#include "tests/system/jobs.h"
#include "tests/system/service.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"

/* A session takes 4 KiB of the device for an exact token, 2 KiB for an old key of codec f16. */
#define MODEL "--layers 4 --heads 4 --kv-heads 4 --embd 64 --head-dim 64 --ff 64 --context 4096"
#define KIB   UINT64_C(1024)
#define MIB   (1024 * KIB)

enum { CALL_MS = 300000 * PATIENCE, N_PROMPT = 200, N_TOKENS = 16, EXACT_TOKEN_BYTES = 4096 };

static void start(struct service *service, uint64_t device_memory)
{
    char limit[32];
    snprintf(limit, sizeof(limit), "%llu", (unsigned long long)device_memory);
    service_start(service,
                  (const char *const[]){"--model", service_tiny_model(MODEL), "--memory", "192MiB", "--stores", "2",
                                        "--device-memory", limit, NULL},
                  NULL);
}

/* As the worker's last heartbeat said. */
static uint64_t counted_bytes(struct service *service)
{
    struct hcattn_stats stats;
    uint64_t bytes = 0;
    assert_int_equal(hcattn_stats(service->client, CALL_MS, &stats, NULL), 0);
    for (size_t i = 0; i < stats.n_processes; i++)
        if (strcmp(stats.processes[i].program, "hc-gpu-worker") == 0)
            bytes += stats.processes[i].device_bytes;
    hcattn_stats_free(&stats);
    return bytes;
}

/* Once a heartbeat has told a number outside of [low, high] no more. */
static uint64_t wait_for_counted(struct service *service, uint64_t low, uint64_t high)
{
    uint64_t deadline = clock_deadline_us(UINT64_C(20000000) * PATIENCE), bytes;
    while (bytes = counted_bytes(service), (bytes < low || bytes > high) && clock_now_us() < deadline)
        clock_sleep_us(50000);
    if (bytes < low || bytes > high)
        fail_msg("%llu bytes counted, not %llu to %llu", (unsigned long long)bytes, (unsigned long long)low,
                 (unsigned long long)high);
    return bytes;
}

/* What a service of this shape has on the device without sessions. */
static uint64_t base_bytes(void)
{
    static uint64_t bytes;
    if (bytes == 0) {
        struct service service;
        start(&service, 0);
        bytes = wait_for_counted(&service, 1, UINT64_MAX);
        service_stop(&service);
    }
    return bytes;
}

/* ---- counted and measured ---- */

#ifndef HCATTN_SANITIZED /* a sanitizer's own memory is more than ours */
static uint64_t anonymous_bytes(pid_t pid)
{
    char path[64], line[256];
    unsigned long long kib = 0;
    snprintf(path, sizeof(path), "/proc/%d/smaps_rollup", (int)pid);
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    while (fgets(line, sizeof(line), file) != NULL && sscanf(line, "Anonymous: %llu kB", &kib) != 1)
        continue;
    fclose(file);
    assert_true(kib > 0);
    return kib * 1024;
}

static int stop_at_once(void *context, const struct hcattn_generated *generated)
{
    (void)context, (void)generated;
    return 1;
}

/* Takes all the memory that the session would need for n_tokens, by a generation that is cancelled at its first token. */
static uint64_t take_memory(struct service *service, const char *policy, uint32_t exact_tokens, uint32_t n_tokens)
{
    uint64_t session = jobs_open_session(service->client, policy, exact_tokens);
    uint32_t ids[8];
    jobs_make_ids(1, ids, 8);
    struct hcattn_generate request = {
        .session = session, .input = {.ids = ids, .n_ids = 8}, .max_tokens = n_tokens - 8, .ignore_end = true};
    struct hcattn_events events = {.generated = stop_at_once};
    assert_int_equal(hcattn_generate(service->client, &request, &events, CALL_MS, NULL, NULL), -ECANCELED);
    return session;
}

static void assert_near(const char *what, uint64_t counted, uint64_t measured)
{
    double ratio = (double)measured / (double)counted;
    print_message("%s: %.2f MiB counted, %.2f MiB measured: %+.2f %%\n", what, (double)counted / (double)MIB,
                  (double)measured / (double)MIB, 100 * (ratio - 1));
    assert_true(ratio > 0.95 && ratio < 1.05);
}

static void counted_is_measured(void **state)
{
    enum { N = 6 };
    (void)state;
    struct service service;
    uint64_t sessions[N];
    start(&service, 0);
    pid_t worker = service_process(&service, "hc-gpu-worker", 0);
    jobs_close_session(service.client, take_memory(&service, "default", 2000, 2000)); /* the first one warms up */
    uint64_t base = wait_for_counted(&service, 1, base_bytes()), base_measured = anonymous_bytes(worker);
    for (uint32_t i = 0; i < N; i++)
        sessions[i] = i % 2 ? take_memory(&service, "f16,deviation=0.02", HCATTN_EXACT_NONE, 3900)
                            : take_memory(&service, "full", 4000, 3000);
    uint64_t expected = N / 2 * (3000 * UINT64_C(4096) + 3700 * UINT64_C(2048));
    uint64_t counted = wait_for_counted(&service, base + expected, base + expected * 5 / 4);
    uint64_t measured = anonymous_bytes(worker);
    assert_near("six sessions", counted - base, measured - base_measured);
    for (uint32_t i = 0; i < 4; i++)
        jobs_close_session(service.client, sessions[i]);
    uint64_t less = wait_for_counted(&service, base, counted - expected / 2);
    assert_near("four of them closed", counted - less, measured - anonymous_bytes(worker));
    for (uint32_t i = 4; i < N; i++)
        jobs_close_session(service.client, sessions[i]);
    wait_for_counted(&service, 1, base);
    service_stop(&service);
}
#endif

/* ---- a budget ---- */

static struct job job_in(uint64_t session, const uint32_t *ids, size_t n_ids, uint32_t max_tokens)
{
    return (struct job){.session = session, .ids = ids, .n_ids = n_ids, .max_tokens = max_tokens};
}

static bool is_held(struct hcattn *client, uint64_t session)
{
    struct hcattn_description description;
    assert_int_equal(hcattn_describe_session(client, session, CALL_MS, &description, NULL), 0);
    bool held = description.counted && description.counts.exact_bytes > 0;
    hcattn_description_free(&description);
    return held;
}

/* Four sessions in turns, with room for two: each turn takes back what another one had lent. */
static void idle_sessions_lend(void **state)
{
    enum { N = 4, N_TURNS = 3 };
    static const char *const policies[N] = {"full", "default", "rot4,mass=0.9", "default"};
    static const uint32_t exact[N] = {1024, HCATTN_EXACT_NONE, 200, 1024};
    (void)state;
    struct service service;
    uint32_t ids[N][N_PROMPT];
    uint64_t sessions[N];
    struct job whole[N];
    start(&service, base_bytes() + 2560 * KIB);
    for (uint32_t i = 0; i < N; i++) {
        jobs_make_ids(i + 1, ids[i], N_PROMPT);
        whole[i] = (struct job){.policy = policies[i],
                                .exact_tokens = exact[i],
                                .ids = ids[i],
                                .n_ids = N_PROMPT,
                                .max_tokens = N_TURNS * N_TOKENS};
        sessions[i] = jobs_open_session(service.client, policies[i], exact[i]);
    }
    jobs_run_alone(&service, whole, N);
    uint32_t n_lent = 0;
    for (uint32_t turn = 0; turn < N_TURNS; turn++)
        for (uint32_t i = 0; i < N; i++) {
            struct job job = job_in(sessions[i], ids[i], turn == 0 ? N_PROMPT : 0, N_TOKENS);
            n_lent += turn > 0 && !is_held(service.client, sessions[i]);
            jobs_run_alone(&service, &job, 1);
            assert_memory_equal(job.answer.ids, whole[i].answer.ids + turn * N_TOKENS, N_TOKENS * sizeof(uint32_t));
            assert_memory_equal(job.answer.logprobs, whole[i].answer.logprobs + turn * N_TOKENS,
                                N_TOKENS * sizeof(float));
            assert_true(is_held(service.client, sessions[i]));
            jobs_free(&job, 1);
        }
    assert_true(n_lent >= N_TURNS - 1);
    assert_true(counted_bytes(&service) <= base_bytes() + 2560 * KIB);
    for (uint32_t i = 0; i < N; i++)
        jobs_close_session(service.client, sessions[i]);
    jobs_free(whole, N);
    service_stop(&service);
}

/* All at once: those without room wait until others end. */
static void they_wait_for_each_other(void **state)
{
    enum { N = 6 };
    (void)state;
    struct service service;
    uint32_t ids[N_PROMPT];
    struct job together[N], alone[N];
    start(&service, base_bytes() + 2560 * KIB);
    jobs_make_ids(9, ids, N_PROMPT);
    for (uint32_t i = 0; i < N; i++)
        together[i] = alone[i] = (struct job){.policy = i % 2 ? "default" : "full",
                                              .exact_tokens = i % 3 ? 1024 : HCATTN_EXACT_NONE,
                                              .ids = ids,
                                              .n_ids = N_PROMPT - i,
                                              .max_tokens = 3 * N_TOKENS};
    jobs_run(&service, together, N);
    jobs_run_alone(&service, alone, N);
    for (uint32_t i = 0; i < N; i++)
        service_answer_assert_equal(&alone[i].answer, &together[i].answer);
    jobs_free(together, N);
    jobs_free(alone, N);
    service_stop(&service);
}

static void what_never_fits_is_refused(void **state)
{
    (void)state;
    struct service service;
    uint32_t ids[N_PROMPT];
    uint64_t room = 2 * MIB;
    start(&service, base_bytes() + room);
    jobs_make_ids(2, ids, N_PROMPT);
    struct job small = {.policy = "full", .ids = ids, .n_ids = N_PROMPT, .max_tokens = N_TOKENS};
    struct job large = {.policy = "full", .exact_tokens = 3000, .ids = ids, .n_ids = N_PROMPT, .max_tokens = 2000};
    large.may_fail = true;
    uint64_t session = jobs_open_session(service.client, "full", 0);
    struct job before = job_in(session, ids, N_PROMPT, N_TOKENS), after = job_in(session, NULL, 0, N_TOKENS);
    jobs_run_alone(&service, &small, 1);
    jobs_run_alone(&service, &before, 1);
    jobs_run_alone(&service, &large, 1);
    assert_int_equal(large.result, -ENOMEM);
    assert_int_equal(large.error.code, HCATTN_NO_MEMORY);
    print_message("%s\n", large.error.sentence);
    assert_true(large.error.bytes_asked >= 2200 * (uint64_t)EXACT_TOKEN_BYTES);
    assert_true(large.error.bytes_free > 0 && large.error.bytes_free <= room);
    assert_non_null(strstr(large.error.sentence, "device"));
    /* the others are as they were */
    service_answer_assert_equal(&small.answer, &before.answer);
    jobs_run_alone(&service, &after, 1);
    jobs_free(&small, 1);
    jobs_free(&before, 1);
    jobs_free(&after, 1);
    jobs_free(&large, 1);
    jobs_close_session(service.client, session);
    service_stop(&service);
}

/* Two sessions that hold memory and both want more while a third runs: each must be able to use what the other has. */
static void two_want_more(void **state)
{
    (void)state;
    struct service service;
    uint32_t ids[N_PROMPT];
    uint64_t sessions[2];
    struct job first[2], more[2], whole;
    jobs_make_ids(5, ids, N_PROMPT);
    start(&service, base_bytes() + 2900 * KIB); /* two of 1 MiB, or one of 2 MiB; and the third one */
    whole = (struct job){
        .policy = "full", .exact_tokens = 1024, .ids = ids, .n_ids = N_PROMPT, .max_tokens = N_TOKENS + 250};
    jobs_run_alone(&service, &whole, 1);
    for (uint32_t i = 0; i < 2; i++) {
        sessions[i] = jobs_open_session(service.client, "full", 1024);
        first[i] = job_in(sessions[i], ids, N_PROMPT, N_TOKENS);
        more[i] = job_in(sessions[i], NULL, 0, 250);
    }
    jobs_run_alone(&service, first, 2);
    struct job third = {
        .policy = "full", .exact_tokens = HCATTN_EXACT_NONE, .ids = ids, .n_ids = 1, .max_tokens = 1500};
    jobs_start(&service, &third);
    clock_sleep_us(50000);
    jobs_run(&service, more, 2);
    jobs_wait(&third);
    for (uint32_t i = 0; i < 2; i++) {
        assert_memory_equal(more[i].answer.logprobs, whole.answer.logprobs + N_TOKENS, 250 * sizeof(float));
        jobs_close_session(service.client, sessions[i]);
    }
    jobs_free(first, 2);
    jobs_free(more, 2);
    jobs_free(&third, 1);
    jobs_free(&whole, 1);
    service_stop(&service);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
#ifndef HCATTN_SANITIZED
        cmocka_unit_test(counted_is_measured),
#endif
        cmocka_unit_test(idle_sessions_lend),         cmocka_unit_test(they_wait_for_each_other),
        cmocka_unit_test(what_never_fits_is_refused), cmocka_unit_test(two_want_more),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
