/* The real coordinator with fakes around it: stores come, go, die and fall silent and coordinators die at random, while sessions
 * are used. Nothing is lost and nothing stays used. A seed that fails is printed. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/unit/coordinator/fakes.h"

enum { N_SESSIONS = 6, FIRST_SESSION = 5, N_STEPS = 100, N_SEEDS = 2 };

struct life { /* of a session */
    bool open;
    bool closes;              /* it was asked to; by the end nobody may know whether it did */
    uint64_t n_tokens, n_max; /* in the journal; what its run may reach */
    uint64_t work;            /* of its run; 0: none, or stopped */
    uint64_t request;         /* the last one; 0: answered */
};

static const char *const arguments[] = {"--transport", "routed", NULL};
static struct fakes fakes;
static struct fake_worker *const worker = &fakes.workers[0];
static struct life lives[N_SESSIONS];
static bool has_left[FAKE_STORES], is_out[FAKE_STORES]; /* out: not connected, by our doing */
static uint64_t seed;

static uint32_t draw(uint32_t n)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(seed >> 33) % n;
}

static struct life *life_of(uint64_t session)
{
    assert_in_range(session, FIRST_SESSION, FIRST_SESSION + N_SESSIONS - 1);
    return &lives[session - FIRST_SESSION];
}

/* Every segment is in the hands of its store. */
static bool all_hold(void)
{
    bool all = true;
    for (uint32_t i = 0; i < FAKE_STORES; i++)
        all = all && (has_left[i] || (!is_out[i] && fakes.stores[i].fd >= 0 && fakes.stores[i].has_segment));
    return all;
}

static void from_worker(Hcattn__Work__WorkRequest *request)
{
    if (request->request_case == WORK(RUN)) {
        struct life *life = life_of(request->run->session);
        assert_int_equal(life->work, 0); /* never two at once */
        if (all_hold())                  /* otherwise there is nothing to compare it with */
            fake_checks_run(&fakes, request);
        life->work = request->work;
        life->n_max = request->run->n_blocks * LAYOUT_BLOCK_TOKENS - 1;
    } else if (request->request_case == WORK(STOP)) {
        for (uint32_t i = 0; i < N_SESSIONS; i++)
            if (lives[i].work == request->stop->work) {
                lives[i].work = 0;
                fake_worker_error(worker, request->stop->work, ERROR_CODE(CANCELLED));
            }
    }
    fakes_drop(request);
}

static void from_client(const Hcattn__Reply *reply)
{
    for (uint32_t i = 0; i < N_SESSIONS; i++) {
        if (lives[i].request != reply->request_id || reply->reply_case == REPLY(ACCEPTED))
            continue;
        if (reply->reply_case == REPLY(ERROR) && reply->error->code != ERROR_CODE(CANCELLED) &&
            reply->error->code != ERROR_CODE(NO_MEMORY) && reply->error->code != ERROR_CODE(BUSY))
            fail_msg("session %u: error %d: %s", FIRST_SESSION + i, (int)reply->error->code, reply->error->sentence);
        if (reply->reply_case == REPLY(SESSION_CLOSED))
            lives[i] = (struct life){.open = false};
        lives[i].open = lives[i].open || reply->reply_case == REPLY(SESSION_OPENED);
        lives[i].request = 0;
    }
}

static void pump(void)
{
    fakes_pump(&fakes);
    while (worker->n_queue > 0) {
        Hcattn__Work__WorkRequest *request = worker->queue[0];
        memmove(&worker->queue[0], &worker->queue[1], --worker->n_queue * sizeof(worker->queue[0]));
        from_worker(request);
    }
    for (uint32_t i = 0; i < fakes.client.n_queue; i++) {
        from_client(fakes.client.queue[i]);
        hcattn__reply__free_unpacked(fakes.client.queue[i], NULL);
    }
    fakes.client.n_queue = 0;
    for (uint32_t i = 0; i < FAKE_STORES; i++)
        has_left[i] = has_left[i] || (!is_out[i] && fakes.stores[i].fd < 0 && !fakes.stores[i].has_segment);
}

