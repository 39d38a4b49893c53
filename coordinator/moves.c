/*
 * moves.c - lanes of one session go from a store to others, while it is used.
 *
 * Copy: blocks are staged in the new stores and what is sealed, which never changes, goes over; the session runs. Park: its
 * run is stopped between two steps, as if its worker had been lost; nobody appends any more. Rest: what came meanwhile goes
 * over. Commit: every store that the session has afterwards writes a record with the new lanes; then the table switches, the
 * run goes on, and the old store forgets the session.
 *
 * Until the first record of the commit is written the session is where it was, whatever dies: staged blocks are leftovers
 * (rebuild.h). Afterwards it is where it goes: all is there already, and the old store is released only when no record
 * speaks of it any more.
 *
 * Invariant  one move a session at a time; session->blocks and terms.lane_store name the old places until the switch.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/log.h"
#include "coordinator/state.h"

/* ---- blocks ---- */

static bool goes(const struct move *move, uint32_t number)
{
    return move->lanes >> number % LAYOUT_N_LANES & 1u;
}

/* Staged places for blocks that have none yet. -ENOMEM: what was staged stays. */
static int stage(struct server *server, struct session *session)
{
    struct move *move = session->move;
    if (session->n_blocks > move->capacity) {
        struct staged_block *grown = realloc(move->staged, session->n_blocks * sizeof(*grown));
        if (!grown)
            return -ENOMEM;
        move->staged = grown;
        move->capacity = session->n_blocks;
    }
    for (uint32_t number = move->n_staged; number < session->n_blocks; number++) {
        struct staged_block *staged = &move->staged[number];
        *staged = (struct staged_block){.whole = false};
        int result = 0;
        if (goes(move, number))
            result = placement_reserve_in(server->placement, move->lane_store[number % LAYOUT_N_LANES], &staged->to);
        if (result != 0)
            return result;
        move->n_staged = number + 1;
    }
    return 0;
}

static uint64_t targets_of(const struct move *move)
{
    uint64_t stores = 0;
    for (uint32_t lane = 0; lane < LAYOUT_N_LANES; lane++)
        if (move->lanes >> lane & 1u)
            stores |= UINT64_C(1) << move->lane_store[lane];
    return stores;
}

/* ---- begin and end ---- */

/* Between what states of the session may it move? */
static bool may_move(const struct session *session)
{
    const struct request *request = session->request;
    if (session->close_wanted || (session->state != SESSION_READY && session->state != SESSION_RUNNING))
        return false;
    return !request || requests_is_work(request->kind);
}

int moves_begin(struct server *server, struct session *session, uint32_t from)
{
    struct placement_room room;
    if (session->move || !may_move(session))
        return -EAGAIN;
    if (session->reserve_status != 0) {
        if (!session->request && session->n_pending == 0) /* of a request that did not wait for it */
            orders_roll_back(server, session);
        return -EAGAIN;
    }
    struct move *move = calloc(1, sizeof(*move));
    if (!move)
        return -ENOMEM;
    int result = placement_move_lanes(server->placement, membership_targets(server), from, session->terms.lane_store,
                                      session->n_blocks, move->lane_store, &room);
    if (result != 0) {
        free(move);
        if (result == -ENODEV)
            snprintf(server->stores[from].waits, sizeof(server->stores[from].waits),
                     "no other value-store is there that could take session %016llx", (unsigned long long)session->id);
        if (result == -ENOMEM)
            snprintf(server->stores[from].waits, sizeof(server->stores[from].waits),
                     "session %016llx needs %llu bytes in other stores, which have room for %llu of them",
                     (unsigned long long)session->id, (unsigned long long)room.bytes_asked,
                     (unsigned long long)room.bytes_free);
        return result;
    }
    for (uint32_t lane = 0; lane < LAYOUT_N_LANES; lane++)
        move->lanes |= (session->terms.lane_store[lane] == from ? UINT32_C(1) : 0) << lane;
    move->id = ++server->next_move;
    move->from = from;
    move->started_us = move->heard_us = server->now_us;
    session->move = move;
    result = stage(server, session);
    if (result == 0)
        result = orders_move_open(server, session, targets_of(move), false);
    if (result == 0)
        result = orders_move_reserve(server, session, 0);
    if (result == 0)
        result = orders_move_import(server, session, false);
    if (result != 0) {
        snprintf(server->stores[from].waits, sizeof(server->stores[from].waits), "session %016llx: %s",
                 (unsigned long long)session->id, strerror(-result));
        moves_give_up(server, session);
    }
    return result;
}

