/*
 * test_drain_store.c - a store that leaves: the call, what `hcattn drain STORE` makes of it, and where sessions and status
 * show that blocks live and stores drain.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "client/hcattn.h"
#include "common/clock.h"
#include "tests/unit/client/fake_coordinator.h"
#include "tests/unit/client/programs.h"

#include <errno.h>
#include <jansson.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define MIB ((uint64_t)1 << 20)
#define ID  "00000000000000ab"

/* What the fake does, and what it saw. */
struct script {
    unsigned restarts;      /* the first requests that are its last */
    unsigned lost_after;    /* of the attempt after them, it dies when it has told so much; 0: never */
    unsigned n_progress;    /* of the last attempt */
    bool never_ends;        /* no StoreDrained */
    bool wrong;             /* Drained instead of it */
    Hcattn__ErrorCode code; /* refused so, if not 0 */
    const char *waits;
    unsigned n_attempts;
    _Atomic uint64_t request_id;
    uint64_t cancelled;
    uint32_t store;
    bool resume;
};

struct fixture {
    struct fake_coordinator fake;
    struct script script;
    struct programs programs;
    struct hcattn *client;
    struct hcattn_error error;
};

static void send_progress(struct fake_coordinator *fake, uint64_t request, unsigned i)
{
    const struct script *script = fake->context;
    Hcattn__Reply reply = HCATTN__REPLY__INIT;
    Hcattn__StoreDrainProgress progress = HCATTN__STORE_DRAIN_PROGRESS__INIT;
    progress.n_sessions_left = 3 - i;
    progress.bytes_left = (3 - i) * 100 * MIB;
    progress.bytes_moved = i * 100 * MIB;
    if (script->waits)
        progress.waits = (char *)script->waits;
    reply.request_id = request;
    reply.reply_case = HCATTN__REPLY__REPLY_STORE_DRAIN_PROGRESS;
    reply.store_drain_progress = &progress;
    fake_coordinator_reply(fake, &reply);
}

static void send_end(struct fake_coordinator *fake, uint64_t request)
{
    const struct script *script = fake->context;
    Hcattn__Reply reply = HCATTN__REPLY__INIT;
    Hcattn__StoreDrained drained = HCATTN__STORE_DRAINED__INIT;
    Hcattn__Drained other = HCATTN__DRAINED__INIT;
    drained.n_sessions = 3;
    drained.bytes_moved = 412 * MIB;
    reply.request_id = request;
    reply.reply_case = script->wrong ? HCATTN__REPLY__REPLY_DRAINED : HCATTN__REPLY__REPLY_STORE_DRAINED;
    if (script->wrong)
        reply.drained = &other;
    else
        reply.store_drained = &drained;
    fake_coordinator_reply(fake, &reply);
}

static enum fake_coordinator_step drain(struct fake_coordinator *fake, const Hcattn__Request *request)
{
    struct script *script = fake->context;
    unsigned attempt = script->n_attempts++;
    script->store = request->drain_store->store;
    script->resume = request->drain_store->resume;
    script->request_id = request->request_id;
    if (attempt < script->restarts)
        return FAKE_RESTART;
    if (script->code) {
        fake_coordinator_error(fake, request->request_id, script->code, "there is no value-store 7");
        return FAKE_KNOWN;
    }
    bool lost = attempt == script->restarts && script->lost_after;
    for (unsigned i = 0; i < (lost ? script->lost_after : script->n_progress); i++) {
        send_progress(fake, request->request_id, i);
        clock_sleep_us(20000); /* so that there is a rate */
    }
    if (lost)
        return FAKE_RESTART;
    if (!script->never_ends)
        send_end(fake, request->request_id);
    return FAKE_KNOWN;
}

static void fill(Hcattn__SessionStats *session, Hcattn__StoreShare shares[2], Hcattn__StoreShare *pointers[2])
{
    static const uint32_t stores[] = {0, 11}, n_blocks[] = {12, 3};
    hcattn__session_stats__init(session);
    session->session = 0xab;
    session->state = (char *)"ready";
    session->policy = (char *)"default";
    for (size_t i = 0; i < 2; i++) {
        hcattn__store_share__init(&shares[i]);
        shares[i].store = stores[i];
        shares[i].n_blocks = n_blocks[i];
        shares[i].bytes = n_blocks[i] * MIB;
        pointers[i] = &shares[i];
    }
    session->stores = pointers;
    session->n_stores = 2;
    session->bytes = 15 * MIB;
}

