/*
 * test_equivalence.c - what must not make a difference: chunks of the prefill, decode steps in place of it, the batch, the
 * number of stores, the transport. Identical tokens, log-probabilities and rows, on the real processes and the real model,
 * with full attention read from the stores at every length. What other policies add: test_policies.c.
 */
#include "tests/system/rows.h"
#include "tests/system/service.h"

#include <jansson.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { N_PROMPT = 420, N_TOKENS = 12, CALL_MS = 600000, N_SESSIONS = 4 };

/* What a run of the prompt gave: the truth comes from the first service. */
struct outcome {
    struct answer answer;
    uint8_t *rows; /* of the prompt */
    size_t n_bytes;
};

struct fixture {
    uint32_t ids[N_PROMPT];
    struct outcome truth;
};

static int set_up(void **state)
{
    static struct fixture fixture;
    json_error_t error;
    json_t *root = json_load_file("tests/golden/continuations.json", 0, &error);
    assert_non_null(root);
    json_t *list = json_object_get(root, "continuations");
    json_t *ids = json_object_get(json_array_get(list, json_array_size(list) - 1), "prompt_ids");
    assert_true(json_array_size(ids) >= N_PROMPT);
    for (size_t i = 0; i < N_PROMPT; i++)
        fixture.ids[i] = (uint32_t)json_integer_value(json_array_get(ids, i));
    json_decref(root);
    *state = &fixture;
    return 0;
}

static int tear_down(void **state)
{
    struct fixture *fixture = *state;
    service_answer_free(&fixture->truth.answer);
    free(fixture->truth.rows);
    return 0;
}

static uint64_t open_session(struct hcattn *client)
{
    struct hcattn_session session;
    struct hcattn_error error = {0};
    if (hcattn_open_session(client, NULL, CALL_MS, &session, &error) < 0)
        fail_msg("open session: %s", error.sentence);
    return session.session;
}

static void generate(struct hcattn *client, uint64_t session, const uint32_t *ids, size_t n_ids, struct answer *answer)
{
    struct hcattn_generate request = {.session = session,
                                      .input = {.ids = ids, .n_ids = n_ids},
                                      .at = HCATTN_AT_ANY,
                                      .max_tokens = N_TOKENS,
                                      .logprobs = true,
                                      .ignore_end = true};
    struct hcattn_error error = {0};
    if (service_generate(client, &request, answer, &error) < 0)
        fail_msg("generate: %s", error.sentence);
}

/* `more` is added to what every service here has; closed by NULL. */
static void start(struct service *service, const char *const *more, const char *const *environment)
{
    const char *arguments[24] = {"--model", service_real_model(), "--memory", "64MiB", "--policy",
                                 "full",    "--exact-tokens",     "0"};
    uint32_t n = 8;
    for (; *more != NULL; more++)
        arguments[n++] = *more;
    assert_true(n < sizeof(arguments) / sizeof(arguments[0]));
    service_start(service, arguments, environment);
}

static void run(const struct fixture *fixture, const char *const *more, const char *const *environment,
                uint32_t n_stores, struct outcome *outcome)
{
    struct service service;
    start(&service, more, environment);
    uint64_t session = open_session(service.client);
    generate(service.client, session, fixture->ids, N_PROMPT, &outcome->answer);
    outcome->rows = rows_of_session(&service, n_stores, session, N_PROMPT, &outcome->n_bytes);
    assert_int_equal(hcattn_close_session(service.client, session, CALL_MS, NULL, NULL), 0);
    service_stop(&service);
}

/* The first test that runs makes the truth: one store, routed, default chunk. */
static const struct outcome *truth(struct fixture *fixture)
{
    if (fixture->truth.rows == NULL)
        run(fixture, (const char *const[]){"--transport", "routed", NULL}, NULL, 1, &fixture->truth);
    return &fixture->truth;
}

