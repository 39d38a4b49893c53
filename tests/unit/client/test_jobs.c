/* test_jobs.c - jobs of libhcattn: what is asked, what is told, coordinators that die meanwhile; forks' policies; profiles. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "client/hcattn_jobs.h"
#include "common/clock.h"
#include "tests/unit/client/fake_coordinator.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MAX_ATTEMPTS 4

/* What the fake does, and what it saw. */
struct script {
    uint32_t n_rows;
    uint32_t dies_after; /* rows of the first attempt; 0: it lives */
    uint32_t gap;        /* the first attempt leaves this row out; 0: none */
    uint32_t slow_ms;    /* before each row */
    bool silent;         /* no reply at all */
    bool odd_shape;      /* kept_by_head is not [n_layers][n_kv_heads] */
    bool refuses;
    bool profile_odd;
    unsigned n_attempts;
    uint64_t ids[MAX_ATTEMPTS];
    Hcattn__RunJob__JobCase job;
    char words[256]; /* what was asked for */
};

struct fixture {
    struct fake_coordinator fake;
    struct script script;
    struct hcattn *client;
    struct hcattn_error error;
    /* told by callbacks */
    uint32_t n_rows, n_progress, stop_at_row;
    double last_done;
    char phase[32];
};

static void send_progress(struct fake_coordinator *fake, uint64_t id, double done)
{
    Hcattn__Reply reply = HCATTN__REPLY__INIT;
    Hcattn__JobProgress progress = HCATTN__JOB_PROGRESS__INIT;
    progress.phase = (char *)"prefill";
    progress.done = done;
    progress.left_us = 5000000;
    reply.request_id = id;
    reply.reply_case = HCATTN__REPLY__REPLY_JOB_PROGRESS;
    reply.job_progress = &progress;
    fake_coordinator_reply(fake, &reply);
}

static void send_row(struct fake_coordinator *fake, uint64_t id, uint32_t index)
{
    const struct script *script = fake->context;
    Hcattn__Reply reply = HCATTN__REPLY__INIT;
    Hcattn__JobRow row = HCATTN__JOB_ROW__INIT;
    Hcattn__EvalRow eval = HCATTN__EVAL_ROW__INIT;
    Hcattn__AttentionRow attention = HCATTN__ATTENTION_ROW__INIT, *pointer = &attention;
    float kept[] = {0.1f, 0.2f, 0.3f, 0.4f, 0.5f, 0.6f};
    eval.index = index;
    eval.text = (char *)"prose";
    eval.preset = (char *)"default";
    eval.meaning = (char *)"rot2,deviation=0.02";
    eval.context = 4096;
    eval.tail = 256;
    eval.kld_mean = 0.25;
    eval.top1 = 0.75;
    eval.kept_by_head = kept;
    eval.n_kept_by_head = script->odd_shape ? 5 : 6;
    eval.n_layers = 3;
    eval.n_kv_heads = 2;
    attention.recall = 0.5f;
    attention.tail_error = 0.125f;
    eval.attention = &pointer;
    eval.n_attention = 1;
    row.eval = &eval;
    reply.request_id = id;
    reply.reply_case = HCATTN__REPLY__REPLY_JOB_ROW;
    reply.job_row = &row;
    fake_coordinator_reply(fake, &reply);
}

static void send_done(struct fake_coordinator *fake, uint64_t id)
{
    Hcattn__Reply reply = HCATTN__REPLY__INIT;
    Hcattn__JobDone done = HCATTN__JOB_DONE__INIT;
    done.sentence = (char *)"all is well";
    done.path = (char *)"/there/it.is";
    reply.request_id = id;
    reply.reply_case = HCATTN__REPLY__REPLY_JOB_DONE;
    reply.job_done = &done;
    fake_coordinator_reply(fake, &reply);
}

