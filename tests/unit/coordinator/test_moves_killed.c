/* The real coordinator, killed while a session moves between fake stores: the next one finds it whole, and drains on. */
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
static const char *const hasty[] = {"--recovery-timeout", "1s", NULL};
static struct fake_worker *const worker = &fakes.workers[0];

/* Sessions live in stores 0 and 1. Store 1 is drained: a part of it goes to store 0, the other part to store 2, which joined. */
static int setup(void **state)
{
    (void)state;
    fakes_start(&fakes, 2, NULL);
    fakes_all_ready(&fakes);
    return 0;
}

static int setup_hasty(void **state)
{
    (void)state;
    fakes_start(&fakes, 2, hasty);
    fakes_all_ready(&fakes);
    return 0;
}

/* Sessions live in store 0 alone, which is drained into store 1. */
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

static uint32_t n_of(const struct fake_store *store, uint32_t order)
{
    return order == FAKE_OPEN      ? store->n_opens
           : order == FAKE_RESERVE ? store->n_reserves
           : order == FAKE_IMPORT  ? store->n_imports
           : order == FAKE_COMMIT  ? store->n_commits
                                   : store->n_releases;
}

/* The session of 700 tokens is whole outside store 1, which has left, and is of use. */
static void check_drained(uint64_t session)
{
    FAKES_WAIT(&fakes, fakes.stores[1].n_leaves > 0 && !fakes.stores[1].has_segment);
    fake_checks_session(&fakes, session, 700);
    assert_int_equal(fake_checks_lanes_in(&fakes, session, 1), 0);
    fake_checks_tidy(&fakes);
    uint64_t work, id = fake_flow_start(&fakes, session, 10, &work);
    fake_flow_finish(&fakes, id, work, 700);
    fake_client_drained(&fakes, fake_flow_drain(&fakes, 1)); /* asked again: it has left */
}

static void drain_until(uint32_t order, uint32_t muted, bool done)
{
    uint32_t n[3];
    for (uint32_t i = 0; i < 3; i++) {
        n[i] = n_of(&fakes.stores[i], order);
        if (muted >> i & 1u)
            *(done ? &fakes.stores[i].unanswered : &fakes.stores[i].ignored) = order;
    }
    fake_flow_drain(&fakes, 1);
    for (uint32_t i = 0; i < 3; i++)
        FAKES_WAIT(&fakes, !(muted >> i & 1u) || n_of(&fakes.stores[i], order) > n[i]);
    for (uint32_t i = 0; i < 4; i++) /* the others do theirs */
        fakes_pump(&fakes);
}

static void one_death(uint32_t order, uint32_t muted, bool done, uint32_t rotation)
{
    fake_flow_make(&fakes, 5, 700);
    fake_flow_join(&fakes, 2);
    drain_until(order, muted, done);
    fake_flow_restart(&fakes, NULL);
    fakes.stores[1].stays = false;
    fake_flow_worker_again(&fakes);
    for (uint32_t i = 0; i < 3; i++)
        fake_flow_register_again(&fakes, (i + rotation) % 3);
    check_drained(5);
    teardown(NULL);
    setup(NULL);
}

/* Who has heard of it, and done it, when the coordinator dies; and in which order they come back. */
static void deaths_in(uint32_t order)
{
    static const uint32_t muted[] = {1 << 0, 1 << 2, 1 << 0 | 1 << 2};
    for (uint32_t i = 0; i < 6; i++)
        one_death(order, muted[i / 2], i % 2, i);
}

static void while_records_are_opened(void **state)
{
    (void)state;
    deaths_in(FAKE_OPEN);
}

static void while_blocks_are_reserved(void **state)
{
    (void)state;
    deaths_in(FAKE_RESERVE);
}

static void while_blocks_are_copied(void **state)
{
    (void)state;
    deaths_in(FAKE_IMPORT);
}

static void while_records_are_written(void **state)
{
    (void)state;
    deaths_in(FAKE_COMMIT);
}

static void while_the_old_store_forgets(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < 2; i++) {
        fakes.stores[1].stays = true; /* it has left before it forgot */
        one_death(FAKE_RELEASE, 1 << 1, i, i);
    }
}