static void check(struct fixture *fixture, const char *const *more, const char *const *environment, uint32_t n_stores)
{
    const struct outcome *expected = truth(fixture);
    struct outcome outcome = {0};
    run(fixture, more, environment, n_stores, &outcome);
    service_answer_assert_equal(&expected->answer, &outcome.answer);
    assert_int_equal(expected->n_bytes, outcome.n_bytes);
    assert_memory_equal(expected->rows, outcome.rows, outcome.n_bytes);
    service_answer_free(&outcome.answer);
    free(outcome.rows);
}

static void prefill_in_chunks(void **state)
{
    const char *const chunks[] = {"HCATTN_PREFILL_CHUNK=1", "HCATTN_PREFILL_CHUNK=7", "HCATTN_PREFILL_CHUNK=100",
                                  "HCATTN_PREFILL_CHUNK=1000"};
    for (size_t i = 0; i < sizeof(chunks) / sizeof(chunks[0]); i++)
        check(*state, (const char *const[]){NULL}, (const char *const[]){chunks[i], NULL}, 1);
}

static void two_and_three_stores(void **state)
{
    check(*state, (const char *const[]){"--stores", "2", NULL}, NULL, 2);
    check(*state, (const char *const[]){"--stores", "3", "--transport", "routed", NULL}, NULL, 3);
}

static void direct_transport(void **state)
{
    check(*state, (const char *const[]){"--stores", "2", "--transport", "direct", NULL}, NULL, 2);
}

static void one_thread(void **state)
{
    check(*state, (const char *const[]){"--threads", "1", NULL}, NULL, 1);
}

struct scores {
    float *logprobs;
    uint32_t n;
};

static int take_scores(void *context, const struct hcattn_scored *scored)
{
    struct scores *scores = context;
    for (size_t i = 0; i < scored->n_scores; i++) {
        assert_int_equal(scored->first + i, scores->n + 1);
        scores->logprobs[scores->n++] = scored->scores[i].logprob;
    }
    return 0;
}

/* All positions but the first as decode steps: the same rows, and the same tokens afterwards. */
static void decode_steps_in_place_of_prefill(void **state)
{
    struct fixture *fixture = *state;
    const struct outcome *expected = truth(fixture);
    struct service service;
    start(&service, (const char *const[]){"--stores", "2", NULL}, NULL);
    uint64_t session = open_session(service.client);
    struct scores scores = {.logprobs = calloc(N_PROMPT + N_TOKENS, sizeof(float))};
    uint32_t ids[N_PROMPT + N_TOKENS];
    memcpy(ids, fixture->ids, sizeof(fixture->ids));
    memcpy(ids + N_PROMPT, expected->answer.ids, N_TOKENS * sizeof(uint32_t));
    struct hcattn_score score = {.session = session, .input = {.ids = ids, .n_ids = N_PROMPT + N_TOKENS}, .from = 1};
    struct hcattn_events events = {.context = &scores, .scored = take_scores};
    struct hcattn_error error = {0};
    struct hcattn_score_done done;
    if (hcattn_score(service.client, &score, &events, CALL_MS, &done, &error) < 0)
        fail_msg("score: %s", error.sentence);
    assert_int_equal(scores.n, N_PROMPT + N_TOKENS - 1);
    assert_int_equal(done.n_tokens, N_PROMPT + N_TOKENS);
    assert_memory_equal(scores.logprobs + N_PROMPT - 1, expected->answer.logprobs, N_TOKENS * sizeof(float));
    size_t n_bytes;
    uint8_t *rows = rows_of_session(&service, 2, session, N_PROMPT, &n_bytes);
    assert_memory_equal(rows, expected->rows, n_bytes);
    free(rows);
    free(scores.logprobs);
    service_stop(&service);
}

/* ---- batches ---- */

struct concurrent {
    const struct service *service;
    const uint32_t *ids;
    size_t n_ids;
    struct answer answer;
};

