/*
 * test_recovery.c - kill -9 of one process during a generation: its supervisor starts it again, and the stream ends in the
 * tokens, log-probabilities and text of an undisturbed run.
 */
#include "tests/system/jobs.h"
#include "tests/system/rows.h"
#include "tests/system/service.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"

enum { N_PROMPT = 200, N_TOKENS = 60, CALL_MS = 600000 };

/* What a service is asked for: the default policy through rings, unless said otherwise. */
struct variant {
    const char *rows, *exact_tokens, *policy;
};

static struct variant usual = {"f16", "0", "default"}, q8_0 = {"q8_0", "0", "quality"},
                      exact = {"f16", "225", "default"} /* passed in the middle of the generation */,
                      residency = {"f16", "0", "klt1,deviation=0.05,fastgen=0.67"};

struct fixture {
    struct service service;
    uint32_t ids[N_PROMPT];
    struct answer truth;
};

static int set_up(void **state)
{
    const struct variant *variant = *state;
    struct fixture *fixture = calloc(1, sizeof(*fixture));
    const char *model = service_tiny_model("--layers 3 --heads 6 --kv-heads 2 --embd 96 --ff 128");
    service_start(&fixture->service,
                  (const char *const[]){"--model", model, "--stores", "2", "--memory", "64MiB", "--rows", variant->rows,
                                        "--exact-tokens", variant->exact_tokens, "--policy", variant->policy, NULL},
                  (const char *const[]){"HCATTN_PREFILL_CHUNK=32", NULL});
    for (uint32_t i = 0; i < N_PROMPT; i++)
        fixture->ids[i] = (i * 7919 + 13) % 256;
    service_generate_ids(fixture->service.client, fixture->ids, N_PROMPT, N_TOKENS, &fixture->truth);
    assert_int_equal(fixture->truth.n, N_TOKENS);
    *state = fixture;
    return 0;
}

static int tear_down(void **state)
{
    struct fixture *fixture = *state;
    service_answer_free(&fixture->truth);
    service_stop(&fixture->service);
    free(fixture);
    return 0;
}

/* Kills `pid` when the token number `at` has come. */
struct murder {
    pid_t pid;
    uint32_t at;
    bool done;
};

static void kill_at(void *context, uint32_t n)
{
    struct murder *murder = context;
    if (n != murder->at || murder->done)
        return;
    murder->done = true;
    assert_int_equal(kill(murder->pid, SIGKILL), 0);
}

static void assert_was_restarted(struct service *service, const char *program, uint32_t index, pid_t old)
{
    uint64_t deadline = clock_deadline_us(60000000);
    pid_t pid;
    do {
        pid = service_process(service, program, index);
        clock_sleep_us(100000);
    } while (pid == old && clock_now_us() < deadline);
    assert_int_not_equal(pid, old);
}

static void kill_at_each(struct fixture *fixture, const char *program, uint32_t index, const uint32_t *at, size_t n_at)
{
    for (size_t i = 0; i < n_at; i++) {
        struct murder murder = {.pid = service_process(&fixture->service, program, index), .at = at[i]};
        struct answer answer = {.on_token = kill_at, .context = &murder};
        service_generate_ids(fixture->service.client, fixture->ids, N_PROMPT, N_TOKENS, &answer);
        assert_true(murder.done);
        service_answer_assert_equal(&fixture->truth, &answer);
        service_answer_free(&answer);
        assert_was_restarted(&fixture->service, program, index, murder.pid);
    }
    /* nothing stays behind */
    uint64_t deadline = clock_deadline_us(20000000);
    while (rows_n_used_blocks(&fixture->service, 2) != 0 && clock_now_us() < deadline)
        clock_sleep_us(50000);
    assert_int_equal(rows_n_used_blocks(&fixture->service, 2), 0);
}

/* In the middle of a block, at the last token of one, right after the first token. */
static void kill_during_decode(struct fixture *fixture, const char *program, uint32_t index)
{
    const uint32_t at[] = {1, 56, 30};
    kill_at_each(fixture, program, index, at, sizeof(at) / sizeof(at[0]));
}

static void worker_killed(void **state)
{
    kill_during_decode(*state, "hc-gpu-worker", 0);
}

static void store_killed(void **state)
{
    kill_during_decode(*state, "hc-value-store", 1);
    kill_during_decode(*state, "hc-value-store", 0);
}

static void coordinator_killed(void **state)
{
    kill_during_decode(*state, "hc-coordinator", 0);
}

/* Before, at and after the token that ends the time in which all are exact; a sealed block of q8_0 rows is among them. */
static void each_killed(void **state)
{
    const uint32_t at[] = {12, 26, 58}, once[] = {27};
    kill_at_each(*state, "hc-gpu-worker", 0, at, sizeof(at) / sizeof(at[0]));
    kill_at_each(*state, "hc-value-store", 1, once, 1);
    kill_at_each(*state, "hc-coordinator", 0, once, 1);
}

