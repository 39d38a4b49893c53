/* The real coordinator with fakes around it: jobs at a worker, and every way in which they end. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/clock.h"
#include "tests/unit/coordinator/fakes.h"

static struct fakes fakes;

static int teardown(void **state)
{
    (void)state;
    fakes_finish(&fakes);
    return 0;
}

static int setup_without_worker(void **state)
{
    (void)state;
    fakes_start(&fakes, 1, NULL);
    return 0;
}

static int setup_without_patience(void **state)
{
    (void)state;
    fakes_start(&fakes, 1, (const char *const[]){"--recovery-timeout", "1s", NULL});
    return 0;
}

static int setup(void **state)
{
    (void)state;
    fakes_start(&fakes, 1, (const char *const[]){"--workers", "2", NULL});
    fakes_all_ready(&fakes);
    return 0;
}

static int setup_hasty(void **state)
{
    (void)state;
    fakes_start(&fakes, 1, (const char *const[]){"--hang-timeout", "1s", "--recovery-timeout", "1500ms", NULL});
    fakes_all_ready(&fakes);
    return 0;
}

static struct fake_worker *const worker = &fakes.workers[0];

static Hcattn__Work__WorkRequest *take_job(uint32_t index)
{
    return fake_worker_take(&fakes, &fakes.workers[index], WORK(RUN_JOB));
}

static void expect_row(uint64_t id, uint32_t index)
{
    Hcattn__Reply *reply = fake_client_take(&fakes, id, REPLY(JOB_ROW));
    assert_int_equal(reply->job_row->eval->index, index);
    assert_true(reply->job_row->eval->kld_mean == 0.25 * (index + 1));
    hcattn__reply__free_unpacked(reply, NULL);
}

static void expect_stop(uint64_t work)
{
    Hcattn__Work__WorkRequest *stop = fake_worker_take(&fakes, worker, WORK(STOP));
    assert_int_equal(stop->stop->work, work);
    fakes_drop(stop);
}

static void expect_unavailable(uint64_t id, const char *part)
{
    Hcattn__Reply *reply = fake_client_take(&fakes, id, REPLY(ERROR));
    assert_int_equal(reply->error->code, ERROR_CODE(UNAVAILABLE));
    if (!strstr(reply->error->sentence, part))
        fail_msg("\"%s\" does not say \"%s\"", reply->error->sentence, part);
    hcattn__reply__free_unpacked(reply, NULL);
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
    finish(take_job(0), id);
}

/* The request of that id once more. */
static void ask_again(uint64_t id)
{
    fakes.next_id = id - 1;
    assert_int_equal(fake_client_evaluate(&fakes, "abc"), id);
    fakes.next_id = id + 1000;
}

static void what_a_worker_says_goes_on_to_the_client(void **state)
{
    (void)state;
    uint64_t id = fake_client_evaluate(&fakes, "Some text.");
    Hcattn__Work__WorkRequest *job = take_job(0);
    const Hcattn__Evaluate *evaluate = job->run_job->evaluate;
    assert_int_equal(job->run_job->job_case, HCATTN__RUN_JOB__JOB_EVALUATE);
    assert_int_equal(evaluate->n_texts, 1);
    assert_string_equal(evaluate->texts[0]->name, "prose");
    assert_string_equal(evaluate->texts[0]->text, "Some text.");
    assert_int_equal(evaluate->context, 128);
    assert_int_equal(evaluate->tail, 64);
    assert_int_equal(evaluate->n_presets, 2);
    assert_string_equal(evaluate->presets[1], "h2o");
    fake_worker_job_progress(worker, job->work, 0.5);
    fake_worker_job_row(worker, job->work, 0);
    fake_worker_job_row(worker, job->work, 1);
    fake_worker_job_done(worker, job->work);
    Hcattn__Reply *reply = fake_client_take(&fakes, id, REPLY(JOB_PROGRESS));
    assert_true(reply->job_progress->done == 0.5);
    assert_string_equal(reply->job_progress->phase, "prose");
    assert_int_equal(reply->job_progress->left_us, 7000000);
    hcattn__reply__free_unpacked(reply, NULL);
    expect_row(id, 0);
    expect_row(id, 1);
    reply = fake_client_take(&fakes, id, REPLY(JOB_DONE));
    assert_string_equal(reply->job_done->sentence, "that came of it");
    assert_string_equal(reply->job_done->path, "/there/it.is");
    hcattn__reply__free_unpacked(reply, NULL);
    /* it is over: what comes late is nothing to anybody */
    fake_worker_job_row(worker, job->work, 2);
    fakes_quiet(&fakes);
    assert_false(fake_client_has(&fakes.client, id));
    fakes_drop(job);
}

