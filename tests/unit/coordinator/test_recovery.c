/* The real coordinator with fakes around it: what is lost, who takes over, and that no token comes twice. */
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/random.h"
#include "tests/unit/coordinator/fakes.h"

static struct fakes fakes;
static const char *const hasty[] = {"--hang-timeout", "1200ms", "--recovery-timeout", "1500ms", NULL};

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

static int teardown(void **state)
{
    (void)state;
    fakes_finish(&fakes);
    return 0;
}

static Hcattn__Work__WorkRequest *take_run(uint32_t worker)
{
    return fake_worker_take(&fakes, &fakes.workers[worker], WORK(RUN));
}

static void expect_generated(uint64_t id, uint32_t first, uint32_t n)
{
    Hcattn__Reply *reply = fake_client_take(&fakes, id, REPLY(GENERATED));
    assert_int_equal(reply->generated->first, first);
    assert_int_equal(reply->generated->n_ids, n);
    hcattn__reply__free_unpacked(reply, NULL);
}

static bool is_ready(void)
{
    Hcattn__Reply *reply = fake_client_health(&fakes);
    bool ready = reply->health->ready;
    hcattn__reply__free_unpacked(reply, NULL);
    return ready;
}

/* The worker of that number dies, as its supervisor sees it, and the next life registers. */
static void replace_worker(uint32_t index)
{
    struct fake_worker *worker = &fakes.workers[index];
    uint64_t dead = worker->incarnation;
    fake_worker_rebirth(worker);
    fake_supervisor_child_dead(&fakes.worker_supervisor[index], dead);
    fake_worker_register(&fakes, index);
    FAKES_WAIT(&fakes, worker->n_exchange_ready == fakes.n_stores);
}

static void a_lost_worker_is_followed_by_the_next(void **state)
{
    (void)state;
    uint64_t dead = fakes.workers[0].incarnation, session = fake_client_open_session(&fakes, 5, false);
    uint64_t id = fake_client_generate(&fakes, session, "abc", 50);
    fake_client_drop(&fakes, id, REPLY(ACCEPTED));
    Hcattn__Work__WorkRequest *run = take_run(0);
    fake_worker_generated(&fakes.workers[0], run->work, 0, 3);
    expect_generated(id, 0, 3);
    fakes_drop(run);
    fake_worker_rebirth(&fakes.workers[0]);
    fake_worker_register(&fakes, 0); /* before anybody knows that the old one is dead */
    FAKES_WAIT(&fakes, fakes.workers[0].n_exchange_ready == 2);
    fakes_quiet(&fakes);
    assert_int_equal(fakes.workers[0].n_queue, 0); /* a hang-up is no death */
    fake_supervisor_child_dead(&fakes.worker_supervisor[0], dead);
    run = take_run(0);
    assert_int_equal(run->run->resume_from, 3);
    assert_int_equal(run->run->at, 0);
    assert_int_equal(run->run->n_input_ids, 3);
    FAKES_WAIT(&fakes, fakes.stores[0].worker_gone == dead && fakes.stores[1].worker_gone == dead);
    fake_worker_generated(&fakes.workers[0], run->work, 3, 1);
    expect_generated(id, 3, 1);
    fake_store_journal(&fakes, session, 7);
    fake_worker_finished(&fakes.workers[0], run->work, 4, 7);
    fake_client_drop(&fakes, id, REPLY(GENERATE_DONE));
    fakes_drop(run);
}

