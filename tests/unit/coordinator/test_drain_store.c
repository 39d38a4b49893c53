/* The real coordinator with fakes around it: a store is drained while its sessions are used. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/unit/coordinator/fakes.h"

static struct fakes fakes;
static struct fake_worker *const worker = &fakes.workers[0];

/* Store 1 is drained; its lanes go to stores 0 and 2, where every session is already. */
static int setup(void **state)
{
    (void)state;
    fakes_start(&fakes, 3, NULL);
    fakes_all_ready(&fakes);
    return 0;
}

/* Store 0 is drained; everything goes to store 1, where nothing was when it joined. */
static int setup_small(void **state)
{
    (void)state;
    fakes_start(&fakes, 1, NULL);
    fakes.stores[0].n_blocks = 8;
    fakes_all_ready(&fakes);
    return 0;
}

static int setup_long(void **state)
{
    (void)state;
    fakes_start(&fakes, 1, NULL);
    fakes.stores[0].n_blocks = 1300;
    worker->n_ctx = 1 << 20;
    fakes_all_ready(&fakes);
    return 0;
}

static int setup_hasty(void **state)
{
    (void)state;
    static const char *const hasty[] = {"--hang-timeout", "1200ms", NULL};
    fakes_start(&fakes, 3, hasty);
    fakes_all_ready(&fakes);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    fakes_finish(&fakes);
    return 0;
}

static uint64_t begin_drain(uint32_t store)
{
    return fake_client_drain_store(&fakes, store, false);
}

/* The session has n_tokens tokens, and nothing runs. */
static void fill(uint64_t session, uint64_t n_tokens)
{
    uint64_t id = fake_client_generate(&fakes, session, "abc", (uint32_t)n_tokens - 4);
    fake_client_drop(&fakes, id, REPLY(ACCEPTED));
    Hcattn__Work__WorkRequest *run = fake_worker_take(&fakes, worker, WORK(RUN));
    fake_store_journal(&fakes, session, n_tokens);
    fake_worker_finished(worker, run->work, (uint32_t)n_tokens - 4, n_tokens);
    fake_client_drop(&fakes, id, REPLY(GENERATE_DONE));
    fakes_drop(run);
}

static void expect_generated(uint64_t id, uint32_t first, uint32_t n)
{
    Hcattn__Reply *reply = fake_client_take(&fakes, id, REPLY(GENERATED));
    assert_int_equal(reply->generated->first, first);
    assert_int_equal(reply->generated->n_ids, n);
    hcattn__reply__free_unpacked(reply, NULL);
}

/* A generation on a new session, of which the client has `n_sent` tokens. Returns the request; *ret_work at the worker. */
static uint64_t start(uint64_t session, uint32_t max_tokens, uint32_t n_sent, uint64_t *ret_work)
{
    fake_client_open_session(&fakes, session, false);
    uint64_t id = fake_client_generate(&fakes, session, "abc", max_tokens);
    fake_client_drop(&fakes, id, REPLY(ACCEPTED));
    Hcattn__Work__WorkRequest *run = fake_worker_take(&fakes, worker, WORK(RUN));
    *ret_work = run->work;
    fakes_drop(run);
    fake_store_journal(&fakes, session, 3 + n_sent);
    for (uint32_t i = 0; i < n_sent; i += 50)
        fake_worker_generated(worker, *ret_work, i, n_sent - i < 50 ? n_sent - i : 50);
    for (uint32_t i = 0; i < n_sent; i += 50)
        expect_generated(id, i, n_sent - i < 50 ? n_sent - i : 50);
    return id;
}

static void take_stop(uint64_t work)
{
    Hcattn__Work__WorkRequest *stop = fake_worker_take(&fakes, worker, WORK(STOP));
    assert_int_equal(stop->stop->work, work);
    fakes_drop(stop);
}

