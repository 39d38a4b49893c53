/* The real coordinator with fakes around it: stores that join, leave and come back, and what a later coordinator knows of that. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/unit/coordinator/fakes.h"

static struct fakes fakes;
static const char *const hasty[] = {"--hang-timeout", "1200ms", "--recovery-timeout", "1500ms", NULL};

static int setup(void **state)
{
    (void)state;
    fakes_start(&fakes, 2, hasty);
    fakes_all_ready(&fakes);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    fakes_finish(&fakes);
    return 0;
}

static bool is_ready(void)
{
    Hcattn__Reply *reply = fake_client_health(&fakes);
    bool ready = reply->health->ready;
    hcattn__reply__free_unpacked(reply, NULL);
    return ready;
}

static void register_store(uint32_t store)
{
    if (fakes.store_supervisor[store].fd < 0)
        fake_supervisor_register(&fakes, &fakes.store_supervisor[store], HCATTN__CONTROL__ROLE__VALUE_STORE, store);
    fake_store_register(&fakes, store, false);
}

/* The next life of a store that has ended. */
static void come_again(uint32_t store)
{
    fake_store_rebirth(&fakes.stores[store]);
    register_store(store);
}

/* Opens a session; are there lanes of it in the store? */
static bool opens_in(uint64_t session, uint32_t store)
{
    fake_client_open_session(&fakes, session, false);
    return fake_checks_lanes_in(&fakes, session, store) != 0;
}

/* Opens and closes a session. */
static bool would_open_in(uint32_t store)
{
    bool is_in = opens_in(77, store);
    fake_client_drop(&fakes, fake_client_close_session(&fakes, 77), REPLY(SESSION_CLOSED));
    return is_in;
}

static void join(uint32_t store)
{
    register_store(store);
    FAKES_WAIT(&fakes, fakes.workers[0].store_incarnation[store] == fakes.stores[store].incarnation);
    FAKES_WAIT(&fakes, would_open_in(store));
}

/* All sessions gone, the store goes. */
static void drain_empty(uint32_t store)
{
    assert_int_equal(fake_client_drained(&fakes, fake_client_drain_store(&fakes, store, false)), 0);
    assert_int_equal(fakes.stores[store].n_leaves, 1);
}

static void write_file(const char *text)
{
    char path[128];
    snprintf(path, sizeof(path), "%s/membership", fakes.dir);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    assert_true(fputs(text, file) >= 0);
    fclose(file);
}

static void a_store_joins(void **state)
{
    (void)state;
    assert_false(opens_in(5, 2));
    register_store(2);
    while (fakes.workers[0].n_exchange_ready < 3) {
        assert_true(is_ready()); /* nobody waits for it */
        fakes_pump(&fakes);
    }
    assert_true(is_ready());
    FAKES_WAIT(&fakes, would_open_in(2));
    assert_int_equal(fake_checks_lanes_in(&fakes, 5, 2), 0); /* lanes stay where they are */
    assert_true(fake_checks_state(&fakes, 2, "ready"));
    register_store(3); /* any number may */
    FAKES_WAIT(&fakes, would_open_in(3));
    fake_checks_tidy(&fakes);
}

static void a_store_that_a_worker_does_not_reach_is_no_member(void **state)
{
    (void)state;
    fakes.workers[1].model = fakes.workers[0].model;
    fake_supervisor_register(&fakes, &fakes.worker_supervisor[1], HCATTN__CONTROL__ROLE__GPU_WORKER, 1);
    fake_worker_register(&fakes, 1);
    FAKES_WAIT(&fakes, fakes.workers[1].n_exchange_ready == 2);
    fakes.workers[1].without = 1 << 2;
    register_store(2);
    FAKES_WAIT(&fakes, fakes.workers[0].n_exchange_ready == 3 && fakes.workers[1].n_store_up == 3);
    fakes_quiet(&fakes);
    assert_true(is_ready());
    assert_false(would_open_in(2));
    fake_client_expect_error(&fakes, fake_client_drain_store(&fakes, 2, false), ERROR_CODE(NOT_FOUND));
    /* the one that does not reach it ends */
    uint64_t dead = fakes.workers[1].incarnation;
    fake_worker_rebirth(&fakes.workers[1]);
    fake_supervisor_child_dead(&fakes.worker_supervisor[1], dead);
    FAKES_WAIT(&fakes, would_open_in(2));
}

