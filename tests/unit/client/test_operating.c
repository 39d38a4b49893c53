/*
 * test_operating.c - sessions, fork, policy, drain, transport and what status tells of them, as people and programs see
 * them: tables, JSON, exit status; and --exact-tokens and --policy of the commands that open a session.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "common/clock.h"
#include "proto/policy.h"
#include "tests/unit/client/fake_coordinator.h"
#include "tests/unit/client/programs.h"

#include <inttypes.h>
#include <jansson.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define ID "00000000000000ab"

struct service {
    pthread_mutex_t lock; /* held by the fake's thread while it serves */
    struct programs programs;
    struct fake_coordinator fake;
    bool no_sessions;
    bool not_held;
    unsigned n_drains_running; /* Stats until Drained is sent */
    bool draining;
    _Atomic uint64_t drain;
    uint64_t asked_session;
    uint64_t asked_tokens;
    int64_t exact; /* of the last OpenSession; -1: absent */
    char text[64]; /* policy, transport of the last request */
};

static void send_drained(struct fake_coordinator *fake, uint64_t request)
{
    Hcattn__Reply reply = HCATTN__REPLY__INIT;
    Hcattn__Drained drained = HCATTN__DRAINED__INIT;
    drained.n_finished = 4;
    drained.n_sessions = 2;
    reply.request_id = request;
    reply.reply_case = HCATTN__REPLY__REPLY_DRAINED;
    reply.drained = &drained;
    fake_coordinator_reply(fake, &reply);
}

static void fill(const struct service *service, Hcattn__SessionStats *stats)
{
    hcattn__session_stats__init(stats);
    stats->session = 0xab;
    stats->state = (char *)"ready";
    stats->policy = (char *)"rot4,mass=0.9,notail";
    stats->n_tokens = 4100;
    stats->bytes = 3 << 20;
    stats->exact_tokens = 512;
    stats->worker = 1;
    stats->held = !service->not_held;
}

static void tell_stats(struct fake_coordinator *fake, Hcattn__Reply *reply)
{
    struct service *service = fake->context;
    Hcattn__StatsReply stats = HCATTN__STATS_REPLY__INIT;
    Hcattn__ProcessStats worker = HCATTN__PROCESS_STATS__INIT, free_worker = HCATTN__PROCESS_STATS__INIT,
                         *processes[] = {&worker, &free_worker};
    Hcattn__SessionStats session, *sessions[] = {&session};
    fill(service, &session);
    worker.program = free_worker.program = (char *)"hc-gpu-worker";
    worker.weight_bytes = 5 << 20;
    worker.device_budget_bytes = 1u << 30;
    worker.device_bytes = 7 << 20;
    worker.n_sessions = 6;
    free_worker.index = 1;
    free_worker.weight_bytes = 5 << 20;
    free_worker.device_bytes = 9 << 20;
    stats.processes = processes;
    stats.n_processes = 2;
    stats.sessions = sessions;
    stats.n_sessions = 1;
    stats.exact_tokens = 1024;
    stats.n_running = 3;
    stats.n_queued = service->n_drains_running;
    stats.max_queued = 64;
    stats.draining = service->draining;
    stats.row_codec = (char *)"q8_0";
    reply->reply_case = HCATTN__REPLY__REPLY_STATS;
    reply->stats = &stats;
    fake_coordinator_reply(fake, reply);
    if (service->drain && service->n_drains_running && --service->n_drains_running == 0)
        send_drained(fake, service->drain);
}

static void list_sessions(struct fake_coordinator *fake, Hcattn__Reply *reply)
{
    struct service *service = fake->context;
    Hcattn__SessionStats session, *sessions[] = {&session};
    fill(service, &session);
    Hcattn__SessionList list = HCATTN__SESSION_LIST__INIT;
    list.sessions = sessions;
    list.n_sessions = service->no_sessions ? 0 : 1;
    reply->reply_case = HCATTN__REPLY__REPLY_SESSION_LIST;
    reply->session_list = &list;
    fake_coordinator_reply(fake, reply);
}

