/* test_calls.c - calls against a coordinator that drops, repeats, forgets, restarts and refuses. */
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

#define N_TOKENS 10u

/* What a Generate's caller sees. */
struct seen {
    uint32_t ids[64];
    size_t n_ids;
    char text[256];
    float logprobs[64];
    unsigned n_accepted;
    uint64_t at;
    unsigned stop_after;   /* ids; 0: never */
    struct hcattn *cancel; /* after the first token */
};

static int on_accepted(void *context, const struct hcattn_accepted *accepted)
{
    struct seen *seen = context;
    seen->n_accepted++;
    seen->at = accepted->at;
    return 0;
}

static int on_generated(void *context, const struct hcattn_generated *generated)
{
    struct seen *seen = context;
    assert_int_equal(generated->first, seen->n_ids); /* never twice, never a gap */
    for (size_t i = 0; i < generated->n_ids; i++) {
        if (generated->logprobs)
            seen->logprobs[seen->n_ids] = generated->logprobs[i].logprob;
        seen->ids[seen->n_ids++] = generated->ids[i];
    }
    strncat(seen->text, generated->text, sizeof(seen->text) - strlen(seen->text) - 1);
    if (seen->cancel)
        hcattn_cancel(seen->cancel);
    return seen->stop_after && seen->n_ids >= seen->stop_after;
}

/* What the fake does, and what it saw. */
struct script {
    uint32_t break_at; /* tokens before something happens to the first attempt */
    enum { BREAK_NEVER, BREAK_RESTART, BREAK_FORGET, BREAK_GAP, BREAK_SILENCE } how;
    bool twice;          /* every message */
    bool no_accepted;    /* of the first attempt */
    unsigned n_refusals; /* of attempts after a restart */
    Hcattn__ErrorCode refusal;
    unsigned n_attempts;
    uint64_t request_ids[16];
    int64_t ats[16]; /* -1: the request had none */
    uint32_t resume_froms[16];
    uint64_t cancelled; /* request id of a Cancel */
};

static void send_token(struct fake_coordinator *fake, const struct script *script, uint64_t request, uint32_t i)
{
    uint32_t id = 100 + i;
    char text[2] = {(char)('a' + i), 0};
    fake_coordinator_generated(fake, request, i, &id, 1, text, true);
    if (script->twice)
        fake_coordinator_generated(fake, request, i, &id, 1, text, true);
}

static void record(struct script *script, const Hcattn__Request *request, const Hcattn__At *at, uint32_t resume_from)
{
    unsigned i = script->n_attempts++;
    assert_true(i < 16);
    script->request_ids[i] = request->request_id;
    script->ats[i] = at ? (int64_t)at->n_tokens : -1;
    script->resume_froms[i] = resume_from;
}

static enum fake_coordinator_step generate(struct fake_coordinator *fake, const Hcattn__Request *request)
{
    struct script *script = fake->context;
    uint32_t prompt[] = {1, 2, 3};
    uint64_t id = request->request_id;
    if (request->request_case == HCATTN__REQUEST__REQUEST_CANCEL) {
        script->cancelled = request->cancel->request;
        fake_coordinator_error(fake, script->cancelled, HCATTN__ERROR_CODE__CANCELLED, "cancelled");
        return FAKE_LOST;
    }
    if (request->request_case != HCATTN__REQUEST__REQUEST_GENERATE) {
        fake_coordinator_error(fake, id, HCATTN__ERROR_CODE__NOT_SUPPORTED, "only Generate here");
        return FAKE_KNOWN;
    }
    record(script, request, request->generate->at, request->generate->resume_from);
    bool first = script->n_attempts == 1;
    if (!first && script->n_refusals) {
        script->n_refusals--;
        fake_coordinator_error(fake, id, script->refusal, "not yet");
        if (script->n_refusals == 0)
            fake->ready = true;
        return FAKE_KNOWN;
    }
    if (!(first && script->no_accepted))
        fake_coordinator_accepted(fake, id, request->generate->at ? request->generate->at->n_tokens : 40, prompt, 3);
    for (uint32_t i = request->generate->resume_from; i < N_TOKENS; i++) {
        if (first && i == script->break_at) {
            switch (script->how) {
            case BREAK_RESTART:
                clock_sleep_us(100000); /* what was sent arrives */
                return FAKE_RESTART;
            case BREAK_FORGET:
                return FAKE_LOST;
            case BREAK_SILENCE:
                return FAKE_KNOWN;
            case BREAK_GAP:
                continue;
            case BREAK_NEVER:
                break;
            }
        }
        send_token(fake, script, id, i);
    }
    fake_coordinator_done(fake, id, N_TOKENS, "!", 13);
    return FAKE_KNOWN;
}

