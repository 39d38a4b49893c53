/* The real coordinator with fakes around it: several workers - who holds which session, death, other models, numbers. */
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

/* Two workers that serve, each with a supervisor. */
static int setup(void **state)
{
    (void)state;
    fakes_start(&fakes, 2, (const char *const[]){"--workers", "2", NULL});
    fakes.workers[0].device_budget_bytes = 1000;
    fakes.workers[0].device_base_bytes = 100;
    fakes_all_ready(&fakes);
    fake_supervisor_register(&fakes, &fakes.worker_supervisor[1], HCATTN__CONTROL__ROLE__GPU_WORKER, 1);
    fake_worker_register(&fakes, 1);
    FAKES_WAIT(&fakes, fakes.workers[1].n_exchange_ready == 2);
    return 0;
}

static void kill_worker(uint32_t index)
{
    uint64_t dead = fakes.workers[index].incarnation;
    fake_worker_rebirth(&fakes.workers[index]);
    fake_supervisor_child_dead(&fakes.worker_supervisor[index], dead);
    FAKES_WAIT(&fakes, fakes.stores[0].worker_gone == dead);
}

static const Hcattn__ProcessStats *worker_stats(const Hcattn__Reply *reply, uint32_t index)
{
    for (size_t i = 0; i < reply->stats->n_processes; i++)
        if (strcmp(reply->stats->processes[i]->program, "hc-gpu-worker") == 0 &&
            reply->stats->processes[i]->index == index)
            return reply->stats->processes[i];
    fail_msg("gpu-worker %u is not in the statistics", index);
    return NULL;
}

static void expect_bound(uint32_t n_first, uint32_t n_second)
{
    Hcattn__Reply *reply = fake_client_stats(&fakes);
    assert_int_equal(worker_stats(reply, 0)->n_sessions, n_first);
    assert_int_equal(worker_stats(reply, 1)->n_sessions, n_second);
    hcattn__reply__free_unpacked(reply, NULL);
}

/* Which worker gets the Run of an Append to the session; it is answered. */
static uint32_t append_to(uint64_t session)
{
    uint64_t id = fake_client_append(&fakes, session, "abc");
    fake_client_drop(&fakes, id, REPLY(ACCEPTED));
    for (;;) {
        FAKES_WAIT(&fakes, fakes.workers[0].n_queue + fakes.workers[1].n_queue > 0);
        uint32_t index = fakes.workers[0].n_queue == 0;
        Hcattn__Work__WorkRequest *first = fakes.workers[index].queue[0];
        if (first->request_case != WORK(RUN)) { /* Forget */
            fakes_drop(first);
            memmove(&fakes.workers[index].queue[0], &fakes.workers[index].queue[1],
                    --fakes.workers[index].n_queue * sizeof(first));
            continue;
        }
        Hcattn__Work__WorkRequest *run = fake_worker_take(&fakes, &fakes.workers[index], WORK(RUN));
        assert_int_equal(run->run->session, session);
        fake_worker_finished(&fakes.workers[index], run->work, 0, 3);
        fake_client_drop(&fakes, id, REPLY(APPENDED));
        fakes_drop(run);
        return index;
    }
}

static void sessions_are_spread_and_stay(void **state)
{
    (void)state;
    for (uint64_t i = 1; i <= 5; i++)
        fake_client_open_session(&fakes, i, false); /* ties: the lower index */
    expect_bound(3, 2);
    for (int round = 0; round < 2; round++)
        for (uint64_t i = 1; i <= 5; i++)
            assert_int_equal(append_to(i), (i + 1) % 2);
    /* what is closed makes room for the next one */
    fake_client_drop(&fakes, fake_client_close_session(&fakes, 1), REPLY(SESSION_CLOSED));
    fake_client_drop(&fakes, fake_client_close_session(&fakes, 3), REPLY(SESSION_CLOSED));
    expect_bound(1, 2);
    fake_client_open_session(&fakes, 6, false);
    assert_int_equal(append_to(6), 0);
    expect_bound(2, 2);
    Hcattn__Reply *reply = fake_client_list(&fakes);
    assert_int_equal(reply->session_list->n_sessions, 4);
    for (size_t i = 0; i < 4; i++) {
        const Hcattn__SessionStats *session = reply->session_list->sessions[i];
        assert_true(session->held);
        assert_int_equal(session->worker, session->session == 2 || session->session == 4);
    }
    hcattn__reply__free_unpacked(reply, NULL);
}

