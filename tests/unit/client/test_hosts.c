/* test_hosts.c - one client of several hosts: where sessions go, how they are found, and what is left when a host is gone. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "client/hcattn.h"
#include "client/hcattn_jobs.h"
#include "common/clock.h"
#include "tests/unit/client/fake_coordinator.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MAX_SESSIONS 64
#define MIB          ((uint64_t)1 << 20)

/* A host, as its coordinator tells of it. */
struct place {
    struct fake_coordinator fake;
    const char *model, *version;
    _Atomic uint64_t free_bytes;
    _Atomic bool draining;
    _Atomic bool frozen;           /* takes nothing and answers nothing, its connections stay */
    _Atomic bool freeze_in_stream; /* after the first token of the next Generate */
    _Atomic uint64_t sessions[MAX_SESSIONS];
    _Atomic unsigned n_sessions;
    _Atomic unsigned n_opened, n_generated, n_tokenized, n_closed, n_forked, n_jobs, n_other;
};

struct bench {
    char directory[64];
    struct place places[3];
    bool runs[3];
    char list[600];
    struct hcattn *client;
};

static void add_session(struct place *place, uint64_t session)
{
    assert_true(place->n_sessions < MAX_SESSIONS);
    place->sessions[place->n_sessions] = session;
    place->n_sessions++;
}

static void remove_session(struct place *place, uint64_t session)
{
    for (unsigned i = 0; i < place->n_sessions; i++)
        if (place->sessions[i] == session) {
            place->sessions[i] = place->sessions[place->n_sessions - 1];
            place->n_sessions--;
        }
}

static bool has_session(const struct place *place, uint64_t session)
{
    for (unsigned i = 0; i < place->n_sessions; i++)
        if (place->sessions[i] == session)
            return true;
    return false;
}

static void answer_stats(struct place *place, Hcattn__Reply *reply)
{
    Hcattn__StatsReply stats = HCATTN__STATS_REPLY__INIT;
    Hcattn__ProcessStats store = HCATTN__PROCESS_STATS__INIT, *stores = &store;
    Hcattn__SessionStats sessions[MAX_SESSIONS], *pointers[MAX_SESSIONS];
    store.program = (char *)"hc-value-store";
    store.bytes_total = place->free_bytes + 10 * MIB;
    store.bytes_used = 10 * MIB;
    stats.model = (char *)(place->model ? place->model : "tiny");
    stats.version = (char *)(place->version ? place->version : "1");
    stats.draining = place->draining;
    stats.default_max_tokens = 256;
    stats.store_bytes_per_token = 4096; /* a session that holds nothing yet may take 1 MiB */
    stats.processes = &stores;
    stats.n_processes = 1;
    stats.sessions = pointers;
    stats.n_sessions = place->n_sessions;
    for (unsigned i = 0; i < place->n_sessions; i++) {
        hcattn__session_stats__init(&sessions[i]);
        sessions[i].session = place->sessions[i];
        pointers[i] = &sessions[i];
    }
    reply->reply_case = HCATTN__REPLY__REPLY_STATS;
    reply->stats = &stats;
    fake_coordinator_reply(&place->fake, reply);
}

static void wait_frozen(const struct place *place)
{
    while (place->frozen && !place->fake.stop)
        clock_sleep_us(2000);
}

static void stream(struct place *place, uint64_t id)
{
    uint32_t ids[] = {1, 2, 3};
    place->n_generated++;
    fake_coordinator_accepted(&place->fake, id, 0, NULL, 0);
    fake_coordinator_generated(&place->fake, id, 0, ids, 1, "a", false);
    if (place->freeze_in_stream) {
        place->freeze_in_stream = false;
        place->frozen = true;
        wait_frozen(place);
        return;
    }
    fake_coordinator_generated(&place->fake, id, 1, ids + 1, 2, "bc", false);
    fake_coordinator_done(&place->fake, id, 3, "", 3);
}

