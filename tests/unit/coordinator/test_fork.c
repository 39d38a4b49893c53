/* The real coordinator with fakes around it: copies of sessions, and faults in each step of making one. */
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

static int teardown(void **state)
{
    (void)state;
    fakes_finish(&fakes);
    return 0;
}

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
    fakes_start(&fakes, 2, (const char *const[]){"--recovery-timeout", "700ms", NULL});
    fakes_all_ready(&fakes);
    return 0;
}

/* A session that runs and holds n_tokens. Returns its request; the run is at the worker. */
static uint64_t running(uint64_t session, uint64_t n_tokens, Hcattn__Work__WorkRequest **ret_run)
{
    fake_client_drop(&fakes, fake_client_ask_exact(&fakes, session, "rot4,mass=0.9", 77), REPLY(SESSION_OPENED));
    uint64_t id = fake_client_generate(&fakes, session, "abc", 600);
    fake_client_drop(&fakes, id, REPLY(ACCEPTED));
    *ret_run = fake_worker_take(&fakes, &fakes.workers[0], WORK(RUN));
    fake_store_journal(&fakes, session, n_tokens);
    return id;
}

static void finish(uint64_t id, Hcattn__Work__WorkRequest *run, uint64_t n_tokens)
{
    fake_worker_finished(&fakes.workers[0], run->work, (uint32_t)n_tokens - 3, n_tokens);
    fake_client_drop(&fakes, id, REPLY(GENERATE_DONE));
    fakes_drop(run);
}

static uint64_t expect_forked(uint64_t id, uint64_t n_tokens)
{
    Hcattn__Reply *reply = fake_client_take(&fakes, id, REPLY(FORKED));
    uint64_t session = reply->forked->session;
    assert_int_equal(reply->forked->n_tokens, n_tokens);
    hcattn__reply__free_unpacked(reply, NULL);
    return session;
}

static uint64_t held(uint64_t session)
{
    return fake_store_held(&fakes.stores[0], session) + fake_store_held(&fakes.stores[1], session);
}

/* Nothing is left of a fork that failed, and nothing is used but what session 5 holds. */
static void expect_nothing_left(uint64_t session)
{
    FAKES_WAIT(&fakes, held(session) == 0);
    for (uint64_t deadline = fakes_deadline(), used = 1; used != 0; fakes_pump(&fakes)) {
        fakes_fail_late("all blocks of the copy are free again", __FILE__, __LINE__, deadline);
        Hcattn__Reply *reply = fake_client_stats(&fakes);
        used = 0;
        for (size_t i = 0; i < reply->stats->n_processes; i++)
            used += reply->stats->processes[i]->bytes_used;
        for (size_t i = 0; i < reply->stats->n_sessions; i++) {
            assert_true(reply->stats->sessions[i]->session == 5 || reply->stats->sessions[i]->session == session);
            used -= reply->stats->sessions[i]->session == 5 ? reply->stats->sessions[i]->bytes : 0;
        }
        used += reply->stats->n_sessions > 1;
        hcattn__reply__free_unpacked(reply, NULL);
    }
}

static void complete_blocks_of_a_running_session(void **state)
{
    (void)state;
    Hcattn__Work__WorkRequest *run, *copy_run;
    uint64_t id = running(5, 5 * 64 + 10, &run);
    assert_int_equal(expect_forked(fake_client_fork(&fakes, 5, 6, 0), 5 * 64), 6);
    assert_int_equal(held(6), 5);
    assert_int_equal(fakes.stores[0].n_copied + fakes.stores[1].n_copied, 5);
    assert_string_equal(fakes.stores[0].policy, "rot4,mass=0.9"); /* as the source's */
    assert_int_equal(fakes.stores[0].exact_tokens, 77);
    uint64_t chosen = expect_forked(fake_client_fork(&fakes, 5, 0, 129), 128); /* rounded down */
    assert_int_not_equal(chosen, 0);
    assert_int_equal(held(chosen), 2);
    finish(id, run, 330);
    /* it goes on where the copy ends */
    uint64_t copy_id = fake_client_generate(&fakes, 6, "xy", 100);
    Hcattn__Reply *reply = fake_client_take(&fakes, copy_id, REPLY(ACCEPTED));
    assert_int_equal(reply->accepted->at, 5 * 64);
    hcattn__reply__free_unpacked(reply, NULL);
    copy_run = fake_worker_take(&fakes, &fakes.workers[0], WORK(RUN));
    assert_int_equal(copy_run->run->at, 5 * 64);
    assert_string_equal(copy_run->run->policy, "rot4,mass=0.9");
    assert_int_equal(copy_run->run->exact_tokens, 77);
    finish(copy_id, copy_run, 5 * 64 + 2);
    /* both end by themselves */
    fake_client_drop(&fakes, fake_client_close_session(&fakes, 5), REPLY(SESSION_CLOSED));
    assert_int_equal(held(6), 7);
    fake_client_drop(&fakes, fake_client_close_session(&fakes, 6), REPLY(SESSION_CLOSED));
    assert_int_equal(held(6), 0);
}

