/* The real coordinator with fakes around it: the line for room - its order, its bounds, and who leaves it. */
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

/* One store of 16 blocks; sessions of 8 and 6 blocks fill it but for two. Lines are short, and so is patience where asked. */
enum { N_BLOCKS = 16 };

static uint64_t block_bytes;

static void start(const char *max_queued, const char *timeout)
{
    fakes_start(&fakes, 1, (const char *const[]){"--max-queue", max_queued, "--queue-timeout", timeout, NULL});
    fakes.stores[0].n_blocks = N_BLOCKS;
    fakes_all_ready(&fakes);
    block_bytes = fakes.stores[0].segment.header->block_bytes;
}

static int setup(void **state)
{
    (void)state;
    start("3", "30s");
    return 0;
}

static int setup_hasty(void **state)
{
    (void)state;
    start("3", "700ms");
    return 0;
}

/* A Generate of a new session that needs n_blocks in all. */
static uint64_t ask(uint64_t session, uint32_t n_blocks)
{
    fake_client_open_session(&fakes, session, false);
    return fake_client_generate(&fakes, session, "abc", n_blocks * 64 - 4);
}

static Hcattn__Work__WorkRequest *expect_run(uint64_t session, uint64_t id)
{
    fake_client_drop(&fakes, id, REPLY(ACCEPTED));
    Hcattn__Work__WorkRequest *run = fake_worker_take(&fakes, &fakes.workers[0], WORK(RUN));
    assert_int_equal(run->run->session, session);
    return run;
}

static void end(Hcattn__Work__WorkRequest *run, uint64_t id)
{
    fake_store_journal(&fakes, run->run->session, 4);
    fake_worker_finished(&fakes.workers[0], run->work, 1, 4);
    fake_client_drop(&fakes, id, REPLY(GENERATE_DONE));
    fakes_drop(run);
}

static void close_session(uint64_t session)
{
    fake_client_drop(&fakes, fake_client_close_session(&fakes, session), REPLY(SESSION_CLOSED));
}

/* Sessions 1 and 2, idle, hold 14 blocks of the 16. */
static void fill(void)
{
    uint64_t id = ask(1, 8);
    end(expect_run(1, id), id);
    id = ask(2, 6);
    end(expect_run(2, id), id);
}

static void expect_line(uint32_t n_running, uint32_t n_queued)
{
    Hcattn__Reply *reply = fake_client_stats(&fakes);
    assert_int_equal(reply->stats->n_running, n_running);
    assert_int_equal(reply->stats->n_queued, n_queued);
    assert_int_equal(reply->stats->max_queued, 3);
    hcattn__reply__free_unpacked(reply, NULL);
}

static void expect_waiting(uint64_t id)
{
    fakes_quiet(&fakes);
    assert_false(fake_client_has(&fakes.client, id));
}

static void first_come_first_served(void **state)
{
    (void)state;
    fill();
    uint64_t large = ask(3, 7), small = ask(4, 1), next = ask(5, 7);
    expect_waiting(large);
    expect_waiting(small); /* it would fit, and does not overtake */
    expect_line(0, 3);
    assert_int_equal(fake_store_held(&fakes.stores[0], 3) + fake_store_held(&fakes.stores[0], 4), 0);
    Hcattn__Reply *health = fake_client_health(&fakes);
    assert_int_equal(health->health->n_running, 3); /* their client is told that they are known */
    hcattn__reply__free_unpacked(health, NULL);
    close_session(2); /* 8 free: the large one and the small one */
    Hcattn__Work__WorkRequest *one = expect_run(3, large), *two = expect_run(4, small);
    expect_waiting(next);
    expect_line(2, 1);
    /* what needs no more blocks is not held up by the line */
    uint64_t again = fake_client_generate(&fakes, 1, "abc", 10);
    end(expect_run(1, again), again);
    close_session(1); /* 8 free */
    Hcattn__Work__WorkRequest *three = expect_run(5, next);
    expect_line(3, 0);
    end(one, large);
    end(two, small);
    /* the wait is part of what its client is told */
    fake_worker_finished(&fakes.workers[0], three->work, 1, 4);
    Hcattn__Reply *reply = fake_client_take(&fakes, next, REPLY(GENERATE_DONE));
    assert_true(reply->generate_done->timings->queued_us > 100000);
    hcattn__reply__free_unpacked(reply, NULL);
    fakes_drop(three);
}