/* The Run that goes on from there, with the places that hold now. */
static uint64_t take_run(uint32_t resume_from)
{
    Hcattn__Work__WorkRequest *run = fake_worker_take(&fakes, worker, WORK(RUN));
    uint64_t work = run->work;
    assert_int_equal(run->run->resume_from, resume_from);
    fake_checks_run(&fakes, run);
    fakes_drop(run);
    return work;
}

static void finish(uint64_t id, uint64_t work, uint64_t session, uint32_t n_generated)
{
    fake_store_journal(&fakes, session, 3 + n_generated);
    fake_worker_finished(worker, work, n_generated, 3 + n_generated);
    fake_client_drop(&fakes, id, REPLY(GENERATE_DONE));
}

static void an_idle_session_moves(void **state)
{
    (void)state;
    fake_client_open_session(&fakes, 5, false);
    fill(5, 700);
    uint64_t held = fake_store_held(&fakes.stores[1], 5), id = begin_drain(1);
    assert_true(held > 0);
    Hcattn__Reply *reply = fake_client_take(&fakes, id, REPLY(STORE_DRAINED));
    assert_int_equal(reply->store_drained->n_sessions, 1);
    assert_int_equal(reply->store_drained->bytes_moved, held * layout_block_bytes(&segments_shape));
    hcattn__reply__free_unpacked(reply, NULL);
    assert_int_equal(fakes.stores[1].n_leaves, 1);
    assert_int_equal(fakes.stores[0].n_imported + fakes.stores[2].n_imported, held);
    fake_checks_session(&fakes, 5, 700);
    assert_int_equal(fake_checks_lanes_in(&fakes, 5, 1), 0);
    assert_true(fake_checks_lanes_in(&fakes, 5, 0) != 0 && fake_checks_lanes_in(&fakes, 5, 2) != 0);
    fake_checks_tidy(&fakes);
    id = fake_client_append(&fakes, 5, "xyz");
    fake_client_drop(&fakes, id, REPLY(ACCEPTED));
    uint64_t work = take_run(0);
    fake_worker_finished(worker, work, 0, 703);
    fake_client_drop(&fakes, id, REPLY(APPENDED));
    assert_int_equal(fakes.stores[0].n_stale + fakes.stores[2].n_stale, 0);
}

static void all_of_a_session_moves_to_a_store_that_joined(void **state)
{
    (void)state;
    fake_client_open_session(&fakes, 5, false);
    fake_client_open_session(&fakes, 6, true);
    fill(5, 200);
    fake_flow_join(&fakes, 1);
    assert_int_equal(fake_client_drained(&fakes, begin_drain(0)), 2);
    fake_checks_session(&fakes, 5, 200);
    fake_checks_session(&fakes, 6, 0);
    assert_int_equal(fake_checks_lanes_in(&fakes, 5, 1), 0xfff);
    fake_checks_tidy(&fakes);
    fill(6, 70);
}

/* More blocks than one order takes. */
static void a_long_session_moves_in_parts(void **state)
{
    (void)state;
    const uint64_t n_tokens = 1250 * LAYOUT_BLOCK_TOKENS - 30;
    fake_client_open_session(&fakes, 5, false);
    fill(5, n_tokens);
    fakes.stores[1].n_blocks = 1300;
    fake_flow_join(&fakes, 1);
    assert_int_equal(fake_client_drained(&fakes, begin_drain(0)), 1);
    assert_int_equal(fakes.stores[1].n_reserves, 2);
    assert_int_equal(fakes.stores[1].n_imported, 1250);
    fake_checks_session(&fakes, 5, n_tokens);
    fake_checks_tidy(&fakes);
}

