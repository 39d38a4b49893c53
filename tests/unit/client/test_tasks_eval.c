/* test_tasks_eval.c - `hcattn eval --tasks` against a coordinator that looks values up: sessions, forks, scores, output. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "client/command/eval_tasks.h"
#include "tests/unit/client/fake_coordinator.h"
#include "tests/unit/client/programs.h"

#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_IDS 4096u

struct service {
    pthread_mutex_t lock; /* held by the fake's thread while it serves */
    struct programs programs;
    struct fake_coordinator fake;
    char prompt[1 << 15]; /* that was tokenized last */
    size_t n_ids;         /* of it */
    struct {
        uint64_t id;
        char policy[64];
        uint64_t n_tokens; /* it holds */
    } sessions[64];
    size_t n_opened, n_closed, n_generated;
    char wrong[128]; /* what did not come as it should: the first */
    const char *refused;
    bool knows_nothing, many_tokens;
    size_t lost_after; /* so many generations no session is found; 0: never */
};

static void expect(struct service *service, bool is_so, const char *what)
{
    if (!is_so && !service->wrong[0])
        snprintf(service->wrong, sizeof(service->wrong), "%s", what);
}

static size_t session_at(struct service *service, uint64_t id)
{
    for (size_t i = 0; i < service->n_opened; i++)
        if (service->sessions[i].id == id)
            return i;
    expect(service, false, "a session that was never opened");
    return 0;
}

static void open_session(struct service *service, uint64_t id, const char *policy, uint64_t n_tokens)
{
    if (service->n_opened == 64)
        return;
    service->sessions[service->n_opened].id = id;
    service->sessions[service->n_opened].n_tokens = n_tokens;
    snprintf(service->sessions[service->n_opened++].policy, sizeof(service->sessions[0].policy), "%s", policy);
}

/* A token is four bytes, or one. */
static void tokenize(struct fake_coordinator *fake, Hcattn__Reply *reply, const Hcattn__Tokenize *asked)
{
    struct service *service = fake->context;
    static uint32_t ids[MAX_IDS];
    Hcattn__Tokenized tokenized = HCATTN__TOKENIZED__INIT;
    size_t n = strlen(asked->input->text) / (service->many_tokens ? 1 : 4);
    snprintf(service->prompt, sizeof(service->prompt), "%s", asked->input->text);
    service->n_ids = n < MAX_IDS ? n : MAX_IDS;
    for (size_t i = 0; i < service->n_ids; i++)
        ids[i] = (uint32_t)i; /* its place in the prompt */
    tokenized.ids = ids;
    tokenized.n_ids = service->n_ids;
    reply->reply_case = HCATTN__REPLY__REPLY_TOKENIZED;
    reply->tokenized = &tokenized;
    fake_coordinator_reply(fake, reply);
}

/* Input must go on where the session is. */
static void take(struct service *service, size_t session, const Hcattn__At *at, const Hcattn__Input *input)
{
    uint64_t n_tokens = service->sessions[session].n_tokens;
    expect(service, at && at->n_tokens == n_tokens, "at");
    if (!input || input->input_case != HCATTN__INPUT__INPUT_TOKENS)
        return;
    expect(service, input->no_bos && input->tokens->ids[0] == n_tokens, "tokens that follow what is there");
    service->sessions[session].n_tokens += input->tokens->n_ids;
}

/* What the list says of the key that is asked for; policy small has lost it. */
static void look_up(struct service *service, const char *policy, char ret_value[64])
{
    char line[128];
    const char *key = strrchr(service->prompt, '\n');
    snprintf(line, sizeof(line), "%s ", key);
    const char *found = strstr(service->prompt, line);
    snprintf(ret_value, 64, " none");
    if (found && found < key && strcmp(policy, "small") != 0 && !service->knows_nothing)
        snprintf(ret_value, 64, " %.*s", (int)strcspn(found + strlen(line), "\n"), found + strlen(line));
}

static void generate(struct fake_coordinator *fake, uint64_t request, const Hcattn__Generate *asked)
{
    struct service *service = fake->context;
    char value[64];
    uint32_t id = 7;
    size_t session = session_at(service, asked->session);
    uint64_t at = service->sessions[session].n_tokens;
    take(service, session, asked->at, asked->input);
    expect(service, service->sessions[session].n_tokens == service->n_ids, "the whole prompt before an answer");
    expect(service, asked->n_stop == 1 && strcmp(asked->stop[0], "\n") == 0, "the end of a line stops");
    expect(service, asked->max_tokens == 8, "max_tokens");
    expect(service, !asked->sampling || asked->sampling->temperature == 0, "greedy");
    look_up(service, service->sessions[session].policy, value);
    service->n_generated++;
    fake_coordinator_accepted(fake, request, at, NULL, 0);
    fake_coordinator_generated(fake, request, 0, &id, 1, value, false);
    fake_coordinator_done(fake, request, 1, "", service->n_ids + 1);
}