static void a_session_runs_beside_a_job(void **state)
{
    (void)state;
    uint64_t id = fake_client_evaluate(&fakes, "abc");
    Hcattn__Work__WorkRequest *job = take_job(0);
    fake_client_open_session(&fakes, 5, false);
    uint64_t append = fake_client_append(&fakes, 5, "abc");
    fake_client_drop(&fakes, append, REPLY(ACCEPTED));
    Hcattn__Work__WorkRequest *run = fake_worker_take(&fakes, worker, WORK(RUN));
    /* neither is told what belongs to the other */
    fake_worker_job_row(worker, run->work, 0);
    fake_worker_job_done(worker, run->work);
    fake_worker_generated(worker, job->work, 0, 3);
    fake_worker_finished(worker, job->work, 0, 3);
    fake_worker_counts(worker, job->work, 3, true);
    fakes_quiet(&fakes);
    assert_false(fake_client_has(&fakes.client, id) || fake_client_has(&fakes.client, append));
    fake_worker_finished(worker, run->work, 0, 3);
    fake_client_drop(&fakes, append, REPLY(APPENDED));
    fakes_drop(run);
    finish(job, id);
}

static void a_job_is_cancelled(void **state)
{
    (void)state;
    uint64_t id = fake_client_evaluate(&fakes, "abc");
    Hcattn__Work__WorkRequest *job = take_job(0);
    fake_client_drop(&fakes, fake_client_cancel(&fakes, id), REPLY(CANCELLED));
    expect_stop(job->work);
    fake_worker_error(worker, job->work, ERROR_CODE(CANCELLED));
    fake_client_expect_error(&fakes, id, ERROR_CODE(CANCELLED));
    fakes_drop(job);
    /* it was done before it could be stopped */
    id = fake_client_evaluate(&fakes, "abc");
    job = take_job(0);
    fake_client_drop(&fakes, fake_client_cancel(&fakes, id), REPLY(CANCELLED));
    expect_stop(job->work);
    finish(job, id);
    /* its worker dies before it is stopped */
    id = fake_client_evaluate(&fakes, "abc");
    fakes_drop(take_job(0));
    fake_client_drop(&fakes, fake_client_cancel(&fakes, id), REPLY(CANCELLED));
    uint64_t dead = worker->incarnation;
    fake_worker_rebirth(worker);
    fake_supervisor_child_dead(&fakes.worker_supervisor[0], dead);
    fake_client_expect_error(&fakes, id, ERROR_CODE(CANCELLED));
}

static void a_worker_that_does_not_stop(void **state)
{
    (void)state;
    uint64_t id = fake_client_evaluate(&fakes, "abc");
    Hcattn__Work__WorkRequest *job = take_job(0);
    fake_client_drop(&fakes, fake_client_cancel(&fakes, id), REPLY(CANCELLED));
    expect_stop(job->work);
    fake_client_expect_error(&fakes, id, ERROR_CODE(CANCELLED)); /* after the hang timeout */
    fake_worker_job_done(worker, job->work);
    fakes_drop(job);
    expect_service();
}

static void a_job_ends_with_its_worker(void **state)
{
    (void)state;
    uint64_t id = fake_client_evaluate(&fakes, "abc"), dead = worker->incarnation;
    Hcattn__Work__WorkRequest *job = take_job(0);
    fake_worker_job_row(worker, job->work, 0);
    expect_row(id, 0);
    fakes_drop(job);
    fake_worker_rebirth(worker);
    fakes_quiet(&fakes);
    assert_false(fake_client_has(&fakes.client, id)); /* lost is not dead yet */
    fake_supervisor_child_dead(&fakes.worker_supervisor[0], dead);
    expect_unavailable(id, "died during the evaluation; asked for again, a training goes on where it was");
    fake_worker_register(&fakes, 0);
    fakes_quiet(&fakes);
    assert_int_equal(worker->n_queue, 0); /* not by itself */
    ask_again(id);
    job = take_job(0);
    fake_worker_job_row(worker, job->work, 0);
    expect_row(id, 0);
    /* the same life on another connection has dropped it */
    fake_worker_hang_up(worker);
    fake_worker_register(&fakes, 0);
    expect_unavailable(id, "was lost during the evaluation");
    fakes_drop(job);
    expect_service();
}

static void a_worker_that_has_forgotten_it(void **state)
{
    (void)state;
    uint64_t id = fake_client_evaluate(&fakes, "abc");
    Hcattn__Work__WorkRequest *job = take_job(0);
    worker->busy = true; /* it works: waited for */
    for (int i = 0; i < 60; i++) {
        worker->progress++;
        fakes_pump(&fakes);
    }
    worker->busy = false; /* what it says is a sign of life */
    for (int i = 0; i < 6; i++) {
        fake_worker_job_progress(worker, job->work, 0.25);
        for (uint64_t until_us = clock_deadline_us(200000); clock_remaining_us(until_us) > 0;)
            fakes_pump(&fakes);
        fake_client_drop(&fakes, id, REPLY(JOB_PROGRESS));
    }
    assert_int_equal(worker->n_queue, 0);
    expect_unavailable(id, "was lost during the evaluation");
    expect_stop(job->work);
    fakes_drop(job);
    expect_service();
}

