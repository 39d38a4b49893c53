/* test_sessions.c - the calls about sessions: what is asked, what is told, restarts. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "client/hcattn.h"
#include "tests/unit/client/fake_coordinator.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SOURCE 0xabcu

/* What the fake does, and what it saw. */
struct script {
    unsigned restarts; /* the first requests that are its last */
    bool fork_exists;  /* as another copy than the one asked for */
    enum { COUNTS_GOOD, COUNTS_NONE, COUNTS_ODD, COUNTS_NO_OLD_TOKENS, COUNTS_NO_STATS } counts;
    unsigned n_attempts;
    bool had_exact[4];
    uint32_t exact[4];
    uint64_t forked[4]; /* new_session of each attempt */
    char text[64];      /* policy asked for */
    uint64_t session;
};

struct fixture {
    struct fake_coordinator fake;
    struct script script;
    struct hcattn *client;
    struct hcattn_error error;
};

static void open_session(struct fake_coordinator *fake, Hcattn__Reply *reply, const Hcattn__OpenSession *open)
{
    struct script *script = fake->context;
    unsigned i = script->n_attempts - 1;
    script->had_exact[i] = open->exact != NULL;
    script->exact[i] = open->exact ? open->exact->n_tokens : 0;
    Hcattn__SessionOpened opened = HCATTN__SESSION_OPENED__INIT;
    opened.session = open->session;
    opened.policy = open->policy;
    opened.exact_tokens = open->exact ? open->exact->n_tokens : 512;
    reply->reply_case = HCATTN__REPLY__REPLY_SESSION_OPENED;
    reply->session_opened = &opened;
    fake_coordinator_reply(fake, reply);
}

static void fork_session(struct fake_coordinator *fake, Hcattn__Reply *reply, const Hcattn__Fork *fork)
{
    struct script *script = fake->context;
    if (script->fork_exists) {
        fake_coordinator_error(fake, reply->request_id, HCATTN__ERROR_CODE__CONFLICT, "open already, and longer now");
        return;
    }
    if (fork->session != SOURCE || !fork->ephemeral || fork->idle_timeout_s != 9) {
        fake_coordinator_error(fake, reply->request_id, HCATTN__ERROR_CODE__NOT_FOUND, "no such session");
        return;
    }
    Hcattn__Forked forked = HCATTN__FORKED__INIT;
    forked.session = fork->new_session;
    forked.n_tokens = fork->n_tokens / 64 * 64;
    reply->reply_case = HCATTN__REPLY__REPLY_FORKED;
    reply->forked = &forked;
    fake_coordinator_reply(fake, reply);
}

static void set_policy(struct fake_coordinator *fake, Hcattn__Reply *reply, const Hcattn__SetPolicy *set)
{
    struct script *script = fake->context;
    snprintf(script->text, sizeof(script->text), "%s", set->policy);
    script->session = set->session;
    if (set->session == SOURCE) {
        fake_coordinator_error(fake, reply->request_id, HCATTN__ERROR_CODE__CONFLICT, "it holds tokens");
        return;
    }
    Hcattn__PolicySet policy = HCATTN__POLICY_SET__INIT;
    policy.policy = (char *)"rot2,deviation=0.02";
    reply->reply_case = HCATTN__REPLY__REPLY_POLICY_SET;
    reply->policy_set = &policy;
    fake_coordinator_reply(fake, reply);
}

static Hcattn__SessionStats some_stats(uint8_t lanes[2])
{
    Hcattn__SessionStats stats = HCATTN__SESSION_STATS__INIT;
    stats.session = SOURCE;
    stats.state = (char *)"decoding";
    stats.policy = (char *)"quality";
    stats.n_tokens = 300;
    stats.reserved_tokens = 600;
    stats.bytes = 7 << 20;
    stats.lane_store.data = lanes;
    stats.lane_store.len = 2;
    stats.exact_tokens = 256;
    stats.worker = 1;
    stats.held = true;
    return stats;
}