struct fixture {
    struct fake_coordinator fake;
    struct script script;
    struct hcattn *client;
    struct seen seen;
    struct hcattn_events events;
    struct hcattn_finished finished;
    struct hcattn_error error;
};

static struct fixture *begin_with(enum fake_coordinator_step (*handle)(struct fake_coordinator *,
                                                                       const Hcattn__Request *),
                                  struct script script, bool not_ready)
{
    static unsigned n;
    struct fixture *f = calloc(1, sizeof(*f));
    assert_non_null(f);
    f->script = script;
    f->fake.handle = handle;
    f->fake.context = &f->script;
    f->fake.not_ready_after_restart = not_ready;
    snprintf(f->fake.endpoint, sizeof(f->fake.endpoint), "ipc:///tmp/hcattn-test-%d-%u.sock", (int)getpid(), n++);
    fake_coordinator_start(&f->fake);
    struct hcattn_config config = {.endpoint = f->fake.endpoint, .connect_timeout_ms = 5000, .lost_timeout_ms = 8000};
    assert_int_equal(hcattn_open(&config, &f->client, &f->error), 0);
    f->events = (struct hcattn_events){.context = &f->seen, .accepted = on_accepted, .generated = on_generated};
    return f;
}

static struct fixture *begin(struct script script)
{
    return begin_with(generate, script, false);
}