/* A generation runs, is stopped, has stopped, or has been started again. */
static void a_generation_lives_through_it(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < 4; i++) {
        uint64_t work;
        fake_client_open_session(&fakes, 5, false);
        uint64_t id = fake_flow_start(&fakes, 5, 600, &work);
        fake_store_journal(&fakes, 5, 3 + 250);
        fake_flow_join(&fakes, 2);
        for (uint32_t store = 0; store < 3; store += 2) {
            fakes.stores[store].ignored = i == 0 ? FAKE_IMPORT : 0;
            fakes.stores[store].unanswered = i == 2 ? FAKE_COMMIT : 0;
        }
        fake_flow_drain(&fakes, 1);
        if (i > 0)
            fake_flow_take_stop(&fakes, work);
        if (i > 1)
            fake_worker_error(worker, work, ERROR_CODE(CANCELLED));
        if (i > 2)
            work = fake_flow_take_run(&fakes);
        fakes_quiet(&fakes);
        fake_flow_restart(&fakes, NULL);
        fake_client_resume(&fakes, id, 5, "abc", 600, 0, 250);
        fake_flow_worker_again(&fakes);
        fake_flow_register_again(&fakes, 2);
        fake_flow_register_again(&fakes, 0);
        fakes_quiet(&fakes);
        assert_int_equal(fakes.stores[1].n_leaves, i == 3);
        if (i < 3) {
            assert_false(fake_client_has(&fakes.client, id)); /* neither an error */
            fake_flow_register_again(&fakes, 1);
        }
        fake_client_drop(&fakes, id, REPLY(ACCEPTED));
        if (i < 2) { /* it moves now; before, or after it has begun */
            Hcattn__Work__WorkRequest *run = fake_worker_take(&fakes, worker, WORK(RUN));
            assert_int_equal(run->run->resume_from, 250);
            if (fake_checks_lanes_in(&fakes, 5, 1) != 0) {
                fake_flow_take_stop(&fakes, run->work);
                fake_worker_error(worker, run->work, ERROR_CODE(CANCELLED));
                fakes_drop(run);
                run = fake_worker_take(&fakes, worker, WORK(RUN));
            }
            fake_checks_run(&fakes, run);
            work = run->work;
            fakes_drop(run);
        } else {
            work = fake_flow_take_run(&fakes);
        }
        fake_worker_generated(worker, work, 250, 3);
        Hcattn__Reply *reply = fake_client_take(&fakes, id, REPLY(GENERATED));
        assert_int_equal(reply->generated->first, 250);
        hcattn__reply__free_unpacked(reply, NULL);
        fake_flow_finish(&fakes, id, work, 253);
        FAKES_WAIT(&fakes, fakes.stores[1].n_leaves == 1);
        fake_checks_session(&fakes, 5, 253);
        fake_checks_tidy(&fakes);
        teardown(NULL);
        setup(NULL);
    }
}

/* The only store that knows that the session has moved comes last. */
static void the_newest_record_is_waited_for(void **state)
{
    (void)state;
    fake_flow_make(&fakes, 5, 700);
    fake_flow_join(&fakes, 2);
    fakes.stores[2].unanswered = FAKE_COMMIT;
    drain_until(FAKE_COMMIT, 1 << 0, false);
    FAKES_WAIT(&fakes, fakes.stores[2].held);
    fake_flow_restart(&fakes, NULL);
    fake_flow_worker_again(&fakes);
    fake_flow_register_again(&fakes, 0);
    fake_flow_register_again(&fakes, 1);
    uint64_t id = fake_client_generate(&fakes, 5, "abc", 10);
    fakes_quiet(&fakes);
    assert_false(fake_client_has(&fakes.client, id)); /* what the two have would be a whole session */
    fake_flow_register_again(&fakes, 2);
    fake_client_drop(&fakes, id, REPLY(ACCEPTED));
    uint64_t work = fake_flow_take_run(&fakes);
    fake_flow_finish(&fakes, id, work, 700);
    check_drained(5);
}