static void list_sessions(struct fake_coordinator *fake, Hcattn__Reply *reply)
{
    uint8_t lanes[2] = {0, 1};
    Hcattn__SessionStats first = some_stats(lanes), second = HCATTN__SESSION_STATS__INIT;
    Hcattn__SessionStats *sessions[] = {&first, &second};
    second.session = 2;
    Hcattn__SessionList list = HCATTN__SESSION_LIST__INIT;
    list.sessions = sessions;
    list.n_sessions = 2;
    reply->reply_case = HCATTN__REPLY__REPLY_SESSION_LIST;
    reply->session_list = &list;
    fake_coordinator_reply(fake, reply);
}

static void describe_session(struct fake_coordinator *fake, Hcattn__Reply *reply)
{
    struct script *script = fake->context;
    uint8_t lanes[2] = {0, 1};
    uint64_t kept[] = {100, 200, 0, 1000, 250, 500};
    Hcattn__SessionStats stats = some_stats(lanes);
    Hcattn__StoreRead read = HCATTN__STORE_READ__INIT, *reads[] = {&read};
    Hcattn__SessionCounts counts = HCATTN__SESSION_COUNTS__INIT;
    Hcattn__SessionDescribed described = HCATTN__SESSION_DESCRIBED__INIT;
    read.store = 1;
    read.bytes = 12345;
    counts.n_steps = 10;
    counts.n_old_tokens = script->counts == COUNTS_NO_OLD_TOKENS ? 0 : 1000;
    counts.n_kept = kept;
    counts.n_n_kept = script->counts == COUNTS_ODD ? 5 : 6;
    counts.reads = reads;
    counts.n_reads = 1;
    counts.exact_bytes = 11;
    counts.key_bytes = 22;
    counts.select_us = 1;
    counts.attention_us = 2;
    counts.store_wait_us = 3;
    counts.matmul_us = 4;
    counts.step_us = 12;
    described.stats = script->counts == COUNTS_NO_STATS ? NULL : &stats;
    described.counts = script->counts == COUNTS_NONE ? NULL : &counts;
    described.n_layers = 3;
    described.n_kv_heads = 2;
    reply->reply_case = HCATTN__REPLY__REPLY_SESSION_DESCRIBED;
    reply->session_described = &described;
    fake_coordinator_reply(fake, reply);
}