static void open_session(struct place *place, const Hcattn__Request *request, Hcattn__Reply *reply)
{
    Hcattn__SessionOpened opened = HCATTN__SESSION_OPENED__INIT;
    place->n_opened++;
    add_session(place, request->open_session->session);
    opened.session = request->open_session->session;
    opened.policy = (char *)"default";
    reply->reply_case = HCATTN__REPLY__REPLY_SESSION_OPENED;
    reply->session_opened = &opened;
    fake_coordinator_reply(&place->fake, reply);
}

static void close_session(struct place *place, const Hcattn__Request *request, Hcattn__Reply *reply)
{
    Hcattn__SessionClosed closed = HCATTN__SESSION_CLOSED__INIT;
    place->n_closed++;
    remove_session(place, request->close_session->session);
    reply->reply_case = HCATTN__REPLY__REPLY_SESSION_CLOSED;
    reply->session_closed = &closed;
    fake_coordinator_reply(&place->fake, reply);
}

static void fork_session(struct place *place, const Hcattn__Request *request, Hcattn__Reply *reply)
{
    Hcattn__Forked forked = HCATTN__FORKED__INIT;
    place->n_forked++;
    add_session(place, request->fork->new_session);
    forked.session = request->fork->new_session;
    reply->reply_case = HCATTN__REPLY__REPLY_FORKED;
    reply->forked = &forked;
    fake_coordinator_reply(&place->fake, reply);
}

static enum fake_coordinator_step serve(struct fake_coordinator *fake, const Hcattn__Request *request)
{
    struct place *place = fake->context;
    uint64_t id = request->request_id;
    Hcattn__Reply reply = HCATTN__REPLY__INIT;
    Hcattn__Tokenized tokenized = HCATTN__TOKENIZED__INIT;
    Hcattn__JobDone job = HCATTN__JOB_DONE__INIT;
    reply.request_id = id;
    wait_frozen(place);
    switch (request->request_case) {
    case HCATTN__REQUEST__REQUEST_STATS:
        answer_stats(place, &reply);
        break;
    case HCATTN__REQUEST__REQUEST_OPEN_SESSION:
        open_session(place, request, &reply);
        break;
    case HCATTN__REQUEST__REQUEST_CLOSE_SESSION:
        close_session(place, request, &reply);
        break;
    case HCATTN__REQUEST__REQUEST_FORK:
        fork_session(place, request, &reply);
        break;
    case HCATTN__REQUEST__REQUEST_GENERATE:
        if (has_session(place, request->generate->session))
            stream(place, id);
        else
            fake_coordinator_error(fake, id, HCATTN__ERROR_CODE__NOT_FOUND, "no such session");
        break;
    case HCATTN__REQUEST__REQUEST_TOKENIZE:
        place->n_tokenized++;
        reply.reply_case = HCATTN__REPLY__REPLY_TOKENIZED;
        reply.tokenized = &tokenized;
        fake_coordinator_reply(fake, &reply);
        break;
    case HCATTN__REQUEST__REQUEST_RUN_JOB:
        place->n_jobs++;
        reply.reply_case = HCATTN__REPLY__REPLY_JOB_DONE;
        reply.job_done = &job;
        fake_coordinator_reply(fake, &reply);
        break;
    default:
        place->n_other++;
        fake_coordinator_error(fake, id, HCATTN__ERROR_CODE__NOT_SUPPORTED, "not here");
    }
    return FAKE_KNOWN;
}

/* ---- the bench ---- */

static int setup(void **state)
{
    struct bench *bench = calloc(1, sizeof(*bench));
    assert_non_null(bench);
    snprintf(bench->directory, sizeof(bench->directory), "/tmp/hcattn-test-XXXXXX");
    assert_non_null(mkdtemp(bench->directory));
    for (unsigned i = 0; i < 3; i++) {
        struct place *place = &bench->places[i];
        snprintf(place->fake.endpoint, sizeof(place->fake.endpoint), "ipc://%s/host%u", bench->directory, i);
        place->fake.handle = serve;
        place->fake.context = place;
        place->free_bytes = 100 * MIB;
        snprintf(bench->list + strlen(bench->list), sizeof(bench->list) - strlen(bench->list), "%s%s", i ? ", " : "",
                 place->fake.endpoint);
    }
    *state = bench;
    return 0;
}