static void pump_some(void)
{
    for (uint32_t n = draw(8); n > 0; n--)
        pump();
}

/* ---- what happens ---- */

static void come_back(uint32_t store)
{
    struct fake_store *fake = &fakes.stores[store];
    if (!is_out[store] && !has_left[store])
        return;
    if (has_left[store])
        fake_store_rebirth(fake);
    has_left[store] = is_out[store] = false;
    fake_store_register(&fakes, store, fake->has_segment);
}

/* Orders that it did not do, or answer, are only given again to a connection that is new. */
static void hang_up(uint32_t store)
{
    if (is_out[store] || has_left[store])
        return;
    fakes.stores[store].ignored = fakes.stores[store].unanswered = 0;
    fakes.stores[store].held = 0;
    fake_store_hang_up(&fakes.stores[store]);
    is_out[store] = true;
}

static void all_back(void)
{
    for (uint32_t i = 0; i < FAKE_STORES; i++) {
        if (fakes.stores[i].ignored | fakes.stores[i].unanswered)
            hang_up(i);
        if (is_out[i])
            come_back(i);
    }
}

static void await_all(void)
{
    all_back();
    for (uint64_t deadline = fakes_deadline(); !all_hold(); pump())
        fakes_fail_late("all stores hold their segments", __FILE__, __LINE__, deadline);
}

static void kill_coordinator(void)
{
    await_all(); /* a segment that only the coordinator has would go with it */
    pump_some();
    for (uint32_t i = 0; i < FAKE_STORES; i++)
        if (draw(2)) /* in the middle of something */
            *(draw(2) ? &fakes.stores[i].ignored : &fakes.stores[i].unanswered) = 1u << draw(5);
    pump_some();
    if (!all_hold())
        return;
    fakes_kill_coordinator(&fakes);
    fakes_start_coordinator(&fakes, arguments);
    for (uint32_t i = 0; i < N_SESSIONS; i++)
        lives[i].work = lives[i].request = 0; /* its client does not ask again */
    for (uint32_t i = 0; i < FAKE_STORES; i++) {
        FAKES_WAIT(&fakes, fakes.store_supervisor[i].fd < 0 && fakes.stores[i].fd < 0);
        fakes.stores[i].ignored = fakes.stores[i].unanswered = 0;
        is_out[i] = !has_left[i];
        fake_supervisor_register(&fakes, &fakes.store_supervisor[i], HCATTN__CONTROL__ROLE__VALUE_STORE, i);
    }
    FAKES_WAIT(&fakes, worker->hung_up);
    fake_flow_worker_again(&fakes);
    for (uint32_t i = 0, first = draw(FAKE_STORES); i < FAKE_STORES; i++) {
        if (is_out[(first + i) % FAKE_STORES])
            come_back((first + i) % FAKE_STORES);
        pump_some();
    }
}

static void use(uint64_t session)
{
    struct life *life = life_of(session);
    if (life->closes)
        return;
    if (life->work != 0 && all_hold() && life->n_tokens < life->n_max) {
        life->n_tokens += 1 + draw(100);
        if (life->n_tokens > life->n_max)
            life->n_tokens = life->n_max;
        fake_store_journal(&fakes, session, life->n_tokens);
        if (draw(2)) {
            fake_worker_finished(worker, life->work, 1, life->n_tokens);
            life->work = 0;
        }
    } else if (life->open && life->request == 0) {
        life->request = fake_client_generate(&fakes, session, "abc", 1 + draw(200));
    } else if (life->request == 0) {
        life->request = fake_client_ask_open(&fakes, session, "default");
    }
}

static void kill_worker(void)
{
    uint64_t dead = worker->incarnation;
    fake_worker_rebirth(worker);
    for (uint32_t i = 0; i < N_SESSIONS; i++)
        lives[i].work = 0;
    fake_supervisor_child_dead(&fakes.worker_supervisor[0], dead);
    pump_some();
    fake_worker_register(&fakes, 0);
}