static void a_worker_of_another_number_takes_over_at_once(void **state)
{
    (void)state;
    fakes.workers[1].model = fakes.workers[0].model;
    fake_worker_register(&fakes, 1);
    FAKES_WAIT(&fakes, fakes.workers[1].n_exchange_ready == 2);
    uint64_t session = fake_client_open_session(&fakes, 5, false);
    uint64_t id = fake_client_append(&fakes, session, "abc");
    fake_client_drop(&fakes, id, REPLY(ACCEPTED));
    FAKES_WAIT(&fakes, fakes.workers[0].n_queue + fakes.workers[1].n_queue == 1);
    uint32_t first = fakes.workers[0].n_queue ? 0 : 1;
    fakes_drop(take_run(first));
    if (first == 1) { /* no supervisor: the hang-up of its only connection is not its death while its pid lives */
        fake_supervisor_register(&fakes, &fakes.worker_supervisor[1], HCATTN__CONTROL__ROLE__GPU_WORKER, 1);
    }
    fake_worker_hang_up(&fakes.workers[first]);
    fake_supervisor_child_dead(&fakes.worker_supervisor[first], fakes.workers[first].incarnation);
    Hcattn__Work__WorkRequest *run = take_run(1 - first);
    assert_int_equal(run->run->session, session);
    fake_worker_finished(&fakes.workers[1 - first], run->work, 0, 3);
    fake_client_drop(&fakes, id, REPLY(APPENDED));
    fakes_drop(run);
}

static void a_request_that_kills_workers_is_given_up(void **state)
{
    (void)state;
    uint64_t session = fake_client_open_session(&fakes, 5, false);
    uint64_t id = fake_client_generate(&fakes, session, "abc", 50);
    fake_client_drop(&fakes, id, REPLY(ACCEPTED));
    Hcattn__Work__WorkRequest *run = take_run(0);
    fake_worker_generated(&fakes.workers[0], run->work, 0, 2);
    expect_generated(id, 0, 2);
    fakes_drop(run);
    for (int death = 1; death <= 3; death++) {
        replace_worker(0);
        run = take_run(0);
        assert_int_equal(run->run->resume_from, 2);
        fakes_drop(run);
    }
    replace_worker(0);
    fake_client_expect_error(&fakes, id, ERROR_CODE(INTERNAL));
    assert_int_equal(fakes.workers[0].n_queue, 0);
    /* progress in between starts the count again */
    id = fake_client_generate(&fakes, session, "abc", 50);
    fake_client_drop(&fakes, id, REPLY(ACCEPTED));
    for (uint32_t death = 0; death < 6; death++) {
        run = take_run(0);
        assert_int_equal(run->run->resume_from, death);
        fake_worker_generated(&fakes.workers[0], run->work, death, 1);
        expect_generated(id, death, 1);
        fakes_drop(run);
        replace_worker(0);
    }
    run = take_run(0);
    fake_worker_finished(&fakes.workers[0], run->work, 6, 12);
    fake_client_drop(&fakes, id, REPLY(GENERATE_DONE));
    fakes_drop(run);
}

static void a_worker_that_hung_up_has_dropped_its_runs(void **state)
{
    (void)state;
    uint64_t session = fake_client_open_session(&fakes, 5, false);
    uint64_t id = fake_client_generate(&fakes, session, "abc", 50);
    fake_client_drop(&fakes, id, REPLY(ACCEPTED));
    fakes_drop(take_run(0));
    fake_worker_hang_up(&fakes.workers[0]); /* the same life comes back on a new connection */
    fake_worker_register(&fakes, 0);
    Hcattn__Work__WorkRequest *run = take_run(0);
    fake_worker_finished(&fakes.workers[0], run->work, 0, 3);
    fake_client_drop(&fakes, id, REPLY(GENERATE_DONE));
    fakes_drop(run);
}

static void a_lost_stores_segment_is_adopted(void **state)
{
    (void)state;
    struct fake_store *store = &fakes.stores[1];
    uint64_t dead = store->incarnation, session = fake_client_open_session(&fakes, 5, false);
    uint64_t id = fake_client_generate(&fakes, session, "abc", 200);
    fake_client_drop(&fakes, id, REPLY(ACCEPTED));
    Hcattn__Work__WorkRequest *run = take_run(0);
    fake_store_journal(&fakes, session, 3);
    uint64_t held = fake_store_held(store, session);
    assert_true(held > 0);

    fake_store_rebirth(store);
    FAKES_WAIT(&fakes, fakes.workers[0].n_store_down == 1);
    assert_false(is_ready());
    fake_store_register(&fakes, 1, false);
    fakes_quiet(&fakes);
    assert_int_equal(store->n_adopts, 0); /* its old life is not known dead */
    fake_supervisor_child_dead(&fakes.store_supervisor[1], dead);
    FAKES_WAIT(&fakes, store->n_adopts == 1);
    assert_int_equal(store->previous, dead);
    FAKES_WAIT(&fakes, fakes.workers[0].n_exchange_ready == 3);
    assert_int_equal(fakes.workers[0].store_route[1], store->route);
    assert_int_equal(fakes.workers[0].store_incarnation[1], store->incarnation);
    assert_int_equal(fake_store_held(store, session), held);
    assert_true(is_ready());
    /* the run goes on, the session is closed in the adopted segment */
    fake_worker_finished(&fakes.workers[0], run->work, 1, 4);
    fake_client_drop(&fakes, id, REPLY(GENERATE_DONE));
    fakes_drop(run);
    fake_client_drop(&fakes, fake_client_close_session(&fakes, session), REPLY(SESSION_CLOSED));
    assert_int_equal(fake_store_held(store, session), 0);
}

