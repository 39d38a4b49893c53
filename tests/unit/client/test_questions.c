/* test_questions.c - calls that are one question and one answer, and scores: garbage, wrong answers, restarts. */
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
    bool garbage;       /* before each answer */
    bool dies_at_first; /* the first request is its last */
    unsigned n_attempts;
    bool had_at[4];
    uint64_t ats[4];
};

struct fixture {
    struct fake_coordinator fake;
    struct script script;
    struct hcattn *client;
    struct hcattn_error error;
};

static struct fixture *begin(enum fake_coordinator_step (*handle)(struct fake_coordinator *, const Hcattn__Request *),
                             struct script script)
{
    static unsigned n;
    struct fixture *f = calloc(1, sizeof(*f));
    assert_non_null(f);
    f->script = script;
    f->fake.handle = handle;
    f->fake.context = &f->script;
    snprintf(f->fake.endpoint, sizeof(f->fake.endpoint), "ipc:///tmp/hcattn-questions-%d-%u.sock", (int)getpid(), n++);
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

static enum fake_coordinator_step answer_each(struct fake_coordinator *fake, const Hcattn__Request *request)
{
    struct script *script = fake->context;
    Hcattn__Reply reply = HCATTN__REPLY__INIT;
    reply.request_id = request->request_id;
    script->n_attempts++;
    if (script->garbage) {
        /* Garbage, an empty frame, somebody else's reply: none of them is an answer. */
        fake_coordinator_bytes(fake, "\xff\xff\xff garbage", 11);
        fake_coordinator_bytes(fake, "", 0);
        fake_coordinator_error(fake, request->request_id + 1, HCATTN__ERROR_CODE__INTERNAL, "not yours");
    }
    if (script->dies_at_first && script->n_attempts == 1)
        return FAKE_RESTART;
    switch (request->request_case) {
    case HCATTN__REQUEST__REQUEST_OPEN_SESSION: {
        Hcattn__SessionOpened opened = HCATTN__SESSION_OPENED__INIT;
        opened.session = request->open_session->session;
        opened.policy = (char *)"full";
        opened.n_ctx = 8192;
        reply.reply_case = HCATTN__REPLY__REPLY_SESSION_OPENED;
        reply.session_opened = &opened;
        fake_coordinator_reply(fake, &reply);
        break;
    }
    case HCATTN__REQUEST__REQUEST_CLOSE_SESSION:
        fake_coordinator_error(fake, request->request_id, HCATTN__ERROR_CODE__NOT_FOUND, "no such session");
        break;
    case HCATTN__REQUEST__REQUEST_TOKENIZE: {
        Hcattn__Tokenized tokenized = HCATTN__TOKENIZED__INIT;
        uint32_t ids[] = {5, 6};
        ProtobufCBinaryData pieces[] = {{.len = 2, .data = (uint8_t *)"ab"}, {.len = 1, .data = (uint8_t *)"\xf0"}};
        tokenized.ids = ids;
        tokenized.n_ids = 2;
        tokenized.pieces = pieces;
        tokenized.n_pieces = 2;
        reply.reply_case = HCATTN__REPLY__REPLY_TOKENIZED;
        reply.tokenized = &tokenized;
        fake_coordinator_reply(fake, &reply);
        break;
    }
    case HCATTN__REQUEST__REQUEST_DETOKENIZE: {
        Hcattn__Detokenized detokenized = HCATTN__DETOKENIZED__INIT;
        detokenized.text = (char *)(request->detokenize->n_ids == 2 ? "two" : "other");
        reply.reply_case = HCATTN__REPLY__REPLY_DETOKENIZED;
        reply.detokenized = &detokenized;
        fake_coordinator_reply(fake, &reply);
        break;
    }
    case HCATTN__REQUEST__REQUEST_STATS: /* a reply of another kind */
        reply.reply_case = HCATTN__REPLY__REPLY_CANCELLED;
        reply.cancelled = &(Hcattn__Cancelled)HCATTN__CANCELLED__INIT;
        fake_coordinator_reply(fake, &reply);
        break;
    default:
        fake_coordinator_error(fake, request->request_id, HCATTN__ERROR_CODE__CONTEXT_EXCEEDED, "too long");
        break;
    }
    return FAKE_KNOWN;
}

static void test_small_calls(void **state)
{
    (void)state;
    struct fixture *f = begin(answer_each, (struct script){.garbage = true});
    struct hcattn_session session;
    assert_int_equal(hcattn_open_session(f->client, NULL, 0, &session, &f->error), 0);
    assert_true(session.session != 0);
    assert_string_equal(session.policy, "full");
    assert_int_equal(session.n_ctx, 8192);

    struct hcattn_tokens tokens;
    struct hcattn_input input = {.text = "ab"};
    assert_int_equal(hcattn_tokenize(f->client, &input, 0, &tokens, &f->error), 0);
    assert_int_equal(tokens.n_ids, 2);
    assert_int_equal(tokens.ids[1], 6);
    assert_int_equal(tokens.n_pieces, 2);
    assert_int_equal(tokens.pieces[1].n_bytes, 1);
    assert_int_equal(tokens.pieces[1].bytes[0], 0xf0);
    hcattn_tokens_free(&tokens);
    hcattn_tokens_free(&tokens);

    char *text = NULL;
    uint32_t ids[] = {5, 6};
    assert_int_equal(hcattn_detokenize(f->client, ids, 2, false, 0, &text, &f->error), 0);
    assert_string_equal(text, "two");
    free(text);

    struct hcattn_health health;
    assert_int_equal(hcattn_health(f->client, 0, &health, &f->error), 0);
    assert_true(health.live && health.ready);

    struct hcattn_stats stats;
    assert_int_equal(hcattn_stats(f->client, 0, &stats, &f->error), -EPROTO);
    assert_int_equal(f->error.code, HCATTN_INTERNAL);

    assert_int_equal(hcattn_close_session(f->client, 1, 0, NULL, &f->error), -ENOENT);
    assert_int_equal(hcattn_append(f->client, 1, &input, 0, NULL, 0, NULL, &f->error), -E2BIG);
    assert_int_equal(f->error.code, HCATTN_CONTEXT_EXCEEDED);
    assert_int_equal(f->error.n_prompt_tokens, 5000);
    assert_int_equal(f->error.n_ctx, 4096);
    assert_int_equal(f->error.bytes_asked, 77);
    assert_int_equal(f->error.bytes_free, 33);
    assert_string_equal(f->error.sentence, "too long");
    end_fake(f);
    end(f);
}

/* The coordinator died on it: whether it had closed the session shows in NOT_FOUND, and that is as good. */
static void test_close_again(void **state)
{
    (void)state;
    struct fixture *f = begin(answer_each, (struct script){.dies_at_first = true});
    uint64_t freed = 1;
    assert_int_equal(hcattn_close_session(f->client, 1, 0, &freed, &f->error), 0);
    assert_int_equal(freed, 0);
    end_fake(f);
    assert_int_equal(f->script.n_attempts, 2);
    end(f);
}

static void test_bad_input_is_not_sent(void **state)
{
    (void)state;
    struct fixture *f = begin(answer_each, (struct script){.garbage = false});
    struct hcattn_tokens tokens;
    struct hcattn_message messages[] = {{"user", "fine"}, {"user", "bad \xed\xa0\x80"}};
    struct hcattn_input inputs[] = {{.text = "a\xff"},
                                    {.messages = messages, .n_messages = 2},
                                    {.text = "a", .messages = messages, .n_messages = 1}};
    for (size_t i = 0; i < 3; i++) {
        assert_int_equal(hcattn_tokenize(f->client, &inputs[i], 0, &tokens, &f->error), -EINVAL);
        assert_int_equal(f->error.code, HCATTN_INVALID_ARGUMENT);
    }
    end_fake(f);
    assert_int_equal(f->script.n_attempts, 0);
    end(f);
}

/* ---- scores ---- */

static enum fake_coordinator_step score(struct fake_coordinator *fake, const Hcattn__Request *request)
{
    struct script *script = fake->context;
    uint32_t ids[] = {1, 2, 3, 4, 5, 6, 7};
    assert_int_equal(request->request_case, HCATTN__REQUEST__REQUEST_SCORE);
    assert_true(script->n_attempts < 4);
    script->had_at[script->n_attempts] = request->score->at != NULL;
    script->ats[script->n_attempts++] = request->score->at ? request->score->at->n_tokens : 0;
    fake_coordinator_accepted(fake, request->request_id, 0, ids, 7);
    float all[2] = {-1.5f, -2.5f};
    for (uint64_t first = 2; first < 7; first += 2) { /* positions 2 3, 4 5, 6 7 */
        if (script->n_attempts == 1 && first == 6) {
            clock_sleep_us(100000);
            return FAKE_RESTART;
        }
        Hcattn__TokenLogprobs tokens[2], *pointers[2] = {&tokens[0], &tokens[1]};
        for (size_t i = 0; i < 2; i++) {
            hcattn__token_logprobs__init(&tokens[i]);
            tokens[i].logprob = -(float)(first + i);
            tokens[i].all.len = sizeof(all);
            tokens[i].all.data = (uint8_t *)all;
        }
        Hcattn__Scored scored = HCATTN__SCORED__INIT;
        scored.first = first;
        scored.scores = pointers;
        scored.n_scores = 2;
        Hcattn__Reply reply = HCATTN__REPLY__INIT;
        reply.request_id = request->request_id;
        reply.reply_case = HCATTN__REPLY__REPLY_SCORED;
        reply.scored = &scored;
        fake_coordinator_reply(fake, &reply);
    }
    Hcattn__ScoreDone done = HCATTN__SCORE_DONE__INIT;
    done.n_tokens = 8;
    Hcattn__Reply reply = HCATTN__REPLY__INIT;
    reply.request_id = request->request_id;
    reply.reply_case = HCATTN__REPLY__REPLY_SCORE_DONE;
    reply.score_done = &done;
    fake_coordinator_reply(fake, &reply);
    return FAKE_KNOWN;
}

static int on_scored(void *context, const struct hcattn_scored *scored)
{
    uint64_t *next = context;
    assert_int_equal(scored->first, *next);
    for (size_t i = 0; i < scored->n_scores; i++) {
        assert_true(scored->scores[i].logprob == -(float)*next);
        assert_int_equal(scored->scores[i].n_all, 2);
        assert_true(scored->scores[i].all[1] == -2.5f);
        ++*next;
    }
    return 0;
}

static void test_score_restart(void **state)
{
    (void)state;
    struct fixture *f = begin(score, (struct script){.garbage = false});
    uint64_t next = 2;
    struct hcattn_events events = {.context = &next, .scored = on_scored};
    struct hcattn_score request = {.session = 3, .input = {.text = "x"}, .from = 2, .at = 0, .all_logprobs = true};
    struct hcattn_score_done done;
    assert_int_equal(hcattn_score(f->client, &request, &events, 0, &done, &f->error), 0);
    end_fake(f);
    assert_int_equal(next, 8);
    assert_int_equal(done.n_tokens, 8);
    assert_int_equal(f->script.n_attempts, 2);
    assert_true(f->script.had_at[1]);
    assert_int_equal(f->script.ats[1], 0);
    end(f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_small_calls),
        cmocka_unit_test(test_close_again),
        cmocka_unit_test(test_bad_input_is_not_sent),
        cmocka_unit_test(test_score_restart),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