/* It does not come: the session lives on where it was. When it comes late, what it has is nobody's. */
static void the_newest_record_comes_too_late(void **state)
{
    (void)state;
    fake_flow_make(&fakes, 5, 700);
    fake_flow_join(&fakes, 2);
    fakes.stores[2].unanswered = FAKE_COMMIT;
    drain_until(FAKE_COMMIT, 1 << 0, false);
    FAKES_WAIT(&fakes, fakes.stores[2].held);
    fake_flow_restart(&fakes, hasty);
    fake_flow_worker_again(&fakes);
    fake_flow_register_again(&fakes, 0);
    fake_flow_register_again(&fakes, 1);
    FAKES_WAIT(&fakes, fakes.stores[1].n_leaves == 1); /* everything fits into store 0 */
    fake_flow_register_again(&fakes, 2);
    fake_checks_session(&fakes, 5, 700);
    assert_int_equal(fake_checks_lanes_in(&fakes, 5, 0), 0xfff);
    fake_checks_tidy(&fakes);
    uint64_t work, id = fake_flow_start(&fakes, 5, 10, &work);
    fake_flow_finish(&fakes, id, work, 700);
}

/* A session that lives in a store that is drained, and nowhere else, exists before that store has registered. */
static void a_drained_store_is_waited_for(void **state)
{
    (void)state;
    fake_flow_make(&fakes, 5, 200);
    fake_flow_join(&fakes, 1);
    fakes.stores[1].ignored = FAKE_OPEN;
    fake_flow_drain(&fakes, 0);
    FAKES_WAIT(&fakes, fakes.stores[1].n_opens == 1);
    fake_flow_restart(&fakes, NULL);
    fake_flow_worker_again(&fakes);
    fake_flow_register_again(&fakes, 1);
    FAKES_WAIT(&fakes, worker->n_exchange_ready == 1);
    uint64_t id = fake_client_generate(&fakes, 5, "abc", 10);
    fakes_quiet(&fakes);
    assert_false(fake_client_has(&fakes.client, id));
    fake_flow_register_again(&fakes, 0);
    fake_client_drop(&fakes, id, REPLY(ACCEPTED));
    FAKES_WAIT(&fakes, fakes.stores[0].n_leaves == 1 || worker->n_queue >= 2);
    for (uint64_t work = 0; fakes.stores[0].n_leaves == 0; fakes_pump(&fakes)) /* before or after it was started */
        if (worker->n_queue >= 2) {
            Hcattn__Work__WorkRequest *run = fake_worker_take(&fakes, worker, WORK(RUN));
            work = run->work;
            fakes_drop(run);
            fake_flow_take_stop(&fakes, work);
            fake_worker_error(worker, work, ERROR_CODE(CANCELLED));
        }
    uint64_t work = fake_flow_take_run(&fakes);
    fake_flow_finish(&fakes, id, work, 200);
    fake_checks_session(&fakes, 5, 200);
    fake_checks_tidy(&fakes);
}

/* Neither is it opened, or forked into, a second time: what it holds would be taken for leftovers. */
static void a_session_is_not_opened_twice(void **state)
{
    (void)state;
    fake_flow_make(&fakes, 5, 200);
    fake_flow_make(&fakes, 6, 100);
    fake_client_drop(&fakes, fake_client_fork(&fakes, 5, 7, 128), REPLY(FORKED));
    fake_flow_join(&fakes, 1);
    fakes.stores[1].unanswered = FAKE_COMMIT; /* one of them has moved, the others have not */
    fake_flow_drain(&fakes, 0);
    FAKES_WAIT(&fakes, fakes.stores[1].held);
    fake_flow_restart(&fakes, NULL);
    fake_flow_worker_again(&fakes);
    fake_flow_register_again(&fakes, 1);
    FAKES_WAIT(&fakes, worker->n_exchange_ready == 1);
    uint64_t five = fake_client_ask_open(&fakes, 5, "default"), six = fake_client_ask_open(&fakes, 6, "default");
    uint64_t fork = fake_client_fork(&fakes, 5, 7, 128);
    fakes_quiet(&fakes);
    assert_false(fake_client_has(&fakes.client, six));
    fake_flow_register_again(&fakes, 0);
    fake_client_drop(&fakes, five, REPLY(SESSION_OPENED));
    fake_client_drop(&fakes, six, REPLY(SESSION_OPENED));
    fake_client_drop(&fakes, fork, REPLY(FORKED));
    FAKES_WAIT(&fakes, fakes.stores[0].n_leaves == 1);
    fake_checks_session(&fakes, 5, 200);
    fake_checks_session(&fakes, 6, 100);
    fake_checks_session(&fakes, 7, 128);
    fake_checks_tidy(&fakes);
}