static void tell(struct fake_coordinator *fake, const Hcattn__Request *request)
{
    Hcattn__Reply reply = HCATTN__REPLY__INIT;
    Hcattn__StoreShare shares[2][2], *pointers[2][2];
    Hcattn__SessionStats session[2], *sessions[] = {&session[0], &session[1]};
    Hcattn__SessionList list = HCATTN__SESSION_LIST__INIT;
    Hcattn__SessionDescribed described = HCATTN__SESSION_DESCRIBED__INIT;
    Hcattn__StatsReply stats = HCATTN__STATS_REPLY__INIT;
    Hcattn__ProcessStats store[3], *stores[] = {&store[0], &store[1], &store[2]};
    static const char *const states[] = {"ready", "draining", "drained"};
    for (size_t i = 0; i < 2; i++)
        fill(&session[i], shares[i], pointers[i]);
    session[1].session = 0xcd;
    session[1].n_stores = 0;
    for (uint32_t i = 0; i < 3; i++) {
        hcattn__process_stats__init(&store[i]);
        store[i].program = (char *)"hc-value-store";
        store[i].index = i;
        store[i].state = (char *)states[i];
        store[i].bytes_total = i < 2 ? 100 * MIB : 0;
    }
    reply.request_id = request->request_id;
    if (request->request_case == HCATTN__REQUEST__REQUEST_LIST_SESSIONS) {
        reply.reply_case = HCATTN__REPLY__REPLY_SESSION_LIST;
        reply.session_list = &list;
        list.sessions = sessions;
        list.n_sessions = 2;
    } else if (request->request_case == HCATTN__REQUEST__REQUEST_STATS) {
        reply.reply_case = HCATTN__REPLY__REPLY_STATS;
        reply.stats = &stats;
        stats.processes = stores;
        stats.n_processes = 3;
        stats.sessions = sessions;
        stats.n_sessions = 2;
    } else {
        assert_int_equal(request->request_case, HCATTN__REQUEST__REQUEST_DESCRIBE_SESSION);
        reply.reply_case = HCATTN__REPLY__REPLY_SESSION_DESCRIBED;
        reply.session_described = &described;
        described.stats = &session[0];
    }
    fake_coordinator_reply(fake, &reply);
}

static enum fake_coordinator_step serve(struct fake_coordinator *fake, const Hcattn__Request *request)
{
    struct script *script = fake->context;
    if (request->request_case == HCATTN__REQUEST__REQUEST_DRAIN_STORE)
        return drain(fake, request);
    if (request->request_case != HCATTN__REQUEST__REQUEST_CANCEL) {
        tell(fake, request);
        return FAKE_KNOWN;
    }
    script->cancelled = request->cancel->request;
    fake_coordinator_error(fake, script->cancelled, HCATTN__ERROR_CODE__CANCELLED, "cancelled");
    return FAKE_LOST;
}

static struct fixture *begin(struct script script)
{
    struct fixture *f = calloc(1, sizeof(*f));
    assert_non_null(f);
    f->script = script;
    f->fake.handle = serve;
    f->fake.context = &f->script;
    programs_setup(&f->programs, "");
    f->programs.split = true;
    snprintf(f->fake.endpoint, sizeof(f->fake.endpoint), "ipc://%s/client.sock", f->programs.directory);
    fake_coordinator_start(&f->fake);
    struct hcattn_config config = {.endpoint = f->fake.endpoint};
    assert_int_equal(hcattn_open(&config, &f->client, &f->error), 0);
    return f;
}

/* Ends the fake first: then what it saw may be read. */
static void end_fake(struct fixture *f)
{
    fake_coordinator_stop(&f->fake);
}

static void end(struct fixture *f)
{
    hcattn_close(f->client);
    programs_cleanup(&f->programs);
    free(f);
}

struct told {
    unsigned n;
    unsigned n_begun; /* times that nothing had been moved yet */
    uint64_t bytes_left, bytes_moved;
    char waits[64];
    unsigned stop_after; /* 0: never */
};

static int on_progress(void *context, const struct hcattn_store_drain *drain)
{
    struct told *told = context;
    told->n++;
    told->n_begun += drain->bytes_moved == 0;
    told->bytes_left = drain->bytes_left;
    told->bytes_moved = drain->bytes_moved;
    assert_int_equal(drain->n_sessions_left * 100 * MIB, drain->bytes_left);
    snprintf(told->waits, sizeof(told->waits), "%s", drain->waits);
    return told->stop_after && told->n >= told->stop_after;
}