static void open_runs_of_a_dead_worker_go_to_the_other_at_once(void **state)
{
    (void)state;
    uint64_t ids[2];
    for (uint64_t i = 1; i <= 4; i++)
        fake_client_open_session(&fakes, i, false);
    for (uint64_t i = 0; i < 2; i++) { /* sessions 2 and 4 are worker 1's */
        ids[i] = fake_client_generate(&fakes, 2 * (i + 1), "abc", 50);
        fake_client_drop(&fakes, ids[i], REPLY(ACCEPTED));
        Hcattn__Work__WorkRequest *run = fake_worker_take(&fakes, &fakes.workers[1], WORK(RUN));
        fake_worker_generated(&fakes.workers[1], run->work, 0, 2);
        fake_client_drop(&fakes, ids[i], REPLY(GENERATED));
        fakes_drop(run);
    }
    kill_worker(1);
    for (uint64_t i = 0; i < 2; i++) {
        Hcattn__Work__WorkRequest *run = fake_worker_take(&fakes, &fakes.workers[0], WORK(RUN));
        assert_int_equal(run->run->resume_from, 2);
        uint64_t id = ids[run->run->session / 2 - 1];
        fake_worker_finished(&fakes.workers[0], run->work, 2, 5);
        fake_client_drop(&fakes, id, REPLY(GENERATE_DONE));
        fakes_drop(run);
    }
    /* the next life takes new sessions; those that moved stay where they are */
    fake_worker_register(&fakes, 1);
    FAKES_WAIT(&fakes, fakes.workers[1].n_exchange_ready == 2);
    expect_bound(4, 0);
    fake_client_open_session(&fakes, 7, false);
    assert_int_equal(append_to(7), 1);
    assert_int_equal(append_to(2), 0);
    expect_bound(4, 1);
}

static void idle_sessions_of_a_dead_worker_move_at_their_next_run(void **state)
{
    (void)state;
    for (uint64_t i = 1; i <= 4; i++)
        fake_client_open_session(&fakes, i, false);
    assert_int_equal(append_to(1), 0);
    kill_worker(0);
    Hcattn__Reply *reply = fake_client_list(&fakes);
    for (size_t i = 0; i < 4; i++)
        assert_int_equal(reply->session_list->sessions[i]->held, reply->session_list->sessions[i]->session % 2 == 0);
    hcattn__reply__free_unpacked(reply, NULL);
    assert_int_equal(append_to(1), 1); /* it is needed before the next life of its worker is there */
    fake_worker_register(&fakes, 0);
    FAKES_WAIT(&fakes, fakes.workers[0].n_exchange_ready == 2);
    assert_int_equal(append_to(3), 0); /* the fewest sessions */
    assert_int_equal(append_to(1), 1);
    expect_bound(1, 3);
}

/* A worker that only hung up is not dead: it still has the session's keys, and comes back. */
static void a_worker_that_hung_up_is_waited_for(void **state)
{
    (void)state;
    fake_client_open_session(&fakes, 1, false);
    assert_int_equal(append_to(1), 0);
    fake_worker_hang_up(&fakes.workers[0]);
    uint64_t id = fake_client_append(&fakes, 1, "abc");
    fake_client_drop(&fakes, id, REPLY(ACCEPTED));
    fakes_quiet(&fakes);
    assert_int_equal(fakes.workers[1].n_queue, 0);
    fake_worker_register(&fakes, 0);
    Hcattn__Work__WorkRequest *run = fake_worker_take(&fakes, &fakes.workers[0], WORK(RUN));
    fake_worker_finished(&fakes.workers[0], run->work, 0, 3);
    fake_client_drop(&fakes, id, REPLY(APPENDED));
    fakes_drop(run);
}

static void sessions_opened_before_any_worker_is_ready(void **state)
{
    (void)state;
    kill_worker(0);
    kill_worker(1);
    fake_client_open_session(&fakes, 1, false);
    expect_bound(0, 0);
    fake_worker_register(&fakes, 1);
    FAKES_WAIT(&fakes, fakes.workers[1].n_exchange_ready == 2);
    assert_int_equal(append_to(1), 1);
    expect_bound(0, 1);
}