static void start(struct bench *bench, unsigned i)
{
    fake_coordinator_start(&bench->places[i].fake);
    bench->runs[i] = true;
}

static void stop(struct bench *bench, unsigned i)
{
    bench->places[i].frozen = false;
    if (bench->runs[i])
        fake_coordinator_stop(&bench->places[i].fake);
    bench->places[i].fake.stop = false;
    bench->runs[i] = false;
}

static void connect_client(struct bench *bench, uint32_t lost_ms)
{
    struct hcattn_config config = {
        .endpoint = bench->list, .connect_timeout_ms = 3000, .lost_timeout_ms = lost_ms ? lost_ms : 20000};
    assert_int_equal(hcattn_open(&config, &bench->client, NULL), 0);
}

static int teardown(void **state)
{
    struct bench *bench = *state;
    hcattn_close(bench->client);
    for (unsigned i = 0; i < 3; i++)
        stop(bench, i);
    char command[128];
    snprintf(command, sizeof(command), "rm -r %s", bench->directory);
    int result = system(command);
    free(bench);
    return result;
}

static void start_all(struct bench *bench, uint32_t lost_ms)
{
    for (unsigned i = 0; i < 3; i++)
        start(bench, i);
    connect_client(bench, lost_ms);
}

/* Opens one; returns the index of its host. */
static size_t open_one(struct bench *bench, uint64_t *ret_session)
{
    struct hcattn_session session;
    struct hcattn_error error;
    if (hcattn_open_session(bench->client, NULL, 0, &session, &error) < 0)
        fail_msg("%s", error.sentence);
    assert_true(has_session(&bench->places[session.host], session.session));
    if (ret_session)
        *ret_session = session.session;
    return session.host;
}

static int generate(struct bench *bench, uint64_t session, struct hcattn_error *error)
{
    uint32_t id = 5;
    struct hcattn_generate generate = {.session = session, .at = HCATTN_AT_ANY, .input = {.ids = &id, .n_ids = 1}};
    struct hcattn_finished finished;
    return hcattn_generate(bench->client, &generate, NULL, 0, &finished, error);
}

static void expect(const struct hcattn_error *error, enum hcattn_code code, const char *part)
{
    if (error->code != code || !strstr(error->sentence, part))
        fail_msg("%s: \"%s\", not %s: \"%s\"", hcattn_code_name(error->code), error->sentence, hcattn_code_name(code),
                 part);
}

static uint64_t ms_since(uint64_t us)
{
    return (clock_now_us() - us) / 1000;
}

/* ---- where sessions go ---- */

static void test_most_room(void **state)
{
    struct bench *bench = *state;
    start_all(bench, 0);
    assert_int_equal(hcattn_n_hosts(bench->client), 3);
    assert_string_equal(hcattn_host(bench->client, 2), bench->places[2].fake.endpoint);
    assert_null(hcattn_host(bench->client, 3));
    bench->places[1].free_bytes = 200 * MIB;
    assert_int_equal(open_one(bench, NULL), 1);
    bench->places[2].free_bytes = 300 * MIB;
    assert_int_equal(open_one(bench, NULL), 2);
    bench->places[2].draining = true;
    assert_int_equal(open_one(bench, NULL), 1);
    bench->places[0].free_bytes = 199 * MIB; /* host 1 has two sessions by now, each of which may take 1 MiB */
    assert_int_equal(open_one(bench, NULL), 0);
}

/* Equal hosts get equal shares: what is open and still empty counts. */
static void test_shares(void **state)
{
    struct bench *bench = *state;
    start_all(bench, 0);
    unsigned n[3] = {0};
    for (int i = 0; i < 12; i++)
        n[open_one(bench, NULL)]++;
    for (int i = 0; i < 3; i++)
        assert_int_equal(n[i], 4);
}