/* Keys are made from the rows: a copy may have any policy. */
static void a_copy_with_another_policy(void **state)
{
    (void)state;
    static const char *const policy = "hcattention-25,fastgen=0.98";
    Hcattn__Work__WorkRequest *run, *copy_run;
    uint64_t id = running(5, 5 * 64 + 10, &run);
    assert_int_equal(expect_forked(fake_client_fork_as(&fakes, 5, 6, policy), 5 * 64), 6);
    for (int i = 0; i < 2; i++)
        assert_string_equal(fakes.stores[i].policy, policy);
    assert_int_equal(fakes.stores[0].exact_tokens, 77); /* as the source's */
    /* asked again: it is there; as something else it is not */
    assert_int_equal(expect_forked(fake_client_fork_as(&fakes, 5, 6, policy), 5 * 64), 6);
    fake_client_expect_error(&fakes, fake_client_fork(&fakes, 5, 6, 0), ERROR_CODE(CONFLICT));
    fake_client_expect_error(&fakes, fake_client_fork_as(&fakes, 5, 6, "full"), ERROR_CODE(CONFLICT));
    fake_client_expect_error(&fakes, fake_client_fork_as(&fakes, 5, 7, "clever"), ERROR_CODE(NOT_SUPPORTED));
    fake_client_expect_error(&fakes, fake_client_fork_as(&fakes, 5, 7, "full,fastgen=0.9"), ERROR_CODE(NOT_SUPPORTED));
    assert_int_equal(held(7), 0);
    /* what is forked from it has its policy */
    assert_int_equal(expect_forked(fake_client_fork(&fakes, 6, 8, 64), 64), 8);
    assert_string_equal(fakes.stores[0].policy, policy);
    finish(id, run, 330);
    uint64_t copy_id = fake_client_generate(&fakes, 6, "xy", 100);
    fake_client_drop(&fakes, copy_id, REPLY(ACCEPTED));
    copy_run = fake_worker_take(&fakes, &fakes.workers[0], WORK(RUN));
    assert_string_equal(copy_run->run->policy, policy);
    finish(copy_id, copy_run, 5 * 64 + 2);
    /* its tokens are there: its policy stays */
    fake_client_expect_error(&fakes, fake_client_set_policy(&fakes, 6, "full"), ERROR_CODE(CONFLICT));
}

static void many_blocks_go_in_several_orders(void **state)
{
    (void)state;
    struct fakes *all = &fakes;
    fakes_finish(all);
    fakes_start(all, 1, NULL);
    all->stores[0].n_blocks = 1300;
    all->workers[0].n_ctx = 64 * 640;
    fakes_all_ready(all);
    fake_client_open_session(all, 5, false);
    uint64_t id = fake_client_generate(all, 5, "abc", 64 * 600);
    fake_client_drop(all, id, REPLY(ACCEPTED));
    Hcattn__Work__WorkRequest *run = fake_worker_take(all, &all->workers[0], WORK(RUN));
    fake_store_journal(all, 5, 64 * 600 + 1);
    expect_forked(fake_client_fork(all, 5, 6, 0), 64 * 600);
    assert_int_equal(all->stores[0].n_copies, 3);
    assert_int_equal(all->stores[0].max_copied, 256);
    assert_int_equal(all->stores[0].n_copied, 600);
    finish(id, run, 64 * 600 + 1);
}

