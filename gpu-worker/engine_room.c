/*
 * engine_room.c - the sessions on the device, and the memory they may take.
 *
 * What a session has on the device can be rebuilt from the stores, so an idle session's memory is only lent: when a run needs
 * room, sessions that no run has begun to work on lose theirs, those used longest ago first. A run gets all it will need
 * before it starts.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "gpu-worker/engine_private.h"
#include "gpu-worker/policy/exact_set.h"

struct session *engine_find_session(struct engine *engine, uint64_t id)
{
    struct session *session = engine->sessions;
    while (session != NULL && session->id != id)
        session = session->next;
    return session;
}

void engine_forget_session(struct engine *engine, uint64_t id)
{
    for (struct session **at = &engine->sessions; *at != NULL; at = &(*at)->next)
        if ((*at)->id == id) {
            struct session *session = *at;
            *at = session->next;
            session_free(session);
            return;
        }
}

int engine_open_session(struct engine *engine, struct run *run)
{
    const struct run_request *request = run->request;
    struct session *session = engine_find_session(engine, request->session);
    int r = 0;
    if (session == NULL) {
        r = session_new(request->session, &engine->stores.shape, &run->policy, request->exact_tokens,
                        engine->network->ops, engine->network->backend, &session);
        if (r < 0)
            return r;
        session->next = engine->sessions;
        engine->sessions = session;
    } else if (session->quantizer != run->policy.quantizer || session->exact_tokens != request->exact_tokens ||
               (session->profile != NULL && fastgen_profile_recovery(session->profile) != run->policy.terms.fastgen)) {
        session->exact_tokens = request->exact_tokens; /* other terms, or what the codec learnt is new */
        r = session_reset(session, &run->policy);
    }
    memcpy(session->lane_store, request->lane_store, sizeof(session->lane_store));
    session->used = ++engine->n_uses;
    run->session = session;
    return r;
}

/* ---- room ---- */

static const struct run *run_of(const struct engine *engine, const struct session *session)
{
    const struct run *run = engine->runs;
    while (run != NULL && run->session != session)
        run = run->next;
    return run;
}

/* One that waits for room itself is idle too: with each of two waiting runs keeping what it has, neither could begin. */
static bool is_idle(const struct engine *engine, const struct session *session)
{
    const struct run *run = run_of(engine, session);
    return run == NULL || !run->is_prepared;
}

/* Takes the memory of the idle session that was used longest ago, for another one. False: there is none. */
static bool evict_one(struct engine *engine, const struct session *other)
{
    struct session *oldest = NULL;
    for (struct session *session = engine->sessions; session != NULL; session = session->next)
        if (session != other && session_bytes(session) > 0 && is_idle(engine, session) &&
            (oldest == NULL || session->used < oldest->used))
            oldest = session;
    if (oldest == NULL)
        return false;
    if (run_of(engine, oldest) != NULL)
        session_release(oldest);
    else
        engine_forget_session(engine, oldest->id);
    return true;
}

static bool others_run(const struct engine *engine, const struct run *run)
{
    for (const struct run *other = engine->runs; other != NULL; other = other->next)
        if (other != run && other->is_prepared)
            return true;
    return false;
}

static size_t used_bytes(const struct engine *engine)
{
    return engine->network->ops->bytes(engine->network->backend);
}

static int no_room(struct engine *engine, struct run *run, uint64_t asked)
{
    uint64_t used = used_bytes(engine), budget = engine->options.device_memory;
    if (others_run(engine, run))
        return -EDQUOT;
    run->bytes_asked = asked;
    run->bytes_free = budget > used ? budget - used : 0;
    run_fail(run, -ENOMEM, "the session needs %llu bytes on the device, %llu are free",
             (unsigned long long)run->bytes_asked, (unsigned long long)run->bytes_free);
    return -ENOMEM;
}

int engine_make_room(struct engine *engine, struct run *run)
{
    struct session *session = run->session;
    uint32_t first_decode = run->position > run->first_decode ? run->position : run->first_decode;
    uint32_t n_tokens = run->capacity > first_decode ? run->capacity : first_decode + 1;
    uint32_t n_window = exact_set_window_blocks(first_decode, n_tokens, session->exact_tokens);
    uint32_t n_old = exact_set_n_old_blocks(n_tokens, session->exact_tokens);
    size_t wanted = session_bytes_for(&engine->stores.shape, session->quantizer, n_window, n_old);
    for (;;) {
        size_t has = session_bytes(session), asked = wanted > has ? wanted - has : 0;
        if (engine->options.device_memory == 0 || used_bytes(engine) + asked <= engine->options.device_memory) {
            if (session_reserve(session, n_window, n_old) == 0)
                return 0;
        }
        if (!evict_one(engine, session))
            return no_room(engine, run, asked);
    }
}