static void test_call(void **state)
{
    (void)state;
    /* Also by a coordinator that knows nothing of it: it is asked again. */
    for (unsigned restarts = 0; restarts < 2; restarts++) {
        struct fixture *f = begin((struct script){.restarts = restarts, .n_progress = 3, .waits = "no room"});
        struct told told = {.n = 0};
        struct hcattn_store_drained drained = {.n_sessions = 0};
        assert_int_equal(hcattn_drain_store(f->client, 7, false, on_progress, &told, 0, &drained, &f->error), 0);
        assert_int_equal(drained.n_sessions, 3);
        assert_int_equal(drained.bytes_moved, 412 * MIB);
        end_fake(f);
        assert_int_equal(told.n, 3);
        assert_int_equal(told.bytes_left, 100 * MIB);
        assert_int_equal(told.bytes_moved, 200 * MIB);
        assert_string_equal(told.waits, "no room");
        assert_int_equal(f->script.n_attempts, restarts + 1);
        assert_int_equal(f->script.store, 7);
        assert_false(f->script.resume);
        assert_int_equal(f->script.cancelled, 0);
        end(f);
    }
}

static void test_call_survives_the_coordinator(void **state)
{
    (void)state;
    struct fixture *f = begin((struct script){.lost_after = 2, .n_progress = 3});
    struct told told = {.n = 0};
    struct hcattn_store_drained drained = {.n_sessions = 0};
    assert_int_equal(hcattn_drain_store(f->client, 2, false, on_progress, &told, 20000, &drained, &f->error), 0);
    assert_int_equal(drained.bytes_moved, 412 * MIB);
    end_fake(f);
    assert_int_equal(f->script.n_attempts, 2);
    assert_int_equal(told.n, 5);
    assert_int_equal(told.n_begun, 2);
    end(f);
}

static void test_call_resumes(void **state)
{
    (void)state;
    struct fixture *f = begin((struct script){.n_progress = 1});
    assert_int_equal(hcattn_drain_store(f->client, 63, true, NULL, NULL, 0, NULL, &f->error), 0);
    end_fake(f);
    assert_true(f->script.resume);
    assert_int_equal(f->script.store, 63);
    end(f);
}

static void test_call_ends_early(void **state)
{
    (void)state;
    struct fixture *f = begin((struct script){.n_progress = 2, .never_ends = true});
    struct hcattn_store_drained drained = {.n_sessions = 99};
    assert_int_equal(hcattn_drain_store(f->client, 2, false, NULL, NULL, 300, &drained, &f->error), -ETIMEDOUT);
    assert_int_equal(f->error.code, HCATTN_UNAVAILABLE);
    struct told told = {.stop_after = 2};
    assert_int_equal(hcattn_drain_store(f->client, 2, false, on_progress, &told, 0, &drained, &f->error), -ECANCELED);
    assert_int_equal(told.n, 2);
    assert_int_equal(drained.n_sessions, 99);
    end_fake(f);
    assert_true(f->script.cancelled == f->script.request_id);
    end(f);
}

static void test_call_is_refused(void **state)
{
    (void)state;
    struct hcattn_store_drained drained = {.n_sessions = 99};
    struct fixture *f = begin((struct script){.code = HCATTN__ERROR_CODE__NOT_FOUND});
    assert_int_equal(hcattn_drain_store(f->client, 7, false, NULL, NULL, 0, &drained, &f->error), -ENOENT);
    assert_string_equal(f->error.sentence, "there is no value-store 7");
    end_fake(f);
    end(f);
    f = begin((struct script){.wrong = true});
    assert_int_equal(hcattn_drain_store(f->client, 7, false, NULL, NULL, 0, &drained, &f->error), -EPROTO);
    assert_int_equal(drained.n_sessions, 99);
    end_fake(f);
    end(f);
}

/* ---- as people see it ---- */

#define RUN(...) programs_run(&f->programs, false, (const char *[]){__VA_ARGS__, NULL})

static char *output(const struct fixture *f)
{
    static char text[1 << 16];
    programs_read(f->programs.out, text, sizeof(text));
    return text;
}

static void check_output(const struct fixture *f, const char *text)
{
    if (!strstr(output(f), text))
        fail_msg("no '%s' in:\n%s", text, output(f));
}

static void test_command(void **state)
{
    (void)state;
    struct fixture *f = begin((struct script){.n_progress = 2, .waits = "no store has room\nfor a session"});
    assert_int_equal(RUN("drain", "2"), 0);
    assert_string_equal(output(f), "value-store 2 has left: 3 sessions, 412.0 MiB moved\n");
    assert_true(programs_log_has(&f->programs, "value-store 2: 3 sessions and 300.0 MiB left, 0 B moved, 0 B/s; waits: "
                                               "no store has room for a session\n"));
    assert_true(programs_log_has(&f->programs, "value-store 2: 2 sessions and 200.0 MiB left, 100.0 MiB moved, "));
    assert_true(programs_log_has(&f->programs, " GiB/s; waits"));
    assert_int_equal(RUN("drain", "--resume", "2"), 0);
    assert_string_equal(output(f), "value-store 2 takes sessions again\n");
    assert_true(programs_log_has(&f->programs, "value-store 2 comes back; waits: no store has room"));
    end_fake(f);
    assert_true(f->script.resume);
    end(f);
}