static void test_calls_go_to_the_sessions_host(void **state)
{
    struct bench *bench = *state;
    uint64_t sessions[6];
    size_t hosts[6];
    struct hcattn_forked forked;
    start_all(bench, 0);
    for (int i = 0; i < 6; i++)
        hosts[i] = open_one(bench, &sessions[i]);
    for (int i = 0; i < 6; i++) {
        struct place *place = &bench->places[hosts[i]];
        unsigned n_generated = place->n_generated, n_forked = place->n_forked, n_closed = place->n_closed;
        assert_int_equal(generate(bench, sessions[i], NULL), 0);
        assert_int_equal(place->n_generated, n_generated + 1);
        struct hcattn_fork fork = {.session = sessions[i]};
        assert_int_equal(hcattn_fork(bench->client, &fork, 0, &forked, NULL), 0);
        assert_int_equal(place->n_forked, n_forked + 1);
        assert_int_equal(generate(bench, forked.session, NULL), 0);
        assert_int_equal(place->n_generated, n_generated + 2);
        assert_int_equal(hcattn_close_session(bench->client, sessions[i], 0, NULL, NULL), 0);
        assert_int_equal(place->n_closed, n_closed + 1);
    }
}

static void test_sessions_of_others(void **state)
{
    struct bench *bench = *state;
    struct hcattn_error error;
    start_all(bench, 0);
    add_session(&bench->places[2], 77);
    assert_int_equal(generate(bench, 77, &error), 0);
    assert_int_equal(bench->places[2].n_generated, 1);
    assert_int_equal(generate(bench, 78, &error), -ENOENT);
    expect(&error, HCATTN_NOT_FOUND, "session 000000000000004e is on none of the 3 hosts");
    /* One that has gone from its host is looked for again. */
    bench->places[2].n_sessions = 0;
    assert_int_equal(generate(bench, 77, &error), -ENOENT);
    add_session(&bench->places[0], 77);
    assert_int_equal(generate(bench, 77, &error), 0);
    assert_int_equal(bench->places[0].n_generated, 1);
    stop(bench, 1);
    assert_int_equal(generate(bench, 79, &error), -ENOTCONN);
    expect(&error, HCATTN_UNAVAILABLE, "is on no host that answers; ipc://");
    expect(&error, HCATTN_UNAVAILABLE, "host1 does not");
}

static void test_models(void **state)
{
    struct bench *bench = *state;
    struct hcattn_session session;
    struct hcattn_error error;
    bench->places[1].model = "other";
    bench->places[1].free_bytes = 500 * MIB;
    bench->places[2].version = "2";
    bench->places[2].free_bytes = 400 * MIB;
    start_all(bench, 0);
    for (int i = 0; i < 4; i++)
        assert_int_equal(open_one(bench, NULL), 0);
    stop(bench, 0);
    assert_int_equal(hcattn_open_session(bench->client, NULL, 0, &session, &error), -ENOTCONN);
    expect(&error, HCATTN_UNAVAILABLE, "no host with tiny (version 1) answers; ipc://");
    expect(&error, HCATTN_UNAVAILABLE, "host1 has other (version 1)");
}

static void test_not_ready(void **state)
{
    struct bench *bench = *state;
    bench->places[0].fake.not_ready = true;
    bench->places[0].free_bytes = 500 * MIB;
    bench->places[1].fake.not_ready = true;
    start_all(bench, 0);
    for (int i = 0; i < 3; i++)
        assert_int_equal(open_one(bench, NULL), 2);
    bench->places[2].draining = true; /* then one that may become ready */
    assert_true(open_one(bench, NULL) < 2);
}

/* ---- what is any host's, and what is one's ---- */

static void test_any_host(void **state)
{
    struct bench *bench = *state;
    struct hcattn_input input = {.text = "hello"};
    struct hcattn_tokens tokens;
    struct hcattn_health health;
    start(bench, 1);
    start(bench, 2);
    connect_client(bench, 0);
    uint64_t begun_us = clock_now_us();
    assert_int_equal(hcattn_tokenize(bench->client, &input, 0, &tokens, NULL), 0);
    hcattn_tokens_free(&tokens);
    assert_true(ms_since(begun_us) < 2500);
    assert_int_equal(bench->places[1].n_tokenized, 1);
    assert_int_equal(hcattn_health(bench->client, 0, &health, NULL), 0);
    assert_true(health.coordinator == bench->places[1].fake.incarnation);
    stop(bench, 1);
    assert_int_equal(hcattn_tokenize(bench->client, &input, 0, &tokens, NULL), 0);
    hcattn_tokens_free(&tokens);
    assert_int_equal(bench->places[2].n_tokenized, 1);
    struct hcattn_gather_statistics gather = {.again = true};
    assert_int_equal(hcattn_gather_statistics(bench->client, &gather, NULL, 0, NULL, NULL), 0);
    assert_int_equal(bench->places[2].n_jobs, 1);
}

