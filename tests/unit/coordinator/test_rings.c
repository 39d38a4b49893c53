/* The real coordinator with fakes around it: rings granted, used, given up and revoked; deaths between the steps. */
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

/*
 * The fakes assert the order: a worker posts only where the store looks (RingGrant done before RingUse), and a store is told
 * to stop only when nobody posts any more.
 */
static int start(const char *const *arguments)
{
    fakes_start(&fakes, 2, arguments);
    fakes_all_ready(&fakes);
    return 0;
}

static int setup(void **state)
{
    (void)state;
    return start(NULL);
}

static int setup_routed(void **state)
{
    (void)state;
    return start((const char *const[]){"--transport", "routed", NULL});
}

static int setup_direct(void **state)
{
    (void)state;
    return start((const char *const[]){"--transport", "direct", NULL});
}

static int setup_hasty(void **state)
{
    (void)state;
    return start((const char *const[]){"--recovery-timeout", "500ms", NULL});
}

static bool all_ring(uint32_t worker, bool ring)
{
    for (uint32_t i = 0; i < fakes.n_stores; i++)
        if (fakes.workers[worker].ring[i] != ring ||
            fake_store_granted(&fakes.stores[i], fakes.workers[worker].incarnation) != ring)
            return false;
    return true;
}

static void expect_transport(const char *transport)
{
    Hcattn__Reply *reply = fake_client_stats(&fakes);
    assert_string_equal(reply->stats->transport, transport);
    hcattn__reply__free_unpacked(reply, NULL);
}

static void expect_set(uint64_t id, const char *transport)
{
    Hcattn__Reply *reply = fake_client_take(&fakes, id, REPLY(TRANSPORT_SET));
    assert_string_equal(reply->transport_set->transport, transport);
    hcattn__reply__free_unpacked(reply, NULL);
}

static void replace_worker(uint32_t index)
{
    uint64_t dead = fakes.workers[index].incarnation;
    fake_worker_rebirth(&fakes.workers[index]);
    fake_supervisor_child_dead(&fakes.worker_supervisor[index], dead);
    fake_worker_register(&fakes, index);
}

static void replace_store(uint32_t index)
{
    uint64_t dead = fakes.stores[index].incarnation;
    fake_store_rebirth(&fakes.stores[index]);
    fake_supervisor_child_dead(&fakes.store_supervisor[index], dead);
    fake_store_register(&fakes, index, false);
}

static void pairs_become_rings(void **state)
{
    (void)state;
    FAKES_WAIT(&fakes, all_ring(0, true));
    expect_transport("ring");
    fake_worker_register(&fakes, 1);
    FAKES_WAIT(&fakes, all_ring(1, true));
    assert_int_equal(fakes.stores[0].n_grants, 2);
    assert_int_equal(fakes.stores[0].n_revokes, 0);
}

static void switched_while_a_generation_runs(void **state)
{
    (void)state;
    FAKES_WAIT(&fakes, all_ring(0, true));
    fake_client_open_session(&fakes, 5, false);
    uint64_t id = fake_client_generate(&fakes, 5, "abc", 50);
    fake_client_drop(&fakes, id, REPLY(ACCEPTED));
    Hcattn__Work__WorkRequest *run = fake_worker_take(&fakes, &fakes.workers[0], WORK(RUN));
    for (uint32_t i = 0; i < 6; i++) {
        bool ring = i % 2 == 1;
        expect_set(fake_client_set_transport(&fakes, ring ? "ring" : "routed"), ring ? "ring" : "routed");
        assert_true(all_ring(0, ring));
        expect_transport(ring ? "ring" : "routed");
        fake_worker_generated(&fakes.workers[0], run->work, i, 1);
        fake_client_drop(&fakes, id, REPLY(GENERATED));
    }
    expect_set(fake_client_set_transport(&fakes, "ring"), "ring"); /* nothing to do */
    assert_int_equal(fakes.stores[1].n_revokes, 3);
    fake_worker_finished(&fakes.workers[0], run->work, 6, 9);
    fake_client_drop(&fakes, id, REPLY(GENERATE_DONE));
    fakes_drop(run);
}