static void an_empty_store_leaves_and_comes_again(void **state)
{
    (void)state;
    assert_true(would_open_in(1));
    drain_empty(1);
    assert_int_equal(fakes.workers[0].unmapped, 1 << 1);
    assert_true(fake_checks_state(&fakes, 1, "drained"));
    assert_true(is_ready());
    assert_false(would_open_in(1));
    fake_checks_tidy(&fakes);
    assert_int_equal(fakes.store_supervisor[1].n_starts, 0);
    assert_int_equal(fake_client_drained(&fakes, fake_client_drain_store(&fakes, 1, false)), 0); /* it has left */
    come_again(1);                                                                               /* by hand */
    FAKES_WAIT(&fakes, would_open_in(1));
    assert_int_equal(fakes.stores[1].n_formats, 2);
    assert_int_equal(fakes.workers[0].unmapped, 0);
    assert_true(fake_checks_state(&fakes, 1, "ready"));
    fakes.stores[1].n_leaves = 0;
    drain_empty(1); /* and again */
    fake_checks_tidy(&fakes);
}

static void what_cannot_be_drained(void **state)
{
    (void)state;
    fake_client_expect_error(&fakes, fake_client_drain_store(&fakes, 2, false), ERROR_CODE(NOT_FOUND));
    fake_client_expect_error(&fakes, fake_client_drain_store(&fakes, 2, true), ERROR_CODE(NOT_FOUND));
    fake_client_expect_error(&fakes, fake_client_drain_store(&fakes, 64, false), ERROR_CODE(INVALID_ARGUMENT));
    fake_client_expect_error(&fakes, fake_client_drain_store(&fakes, UINT32_MAX, true), ERROR_CODE(INVALID_ARGUMENT));
    (void)fake_client_drained(&fakes, fake_client_drain_store(&fakes, 1, true)); /* it serves */
    drain_empty(1);
    fake_client_expect_error(&fakes, fake_client_drain_store(&fakes, 0, false), ERROR_CODE(CONFLICT));
    assert_true(is_ready());
    assert_true(would_open_in(0));
}

static void a_store_that_left_is_started_again(void **state)
{
    (void)state;
    drain_empty(1);
    uint64_t id = fake_client_drain_store(&fakes, 1, true);
    FAKES_WAIT(&fakes, fakes.store_supervisor[1].n_starts == 1);
    fakes_quiet(&fakes);
    assert_false(fake_client_has(&fakes.client, id));
    come_again(1);
    fake_client_drained(&fakes, id);
    assert_true(would_open_in(1));
    assert_int_equal(fakes.store_supervisor[1].n_starts, 1);
}

/* Start means nothing to a supervisor whose process lives. */
static void it_is_started_after_it_has_ended(void **state)
{
    (void)state;
    fakes.stores[1].stays = true;
    uint64_t drain = fake_client_drain_store(&fakes, 1, false);
    FAKES_WAIT(&fakes, fakes.stores[1].n_leaves == 1);
    uint64_t resume = fake_client_drain_store(&fakes, 1, true);
    fakes_quiet(&fakes);
    assert_int_equal(fakes.store_supervisor[1].n_starts, 0);
    assert_false(fake_client_has(&fakes.client, drain));
    uint64_t dead = fakes.stores[1].incarnation;
    fakes.stores[1].stays = false;
    fake_store_rebirth(&fakes.stores[1]);
    fake_supervisor_child_dead(&fakes.store_supervisor[1], dead);
    FAKES_WAIT(&fakes, fakes.store_supervisor[1].n_starts == 1);
    fake_client_drained(&fakes, drain);
    come_again(1);
    fake_client_drained(&fakes, resume);
    assert_true(would_open_in(1));
}