static void answer(struct fake_coordinator *fake, const Hcattn__Request *request)
{
    struct service *service = fake->context;
    Hcattn__Reply reply = HCATTN__REPLY__INIT;
    reply.request_id = request->request_id;
    if (service->lost_after && service->n_generated >= service->lost_after &&
        request->request_case != HCATTN__REQUEST__REQUEST_CLOSE_SESSION &&
        request->request_case != HCATTN__REQUEST__REQUEST_STATS) {
        fake_coordinator_error(fake, request->request_id, HCATTN__ERROR_CODE__UNAVAILABLE, "draining");
        return;
    }
    switch (request->request_case) {
    case HCATTN__REQUEST__REQUEST_RUN_JOB: {
        Hcattn__JobDone done = HCATTN__JOB_DONE__INIT;
        expect(service, request->run_job->job_case == HCATTN__RUN_JOB__JOB_GATHER_STATISTICS, "statistics only");
        reply.reply_case = HCATTN__REPLY__REPLY_JOB_DONE;
        reply.job_done = &done;
        fake_coordinator_reply(fake, &reply);
        return;
    }
    case HCATTN__REQUEST__REQUEST_TOKENIZE:
        tokenize(fake, &reply, request->tokenize);
        return;
    case HCATTN__REQUEST__REQUEST_OPEN_SESSION: {
        Hcattn__SessionOpened opened = HCATTN__SESSION_OPENED__INIT;
        const Hcattn__OpenSession *asked = request->open_session;
        expect(service, asked->exact && asked->exact->n_tokens == 0, "no exact tokens");
        expect(service, strcmp(asked->policy, "full") == 0, "the first session is full");
        open_session(service, asked->session, asked->policy, 0);
        opened.session = asked->session;
        reply.reply_case = HCATTN__REPLY__REPLY_SESSION_OPENED;
        reply.session_opened = &opened;
        fake_coordinator_reply(fake, &reply);
        return;
    }
    case HCATTN__REQUEST__REQUEST_APPEND: {
        Hcattn__Appended appended = HCATTN__APPENDED__INIT;
        size_t session = session_at(service, request->append->session);
        take(service, session, request->append->at, request->append->input);
        appended.n_tokens = service->sessions[session].n_tokens;
        expect(service, appended.n_tokens % 64 == 0, "whole blocks before a fork");
        expect(service, service->n_ids - appended.n_tokens >= 16, "a rest to be decoded");
        fake_coordinator_accepted(fake, request->request_id, 0, NULL, 0);
        reply.reply_case = HCATTN__REPLY__REPLY_APPENDED;
        reply.appended = &appended;
        fake_coordinator_reply(fake, &reply);
        return;
    }
    case HCATTN__REQUEST__REQUEST_FORK: {
        Hcattn__Forked forked = HCATTN__FORKED__INIT;
        const Hcattn__Fork *asked = request->fork;
        if (service->refused && strcmp(asked->policy, service->refused) == 0) {
            fake_coordinator_error(fake, request->request_id, HCATTN__ERROR_CODE__NO_MEMORY, "no room for a fork");
            return;
        }
        expect(service, asked->n_tokens > 0 && asked->n_tokens % 64 == 0, "a fork of what was appended");
        open_session(service, asked->new_session, asked->policy, asked->n_tokens);
        forked.session = asked->new_session;
        forked.n_tokens = asked->n_tokens;
        reply.reply_case = HCATTN__REPLY__REPLY_FORKED;
        reply.forked = &forked;
        fake_coordinator_reply(fake, &reply);
        return;
    }
    case HCATTN__REQUEST__REQUEST_SCORE: {
        Hcattn__ScoreDone done = HCATTN__SCORE_DONE__INIT;
        size_t session = session_at(service, request->score->session);
        expect(service, request->score->from == service->sessions[session].n_tokens, "all of the rest is decoded");
        take(service, session, request->score->at, request->score->input);
        fake_coordinator_accepted(fake, request->request_id, request->score->from, NULL, 0);
        reply.reply_case = HCATTN__REPLY__REPLY_SCORE_DONE;
        reply.score_done = &done;
        fake_coordinator_reply(fake, &reply);
        return;
    }
    case HCATTN__REQUEST__REQUEST_GENERATE:
        generate(fake, request->request_id, request->generate);
        return;
    case HCATTN__REQUEST__REQUEST_CLOSE_SESSION: {
        Hcattn__SessionClosed closed = HCATTN__SESSION_CLOSED__INIT;
        session_at(service, request->close_session->session);
        service->n_closed++;
        reply.reply_case = HCATTN__REPLY__REPLY_SESSION_CLOSED;
        reply.session_closed = &closed;
        fake_coordinator_reply(fake, &reply);
        return;
    }
    case HCATTN__REQUEST__REQUEST_STATS: {
        Hcattn__StatsReply stats = HCATTN__STATS_REPLY__INIT;
        stats.model = (char *)"tiny";
        reply.reply_case = HCATTN__REPLY__REPLY_STATS;
        reply.stats = &stats;
        fake_coordinator_reply(fake, &reply);
        return;
    }
    default:
        fake_coordinator_error(fake, request->request_id, HCATTN__ERROR_CODE__NOT_SUPPORTED, "not here");
    }
}