static void note_job(struct script *script, const Hcattn__RunJob *job)
{
    script->job = job->job_case;
    if (job->job_case == HCATTN__RUN_JOB__JOB_EVALUATE)
        snprintf(script->words, sizeof(script->words), "%zu %s=%s %u %u %zu %s %d", job->evaluate->n_texts,
                 job->evaluate->texts[0]->name, job->evaluate->texts[0]->text, job->evaluate->context,
                 job->evaluate->tail, job->evaluate->n_presets, job->evaluate->presets[1], job->evaluate->attention);
    if (job->job_case == HCATTN__RUN_JOB__JOB_TRAIN_CODEBOOK)
        snprintf(script->words, sizeof(script->words), "%zu %u %u %llu %u %d", job->train_codebook->n_texts,
                 job->train_codebook->n_dims, job->train_codebook->n_centroids,
                 (unsigned long long)job->train_codebook->seed, job->train_codebook->max_iterations,
                 job->train_codebook->again);
    if (job->job_case == HCATTN__RUN_JOB__JOB_GATHER_STATISTICS)
        snprintf(script->words, sizeof(script->words), "%zu %s %d", job->gather_statistics->n_texts,
                 job->gather_statistics->n_texts ? job->gather_statistics->texts[0]->text : "",
                 job->gather_statistics->again);
}

static enum fake_coordinator_step run_job(struct fake_coordinator *fake, const Hcattn__Request *request)
{
    struct script *script = fake->context;
    bool first = script->n_attempts == 0;
    if (script->n_attempts < MAX_ATTEMPTS)
        script->ids[script->n_attempts] = request->request_id;
    script->n_attempts++;
    note_job(script, request->run_job);
    if (script->silent)
        return FAKE_KNOWN;
    if (script->refuses) {
        fake_coordinator_error(fake, request->request_id, HCATTN__ERROR_CODE__BUSY, "a job runs already");
        return FAKE_KNOWN;
    }
    send_progress(fake, request->request_id, 0.5);
    for (uint32_t i = 0; i < script->n_rows; i++) {
        if (script->slow_ms)
            clock_sleep_us(script->slow_ms * 1000);
        if (first && script->dies_after && i == script->dies_after)
            return FAKE_RESTART;
        if (!first || !script->gap || i != script->gap)
            send_row(fake, request->request_id, i);
    }
    send_done(fake, request->request_id);
    return FAKE_KNOWN;
}

static enum fake_coordinator_step fork_session(struct fake_coordinator *fake, const Hcattn__Request *request)
{
    struct script *script = fake->context;
    Hcattn__Reply reply = HCATTN__REPLY__INIT;
    Hcattn__Forked forked = HCATTN__FORKED__INIT;
    snprintf(script->words, sizeof(script->words), "%s", request->fork->policy);
    forked.session = request->fork->new_session;
    reply.request_id = request->request_id;
    reply.reply_case = HCATTN__REPLY__REPLY_FORKED;
    reply.forked = &forked;
    fake_coordinator_reply(fake, &reply);
    return FAKE_KNOWN;
}

static enum fake_coordinator_step describe(struct fake_coordinator *fake, const Hcattn__Request *request)
{
    const struct script *script = fake->context;
    Hcattn__Reply reply = HCATTN__REPLY__INIT;
    Hcattn__SessionStats stats = HCATTN__SESSION_STATS__INIT;
    Hcattn__SessionDescribed described = HCATTN__SESSION_DESCRIBED__INIT;
    Hcattn__HeadProfile profile = HCATTN__HEAD_PROFILE__INIT;
    Hcattn__HeadClass classes[] = {HCATTN__HEAD_CLASS__HEAD_FULL, HCATTN__HEAD_CLASS__HEAD_SPECIAL,
                                   HCATTN__HEAD_CLASS__HEAD_LOCAL, HCATTN__HEAD_CLASS__HEAD_FREQUENT};
    float kept[] = {1.0f, 0.99f, 0.985f, 0.98f};
    profile.n_tokens = 300;
    profile.recovery = 0.98f;
    profile.classes = classes;
    profile.n_classes = 4;
    profile.kept_mass = kept;
    profile.n_kept_mass = script->profile_odd ? 3 : 4;
    described.stats = &stats;
    described.n_layers = 2;
    described.n_kv_heads = 2;
    described.profile = request->describe_session->session == 1 ? &profile : NULL;
    reply.request_id = request->request_id;
    reply.reply_case = HCATTN__REPLY__REPLY_SESSION_DESCRIBED;
    reply.session_described = &described;
    fake_coordinator_reply(fake, &reply);
    return FAKE_KNOWN;
}