static void describe_session(struct fake_coordinator *fake, Hcattn__Reply *reply, uint64_t id)
{
    struct service *service = fake->context;
    service->asked_session = id;
    if (id != 0xab) {
        fake_coordinator_error(fake, reply->request_id, HCATTN__ERROR_CODE__NOT_FOUND, "no session 00000000000000ac");
        return;
    }
    uint64_t kept[] = {100, 200, 50, 1000};
    Hcattn__SessionStats session;
    Hcattn__StoreRead reads[2], *pointers[] = {&reads[0], &reads[1]};
    Hcattn__SessionCounts counts = HCATTN__SESSION_COUNTS__INIT;
    Hcattn__SessionDescribed described = HCATTN__SESSION_DESCRIBED__INIT;
    fill(service, &session);
    for (uint32_t i = 0; i < 2; i++) {
        hcattn__store_read__init(&reads[i]);
        reads[i].store = i;
        reads[i].bytes = (uint64_t)(i + 1) << 20;
    }
    counts.n_steps = 10;
    counts.n_old_tokens = 1000;
    counts.n_kept = kept;
    counts.n_n_kept = 4;
    counts.reads = pointers;
    counts.n_reads = 2;
    counts.exact_bytes = 2048;
    counts.key_bytes = 4096;
    counts.select_us = 10000;
    counts.attention_us = 20000;
    counts.store_wait_us = 30000;
    counts.matmul_us = 35000;
    counts.step_us = 100000;
    described.stats = &session;
    described.counts = service->not_held ? NULL : &counts;
    described.n_layers = 2;
    described.n_kv_heads = 2;
    reply->reply_case = HCATTN__REPLY__REPLY_SESSION_DESCRIBED;
    reply->session_described = &described;
    fake_coordinator_reply(fake, reply);
}

static void open_session(struct fake_coordinator *fake, Hcattn__Reply *reply, const Hcattn__OpenSession *open)
{
    struct service *service = fake->context;
    Hcattn__SessionOpened opened = HCATTN__SESSION_OPENED__INIT;
    service->exact = open->exact ? (int64_t)open->exact->n_tokens : -1;
    snprintf(service->text, sizeof(service->text), "%s", open->policy);
    opened.session = open->session;
    reply->reply_case = HCATTN__REPLY__REPLY_SESSION_OPENED;
    reply->session_opened = &opened;
    fake_coordinator_reply(fake, reply);
}

static void change(struct fake_coordinator *fake, Hcattn__Reply *reply, const Hcattn__Request *request)
{
    struct service *service = fake->context;
    if (request->request_case == HCATTN__REQUEST__REQUEST_SET_POLICY) {
        static Hcattn__PolicySet set = HCATTN__POLICY_SET__INIT;
        snprintf(service->text, sizeof(service->text), "%s", request->set_policy->policy);
        service->asked_session = request->set_policy->session;
        if (strcmp(service->text, "clever") == 0) {
            fake_coordinator_error(fake, reply->request_id, HCATTN__ERROR_CODE__INVALID_ARGUMENT, "not so clever");
            return;
        }
        set.policy = service->text;
        reply->reply_case = HCATTN__REPLY__REPLY_POLICY_SET;
        reply->policy_set = &set;
    } else if (request->request_case == HCATTN__REQUEST__REQUEST_SET_TRANSPORT) {
        static Hcattn__TransportSet set = HCATTN__TRANSPORT_SET__INIT;
        snprintf(service->text, sizeof(service->text), "%s", request->set_transport->transport);
        set.transport = service->text;
        reply->reply_case = HCATTN__REPLY__REPLY_TRANSPORT_SET;
        reply->transport_set = &set;
    } else {
        static Hcattn__Forked forked = HCATTN__FORKED__INIT;
        service->asked_session = request->fork->session;
        service->asked_tokens = request->fork->n_tokens;
        forked.session = 0x1234;
        forked.n_tokens = 128;
        reply->reply_case = HCATTN__REPLY__REPLY_FORKED;
        reply->forked = &forked;
    }
    fake_coordinator_reply(fake, reply);
}

