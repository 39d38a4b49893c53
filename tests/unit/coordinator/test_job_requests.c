/* The real coordinator with fakes around it: what a job may ask, and that all of it reaches the worker. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/clock.h"
#include "tests/unit/coordinator/fakes.h"

#ifdef HCATTN_SANITIZED
enum { LARGE = 4 << 20 };
#else
enum { LARGE = 48 << 20 }; /* the most there may be */
#endif

static struct fakes fakes;
static struct fake_worker *const worker = &fakes.workers[0];

static int teardown(void **state)
{
    (void)state;
    fakes_finish(&fakes);
    return 0;
}

static int setup(void **state)
{
    (void)state;
    fakes_start(&fakes, 1, NULL);
    fakes_all_ready(&fakes);
    return 0;
}

static Hcattn__Work__WorkRequest *take_job(void)
{
    return fake_worker_take(&fakes, worker, WORK(RUN_JOB));
}

static void finish(Hcattn__Work__WorkRequest *job, uint64_t id)
{
    fake_worker_job_done(worker, job->work);
    fake_client_drop(&fakes, id, REPLY(JOB_DONE));
    fakes_drop(job);
}

/* The whole service still works: one more job. */
static void expect_service(void)
{
    uint64_t id = fake_client_evaluate(&fakes, "abc");
    finish(take_job(), id);
}

static uint64_t ask_job(Hcattn__RunJob *job)
{
    Hcattn__Request request = HCATTN__REQUEST__INIT;
    request.request_case = HCATTN__REQUEST__REQUEST_RUN_JOB;
    request.run_job = job;
    return fake_client_ask(&fakes, &request);
}

static void every_kind_of_job(void **state)
{
    (void)state;
    Hcattn__TrainCodebook train = HCATTN__TRAIN_CODEBOOK__INIT;
    Hcattn__GatherStatistics gather = HCATTN__GATHER_STATISTICS__INIT;
    Hcattn__RunJob job = HCATTN__RUN_JOB__INIT;
    train.n_dims = 4;
    train.n_centroids = 512;
    train.seed = 99;
    train.max_iterations = 7;
    train.again = true;
    job.job_case = HCATTN__RUN_JOB__JOB_TRAIN_CODEBOOK;
    job.train_codebook = &train;
    uint64_t id = ask_job(&job);
    Hcattn__Work__WorkRequest *work = take_job();
    const Hcattn__TrainCodebook *told = work->run_job->train_codebook;
    assert_true(told->n_dims == 4 && told->n_centroids == 512 && told->seed == 99 && told->max_iterations == 7 &&
                told->again && told->n_texts == 0);
    finish(work, id);
    gather.again = true;
    job.job_case = HCATTN__RUN_JOB__JOB_GATHER_STATISTICS;
    job.gather_statistics = &gather;
    id = ask_job(&job);
    work = take_job();
    assert_true(work->run_job->gather_statistics->again);
    /* the worker refuses it */
    fake_worker_error(worker, work->work, ERROR_CODE(NOT_SUPPORTED));
    fake_client_expect_error(&fakes, id, ERROR_CODE(NOT_SUPPORTED));
    fakes_drop(work);
}

/* The longest texts there may be: they arrive, and everybody else is served meanwhile. */
static void large_texts(void **state)
{
    (void)state;
    char *text = malloc(LARGE + 2);
    assert_non_null(text);
    memset(text, 'x', LARGE + 1);
    text[LARGE] = text[LARGE + 1] = 0;
    uint64_t id = fake_client_evaluate(&fakes, text), longest_us = 0;
    while (worker->n_queue == 0) {
        uint64_t asked_us = clock_now_us();
        hcattn__reply__free_unpacked(fake_client_health(&fakes), NULL);
        uint64_t took_us = clock_now_us() - asked_us;
        longest_us = took_us > longest_us ? took_us : longest_us;
    }
    if (longest_us > 2000000)
        fail_msg("Health took %llu us", (unsigned long long)longest_us);
    Hcattn__Work__WorkRequest *job = take_job();
    assert_int_equal(strlen(job->run_job->evaluate->texts[0]->text), LARGE);
    finish(job, id);
#ifndef HCATTN_SANITIZED
    text[LARGE] = 'x';
    Hcattn__Reply *reply = fake_client_take(&fakes, fake_client_evaluate(&fakes, text), REPLY(ERROR));
    assert_int_equal(reply->error->code, ERROR_CODE(INVALID_ARGUMENT));
    assert_non_null(strstr(reply->error->sentence, "50331649 bytes of text in one job; at most 50331648"));
    hcattn__reply__free_unpacked(reply, NULL);
#endif
    free(text);
}

/* ---- what is refused ---- */

struct bad {
    const char *part; /* of the sentence */
    const char *name, *text;
    uint32_t context, tail;
    size_t n_texts, n_presets;
    const char *preset;
};