static void test_one_host(void **state)
{
    struct bench *bench = *state;
    struct hcattn_error error;
    struct hcattn_sessions sessions;
    start_all(bench, 0);
    assert_int_equal(hcattn_drain(bench->client, false, NULL, NULL, 0, NULL, &error), -EINVAL);
    expect(&error, HCATTN_INVALID_ARGUMENT, "this is about one host, and 3 are given: name one of them");
    assert_int_equal(hcattn_set_transport(bench->client, "ring", 0, &error), -EINVAL);
    assert_int_equal(hcattn_set_policy(bench->client, 0, "full", 0, NULL, &error), -EINVAL);
    assert_int_equal(hcattn_list_sessions(bench->client, 0, &sessions, &error), -EINVAL);
    for (int i = 0; i < 3; i++)
        assert_int_equal(bench->places[i].n_other, 0);
    uint64_t session;
    size_t host = open_one(bench, &session);
    assert_int_equal(hcattn_set_policy(bench->client, session, "full", 0, NULL, &error), -EOPNOTSUPP);
    assert_int_equal(bench->places[host].n_other, 1);
}

/* ---- hosts that are gone ---- */

static void test_absent_from_the_start(void **state)
{
    struct bench *bench = *state;
    start(bench, 2);
    connect_client(bench, 0);
    uint64_t begun_us = clock_now_us();
    assert_int_equal(open_one(bench, NULL), 2);
    assert_true(ms_since(begun_us) < 2500);
    begun_us = clock_now_us();
    for (int i = 0; i < 5; i++) /* the others are left alone meanwhile */
        assert_int_equal(open_one(bench, NULL), 2);
    assert_true(ms_since(begun_us) < 2500);
}

static void test_nobody(void **state)
{
    struct bench *bench = *state;
    struct hcattn_session session;
    struct hcattn_error error;
    connect_client(bench, 0);
    uint64_t begun_us = clock_now_us();
    assert_int_equal(hcattn_open_session(bench->client, NULL, 500, &session, &error), -ENOTCONN);
    expect(&error, HCATTN_UNAVAILABLE, "none of 3 hosts answers; the first: no coordinator answers at ipc://");
    assert_true(ms_since(begun_us) < 2000);
    hcattn_cancel(bench->client);
    assert_int_equal(hcattn_open_session(bench->client, NULL, 0, &session, &error), -ECANCELED);
}

static void test_lost_in_a_stream(void **state)
{
    struct bench *bench = *state;
    struct hcattn_error error;
    uint64_t session, elsewhere;
    start_all(bench, 1500);
    bench->places[1].free_bytes = 500 * MIB;
    assert_int_equal(open_one(bench, &session), 1);
    bench->places[1].freeze_in_stream = true;
    uint64_t begun_us = clock_now_us();
    assert_int_equal(generate(bench, session, &error), -ENOTCONN);
    expect(&error, HCATTN_UNAVAILABLE, "host1 has not answered for");
    assert_true(ms_since(begun_us) >= 1500 && ms_since(begun_us) < 6000);

    begun_us = clock_now_us(); /* at once, while it is left alone */
    assert_int_equal(generate(bench, session, &error), -ENOTCONN);
    if (ms_since(begun_us) < 900)
        expect(&error, HCATTN_UNAVAILABLE, "host1, does not answer; it is tried again in");
    assert_int_not_equal(open_one(bench, &elsewhere), 1);
    assert_int_equal(generate(bench, elsewhere, &error), 0);

    /* It comes back; what was asked of it meanwhile has not waited for it. */
    unsigned n_generated = bench->places[1].n_generated;
    bench->places[1].frozen = false;
    uint64_t deadline_us = clock_deadline_us(20000000);
    int result;
    while ((result = generate(bench, session, &error)) == -ENOTCONN && clock_now_us() < deadline_us)
        clock_sleep_us(100000);
    assert_int_equal(result, 0);
    assert_int_equal(bench->places[1].n_generated, n_generated + 1);
    assert_int_equal(open_one(bench, NULL), 1);
}