static void orders_are_given_again_to_the_next_store(void **state)
{
    (void)state;
    struct fake_store *store = &fakes.stores[1];
    uint64_t dead = store->incarnation, session = fake_client_open_session(&fakes, 5, false);
    store->silent = true; /* it takes the order and dies with it */
    uint64_t id = fake_client_generate(&fakes, session, "abc", 200);
    FAKES_WAIT(&fakes, store->n_reserves == 1);
    fake_store_rebirth(store);
    fake_supervisor_child_dead(&fakes.store_supervisor[1], dead);
    fake_store_register(&fakes, 1, false);
    fake_client_drop(&fakes, id, REPLY(ACCEPTED));
    assert_int_equal(store->n_reserves, 2);
    Hcattn__Work__WorkRequest *run = take_run(0);
    fake_worker_finished(&fakes.workers[0], run->work, 0, 3);
    fake_client_drop(&fakes, id, REPLY(GENERATE_DONE));
    fakes_drop(run);
    /* the same for a release */
    store->silent = true;
    dead = store->incarnation;
    id = fake_client_close_session(&fakes, session);
    FAKES_WAIT(&fakes, store->n_releases == 1);
    fake_store_rebirth(store);
    fake_supervisor_child_dead(&fakes.store_supervisor[1], dead);
    fake_store_register(&fakes, 1, false);
    fake_client_drop(&fakes, id, REPLY(SESSION_CLOSED));
    assert_int_equal(fake_store_held(store, session), 0);
}

static void an_adopting_store_that_mended_a_header_is_believed(void **state)
{
    (void)state;
    struct fake_store *store = &fakes.stores[1];
    uint64_t dead = store->incarnation;
    fake_client_open_session(&fakes, 5, false);
    fake_client_open_session(&fakes, 6, false);
    uint64_t id = fake_client_append(&fakes, 5, "abc");
    fake_client_drop(&fakes, id, REPLY(ACCEPTED));
    Hcattn__Work__WorkRequest *run = take_run(0);
    fake_store_journal(&fakes, 5, 3);
    fake_worker_finished(&fakes.workers[0], run->work, 0, 3);
    fake_client_drop(&fakes, id, REPLY(APPENDED));
    fakes_drop(run);
    /* free blocks of store 1 come back with higher generations; the block of the session with another session's name */
    struct hand_segment *segment = &store->segment;
    uint32_t n_blocks = segment->header->n_blocks;
    for (uint32_t i = 0; i < n_blocks; i++)
        if (atomic_load(&segments_block(segment, i)->state) == BLOCK_FREE)
            segments_block(segment, i)->handle.generation = 1000;
    bool holds = fake_store_held(store, 5) > 0;
    fake_store_rebirth(store);
    fake_supervisor_child_dead(&fakes.store_supervisor[1], dead);
    fake_store_register(&fakes, 1, false);
    FAKES_WAIT(&fakes, fakes.workers[0].n_exchange_ready == 3);
    id = fake_client_append(&fakes, 6, "abc"); /* the fake store asserts that generations grow */
    fake_client_drop(&fakes, id, REPLY(ACCEPTED));
    run = take_run(0);
    fake_worker_finished(&fakes.workers[0], run->work, 0, 3);
    fake_client_drop(&fakes, id, REPLY(APPENDED));
    fakes_drop(run);
    id = fake_client_generate(&fakes, 6, "abc", 500);
    fake_client_drop(&fakes, id, REPLY(ACCEPTED));
    fakes_drop(take_run(0));
    /* a block of a session that the store gave up breaks that session */
    struct fake_store *with = holds ? store : &fakes.stores[0];
    dead = with->incarnation;
    for (uint32_t i = 0; i < with->segment.header->n_blocks; i++)
        if (segments_block(&with->segment, i)->session == 5)
            atomic_store(&segments_block(&with->segment, i)->state, BLOCK_FREE);
    fake_store_rebirth(with);
    fake_supervisor_child_dead(&fakes.store_supervisor[with->index], dead);
    fake_store_register(&fakes, with->index, false);
    FAKES_WAIT(&fakes, fakes.workers[0].n_exchange_ready == 4);
    fake_client_expect_error(&fakes, fake_client_generate(&fakes, 5, "x", 1), ERROR_CODE(NOT_FOUND));
}