static void evaluations_that_are_refused(void **state)
{
    (void)state;
    static char long_name[257];
    memset(long_name, 'n', 256);
    const struct bad cases[] = {
        {"no text to evaluate on", "a", "b", 128, 64, 0, 1, "default"},
        {"257 texts in one job; at most 256", "a", "b", 128, 64, 257, 1, "default"},
        {"name of 0 bytes", "", "b", 128, 64, 1, 1, "default"},
        {"name of 256 bytes; 1 to 255", long_name, "b", 128, 64, 1, 1, "default"},
        {"text \"a\" is empty", "a", "", 128, 64, 1, 1, "default"},
        {"name of a text is not UTF-8: byte 1", "a\xff", "b", 128, 64, 1, 1, "default"},
        {"text \"a\" is not UTF-8: byte 2", "a", "bb\xc3", 128, 64, 1, 1, "default"},
        {"a context of 0 tokens; a multiple of 64", "a", "b", 0, 64, 1, 1, "default"},
        {"a context of 100 tokens", "a", "b", 100, 64, 1, 1, "default"},
        {"a context of 1088 tokens; the service's is 1024", "a", "b", 1088, 64, 1, 1, "default"},
        {"a tail of 0 tokens", "a", "b", 128, 0, 1, 1, "default"},
        {"a tail of 63 tokens", "a", "b", 128, 63, 1, 1, "default"},
        {"a tail of 128 tokens; a multiple of 64, less than the context of 128", "a", "b", 128, 128, 1, 1, "default"},
        {"0 presets to evaluate", "a", "b", 128, 64, 1, 0, "default"},
        {"65 presets to evaluate; 1 to 64", "a", "b", 128, 64, 1, 65, "default"},
        {"preset's name of 0 bytes", "a", "b", 128, 64, 1, 1, ""},
        {"preset's name of 256 bytes; 1 to 63", "a", "b", 128, 64, 1, 1, long_name},
        {"name of a preset is not UTF-8", "a", "b", 128, 64, 1, 1, "\x80"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        Hcattn__NamedText text = HCATTN__NAMED_TEXT__INIT, *texts[257];
        Hcattn__Evaluate evaluate = HCATTN__EVALUATE__INIT;
        Hcattn__RunJob job = HCATTN__RUN_JOB__INIT;
        char *presets[65];
        for (size_t k = 0; k < 257; k++)
            texts[k] = &text;
        for (size_t k = 0; k < 65; k++)
            presets[k] = (char *)(uintptr_t)cases[i].preset;
        text.name = (char *)(uintptr_t)cases[i].name;
        text.text = (char *)(uintptr_t)cases[i].text;
        evaluate.n_texts = cases[i].n_texts;
        evaluate.texts = texts;
        evaluate.context = cases[i].context;
        evaluate.tail = cases[i].tail;
        evaluate.n_presets = cases[i].n_presets;
        evaluate.presets = presets;
        job.job_case = HCATTN__RUN_JOB__JOB_EVALUATE;
        job.evaluate = &evaluate;
        Hcattn__Reply *reply = fake_client_take(&fakes, ask_job(&job), REPLY(ERROR));
        assert_int_equal(reply->error->code, ERROR_CODE(INVALID_ARGUMENT));
        if (!strstr(reply->error->sentence, cases[i].part))
            fail_msg("\"%s\" does not say \"%s\"", reply->error->sentence, cases[i].part);
        hcattn__reply__free_unpacked(reply, NULL);
    }
    expect_service();
}

static void other_jobs_that_are_refused(void **state)
{
    (void)state;
    static const struct {
        uint32_t n_dims, n_centroids, max_iterations;
        const char *part;
    } cases[] = {
        {0, 256, 0, "sub-spaces of 0 dimensions; 2, 4 or 8"},
        {3, 256, 0, "sub-spaces of 3"},
        {16, 256, 0, "sub-spaces of 16"},
        {2, 0, 0, "0 centroids; 256 to 4096, a power of two"},
        {2, 128, 0, "128 centroids"},
        {2, 300, 0, "300 centroids"},
        {2, 8192, 0, "8192 centroids"},
        {2, 256, 100001, "100001 iterations; at most 100000"},
        {2, 256, 0, "name of 0 bytes"}, /* of a text */
    };
    Hcattn__NamedText empty = HCATTN__NAMED_TEXT__INIT, *texts = &empty;
    Hcattn__RunJob job = HCATTN__RUN_JOB__INIT;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        Hcattn__TrainCodebook train = HCATTN__TRAIN_CODEBOOK__INIT;
        bool last = i == sizeof(cases) / sizeof(cases[0]) - 1;
        train.n_dims = cases[i].n_dims;
        train.n_centroids = cases[i].n_centroids;
        train.max_iterations = cases[i].max_iterations;
        train.n_texts = last ? 1 : 0;
        train.texts = &texts;
        job.job_case = HCATTN__RUN_JOB__JOB_TRAIN_CODEBOOK;
        job.train_codebook = &train;
        Hcattn__Reply *reply = fake_client_take(&fakes, ask_job(&job), REPLY(ERROR));
        assert_int_equal(reply->error->code, ERROR_CODE(INVALID_ARGUMENT));
        if (!strstr(reply->error->sentence, cases[i].part))
            fail_msg("\"%s\" does not say \"%s\"", reply->error->sentence, cases[i].part);
        hcattn__reply__free_unpacked(reply, NULL);
    }
    Hcattn__GatherStatistics gather = HCATTN__GATHER_STATISTICS__INIT;
    gather.n_texts = 1;
    gather.texts = &texts;
    job.job_case = HCATTN__RUN_JOB__JOB_GATHER_STATISTICS;
    job.gather_statistics = &gather;
    fake_client_expect_error(&fakes, ask_job(&job), ERROR_CODE(INVALID_ARGUMENT));
    job.job_case = HCATTN__RUN_JOB__JOB__NOT_SET;
    fake_client_expect_error(&fakes, ask_job(&job), ERROR_CODE(INVALID_ARGUMENT));
    expect_service();
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        TEST(every_kind_of_job),
        TEST(large_texts),
        TEST(evaluations_that_are_refused),
        TEST(other_jobs_that_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