static void what_cannot_be_forked(void **state)
{
    (void)state;
    Hcattn__Work__WorkRequest *run;
    fake_client_expect_error(&fakes, fake_client_fork(&fakes, 5, 6, 0), ERROR_CODE(NOT_FOUND));
    fake_client_expect_error(&fakes, fake_client_fork(&fakes, 0, 6, 0), ERROR_CODE(INVALID_ARGUMENT));
    fake_client_expect_error(&fakes, fake_client_fork(&fakes, 5, 5, 0), ERROR_CODE(INVALID_ARGUMENT));
    uint64_t id = running(5, 2 * 64 + 63, &run);
    Hcattn__Reply *reply = fake_client_take(&fakes, fake_client_fork(&fakes, 5, 6, 3 * 64), REPLY(ERROR));
    assert_int_equal(reply->error->code, ERROR_CODE(INVALID_ARGUMENT));
    assert_int_equal(reply->error->n_tokens, 191);
    assert_non_null(strstr(reply->error->sentence, "128 tokens in complete blocks"));
    hcattn__reply__free_unpacked(reply, NULL);
    expect_forked(fake_client_fork(&fakes, 5, 6, 3 * 64 - 1), 128);
    /* a session of that number is there */
    expect_forked(fake_client_fork(&fakes, 5, 6, 0), 128); /* the same again is the same */
    assert_int_equal(held(6), 2);
    fake_client_expect_error(&fakes, fake_client_fork(&fakes, 5, 6, 64), ERROR_CODE(CONFLICT));
    fake_client_open_session(&fakes, 7, false);
    fake_client_expect_error(&fakes, fake_client_fork(&fakes, 5, 7, 0), ERROR_CODE(CONFLICT));
    /* nothing complete: an empty session */
    expect_forked(fake_client_fork(&fakes, 5, 8, 63), 0);
    assert_int_equal(held(8), 0);
    expect_forked(fake_client_fork(&fakes, 7, 9, 0), 0);
    /* it is about to be closed */
    uint64_t closing = fake_client_close_session(&fakes, 5);
    fake_client_expect_error(&fakes, fake_client_fork(&fakes, 5, 10, 0), ERROR_CODE(NOT_FOUND));
    fake_worker_error(&fakes.workers[0], run->work, ERROR_CODE(CANCELLED));
    fake_client_expect_error(&fakes, id, ERROR_CODE(CANCELLED));
    fake_client_drop(&fakes, closing, REPLY(SESSION_CLOSED));
    fakes_drop(run);
}

static void no_room_for_a_copy(void **state)
{
    (void)state;
    Hcattn__Work__WorkRequest *run;
    uint64_t id = running(5, 9 * 64, &run);
    uint32_t n_copies = 0; /* 5 blocks of each lie in the store of the first lane, which has 64, as the source's do */
    for (; n_copies < 64 / 5 - 1; n_copies++)
        expect_forked(fake_client_fork(&fakes, 5, 100 + n_copies, 0), 9 * 64);
    Hcattn__Reply *reply = fake_client_take(&fakes, fake_client_fork(&fakes, 5, 50, 0), REPLY(ERROR));
    uint64_t block_bytes = fakes.stores[0].segment.header->block_bytes;
    assert_int_equal(reply->error->code, ERROR_CODE(NO_MEMORY));
    assert_int_equal(reply->error->bytes_asked, 9 * block_bytes);
    assert_int_equal(reply->error->bytes_free, 8 * block_bytes); /* of the ninth there is no room */
    hcattn__reply__free_unpacked(reply, NULL);
    reply = fake_client_list(&fakes);
    assert_int_equal(reply->session_list->n_sessions, 1 + n_copies);
    hcattn__reply__free_unpacked(reply, NULL);
    fake_client_drop(&fakes, fake_client_close_session(&fakes, 100), REPLY(SESSION_CLOSED));
    expect_forked(fake_client_fork(&fakes, 5, 50, 0), 9 * 64);
    finish(id, run, 9 * 64);
}

