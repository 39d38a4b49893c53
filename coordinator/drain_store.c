/*
 * drain_store.c - a store that leaves while the service runs: its sessions move, one after the other, then it is let go.
 *
 * What is drained is a property of the membership, not of the request: it goes on when the client, or the coordinator, is
 * lost. A store whose process is gone for good is emptied, too: its segment is here, and can be read.
 */
#include <stdio.h>
#include <string.h>

#include "common/log.h"
#include "coordinator/state.h"

#define RETRY_SESSIONS_US 200000u
#define MAX_DOUBLINGS     5u
#define TELL_US           1000000u

static const Hcattn__DrainStore *message_of(const struct request *request)
{
    return ((const Hcattn__Request *)request->message)->drain_store;
}

static bool is_in(uint64_t mask, uint32_t store)
{
    return mask >> store & 1u;
}

static bool holds(const struct session *session, uint32_t store)
{
    return session->state != SESSION_CLOSED && is_in(sessions_stores(session), store);
}

/* ---- what was asked ---- */

static void drained(struct server *server, struct request *request, uint32_t number)
{
    Hcattn__StoreDrained message = HCATTN__STORE_DRAINED__INIT;
    message.n_sessions = server->stores[number].n_moved;
    message.bytes_moved = server->stores[number].bytes_moved;
    Hcattn__Reply reply = HCATTN__REPLY__INIT;
    reply.reply_case = HCATTN__REPLY__REPLY_STORE_DRAINED;
    reply.store_drained = &message;
    flow_answer(server, request, &reply);
}

static void resume(struct server *server, struct request *request, uint32_t number)
{
    struct process self = {.role = PROCESS_STORE, .index = number};
    if (is_in(server->leaving, number)) {
        LOG_INFO("value-store %u is not drained any more", number);
        membership_set(server, server->members, server->leaving & ~(UINT64_C(1) << number), server->left);
        uint32_t cursor = 0;
        for (struct session *session; (session = sessions_next(server->sessions, &cursor));)
            if (session->move && session->move->from == number && session->move->step != MOVE_COMMIT)
                moves_give_up(server, session);
    } else if (is_in(server->left, number) && !peers_of(registry_supervisor_of(server->registry, &self)) &&
               membership_settled(server)) {
        flow_fail(server, request, HCATTN__ERROR_CODE__UNAVAILABLE, NULL,
                  "value-store %u has left, and no supervisor of it is there: start it again", number);
        return;
    } else if (!membership_has(server, number) && !is_in(server->left, number) &&
               !registry_find(server->registry, PROCESS_STORE, number)) {
        flow_fail(server, request, HCATTN__ERROR_CODE__NOT_FOUND, NULL, "there is no value-store %u", number);
        return;
    }
    (void)requests_move(request, REQUEST_RESERVING, server->now_us);
}

void drain_store_enter(struct server *server, struct request *request)
{
    uint32_t number = message_of(request)->store;
    uint64_t bit = UINT64_C(1) << number;
    request->probed_us = server->now_us;
    if (message_of(request)->resume) {
        resume(server, request, number);
        return;
    }
    if (server->members & bit && !(server->leaving & bit)) {
        if (!(server->members & ~server->leaving & ~bit)) {
            flow_fail(server, request, HCATTN__ERROR_CODE__CONFLICT, NULL,
                      "value-store %u is the last one that is not drained: nothing could go elsewhere", number);
            return;
        }
        struct store *store = &server->stores[number];
        LOG_INFO("value-store %u is drained: what it holds goes to the others", number);
        store->n_moved = store->n_failed = 0;
        store->bytes_moved = store->next_try_us = 0;
        store->waits[0] = 0;
        membership_set(server, server->members, server->leaving | bit, server->left);
    } else if (!(server->members & bit) && !(server->left & bit)) {
        flow_fail(server, request, HCATTN__ERROR_CODE__NOT_FOUND, NULL, "there is no value-store %u that serves",
                  number);
        return;
    }
    (void)requests_move(request, REQUEST_RESERVING, server->now_us);
}

/* Once the life that left has ended: before, its supervisor would make nothing of it. */
static void start_again(struct server *server, struct request *request, uint32_t number)
{
    struct process self = {.role = PROCESS_STORE, .index = number};
    struct peer *peer = peers_of(registry_supervisor_of(server->registry, &self));
    if (!peer || request->started)
        return;
    request->started = true;
    control_start(server, peer);
}