static void *generate_concurrently(void *context)
{
    struct concurrent *job = context;
    struct hcattn_config config = {.runtime_dir = job->service->directory};
    struct hcattn *client;
    assert_int_equal(hcattn_open(&config, &client, NULL), 0);
    uint64_t session = open_session(client);
    generate(client, session, job->ids, job->n_ids, &job->answer);
    hcattn_close_session(client, session, CALL_MS, NULL, NULL);
    hcattn_close(client);
    return NULL;
}

/* Sessions of different lengths side by side, prefilling and decoding in the same steps, equal each alone. */
static void a_batch_of_sessions(void **state)
{
    struct fixture *fixture = *state;
    struct service service;
    struct concurrent jobs[N_SESSIONS];
    pthread_t threads[N_SESSIONS];
    const size_t lengths[N_SESSIONS] = {N_PROMPT, 1, 150, 63};
    start(&service, (const char *const[]){"--stores", "2", NULL}, NULL);
    for (uint32_t i = 0; i < N_SESSIONS; i++) {
        jobs[i] = (struct concurrent){.service = &service, .ids = fixture->ids, .n_ids = lengths[i]};
        assert_int_equal(pthread_create(&threads[i], NULL, generate_concurrently, &jobs[i]), 0);
    }
    for (uint32_t i = 0; i < N_SESSIONS; i++)
        pthread_join(threads[i], NULL);
    service_answer_assert_equal(&truth(fixture)->answer, &jobs[0].answer);
    for (uint32_t i = 0; i < N_SESSIONS; i++) {
        struct answer alone = {0};
        service_generate_ids(service.client, fixture->ids, lengths[i], N_TOKENS, &alone);
        service_answer_assert_equal(&alone, &jobs[i].answer);
        service_answer_free(&alone);
        service_answer_free(&jobs[i].answer);
    }
    assert_int_equal(rows_n_used_blocks(&service, 2), 0);
    service_stop(&service);
}

/* A session that is continued: prompt in two parts, with an Append, with generations in between. */
static void a_session_in_parts(void **state)
{
    struct fixture *fixture = *state;
    struct service service;
    struct answer answer = {0}, whole = {0};
    struct hcattn_error error = {0};
    start(&service, (const char *const[]){NULL}, NULL);
    uint64_t session = open_session(service.client);
    struct hcattn_input first = {.ids = fixture->ids, .n_ids = 200};
    struct hcattn_appended appended;
    if (hcattn_append(service.client, session, &first, 0, NULL, CALL_MS, &appended, &error) < 0)
        fail_msg("append: %s", error.sentence);
    assert_int_equal(appended.n_tokens, 200);
    generate(service.client, session, fixture->ids + 200, N_PROMPT - 200, &answer);
    service_answer_assert_equal(&truth(fixture)->answer, &answer);
    /* go on with nothing new: the last token has an id but no rows yet */
    struct answer more = {0};
    generate(service.client, session, NULL, 0, &more);
    struct hcattn_generate longer = {.session = open_session(service.client),
                                     .input = {.ids = fixture->ids, .n_ids = N_PROMPT},
                                     .at = HCATTN_AT_ANY,
                                     .max_tokens = 2 * N_TOKENS,
                                     .logprobs = true,
                                     .ignore_end = true};
    if (service_generate(service.client, &longer, &whole, &error) < 0)
        fail_msg("generate: %s", error.sentence);
    assert_int_equal(whole.n, 2 * N_TOKENS);
    assert_memory_equal(whole.ids + N_TOKENS, more.ids, N_TOKENS * sizeof(uint32_t));
    assert_memory_equal(whole.logprobs + N_TOKENS, more.logprobs, N_TOKENS * sizeof(float));
    service_answer_free(&answer);
    service_answer_free(&more);
    service_answer_free(&whole);
    service_stop(&service);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(prefill_in_chunks),
        cmocka_unit_test(two_and_three_stores),
        cmocka_unit_test(direct_transport),
        cmocka_unit_test(one_thread),
        cmocka_unit_test(decode_steps_in_place_of_prefill),
        cmocka_unit_test(a_batch_of_sessions),
        cmocka_unit_test(a_session_in_parts),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