/* A store refuses its part of one step: everything is given back, and the next fork works. */
static void a_store_refuses_a_step(void **state)
{
    (void)state;
    Hcattn__Work__WorkRequest *run;
    uint64_t id = running(5, 6 * 64, &run);
    struct fake_store *store = &fakes.stores[1];
    for (int step = 0; step < 4; step++) {
        store->open_status = step == 0 ? -ENOSPC : 0;
        store->reserve_status = step == 1 ? -EIO : 0;
        store->copy_status = step == 2 ? -ESTALE : 0;
        store->copy_half = step == 3; /* and says that it is done */
        fake_client_expect_error(&fakes, fake_client_fork(&fakes, 5, 6, 0),
                                 step == 0 ? ERROR_CODE(BUSY) : ERROR_CODE(INTERNAL));
        expect_nothing_left(6);
        store->open_status = store->reserve_status = store->copy_status = 0;
        store->copy_half = false;
    }
    expect_forked(fake_client_fork(&fakes, 5, 6, 0), 6 * 64);
    finish(id, run, 6 * 64);
}

/* A store is lost with each step's orders: the next life adopts the segment and is told again. */
static void a_store_is_lost_and_comes_back(void **state)
{
    (void)state;
    Hcattn__Work__WorkRequest *run;
    uint64_t id = running(5, 6 * 64, &run);
    struct fake_store *store = &fakes.stores[1];
    for (uint64_t session = 6; session < 8; session++) {
        uint32_t n_copies = store->n_copies;
        store->silent = true;
        uint64_t fork_id = fake_client_fork(&fakes, 5, session, 0);
        FAKES_WAIT(&fakes, store->n_copies > n_copies); /* record, reservation and copies are ordered in one go */
        uint64_t dead = store->incarnation;
        fake_store_rebirth(store);
        fake_supervisor_child_dead(&fakes.store_supervisor[1], dead);
        fake_store_register(&fakes, 1, false);
        expect_forked(fork_id, 6 * 64);
        assert_int_equal(held(session), 6);
    }
    finish(id, run, 6 * 64);
}

static void a_store_is_lost_and_stays_away(void **state)
{
    (void)state;
    Hcattn__Work__WorkRequest *run;
    (void)running(5, 6 * 64, &run);
    fakes_drop(run);
    struct fake_store *store = &fakes.stores[1];
    uint64_t dead = store->incarnation;
    store->silent = true;
    uint64_t fork_id = fake_client_fork(&fakes, 5, 6, 0);
    FAKES_WAIT(&fakes, store->n_copies == 1);
    fake_store_rebirth(store);
    Hcattn__Reply *reply = fake_client_take(&fakes, fork_id, REPLY(ERROR));
    assert_int_equal(reply->error->code, ERROR_CODE(UNAVAILABLE));
    assert_non_null(strstr(reply->error->sentence, "value-store 1"));
    hcattn__reply__free_unpacked(reply, NULL);
    /* when it is back, what was ordered is undone */
    fake_supervisor_child_dead(&fakes.store_supervisor[1], dead);
    fake_store_register(&fakes, 1, false);
    FAKES_WAIT(&fakes, store->n_adopts == 1);
    expect_nothing_left(6);
}

static void a_segment_is_lost_with_its_store(void **state)
{
    (void)state;
    Hcattn__Work__WorkRequest *run;
    uint64_t id = running(5, 6 * 64, &run);
    struct fake_store *store = &fakes.stores[1];
    uint64_t dead = store->incarnation;
    store->silent = true;
    uint64_t fork_id = fake_client_fork(&fakes, 5, 6, 0);
    FAKES_WAIT(&fakes, store->n_copies == 1);
    fake_store_rebirth(store);
    store->adopt_status = -EPROTO;
    fake_supervisor_child_dead(&fakes.store_supervisor[1], dead);
    fake_store_register(&fakes, 1, false);
    fake_client_expect_error(&fakes, fork_id, ERROR_CODE(UNAVAILABLE));
    fake_client_expect_error(&fakes, id, ERROR_CODE(INTERNAL)); /* the source is lost */
    fakes_drop(fake_worker_take(&fakes, &fakes.workers[0], WORK(STOP)));
    fake_worker_error(&fakes.workers[0], run->work, ERROR_CODE(CANCELLED));
    fakes_drop(run);
    FAKES_WAIT(&fakes, store->n_formats == 2 && held(5) == 0 && held(6) == 0);
    store->adopt_status = 0;
}