static void a_reservation_that_fails_unwatched(void **state)
{
    (void)state;
    uint64_t session = fake_client_open_session(&fakes, 5, false), dead = fakes.stores[1].incarnation;
    fakes.stores[1].silent = true;
    uint64_t id = fake_client_generate(&fakes, session, "abc", 250);
    FAKES_WAIT(&fakes, fakes.stores[1].n_reserves == 1);
    fake_client_drop(&fakes, fake_client_cancel(&fakes, id), REPLY(CANCELLED));
    fake_client_expect_error(&fakes, id, ERROR_CODE(CANCELLED));
    fake_store_rebirth(&fakes.stores[1]);
    fakes.stores[1].reserve_status = -ESTALE; /* the next life refuses what is ordered again */
    fake_supervisor_child_dead(&fakes.store_supervisor[1], dead);
    fake_store_register(&fakes, 1, false);
    FAKES_WAIT(&fakes, fakes.stores[1].n_reserves == 2);
    fakes.stores[1].reserve_status = 0;
    id = fake_client_generate(&fakes, session, "abc", 250);
    fake_client_drop(&fakes, id, REPLY(ACCEPTED));
    Hcattn__Work__WorkRequest *run = take_run(0);
    assert_int_equal(run->run->n_blocks, 4);
    assert_int_equal(fake_store_held(&fakes.stores[0], 5) + fake_store_held(&fakes.stores[1], 5), 4);
    fake_worker_finished(&fakes.workers[0], run->work, 0, 3);
    fake_client_drop(&fakes, id, REPLY(GENERATE_DONE));
    fakes_drop(run);
}

static void a_segment_that_cannot_be_adopted_is_given_up(void **state)
{
    (void)state;
    struct fake_store *store = &fakes.stores[1];
    uint64_t dead = store->incarnation, session = fake_client_open_session(&fakes, 5, false);
    uint64_t id = fake_client_generate(&fakes, session, "abc", 200);
    fake_client_drop(&fakes, id, REPLY(ACCEPTED));
    Hcattn__Work__WorkRequest *run = take_run(0);
    fake_store_rebirth(store);
    store->adopt_status = -EPROTO;
    fake_supervisor_child_dead(&fakes.store_supervisor[1], dead);
    fake_store_register(&fakes, 1, false);
    fake_client_expect_error(&fakes, id, ERROR_CODE(INTERNAL));
    fakes_drop(fake_worker_take(&fakes, &fakes.workers[0], WORK(STOP)));
    fake_worker_error(&fakes.workers[0], run->work, ERROR_CODE(CANCELLED));
    fakes_drop(run);
    FAKES_WAIT(&fakes, store->n_formats == 2 && fakes.workers[0].n_exchange_ready == 3);
    FAKES_WAIT(&fakes, fake_store_held(&fakes.stores[0], session) == 0);
    fake_client_expect_error(&fakes, fake_client_generate(&fakes, session, "x", 1), ERROR_CODE(NOT_FOUND));
    /* everything is free: a session can fill both stores */
    fakes.stores[1].adopt_status = 0;
    Hcattn__Reply *reply = fake_client_stats(&fakes);
    for (size_t i = 0; i < reply->stats->n_processes; i++)
        assert_int_equal(reply->stats->processes[i]->bytes_used, 0);
    hcattn__reply__free_unpacked(reply, NULL);
}