static void a_generation_goes_on(void **state)
{
    (void)state;
    uint64_t work, id = start(5, 800, 77, &work), drain = begin_drain(1);
    take_stop(work);
    /* what the worker had under way goes to the client; then it says that it has stopped */
    fake_worker_generated(worker, work, 77, 2);
    expect_generated(id, 77, 2);
    fake_store_journal(&fakes, 5, 3 + 79);
    fakes_quiet(&fakes);
    assert_int_equal(fake_checks_lanes_in(&fakes, 5, 1) != 0, true);
    fake_worker_error(worker, work, ERROR_CODE(CANCELLED));
    work = take_run(79);
    assert_int_equal(fake_checks_lanes_in(&fakes, 5, 1), 0);
    fake_checks_session(&fakes, 5, 3 + 79);
    fake_worker_generated(worker, work, 78, 3); /* one that the client has */
    expect_generated(id, 80 - 1, 2);
    assert_int_equal(fake_client_drained(&fakes, drain), 1);
    finish(id, work, 5, 90);
    fake_checks_session(&fakes, 5, 93);
    fake_checks_tidy(&fakes);
}

static void one_that_finishes_first_need_not_stop(void **state)
{
    (void)state;
    uint64_t work, id = start(5, 100, 20, &work), drain = begin_drain(1);
    take_stop(work);
    finish(id, work, 5, 30);
    assert_int_equal(fake_client_drained(&fakes, drain), 1);
    fake_checks_session(&fakes, 5, 33);
    fakes_quiet(&fakes);
    assert_int_equal(worker->n_queue, 0); /* no other Run */
    assert_false(fake_client_has(&fakes.client, id));
}

static void one_that_fails_while_it_is_parked_has_failed(void **state)
{
    (void)state;
    uint64_t work, id = start(5, 100, 20, &work), drain = begin_drain(1);
    take_stop(work);
    fake_worker_error(worker, work, ERROR_CODE(NO_MEMORY));
    fake_client_expect_error(&fakes, id, ERROR_CODE(NO_MEMORY));
    assert_int_equal(fake_client_drained(&fakes, drain), 1);
    fake_checks_session(&fakes, 5, 23);
}

static void one_that_is_cancelled_while_it_is_parked(void **state)
{
    (void)state;
    uint64_t work, id = start(5, 100, 20, &work), drain = begin_drain(1);
    take_stop(work);
    fake_client_drop(&fakes, fake_client_cancel(&fakes, id), REPLY(CANCELLED));
    fakes_quiet(&fakes);
    assert_false(fake_client_has(&fakes.client, id)); /* the worker has the session until it says so */
    fake_worker_error(worker, work, ERROR_CODE(CANCELLED));
    fake_client_expect_error(&fakes, id, ERROR_CODE(CANCELLED));
    assert_int_equal(fake_client_drained(&fakes, drain), 1);
    fake_checks_session(&fakes, 5, 23);
    /* and one that has stopped already */
    drain = fake_client_drain_store(&fakes, 1, true);
    FAKES_WAIT(&fakes, fakes.store_supervisor[1].n_starts == 1);
    fake_store_rebirth(&fakes.stores[1]);
    fake_store_register(&fakes, 1, false);
    fake_client_drained(&fakes, drain);
    id = start(6, 100, 20, &work);
    fakes.stores[0].unanswered = fakes.stores[2].unanswered = FAKE_IMPORT;
    drain = begin_drain(1);
    take_stop(work);
    fake_worker_error(worker, work, ERROR_CODE(CANCELLED));
    fakes_quiet(&fakes);
    fake_client_drop(&fakes, fake_client_cancel(&fakes, id), REPLY(CANCELLED));
    fake_client_expect_error(&fakes, id, ERROR_CODE(CANCELLED));
    fake_store_go_on(&fakes.stores[0]);
    fake_store_go_on(&fakes.stores[2]);
    assert_int_equal(fake_client_drained(&fakes, drain), 1);
    fake_checks_session(&fakes, 6, 23);
    assert_int_equal(worker->n_queue, 0);
}