/* Closed after the copies were ordered: stores do their orders one after the other, so the copy is made. */
static void the_source_is_closed_meanwhile(void **state)
{
    (void)state;
    Hcattn__Work__WorkRequest *run;
    uint64_t id = running(5, 6 * 64, &run);
    finish(id, run, 6 * 64);
    struct fake_store *store = &fakes.stores[1];
    uint64_t dead = store->incarnation;
    store->silent = true;
    uint64_t fork_id = fake_client_fork(&fakes, 5, 6, 0);
    FAKES_WAIT(&fakes, store->n_copies == 1);
    uint64_t closing = fake_client_close_session(&fakes, 5);
    FAKES_WAIT(&fakes, fakes.stores[0].n_releases == 1); /* the other one has done all of it */
    fake_store_rebirth(store);
    fake_supervisor_child_dead(&fakes.store_supervisor[1], dead);
    fake_store_register(&fakes, 1, false);
    expect_forked(fork_id, 6 * 64);
    fake_client_drop(&fakes, closing, REPLY(SESSION_CLOSED));
    assert_int_equal(held(5), 0);
    assert_int_equal(held(6), 6);
}

static void its_client_leaves(void **state)
{
    (void)state;
    Hcattn__Work__WorkRequest *run;
    uint64_t id = running(5, 6 * 64, &run);
    struct fake_store *store = &fakes.stores[1];
    store->silent = true;
    uint64_t fork_id = fake_client_fork(&fakes, 5, 6, 0);
    FAKES_WAIT(&fakes, store->n_copies == 1);
    fake_client_drop(&fakes, fake_client_cancel(&fakes, fork_id), REPLY(CANCELLED));
    fake_client_expect_error(&fakes, fork_id, ERROR_CODE(CANCELLED));
    /* the session being closed has to wait for the orders that are out */
    uint64_t dead = store->incarnation;
    fake_store_rebirth(store);
    fake_supervisor_child_dead(&fakes.store_supervisor[1], dead);
    fake_store_register(&fakes, 1, false);
    FAKES_WAIT(&fakes, store->n_adopts == 1);
    expect_nothing_left(6);
    finish(id, run, 6 * 64);
}

/* A coordinator that dies in the middle: the next one finds a whole copy, a shorter one, or nothing - never a wrong one. */
static void the_coordinator_is_lost_meanwhile(void **state)
{
    (void)state;
    Hcattn__Work__WorkRequest *run;
    (void)running(5, 6 * 64, &run);
    fakes_drop(run);
    fakes.stores[1].copy_status = -EIO; /* it stops half-way: only store 0 has its blocks */
    fakes.stores[1].silent = true;
    (void)fake_client_fork(&fakes, 5, 6, 0);
    FAKES_WAIT(&fakes, fakes.stores[0].n_copied == 3 && fakes.stores[1].n_copies == 1);
    fakes_kill_coordinator(&fakes);
    FAKES_WAIT(&fakes, fakes.stores[0].hung_up && fakes.stores[1].hung_up && fakes.workers[0].hung_up);
    fakes.stores[1].copy_status = 0;
    fakes.stores[1].silent = false;
    fakes_start_coordinator(&fakes, NULL);
    for (uint32_t i = 0; i < 2; i++)
        fake_store_register(&fakes, i, true);
    fake_worker_register(&fakes, 0);
    FAKES_WAIT(&fakes, fakes.workers[0].n_exchange_ready == 2);
    FAKES_WAIT(&fakes, held(6) == 0);
    expect_forked(fake_client_fork(&fakes, 5, 6, 0), 6 * 64);
}

int main(void)
{
#define TEST(name, how) cmocka_unit_test_setup_teardown(name, how, teardown)
    const struct CMUnitTest tests[] = {
        TEST(complete_blocks_of_a_running_session, setup),
        TEST(a_copy_with_another_policy, setup),
        TEST(many_blocks_go_in_several_orders, setup),
        TEST(what_cannot_be_forked, setup),
        TEST(no_room_for_a_copy, setup),
        TEST(a_store_refuses_a_step, setup),
        TEST(a_store_is_lost_and_comes_back, setup),
        TEST(a_store_is_lost_and_stays_away, setup_hasty),
        TEST(a_segment_is_lost_with_its_store, setup),
        TEST(the_source_is_closed_meanwhile, setup),
        TEST(its_client_leaves, setup),
        TEST(the_coordinator_is_lost_meanwhile, setup),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
