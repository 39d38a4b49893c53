/* The real coordinator with fakes around it: what a drain waits for, what ends it, and sessions that close on the way. */
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

static int setup(void **state)
{
    (void)state;
    fakes_start(&fakes, 2, NULL);
    fakes_all_ready(&fakes);
    return 0;
}

static int setup_one(void **state)
{
    (void)state;
    fakes_start(&fakes, 1, NULL);
    fakes_all_ready(&fakes);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    fakes_finish(&fakes);
    return 0;
}

static void resume(uint32_t store)
{
    (void)fake_client_drained(&fakes, fake_client_drain_store(&fakes, store, true));
}

static void close_session(uint64_t session)
{
    fake_client_drop(&fakes, fake_client_close_session(&fakes, session), REPLY(SESSION_CLOSED));
}

/* ---- sessions that close ---- */

/* Closed while the target does not answer an order of that kind; nothing runs. */
static void close_in(uint32_t order)
{
    fake_flow_make(&fakes, 5, 200);
    fakes.stores[1].unanswered = order;
    uint64_t drain = fake_flow_drain(&fakes, 0);
    FAKES_WAIT(&fakes, fakes.stores[1].held);
    uint64_t id = fake_client_close_session(&fakes, 5);
    fakes_quiet(&fakes);
    fake_store_go_on(&fakes.stores[1]);
    fake_client_drop(&fakes, id, REPLY(SESSION_CLOSED));
    fake_client_drained(&fakes, drain);
    fake_checks_gone(&fakes, 5);
    fake_checks_tidy(&fakes);
}

static void a_session_closes_while_its_record_is_opened(void **state)
{
    (void)state;
    fake_flow_join(&fakes, 1);
    close_in(FAKE_OPEN);
}

static void a_session_closes_while_it_is_copied(void **state)
{
    (void)state;
    fake_flow_join(&fakes, 1);
    close_in(FAKE_IMPORT);
}

static void a_session_closes_while_blocks_are_reserved(void **state)
{
    (void)state;
    fake_flow_join(&fakes, 1);
    close_in(FAKE_RESERVE);
}

static void a_session_closes_while_it_is_committed(void **state)
{
    (void)state;
    fake_flow_join(&fakes, 1);
    close_in(FAKE_COMMIT);
}

static void a_session_closes_while_it_is_released(void **state)
{
    (void)state;
    fake_flow_join(&fakes, 1);
    fake_flow_make(&fakes, 5, 200);
    fake_flow_make(&fakes, 6, 0);
    fakes.stores[0].unanswered = FAKE_RELEASE;
    uint64_t drain = fake_flow_drain(&fakes, 0);
    FAKES_WAIT(&fakes, fakes.stores[0].held);
    close_session(5); /* it does not live there any more */
    fake_client_drained(&fakes, drain);
    fake_checks_gone(&fakes, 5);
    fake_checks_session(&fakes, 6, 0);
    fake_checks_tidy(&fakes);
}

static void a_session_closes_while_it_is_parked(void **state)
{
    (void)state;
    uint64_t work;
    fake_client_open_session(&fakes, 5, false);
    uint64_t id = fake_flow_start(&fakes, 5, 300, &work), drain = fake_flow_drain(&fakes, 1);
    fake_store_journal(&fakes, 5, 100);
    fake_flow_take_stop(&fakes, work);
    uint64_t closes = fake_client_close_session(&fakes, 5);
    fakes_quiet(&fakes);
    fake_worker_error(worker, work, ERROR_CODE(CANCELLED));
    fake_client_expect_error(&fakes, id, ERROR_CODE(CANCELLED));
    fake_client_drop(&fakes, closes, REPLY(SESSION_CLOSED));
    fake_client_drained(&fakes, drain);
    fake_checks_gone(&fakes, 5);
    fake_checks_tidy(&fakes);
}

static void a_session_closes_while_the_rest_is_copied(void **state)
{
    (void)state;
    uint64_t work;
    fake_client_open_session(&fakes, 5, false);
    uint64_t id = fake_flow_start(&fakes, 5, 300, &work);
    fake_store_journal(&fakes, 5, 100); /* block 1 is in store 1, and open */
    fakes.stores[0].unanswered = FAKE_IMPORT;
    uint64_t drain = fake_flow_drain(&fakes, 1);
    fake_flow_take_stop(&fakes, work);
    fake_worker_error(worker, work, ERROR_CODE(CANCELLED));
    FAKES_WAIT(&fakes, fakes.stores[0].held);
    uint64_t closes = fake_client_close_session(&fakes, 5);
    fake_client_expect_error(&fakes, id, ERROR_CODE(CANCELLED));
    fake_client_drop(&fakes, closes, REPLY(SESSION_CLOSED));
    fake_client_drained(&fakes, drain);
    fake_store_go_on(&fakes.stores[0]); /* too late for anybody */
    fake_checks_gone(&fakes, 5);
    fake_checks_tidy(&fakes);
    fake_flow_make(&fakes, 5, 100); /* the number is free */
}