static void new_pairs_follow_the_setting(void **state)
{
    (void)state;
    expect_transport("routed");
    fakes_quiet(&fakes);
    assert_int_equal(fakes.stores[0].n_grants + fakes.stores[1].n_grants, 0);
    expect_set(fake_client_set_transport(&fakes, "ring"), "ring");
    assert_true(all_ring(0, true));
    fake_worker_register(&fakes, 1);
    FAKES_WAIT(&fakes, all_ring(1, true));
    expect_set(fake_client_set_transport(&fakes, "routed"), "routed");
    assert_true(all_ring(0, false) && all_ring(1, false));
    replace_worker(0);
    FAKES_WAIT(&fakes, fakes.workers[0].n_exchange_ready == 2);
    fakes_quiet(&fakes);
    assert_true(all_ring(0, false));
}

static void what_cannot_be_set(void **state)
{
    (void)state;
    fake_client_expect_error(&fakes, fake_client_set_transport(&fakes, "pigeon"), ERROR_CODE(INVALID_ARGUMENT));
    fake_client_expect_error(&fakes, fake_client_set_transport(&fakes, "direct"), ERROR_CODE(INVALID_ARGUMENT));
    fake_client_expect_error(&fakes, fake_client_set_transport(&fakes, ""), ERROR_CODE(INVALID_ARGUMENT));
    fake_client_expect_error(&fakes, fake_client_set_transport(&fakes, "ring"), ERROR_CODE(NOT_SUPPORTED));
    expect_transport("direct");
    fakes_quiet(&fakes);
    assert_int_equal(fakes.stores[0].n_grants + fakes.workers[0].n_ring_uses, 0);
}

/* Each of the four steps, with the death of each of the two that take part, while the step is not answered. */
static void a_death_in_each_step(void **state)
{
    (void)state;
    enum { GRANT, USE, GIVE_UP, REVOKE, N_STEPS };
    struct fake_worker *worker = &fakes.workers[0];
    struct fake_store *store = &fakes.stores[1];
    for (int step = 0; step < N_STEPS; step++)
        for (int store_dies = 0; store_dies < 2; store_dies++) {
            bool forth = step == GRANT || step == USE;
            expect_set(fake_client_set_transport(&fakes, forth ? "routed" : "ring"), forth ? "routed" : "ring");
            assert_true(all_ring(0, !forth));
            store->ring_silent = step == GRANT || step == REVOKE;
            worker->ring_silent = step == USE || step == GIVE_UP;
            uint32_t n_orders = store->n_grants + store->n_revokes, n_uses = worker->n_ring_uses;
            uint64_t id = fake_client_set_transport(&fakes, forth ? "ring" : "routed");
            if (store->ring_silent)
                FAKES_WAIT(&fakes, store->n_grants + store->n_revokes > n_orders);
            else
                FAKES_WAIT(&fakes, worker->n_ring_uses > n_uses);
            fakes_quiet(&fakes);
            assert_false(fake_client_has(&fakes.client, id)); /* one pair is not there yet */
            uint64_t late = store->ring_silent ? store->ring_sequence : worker->ring_sequence[1];
            store->ring_silent = worker->ring_silent = false;
            if (store_dies)
                replace_store(1);
            else
                replace_worker(0);
            if (store_dies && (step == USE || step == GIVE_UP)) /* the worker's other answer */
                fake_worker_say_done(worker, worker->ring_sequence[0], 0);
            expect_set(id, forth ? "ring"
                                 : "routed"); /* the pair that is left has arrived; the lost one's step is dropped */
            FAKES_WAIT(&fakes, worker->n_exchange_ready >= 2 && all_ring(0, forth));
            fake_store_say_done(store, late, 0); /* an answer to a step of a pair that is gone */
            fake_worker_say_done(worker, late, -EIO);
            fakes_quiet(&fakes);
            assert_true(all_ring(0, forth));
        }
}