static enum fake_coordinator_step serve(struct fake_coordinator *fake, const Hcattn__Request *request)
{
    struct service *service = fake->context;
    pthread_mutex_lock(&service->lock);
    answer(fake, request);
    pthread_mutex_unlock(&service->lock);
    return FAKE_KNOWN;
}

static int setup(void **state)
{
    struct service *service = calloc(1, sizeof(*service));
    assert_non_null(service);
    pthread_mutex_init(&service->lock, NULL);
    programs_setup(&service->programs, "");
    service->programs.split = true;
    service->fake.handle = serve;
    service->fake.context = service;
    snprintf(service->fake.endpoint, sizeof(service->fake.endpoint), "ipc://%s/client.sock",
             service->programs.directory);
    fake_coordinator_start(&service->fake);
    *state = service;
    return 0;
}

static int teardown(void **state)
{
    struct service *service = *state;
    fake_coordinator_stop(&service->fake);
    programs_cleanup(&service->programs);
    free(service);
    return 0;
}

static int run(struct service *service, const char *const *arguments)
{
    pthread_mutex_lock(&service->lock);
    service->n_opened = service->n_closed = service->n_generated = 0;
    pthread_mutex_unlock(&service->lock);
    int status = programs_run(&service->programs, false, arguments);
    pthread_mutex_lock(&service->lock); /* what the fake's thread has written we may read */
    pthread_mutex_unlock(&service->lock);
    assert_string_equal(service->wrong, "");
    assert_int_equal(service->n_opened, service->n_closed);
    return status;
}
#define RUN(...) run(service, (const char *[]){"eval", "--no-divergence", __VA_ARGS__, NULL})

static const char *output(const struct service *service)
{
    static char text[1 << 16];
    programs_read(service->programs.out, text, sizeof(text));
    return text;
}

static void check_row(const json_t *rows, size_t i, json_int_t length, const char *preset, double full, double score)
{
    const json_t *row = json_array_get(rows, i);
    assert_string_equal(json_string_value(json_object_get(row, "task")), "kv");
    assert_int_equal(json_integer_value(json_object_get(row, "length")), length);
    assert_int_equal(json_integer_value(json_object_get(row, "samples")), 3);
    assert_string_equal(json_string_value(json_object_get(row, "preset")), preset);
    assert_true(fabs(json_real_value(json_object_get(row, "full")) - (full)) < 1e-9);
    assert_true(fabs(json_real_value(json_object_get(row, "score")) - (score)) < 1e-9);
    assert_true(fabs(json_real_value(json_object_get(row, "delta")) - (score - full)) < 1e-9);
    assert_true(json_is_true(json_object_get(row, "full_can")));
    double n_tokens = json_real_value(json_object_get(row, "prompt_tokens"));
    assert_true(n_tokens <= (double)length - 8 && n_tokens >= 0.95 * (double)length - 16);
}

static void test_json(void **state)
{
    struct service *service = *state;
    assert_int_equal(
        RUN("--tasks=kv", "--lengths=512,1k", "--samples=3", "--presets=default,q8_0,full,small", "--json"), 0);
    assert_int_equal(service->n_opened, 2 * 3 * 3);
    assert_int_equal(service->n_generated, 2 * 3 * 3);
    json_t *json = json_loads(output(service), 0, NULL);
    const json_t *rows = json_object_get(json, "tasks");
    assert_string_equal(json_string_value(json_object_get(json, "model")), "tiny");
    assert_int_equal(json_array_size(json_object_get(json, "rows")), 0);
    assert_int_equal(json_array_size(rows), 4);
    check_row(rows, 0, 512, "default", 1, 1);
    check_row(rows, 1, 512, "small", 1, 0);
    check_row(rows, 2, 1024, "default", 1, 1);
    check_row(rows, 3, 1024, "small", 1, 0);
    json_decref(json);
}