void moves_free(struct session *session)
{
    if (session->move)
        free(session->move->staged);
    free(session->move);
    session->move = NULL;
}

void moves_free_all(struct server *server)
{
    uint32_t cursor = 0;
    for (struct session *session; server->sessions && (session = sessions_next(server->sessions, &cursor));)
        moves_free(session);
}

void moves_give_up(struct server *server, struct session *session)
{
    struct move *move = session->move;
    if (!move)
        return;
    uint64_t targets = targets_of(move), stay = sessions_lane_stores(session->terms.lane_store);
    struct placed_block *blocks = calloc(move->n_staged + 1u, sizeof(*blocks));
    uint32_t n = 0;
    for (uint32_t i = 0; blocks && i < move->n_staged; i++)
        if (move->staged[i].to.handle.generation != 0)
            blocks[n++] = move->staged[i].to;
    for (uint32_t store = 0; store < SERVER_MAX_STORES; store++) {
        if (!(targets >> store & 1u))
            continue;
        /* A store that the session has anyway keeps its record and its other lanes. */
        uint32_t lanes = 0;
        for (uint32_t lane = 0; lane < LAYOUT_N_LANES; lane++)
            lanes |= (move->lanes >> lane & 1u && move->lane_store[lane] == store ? UINT32_C(1) : 0) << lane;
        if (!blocks || orders_move_release(server, session, store, stay >> store & 1u ? lanes : 0, blocks, n) != 0)
            LOG_ERROR("session %016llx: out of memory: blocks in value-store %u stay used",
                      (unsigned long long)session->id, store);
    }
    free(blocks);
    moves_free(session);
    server->dirty = true; /* a run that was stopped for it goes on (flow_stopped) */
}

bool moves_go_to(const struct session *session, uint32_t store)
{
    return session->move && targets_of(session->move) >> store & 1u;
}

static void lose(struct move *move, int status, const char *sentence)
{
    if (move->status != 0)
        return;
    move->status = status;
    snprintf(move->sentence, sizeof(move->sentence), "%s", sentence);
}

void moves_forget_store(struct session *session, uint32_t store)
{
    if (!moves_go_to(session, store))
        return;
    for (uint32_t i = 0; i < session->move->n_staged; i++)
        if (session->move->staged[i].to.store == store)
            session->move->staged[i].to.handle.generation = 0;
    lose(session->move, -ENODEV, "a value-store that it was going to is lost");
}

void moves_store_down(struct server *server, uint32_t store)
{
    uint32_t cursor = 0;
    for (struct session *session; (session = sessions_next(server->sessions, &cursor));)
        if (moves_go_to(session, store) && session->move->step != MOVE_COMMIT)
            lose(session->move, -EAGAIN, "a value-store that it was going to hung up");
}

bool moves_have_left(const struct session *session, uint32_t store)
{
    return session->move && session->move->step == MOVE_COMMIT && session->move->from == store;
}

void moves_done(struct server *server, struct session *session, const struct order *order, int status,
                const char *sentence)
{
    struct move *move = session->move;
    if (!move || move->id != order->move)
        return; /* of one that was given up */
    move->n_pending--;
    move->heard_us = server->now_us;
    if (status == 0 || move->status != 0)
        return;
    move->status = status < 0 ? status : -EPROTO;
    snprintf(move->sentence, sizeof(move->sentence), "value-store %u: %s (%s)", order->store, sentence,
             strerror(status < 0 && status > -4096 ? -status : EPROTO));
}

/* ---- steps ---- */

/* Stops what runs. True: nobody works on the blocks. */
static bool is_parked(struct server *server, struct session *session)
{
    struct request *request = session->request;
    if (request && request->state == REQUEST_RUNNING) {
        request->parking = true;
        workers_stop(server, request);
        (void)requests_move(request, REQUEST_CANCELLING, server->now_us);
    }
    if (session->n_pending > 0 || (request && request->state == REQUEST_CANCELLING))
        return false;
    if (session->reserve_status != 0 && !request)
        orders_roll_back(server, session);
    return session->reserve_status == 0 && session->n_pending == 0;
}

static int copy_rest(struct server *server, struct session *session)
{
    struct move *move = session->move;
    uint32_t n_before = move->n_staged;
    if (session->n_blocks < move->n_staged)
        return -EAGAIN; /* some were cut off: their staged places would be nobody's */
    int result = stage(server, session);
    if (result == 0)
        result = orders_move_reserve(server, session, n_before);
    return result != 0 ? result : orders_move_import(server, session, true);
}