static void test_command_ends_early(void **state)
{
    (void)state;
    struct fixture *f = begin((struct script){.n_progress = 1, .never_ends = true});
    assert_int_equal(RUN("drain", "11", "--timeout", "300ms"), 1);
    assert_true(programs_log_has(&f->programs, "hcattn drain: no answer within 300 ms\n"));
    assert_true(
        programs_log_has(&f->programs, "value-store 11 goes on draining; 'hcattn drain --resume 11' ends that"));
    unlink(f->programs.log);
    f->script.request_id = 0;
    pid_t pid = programs_start(&f->programs, false, (const char *[]){"drain", "11", NULL});
    for (int i = 0; i < 1000 && f->script.request_id == 0; i++)
        clock_sleep_us(10000);
    clock_sleep_us(100000);
    kill(pid, SIGINT);
    int status = programs_wait(pid, 10);
    assert_true(status >= 0 && WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 130);
    assert_true(programs_log_has(&f->programs, "'hcattn drain --resume 11' ends that"));
    end_fake(f);
    end(f);
}

static void test_command_is_used_wrongly(void **state)
{
    (void)state;
    struct fixture *f = begin((struct script){.code = HCATTN__ERROR_CODE__NOT_FOUND});
    static const char *const wrong[][2] = {{"64"}, {"007"}, {"now"}, {"2x"}, {""}, {"2", "3"}};
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        if (RUN("drain", wrong[i][0], wrong[i][1]) != 2)
            fail_msg("drain '%s' is not refused", wrong[i][0]);
    }
    assert_true(programs_log_has(&f->programs, "hcattn drain: a store's number is 0 to 63; '64' is none"));
    assert_int_equal(RUN("drain", "7"), 1);
    assert_true(programs_log_has(&f->programs, "hcattn drain: there is no value-store 7\n"));
    end_fake(f);
    assert_int_equal(f->script.n_attempts, 1);
    end(f);
}

static void test_where_blocks_live(void **state)
{
    (void)state;
    struct fixture *f = begin((struct script){.n_progress = 0});
    assert_int_equal(RUN("sessions"), 0);
    check_output(f, " WORKER  BLOCKS BY STORE\n");
    check_output(f, "15.0 MiB      -  0:12 11:3\n");
    check_output(f, "15.0 MiB      -  -\n");
    assert_int_equal(RUN("sessions", ID), 0);
    check_output(f, "12 blocks, 12.0 MiB in store 0; 3 blocks, 3.0 MiB in store 11\n");
    assert_int_equal(RUN("sessions", "--json"), 0);
    json_error_t error;
    json_t *json = json_loads(output(f), 0, &error);
    int store = 0, blocks = 0, bytes = 0;
    assert_int_equal(json_unpack(json, "{s:[{s:[{},{s:i,s:i,s:i}]},{}]}", "sessions", "stores", "store", &store,
                                 "blocks", &blocks, "bytes", &bytes),
                     0);
    assert_int_equal(store, 11);
    assert_int_equal(blocks, 3);
    assert_int_equal(bytes, 3 * MIB);
    json_decref(json);
    end_fake(f);
    end(f);
}

static void test_status(void **state)
{
    (void)state;
    struct fixture *f = begin((struct script){.n_progress = 0});
    assert_int_equal(RUN("status"), 0);
    check_output(f, "ready\n");
    check_output(f, "hc-value-store      1        0 draining ");
    check_output(f, "hc-value-store      2        0 drained ");
    check_output(f, "\n   0      2 "); /* stores of the node: one that has left is none */
    check_output(f, "  0:12 11:3\n");
    end_fake(f);
    end(f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_call),
        cmocka_unit_test(test_call_survives_the_coordinator),
        cmocka_unit_test(test_call_resumes),
        cmocka_unit_test(test_call_ends_early),
        cmocka_unit_test(test_call_is_refused),
        cmocka_unit_test(test_command),
        cmocka_unit_test(test_command_ends_early),
        cmocka_unit_test(test_command_is_used_wrongly),
        cmocka_unit_test(test_where_blocks_live),
        cmocka_unit_test(test_status),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
