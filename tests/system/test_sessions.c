/*
 * test_sessions.c - what can be done with sessions beside running them: fork at a block's border, at rest and while it runs;
 * policies set before the first token; lists and descriptions.
 */
#include "tests/system/jobs.h"
#include "tests/system/rows.h"

#include <errno.h>
#include <stdatomic.h>
#include <string.h>

#include "common/clock.h"
#include "proto/layout.h"

#define MODEL "--layers 3 --heads 6 --kv-heads 2 --embd 96 --head-dim 32 --ff 128 --context 1024"
enum { N_PROMPT = 200, N_TOKENS = 136, CALL_MS = 600000, N_STORES = 2, N_LAYERS = 3, N_KV_HEADS = 2 };

static const char *const policies[] = {"default", "full", "rot4,mass=0.9,weights"};
enum { N_POLICIES = sizeof(policies) / sizeof(policies[0]) };

struct fixture {
    struct service service;
    uint32_t ids[N_PROMPT];
};

static int set_up(void **state)
{
    static struct fixture fixture;
    service_start(&fixture.service,
                  (const char *const[]){"--model", service_tiny_model(MODEL), "--stores", "2", "--memory", "64MiB",
                                        "--exact-tokens", "0", NULL},
                  (const char *const[]){"HCATTN_PREFILL_CHUNK=48", NULL});
    jobs_make_ids(11, fixture.ids, N_PROMPT);
    *state = &fixture;
    return 0;
}

static int tear_down(void **state)
{
    struct fixture *fixture = *state;
    service_stop(&fixture->service);
    return 0;
}

static struct hcattn_forked fork_session(struct hcattn *client, uint64_t source, uint64_t n_tokens)
{
    struct hcattn_fork fork = {.session = source, .n_tokens = n_tokens};
    struct hcattn_forked forked;
    struct hcattn_error error = {0};
    if (hcattn_fork(client, &fork, CALL_MS, &forked, &error) < 0)
        fail_msg("fork: %s", error.sentence);
    assert_true(forked.session != source);
    return forked;
}

/* Goes on without input; gives what the source had from token `first` of its generation on. */
static void assert_goes_on(struct fixture *fixture, uint64_t session, const struct answer *source, uint32_t first)
{
    struct job job = {.session = session, .max_tokens = source->n - first};
    jobs_run_alone(&fixture->service, &job, 1);
    assert_int_equal(job.answer.n, source->n - first);
    assert_memory_equal(job.answer.ids, source->ids + first, job.answer.n * sizeof(uint32_t));
    assert_memory_equal(job.answer.logprobs, source->logprobs + first, job.answer.n * sizeof(float));
    jobs_free(&job, 1);
}

/* ---- forks ---- */

static void goes_on_as_its_source(void **state)
{
    struct fixture *fixture = *state;
    struct hcattn *client = fixture->service.client;
    static const uint32_t exact[] = {HCATTN_EXACT_NONE, 300, 1024};
    for (uint32_t p = 0; p < N_POLICIES; p++)
        for (uint32_t e = 0; e < 3; e++) {
            uint64_t source = jobs_open_session(client, policies[p], exact[e]);
            struct job job = {.session = source, .ids = fixture->ids, .n_ids = N_PROMPT, .max_tokens = N_TOKENS};
            jobs_run_alone(&fixture->service, &job, 1);
            /* in what was generated, given as it is or not at a border */
            struct hcattn_forked at_256 = fork_session(client, source, 256), at_300 = fork_session(client, source, 300);
            assert_int_equal(at_256.n_tokens, 256);
            assert_int_equal(at_300.n_tokens, 256);
            /* in the prompt, the rest of which is given to the fork */
            struct hcattn_forked at_192 = fork_session(client, source, 192), all = fork_session(client, source, 0);
            assert_int_equal(at_192.n_tokens, 192);
            assert_int_equal(all.n_tokens, (N_PROMPT + N_TOKENS - 1) / 64 * 64);
            struct hcattn_forked second = fork_session(client, all.session, 256);
            jobs_close_session(client, source); /* they are on their own */
            struct job rest = {
                .session = at_192.session, .ids = fixture->ids + 192, .n_ids = N_PROMPT - 192, .max_tokens = N_TOKENS};
            jobs_run_alone(&fixture->service, &rest, 1);
            service_answer_assert_equal(&job.answer, &rest.answer);
            assert_goes_on(fixture, at_256.session, &job.answer, 256 - N_PROMPT);
            assert_goes_on(fixture, at_300.session, &job.answer, 256 - N_PROMPT);
            assert_goes_on(fixture, all.session, &job.answer, (uint32_t)all.n_tokens - N_PROMPT);
            assert_goes_on(fixture, second.session, &job.answer, 256 - N_PROMPT);
            const uint64_t sessions[] = {at_256.session, at_300.session, at_192.session, all.session, second.session};
            for (size_t i = 0; i < sizeof(sessions) / sizeof(sessions[0]); i++)
                jobs_close_session(client, sessions[i]);
            jobs_free(&job, 1);
            jobs_free(&rest, 1);
        }
    assert_int_equal(rows_n_used_blocks(&fixture->service, N_STORES), 0);
}