static void take(struct fake_coordinator *fake, const Hcattn__Request *request)
{
    struct service *service = fake->context;
    Hcattn__Reply reply = HCATTN__REPLY__INIT;
    reply.request_id = request->request_id;
    switch (request->request_case) {
    case HCATTN__REQUEST__REQUEST_STATS:
        tell_stats(fake, &reply);
        break;
    case HCATTN__REQUEST__REQUEST_LIST_SESSIONS:
        list_sessions(fake, &reply);
        break;
    case HCATTN__REQUEST__REQUEST_DESCRIBE_SESSION:
        describe_session(fake, &reply, request->describe_session->session);
        break;
    case HCATTN__REQUEST__REQUEST_OPEN_SESSION:
        open_session(fake, &reply, request->open_session);
        break;
    case HCATTN__REQUEST__REQUEST_DRAIN:
        if (request->drain->resume)
            send_drained(fake, request->request_id);
        else
            service->drain = request->request_id;
        break;
    case HCATTN__REQUEST__REQUEST_CANCEL:
        fake_coordinator_error(fake, request->cancel->request, HCATTN__ERROR_CODE__CANCELLED, "cancelled");
        break;
    case HCATTN__REQUEST__REQUEST_FORK:
    case HCATTN__REQUEST__REQUEST_SET_POLICY:
    case HCATTN__REQUEST__REQUEST_SET_TRANSPORT:
        change(fake, &reply, request);
        break;
    default:
        fake_coordinator_error(fake, request->request_id, HCATTN__ERROR_CODE__UNAVAILABLE, "draining");
        break;
    }
}