static int kill_at_progress(void *context, uint64_t n_done, uint64_t n_total)
{
    struct murder *murder = context;
    if (n_done >= n_total / 2 && !murder->done) {
        murder->done = true;
        assert_int_equal(kill(murder->pid, SIGKILL), 0);
    }
    return 0;
}

/* In the middle of a prefill; the generation after it tells whether the rows are what they should be. */
static void killed_during_prefill(void **state)
{
    struct fixture *fixture = *state;
    static const struct {
        const char *program;
        uint32_t index;
    } victims[] = {{"hc-gpu-worker", 0}, {"hc-value-store", 0}, {"hc-value-store", 1}, {"hc-coordinator", 0}};
    for (size_t i = 0; i < sizeof(victims) / sizeof(victims[0]); i++) {
        struct murder murder = {.pid = service_process(&fixture->service, victims[i].program, victims[i].index)};
        struct hcattn_events events = {.context = &murder, .progress = kill_at_progress};
        struct hcattn_session session;
        struct hcattn_error error = {0};
        assert_int_equal(hcattn_open_session(fixture->service.client, NULL, CALL_MS, &session, &error), 0);
        struct hcattn_input input = {.ids = fixture->ids, .n_ids = N_PROMPT};
        struct hcattn_appended appended;
        if (hcattn_append(fixture->service.client, session.session, &input, 0, &events, CALL_MS, &appended, &error) < 0)
            fail_msg("append: %s", error.sentence);
        assert_true(murder.done);
        assert_int_equal(appended.n_tokens, N_PROMPT);
        struct answer answer = {0};
        struct hcattn_generate generate = {
            .session = session.session, .at = N_PROMPT, .max_tokens = N_TOKENS, .logprobs = true, .ignore_end = true};
        if (service_generate(fixture->service.client, &generate, &answer, &error) < 0)
            fail_msg("generate: %s", error.sentence);
        service_answer_assert_equal(&fixture->truth, &answer);
        service_answer_free(&answer);
        assert_int_equal(hcattn_close_session(fixture->service.client, session.session, CALL_MS, NULL, NULL), 0);
    }
}

/* A session that lies idle meanwhile is still there afterwards. */
static void an_idle_session_survives(void **state)
{
    struct fixture *fixture = *state;
    struct hcattn_session session;
    struct hcattn_error error = {0};
    struct hcattn_input input = {.ids = fixture->ids, .n_ids = N_PROMPT};
    assert_int_equal(hcattn_open_session(fixture->service.client, NULL, CALL_MS, &session, &error), 0);
    assert_int_equal(hcattn_append(fixture->service.client, session.session, &input, 0, NULL, CALL_MS, NULL, &error),
                     0);
    static const char *const programs[] = {"hc-coordinator", "hc-value-store", "hc-gpu-worker"};
    for (size_t i = 0; i < sizeof(programs) / sizeof(programs[0]); i++) {
        pid_t pid = service_process(&fixture->service, programs[i], 0);
        assert_int_equal(kill(pid, SIGKILL), 0);
        assert_was_restarted(&fixture->service, programs[i], 0, pid);
        service_wait_ready(&fixture->service);
    }
    struct answer answer = {0};
    struct hcattn_generate generate = {
        .session = session.session, .at = N_PROMPT, .max_tokens = N_TOKENS, .logprobs = true, .ignore_end = true};
    if (service_generate(fixture->service.client, &generate, &answer, &error) < 0)
        fail_msg("generate: %s", error.sentence);
    service_answer_assert_equal(&fixture->truth, &answer);
    service_answer_free(&answer);
    assert_int_equal(hcattn_close_session(fixture->service.client, session.session, CALL_MS, NULL, NULL), 0);
}

/* ---- a profile of heads, which is not kept anywhere ---- */

enum { N_LAYERS = 3, N_KV_HEADS = 2, N_HEADS = N_LAYERS * N_KV_HEADS };

struct seen_profile {
    uint64_t n_tokens;
    uint8_t classes[N_HEADS];
    float kept_mass[N_HEADS];
};

static void describe_profile(struct hcattn *client, uint64_t session, struct seen_profile *ret_profile)
{
    struct hcattn_description description;
    assert_int_equal(hcattn_describe_session(client, session, CALL_MS, &description, NULL), 0);
    assert_true(description.profiled);
    assert_int_equal(description.n_layers * description.n_kv_heads, N_HEADS);
    *ret_profile = (struct seen_profile){.n_tokens = description.profile.n_tokens};
    memcpy(ret_profile->classes, description.profile.classes, sizeof(ret_profile->classes));
    memcpy(ret_profile->kept_mass, description.profile.kept_mass, sizeof(ret_profile->kept_mass));
    hcattn_description_free(&description);
}