static void without_a_supervisor_nobody_can_start_it(void **state)
{
    (void)state;
    drain_empty(1);
    fake_supervisor_hang_up(&fakes.store_supervisor[1]);
    fakes_quiet(&fakes);
    fake_client_expect_error(&fakes, fake_client_drain_store(&fakes, 1, true), ERROR_CODE(UNAVAILABLE));
    come_again(1);
    FAKES_WAIT(&fakes, would_open_in(1));
}

static void a_start_that_nobody_follows_is_answered(void **state)
{
    (void)state;
    drain_empty(1);
    uint64_t id = fake_client_drain_store(&fakes, 1, true);
    fake_client_drain_error(&fakes, id, ERROR_CODE(UNAVAILABLE), "did not come back");
}

static void a_leave_that_was_lost_is_said_again(void **state)
{
    (void)state;
    fake_client_open_session(&fakes, 5, false);
    fakes.stores[1].stays = true;
    uint64_t id = fake_client_drain_store(&fakes, 1, false);
    FAKES_WAIT(&fakes, fakes.stores[1].n_leaves == 1);
    fake_store_hang_up(&fakes.stores[1]); /* and never read it */
    fakes_quiet(&fakes);
    fake_store_register(&fakes, 1, true);
    FAKES_WAIT(&fakes, fakes.stores[1].n_leaves == 2);
    fakes_quiet(&fakes);
    assert_false(fake_client_has(&fakes.client, id) && fakes.stores[1].fd < 0);
    assert_false(would_open_in(1));
    Hcattn__Reply *reply = fake_client_stats(&fakes); /* what is in its segment counts for nothing */
    for (size_t i = 0; i < reply->stats->n_processes; i++)
        if (strcmp(reply->stats->processes[i]->program, "hc-value-store") == 0 &&
            reply->stats->processes[i]->index == 1)
            assert_int_equal(reply->stats->processes[i]->bytes_total, 0);
    hcattn__reply__free_unpacked(reply, NULL);
    uint64_t dead = fakes.stores[1].incarnation;
    fake_store_rebirth(&fakes.stores[1]);
    fake_supervisor_child_dead(&fakes.store_supervisor[1], dead);
    fake_client_drained(&fakes, id);
    fake_checks_session(&fakes, 5, 0);
}

/* ---- a later coordinator ---- */

static void a_later_coordinator_knows_who_is_there(void **state)
{
    (void)state;
    join(2);
    drain_empty(1);
    fake_client_open_session(&fakes, 5, false);
    assert_true(fake_checks_lanes_in(&fakes, 5, 2) != 0);
    fake_flow_restart(&fakes, hasty);
    fake_flow_register_again(&fakes, 0);
    fake_flow_worker_again(&fakes);
    FAKES_WAIT(&fakes, fakes.workers[0].n_exchange_ready == 1);
    fakes_quiet(&fakes);
    assert_false(is_ready()); /* store 2 had joined */
    fake_flow_register_again(&fakes, 2);
    FAKES_WAIT(&fakes, is_ready()); /* store 1 had left */
    fake_checks_session(&fakes, 5, 0);
    assert_false(would_open_in(1));
    fake_checks_tidy(&fakes);
}