/* What was asked of a host that is gone is not done when it is back. */
static void test_nothing_waits_for_a_lost_host(void **state)
{
    struct bench *bench = *state;
    struct hcattn_error error;
    uint64_t session;
    start_all(bench, 500);
    bench->places[0].free_bytes = 500 * MIB;
    assert_int_equal(open_one(bench, &session), 0);
    stop(bench, 0);
    assert_int_equal(generate(bench, session, &error), -ENOTCONN);
    start(bench, 0);
    clock_sleep_us(1000000);
    assert_int_equal(bench->places[0].n_generated, 0);
    uint64_t deadline_us = clock_deadline_us(20000000);
    int result;
    while ((result = generate(bench, session, &error)) == -ENOTCONN && clock_now_us() < deadline_us)
        clock_sleep_us(100000);
    assert_int_equal(result, 0);
    assert_int_equal(bench->places[0].n_generated, 1);
}

/* ---- what is no list ---- */

static void refuse(const char *endpoint, const char *server_key, const char *key, const char *part)
{
    struct hcattn *client = NULL;
    struct hcattn_error error;
    struct hcattn_config config = {.endpoint = endpoint, .server_key = server_key, .key = key};
    assert_int_equal(hcattn_open(&config, &client, &error), -EINVAL);
    expect(&error, HCATTN_INVALID_ARGUMENT, part);
    assert_null(client);
}

static void test_what_is_no_list(void **state)
{
    (void)state;
    char many[65 * 16] = "";
    refuse("", NULL, NULL, "no endpoint to connect to");
    refuse(",", NULL, NULL, "an endpoint of the list is empty");
    refuse("ipc:///tmp/a,", NULL, NULL, "an endpoint of the list is empty");
    refuse("ipc:///tmp/a, ,ipc:///tmp/b", NULL, NULL, "an endpoint of the list is empty");
    refuse("ipc:///tmp/a,ipc:///tmp/a", NULL, NULL, "ipc:///tmp/a is named twice");
    refuse("ipc:///tmp/a,hello", NULL, NULL, "no endpoint to connect to: hello");
    refuse("ipc:///tmp/a,tcp://127.0.0.1:1#/none", NULL, NULL,
           "a server key for tcp://127.0.0.1:1, but no key of our own");
    refuse("tcp://127.0.0.1:1", NULL, "/none", "/none: No such file");
    for (int i = 0; i < 65; i++)
        snprintf(many + strlen(many), sizeof(many) - strlen(many), "%sipc:///tmp/%d", i ? "," : "", i);
    refuse(many, NULL, NULL, "more than 64 endpoints");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_most_room, setup, teardown),
        cmocka_unit_test_setup_teardown(test_shares, setup, teardown),
        cmocka_unit_test_setup_teardown(test_calls_go_to_the_sessions_host, setup, teardown),
        cmocka_unit_test_setup_teardown(test_sessions_of_others, setup, teardown),
        cmocka_unit_test_setup_teardown(test_models, setup, teardown),
        cmocka_unit_test_setup_teardown(test_not_ready, setup, teardown),
        cmocka_unit_test_setup_teardown(test_any_host, setup, teardown),
        cmocka_unit_test_setup_teardown(test_one_host, setup, teardown),
        cmocka_unit_test_setup_teardown(test_absent_from_the_start, setup, teardown),
        cmocka_unit_test_setup_teardown(test_nobody, setup, teardown),
        cmocka_unit_test_setup_teardown(test_lost_in_a_stream, setup, teardown),
        cmocka_unit_test_setup_teardown(test_nothing_waits_for_a_lost_host, setup, teardown),
        cmocka_unit_test(test_what_is_no_list),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