static enum fake_coordinator_step serve(struct fake_coordinator *fake, const Hcattn__Request *request)
{
    struct service *service = fake->context;
    pthread_mutex_lock(&service->lock);
    take(fake, request);
    pthread_mutex_unlock(&service->lock);
    return request->request_case == HCATTN__REQUEST__REQUEST_CANCEL ? FAKE_LOST : FAKE_KNOWN;
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

/* Between the test's and the fake's turn: what the one has read or written the other may. */
static void settle(struct service *service)
{
    pthread_mutex_lock(&service->lock);
    pthread_mutex_unlock(&service->lock);
}

static int run(struct service *service, const char *const *arguments)
{
    settle(service);
    int status = programs_run(&service->programs, false, arguments);
    settle(service);
    return status;
}

#define RUN(...) run(service, (const char *[]){__VA_ARGS__, NULL})

static char *output(const struct service *service)
{
    static char text[1 << 16];
    programs_read(service->programs.out, text, sizeof(text));
    return text;
}

static void check_output(const struct service *service, const char *text)
{
    if (!strstr(output(service), text))
        fail_msg("no '%s' in:\n%s", text, output(service));
}

static json_t *output_object(const struct service *service)
{
    json_error_t error;
    json_t *json = json_loads(output(service), 0, &error);
    if (!json)
        fail_msg("%s in:\n%s", error.text, output(service));
    return json;
}

static void test_sessions(void **state)
{
    struct service *service = *state;
    assert_int_equal(RUN("sessions"), 0);
    assert_string_equal(output(service),
                        "SESSION           STATE      POLICY                     TOKENS   RESERVED       MEMORY WORKER "
                        " BLOCKS BY STORE\n" //
                        ID "  ready      rot4,mass=0.9,notail         4100          0      3.0 MiB      1  -\n");
    assert_int_equal(RUN("sessions", "--json"), 0);
    json_t *json = output_object(service);
    const char *id = NULL, *policy = NULL;
    int tokens = 0, exact = 0, worker = 0;
    assert_int_equal(json_unpack(json, "{s:[{s:s,s:s,s:i,s:i,s:i}]}", "sessions", "session", &id, "policy", &policy,
                                 "tokens", &tokens, "exact_tokens", &exact, "worker", &worker),
                     0);
    assert_string_equal(id, ID);
    assert_string_equal(policy, "rot4,mass=0.9,notail");
    assert_int_equal(tokens, 4100);
    assert_int_equal(exact, 512);
    assert_int_equal(worker, 1);
    json_decref(json);

    service->no_sessions = true;
    assert_int_equal(RUN("sessions"), 0);
    assert_string_equal(output(service), "no session is open\n");
    assert_int_equal(RUN("sessions", "--json"), 0);
    json = output_object(service);
    assert_int_equal(json_array_size(json_object_get(json, "sessions")), 0);
    json_decref(json);
}

static void test_session_in_detail(void **state)
{
    struct service *service = *state;
    assert_int_equal(RUN("sessions", ID), 0);
    check_output(service, "layer     0     1   mean\n"
                          "    0  10.0  20.0   15.0\n"
                          "    1   5.0 100.0   52.5\n"
                          " mean   7.5  60.0   33.8\n");
    check_output(service, "10 decode steps had old tokens, 100.0 on average; rows read: 1.0 MiB of store 0, 2.0 MiB of "
                          "store 1\n");
    check_output(service, "on the device: 2.0 KiB exact rows, 4.0 KiB keys of old tokens\n");
    check_output(service, "exact on the device while it has at most 512 tokens\n");
    check_output(service, "waiting for stores             30.0 ms  30.0 %\n");
    check_output(service, "other                           5.0 ms   5.0 %\n");

    assert_int_equal(RUN("sessions", "--json", "AB"), 0);
    assert_int_equal(service->asked_session, 0xab);
    json_t *json = output_object(service), *kept = NULL, *reads = NULL;
    double mean = 0, store_wait = 0, other = 0;
    int layers = 0, kv_heads = 0, steps = 0, old_tokens = 0, exact = 0, keys = 0;
    assert_int_equal(json_unpack(json, "{s:i,s:i,s:{s:i,s:i,s:o,s:F,s:o,s:i,s:i,s:{s:F,s:F}}}", "layers", &layers,
                                 "kv_heads", &kv_heads, "counts", "steps", &steps, "old_tokens", &old_tokens, "kept",
                                 &kept, "kept_mean", &mean, "reads", &reads, "exact_bytes", &exact, "key_bytes", &keys,
                                 "time_ms", "store_wait", &store_wait, "other", &other),
                     0);
    assert_int_equal(layers, 2);
    assert_int_equal(kv_heads, 2);
    assert_int_equal(steps, 10);
    assert_int_equal(old_tokens, 1000);
    assert_int_equal(json_array_size(kept), 2);
    assert_true(json_real_value(json_array_get(json_array_get(kept, 1), 0)) == 0.05);
    assert_true(mean > 0.337 && mean < 0.338);
    assert_int_equal(json_integer_value(json_object_get(json_array_get(reads, 1), "bytes")), 2 << 20);
    assert_int_equal(exact, 2048);
    assert_int_equal(keys, 4096);
    assert_true(store_wait == 30.0 && other == 5.0);
    json_decref(json);

    service->not_held = true;
    assert_int_equal(RUN("sessions", ID), 0);
    check_output(service, "no worker holds it: nothing is counted\n");
    assert_int_equal(RUN("sessions", ID, "--json"), 0);
    json = output_object(service);
    assert_true(json_is_null(json_object_get(json, "counts")));
    assert_true(json_is_null(json_object_get(json, "worker")));
    json_decref(json);

    assert_int_equal(RUN("sessions", "ac"), 1);
    assert_true(programs_log_has(&service->programs, "hcattn sessions: no session 00000000000000ac"));
}

static void test_fork(void **state)
{
    struct service *service = *state;
    assert_int_equal(RUN("fork", ID), 0);
    assert_string_equal(output(service), "session 0000000000001234 holds 128 tokens\n");
    assert_int_equal(service->asked_session, 0xab);
    assert_int_equal(service->asked_tokens, 0);
    assert_int_equal(RUN("fork", "--tokens", "130", "--json", ID), 0);
    assert_int_equal(service->asked_tokens, 130);
    json_t *json = output_object(service);
    assert_string_equal(json_string_value(json_object_get(json, "session")), "0000000000001234");
    assert_int_equal(json_integer_value(json_object_get(json, "tokens")), 128);
    json_decref(json);
}

static void test_policy(void **state)
{
    struct service *service = *state;
    assert_int_equal(RUN("policy", "quality"), 0);
    assert_string_equal(output(service), "policy of new sessions: quality\n");
    assert_int_equal(service->asked_session, 0);
    assert_int_equal(RUN("policy", "--session", ID, "rot3,mass=0.95"), 0);
    assert_string_equal(output(service), "policy of session " ID ": rot3,mass=0.95\n");
    assert_int_equal(service->asked_session, 0xab);
    assert_int_equal(RUN("policy", "clever"), 1);
    assert_true(programs_log_has(&service->programs, "hcattn policy: not so clever"));
}

static void test_transport(void **state)
{
    struct service *service = *state;
    assert_int_equal(RUN("transport", "ring"), 0);
    assert_string_equal(output(service), "transport: ring\n");
    assert_string_equal(service->text, "ring");
    assert_int_equal(RUN("transport", "routed"), 0);
    assert_string_equal(service->text, "routed");
}

static void test_drain(void **state)
{
    struct service *service = *state;
    service->n_drains_running = 2;
    uint64_t begun = clock_now_us();
    assert_int_equal(RUN("drain"), 0);
    assert_true(clock_now_us() - begun >= 900000);
    assert_string_equal(output(service), "drained: 4 requests have ended, 2 sessions are open\n");
    assert_true(programs_log_has(&service->programs, "draining: 3 running, 2 queued\ndraining: 3 running, 1 queued\n"));
    assert_int_equal(RUN("drain", "--resume"), 0);
    assert_string_equal(output(service), "requests are taken again; 2 sessions are open\n");
}

static void test_drain_is_interrupted(void **state)
{
    struct service *service = *state;
    assert_int_equal(RUN("drain", "--timeout", "300ms"), 1);
    assert_true(programs_log_has(&service->programs, "'hcattn drain --resume' ends that"));
    unlink(service->programs.log);
    service->drain = 0;
    pid_t pid = programs_start(&service->programs, false, (const char *[]){"drain", NULL});
    for (int i = 0; i < 1000 && service->drain == 0; i++)
        clock_sleep_us(10000);
    clock_sleep_us(100000);
    kill(pid, SIGINT);
    int status = programs_wait(pid, 10);
    assert_true(status >= 0 && WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 130);
    assert_true(programs_log_has(&service->programs, "'hcattn drain --resume' ends that"));
}

static void test_status(void **state)
{
    struct service *service = *state;
    assert_int_equal(RUN("status"), 0);
    check_output(service, "ready\n");
    check_output(service, "rows q8_0");
    check_output(service, "exact on the device: sessions of up to 1024 tokens");
    check_output(service, "requests: 3 running, 0 queued of at most 64; an answer has at most 0 tokens");
    check_output(service, " 7.0 MiB of 1.0 GiB ");
    check_output(service, " 9.0 MiB ");
    service->draining = true;
    assert_int_equal(RUN("status"), 0);
    check_output(service, "ready, draining\n");
    assert_int_equal(RUN("status", "--json"), 0);
    json_t *json = output_object(service);
    int running = 0, queued = 9, most = 0, draining = 0, exact = 0, budget = 0, used = 0, bound = 0;
    const char *rows = NULL;
    assert_int_equal(json_unpack(json, "{s:i,s:i,s:i,s:b,s:i,s:s,s:[{s:i,s:i,s:i},{}]}", "running", &running, "queued",
                                 &queued, "max_queued", &most, "draining", &draining, "exact_tokens", &exact,
                                 "row_codec", &rows, "processes", "device_budget_bytes", &budget, "device_bytes", &used,
                                 "sessions", &bound),
                     0);
    assert_int_equal(running, 3);
    assert_int_equal(queued, 0);
    assert_int_equal(most, 64);
    assert_true(draining);
    assert_int_equal(exact, 1024);
    assert_string_equal(rows, "q8_0");
    assert_int_equal(budget, 1 << 30);
    assert_int_equal(used, 7 << 20);
    assert_int_equal(bound, 6);
    json_decref(json);
}

static void test_opening(void **state)
{
    struct service *service = *state;
    static const char *const commands[] = {"generate", "score", "chat"};
    for (size_t i = 0; i < 3; i++) {
        const char *argument = i == 2 ? NULL : i == 1 ? "/etc/hostname" : "words";
        int expected = i == 2 ? 0 : 1; /* a chat of no message has nothing to fail */
        assert_int_equal(RUN(commands[i], argument), expected);
        assert_int_equal(service->exact, -1);
        assert_string_equal(service->text, "");
        assert_int_equal(RUN(commands[i], "--exact-tokens", "0", argument), expected);
        assert_int_equal(service->exact, 0);
        assert_int_equal(RUN(commands[i], "--exact-tokens=300", "--policy=quality", argument), expected);
        assert_int_equal(service->exact, 300);
        assert_string_equal(service->text, "quality");
        assert_int_equal(RUN(commands[i], "--exact-tokens=4294967295", argument), 2);
        assert_int_equal(RUN(commands[i], "--exact-tokens=-1", argument), 2);
    }
}

/* The help of --policy is written by hand: it must know all presets. */
static void test_help_knows_the_policies(void **state)
{
    struct service *service = *state;
    static const char *const commands[] = {"up", "generate", "chat", "score", "policy"};
    for (size_t i = 0; i < sizeof(commands) / sizeof(commands[0]); i++) {
        assert_int_equal(RUN(commands[i], "--help"), 0);
        char words[1 << 14];
        size_t n = 0; /* lines are broken anywhere between words */
        for (char *word = strtok(output(service), " \n"); word && n < sizeof(words); word = strtok(NULL, " \n"))
            n += (size_t)snprintf(words + n, sizeof(words) - n, "%s ", word);
        const char *name, *meaning = NULL;
        for (uint32_t k = 0; (name = policy_preset(k, &meaning)) != NULL; k++) {
            char expected[128];
            snprintf(expected, sizeof(expected), "%s (%s)", name, meaning);
            if (!strstr(words, expected))
                fail_msg("%s --help: no '%s'", commands[i], expected);
        }
        assert_non_null(strstr(words, "f16|rot4|rot3|rot2|pair3|pair2|pair1|klt2|klt1|klt0|pqD/C,"
                                      "deviation=0..2|mass=0..1|l2=0..2[,weights][,notail]"));
    }
}

static void test_wrong_use(void **state)
{
    struct service *service = *state;
    static const char *const wrong[][4] = {{"sessions", "xyz"},
                                           {"sessions", "0"},
                                           {"sessions", "ab", "ac"},
                                           {"sessions", "10000000000000000"},
                                           {"fork"},
                                           {"fork", "nonsense"},
                                           {"fork", "--tokens=0", "ab"},
                                           {"policy"},
                                           {"policy", "a", "b"},
                                           {"policy", "--session=", "full"},
                                           {"transport"},
                                           {"transport", "direct"},
                                           {"drain", "now"},
                                           {"drain", "--timeout=soon"}};
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        if (RUN(wrong[i][0], wrong[i][1], wrong[i][2]) != 2)
            fail_msg("%s %s is not refused", wrong[i][0], wrong[i][1] ? wrong[i][1] : "");
    }
    assert_true(
        programs_log_has(&service->programs, "hcattn fork: a session's id has 16 hex digits; 'nonsense' is none"));
    assert_true(programs_log_has(&service->programs, "hcattn transport: the transport is 'ring' or 'routed'"));
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {TEST(test_sessions),
                                       TEST(test_session_in_detail),
                                       TEST(test_fork),
                                       TEST(test_policy),
                                       TEST(test_transport),
                                       TEST(test_drain),
                                       TEST(test_drain_is_interrupted),
                                       TEST(test_status),
                                       TEST(test_opening),
                                       TEST(test_help_knows_the_policies),
                                       TEST(test_wrong_use)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