static void a_joined_store_that_does_not_come_back_is_dropped(void **state)
{
    (void)state;
    join(2);
    fake_client_open_session(&fakes, 5, false);
    fake_client_drop(&fakes, fake_client_close_session(&fakes, 5), REPLY(SESSION_CLOSED));
    fake_flow_restart(&fakes, hasty);
    fake_store_rebirth(&fakes.stores[2]);
    fake_flow_register_again(&fakes, 0);
    fake_flow_register_again(&fakes, 1);
    fake_flow_worker_again(&fakes);
    FAKES_WAIT(&fakes, fakes.workers[0].n_exchange_ready == 2);
    assert_false(is_ready());
    FAKES_WAIT(&fakes, is_ready());
    assert_false(would_open_in(2));
    fake_flow_restart(&fakes, hasty); /* for good */
    fake_flow_register_again(&fakes, 0);
    fake_flow_register_again(&fakes, 1);
    fake_flow_worker_again(&fakes);
    FAKES_WAIT(&fakes, fakes.workers[0].n_exchange_ready == 2);
    assert_true(is_ready());
}

/* Stores that --stores names come without rows, those that had left, too: nobody waits for the ones that had joined. */
static void a_service_that_starts_anew_forgets(void **state)
{
    (void)state;
    join(2);
    drain_empty(1);
    drain_empty(0);
    fake_flow_restart(&fakes, (const char *[]){"--recovery-timeout", "60s", NULL});
    for (uint32_t i = 0; i < 3; i++)
        fake_store_rebirth(&fakes.stores[i]);
    fake_flow_register_again(&fakes, 0);
    fake_flow_worker_again(&fakes);
    FAKES_WAIT(&fakes, fakes.workers[0].n_exchange_ready == 1);
    fakes_quiet(&fakes);
    assert_false(is_ready());
    fake_flow_register_again(&fakes, 1);
    FAKES_WAIT(&fakes, is_ready());
    assert_true(would_open_in(0) && would_open_in(1));
}

/* Nor does a drain of it wait any longer. */
static void a_drained_store_that_does_not_come_back(void **state)
{
    (void)state;
    fake_flow_join(&fakes, 2);
    fake_client_open_session(&fakes, 5, false);
    fakes.stores[0].ignored = fakes.stores[1].ignored = FAKE_OPEN | FAKE_COMMIT;
    fake_client_drain_store(&fakes, 2, false);
    FAKES_WAIT(&fakes, fake_checks_state(&fakes, 2, "draining"));
    fake_flow_restart(&fakes, hasty);
    fake_store_rebirth(&fakes.stores[2]);
    fake_flow_register_again(&fakes, 0);
    fake_flow_register_again(&fakes, 1);
    fake_flow_worker_again(&fakes);
    uint64_t id = fake_client_drain_store(&fakes, 2, false);
    fake_client_drain_error(&fakes, id, ERROR_CODE(NOT_FOUND), "did not come back");
    fake_checks_gone(&fakes, 5);
    fake_checks_tidy(&fakes);
}

static void a_file_that_makes_no_sense_is_ignored(void **state)
{
    (void)state;
    static const char *const files[] = {
        "",
        "hcattn membership 1\n",
        "hcattn membership 1\nstores 2\nmembers 0000000000000000\nleaving 0000000000000000\nleft 0000000000000000\n",
        "hcattn membership 1\nstores 2\nmembers 0000000000000004\nleaving 0000000000000003\nleft 0000000000000000\n",
        "hcattn membership 1\nstores 2\nmembers 0000000000000007\nleaving 0000000000000000\nleft 0000000000000002\n",
        "hcattn membership 1\nstores 2\nmembers 0000000000000003\nleaving 0000000000000003\nleft 0000000000000000\n",
        "hcattn membership 1\nstores 2\nmembers 0000000000000000\nleaving 0000000000000000\nleft 0000000000000003\n",
        "hcattn membership 1\nstores 3\nmembers 0000000000000006\nleaving 0000000000000000\nleft 0000000000000001\n",
        "\xff\xfe gar\0bage",
    };
    for (size_t i = 0; i < sizeof(files) / sizeof(files[0]); i++) {
        fake_flow_restart(&fakes, NULL);
        fakes_kill_coordinator(&fakes);
        write_file(files[i]);
        fakes_start_coordinator(&fakes, NULL);
        fake_flow_register_again(&fakes, 0);
        fake_flow_worker_again(&fakes);
        FAKES_WAIT(&fakes, fakes.workers[0].n_exchange_ready == 1);
        assert_false(is_ready()); /* both are expected, as --stores says */
        fake_flow_register_again(&fakes, 1);
        FAKES_WAIT(&fakes, is_ready());
        assert_true(would_open_in(0) && would_open_in(1));
    }
}