static void turned_back_half_way(void **state)
{
    (void)state;
    FAKES_WAIT(&fakes, all_ring(0, true));
    fakes.workers[0].ring_silent = true;
    uint32_t n_uses = fakes.workers[0].n_ring_uses;
    uint64_t first = fake_client_set_transport(&fakes, "routed");
    FAKES_WAIT(&fakes, fakes.workers[0].n_ring_uses == n_uses + 2);
    uint64_t second = fake_client_set_transport(&fakes, "ring");
    fake_client_expect_error(&fakes, first, ERROR_CODE(CONFLICT)); /* it will not come true */
    fakes_quiet(&fakes);
    assert_false(fake_client_has(&fakes.client, second));
    fakes.workers[0].ring_silent = false;
    uint64_t sequences[2] = {fakes.workers[0].ring_sequence[0], fakes.workers[0].ring_sequence[1]};
    fake_worker_say_done(&fakes.workers[0], sequences[0], 0);
    fake_worker_say_done(&fakes.workers[0], sequences[1], 0);
    expect_set(second, "ring");
    assert_true(all_ring(0, true));
    assert_int_equal(fakes.stores[0].n_revokes + fakes.stores[1].n_revokes, 0); /* nobody was told to stop looking */
}

static void refusals_are_told_and_nothing_hangs(void **state)
{
    (void)state;
    fakes.stores[1].ring_status = -ENOMEM;
    uint64_t id = fake_client_set_transport(&fakes, "ring");
    Hcattn__Reply *reply = fake_client_take(&fakes, id, REPLY(ERROR));
    assert_int_equal(reply->error->code, ERROR_CODE(INTERNAL));
    assert_non_null(strstr(reply->error->sentence, "value-store 1"));
    hcattn__reply__free_unpacked(reply, NULL);
    assert_true(fakes.workers[0].ring[0]); /* the other pair uses it */
    assert_false(fakes.workers[0].ring[1]);
    /* a worker that does not want it: the store is told to stop looking */
    fakes.stores[1].ring_status = 0;
    fakes.workers[0].ring_status = -EIO;
    fake_client_expect_error(&fakes, fake_client_set_transport(&fakes, "ring"), ERROR_CODE(INTERNAL));
    assert_false(fake_store_granted(&fakes.stores[1], fakes.workers[0].incarnation));
    /* one that does not give it up keeps it, and may be asked again */
    fake_client_expect_error(&fakes, fake_client_set_transport(&fakes, "routed"), ERROR_CODE(INTERNAL));
    assert_true(fakes.workers[0].ring[0]);
    fakes.workers[0].ring_status = 0;
    expect_set(fake_client_set_transport(&fakes, "routed"), "routed");
    assert_true(all_ring(0, false));
    expect_set(fake_client_set_transport(&fakes, "ring"), "ring");
    assert_true(all_ring(0, true));
}

static void a_pair_that_does_not_answer_is_named(void **state)
{
    (void)state;
    FAKES_WAIT(&fakes, all_ring(0, true));
    fakes.workers[0].ring_silent = true;
    Hcattn__Reply *reply = fake_client_take(&fakes, fake_client_set_transport(&fakes, "routed"), REPLY(ERROR));
    assert_int_equal(reply->error->code, ERROR_CODE(UNAVAILABLE));
    assert_non_null(strstr(reply->error->sentence, "gpu-worker 0"));
    hcattn__reply__free_unpacked(reply, NULL);
}

static void a_new_coordinator_grants_anew(void **state)
{
    (void)state;
    FAKES_WAIT(&fakes, all_ring(0, true));
    fakes_kill_coordinator(&fakes);
    fakes_start_coordinator(&fakes, NULL);
    FAKES_WAIT(&fakes, fakes.stores[0].hung_up && fakes.stores[1].hung_up && fakes.workers[0].hung_up);
    for (uint32_t i = 0; i < 2; i++)
        fake_store_register(&fakes, i, true);
    fake_worker_register(&fakes, 0);
    FAKES_WAIT(&fakes, all_ring(0, true));
}

int main(void)
{
#define TEST(name, how) cmocka_unit_test_setup_teardown(name, how, teardown)
    const struct CMUnitTest tests[] = {
        TEST(pairs_become_rings, setup),
        TEST(switched_while_a_generation_runs, setup),
        TEST(new_pairs_follow_the_setting, setup_routed),
        TEST(what_cannot_be_set, setup_direct),
        TEST(a_death_in_each_step, setup),
        TEST(turned_back_half_way, setup),
        TEST(refusals_are_told_and_nothing_hangs, setup_routed),
        TEST(a_pair_that_does_not_answer_is_named, setup_hasty),
        TEST(a_new_coordinator_grants_anew, setup),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