static void a_full_line_is_busy_with_numbers(void **state)
{
    (void)state;
    fill();
    for (uint64_t i = 0; i < 3; i++)
        (void)ask(3 + i, 7);
    Hcattn__Reply *reply = fake_client_take(&fakes, ask(6, 1), REPLY(ERROR));
    assert_int_equal(reply->error->code, ERROR_CODE(BUSY));
    assert_int_equal(reply->error->n_queued, 3);
    assert_int_equal(reply->error->max_queued, 3);
    assert_int_equal(reply->error->bytes_asked, block_bytes);
    assert_non_null(strstr(reply->error->sentence, "at most 3"));
    hcattn__reply__free_unpacked(reply, NULL);
    expect_line(0, 3);
}

static void what_never_fits_is_refused_at_once(void **state)
{
    (void)state;
    uint64_t id = ask(3, N_BLOCKS); /* all there is fits */
    end(expect_run(3, id), id);
    close_session(3);
    Hcattn__Reply *reply;
    fill();
    /* 17 blocks of a session: never; also when the session holds a part of them already */
    fakes.workers[0].n_ctx = 4096;
    uint64_t dead = fakes.workers[0].incarnation;
    fake_worker_rebirth(&fakes.workers[0]);
    fake_supervisor_child_dead(&fakes.worker_supervisor[0], dead);
    fake_worker_register(&fakes, 0);
    FAKES_WAIT(&fakes, fakes.workers[0].n_exchange_ready == 1);
    reply = fake_client_take(&fakes, ask(5, N_BLOCKS + 1), REPLY(ERROR));
    assert_int_equal(reply->error->code, ERROR_CODE(NO_MEMORY));
    assert_int_equal(reply->error->bytes_asked, (N_BLOCKS + 1) * block_bytes);
    assert_int_equal(reply->error->bytes_free, 2 * block_bytes);
    hcattn__reply__free_unpacked(reply, NULL);
    reply = fake_client_take(&fakes, fake_client_generate(&fakes, 1, "abc", N_BLOCKS * 64), REPLY(ERROR));
    assert_int_equal(reply->error->code, ERROR_CODE(NO_MEMORY));
    assert_int_equal(reply->error->bytes_asked, (N_BLOCKS + 1 - 8) * block_bytes);
    hcattn__reply__free_unpacked(reply, NULL);
    expect_line(0, 0);
}

static void who_waits_too_long_is_refused_with_numbers(void **state)
{
    (void)state;
    fill();
    uint64_t first = ask(3, 7), second = ask(4, 9);
    Hcattn__Reply *reply = fake_client_take(&fakes, first, REPLY(ERROR));
    assert_int_equal(reply->error->code, ERROR_CODE(NO_MEMORY));
    assert_int_equal(reply->error->bytes_asked, 7 * block_bytes);
    assert_int_equal(reply->error->bytes_free, 2 * block_bytes);
    assert_true(reply->error->n_queued >= 1);
    hcattn__reply__free_unpacked(reply, NULL);
    fake_client_expect_error(&fakes, second, ERROR_CODE(NO_MEMORY));
    expect_line(0, 0);
    /* their sessions are as they were */
    uint64_t id = fake_client_generate(&fakes, 3, "abc", 60);
    end(expect_run(3, id), id);
}

static void those_who_leave_make_way(void **state)
{
    (void)state;
    fill();
    uint64_t first = ask(3, 12), second = ask(4, 2);
    expect_waiting(second);
    fake_client_drop(&fakes, fake_client_cancel(&fakes, first), REPLY(CANCELLED));
    fake_client_expect_error(&fakes, first, ERROR_CODE(CANCELLED));
    Hcattn__Work__WorkRequest *run = expect_run(4, second);
    end(run, second);
    /* its session is closed: the same */
    first = ask(5, 12);
    expect_waiting(first);
    close_session(5);
    fake_client_expect_error(&fakes, first, ERROR_CODE(CANCELLED));
    expect_line(0, 0);
}