static void a_store_that_left_and_lives_is_told_again(void **state)
{
    (void)state;
    fake_client_open_session(&fakes, 5, false);
    fakes.stores[1].stays = true;
    fakes.stores[1].ignored = FAKE_RELEASE; /* it still has what has moved */
    fake_client_drain_store(&fakes, 1, false);
    FAKES_WAIT(&fakes, fakes.stores[1].n_leaves == 1);
    fake_client_drop(&fakes, fake_client_close_session(&fakes, 5), REPLY(SESSION_CLOSED));
    fake_flow_restart(&fakes, hasty);
    fakes.stores[1].stays = false;
    fakes.stores[1].ignored = 0;
    fake_flow_register_again(&fakes, 0);
    fake_flow_register_again(&fakes, 1);
    fake_flow_worker_again(&fakes);
    FAKES_WAIT(&fakes, fakes.stores[1].n_leaves == 2);
    FAKES_WAIT(&fakes, is_ready());
    assert_false(would_open_in(1));
    /* the session that it still remembered is not there: it had been closed */
    Hcattn__Reply *reply = fake_client_list(&fakes);
    assert_int_equal(reply->session_list->n_sessions, 0);
    hcattn__reply__free_unpacked(reply, NULL);
    fake_checks_tidy(&fakes);
}

/* The only one that is not drained does not come back: then there is nowhere to go. */
static void the_last_store_does_not_leave(void **state)
{
    (void)state;
    join(2);
    fake_client_open_session(&fakes, 5, false);
    fakes.stores[2].ignored = FAKE_OPEN | FAKE_COMMIT;
    fake_client_drain_store(&fakes, 0, false);
    fake_client_drain_store(&fakes, 1, false);
    FAKES_WAIT(&fakes, fake_checks_state(&fakes, 0, "draining") && fake_checks_state(&fakes, 1, "draining"));
    fake_flow_restart(&fakes, hasty);
    fake_store_rebirth(&fakes.stores[2]);
    fake_flow_register_again(&fakes, 0);
    fake_flow_register_again(&fakes, 1);
    fake_flow_worker_again(&fakes);
    FAKES_WAIT(&fakes, is_ready());
    fake_checks_gone(&fakes, 5); /* a part of it is lost */
    assert_true(would_open_in(0));
    assert_true(would_open_in(1));
    assert_int_equal(fakes.stores[0].n_leaves + fakes.stores[1].n_leaves, 0);
    fake_checks_tidy(&fakes);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        TEST(a_store_joins),
        TEST(a_store_that_a_worker_does_not_reach_is_no_member),
        TEST(an_empty_store_leaves_and_comes_again),
        TEST(what_cannot_be_drained),
        TEST(a_store_that_left_is_started_again),
        TEST(it_is_started_after_it_has_ended),
        TEST(without_a_supervisor_nobody_can_start_it),
        TEST(a_start_that_nobody_follows_is_answered),
        TEST(a_leave_that_was_lost_is_said_again),
        TEST(a_later_coordinator_knows_who_is_there),
        TEST(a_joined_store_that_does_not_come_back_is_dropped),
        TEST(a_service_that_starts_anew_forgets),
        TEST(a_drained_store_that_does_not_come_back),
        TEST(a_file_that_makes_no_sense_is_ignored),
        TEST(a_store_that_left_and_lives_is_told_again),
        TEST(the_last_store_does_not_leave),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