static void note_token(void *context, uint32_t n)
{
    atomic_store((_Atomic uint32_t *)context, n);
}

static void of_a_running_session(void **state)
{
    struct fixture *fixture = *state;
    struct hcattn *client = fixture->service.client;
    enum { N_FORKS = 4, N_LONG = 600 };
    _Atomic uint32_t n_there = 0;
    struct hcattn_forked forks[N_FORKS];
    uint64_t source = jobs_open_session(client, "default", HCATTN_EXACT_NONE);
    struct job job = {.session = source, .ids = fixture->ids, .n_ids = N_PROMPT, .max_tokens = N_LONG};
    job.answer.on_token = note_token;
    job.answer.context = &n_there;
    jobs_start(&fixture->service, &job);
    for (uint32_t i = 0; i < N_FORKS; i++) {
        while (atomic_load(&n_there) < 60 + i * 40)
            clock_sleep_us(500);
        forks[i] = fork_session(client, source, 0);
    }
    bool was_running = atomic_load(&n_there) < N_LONG;
    jobs_wait(&job);
    assert_true(was_running);
    for (uint32_t i = 0; i < N_FORKS; i++) {
        assert_true(forks[i].n_tokens >= N_PROMPT + 50 + i * 40 - 64);
        assert_goes_on(fixture, forks[i].session, &job.answer, (uint32_t)forks[i].n_tokens - N_PROMPT);
        jobs_close_session(client, forks[i].session);
    }
    jobs_close_session(client, source);
    jobs_free(&job, 1);
    assert_int_equal(rows_n_used_blocks(&fixture->service, N_STORES), 0);
}

/* ---- policies ---- */

static void check_set_policy(struct hcattn *client, uint64_t session, const char *policy, int result,
                             enum hcattn_code code)
{
    struct hcattn_error error = {0};
    char understood[HCATTN_POLICY_SIZE] = "";
    int r = hcattn_set_policy(client, session, policy, CALL_MS, understood, &error);
    if (r != result || error.code != code)
        fail_msg("set policy %s: %d, %s", policy, r, error.sentence);
    assert_string_equal(understood, r == 0 ? policy : "");
}

static void policies_before_the_first_token(void **state)
{
    struct fixture *fixture = *state;
    struct hcattn *client = fixture->service.client;
    struct job expected = {.policy = "rot2,mass=0.8,notail", .ids = fixture->ids, .n_ids = N_PROMPT, .max_tokens = 24};
    struct job full = expected, set = expected, unnamed = expected;
    full.policy = "full";
    unnamed.policy = NULL;
    uint64_t session = jobs_open_session(client, "full", 0);
    jobs_run_alone(&fixture->service, &expected, 1);
    jobs_run_alone(&fixture->service, &full, 1);
    assert_memory_not_equal(expected.answer.logprobs, full.answer.logprobs, 24 * sizeof(float));
    check_set_policy(client, session, "quality", 0, HCATTN_OK);
    check_set_policy(client, session, expected.policy, 0, HCATTN_OK);
    check_set_policy(client, session, "clever", -EOPNOTSUPP, HCATTN_NOT_SUPPORTED);
    set.session = session;
    jobs_run_alone(&fixture->service, &set, 1);
    service_answer_assert_equal(&expected.answer, &set.answer);
    check_set_policy(client, session, "full", -ESTALE, HCATTN_CONFLICT);
    check_set_policy(client, session, expected.policy, 0, HCATTN_OK); /* which it has */
    check_set_policy(client, 0x123456789abcdef, "full", -ENOENT, HCATTN_NOT_FOUND);
    /* of sessions that name none */
    check_set_policy(client, 0, expected.policy, 0, HCATTN_OK);
    jobs_run_alone(&fixture->service, &unnamed, 1);
    service_answer_assert_equal(&expected.answer, &unnamed.answer);
    check_set_policy(client, 0, "default", 0, HCATTN_OK);
    jobs_close_session(client, session);
    jobs_free(&expected, 1);
    jobs_free(&full, 1);
    jobs_free(&set, 1);
    jobs_free(&unnamed, 1);
}

/* ---- lists and descriptions ---- */

static struct hcattn_description describe(struct hcattn *client, uint64_t session)
{
    struct hcattn_description description;
    struct hcattn_error error = {0};
    if (hcattn_describe_session(client, session, CALL_MS, &description, &error) < 0)
        fail_msg("describe: %s", error.sentence);
    assert_true(description.stats.session == session);
    assert_int_equal(description.n_layers, N_LAYERS);
    assert_int_equal(description.n_kv_heads, N_KV_HEADS);
    return description;
}