/* Stores and worker register with a new coordinator, as protocol.md says: with fresh routes and what they hold. */
static void register_again(void)
{
    for (uint32_t i = 0; i < fakes.n_stores; i++) {
        FAKES_WAIT(&fakes, fakes.stores[i].hung_up);
        fake_store_register(&fakes, i, true);
    }
    FAKES_WAIT(&fakes, fakes.workers[0].hung_up);
    fake_worker_register(&fakes, 0);
}

static void a_new_coordinator_finds_the_sessions(void **state)
{
    (void)state;
    uint64_t session = fake_client_open_session(&fakes, 5, false), other = fake_client_open_session(&fakes, 6, true);
    uint64_t id = fake_client_generate(&fakes, session, "abc", 300);
    fake_client_drop(&fakes, id, REPLY(ACCEPTED));
    fakes_drop(take_run(0));
    fake_store_journal(&fakes, session, 70);
    uint64_t held = fake_store_held(&fakes.stores[0], session) + fake_store_held(&fakes.stores[1], session);
    fakes_kill_coordinator(&fakes);
    fakes_start_coordinator(&fakes, NULL);
    FAKES_WAIT(&fakes, fakes.stores[0].hung_up && fakes.stores[1].hung_up && fakes.workers[0].hung_up);
    assert_false(is_ready()); /* it answers although nobody is there */
    /* the client asks again before anybody has registered: it waits */
    fake_client_resume(&fakes, id, session, "abc", 300, 0, 60);
    fakes_quiet(&fakes);
    assert_false(fake_client_has(&fakes.client, id));
    fake_store_register(&fakes, 0, true);
    fakes_quiet(&fakes);
    assert_false(fake_client_has(&fakes.client, id)); /* half of the session is not there */
    fake_store_register(&fakes, 1, true);
    fake_worker_register(&fakes, 0);
    Hcattn__Reply *reply = fake_client_take(&fakes, id, REPLY(ACCEPTED));
    assert_int_equal(reply->accepted->at, 0);
    hcattn__reply__free_unpacked(reply, NULL);
    assert_int_equal(fakes.stores[0].n_formats, 1); /* by the old one */
    Hcattn__Work__WorkRequest *run = take_run(0);
    assert_int_equal(run->run->resume_from, 60);
    assert_int_equal(run->run->n_blocks, held);
    for (uint32_t number = 0; number < run->run->n_blocks; number++) {
        struct fake_store *store = &fakes.stores[run->run->lane_store.data[number % LAYOUT_N_LANES]];
        const struct block_header *header = segments_block(&store->segment, run->run->blocks[number]->index);
        assert_int_equal(header->session, session);
        assert_int_equal(header->number, number);
    }
    fake_worker_generated(&fakes.workers[0], run->work, 60, 2);
    expect_generated(id, 60, 2);
    fake_worker_finished(&fakes.workers[0], run->work, 62, 65);
    fake_client_drop(&fakes, id, REPLY(GENERATE_DONE));
    fakes_drop(run);
    /* the other one is there too, and blocks that are in use are not given out again (the fake store asserts) */
    id = fake_client_generate(&fakes, other, "abc", 900);
    fake_client_drop(&fakes, id, REPLY(ACCEPTED));
    fakes_drop(take_run(0));
    assert_int_equal(fake_store_held(&fakes.stores[0], session) + fake_store_held(&fakes.stores[1], session), held);
}

