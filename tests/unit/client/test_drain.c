/* test_drain.c - the calls that operate a service: Drain and what it tells meanwhile, SetTransport, Stats. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "client/hcattn.h"
#include "common/clock.h"
#include "tests/unit/client/fake_coordinator.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* What the fake does, and what it saw. */
struct script {
    unsigned restarts;   /* the first requests that are its last */
    unsigned busy_polls; /* Stats that tell of running requests before Drained is sent */
    bool never_drained;
    unsigned n_attempts;
    unsigned n_polls;
    uint64_t request_id; /* of the Drain */
    uint64_t cancelled;
    bool resumed;
    char text[64]; /* transport asked for */
};

struct fixture {
    struct fake_coordinator fake;
    struct script script;
    struct hcattn *client;
    struct hcattn_error error;
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

static void tell_stats(struct fake_coordinator *fake, Hcattn__Reply *reply)
{
    struct script *script = fake->context;
    Hcattn__ProcessStats worker = HCATTN__PROCESS_STATS__INIT, *processes[] = {&worker};
    Hcattn__StatsReply stats = HCATTN__STATS_REPLY__INIT;
    Hcattn__SessionStats session = HCATTN__SESSION_STATS__INIT, *sessions[] = {&session};
    session.session = 17;
    session.exact_tokens = 256;
    session.worker = 1;
    session.held = true;
    worker.device_budget_bytes = 1 << 30;
    worker.device_bytes = 1 << 20;
    worker.n_sessions = 5;
    stats.processes = processes;
    stats.n_processes = 1;
    stats.sessions = sessions;
    stats.n_sessions = 1;
    stats.exact_tokens = 512;
    stats.n_running = 9;
    stats.n_queued = script->n_polls;
    stats.max_queued = 64;
    stats.draining = true;
    stats.row_codec = (char *)"q8_0";
    reply->reply_case = HCATTN__REPLY__REPLY_STATS;
    reply->stats = &stats;
    fake_coordinator_reply(fake, reply);
    script->n_polls++;
    if (script->request_id && !script->never_drained && script->n_polls > script->busy_polls)
        send_drained(fake, script->request_id);
}

static enum fake_coordinator_step drain(struct fake_coordinator *fake, const Hcattn__Request *request)
{
    struct script *script = fake->context;
    script->request_id = request->request_id;
    script->resumed = request->drain->resume;
    if (script->resumed)
        send_drained(fake, request->request_id);
    return FAKE_KNOWN;
}

static void set_transport(struct fake_coordinator *fake, Hcattn__Reply *reply, const Hcattn__SetTransport *set)
{
    struct script *script = fake->context;
    snprintf(script->text, sizeof(script->text), "%s", set->transport);
    if (strcmp(set->transport, "ring") != 0) {
        fake_coordinator_error(fake, reply->request_id, HCATTN__ERROR_CODE__BUSY, "the queue is full");
        return;
    }
    Hcattn__TransportSet transport = HCATTN__TRANSPORT_SET__INIT;
    transport.transport = set->transport;
    reply->reply_case = HCATTN__REPLY__REPLY_TRANSPORT_SET;
    reply->transport_set = &transport;
    fake_coordinator_reply(fake, reply);
}

static enum fake_coordinator_step answer(struct fake_coordinator *fake, const Hcattn__Request *request)
{
    struct script *script = fake->context;
    Hcattn__Reply reply = HCATTN__REPLY__INIT;
    reply.request_id = request->request_id;
    switch (request->request_case) {
    case HCATTN__REQUEST__REQUEST_STATS:
        tell_stats(fake, &reply);
        return FAKE_KNOWN;
    case HCATTN__REQUEST__REQUEST_CANCEL:
        script->cancelled = request->cancel->request;
        fake_coordinator_error(fake, script->cancelled, HCATTN__ERROR_CODE__CANCELLED, "cancelled");
        return FAKE_LOST;
    default:
        break;
    }
    if (++script->n_attempts <= script->restarts)
        return FAKE_RESTART;
    if (request->request_case == HCATTN__REQUEST__REQUEST_DRAIN)
        return drain(fake, request);
    assert_int_equal(request->request_case, HCATTN__REQUEST__REQUEST_SET_TRANSPORT);
    set_transport(fake, &reply, request->set_transport);
    return FAKE_KNOWN;
}

static struct fixture *begin(struct script script)
{
    static unsigned n;
    struct fixture *f = calloc(1, sizeof(*f));
    assert_non_null(f);
    f->script = script;
    f->fake.handle = answer;
    f->fake.context = &f->script;
    snprintf(f->fake.endpoint, sizeof(f->fake.endpoint), "ipc:///tmp/hcattn-drain-%d-%u.sock", (int)getpid(), n++);
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
    unlink(f->fake.endpoint + strlen("ipc://"));
    free(f);
}

struct told {
    unsigned n;
    uint32_t n_running, n_queued;
    unsigned stop_after; /* 0: never */
};

static int on_progress(void *context, uint32_t n_running, uint32_t n_queued)
{
    struct told *told = context;
    told->n++;
    told->n_running = n_running;
    told->n_queued = n_queued;
    return told->stop_after && told->n >= told->stop_after;
}

static void test_drain(void **state)
{
    (void)state;
    /* Also by a coordinator that knows nothing of it: it is asked again. */
    for (unsigned restarts = 0; restarts < 2; restarts++) {
        struct fixture *f = begin((struct script){.restarts = restarts, .busy_polls = 2});
        struct told told = {.n = 0};
        struct hcattn_drained drained = {.n_finished = 0};
        uint64_t begun = clock_now_us();
        assert_int_equal(hcattn_drain(f->client, false, on_progress, &told, 0, &drained, &f->error), 0);
        assert_true(clock_now_us() - begun >= 900000); /* the second look is a second later */
        assert_int_equal(drained.n_finished, 4);
        assert_int_equal(drained.n_sessions, 2);
        end_fake(f);
        assert_in_range(told.n, 3, 6);
        assert_int_equal(told.n_running, 9);
        assert_int_equal(told.n_queued, told.n - 1);
        assert_false(f->script.resumed);
        assert_int_equal(f->script.cancelled, 0);
        end(f);
    }
}

static void test_drain_resume(void **state)
{
    (void)state;
    struct fixture *f = begin((struct script){.restarts = 0});
    assert_int_equal(hcattn_drain(f->client, true, NULL, NULL, 0, NULL, &f->error), 0);
    end_fake(f);
    assert_true(f->script.resumed);
    assert_int_equal(f->script.n_polls, 0); /* nobody wanted to know */
    end(f);
}

static void test_drain_ends_early(void **state)
{
    (void)state;
    struct fixture *f = begin((struct script){.never_drained = true});
    assert_int_equal(hcattn_drain(f->client, false, NULL, NULL, 300, NULL, &f->error), -ETIMEDOUT);
    assert_int_equal(f->error.code, HCATTN_UNAVAILABLE);
    struct told told = {.stop_after = 2};
    struct hcattn_drained drained = {.n_finished = 99};
    assert_int_equal(hcattn_drain(f->client, false, on_progress, &told, 0, &drained, &f->error), -ECANCELED);
    assert_int_equal(f->error.code, HCATTN_CANCELLED);
    assert_int_equal(told.n, 2);
    assert_int_equal(drained.n_finished, 99);
    end_fake(f);
    assert_true(f->script.cancelled == f->script.request_id);
    end(f);
}

static void test_set_transport(void **state)
{
    (void)state;
    struct fixture *f = begin((struct script){.restarts = 1});
    assert_int_equal(hcattn_set_transport(f->client, "ring", 0, &f->error), 0);
    assert_int_equal(hcattn_set_transport(f->client, "pigeon", 0, &f->error), -EBUSY);
    assert_int_equal(f->error.code, HCATTN_BUSY);
    assert_int_equal(f->error.n_queued, 3);
    assert_int_equal(f->error.max_queued, 8);
    end_fake(f);
    assert_string_equal(f->script.text, "pigeon");
    end(f);
}

static void test_stats(void **state)
{
    (void)state;
    struct fixture *f = begin((struct script){.restarts = 0});
    struct hcattn_stats stats;
    assert_int_equal(hcattn_stats(f->client, 0, &stats, &f->error), 0);
    assert_int_equal(stats.exact_tokens, 512);
    assert_int_equal(stats.n_running, 9);
    assert_int_equal(stats.n_queued, 0);
    assert_int_equal(stats.max_queued, 64);
    assert_true(stats.draining);
    assert_string_equal(stats.row_codec, "q8_0");
    assert_int_equal(stats.processes[0].device_budget_bytes, 1 << 30);
    assert_int_equal(stats.processes[0].device_bytes, 1 << 20);
    assert_int_equal(stats.processes[0].n_sessions, 5);
    assert_int_equal(stats.sessions[0].session, 17);
    assert_int_equal(stats.sessions[0].exact_tokens, 256);
    assert_int_equal(stats.sessions[0].worker, 1);
    assert_true(stats.sessions[0].held);
    hcattn_stats_free(&stats);
    end_fake(f);
    end(f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_drain),
        cmocka_unit_test(test_drain_resume),
        cmocka_unit_test(test_drain_ends_early),
        cmocka_unit_test(test_set_transport),
        cmocka_unit_test(test_stats),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