static void a_client_that_is_gone(void **state)
{
    (void)state;
    for (int quiet = 0; quiet < 2; quiet++) {
        (void)fake_client_evaluate(&fakes, "abc");
        Hcattn__Work__WorkRequest *job = take_job(0);
        fake_client_close(&fakes.client);
        fake_client_open(&fakes);
        hcattn__reply__free_unpacked(fake_client_health(&fakes), NULL);
        if (!quiet)
            fake_worker_job_row(worker, job->work, 0); /* cannot be told to anybody */
        expect_stop(job->work);                        /* in a quiet phase it is looked for */
        fake_worker_error(worker, job->work, ERROR_CODE(CANCELLED));
        fakes_drop(job);
    }
    expect_service();
}

static void a_client_that_does_not_read(void **state)
{
    (void)state;
    (void)fake_client_evaluate(&fakes, "abc");
    Hcattn__Work__WorkRequest *job = take_job(0);
    struct socket *socket = fakes.client.socket;
    fakes.client.socket = NULL; /* not looked at */
    while (worker->n_queue == 0) {
        for (uint32_t i = 0; i < 200; i++)
            fake_worker_job_row(worker, job->work, i);
        fakes_pump(&fakes);
    }
    expect_stop(job->work);
    fakes.client.socket = socket;
    fake_client_close(&fakes.client);
    fake_client_open(&fakes);
    fake_worker_error(worker, job->work, ERROR_CODE(CANCELLED));
    fakes_drop(job);
    expect_service();
}

static void a_job_is_sent_again(void **state)
{
    (void)state;
    uint64_t id = fake_client_evaluate(&fakes, "abc");
    Hcattn__Work__WorkRequest *job = take_job(0), *second;
    ask_again(id); /* no row was told: it goes on */
    fakes_quiet(&fakes);
    assert_int_equal(worker->n_queue, 0);
    fake_worker_job_row(worker, job->work, 0);
    expect_row(id, 0);
    ask_again(id); /* rows were lost: told again from the first */
    expect_stop(job->work);
    fake_worker_job_row(worker, job->work, 1);
    fake_worker_error(worker, job->work, ERROR_CODE(CANCELLED));
    second = take_job(0);
    assert_int_not_equal(second->work, job->work);
    assert_string_equal(second->run_job->evaluate->texts[0]->text, "abc");
    fake_worker_job_row(worker, second->work, 0);
    expect_row(id, 0);
    finish(second, id);
    fakes_drop(job);
}

static void the_coordinator_is_lost(void **state)
{
    (void)state;
    uint64_t id = fake_client_evaluate(&fakes, "abc");
    Hcattn__Work__WorkRequest *job = take_job(0);
    fake_worker_job_row(worker, job->work, 0);
    expect_row(id, 0);
    fakes_drop(job);
    fakes_kill_coordinator(&fakes);
    FAKES_WAIT(&fakes, fakes.stores[0].hung_up && worker->hung_up);
    fakes_start_coordinator(&fakes, NULL);
    fake_store_register(&fakes, 0, true);
    fake_worker_register(&fakes, 0);
    ask_again(id);
    job = take_job(0);
    assert_string_equal(job->run_job->evaluate->texts[0]->text, "abc");
    fake_worker_job_row(worker, job->work, 0); /* from the first row */
    expect_row(id, 0);
    finish(job, id);
}

static void second_worker(void)
{
    fake_supervisor_register(&fakes, &fakes.worker_supervisor[1], HCATTN__CONTROL__ROLE__GPU_WORKER, 1);
    fake_worker_register(&fakes, 1);
    FAKES_WAIT(&fakes, fakes.workers[1].n_exchange_ready == 1);
}