void drain_store_waiting(struct server *server, struct request *request)
{
    uint32_t number = message_of(request)->store;
    const struct process *process = registry_find(server->registry, PROCESS_STORE, number);
    bool wants_it = message_of(request)->resume;
    if (wants_it && is_in(server->left, number) && (!process || process->state == PROCESS_DEAD))
        start_again(server, request, number);
    else if (wants_it && membership_has(server, number) && !is_in(server->leaving, number))
        drained(server, request, number);
    else if (!wants_it && is_in(server->left, number) && (!process || process->state == PROCESS_DEAD))
        drained(server, request, number);
    else if (!wants_it && membership_has(server, number) && !is_in(server->leaving, number))
        flow_fail(server, request, HCATTN__ERROR_CODE__CONFLICT, NULL, "value-store %u takes sessions again", number);
    else if (!wants_it && !is_in(server->left, number) && !membership_has(server, number) &&
             (!process || process->state == PROCESS_DEAD))
        flow_fail(server, request, HCATTN__ERROR_CODE__NOT_FOUND, NULL,
                  "value-store %u did not come back to this coordinator", number);
}

static void tell(struct server *server, struct request *request, uint32_t number)
{
    Hcattn__StoreDrainProgress progress = HCATTN__STORE_DRAIN_PROGRESS__INIT;
    uint32_t cursor = 0;
    for (const struct session *session; (session = sessions_next(server->sessions, &cursor));) {
        progress.n_sessions_left += holds(session, number);
        for (uint32_t i = 0; i < session->n_blocks; i++)
            if (session->blocks[i].store == number)
                progress.bytes_left += placement_block_bytes(server->placement, number);
    }
    progress.bytes_moved = server->stores[number].bytes_moved;
    progress.waits = server->stores[number].waits;
    Hcattn__Reply reply = HCATTN__REPLY__INIT;
    reply.reply_case = HCATTN__REPLY__REPLY_STORE_DRAIN_PROGRESS;
    reply.store_drain_progress = &progress;
    rpc_reply(server, request, &reply);
}

void drain_store_tick(struct server *server, struct request *request)
{
    if (request->state != REQUEST_RESERVING || request->mute || server->now_us - request->probed_us < TELL_US)
        return;
    request->probed_us = server->now_us;
    if (message_of(request)->resume && server->now_us - request->waiting_us > server->options.recovery_timeout_us)
        flow_fail(server, request, HCATTN__ERROR_CODE__UNAVAILABLE, NULL,
                  "value-store %u did not come back within %g s", message_of(request)->store,
                  (double)server->options.recovery_timeout_us / 1e6);
    else
        tell(server, request, message_of(request)->store);
}

/* ---- what is done ---- */

static void let_go(struct server *server, uint32_t number)
{
    uint64_t bit = UINT64_C(1) << number;
    LOG_INFO("value-store %u has left: %u sessions have gone elsewhere, %llu bytes", number,
             server->stores[number].n_moved, (unsigned long long)server->stores[number].bytes_moved);
    membership_set(server, server->members & ~bit, server->leaving & ~bit, server->left | bit);
    stores_leave(server, number);
}

/* The session that is on its way, moved on; NULL: none is. */
static struct session *go_on(struct server *server, uint32_t number)
{
    uint32_t cursor = 0;
    for (struct session *session; (session = sessions_next(server->sessions, &cursor));) {
        bool moved;
        if (!session->move || session->move->from != number)
            continue;
        moves_advance(server, session, &moved);
        if (session->move)
            return session;
        struct store *store = &server->stores[number];
        if (!moved && store->n_failed < MAX_DOUBLINGS)
            store->n_failed++;
        if (!moved) /* given up: not at once again, and ever more rarely: its run may have been stopped for it */
            store->next_try_us = server->now_us + ((uint64_t)RETRY_SESSIONS_US << store->n_failed);
        else
            store->n_failed = 0;
    }
    return NULL;
}

static void advance(struct server *server, uint32_t number)
{
    struct store *store = &server->stores[number];
    uint32_t n_left = 0, cursor = 0;
    if (go_on(server, number) || server->now_us < store->next_try_us)
        return;
    for (struct session *session; (session = sessions_next(server->sessions, &cursor));) {
        if (!holds(session, number) && !moves_go_to(session, number))
            continue;
        n_left++; /* also what is on its way here: it goes on from here */
        if (moves_begin(server, session, number) == 0) {
            store->waits[0] = 0;
            server->dirty = true;
            return;
        }
    }
    if (n_left > 0 && !descriptors_view(server->descriptors, number))
        snprintf(store->waits, sizeof(store->waits),
                 "value-store %u is not there, and with it what it holds of %u sessions", number, n_left);
    if (n_left == 0 && (is_in(server->seen, number) || server->stores_given))
        let_go(server, number);
    else
        store->next_try_us = server->now_us + RETRY_SESSIONS_US;
}

void drain_store_advance(struct server *server)
{
    uint32_t cursor = 0;
    for (struct session *session; (session = sessions_next(server->sessions, &cursor));) {
        bool moved; /* what was being committed when its store was not to be drained any more */
        if (session->move && !is_in(server->leaving, session->move->from))
            moves_advance(server, session, &moved);
    }
    for (uint32_t number = 0; server->leaving && number < SERVER_MAX_STORES; number++)
        if (is_in(server->leaving, number))
            advance(server, number);
}