static void a_half_finished_reservation_is_cut_off(void **state)
{
    (void)state;
    uint64_t session = fake_client_open_session(&fakes, 5, false);
    uint64_t id = fake_client_append(&fakes, session, "abc");
    fake_client_drop(&fakes, id, REPLY(ACCEPTED));
    fakes_drop(take_run(0));
    fake_store_journal(&fakes, session, 3);
    fakes_kill_coordinator(&fakes);
    /* as if the dead one had reserved numbers 1 .. 3, and only the store of 1 and 3 had done it */
    uint32_t with_one = segments_record(&fakes.stores[0].segment, 0)->lane_store[0][1];
    struct hand_segment *segment = &fakes.stores[with_one].segment;
    segments_write_block(segment, (struct block_handle){40, 9}, session, 3, (struct block_handle){41, 9}, 0, 0);
    assert_int_equal(fake_store_held(&fakes.stores[with_one], session), 1);
    fakes_start_coordinator(&fakes, NULL);
    register_again();
    FAKES_WAIT(&fakes, fakes.stores[0].n_releases + fakes.stores[1].n_releases >= 1);
    FAKES_WAIT(&fakes, fake_store_held(&fakes.stores[with_one], session) == 0);
    id = fake_client_generate(&fakes, session, "abc", 300);
    Hcattn__Reply *reply = fake_client_take(&fakes, id, REPLY(ACCEPTED));
    assert_int_equal(reply->accepted->at, 3);
    hcattn__reply__free_unpacked(reply, NULL);
    fakes_drop(take_run(0));
}

static void a_broken_session_is_closed(void **state)
{
    (void)state;
    fake_client_open_session(&fakes, 5, false);
    uint64_t id = fake_client_append(&fakes, 5, "abc");
    fake_client_drop(&fakes, id, REPLY(ACCEPTED));
    fakes_drop(take_run(0));
    fake_store_journal(&fakes, 5, 3);
    fakes_kill_coordinator(&fakes);
    FAKES_WAIT(&fakes, fakes.stores[0].hung_up && fakes.stores[1].hung_up && fakes.workers[0].hung_up);
    /* store 0 is lost with it: what it held is gone */
    uint32_t first = segments_record(&fakes.stores[0].segment, 0)->lane_store[0][0];
    fake_store_rebirth(&fakes.stores[first]);
    fakes_start_coordinator(&fakes, NULL);
    fake_store_register(&fakes, first, false);
    fake_store_register(&fakes, 1 - first, true);
    fake_worker_register(&fakes, 0);
    FAKES_WAIT(&fakes, fakes.workers[0].n_exchange_ready == 2);
    fake_client_expect_error(&fakes, fake_client_generate(&fakes, 5, "x", 1), ERROR_CODE(NOT_FOUND));
    FAKES_WAIT(&fakes,
               atomic_load(&segments_record(&fakes.stores[1 - first].segment, 0)->state) == SESSION_RECORD_FREE);
    assert_int_equal(fake_store_held(&fakes.stores[1 - first], 5), 0);
    /* the same number may be used again */
    assert_int_equal(fake_client_open_session(&fakes, 5, false), 5);
}

static void a_worker_with_another_model_meets_sessions(void **state)
{
    (void)state;
    fake_client_open_session(&fakes, 5, false);
    uint64_t dead = fakes.workers[0].incarnation;
    fake_worker_rebirth(&fakes.workers[0]);
    fake_supervisor_child_dead(&fakes.worker_supervisor[0], dead);
    fakes.workers[0].model = 0xfeed;
    fakes.workers[0].shape.n_layers = 3;
    fake_worker_register(&fakes, 0);
    FAKES_WAIT(&fakes, fakes.workers[0].refused[0] && fakes.workers[0].hung_up);
    assert_non_null(strstr(fakes.workers[0].refused, "close them first"));
    fake_client_drop(&fakes, fake_client_close_session(&fakes, 5), REPLY(SESSION_CLOSED));
    /* with none left the stores are formatted for it */
    fake_worker_register(&fakes, 0);
    FAKES_WAIT(&fakes, fakes.workers[0].n_exchange_ready == 2);
    assert_int_equal(fakes.stores[0].n_formats, 2);
    assert_int_equal(fakes.stores[1].segment.header->shape.n_layers, 3);
    assert_true(is_ready());
    fake_client_open_session(&fakes, 6, false);
}