/* ---- room ---- */

static void a_session_without_room_elsewhere_stays(void **state)
{
    (void)state;
    fakes.stores[1].n_blocks = 6;
    fake_flow_join(&fakes, 1);
    fake_flow_make(&fakes, 5, 400); /* 7 blocks, of which store 1 has a part */
    fake_flow_make(&fakes, 6, 400);
    fake_flow_make(&fakes, 7, 100);
    uint64_t n_left = fake_store_held(&fakes.stores[0], 5) + fake_store_held(&fakes.stores[0], 6);
    assert_true(n_left > 6);
    uint64_t drain = fake_flow_drain(&fakes, 0);
    fake_client_drain_waits(&fakes, drain, "bytes in other stores");
    Hcattn__Reply *reply = fake_client_take(&fakes, drain, REPLY(STORE_DRAIN_PROGRESS));
    assert_true(reply->store_drain_progress->n_sessions_left > 0 && reply->store_drain_progress->bytes_left > 0);
    hcattn__reply__free_unpacked(reply, NULL);
    fake_checks_session(&fakes, 5, 400);
    fake_checks_session(&fakes, 6, 400);
    uint64_t work, id = fake_flow_start(&fakes, 6, 20, &work); /* it goes on where it is */
    fake_worker_finished(worker, work, 0, 400);
    fake_client_drop(&fakes, id, REPLY(GENERATE_DONE));
    close_session(5);
    close_session(7);
    close_session(6);
    fake_client_drained(&fakes, drain);
    fake_checks_tidy(&fakes);
}

static void room_comes_with_a_store_that_joins(void **state)
{
    (void)state;
    fake_flow_make(&fakes, 5, 1000);
    fakes.stores[1].n_blocks = 4;
    fake_flow_join(&fakes, 1);
    uint64_t drain = fake_flow_drain(&fakes, 0);
    fake_client_drain_waits(&fakes, drain, "bytes in other stores");
    fake_flow_join(&fakes, 2);
    assert_int_equal(fake_client_drained(&fakes, drain), 1);
    fake_checks_session(&fakes, 5, 1000);
    fake_checks_tidy(&fakes);
}

/* The move had begun, and its session grew meanwhile: it goes on where it was. */
static void a_session_that_grew_too_large_goes_on(void **state)
{
    (void)state;
    uint64_t work;
    fake_flow_make(&fakes, 5, 200);
    fakes.stores[1].n_blocks = 5;
    fake_flow_join(&fakes, 1);
    fakes.stores[1].unanswered = FAKE_IMPORT;
    uint64_t drain = fake_flow_drain(&fakes, 0);
    FAKES_WAIT(&fakes, fakes.stores[1].held);
    uint64_t id = fake_flow_start(&fakes, 5, 700, &work);
    fake_store_go_on(&fakes.stores[1]);
    fake_flow_take_stop(&fakes, work);
    fake_store_journal(&fakes, 5, 300);
    fake_worker_error(worker, work, ERROR_CODE(CANCELLED));
    Hcattn__Work__WorkRequest *run = fake_worker_take(&fakes, worker, WORK(RUN));
    fake_checks_run(&fakes, run);
    assert_int_equal(fake_checks_lanes_in(&fakes, 5, 0), 0xfff);
    fake_client_drain_waits(&fakes, drain, "bytes in other stores"); /* not parked again and again */
    assert_int_equal(worker->n_queue, 0);
    fake_worker_finished(worker, run->work, 0, 300);
    fake_client_drop(&fakes, id, REPLY(GENERATE_DONE));
    fakes_drop(run);
    FAKES_WAIT(&fakes, fake_store_held(&fakes.stores[1], 5) == 0);
    close_session(5);
    fake_client_drained(&fakes, drain);
    fake_checks_tidy(&fakes);
}