static void a_worker_without_a_job_is_preferred(void **state)
{
    (void)state;
    second_worker();
    uint64_t ids[3] = {fake_client_evaluate(&fakes, "abc")};
    FAKES_WAIT(&fakes, fakes.workers[0].n_queue + fakes.workers[1].n_queue == 1);
    uint32_t first = fakes.workers[0].n_queue == 1 ? 0 : 1, other = 1 - first;
    Hcattn__Work__WorkRequest *job = take_job(first);
    /* the other one has more to do, and yet no job */
    for (uint64_t i = 0; i < 6; i++)
        fake_client_open_session(&fakes, 10 + i, false);
    Hcattn__Reply *list = fake_client_list(&fakes);
    for (size_t i = 0; i < list->session_list->n_sessions; i++) {
        const Hcattn__SessionStats *session = list->session_list->sessions[i];
        if (session->worker == other)
            fake_client_drop(&fakes, fake_client_append(&fakes, session->session, "abc"), REPLY(ACCEPTED));
    }
    hcattn__reply__free_unpacked(list, NULL);
    ids[1] = fake_client_evaluate(&fakes, "abc");
    Hcattn__Work__WorkRequest *second = take_job(other);
    /* a third one is the workers' to refuse */
    ids[2] = fake_client_evaluate(&fakes, "abc");
    for (bool told = false; !told; fakes_pump(&fakes))
        for (uint32_t i = 0; i < 2; i++)
            while (fakes.workers[i].n_queue > 0) {
                Hcattn__Work__WorkRequest *next = fakes.workers[i].queue[--fakes.workers[i].n_queue];
                if (next->request_case == WORK(RUN_JOB)) {
                    fake_worker_error(&fakes.workers[i], next->work, ERROR_CODE(BUSY));
                    told = true;
                }
                fakes_drop(next);
            }
    fake_client_expect_error(&fakes, ids[2], ERROR_CODE(BUSY));
    fake_worker_job_done(&fakes.workers[first], job->work);
    fake_client_drop(&fakes, ids[0], REPLY(JOB_DONE));
    fake_worker_job_done(&fakes.workers[other], second->work);
    fake_client_drop(&fakes, ids[1], REPLY(JOB_DONE));
    fakes_drop(job);
    fakes_drop(second);
}

static void jobs_wait_for_a_worker(void **state)
{
    (void)state;
    uint64_t ids[5];
    for (int i = 0; i < 5; i++)
        ids[i] = fake_client_evaluate(&fakes, "abc");
    fake_client_expect_error(&fakes, ids[4], ERROR_CODE(BUSY)); /* not all may wait */
    fake_client_drop(&fakes, fake_client_cancel(&fakes, ids[3]), REPLY(CANCELLED));
    fake_client_expect_error(&fakes, ids[3], ERROR_CODE(CANCELLED));
    ask_again(ids[2]);
    fakes_all_ready(&fakes);
    for (int i = 0; i < 3; i++) { /* the worker's to say how many it takes */
        Hcattn__Work__WorkRequest *job = take_job(0);
        fake_worker_job_done(worker, job->work);
        fakes_drop(job);
    }
    for (int i = 0; i < 3; i++)
        fake_client_drop(&fakes, ids[i], REPLY(JOB_DONE));
    assert_int_equal(worker->n_queue, 0);
}

static void no_worker_comes(void **state)
{
    (void)state;
    expect_unavailable(fake_client_evaluate(&fakes, "abc"), "no worker became ready within 1 s");
}

static void a_drain_waits_for_a_job(void **state)
{
    (void)state;
    uint64_t id = fake_client_evaluate(&fakes, "abc");
    Hcattn__Work__WorkRequest *job = take_job(0);
    uint64_t drain = fake_client_drain(&fakes, false);
    fakes_quiet(&fakes);
    expect_unavailable(fake_client_evaluate(&fakes, "abc"), "draining");
    fakes_quiet(&fakes);
    assert_false(fake_client_has(&fakes.client, drain));
    Hcattn__Reply *reply = fake_client_stats(&fakes);
    assert_int_equal(reply->stats->n_running, 1);
    hcattn__reply__free_unpacked(reply, NULL);
    finish(job, id);
    reply = fake_client_stats(&fakes);
    assert_int_equal(reply->stats->n_running, 0);
    hcattn__reply__free_unpacked(reply, NULL);
    reply = fake_client_take(&fakes, drain, REPLY(DRAINED));
    assert_int_equal(reply->drained->n_finished, 1);
    hcattn__reply__free_unpacked(reply, NULL);
    fake_client_drop(&fakes, fake_client_drain(&fakes, true), REPLY(DRAINED));
    expect_service();
}

int main(void)
{
#define TEST(name, how) cmocka_unit_test_setup_teardown(name, how, teardown)
    const struct CMUnitTest tests[] = {
        TEST(what_a_worker_says_goes_on_to_the_client, setup),
        TEST(a_session_runs_beside_a_job, setup),
        TEST(a_job_is_cancelled, setup),
        TEST(a_worker_that_does_not_stop, setup_hasty),
        TEST(a_job_ends_with_its_worker, setup),
        TEST(a_worker_that_has_forgotten_it, setup_hasty),
        TEST(a_client_that_is_gone, setup),
        TEST(a_client_that_does_not_read, setup),
        TEST(a_job_is_sent_again, setup),
        TEST(the_coordinator_is_lost, setup),
        TEST(a_worker_without_a_job_is_preferred, setup),
        TEST(jobs_wait_for_a_worker, setup_without_worker),
        TEST(no_worker_comes, setup_without_patience),
        TEST(a_drain_waits_for_a_job, setup),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