/* All records are written: the session is where it goes. */
static void switch_over(struct server *server, struct session *session)
{
    struct move *move = session->move;
    struct store *store = &server->stores[move->from];
    struct placed_block *old = calloc(move->n_staged + 1u, sizeof(*old));
    uint32_t n = 0;
    uint64_t block_bytes = placement_block_bytes(server->placement, move->from);
    for (uint32_t i = 0; i < move->n_staged; i++) {
        if (move->staged[i].to.handle.generation == 0)
            continue;
        if (old)
            old[n] = (struct placed_block){session->blocks[i].handle, session->blocks[i].store};
        n++;
        session->blocks[i] = (struct session_block){move->staged[i].to.handle, move->staged[i].to.store, true};
    }
    memcpy(session->terms.lane_store, move->lane_store, sizeof(session->terms.lane_store));
    session->terms.moves++;
    session->records = (session->records | targets_of(move)) & ~(UINT64_C(1) << move->from);
    if (!old || orders_move_release(server, session, move->from, 0, old, n) != 0)
        LOG_ERROR("session %016llx: out of memory: its blocks in value-store %u stay used",
                  (unsigned long long)session->id, move->from);
    free(old);
    store->n_moved++;
    store->bytes_moved += n * block_bytes;
    store->waits[0] = 0;
    LOG_INFO("session %016llx has left value-store %u: %u blocks in %.1f ms, %.1f ms of them parked",
             (unsigned long long)session->id, move->from, n, (double)(server->now_us - move->started_us) / 1e3,
             (double)(server->now_us - move->parked_us) / 1e3);
    moves_free(session);
    server->dirty = true;
}

static void failed(struct server *server, struct session *session, int status)
{
    struct move *move = session->move;
    char sentence[256];
    snprintf(sentence, sizeof(sentence), "%s", move->sentence[0] ? move->sentence : strerror(-status));
    bool commits = move->step == MOVE_COMMIT;
    if (!commits) {
        struct store *store = &server->stores[move->from];
        LOG_WARNING("session %016llx stays in value-store %u for now: %s", (unsigned long long)session->id, move->from,
                    sentence);
        snprintf(store->waits, sizeof(store->waits), "session %016llx: %.200s", (unsigned long long)session->id,
                 sentence);
    }
    moves_give_up(server, session);
    if (commits) /* some stores say that it has moved, and one that must have it has lost it */
        stores_close_broken(server, session, sentence);
}

/* Stores that live and do not answer. Who is parked for it waits less long than its request would. */
static void look_at_the_time(const struct server *server, struct move *move)
{
    uint64_t timeout_us = server->options.recovery_timeout_us;
    if (move->step == MOVE_PARK || move->step == MOVE_COMMIT || move->n_pending == 0)
        return; /* the first is up to the request; the last cannot be undone */
    if (server->now_us - move->heard_us > (move->step == MOVE_COPY ? timeout_us : timeout_us / 2))
        lose(move, -ETIMEDOUT, "a value-store did not answer in time");
}

void moves_advance(struct server *server, struct session *session, bool *ret_moved)
{
    struct move *move = session->move;
    int result = 0;
    *ret_moved = false;
    if (!may_move(session) && move->step != MOVE_COMMIT) {
        moves_give_up(server, session);
        return;
    }
    look_at_the_time(server, move);
    /* Before the commit nothing depends on orders that are under way; what they do is undone after them. */
    if (move->status != 0 && (move->step != MOVE_COMMIT || move->n_pending == 0)) {
        failed(server, session, move->status);
        return;
    }
    if (move->n_pending > 0)
        return;
    switch (move->step) {
    case MOVE_COPY:
        move->step = MOVE_PARK;
        move->parked_us = server->now_us;
        /* fall through */
    case MOVE_PARK:
        if (!is_parked(server, session))
            return;
        move->step = MOVE_REST;
        move->heard_us = server->now_us;
        result = copy_rest(server, session);
        if (result != 0 || move->n_pending > 0)
            break;
        /* fall through */
    case MOVE_REST:
        move->step = MOVE_COMMIT;
        result = orders_move_open(server, session, sessions_lane_stores(move->lane_store), true);
        if (result != 0 && move->n_pending == 0)
            move->step = MOVE_REST; /* nothing was said yet */
        break;
    case MOVE_COMMIT:
        switch_over(server, session);
        *ret_moved = true;
        return;
    }
    if (result != 0)
        failed(server, session, result);
}