static void one_whose_client_is_gone(void **state)
{
    (void)state;
    for (uint64_t session = 5; session < 7; session++) { /* the second one is ephemeral */
        fake_client_open_session(&fakes, session, session == 6);
        uint64_t id = fake_client_generate(&fakes, session, "abc", 100);
        fake_client_drop(&fakes, id, REPLY(ACCEPTED));
        Hcattn__Work__WorkRequest *run = fake_worker_take(&fakes, worker, WORK(RUN));
        fake_store_journal(&fakes, session, 30);
        begin_drain(1);
        take_stop(run->work);
        fake_client_close(&fakes.client);
        fakes_quiet(&fakes);
        fake_worker_generated(worker, run->work, 0, 1); /* cannot be delivered */
        fake_worker_error(worker, run->work, ERROR_CODE(CANCELLED));
        fakes_drop(run);
        fake_client_open(&fakes);
        (void)fake_client_drained(&fakes, begin_drain(1));
        if (session == 5)
            fake_checks_session(&fakes, 5, 30);
        else
            fake_checks_gone(&fakes, 6);
        assert_int_equal(worker->n_queue, session == 6); /* Forget */
        uint64_t resume = fake_client_drain_store(&fakes, 1, true);
        FAKES_WAIT(&fakes, fakes.store_supervisor[1].n_starts == session - 4);
        fake_store_rebirth(&fakes.stores[1]);
        fake_store_register(&fakes, 1, false);
        fake_client_drained(&fakes, resume);
    }
    fake_checks_tidy(&fakes);
}

static void one_whose_worker_dies(void **state)
{
    (void)state;
    uint64_t work, id = start(5, 400, 20, &work), drain = begin_drain(1), dead = worker->incarnation;
    take_stop(work);
    fake_worker_rebirth(worker);
    fake_supervisor_child_dead(&fakes.worker_supervisor[0], dead);
    assert_int_equal(fake_client_drained(&fakes, drain), 1); /* nobody works on it now */
    fake_checks_session(&fakes, 5, 23);
    fake_worker_register(&fakes, 0);
    work = take_run(20);
    fake_worker_generated(worker, work, 20, 1);
    expect_generated(id, 20, 1);
    finish(id, work, 5, 21);
}

static void one_that_is_asked_for_again(void **state)
{
    (void)state;
    uint64_t work, id = start(5, 400, 20, &work), drain = begin_drain(1);
    take_stop(work);
    fake_client_resume(&fakes, id, 5, "abc", 400, 0, 12);
    fakes_quiet(&fakes);
    fake_worker_generated(worker, work, 20, 1); /* it will come again */
    fake_worker_error(worker, work, ERROR_CODE(CANCELLED));
    fake_client_drop(&fakes, id, REPLY(ACCEPTED));
    work = take_run(12);
    fake_worker_generated(worker, work, 12, 9);
    expect_generated(id, 12, 9);
    assert_int_equal(fake_client_drained(&fakes, drain), 1);
    finish(id, work, 5, 21);
    fake_checks_session(&fakes, 5, 24);
}

/* It may still write: the session stays, and the run begins again where it is. */
static void one_whose_worker_does_not_stop(void **state)
{
    (void)state;
    uint64_t work, id = start(5, 400, 20, &work), drain = begin_drain(1);
    take_stop(work);
    work = take_run(20);
    assert_true(fake_checks_lanes_in(&fakes, 5, 1) != 0);
    take_stop(work);
    fake_worker_error(worker, work, ERROR_CODE(CANCELLED));
    work = take_run(20);
    assert_int_equal(fake_client_drained(&fakes, drain), 1);
    finish(id, work, 5, 21);
    fake_checks_session(&fakes, 5, 24);
    fake_checks_tidy(&fakes);
}

static void others_find_it_busy(void **state)
{
    (void)state;
    uint64_t work, id = start(5, 400, 20, &work), drain = begin_drain(1);
    take_stop(work);
    fake_client_expect_error(&fakes, fake_client_append(&fakes, 5, "x"), ERROR_CODE(BUSY));
    fake_client_expect_error(&fakes, fake_client_set_policy(&fakes, 5, "tiny"), ERROR_CODE(BUSY));
    fake_worker_error(worker, work, ERROR_CODE(CANCELLED));
    work = take_run(20);
    fake_client_expect_error(&fakes, fake_client_append(&fakes, 5, "x"), ERROR_CODE(BUSY));
    finish(id, work, 5, 21);
    fake_client_drained(&fakes, drain);
}