static enum fake_coordinator_step answer(struct fake_coordinator *fake, const Hcattn__Request *request)
{
    switch (request->request_case) {
    case HCATTN__REQUEST__REQUEST_RUN_JOB:
        return run_job(fake, request);
    case HCATTN__REQUEST__REQUEST_FORK:
        return fork_session(fake, request);
    case HCATTN__REQUEST__REQUEST_DESCRIBE_SESSION:
        return describe(fake, request);
    case HCATTN__REQUEST__REQUEST_CANCEL:
        fake_coordinator_error(fake, request->cancel->request, HCATTN__ERROR_CODE__CANCELLED, "cancelled");
        return FAKE_LOST;
    default:
        fake_coordinator_error(fake, request->request_id, HCATTN__ERROR_CODE__NOT_SUPPORTED, "not here");
        return FAKE_KNOWN;
    }
}

static struct fixture *begin(struct script script)
{
    struct fixture *f = calloc(1, sizeof(*f));
    assert_non_null(f);
    static unsigned n;
    f->script = script;
    f->stop_at_row = UINT32_MAX;
    snprintf(f->fake.endpoint, sizeof(f->fake.endpoint), "ipc:///tmp/hcattn-test-jobs-%d-%u", (int)getpid(), n++);
    f->fake.handle = answer;
    f->fake.context = &f->script;
    fake_coordinator_start(&f->fake);
    struct hcattn_config config = {.endpoint = f->fake.endpoint};
    assert_int_equal(hcattn_open(&config, &f->client, NULL), 0);
    return f;
}

static void end_fake(struct fixture *f)
{
    fake_coordinator_stop(&f->fake);
    unlink(f->fake.endpoint + strlen("ipc://"));
}

static void end(struct fixture *f)
{
    hcattn_close(f->client);
    free(f);
}

static int on_progress(void *context, const struct hcattn_job_progress *progress)
{
    struct fixture *f = context;
    f->n_progress++;
    f->last_done = progress->done;
    snprintf(f->phase, sizeof(f->phase), "%s", progress->phase);
    assert_int_equal(progress->left_us, 5000000);
    return 0;
}

static int on_row(void *context, const struct hcattn_eval_row *row)
{
    struct fixture *f = context;
    assert_int_equal(row->index, f->n_rows); /* in order, each once */
    f->n_rows++;
    assert_string_equal(row->text, "prose");
    assert_string_equal(row->preset, "default");
    assert_int_equal(row->context, 4096);
    assert_true(row->kld_mean == 0.25);
    assert_int_equal(row->n_layers, 3);
    assert_int_equal(row->n_kv_heads, 2);
    assert_true(row->kept_by_head[5] == 0.6f);
    assert_int_equal(row->n_attention, 1);
    assert_true(row->attention[0].recall == 0.5f);
    assert_true(row->attention[0].tail_error == 0.125f);
    return row->index == f->stop_at_row;
}