/* Of the prompt, in a session that stays; its worker is killed in the middle unless `murder` is NULL. */
static uint64_t generate_in_session(struct fixture *fixture, struct murder *murder)
{
    struct hcattn_error error = {0};
    uint64_t session = jobs_open_session(fixture->service.client, residency.policy, HCATTN_EXACT_NONE);
    struct answer answer = {.on_token = murder == NULL ? NULL : kill_at, .context = murder};
    struct hcattn_generate generate = {.session = session,
                                       .input = {.ids = fixture->ids, .n_ids = N_PROMPT},
                                       .max_tokens = N_TOKENS,
                                       .logprobs = true,
                                       .ignore_end = true};
    if (service_generate(fixture->service.client, &generate, &answer, &error) < 0)
        fail_msg("generate: %s", error.sentence);
    service_answer_assert_equal(&fixture->truth, &answer);
    service_answer_free(&answer);
    return session;
}

/* A fork of the prompt's whole blocks under another policy, given the rest, is what a session of its own would be. */
static void assert_fork_is_independent(struct fixture *fixture, uint64_t source, const char *policy)
{
    enum { N_WHOLE = N_PROMPT / 64 * 64 };
    struct hcattn *client = fixture->service.client;
    struct hcattn_fork fork = {.session = source, .n_tokens = N_PROMPT, .policy = policy};
    struct hcattn_forked forked;
    struct hcattn_error error = {0};
    struct job alone = {.policy = policy,
                        .exact_tokens = HCATTN_EXACT_NONE,
                        .ids = fixture->ids,
                        .n_ids = N_PROMPT,
                        .max_tokens = N_TOKENS};
    jobs_run_alone(&fixture->service, &alone, 1);
    if (hcattn_fork(client, &fork, CALL_MS, &forked, &error) < 0)
        fail_msg("fork: %s", error.sentence);
    assert_int_equal(forked.n_tokens, N_WHOLE);
    struct job rest = {
        .session = forked.session, .ids = fixture->ids + N_WHOLE, .n_ids = N_PROMPT - N_WHOLE, .max_tokens = N_TOKENS};
    jobs_run_alone(&fixture->service, &rest, 1);
    service_answer_assert_equal(&alone.answer, &rest.answer);
    assert_memory_not_equal(rest.answer.logprobs, fixture->truth.logprobs, N_TOKENS * sizeof(float));
    jobs_close_session(client, forked.session);
    jobs_free(&alone, 1);
    jobs_free(&rest, 1);
}

/* The same heads are without keys again, in a worker that knows nothing but rows, ids and which of them were decoded. */
static void a_profile_is_found_again(void **state)
{
    struct fixture *fixture = *state;
    struct hcattn *client = fixture->service.client;
    struct seen_profile before, after;
    struct murder murder = {.pid = service_process(&fixture->service, "hc-gpu-worker", 0), .at = 30};
    uint64_t undisturbed = generate_in_session(fixture, NULL);
    describe_profile(client, undisturbed, &before);
    assert_int_equal(before.n_tokens, N_PROMPT);
    uint32_t n_full = 0;
    for (uint32_t i = 0; i < N_HEADS; i++)
        n_full += before.classes[i] == HCATTN_HEAD_FULL;
    print_message("%u of %u heads keep keys\n", n_full, N_HEADS);
    assert_true(n_full > 0 && n_full < N_HEADS); /* there are both kinds */
    uint64_t disturbed = generate_in_session(fixture, &murder);
    assert_true(murder.done);
    describe_profile(client, disturbed, &after);
    assert_int_equal(after.n_tokens, before.n_tokens);
    assert_memory_equal(after.classes, before.classes, sizeof(before.classes));
    assert_memory_equal(after.kept_mass, before.kept_mass, sizeof(before.kept_mass));
    assert_was_restarted(&fixture->service, "hc-gpu-worker", 0, murder.pid);
    assert_fork_is_independent(fixture, disturbed, "rot3,mass=0.9");
    assert_fork_is_independent(fixture, disturbed, "klt1,deviation=0.05");
    assert_fork_is_independent(fixture, disturbed, "rot3,deviation=0.05,fastgen=0.6");
    jobs_close_session(client, disturbed);
    jobs_close_session(client, undisturbed);
}

int main(void)
{
#define TEST(function, variant)                                                                                        \
    {                                                                                                                  \
#function "." #variant, function, set_up, tear_down, &variant                                                  \
    }
    const struct CMUnitTest tests[] = {
        TEST(worker_killed, usual),
        TEST(store_killed, usual),
        TEST(coordinator_killed, usual),
        TEST(each_killed, q8_0),
        TEST(each_killed, exact),
        TEST(worker_killed, residency),
        TEST(a_profile_is_found_again, residency),
        TEST(killed_during_prefill, usual),
        TEST(killed_during_prefill, q8_0),
        TEST(an_idle_session_survives, usual),
        TEST(an_idle_session_survives, q8_0),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
