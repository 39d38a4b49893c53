/* The real coordinator with fakes around it: stores that fall silent or die while a session moves between them. */
#include <errno.h>
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
static struct fake_worker *const worker = &fakes.workers[0];
static struct fake_store *const from = &fakes.stores[0], *const to = &fakes.stores[1];
static const char *const hasty[] = {"--recovery-timeout", "1s", NULL};

/* Session 5 lives in store 0, which is drained into store 1. */
static int setup_with(const char *const *arguments)
{
    fakes_start(&fakes, 1, arguments);
    fakes_all_ready(&fakes);
    return 0;
}

static int setup(void **state)
{
    (void)state;
    return setup_with(NULL);
}

static int setup_hasty(void **state)
{
    (void)state;
    return setup_with(hasty);
}

static int teardown(void **state)
{
    (void)state;
    fakes_finish(&fakes);
    return 0;
}

static bool is_listed(uint64_t session)
{
    bool found = false;
    Hcattn__Reply *reply = fake_client_list(&fakes);
    for (size_t i = 0; i < reply->session_list->n_sessions; i++)
        found = found || reply->session_list->sessions[i]->session == session;
    hcattn__reply__free_unpacked(reply, NULL);
    return found;
}

/* ---- targets that die ---- */

static const uint32_t early[] = {FAKE_OPEN, FAKE_RESERVE, FAKE_IMPORT};

/* Its next life adopts what was staged there; it is given back, and the move begins again. */
static void a_target_that_dies_during_the_copy_comes_back(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < 6; i++) { /* it dies before or after it has done it */
        const uint64_t session = 5;
        fake_flow_make(&fakes, session, 200);
        fake_flow_join(&fakes, 1);
        *(i < 3 ? &to->ignored : &to->unanswered) = early[i % 3];
        uint32_t n_opens = to->n_opens, n_reserves = to->n_reserves, n_imports = to->n_imports;
        uint64_t drain = fake_flow_drain(&fakes, 0);
        FAKES_WAIT(&fakes, early[i % 3] == FAKE_OPEN      ? to->n_opens > n_opens
                           : early[i % 3] == FAKE_RESERVE ? to->n_reserves > n_reserves
                                                          : to->n_imports > n_imports);
        fake_flow_kill_store(&fakes, 1);
        uint64_t work, id = fake_flow_start(&fakes, session, 10, &work); /* nobody waits for that store */
        fake_flow_finish(&fakes, id, work, 200);
        fake_store_register(&fakes, 1, false);
        (void)fake_client_drained(&fakes, drain);
        fake_checks_session(&fakes, session, 200);
        fake_checks_tidy(&fakes);
        assert_true(fake_checks_lanes_in(&fakes, session, 1) == 0xfff);
        teardown(NULL);
        setup(NULL);
    }
}

static void another_store_takes_its_place(void **state)
{
    (void)state;
    fake_flow_make(&fakes, 5, 200);
    to->ignored = FAKE_IMPORT;
    fake_flow_join(&fakes, 1);
    uint64_t drain = fake_flow_drain(&fakes, 0);
    FAKES_WAIT(&fakes, to->n_imports == 1);
    fake_flow_join(&fakes, 2);
    fake_flow_kill_store(&fakes, 1);
    assert_int_equal(fake_client_drained(&fakes, drain), 1);
    assert_int_equal(fake_checks_lanes_in(&fakes, 5, 2), 0xfff);
    fake_store_register(&fakes, 1, false); /* what was staged there goes, too */
    FAKES_WAIT(&fakes, to->has_segment && fake_store_held(to, 5) == 0);
    fake_flow_check(&fakes, 200);
}

static void a_target_that_dies_after_it_was_parked(void **state)
{
    (void)state;
    uint64_t work, id = fake_flow_running(&fakes, 100, &work);
    to->unanswered = FAKE_IMPORT;
    uint64_t drain = fake_flow_drain(&fakes, 0);
    FAKES_WAIT(&fakes, to->held);
    fake_store_go_on(to); /* what was sealed */
    to->unanswered = FAKE_IMPORT;
    fake_flow_stop(&fakes, work);
    FAKES_WAIT(&fakes, to->held);
    fake_flow_kill_store(&fakes, 1);
    work = fake_flow_take_run(&fakes); /* it need not wait */
    assert_int_equal(fake_checks_lanes_in(&fakes, 5, 0), 0xfff);
    fake_store_journal(&fakes, 5, 150);
    fake_store_register(&fakes, 1, false);
    fake_flow_stop(&fakes, work);
    work = fake_flow_take_run(&fakes);
    assert_int_equal(fake_client_drained(&fakes, drain), 1);
    fake_flow_check(&fakes, 150);
    fake_flow_finish(&fakes, id, work, 150);
}