static void failed_and_ephemeral_ones_make_room(void **state)
{
    (void)state;
    /* an ephemeral session whose client is gone gives its blocks to the one that waits */
    uint64_t session = fake_client_open_session(&fakes, 9, true);
    uint64_t id = fake_client_generate(&fakes, session, "abc", 15 * 64 - 4);
    Hcattn__Work__WorkRequest *run = expect_run(9, id);
    struct fake_client gone = fakes.client;
    fake_client_open(&fakes);
    uint64_t waiting = ask(3, 10);
    expect_waiting(waiting);
    fake_client_close(&gone);
    fakes_quiet(&fakes);
    fake_worker_generated(&fakes.workers[0], run->work, 0, 1);
    fakes_drop(fake_worker_take(&fakes, &fakes.workers[0], WORK(STOP)));
    fake_worker_error(&fakes.workers[0], run->work, ERROR_CODE(CANCELLED));
    fakes_drop(run);
    run = expect_run(3, waiting);
    end(run, waiting);
    close_session(3);
    /* a reservation that a store refuses is rolled back: its room goes to the next one */
    fakes.stores[0].reserve_status = -EIO;
    id = ask(5, 12);
    fake_client_expect_error(&fakes, id, ERROR_CODE(INTERNAL));
    fakes.stores[0].reserve_status = 0;
    waiting = ask(6, 15);
    run = expect_run(6, waiting);
    end(run, waiting);
}

static void a_client_that_vanishes_leaves_the_line(void **state)
{
    (void)state;
    fill();
    uint64_t session = fake_client_open_session(&fakes, 9, true);
    (void)fake_client_generate(&fakes, session, "abc", 7 * 64 - 4);
    fakes_quiet(&fakes);
    expect_line(0, 1);
    fake_client_close(&fakes.client);
    fake_client_open(&fakes);
    uint64_t second = ask(3, 1); /* behind it, and served long before the time of the first one is over */
    end(expect_run(3, second), second);
    expect_line(0, 0);
    Hcattn__Reply *reply = fake_client_list(&fakes);
    for (size_t i = 0; i < reply->session_list->n_sessions; i++)
        assert_int_not_equal(reply->session_list->sessions[i]->session, session); /* it was ephemeral */
    hcattn__reply__free_unpacked(reply, NULL);
}

static void the_coordinator_stops_with_a_line(void **state)
{
    (void)state;
    fill();
    uint64_t first = ask(3, 7), second = ask(4, 7);
    expect_waiting(first);
    assert_int_equal(fakes_stop_coordinator(&fakes), 0);
    fake_client_expect_error(&fakes, first, ERROR_CODE(UNAVAILABLE));
    fake_client_expect_error(&fakes, second, ERROR_CODE(UNAVAILABLE));
}

static void the_same_request_again_keeps_its_place(void **state)
{
    (void)state;
    fill();
    uint64_t first = ask(3, 7), second = ask(4, 7);
    expect_waiting(second);
    fake_client_resume(&fakes, first, 3, "abc", 7 * 64 - 4, 0, 0);
    expect_line(0, 2);
    close_session(1);
    Hcattn__Work__WorkRequest *run = expect_run(3, first);
    expect_waiting(second);
    end(run, first);
    close_session(3);
    end(expect_run(4, second), second);
}

int main(void)
{
#define TEST(name, how) cmocka_unit_test_setup_teardown(name, how, teardown)
    const struct CMUnitTest tests[] = {
        TEST(first_come_first_served, setup),
        TEST(a_full_line_is_busy_with_numbers, setup),
        TEST(what_never_fits_is_refused_at_once, setup),
        TEST(who_waits_too_long_is_refused_with_numbers, setup_hasty),
        TEST(those_who_leave_make_way, setup),
        TEST(failed_and_ephemeral_ones_make_room, setup),
        TEST(a_client_that_vanishes_leaves_the_line, setup),
        TEST(the_coordinator_stops_with_a_line, setup),
        TEST(the_same_request_again_keeps_its_place, setup),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
