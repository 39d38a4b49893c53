/* fake_flow.c - what tests of moves do again and again with worker 0 and one client. See fakes.h. */
#include <assert.h>
#include <stdlib.h>

#include "tests/unit/coordinator/fakes.h"

void fake_flow_join(struct fakes *fakes, uint32_t store)
{
    uint32_t n = fakes->workers[0].n_exchange_ready;
    if (fakes->store_supervisor[store].fd < 0)
        fake_supervisor_register(fakes, &fakes->store_supervisor[store], HCATTN__CONTROL__ROLE__VALUE_STORE, store);
    fake_store_register(fakes, store, false);
    FAKES_WAIT(fakes, fakes->workers[0].n_exchange_ready == n + 1);
    hcattn__reply__free_unpacked(fake_client_health(fakes), NULL); /* it was said before it was noted */
}

void fake_flow_kill_store(struct fakes *fakes, uint32_t store)
{
    uint64_t dead = fakes->stores[store].incarnation;
    fake_store_rebirth(&fakes->stores[store]);
    fake_supervisor_child_dead(&fakes->store_supervisor[store], dead);
}

uint64_t fake_flow_take_run(struct fakes *fakes)
{
    Hcattn__Work__WorkRequest *run = fake_worker_take(fakes, &fakes->workers[0], WORK(RUN));
    uint64_t work = run->work;
    fake_checks_run(fakes, run);
    fakes_drop(run);
    return work;
}

void fake_flow_take_stop(struct fakes *fakes, uint64_t work)
{
    Hcattn__Work__WorkRequest *stop = fake_worker_take(fakes, &fakes->workers[0], WORK(STOP));
    assert(stop->stop->work == work);
    (void)work;
    fakes_drop(stop);
}

uint64_t fake_flow_start(struct fakes *fakes, uint64_t session, uint32_t max_tokens, uint64_t *ret_work)
{
    uint64_t id = fake_client_generate(fakes, session, "abc", max_tokens);
    fake_client_drop(fakes, id, REPLY(ACCEPTED));
    *ret_work = fake_flow_take_run(fakes);
    return id;
}

void fake_flow_finish(struct fakes *fakes, uint64_t id, uint64_t work, uint64_t n_tokens)
{
    fake_worker_finished(&fakes->workers[0], work, 0, n_tokens);
    fake_client_drop(fakes, id, REPLY(GENERATE_DONE));
}

void fake_flow_make(struct fakes *fakes, uint64_t session, uint64_t n_tokens)
{
    uint64_t work;
    fake_client_open_session(fakes, session, false);
    if (n_tokens == 0)
        return;
    uint64_t id = fake_flow_start(fakes, session, (uint32_t)n_tokens - 4, &work);
    fake_store_journal(fakes, session, n_tokens);
    fake_flow_finish(fakes, id, work, n_tokens);
}

void fake_flow_restart(struct fakes *fakes, const char *const *arguments)
{
    fakes_kill_coordinator(fakes);
    fakes_start_coordinator(fakes, arguments);
    for (uint32_t i = 0; i < FAKE_STORES; i++)
        FAKES_WAIT(fakes, fakes->stores[i].fd < 0 && fakes->store_supervisor[i].fd < 0);
    FAKES_WAIT(fakes, fakes->workers[0].hung_up && fakes->worker_supervisor[0].fd < 0);
    for (uint32_t i = 0; i < FAKE_STORES; i++)
        fake_store_go_on(&fakes->stores[i]);
}

void fake_flow_register_again(struct fakes *fakes, uint32_t store)
{
    fake_supervisor_register(fakes, &fakes->store_supervisor[store], HCATTN__CONTROL__ROLE__VALUE_STORE, store);
    fake_store_register(fakes, store, fakes->stores[store].has_segment);
}

void fake_flow_worker_again(struct fakes *fakes)
{
    fake_supervisor_register(fakes, &fakes->worker_supervisor[0], HCATTN__CONTROL__ROLE__GPU_WORKER, 0);
    fake_worker_register(fakes, 0);
}

uint64_t fake_flow_drain(struct fakes *fakes, uint32_t store)
{
    return fake_client_drain_store(fakes, store, false);
}

uint64_t fake_flow_running(struct fakes *fakes, uint64_t n_tokens, uint64_t *ret_work)
{
    fake_client_open_session(fakes, 5, false);
    uint64_t id = fake_flow_start(fakes, 5, 400, ret_work);
    fake_store_journal(fakes, 5, n_tokens);
    fake_flow_join(fakes, 1);
    return id;
}

void fake_flow_stop(struct fakes *fakes, uint64_t work)
{
    fake_flow_take_stop(fakes, work);
    fake_worker_error(&fakes->workers[0], work, ERROR_CODE(CANCELLED));
}

void fake_flow_check(struct fakes *fakes, uint64_t n_tokens)
{
    fake_checks_session(fakes, 5, n_tokens);
    fake_checks_tidy(fakes);
}