static void a_hung_worker_is_fenced(void **state)
{
    (void)state;
    struct fake_worker *worker = &fakes.workers[0];
    uint64_t session = fake_client_open_session(&fakes, 5, false);
    uint64_t id = fake_client_generate(&fakes, session, "abc", 50);
    fake_client_drop(&fakes, id, REPLY(ACCEPTED));
    fakes_drop(take_run(0));
    worker->busy = true; /* it lives, and does not get on */
    worker->phase = "step";
    FAKES_WAIT(&fakes, fakes.worker_supervisor[0].fenced != 0);
    assert_int_equal(fakes.worker_supervisor[0].fenced, worker->incarnation);
    assert_non_null(strstr(fakes.worker_supervisor[0].reason, "without progress"));
    worker->busy = false;
    replace_worker(0);
    Hcattn__Work__WorkRequest *run = take_run(0);
    fake_worker_finished(worker, run->work, 0, 3);
    fake_client_drop(&fakes, id, REPLY(GENERATE_DONE));
    fakes_drop(run);
}

static void nobody_comes_back(void **state)
{
    (void)state;
    uint64_t session = fake_client_open_session(&fakes, 5, false), dead = fakes.workers[0].incarnation;
    fake_worker_rebirth(&fakes.workers[0]);
    fake_supervisor_child_dead(&fakes.worker_supervisor[0], dead);
    uint64_t id = fake_client_generate(&fakes, session, "abc", 50);
    Hcattn__Reply *reply = fake_client_take(&fakes, id, REPLY(ERROR));
    assert_int_equal(reply->error->code, ERROR_CODE(UNAVAILABLE));
    assert_non_null(strstr(reply->error->sentence, "no gpu-worker is there"));
    hcattn__reply__free_unpacked(reply, NULL);
}

/* A process of its own that registers as store 0 and waits to be killed: its pidfd is the only evidence. */
static void a_pidfd_tells_of_a_death(void **state)
{
    (void)state;
    struct fakes lone;
    fakes_start(&lone, 1, NULL);
    int ready[2];
    assert_int_equal(pipe(ready), 0);
    pid_t pid = fork();
    if (pid == 0) {
        fake_store_register(&lone, 0, false);
        int fd;
        while (!fakes_hear(lone.stores[0].fd, &fd))
            usleep(1000);
        if (write(ready[1], "x", 1) == 1)
            pause();
        _exit(1);
    }
    char byte;
    assert_int_equal(read(ready[0], &byte, 1), 1);
    /* stopped, it is neither gone nor replaced */
    kill(pid, SIGSTOP);
    lone.stores[0].incarnation = random_u64();
    fake_store_register(&lone, 0, false);
    FAKES_WAIT(&lone, lone.stores[0].refused[0] && lone.stores[0].hung_up);
    assert_non_null(strstr(lone.stores[0].refused, "alive"));
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    fake_store_register(&lone, 0, false);
    lone.workers[0].n_ctx = 64;
    fake_worker_register(&lone, 0);
    FAKES_WAIT(&lone, lone.workers[0].n_exchange_ready == 1);
    assert_int_equal(lone.stores[0].n_formats, 1);
    close(ready[0]);
    close(ready[1]);
    fakes_finish(&lone);
}

int main(void)
{
#define TEST(name)  cmocka_unit_test_setup_teardown(name, setup, teardown)
#define HASTY(name) cmocka_unit_test_setup_teardown(name, setup_hasty, teardown)
    const struct CMUnitTest tests[] = {
        TEST(a_lost_worker_is_followed_by_the_next),
        TEST(a_worker_of_another_number_takes_over_at_once),
        TEST(a_request_that_kills_workers_is_given_up),
        TEST(a_worker_that_hung_up_has_dropped_its_runs),
        TEST(a_lost_stores_segment_is_adopted),
        TEST(orders_are_given_again_to_the_next_store),
        TEST(an_adopting_store_that_mended_a_header_is_believed),
        TEST(a_reservation_that_fails_unwatched),
        TEST(a_segment_that_cannot_be_adopted_is_given_up),
        TEST(a_new_coordinator_finds_the_sessions),
        TEST(a_half_finished_reservation_is_cut_off),
        TEST(a_broken_session_is_closed),
        TEST(a_worker_with_another_model_meets_sessions),
        HASTY(a_hung_worker_is_fenced),
        HASTY(nobody_comes_back),
        cmocka_unit_test(a_pidfd_tells_of_a_death),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