/* Its request, if any, is cancelled with it. */
static void close_it(struct life *life, uint64_t session)
{
    if (!life->open || life->closes)
        return;
    life->closes = true;
    life->request = fake_client_close_session(&fakes, session);
}

static void step(void)
{
    uint32_t store = draw(FAKE_STORES);
    uint64_t session = FIRST_SESSION + draw(N_SESSIONS);
    uint32_t what = draw(23);
    if (what < 8)
        use(session);
    else if (what < 11)
        fake_client_drain_store(&fakes, store, false);
    else if (what < 12)
        fake_client_drain_store(&fakes, store, true);
    else if (what < 14)
        come_back(store);
    else if (what < 16 && !is_out[store] && !has_left[store])
        *(draw(2) ? &fakes.stores[store].ignored : &fakes.stores[store].unanswered) = 1u << draw(5);
    else if (what < 17)
        hang_up(store);
    else if (what < 19 && !is_out[store] && !has_left[store] && fakes.stores[store].has_segment) {
        is_out[store] = true;
        fake_flow_kill_store(&fakes, store);
    } else if (what == 19 && draw(3) == 0)
        kill_coordinator();
    else if (what == 20 && draw(4) == 0) /* a request lives through three */
        kill_worker();
    else if (what == 21 && life_of(session)->request != 0 && !life_of(session)->closes)
        fake_client_cancel(&fakes, life_of(session)->request);
    else if (what == 22 && draw(2))
        close_it(life_of(session), session);
    pump_some();
}

static void end(void)
{
    await_all();
    for (uint32_t i = 0; i < FAKE_STORES; i++)
        fake_client_drain_store(&fakes, i, true);
    uint64_t deadline = fakes_deadline();
    for (uint32_t i = 0; i < N_SESSIONS; i++)
        while (lives[i].request != 0) {
            if (lives[i].work != 0 && all_hold()) {
                fake_worker_finished(worker, lives[i].work, 1, lives[i].n_tokens);
                lives[i].work = 0;
            }
            pump();
            fakes_fail_late("all requests are answered", __FILE__, __LINE__, deadline);
        }
    for (uint32_t i = 0; i < N_SESSIONS; i++) /* also those whose opening a coordinator took with it */
        fake_client_open_session(&fakes, FIRST_SESSION + i, false);
    for (uint32_t i = 0; i < N_SESSIONS; i++)
        if (!lives[i].closes)
            fake_checks_session(&fakes, FIRST_SESSION + i, lives[i].n_tokens);
    fake_checks_tidy(&fakes);
    for (uint32_t i = 0; i < N_SESSIONS; i++)
        fake_client_drop(&fakes, fake_client_close_session(&fakes, FIRST_SESSION + i), REPLY(SESSION_CLOSED));
    for (uint32_t i = 0; i < N_SESSIONS; i++)
        fake_checks_gone(&fakes, FIRST_SESSION + i);
    fake_checks_tidy(&fakes);
}

static void run_seed(uint64_t number)
{
    printf("seed %llu\n", (unsigned long long)number);
    fflush(stdout);
    seed = number;
    memset(lives, 0, sizeof(lives));
    memset(is_out, 0, sizeof(is_out));
    memset(has_left, 0, sizeof(has_left));
    fakes_start(&fakes, 2, arguments);
    for (uint32_t i = 0; i < FAKE_STORES; i++)
        fakes.stores[i].stalls = true;
    fakes_all_ready(&fakes);
    for (uint32_t i = 2; i < FAKE_STORES; i++)
        fake_flow_join(&fakes, i);
    for (uint32_t i = 0; i < N_STEPS; i++)
        step();
    end();
    fakes_finish(&fakes);
}

static void nothing_is_lost(void **state)
{
    (void)state;
    for (uint64_t number = 1; number <= N_SEEDS; number++)
        run_seed(number);
}

int main(int argc, char **argv)
{
    if (argc > 1) { /* one seed, to look at */
        run_seed(strtoull(argv[1], NULL, 10));
        return 0;
    }
    const struct CMUnitTest tests[] = {cmocka_unit_test(nothing_is_lost)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