static void a_target_that_dies_in_the_commit(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < 2; i++) { /* before and after it has written the record */
        const uint64_t session = 5;
        uint64_t work, id;
        fake_flow_make(&fakes, session, 200);
        id = fake_flow_start(&fakes, session, 10, &work);
        fake_flow_join(&fakes, 1);
        *(i == 0 ? &to->ignored : &to->unanswered) = FAKE_COMMIT;
        uint32_t n = to->n_commits;
        uint64_t drain = fake_flow_drain(&fakes, 0);
        fake_flow_stop(&fakes, work);
        FAKES_WAIT(&fakes, to->n_commits > n);
        fake_flow_kill_store(&fakes, 1);
        fakes_quiet(&fakes);
        assert_int_equal(worker->n_queue, 0); /* it waits: nobody knows where it is */
        fake_store_register(&fakes, 1, false);
        work = fake_flow_take_run(&fakes);
        fake_flow_finish(&fakes, id, work, 200);
        (void)fake_client_drained(&fakes, drain);
        fake_checks_session(&fakes, session, 200);
        assert_true(fake_checks_lanes_in(&fakes, session, 1) == 0xfff);
        fake_checks_tidy(&fakes);
        teardown(NULL);
        setup(NULL);
    }
}

/* Its segment is lost, too. */
static void a_target_that_is_lost(void **state)
{
    (void)state;
    fake_flow_make(&fakes, 5, 200);
    fake_flow_join(&fakes, 1);
    to->ignored = FAKE_IMPORT;
    uint64_t drain = fake_flow_drain(&fakes, 0);
    FAKES_WAIT(&fakes, to->n_imports == 1);
    fake_flow_kill_store(&fakes, 1);
    to->adopt_status = -EPROTO;
    fake_store_register(&fakes, 1, false);
    FAKES_WAIT(&fakes, to->n_formats == 2);
    to->adopt_status = 0;
    assert_int_equal(fake_client_drained(&fakes, drain), 1);
    fake_flow_check(&fakes, 200);
    assert_int_equal(fake_checks_lanes_in(&fakes, 5, 1), 0xfff);
}

static void a_target_that_is_lost_in_the_commit(void **state)
{
    (void)state;
    fake_flow_make(&fakes, 5, 200);
    fake_flow_join(&fakes, 1);
    to->ignored = FAKE_COMMIT;
    uint64_t drain = fake_flow_drain(&fakes, 0);
    FAKES_WAIT(&fakes, to->n_commits == 1);
    fake_flow_kill_store(&fakes, 1);
    to->adopt_status = -EPROTO;
    fake_store_register(&fakes, 1, false);
    (void)fake_client_drained(&fakes, drain);
    fake_checks_gone(&fakes, 5);
    assert_false(is_listed(5));
    fake_checks_tidy(&fakes);
}

static void a_target_that_does_not_answer(void **state)
{
    (void)state;
    uint64_t work, id = fake_flow_running(&fakes, 40, &work);
    to->ignored = FAKE_IMPORT;
    uint64_t drain = fake_flow_drain(&fakes, 0);
    fake_flow_stop(&fakes, work);
    FAKES_WAIT(&fakes, to->n_imports == 1);
    work = fake_flow_take_run(&fakes); /* it was parked for not too long */
    to->ignored = 0;
    fake_flow_stop(&fakes, work);
    work = fake_flow_take_run(&fakes);
    assert_int_equal(fake_client_drained(&fakes, drain), 1);
    fake_flow_check(&fakes, 40);
    fake_flow_finish(&fakes, id, work, 40);
}

static void a_target_that_does_not_answer_during_the_copy(void **state)
{
    (void)state;
    fake_flow_make(&fakes, 5, 200);
    fake_flow_join(&fakes, 1);
    to->ignored = FAKE_OPEN | FAKE_RESERVE | FAKE_IMPORT;
    uint64_t drain = fake_flow_drain(&fakes, 0);
    fake_client_drain_waits(&fakes, drain, "did not answer in time");
    to->ignored = 0;
    assert_int_equal(fake_client_drained(&fakes, drain), 1);
    fake_flow_check(&fakes, 200);
}

/* ---- the store that is drained dies ---- */

/* Its segment is here: it is read, whether a next life comes or not. */
static void a_store_that_is_dead_is_emptied(void **state)
{
    (void)state;
    fake_flow_make(&fakes, 5, 200);
    fake_flow_make(&fakes, 6, 0 + 70);
    fake_flow_join(&fakes, 1);
    fake_flow_kill_store(&fakes, 0);
    fakes_quiet(&fakes);
    uint64_t drain = fake_flow_drain(&fakes, 0);
    assert_int_equal(fake_client_drained(&fakes, drain), 2);
    fake_flow_check(&fakes, 200);
    fake_checks_session(&fakes, 6, 70);
    assert_int_equal(fake_checks_lanes_in(&fakes, 5, 1), 0xfff);
    assert_int_equal(from->n_leaves, 0);
    uint64_t work, id = fake_flow_start(&fakes, 5, 10, &work);
    fake_flow_finish(&fakes, id, work, 200);
}