/* A reservation failed, and nobody asked for the session again. */
static void a_reservation_that_failed_unwatched_is_no_obstacle(void **state)
{
    (void)state;
    fake_flow_make(&fakes, 5, 70);
    fakes.stores[1].ignored = FAKE_RESERVE;
    uint32_t n = fakes.stores[1].n_reserves;
    uint64_t id = fake_client_generate(&fakes, 5, "abc", 250), dead = fakes.stores[1].incarnation;
    FAKES_WAIT(&fakes, fakes.stores[1].n_reserves == n + 1);
    fake_client_drop(&fakes, fake_client_cancel(&fakes, id), REPLY(CANCELLED));
    fake_client_expect_error(&fakes, id, ERROR_CODE(CANCELLED));
    fake_store_rebirth(&fakes.stores[1]);
    fakes.stores[1].reserve_status = -ESTALE;
    fake_supervisor_child_dead(&fakes.store_supervisor[1], dead);
    fake_flow_join(&fakes, 1);
    FAKES_WAIT(&fakes, fakes.stores[1].n_reserves == n + 2);
    fakes.stores[1].reserve_status = 0;
    assert_int_equal(fake_client_drained(&fakes, fake_flow_drain(&fakes, 1)), 1);
    fake_checks_session(&fakes, 5, 70);
    fake_checks_tidy(&fakes);
}

/* ---- other stores ---- */

static void nowhere_to_go(void **state)
{
    (void)state;
    fake_flow_make(&fakes, 5, 100);
    fake_store_hang_up(&fakes.stores[0]); /* it will come back */
    uint64_t drain = fake_flow_drain(&fakes, 1);
    fake_client_drain_waits(&fakes, drain, "no other value-store");
    fake_store_register(&fakes, 0, true);
    assert_int_equal(fake_client_drained(&fakes, drain), 1);
    fake_checks_session(&fakes, 5, 100);
    fake_checks_tidy(&fakes);
}

static void two_stores_leave_at_once(void **state)
{
    (void)state;
    fake_flow_join(&fakes, 2);
    fake_flow_join(&fakes, 3);
    for (uint64_t session = 5; session < 9; session++)
        fake_flow_make(&fakes, session, 300);
    uint64_t one = fake_flow_drain(&fakes, 1), three = fake_flow_drain(&fakes, 3),
             again = fake_flow_drain(&fakes, 1); /* one drain */
    uint32_t n = fake_client_drained(&fakes, one);
    assert_true(n >= 4); /* some may have come from store 3, if that was asked first */
    assert_true(fake_client_drained(&fakes, again) == n);
    assert_true(fake_client_drained(&fakes, three) >= 4);
    assert_int_equal(fakes.stores[1].n_leaves + fakes.stores[3].n_leaves, 2);
    for (uint64_t session = 5; session < 9; session++)
        fake_checks_session(&fakes, session, 300);
    fake_checks_tidy(&fakes);
    fake_client_expect_error(&fakes, fake_flow_drain(&fakes, 5), ERROR_CODE(NOT_FOUND));
}

/* A session is on its way into a store, in which nothing else is, when that is drained, too. */
static void a_store_waits_for_what_is_on_its_way_to_it(void **state)
{
    (void)state;
    static const uint32_t orders[] = {FAKE_OPEN, FAKE_IMPORT, FAKE_COMMIT};
    fake_flow_make(&fakes, 5, 200);
    fake_flow_join(&fakes, 1);
    for (uint32_t i = 0; i < 3; i++) {
        uint32_t from = i % 2, to = 1 - from;
        fakes.stores[to].unanswered = orders[i];
        uint64_t drain = fake_flow_drain(&fakes, from);
        FAKES_WAIT(&fakes, fakes.stores[to].held);
        fake_flow_join(&fakes, 2);
        uint64_t other = fake_flow_drain(&fakes, to);
        fakes_quiet(&fakes);
        assert_int_equal(fakes.stores[to].n_leaves, 0);
        fake_store_go_on(&fakes.stores[to]);
        fake_client_drained(&fakes, drain);
        fake_client_drained(&fakes, other);
        fake_checks_session(&fakes, 5, 200);
        assert_int_equal(fake_checks_lanes_in(&fakes, 5, 2), 0xfff);
        fake_checks_tidy(&fakes);
        /* back, for the next round */
        for (uint32_t store = 0; store < 2; store++) {
            fake_store_rebirth(&fakes.stores[store]);
            fakes.stores[store].n_leaves = 0;
        }
        fake_flow_join(&fakes, to);
        (void)fake_client_drained(&fakes, fake_flow_drain(&fakes, 2));
        fake_store_rebirth(&fakes.stores[2]);
        fake_flow_join(&fakes, from);
        assert_int_equal(fake_checks_lanes_in(&fakes, 5, to), 0xfff);
    }
}