static void check_counts(const struct hcattn_description *description, uint32_t n_steps, bool is_full)
{
    const struct hcattn_counts *counts = &description->counts;
    uint64_t row_bytes = 2 * 2 * 32, read = 0;
    double kept_rows = 0;
    assert_true(description->counted);
    assert_int_equal(counts->n_steps, n_steps);
    /* what is old when a step begins: 124 tokens at 200, 188 from 256 on, 252 from 320 on */
    uint64_t n_old = 0;
    for (uint32_t position = N_PROMPT; position < N_PROMPT + n_steps; position++)
        n_old += (position / 64 - 1) * 64 - 4;
    assert_true(counts->n_old_tokens == n_old);
    assert_non_null(counts->kept);
    for (uint32_t i = 0; i < N_LAYERS * N_KV_HEADS; i++) {
        double kept = counts->kept[i];
        assert_true(is_full ? kept == 1 : kept > 0 && kept < 1);
        kept_rows += kept * (double)n_old;
    }
    assert_int_equal(counts->n_reads, N_STORES);
    for (size_t i = 0; i < counts->n_reads; i++) {
        assert_true(counts->reads[i].bytes > 0);
        read += counts->reads[i].bytes;
    }
    assert_true((double)read > 0.999 * kept_rows * (double)row_bytes);
    assert_true((double)read < 1.001 * kept_rows * (double)row_bytes);
    assert_true(counts->exact_bytes >= 132 * row_bytes * N_LAYERS * N_KV_HEADS);
    assert_true(is_full ? counts->key_bytes == 0 : counts->key_bytes > 0);
    assert_true(counts->step_us > 0 && counts->matmul_us > 0 && counts->store_wait_us > 0);
    assert_true(counts->select_us + counts->attention_us + counts->store_wait_us + counts->matmul_us <=
                counts->step_us + counts->step_us / 100 + 1000);
}

static void lists_and_descriptions(void **state)
{
    struct fixture *fixture = *state;
    struct hcattn *client = fixture->service.client;
    enum { N = 3 };
    static const char *const names[N] = {"default", "full", "rot3,deviation=0.2"};
    uint64_t sessions[N], block_bytes;
    struct hcattn_stats stats;
    struct hcattn_sessions list;
    assert_int_equal(hcattn_list_sessions(client, CALL_MS, &list, NULL), 0);
    assert_int_equal(list.n_sessions, 0);
    hcattn_sessions_free(&list);
    for (uint32_t i = 0; i < N; i++) {
        sessions[i] = jobs_open_session(client, names[i], i == 2 ? 77 : 0);
        struct hcattn_description fresh = describe(client, sessions[i]);
        assert_false(fresh.counted);
        assert_int_equal(fresh.stats.n_tokens, 0);
        hcattn_description_free(&fresh);
        struct job job = {.session = sessions[i], .ids = fixture->ids, .n_ids = N_PROMPT, .max_tokens = N_TOKENS};
        jobs_run_alone(&fixture->service, &job, 1);
        jobs_free(&job, 1);
    }
    assert_int_equal(hcattn_stats(client, CALL_MS, &stats, NULL), 0);
    block_bytes = stats.store_bytes_per_token * LAYOUT_BLOCK_TOKENS;
    assert_int_equal(stats.n_sessions, N);
    hcattn_stats_free(&stats);
    assert_int_equal(hcattn_list_sessions(client, CALL_MS, &list, NULL), 0);
    assert_int_equal(list.n_sessions, N);
    for (uint32_t i = 0; i < N; i++) {
        uint32_t k = 0;
        while (k < N && list.sessions[k].session != sessions[i])
            k++;
        assert_true(k < N);
        const struct hcattn_session_stats *session = &list.sessions[k];
        assert_string_equal(session->policy, names[i]);
        assert_string_equal(session->state, "ready");
        assert_int_equal(session->n_tokens, N_PROMPT + N_TOKENS);
        assert_int_equal(session->exact_tokens, i == 2 ? 77 : 0);
        assert_int_equal(session->reserved_tokens, (N_PROMPT + N_TOKENS + 64) / 64 * 64);
        assert_true(session->bytes >= session->reserved_tokens / 64 * block_bytes);
        assert_int_equal(session->n_lanes, LAYOUT_N_LANES);
        assert_true(session->held);
        assert_int_equal(session->worker, 0);
        struct hcattn_description description = describe(client, sessions[i]);
        check_counts(&description, N_TOKENS - 1, i == 1); /* the first token is of the prefill */
        hcattn_description_free(&description);
    }
    hcattn_sessions_free(&list);
    for (uint32_t i = 0; i < N; i++)
        jobs_close_session(client, sessions[i]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(goes_on_as_its_source),
        cmocka_unit_test(of_a_running_session),
        cmocka_unit_test(policies_before_the_first_token),
        cmocka_unit_test(lists_and_descriptions),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