static int ask(struct fixture *f, uint64_t at, uint32_t timeout_ms)
{
    struct hcattn_generate request = {.session = 9, .input = {.text = "hello"}, .at = at, .logprobs = true};
    return hcattn_generate(f->client, &request, &f->events, timeout_ms, &f->finished, &f->error);
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

static void check_whole(struct fixture *f)
{
    assert_int_equal(f->seen.n_ids, N_TOKENS);
    for (uint32_t i = 0; i < N_TOKENS; i++) {
        assert_int_equal(f->seen.ids[i], 100 + i);
        assert_true(f->seen.logprobs[i] == -(float)i);
    }
    assert_string_equal(f->seen.text, "abcdefghij!");
    assert_int_equal(f->seen.n_accepted, 1);
    assert_int_equal(f->finished.n_generated, N_TOKENS);
    assert_int_equal(f->finished.n_tokens, 13);
    assert_int_equal(f->finished.reason, HCATTN_FINISH_LENGTH);
    assert_int_equal(f->finished.timings.n_decode, N_TOKENS);
}

static void test_undisturbed(void **state)
{
    (void)state;
    struct fixture *f = begin((struct script){.how = BREAK_NEVER});
    assert_int_equal(ask(f, 0, 0), 0);
    end_fake(f);
    check_whole(f);
    assert_int_equal(f->script.n_attempts, 1);
    assert_int_equal(f->script.ats[0], 0);
    end(f);
}

static void test_everything_twice(void **state)
{
    (void)state;
    struct fixture *f = begin((struct script){.twice = true});
    assert_int_equal(ask(f, 0, 0), 0);
    end_fake(f);
    check_whole(f);
    end(f);
}

static void test_restart(void **state)
{
    (void)state;
    for (uint32_t break_at = 0; break_at < N_TOKENS; break_at += 4) {
        struct fixture *f = begin((struct script){.how = BREAK_RESTART, .break_at = break_at});
        assert_int_equal(ask(f, HCATTN_AT_ANY, 0), 0);
        end_fake(f);
        check_whole(f);
        assert_int_equal(f->script.n_attempts, 2);
        assert_int_equal(f->script.request_ids[0], f->script.request_ids[1]);
        assert_int_equal(f->script.ats[0], -1);
        assert_int_equal(f->script.ats[1], 40); /* from Accepted */
        assert_int_equal(f->script.resume_froms[1], break_at);
        assert_int_equal(f->fake.n_routes, 1); /* one routing id for its whole life */
        end(f);
    }
}

static void test_request_forgotten(void **state)
{
    (void)state;
    struct fixture *f = begin((struct script){.how = BREAK_FORGET, .break_at = 3});
    assert_int_equal(ask(f, 0, 0), 0);
    end_fake(f);
    check_whole(f);
    assert_int_equal(f->script.n_attempts, 2);
    assert_int_equal(f->script.resume_froms[1], 3);
    end(f);
}

static void test_gap(void **state)
{
    (void)state;
    struct fixture *f = begin((struct script){.how = BREAK_GAP, .break_at = 6});
    assert_int_equal(ask(f, 0, 0), 0);
    end_fake(f);
    check_whole(f);
    assert_int_equal(f->script.resume_froms[1], 6);
    end(f);
}

static void test_refused_while_peers_come_back(void **state)
{
    (void)state;
    static const Hcattn__ErrorCode codes[] = {HCATTN__ERROR_CODE__NOT_FOUND, HCATTN__ERROR_CODE__UNAVAILABLE,
                                              HCATTN__ERROR_CODE__CONFLICT, HCATTN__ERROR_CODE__BUSY};
    for (size_t i = 0; i < sizeof(codes) / sizeof(codes[0]); i++) {
        struct fixture *f = begin_with(
            generate, (struct script){.how = BREAK_RESTART, .break_at = 2, .n_refusals = 2, .refusal = codes[i]}, true);
        assert_int_equal(ask(f, 0, 0), 0);
        end_fake(f);
        check_whole(f);
        assert_int_equal(f->script.n_attempts, 4);
        end(f);
    }
}

/* A ready coordinator that says NOT_FOUND after a restart means it. */
static void test_refused_for_good(void **state)
{
    (void)state;
    struct fixture *f = begin_with(
        generate,
        (struct script){
            .how = BREAK_RESTART, .break_at = 2, .n_refusals = 100, .refusal = HCATTN__ERROR_CODE__NOT_FOUND},
        false);
    assert_int_equal(ask(f, 0, 0), -ENOENT);
    end_fake(f);
    assert_int_equal(f->error.code, HCATTN_NOT_FOUND);
    assert_string_equal(f->error.sentence, "not yet");
    assert_int_equal(f->script.n_attempts, 2);
    end(f);
}

static void test_lost_before_accepted(void **state)
{
    (void)state;
    /* Where the session stands is not known: sending the input again could double it. */
    struct fixture *f = begin((struct script){.how = BREAK_RESTART, .break_at = 0, .no_accepted = true});
    assert_int_equal(hcattn_health(f->client, 0, &(struct hcattn_health){.live = false}, &f->error), 0);
    assert_int_equal(ask(f, HCATTN_AT_ANY, 0), -ENOTCONN);
    end_fake(f);
    assert_int_equal(f->script.n_attempts, 1);
    end(f);
    /* With a known position nothing can be doubled. */
    f = begin((struct script){.how = BREAK_RESTART, .break_at = 0, .no_accepted = true});
    assert_int_equal(ask(f, 0, 0), 0);
    end_fake(f);
    check_whole(f);
    end(f);
}

static void test_callback_stops(void **state)
{
    (void)state;
    struct fixture *f = begin((struct script){.how = BREAK_SILENCE, .break_at = 3});
    f->seen.stop_after = 2;
    assert_int_equal(ask(f, 0, 0), -ECANCELED);
    assert_int_equal(f->error.code, HCATTN_CANCELLED);
    assert_int_equal(f->seen.n_ids, 2);
    end_fake(f);
    assert_int_equal(f->script.cancelled, f->script.request_ids[0]);
    end(f);
}

static void test_cancel(void **state)
{
    (void)state;
    struct fixture *f = begin((struct script){.how = BREAK_SILENCE, .break_at = 3});
    f->seen.cancel = f->client;
    assert_int_equal(ask(f, 0, 0), -ECANCELED);
    f->seen = (struct seen){.n_ids = 0};
    assert_int_equal(ask(f, 0, 0), 0); /* the cancel was used up */
    check_whole(f);
    hcattn_cancel(f->client);
    assert_int_equal(ask(f, 0, 0), -ECANCELED); /* of the next call when none runs */
    end_fake(f);
    assert_int_equal(f->script.cancelled, f->script.request_ids[0]);
    end(f);
}

static void test_deadline(void **state)
{
    (void)state;
    struct fixture *f = begin((struct script){.how = BREAK_SILENCE, .break_at = 3});
    uint64_t begun = clock_now_us();
    assert_int_equal(ask(f, 0, 700), -ETIMEDOUT);
    assert_int_equal(f->error.code, HCATTN_UNAVAILABLE);
    uint64_t took_us = clock_now_us() - begun;
    assert_true(took_us >= 700000 && took_us < 5000000);
    end_fake(f);
    assert_int_equal(f->script.cancelled, f->script.request_ids[0]);
    end(f);
}

static void test_long_silence_is_no_loss(void **state)
{
    (void)state;
    struct fixture *f = begin((struct script){.how = BREAK_SILENCE, .break_at = 3});
    assert_int_equal(ask(f, 0, 3500), -ETIMEDOUT);
    end_fake(f);
    assert_int_equal(f->script.n_attempts, 1); /* health listed it each time */
    assert_true(f->fake.n_health >= 3 && f->fake.n_health <= 6);
    end(f);
}

static void test_coordinator_gone_for_good(void **state)
{
    (void)state;
    struct fixture *f = begin((struct script){.how = BREAK_NEVER});
    hcattn_close(f->client);
    struct hcattn_config config = {.endpoint = f->fake.endpoint, .lost_timeout_ms = 1500};
    assert_int_equal(hcattn_open(&config, &f->client, &f->error), 0);
    assert_int_equal(ask(f, 0, 0), 0);
    end_fake(f);
    assert_int_equal(ask(f, 0, 0), -ENOTCONN);
    assert_int_equal(f->error.code, HCATTN_UNAVAILABLE);
    end(f);
}

static void test_no_coordinator(void **state)
{
    (void)state;
    char directory[] = "/tmp/hcattn-test-XXXXXX";
    assert_non_null(mkdtemp(directory));
    struct hcattn_config config = {.runtime_dir = directory, .connect_timeout_ms = 60000};
    struct hcattn *client = NULL;
    struct hcattn_error error;
    struct hcattn_health health;
    assert_int_equal(hcattn_open(&config, &client, &error), 0);
    uint64_t begun = clock_now_us();
    assert_int_equal(hcattn_health(client, 0, &health, &error), -ENOTCONN);
    assert_true(clock_now_us() - begun < 5000000); /* no socket file: not waited for long */
    assert_int_equal(error.code, HCATTN_UNAVAILABLE);
    assert_non_null(strstr(error.sentence, directory));
    assert_non_null(strstr(error.sentence, "start one with 'hcattn up'"));
    hcattn_close(client);
    rmdir(directory);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_undisturbed),
        cmocka_unit_test(test_everything_twice),
        cmocka_unit_test(test_restart),
        cmocka_unit_test(test_request_forgotten),
        cmocka_unit_test(test_gap),
        cmocka_unit_test(test_refused_while_peers_come_back),
        cmocka_unit_test(test_refused_for_good),
        cmocka_unit_test(test_lost_before_accepted),
        cmocka_unit_test(test_callback_stops),
        cmocka_unit_test(test_cancel),
        cmocka_unit_test(test_deadline),
        cmocka_unit_test(test_long_silence_is_no_loss),
        cmocka_unit_test(test_coordinator_gone_for_good),
        cmocka_unit_test(test_no_coordinator),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