static void appends_and_scores_go_on(void **state)
{
    (void)state;
    fake_client_open_session(&fakes, 5, false);
    fake_client_open_session(&fakes, 6, false);
    uint64_t append = fake_client_append(&fakes, 5, "abcdefgh");
    fake_client_drop(&fakes, append, REPLY(ACCEPTED));
    uint64_t append_work = take_run(0);
    uint64_t score = fake_client_score(&fakes, 6, "abcdefgh", 1);
    fake_client_drop(&fakes, score, REPLY(ACCEPTED));
    uint64_t score_work = take_run(0);
    fake_worker_progress(worker, append_work, 5);
    fake_client_drop(&fakes, append, REPLY(PROGRESS));
    fake_worker_scored(worker, score_work, 1, 4);
    fake_client_drop(&fakes, score, REPLY(SCORED));
    fake_store_journal(&fakes, 5, 5);
    fake_store_journal(&fakes, 6, 5);
    uint64_t drain = begin_drain(1);
    take_stop(append_work);
    fake_worker_error(worker, append_work, ERROR_CODE(CANCELLED));
    append_work = take_run(0);
    take_stop(score_work);
    fake_worker_error(worker, score_work, ERROR_CODE(CANCELLED));
    score_work = take_run(4);
    assert_int_equal(fake_client_drained(&fakes, drain), 2);
    fake_worker_scored(worker, score_work, 5, 3);
    Hcattn__Reply *reply = fake_client_take(&fakes, score, REPLY(SCORED));
    assert_int_equal(reply->scored->first, 5);
    hcattn__reply__free_unpacked(reply, NULL);
    fake_worker_finished(worker, score_work, 0, 8);
    fake_client_drop(&fakes, score, REPLY(SCORE_DONE));
    fake_worker_finished(worker, append_work, 0, 8);
    fake_client_drop(&fakes, append, REPLY(APPENDED));
    fake_checks_session(&fakes, 5, 5);
    fake_checks_session(&fakes, 6, 5);
}

/* Blocks are reserved, and filled, after what was sealed has gone over. */
static void what_comes_during_the_copy_goes_too(void **state)
{
    (void)state;
    fake_client_open_session(&fakes, 5, false);
    fill(5, 150);
    fakes.stores[0].unanswered = fakes.stores[2].unanswered = FAKE_IMPORT;
    uint64_t drain = begin_drain(1);
    FAKES_WAIT(&fakes, fakes.stores[0].held || fakes.stores[2].held);
    uint64_t id = fake_client_generate(&fakes, 5, "abc", 600);
    fake_client_drop(&fakes, id, REPLY(ACCEPTED)); /* it does not wait */
    uint64_t work = take_run(0);
    fake_store_journal(&fakes, 5, 500);
    fake_store_go_on(&fakes.stores[0]);
    fake_store_go_on(&fakes.stores[2]);
    take_stop(work);
    fake_store_journal(&fakes, 5, 510);
    fake_worker_error(worker, work, ERROR_CODE(CANCELLED));
    work = take_run(0);
    fake_checks_session(&fakes, 5, 510);
    assert_int_equal(fake_client_drained(&fakes, drain), 1);
    fake_worker_finished(worker, work, 0, 510);
    fake_client_drop(&fakes, id, REPLY(GENERATE_DONE));
    fake_checks_tidy(&fakes);
}

static void one_that_waits_for_room_finds_it_elsewhere(void **state)
{
    (void)state;
    fake_client_open_session(&fakes, 6, false);
    fake_client_open_session(&fakes, 5, false);
    fill(6, 360); /* 6 blocks of 8 */
    fill(5, 20);
    uint64_t id = fake_client_generate(&fakes, 5, "abc", 200);
    fakes_quiet(&fakes);
    assert_false(fake_client_has(&fakes.client, id));
    fake_flow_join(&fakes, 1);
    fakes_quiet(&fakes);
    assert_false(fake_client_has(&fakes.client, id)); /* its lanes live in store 0 */
    uint64_t drain = begin_drain(0);
    fake_client_drop(&fakes, id, REPLY(ACCEPTED));
    uint64_t work = take_run(0);
    FAKES_WAIT(&fakes, fake_store_held(&fakes.stores[1], 6) == 6);
    fake_checks_session(&fakes, 6, 360);
    fake_worker_finished(worker, work, 0, 23);
    fake_client_drop(&fakes, id, REPLY(GENERATE_DONE));
    assert_int_equal(fake_client_drained(&fakes, drain), 2);
    fake_checks_session(&fakes, 5, 20);
    fake_checks_tidy(&fakes);
}