static void workers_of_another_kind_are_refused_by_name(void **state)
{
    (void)state;
    fake_worker_hang_up(&fakes.workers[1]);
    fake_supervisor_child_dead(&fakes.worker_supervisor[1], fakes.workers[1].incarnation);
    fakes.workers[1].incarnation++;
    fakes.workers[1].shape.codec = ROW_CODEC_Q8_0; /* the same model, with rows that the first one cannot read */
    fake_worker_register(&fakes, 1);
    FAKES_WAIT(&fakes, fakes.workers[1].refused[0] && fakes.workers[1].hung_up);
    assert_non_null(strstr(fakes.workers[1].refused, "another shape or codec than gpu-worker 0"));
    fakes.workers[1].shape = fakes.workers[0].shape;
    /* a number that is taken by one that lives */
    struct fake_worker second = {.index = 0,
                                 .incarnation = 77,
                                 .fd = -1,
                                 .model = fakes.workers[0].model,
                                 .shape = fakes.workers[0].shape,
                                 .n_ctx = 1024},
                       first = fakes.workers[0];
    fakes.workers[0] = second;
    fake_worker_register(&fakes, 0);
    FAKES_WAIT(&fakes, fakes.workers[0].refused[0] && fakes.workers[0].hung_up);
    assert_non_null(strstr(fakes.workers[0].refused, "gpu-worker 0 is alive"));
    fakes.workers[0] = first;
    /* alone, and with rows in the stores that it could not read: sessions are not thrown away for a restart */
    fake_client_open_session(&fakes, 1, false);
    kill_worker(0);
    fakes.workers[0].shape.codec = ROW_CODEC_Q8_0;
    fake_worker_register(&fakes, 0);
    FAKES_WAIT(&fakes, fakes.workers[0].refused[0] && fakes.workers[0].hung_up);
    assert_non_null(strstr(fakes.workers[0].refused, "close them first"));
    fake_client_drop(&fakes, fake_client_close_session(&fakes, 1), REPLY(SESSION_CLOSED));
    fake_worker_register(&fakes, 0);
    FAKES_WAIT(&fakes, fakes.workers[0].n_exchange_ready == 2);
    assert_int_equal(fakes.stores[0].segment.header->shape.codec, ROW_CODEC_Q8_0);
    Hcattn__Reply *reply = fake_client_stats(&fakes);
    assert_string_equal(reply->stats->row_codec, "q8_0");
    hcattn__reply__free_unpacked(reply, NULL);
}

/* The same when coordinator and worker are new and only the stores know of the sessions, whoever registers first. */
static void sessions_outlive_a_worker_with_another_row_codec(void **state)
{
    (void)state;
    uint64_t id, session = fake_client_open_session(&fakes, 1, false);
    assert_int_equal(append_to(session), 0);
    fake_store_journal(&fakes, session, 3);
    for (int stores_first = 0; stores_first < 2; stores_first++) {
        fakes_kill_coordinator(&fakes);
        fakes_start_coordinator(&fakes, NULL);
        FAKES_WAIT(&fakes, fakes.stores[0].hung_up && fakes.stores[1].hung_up);
        fake_worker_rebirth(&fakes.workers[0]);
        fake_worker_hang_up(&fakes.workers[1]);
        fakes.workers[0].shape.codec = ROW_CODEC_Q8_0;
        if (!stores_first)
            fake_worker_register(&fakes, 0);
        fake_store_register(&fakes, 0, true);
        fake_store_register(&fakes, 1, true);
        if (stores_first) {
            fakes_quiet(&fakes);
            fake_worker_register(&fakes, 0);
        }
        FAKES_WAIT(&fakes, fakes.workers[0].hung_up);
        if (!fakes.workers[0].refused[0]) { /* the sentence was lost with a connection on which it was just writing */
            fake_worker_register(&fakes, 0);
            FAKES_WAIT(&fakes, fakes.workers[0].refused[0] && fakes.workers[0].hung_up);
        }
        assert_non_null(strstr(fakes.workers[0].refused, "shape or codec"));
        fake_worker_rebirth(&fakes.workers[0]);
        fakes.workers[0].shape = fakes.workers[1].shape;
        fake_worker_register(&fakes, 0);
        FAKES_WAIT(&fakes, fakes.workers[0].n_exchange_ready == 2);
    }
    id = fake_client_append(&fakes, session, "abc");
    Hcattn__Reply *reply = fake_client_take(&fakes, id, REPLY(ACCEPTED));
    assert_int_equal(reply->accepted->at, 3);
    hcattn__reply__free_unpacked(reply, NULL);
}

static void device_memory_is_told(void **state)
{
    (void)state;
    Hcattn__Reply *reply = fake_client_stats(&fakes);
    assert_int_equal(worker_stats(reply, 0)->device_budget_bytes, 1000);
    assert_int_equal(worker_stats(reply, 0)->device_bytes, 100); /* what it began with */
    assert_int_equal(worker_stats(reply, 1)->device_budget_bytes, 0);
    assert_string_equal(reply->stats->row_codec, "f16");
    hcattn__reply__free_unpacked(reply, NULL);
    fakes.workers[0].device_bytes = 345;
    uint64_t told = 0;
    for (uint64_t deadline = fakes_deadline(); told != 345; fakes_pump(&fakes)) {
        fakes_fail_late("the heartbeat's number is told", __FILE__, __LINE__, deadline);
        reply = fake_client_stats(&fakes);
        told = worker_stats(reply, 0)->device_bytes;
        hcattn__reply__free_unpacked(reply, NULL);
    }
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        TEST(sessions_are_spread_and_stay),
        TEST(open_runs_of_a_dead_worker_go_to_the_other_at_once),
        TEST(idle_sessions_of_a_dead_worker_move_at_their_next_run),
        TEST(a_worker_that_hung_up_is_waited_for),
        TEST(sessions_opened_before_any_worker_is_ready),
        TEST(workers_of_another_kind_are_refused_by_name),
        TEST(sessions_outlive_a_worker_with_another_row_codec),
        TEST(device_memory_is_told),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