static int evaluate(struct fixture *f, uint32_t timeout_ms, struct hcattn_job_done *done)
{
    static const struct hcattn_text texts[] = {{"prose", "once upon"}, {"code", "int main"}};
    static const char *const presets[] = {"default", "rot4,mass=0.9"};
    struct hcattn_evaluate job = {.texts = texts,
                                  .n_texts = 2,
                                  .context = 4096,
                                  .tail = 256,
                                  .presets = presets,
                                  .n_presets = 2,
                                  .attention = true};
    struct hcattn_job_events events = {.context = f, .progress = on_progress, .row = on_row};
    return hcattn_evaluate(f->client, &job, &events, timeout_ms, done, &f->error);
}

static void test_evaluate(void **state)
{
    (void)state;
    struct fixture *f = begin((struct script){.n_rows = 3});
    struct hcattn_job_done done = {.sentence = ""};
    assert_int_equal(evaluate(f, 0, &done), 0);
    end_fake(f);
    assert_string_equal(done.sentence, "all is well");
    assert_string_equal(done.path, "/there/it.is");
    assert_string_equal(f->script.words, "2 prose=once upon 4096 256 2 rot4,mass=0.9 1");
    assert_int_equal(f->n_rows, 3);
    assert_int_equal(f->n_progress, 1);
    assert_true(f->last_done == 0.5);
    assert_string_equal(f->phase, "prefill");
    end(f);
}

static void test_trainings(void **state)
{
    (void)state;
    struct fixture *f = begin((struct script){.n_rows = 0});
    struct hcattn_text text = {"own", "text of mine"};
    struct hcattn_train_codebook train = {.n_dims = 4, .n_centroids = 512, .seed = 7, .max_iterations = 9};
    assert_int_equal(hcattn_train_codebook(f->client, &train, NULL, 0, NULL, &f->error), 0);
    end_fake(f); /* what it saw may be looked at */
    assert_int_equal(f->script.job, HCATTN__RUN_JOB__JOB_TRAIN_CODEBOOK);
    assert_string_equal(f->script.words, "0 4 512 7 9 0");
    end(f);
    f = begin((struct script){.n_rows = 0});
    struct hcattn_gather_statistics gather = {.texts = &text, .n_texts = 1, .again = true};
    assert_int_equal(hcattn_gather_statistics(f->client, &gather, NULL, 0, NULL, &f->error), 0);
    end_fake(f);
    assert_int_equal(f->script.job, HCATTN__RUN_JOB__JOB_GATHER_STATISTICS);
    assert_string_equal(f->script.words, "1 text of mine 1");
    end(f);
}

/* The coordinator dies with two rows told: the job is sent again under its id, and they are not told again. */
static void test_coordinator_lost(void **state)
{
    (void)state;
    struct fixture *f = begin((struct script){.n_rows = 4, .dies_after = 2});
    assert_int_equal(evaluate(f, 0, NULL), 0);
    end_fake(f);
    assert_int_equal(f->n_rows, 4);
    assert_int_equal(f->script.n_attempts, 2);
    assert_true(f->script.ids[0] == f->script.ids[1]);
    end(f);
}

static void test_a_gap_is_asked_for_again(void **state)
{
    (void)state;
    struct fixture *f = begin((struct script){.n_rows = 4, .gap = 1});
    assert_int_equal(evaluate(f, 0, NULL), 0);
    end_fake(f);
    assert_int_equal(f->n_rows, 4);
    assert_int_equal(f->script.n_attempts, 2);
    end(f);
}

/* It takes longer than the deadline, but is heard of all the time. */
static void test_progress_extends_the_deadline(void **state)
{
    (void)state;
    struct fixture *f = begin((struct script){.n_rows = 8, .slow_ms = 200});
    uint64_t begun_us = clock_now_us();
    assert_int_equal(evaluate(f, 1000, NULL), 0);
    assert_true(clock_now_us() - begun_us > 1200000);
    end_fake(f);
    assert_int_equal(f->n_rows, 8);
    end(f);

    f = begin((struct script){.silent = true});
    assert_int_equal(evaluate(f, 300, NULL), -ETIMEDOUT);
    end_fake(f);
    end(f);
}