static void a_policy_waits_for_the_move(void **state)
{
    (void)state;
    fake_client_open_session(&fakes, 5, false);
    fake_flow_join(&fakes, 1);
    fakes.stores[1].unanswered = FAKE_OPEN;
    uint64_t drain = begin_drain(0);
    FAKES_WAIT(&fakes, fakes.stores[1].held);
    uint64_t id = fake_client_set_policy(&fakes, 5, "tiny");
    fakes_quiet(&fakes);
    assert_false(fake_client_has(&fakes.client, id));
    fake_store_go_on(&fakes.stores[1]);
    fake_client_drop(&fakes, id, REPLY(POLICY_SET));
    assert_int_equal(fake_client_drained(&fakes, drain), 1);
    fake_checks_session(&fakes, 5, 0);
    assert_string_equal(fakes.stores[1].policy, "tiny");
}

static void a_fork_moves_like_its_source(void **state)
{
    (void)state;
    fake_client_open_session(&fakes, 5, false);
    fill(5, 300);
    fakes.stores[0].unanswered = fakes.stores[2].unanswered = FAKE_IMPORT;
    uint64_t drain = begin_drain(1);
    FAKES_WAIT(&fakes, fakes.stores[0].held || fakes.stores[2].held);
    uint64_t id = fake_client_fork(&fakes, 5, 6, 0); /* of a session that moves, into a store that is drained */
    fake_client_drop(&fakes, id, REPLY(FORKED));
    assert_true(fake_checks_lanes_in(&fakes, 6, 1) != 0);
    fake_checks_session(&fakes, 6, 256);
    fake_store_go_on(&fakes.stores[0]);
    fake_store_go_on(&fakes.stores[2]);
    assert_int_equal(fake_client_drained(&fakes, drain), 2);
    fake_checks_session(&fakes, 5, 300);
    fake_checks_session(&fakes, 6, 256);
    fake_client_drop(&fakes, fake_client_fork(&fakes, 5, 7, 128), REPLY(FORKED)); /* of one that has moved */
    fake_checks_session(&fakes, 7, 128);
    fake_checks_tidy(&fakes);
}

int main(void)
{
#define TEST(name)  cmocka_unit_test_setup_teardown(name, setup, teardown)
#define SMALL(name) cmocka_unit_test_setup_teardown(name, setup_small, teardown)
    const struct CMUnitTest tests[] = {
        TEST(an_idle_session_moves),
        SMALL(all_of_a_session_moves_to_a_store_that_joined),
        cmocka_unit_test_setup_teardown(a_long_session_moves_in_parts, setup_long, teardown),
        TEST(a_generation_goes_on),
        TEST(one_that_finishes_first_need_not_stop),
        TEST(one_that_fails_while_it_is_parked_has_failed),
        TEST(one_that_is_cancelled_while_it_is_parked),
        TEST(one_whose_client_is_gone),
        TEST(one_whose_worker_dies),
        TEST(one_that_is_asked_for_again),
        cmocka_unit_test_setup_teardown(one_whose_worker_does_not_stop, setup_hasty, teardown),
        TEST(others_find_it_busy),
        TEST(appends_and_scores_go_on),
        TEST(what_comes_during_the_copy_goes_too),
        SMALL(one_that_waits_for_room_finds_it_elsewhere),
        SMALL(a_policy_waits_for_the_move),
        TEST(a_fork_moves_like_its_source),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