/* What a store takes long to make does not keep sessions waiting that it has nothing of. */
static void a_slow_store_holds_up_nobody_else(void **state)
{
    (void)state;
    fake_flow_make(&fakes, 5, 200);
    fake_flow_join(&fakes, 1);
    fake_flow_restart(&fakes, NULL);
    fake_store_rebirth(&fakes.stores[1]);
    fakes.stores[1].slow = true;
    fake_flow_worker_again(&fakes);
    fake_flow_register_again(&fakes, 0);
    FAKES_WAIT(&fakes, worker->n_exchange_ready == 1);
    fake_flow_register_again(&fakes, 1);
    Hcattn__Reply *reply;
    bool found = false;
    for (uint64_t deadline = fakes_deadline(); !found; fakes_fail_late("it is ready", __FILE__, __LINE__, deadline)) {
        reply = fake_client_list(&fakes);
        found = reply->session_list->n_sessions == 1 && strcmp(reply->session_list->sessions[0]->state, "ready") == 0;
        hcattn__reply__free_unpacked(reply, NULL);
    }
}

/* The drained store is lost together with the coordinator. */
static void its_store_dies_with_it(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < 2; i++) { /* before the commit: the session is lost; after it: all of it is elsewhere */
        fake_flow_make(&fakes, 5, 700);
        fake_flow_join(&fakes, 2);
        drain_until(i == 0 ? FAKE_IMPORT : FAKE_COMMIT, 1 << 0 | 1 << 2, i == 1);
        fake_flow_restart(&fakes, hasty);
        fake_store_rebirth(&fakes.stores[1]);
        fake_flow_worker_again(&fakes);
        fake_flow_register_again(&fakes, 0);
        fake_flow_register_again(&fakes, 2);
        if (i == 0)
            fake_client_drain_waits(&fakes, fake_flow_drain(&fakes, 1), "is not there");
        fake_flow_register_again(&fakes, 1);
        FAKES_WAIT(&fakes, fakes.stores[1].n_leaves == 1);
        if (i == 0)
            fake_checks_gone(&fakes, 5);
        else
            fake_checks_session(&fakes, 5, 700);
        fake_checks_tidy(&fakes);
        teardown(NULL);
        setup_hasty(NULL);
    }
}

/* Sessions come and go between two stores, and coordinators die in between. */
static void to_and_fro(void **state)
{
    (void)state;
    fake_flow_make(&fakes, 5, 200);
    for (uint32_t i = 0; i < 5; i++) {
        uint32_t source = i % 2, target = 1 - source;
        fakes.stores[target].n_leaves = 0;
        fake_flow_join(&fakes, target);
        fake_client_drained(&fakes, fake_flow_drain(&fakes, source));
        fake_store_rebirth(&fakes.stores[source]);
        fake_flow_restart(&fakes, NULL);
        fake_flow_worker_again(&fakes);
        fake_flow_register_again(&fakes, target);
        FAKES_WAIT(&fakes, worker->n_exchange_ready == 1);
        uint64_t work, id = fake_flow_start(&fakes, 5, 10, &work);
        fake_flow_finish(&fakes, id, work, 200);
        fake_checks_session(&fakes, 5, 200);
        assert_int_equal(fake_checks_lanes_in(&fakes, 5, target), 0xfff);
        fake_checks_tidy(&fakes);
    }
}

int main(void)
{
#define TEST(name)  cmocka_unit_test_setup_teardown(name, setup, teardown)
#define HASTY(name) cmocka_unit_test_setup_teardown(name, setup_hasty, teardown)
#define ONE(name)   cmocka_unit_test_setup_teardown(name, setup_one, teardown)
    const struct CMUnitTest tests[] = {
        TEST(while_records_are_opened),
        TEST(while_blocks_are_reserved),
        TEST(while_blocks_are_copied),
        TEST(while_records_are_written),
        TEST(while_the_old_store_forgets),
        TEST(a_generation_lives_through_it),
        TEST(the_newest_record_is_waited_for),
        HASTY(the_newest_record_comes_too_late),
        ONE(a_drained_store_is_waited_for),
        ONE(a_session_is_not_opened_twice),
        ONE(a_slow_store_holds_up_nobody_else),
        HASTY(its_store_dies_with_it),
        ONE(to_and_fro),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