static void test_what_is_no_answer(void **state)
{
    (void)state;
    struct fixture *f = begin((struct script){.n_rows = 1, .odd_shape = true});
    assert_int_equal(evaluate(f, 0, NULL), -EPROTO);
    end_fake(f);
    assert_int_equal(f->n_rows, 0);
    end(f);

    f = begin((struct script){.refuses = true});
    assert_int_equal(evaluate(f, 0, NULL), -EBUSY);
    assert_string_equal(f->error.sentence, "a job runs already");
    end_fake(f);
    end(f);

    f = begin((struct script){.n_rows = 1});
    struct hcattn_text bad = {"bad", "a\xff"};
    struct hcattn_gather_statistics gather = {.texts = &bad, .n_texts = 1};
    assert_int_equal(hcattn_gather_statistics(f->client, &gather, NULL, 0, NULL, &f->error), -EINVAL);
    assert_non_null(strstr(f->error.sentence, "'bad' is not UTF-8 (at byte 1)"));
    end_fake(f);
    assert_int_equal(f->script.n_attempts, 0); /* was not sent */
    end(f);
}

static void test_stopped_by_the_caller(void **state)
{
    (void)state;
    struct fixture *f = begin((struct script){.n_rows = 4});
    f->stop_at_row = 1;
    assert_int_equal(evaluate(f, 0, NULL), -ECANCELED);
    end_fake(f);
    assert_int_equal(f->n_rows, 2);
    end(f);
}

static void test_fork_with_a_policy(void **state)
{
    (void)state;
    struct fixture *f = begin((struct script){.n_rows = 0});
    struct hcattn_fork fork = {.session = 1, .policy = "quality"};
    struct hcattn_forked forked;
    assert_int_equal(hcattn_fork(f->client, &fork, 0, &forked, &f->error), 0);
    end_fake(f);
    assert_string_equal(f->script.words, "quality");
    end(f);
    f = begin((struct script){.n_rows = 0});
    fork.policy = NULL;
    assert_int_equal(hcattn_fork(f->client, &fork, 0, &forked, &f->error), 0);
    end_fake(f);
    assert_string_equal(f->script.words, "");
    end(f);
}

static void test_profile(void **state)
{
    (void)state;
    struct fixture *f = begin((struct script){.n_rows = 0});
    struct hcattn_description description;
    assert_int_equal(hcattn_describe_session(f->client, 1, 0, &description, &f->error), 0);
    assert_true(description.profiled);
    assert_int_equal(description.profile.n_tokens, 300);
    assert_true(description.profile.recovery == 0.98f);
    assert_int_equal(description.profile.classes[1], HCATTN_HEAD_SPECIAL);
    assert_int_equal(description.profile.classes[3], HCATTN_HEAD_FREQUENT);
    assert_true(description.profile.kept_mass[2] == 0.985f);
    assert_string_equal(hcattn_head_class_name(HCATTN_HEAD_LOCAL), "local");
    hcattn_description_free(&description);
    assert_int_equal(hcattn_describe_session(f->client, 2, 0, &description, &f->error), 0);
    assert_false(description.profiled);
    hcattn_description_free(&description);
    end_fake(f);
    end(f);

    f = begin((struct script){.profile_odd = true});
    assert_int_equal(hcattn_describe_session(f->client, 1, 0, &description, &f->error), -EPROTO);
    end_fake(f);
    end(f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_evaluate),
        cmocka_unit_test(test_trainings),
        cmocka_unit_test(test_coordinator_lost),
        cmocka_unit_test(test_a_gap_is_asked_for_again),
        cmocka_unit_test(test_progress_extends_the_deadline),
        cmocka_unit_test(test_what_is_no_answer),
        cmocka_unit_test(test_stopped_by_the_caller),
        cmocka_unit_test(test_fork_with_a_policy),
        cmocka_unit_test(test_profile),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