static void a_source_that_dies_during_the_copy(void **state)
{
    (void)state;
    uint64_t work, id = fake_flow_running(&fakes, 100, &work);
    to->unanswered = FAKE_OPEN;
    uint64_t drain = fake_flow_drain(&fakes, 0);
    FAKES_WAIT(&fakes, to->held);
    fake_flow_kill_store(&fakes, 0);
    fakes_quiet(&fakes);
    fake_store_go_on(to);
    fake_flow_stop(&fakes, work);
    work = fake_flow_take_run(&fakes);
    assert_int_equal(fake_client_drained(&fakes, drain), 1);
    fake_flow_check(&fakes, 100);
    fake_flow_finish(&fakes, id, work, 100);
}

static void a_source_that_dies_and_comes_back(void **state)
{
    (void)state;
    uint64_t work, id = fake_flow_running(&fakes, 100, &work);
    to->unanswered = FAKE_IMPORT;
    uint64_t drain = fake_flow_drain(&fakes, 0);
    FAKES_WAIT(&fakes, to->held);
    fake_flow_kill_store(&fakes, 0);
    fake_store_register(&fakes, 0, false);
    FAKES_WAIT(&fakes, from->n_adopts == 1);
    fake_store_go_on(to);
    fake_flow_stop(&fakes, work);
    work = fake_flow_take_run(&fakes);
    assert_int_equal(fake_client_drained(&fakes, drain), 1);
    fake_flow_check(&fakes, 100);
    fake_flow_finish(&fakes, id, work, 100);
    assert_int_equal(from->n_leaves, 1);
}

/* It hung up and may still write: nothing is read before it is known dead, or back. */
static void a_source_that_hung_up(void **state)
{
    (void)state;
    fake_flow_make(&fakes, 5, 100);
    fake_flow_join(&fakes, 1);
    fake_store_hang_up(from);
    fakes_quiet(&fakes);
    uint64_t drain = fake_flow_drain(&fakes, 0);
    fakes_quiet(&fakes);
    assert_int_equal(to->n_imports, 0);
    fake_store_register(&fakes, 0, true);
    assert_int_equal(fake_client_drained(&fakes, drain), 1);
    fake_flow_check(&fakes, 100);
}

static void a_source_that_is_lost_in_the_commit(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < 2; i++) { /* its segment cannot be adopted; or is, and is damaged */
        const uint64_t session = 5;
        fake_flow_make(&fakes, session, 200);
        fake_flow_join(&fakes, 1);
        to->unanswered = FAKE_COMMIT;
        uint64_t drain = fake_flow_drain(&fakes, 0);
        FAKES_WAIT(&fakes, to->held);
        for (uint32_t j = 0; i == 1 && j < from->segment.header->n_blocks; j++)
            atomic_store(&segments_block(&from->segment, j)->state, BLOCK_FREE);
        fake_flow_kill_store(&fakes, 0);
        from->adopt_status = i == 0 ? -EPROTO : 0;
        fake_store_register(&fakes, 0, false);
        uint32_t n = from->n_formats + from->n_adopts;
        FAKES_WAIT(&fakes, from->n_formats + from->n_adopts > n);
        from->adopt_status = 0;
        fake_store_go_on(to);
        (void)fake_client_drained(&fakes, drain);
        fake_checks_session(&fakes, session, 200);
        assert_true(is_listed(session)); /* all of it was elsewhere */
        fake_checks_tidy(&fakes);
        teardown(NULL);
        setup(NULL);
    }
}

static void a_source_that_is_lost_during_the_copy(void **state)
{
    (void)state;
    fake_flow_make(&fakes, 5, 200);
    fake_flow_join(&fakes, 1);
    to->unanswered = FAKE_IMPORT;
    uint64_t drain = fake_flow_drain(&fakes, 0);
    FAKES_WAIT(&fakes, to->held);
    fake_flow_kill_store(&fakes, 0);
    from->adopt_status = -EPROTO;
    fake_store_register(&fakes, 0, false);
    (void)fake_client_drained(&fakes, drain);
    fake_store_go_on(to);
    fake_checks_gone(&fakes, 5);
    assert_false(is_listed(5));
    fake_checks_tidy(&fakes);
}

int main(void)
{
#define TEST(name)  cmocka_unit_test_setup_teardown(name, setup, teardown)
#define HASTY(name) cmocka_unit_test_setup_teardown(name, setup_hasty, teardown)
    const struct CMUnitTest tests[] = {
        TEST(a_target_that_dies_during_the_copy_comes_back),
        TEST(another_store_takes_its_place),
        TEST(a_target_that_dies_after_it_was_parked),
        TEST(a_target_that_dies_in_the_commit),
        TEST(a_target_that_is_lost),
        TEST(a_target_that_is_lost_in_the_commit),
        HASTY(a_target_that_does_not_answer),
        HASTY(a_target_that_does_not_answer_during_the_copy),
        TEST(a_store_that_is_dead_is_emptied),
        TEST(a_source_that_dies_during_the_copy),
        TEST(a_source_that_dies_and_comes_back),
        TEST(a_source_that_hung_up),
        TEST(a_source_that_is_lost_in_the_commit),
        TEST(a_source_that_is_lost_during_the_copy),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