/* ---- a drain that is ended ---- */

static void a_drain_that_is_ended_gives_its_move_up(void **state)
{
    (void)state;
    uint64_t work;
    fake_flow_make(&fakes, 5, 200);
    fake_flow_join(&fakes, 1);
    static const uint32_t orders[] = {FAKE_OPEN, FAKE_RESERVE, FAKE_IMPORT};
    for (uint32_t i = 0; i < 3; i++) {
        fakes.stores[1].unanswered = orders[i];
        uint64_t drain = fake_flow_drain(&fakes, 0);
        FAKES_WAIT(&fakes, fakes.stores[1].held);
        resume(0);
        fake_client_drain_error(&fakes, drain, ERROR_CODE(CONFLICT), "takes sessions again");
        fake_store_go_on(&fakes.stores[1]);
        fake_checks_session(&fakes, 5, 200);
        assert_int_equal(fake_checks_lanes_in(&fakes, 5, 0), 0xfff);
        fake_checks_tidy(&fakes);
    }
    /* while its run is being stopped: it is started again */
    uint64_t id = fake_flow_start(&fakes, 5, 300, &work), drain = fake_flow_drain(&fakes, 0);
    fake_flow_take_stop(&fakes, work);
    resume(0);
    fake_client_drain_error(&fakes, drain, ERROR_CODE(CONFLICT), "takes sessions again");
    fake_worker_error(worker, work, ERROR_CODE(CANCELLED));
    Hcattn__Work__WorkRequest *run = fake_worker_take(&fakes, worker, WORK(RUN));
    fake_checks_run(&fakes, run);
    fake_worker_finished(worker, run->work, 0, 200);
    fakes_drop(run);
    fake_client_drop(&fakes, id, REPLY(GENERATE_DONE));
    fake_checks_session(&fakes, 5, 200);
    fake_checks_tidy(&fakes);
    assert_true(fake_checks_state(&fakes, 0, "ready"));
}

/* Some stores may know already that it has moved: it goes on. */
static void a_commit_is_not_given_up(void **state)
{
    (void)state;
    fake_flow_make(&fakes, 5, 200);
    fake_flow_join(&fakes, 1);
    fakes.stores[1].unanswered = FAKE_COMMIT;
    uint64_t drain = fake_flow_drain(&fakes, 0);
    FAKES_WAIT(&fakes, fakes.stores[1].held);
    resume(0);
    fake_client_drain_error(&fakes, drain, ERROR_CODE(CONFLICT), "takes sessions again");
    fake_store_go_on(&fakes.stores[1]);
    fake_checks_session(&fakes, 5, 200);
    assert_int_equal(fake_checks_lanes_in(&fakes, 5, 1), 0xfff);
    uint64_t work, id = fake_flow_start(&fakes, 5, 20, &work);
    fake_worker_finished(worker, work, 0, 200);
    fake_client_drop(&fakes, id, REPLY(GENERATE_DONE));
    close_session(5);
    fake_checks_tidy(&fakes);
    assert_int_equal(fakes.stores[0].n_leaves, 0);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
#define ONE(name)  cmocka_unit_test_setup_teardown(name, setup_one, teardown)
    const struct CMUnitTest tests[] = {
        ONE(a_session_closes_while_its_record_is_opened),
        ONE(a_session_closes_while_it_is_copied),
        ONE(a_session_closes_while_blocks_are_reserved),
        ONE(a_session_closes_while_it_is_committed),
        ONE(a_session_closes_while_it_is_released),
        TEST(a_session_closes_while_it_is_parked),
        TEST(a_session_closes_while_the_rest_is_copied),
        ONE(a_session_without_room_elsewhere_stays),
        ONE(room_comes_with_a_store_that_joins),
        ONE(a_session_that_grew_too_large_goes_on),
        TEST(a_reservation_that_failed_unwatched_is_no_obstacle),
        TEST(nowhere_to_go),
        TEST(two_stores_leave_at_once),
        ONE(a_store_waits_for_what_is_on_its_way_to_it),
        ONE(a_drain_that_is_ended_gives_its_move_up),
        ONE(a_commit_is_not_given_up),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