static void test_table(void **state)
{
    struct service *service = *state;
    assert_int_equal(RUN("--tasks=kv", "--lengths=512", "--samples=2", "--presets=default,small"), 0);
    assert_non_null(strstr(output(service), "\nTASK              TOKENS SAMPLES  FULL   default        small"));
    assert_non_null(strstr(output(service), "\nkv                   512       2  1.000  1.000          0.000 -1.000"));
    assert_non_null(strstr(output(service), "\nmean of what full attention can   1.000  1.000          0.000 -1.000"));
}

/* Once full attention cannot reach what is asked of it no more samples are made, and it counts in no mean. */
static void test_full_cannot(void **state)
{
    struct service *service = *state;
    service->knows_nothing = true;
    assert_int_equal(RUN("--tasks=kv", "--lengths=512", "--samples=5", "--presets=default"), 0);
    assert_int_equal(service->n_generated, 2 * 3);
    assert_non_null(
        strstr(output(service), "\nkv                   512       3  0.000  full attention cannot do it\n"));
    assert_null(strstr(output(service), "mean of"));
    assert_int_equal(RUN("--tasks=kv", "--lengths=512", "--samples=1", "--presets=default", "--json"), 0);
    assert_non_null(strstr(output(service), "\"full_can\": false"));
}

/* What does not work for one preset, or not at all. */
static void test_failures(void **state)
{
    struct service *service = *state;
    service->refused = "default";
    assert_int_equal(RUN("--tasks=kv", "--lengths=512", "--samples=2", "--presets=default,quality"), 0);
    assert_non_null(strstr(output(service), "\nkv                   512       2  1.000  -              1.000"));
    assert_true(programs_log_has(&service->programs, "kv of 512 tokens with default: no room for a fork"));
    service->refused = NULL;
    service->lost_after = 3; /* in the second sample */
    assert_int_equal(RUN("--tasks=kv", "--lengths=512", "--samples=2", "--presets=quality", "--connect-timeout=1s"), 1);
    assert_non_null(strstr(output(service), "\nkv                   512       1  1.000  1.000"));
    service->lost_after = 0;
    service->many_tokens = true;
    assert_int_equal(RUN("--tasks=niah_multikey_3", "--lengths=256", "--presets=quality"), 0);
    assert_true(programs_log_has(&service->programs, "niah_multikey_3 does not fit into 256 tokens"));
}

static void test_used_wrongly(void **state)
{
    struct service *service = *state;
    assert_int_equal(RUN("--presets=default"), 2);
    assert_true(programs_log_has(&service->programs, "nothing to do without --tasks"));
    assert_int_equal(RUN("--tasks=kv,qa,vt"), 2);
    assert_true(programs_log_has(&service->programs, "--tasks: there is no task 'qa'"));
    assert_int_equal(RUN("--tasks=kv,"), 2);
    assert_int_equal(RUN("--tasks=kv", "--presets=q8_0,full"), 2);
    static const char *const lengths[] = {"",    "k", "12", "512,", "512x", "1kk", "512,,1k", "99999999999999999999",
                                          "-512"};
    for (size_t i = 0; i < sizeof(lengths) / sizeof(lengths[0]); i++)
        assert_int_equal(RUN("--tasks=kv", "--lengths", lengths[i]), 2);
    assert_int_equal(service->n_opened, 0);
}

static void test_help(void **state)
{
    struct service *service = *state;
    assert_int_equal(RUN("--help"), 0);
    for (size_t i = 0; task_at(i); i++)
        assert_non_null(strstr(output(service), task_at(i)->name));
}

static void test_lists(void **state)
{
    (void)state;
    struct eval_tasks tasks = {.n_rows = 0};
    const char *wrong = NULL;
    assert_int_equal(eval_tasks_add(&tasks, "vt,kv,vt", &wrong), 0);
    assert_int_equal(tasks.n_tasks, 2);
    assert_string_equal(tasks.tasks[0]->name, "vt");
    assert_int_equal(eval_tasks_add(&tasks, "all", &wrong), 0);
    assert_int_equal(tasks.n_tasks, 9);
    assert_int_equal(eval_tasks_add_lengths(&tasks, "256,2k,4096K"), 0);
    assert_int_equal(tasks.n_lengths, 3);
    assert_int_equal(tasks.lengths[2], 4194304);
    eval_tasks_fini(&tasks);
    assert_true(eval_tasks_has_policy((const char *[]){"q8_0", "all"}, 2));
    assert_true(eval_tasks_has_policy((const char *[]){"rot2,mass=0.9"}, 1));
    assert_false(eval_tasks_has_policy((const char *[]){"h2o", "full"}, 2));
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        TEST(test_json),         TEST(test_table), TEST(test_full_cannot),      TEST(test_failures),
        TEST(test_used_wrongly), TEST(test_help),  cmocka_unit_test(test_lists)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