static enum fake_coordinator_step answer(struct fake_coordinator *fake, const Hcattn__Request *request)
{
    struct script *script = fake->context;
    Hcattn__Reply reply = HCATTN__REPLY__INIT;
    reply.request_id = request->request_id;
    assert_true(script->n_attempts < 4);
    script->n_attempts++;
    if (request->request_case == HCATTN__REQUEST__REQUEST_FORK)
        script->forked[script->n_attempts - 1] = request->fork->new_session;
    if (script->n_attempts <= script->restarts)
        return FAKE_RESTART;
    switch (request->request_case) {
    case HCATTN__REQUEST__REQUEST_OPEN_SESSION:
        open_session(fake, &reply, request->open_session);
        break;
    case HCATTN__REQUEST__REQUEST_FORK:
        fork_session(fake, &reply, request->fork);
        break;
    case HCATTN__REQUEST__REQUEST_SET_POLICY:
        set_policy(fake, &reply, request->set_policy);
        break;
    case HCATTN__REQUEST__REQUEST_LIST_SESSIONS:
        list_sessions(fake, &reply);
        break;
    case HCATTN__REQUEST__REQUEST_DESCRIBE_SESSION:
        script->session = request->describe_session->session;
        describe_session(fake, &reply);
        break;
    default:
        fake_coordinator_error(fake, request->request_id, HCATTN__ERROR_CODE__NOT_SUPPORTED, "not here");
        break;
    }
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
    snprintf(f->fake.endpoint, sizeof(f->fake.endpoint), "ipc:///tmp/hcattn-sessions-%d-%u.sock", (int)getpid(), n++);
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

static void test_exact_tokens(void **state)
{
    (void)state;
    struct fixture *f = begin((struct script){.restarts = 0});
    static const uint32_t asked[] = {0, 100, HCATTN_EXACT_NONE}, told[] = {512, 100, 0};
    for (size_t i = 0; i < 3; i++) {
        struct hcattn_session_config config = {.exact_tokens = asked[i], .policy = "quality"};
        struct hcattn_session session;
        assert_int_equal(hcattn_open_session(f->client, &config, 0, &session, &f->error), 0);
        assert_int_equal(session.exact_tokens, told[i]);
        assert_string_equal(session.policy, "quality");
    }
    end_fake(f);
    assert_false(f->script.had_exact[0]);
    assert_true(f->script.had_exact[1] && f->script.had_exact[2]);
    assert_int_equal(f->script.exact[1], 100);
    assert_int_equal(f->script.exact[2], 0);
    end(f);
}

static void test_fork(void **state)
{
    (void)state;
    struct fixture *f = begin((struct script){.restarts = 1});
    struct hcattn_fork fork = {.session = SOURCE, .n_tokens = 200, .ephemeral = true, .idle_timeout_s = 9};
    struct hcattn_forked forked = {.session = 0};
    assert_int_equal(hcattn_fork(f->client, &fork, 0, &forked, &f->error), 0);
    assert_int_equal(forked.n_tokens, 192);
    fork.new_session = 77;
    struct hcattn_forked second;
    assert_int_equal(hcattn_fork(f->client, &fork, 0, &second, &f->error), 0);
    assert_int_equal(second.session, 77);
    fork.session = SOURCE + 1;
    assert_int_equal(hcattn_fork(f->client, &fork, 0, &second, &f->error), -ENOENT);
    assert_int_equal(f->error.code, HCATTN_NOT_FOUND);
    end_fake(f);
    /* The coordinator died on the first attempt: the second asked for the same new session. */
    assert_int_equal(f->script.n_attempts, 4);
    assert_true(f->script.forked[0] != 0);
    assert_true(f->script.forked[0] == f->script.forked[1]);
    assert_true(forked.session == f->script.forked[0]);
    end(f);
}

/* The first attempt was done before the coordinator died, and the source has grown since. */
static void test_fork_exists(void **state)
{
    (void)state;
    struct fixture *f = begin((struct script){.restarts = 1, .fork_exists = true});
    struct hcattn_fork fork = {.session = SOURCE};
    struct hcattn_forked forked = {.session = 0};
    assert_int_equal(hcattn_fork(f->client, &fork, 0, &forked, &f->error), 0);
    assert_int_equal(forked.n_tokens, 300);
    end_fake(f);
    assert_true(f->script.session == f->script.forked[0]); /* was described */
    assert_true(forked.session == f->script.forked[0]);
    end(f);

    /* An id that the caller chose may be anybody's; and what was asked once only was not made by us. */
    for (unsigned restarts = 0; restarts < 2; restarts++) {
        f = begin((struct script){.restarts = restarts, .fork_exists = true});
        fork.new_session = restarts ? 77 : 0;
        assert_int_equal(hcattn_fork(f->client, &fork, 0, &forked, &f->error), -ESTALE);
        end_fake(f);
        end(f);
    }
}

static void test_set_policy(void **state)
{
    (void)state;
    struct fixture *f = begin((struct script){.restarts = 1});
    char policy[HCATTN_POLICY_SIZE];
    assert_int_equal(hcattn_set_policy(f->client, 0, "default", 0, policy, &f->error), 0);
    assert_string_equal(policy, "rot2,deviation=0.02");
    assert_int_equal(hcattn_set_policy(f->client, SOURCE, "full", 0, NULL, &f->error), -ESTALE);
    assert_int_equal(f->error.code, HCATTN_CONFLICT);
    end_fake(f);
    assert_int_equal(f->script.session, SOURCE);
    assert_string_equal(f->script.text, "full");
    assert_int_equal(f->script.n_attempts, 3);
    end(f);
}

static void check_stats(const struct hcattn_session_stats *stats)
{
    assert_int_equal(stats->session, SOURCE);
    assert_string_equal(stats->state, "decoding");
    assert_string_equal(stats->policy, "quality");
    assert_int_equal(stats->n_tokens, 300);
    assert_int_equal(stats->reserved_tokens, 600);
    assert_int_equal(stats->bytes, 7 << 20);
    assert_int_equal(stats->n_lanes, 2);
    assert_int_equal(stats->lane_store[1], 1);
    assert_int_equal(stats->exact_tokens, 256);
    assert_int_equal(stats->worker, 1);
    assert_true(stats->held);
}

static void test_list(void **state)
{
    (void)state;
    struct fixture *f = begin((struct script){.restarts = 1});
    struct hcattn_sessions sessions;
    assert_int_equal(hcattn_list_sessions(f->client, 0, &sessions, &f->error), 0);
    assert_int_equal(sessions.n_sessions, 2);
    check_stats(&sessions.sessions[0]);
    assert_false(sessions.sessions[1].held);
    assert_string_equal(sessions.sessions[1].policy, "");
    hcattn_sessions_free(&sessions);
    assert_null(sessions.sessions);
    hcattn_sessions_free(&sessions);
    hcattn_sessions_free(NULL);
    end_fake(f);
    end(f);
}

static int describe(struct fixture *f, struct hcattn_description *ret_description)
{
    return hcattn_describe_session(f->client, SOURCE, 0, ret_description, &f->error);
}

static void test_describe(void **state)
{
    (void)state;
    struct fixture *f = begin((struct script){.restarts = 1});
    struct hcattn_description description;
    assert_int_equal(describe(f, &description), 0);
    check_stats(&description.stats);
    assert_int_equal(description.n_layers, 3);
    assert_int_equal(description.n_kv_heads, 2);
    assert_true(description.counted);
    const struct hcattn_counts *counts = &description.counts;
    static const double kept[] = {0.1, 0.2, 0, 1, 0.25, 0.5};
    for (size_t i = 0; i < 6; i++)
        assert_true(counts->kept[i] == kept[i]);
    assert_int_equal(counts->n_steps, 10);
    assert_int_equal(counts->n_old_tokens, 1000);
    assert_int_equal(counts->n_reads, 1);
    assert_int_equal(counts->reads[0].store, 1);
    assert_int_equal(counts->reads[0].bytes, 12345);
    assert_int_equal(counts->exact_bytes, 11);
    assert_int_equal(counts->key_bytes, 22);
    assert_int_equal(counts->select_us, 1);
    assert_int_equal(counts->attention_us, 2);
    assert_int_equal(counts->store_wait_us, 3);
    assert_int_equal(counts->matmul_us, 4);
    assert_int_equal(counts->step_us, 12);
    hcattn_description_free(&description);
    hcattn_description_free(&description);
    hcattn_description_free(NULL);
    end_fake(f);
    assert_int_equal(f->script.session, SOURCE);
    end(f);
}

static void test_describe_nothing_counted(void **state)
{
    (void)state;
    struct fixture *f = begin((struct script){.counts = COUNTS_NONE});
    struct hcattn_description description;
    assert_int_equal(describe(f, &description), 0);
    check_stats(&description.stats);
    assert_false(description.counted);
    assert_null(description.counts.kept);
    hcattn_description_free(&description);
    end_fake(f);
    end(f);

    f = begin((struct script){.counts = COUNTS_NO_OLD_TOKENS});
    assert_int_equal(describe(f, &description), 0);
    assert_true(description.counted);
    assert_null(description.counts.kept); /* no division by zero */
    hcattn_description_free(&description);
    end_fake(f);
    end(f);
}

static void test_describe_makes_no_sense(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++) {
        struct fixture *f = begin((struct script){.counts = i ? COUNTS_ODD : COUNTS_NO_STATS});
        struct hcattn_description description = {.n_layers = 99};
        assert_int_equal(describe(f, &description), -EPROTO);
        assert_int_equal(f->error.code, HCATTN_INTERNAL);
        assert_int_equal(description.n_layers, 99); /* untouched */
        end_fake(f);
        end(f);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_exact_tokens),
        cmocka_unit_test(test_fork),
        cmocka_unit_test(test_fork_exists),
        cmocka_unit_test(test_set_policy),
        cmocka_unit_test(test_list),
        cmocka_unit_test(test_describe),
        cmocka_unit_test(test_describe_nothing_counted),
        cmocka_unit_test(test_describe_makes_no_sense),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
