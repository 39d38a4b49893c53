/*
 * fork.c - a new session with the first complete blocks of another one.
 *
 * Record, reservation and copies are ordered in one go: a store does its orders one after the other, so what comes later -
 * also the release of a source that is closed meanwhile - finds the copies made. A sealed block never changes, so the source
 * may run. What fails in the middle leaves an opening session, which is closed as any other (orders_settle).
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "common/log.h"
#include "common/random.h"
#include "coordinator/state.h"

static const Hcattn__Fork *message_of(const struct request *request)
{
    return ((const Hcattn__Request *)request->message)->fork;
}

static const char *policy_of(const struct request *request, const struct session *source)
{
    const char *policy = message_of(request)->policy;
    return policy[0] ? policy : source->terms.policy;
}

static void forked(struct server *server, struct request *request, struct session *session)
{
    Hcattn__Forked message = HCATTN__FORKED__INIT;
    message.session = session->id;
    message.n_tokens = sessions_n_tokens(session, server->descriptors);
    session->active_us = server->now_us;
    Hcattn__Reply reply = HCATTN__REPLY__INIT;
    reply.reply_case = HCATTN__REPLY__REPLY_FORKED;
    reply.forked = &message;
    flow_answer(server, request, &reply);
}

/* The client asks again (its coordinator was lost, or the answer): what it got is still there. */
static void exists(struct server *server, struct request *request, const struct session *source,
                   struct session *session, uint32_t n_blocks)
{
    uint32_t n_sealed = sessions_n_sealed(session, server->descriptors);
    if (strcmp(session->terms.policy, policy_of(request, source)) == 0 &&
        session->terms.exact_tokens == source->terms.exact_tokens && n_sealed == n_blocks &&
        sessions_same_ids(source, session, server->descriptors, n_blocks))
        forked(server, request, session);
    else
        flow_fail(server, request, HCATTN__ERROR_CODE__CONFLICT, NULL,
                  "session %016llx is open already, and is no such copy of session %016llx",
                  (unsigned long long)session->id, (unsigned long long)source->id);
}

static void no_memory(struct server *server, struct request *request, const struct session *source,
                      const struct placement_room *room)
{
    struct numbers numbers = {.n_tokens = sessions_n_tokens(source, server->descriptors),
                              .n_ctx = server->model.n_ctx,
                              .bytes_asked = room->bytes_asked,
                              .bytes_free = room->bytes_free,
                              .n_queued = queue_n_waiting(server),
                              .max_queued = server->options.max_queued};
    flow_fail(server, request, HCATTN__ERROR_CODE__NO_MEMORY, &numbers,
              "the value-stores have no room for a copy: %llu bytes asked, %llu free in this session's stores",
              (unsigned long long)room->bytes_asked, (unsigned long long)room->bytes_free);
}

static int give_orders(struct server *server, struct session *session, const struct session *source,
                       const struct placed_block *blocks, uint32_t n_blocks)
{
    int result = sessions_add_blocks(session, blocks, n_blocks);
    if (result != 0) {
        for (uint32_t i = 0; i < n_blocks; i++)
            (void)placement_release(server->placement, blocks[i].store, blocks[i].handle);
        return result;
    }
    result = orders_open(server, session);
    if (result == 0)
        result = orders_reserve(server, session, 0);
    return result != 0 ? result : orders_copy(server, session, source, n_blocks);
}

static void begin(struct server *server, struct request *request, struct session *source, uint32_t n_blocks)
{
    const Hcattn__Fork *message = message_of(request);
    struct session *session = NULL;
    struct placement_room room = {0, 0};
    struct placed_block *blocks = calloc(n_blocks + 1u, sizeof(*blocks));
    int result =
        !blocks ? -ENOMEM : placement_reserve(server->placement, source->terms.lane_store, 0, n_blocks, blocks, &room);
    if (result == 0) {
        result = sessions_add(server->sessions, request->session_id, SESSION_OPENING, &session);
        for (uint32_t i = 0; result != 0 && i < n_blocks; i++)
            (void)placement_release(server->placement, blocks[i].store, blocks[i].handle);
    }
    if (session) {
        session->terms = source->terms;
        session->terms.moves = 0;
        snprintf(session->terms.policy, sizeof(session->terms.policy), "%s", policy_of(request, source));
        session->terms.opened_unix_s = (uint64_t)time(NULL);
        session->terms.flags = message->ephemeral ? SESSION_EPHEMERAL : 0;
        session->terms.idle_timeout_s = message->idle_timeout_s;
        session->active_us = source->active_us = server->now_us;
        session->request = request;
        request->session = session;
        request->n_copied = n_blocks;
        (void)requests_move(request, REQUEST_RESERVING, server->now_us);
        result = give_orders(server, session, source, blocks, n_blocks);
    }
    free(blocks);
    if (result == -ENOMEM && room.bytes_asked > 0)
        no_memory(server, request, source, &room);
    else if (result == -ENOSPC)
        flow_fail(server, request, HCATTN__ERROR_CODE__BUSY, NULL, "%u sessions are open; at most %u",
                  sessions_count(server->sessions), server->options.max_sessions);
    else if (result == -EINVAL)
        flow_fail(server, request, HCATTN__ERROR_CODE__UNAVAILABLE, NULL,
                  "a value-store of session %016llx is not there", (unsigned long long)source->id);
    else if (result != 0)
        flow_fail(server, request, HCATTN__ERROR_CODE__INTERNAL, NULL, "no blocks could be reserved: %s",
                  strerror(-result));
}

/* Blocks to copy; false: refused. */
static bool count_blocks(struct server *server, struct request *request, const struct session *source,
                         uint32_t *ret_n_blocks)
{
    uint64_t n_asked = message_of(request)->n_tokens;
    uint32_t n_sealed = sessions_n_sealed(source, server->descriptors);
    struct numbers numbers = {.n_tokens = sessions_n_tokens(source, server->descriptors),
                              .n_prompt_tokens = n_asked,
                              .n_ctx = server->model.n_ctx};
    if (n_asked / LAYOUT_BLOCK_TOKENS > n_sealed) {
        flow_fail(server, request, HCATTN__ERROR_CODE__INVALID_ARGUMENT, &numbers,
                  "session %016llx has %llu tokens in complete blocks (of %llu that it holds), not %llu",
                  (unsigned long long)source->id, (unsigned long long)n_sealed * LAYOUT_BLOCK_TOKENS,
                  (unsigned long long)numbers.n_tokens, (unsigned long long)n_asked);
        return false;
    }
    *ret_n_blocks = n_asked > 0 ? (uint32_t)(n_asked / LAYOUT_BLOCK_TOKENS) : n_sealed;
    return true;
}

void fork_enter(struct server *server, struct request *request)
{
    uint64_t source_id = message_of(request)->session;
    struct session *source = sessions_find(server->sessions, source_id);
    uint32_t n_blocks;
    if (!source) {
        (void)flow_waits_for_table(server, request, source_id);
        return;
    }
    if (source->close_wanted || source->state == SESSION_CLOSING) {
        flow_fail(server, request, HCATTN__ERROR_CODE__NOT_FOUND, NULL, "session %016llx is closed",
                  (unsigned long long)source_id);
        return;
    }
    if (!stores_all_ready(server) || (sessions_stores(source) & ~stores_ready_mask(server)) ||
        (source->state != SESSION_READY && source->state != SESSION_RUNNING))
        return; /* it is being opened or found; or a store is awaited */
    if (request->session_id == 0)
        request->session_id = random_u64();
    struct session *session = sessions_find(server->sessions, request->session_id);
    if (session && ((session->state != SESSION_READY && session->state != SESSION_RUNNING) || session->close_wanted))
        return;
    if (!session && !server->table_complete)
        return; /* it may be there already, in a store that is still to come */
    if (!count_blocks(server, request, source, &n_blocks))
        return;
    if (session)
        exists(server, request, source, session, n_blocks);
    else
        begin(server, request, source, n_blocks);
}

void fork_reserving(struct server *server, struct request *request)
{
    struct session *session = request->session;
    int status = session->reserve_status;
    if (session->n_pending > 0)
        return;
    if (status == -ENODEV) {
        flow_fail(server, request, HCATTN__ERROR_CODE__UNAVAILABLE, NULL, "a value-store was lost during the copy");
    } else if (status == -ENOSPC) {
        flow_fail(server, request, HCATTN__ERROR_CODE__BUSY, NULL, "a value-store has no record left for a session");
    } else if (status != 0) {
        flow_fail(server, request, HCATTN__ERROR_CODE__INTERNAL, NULL, "a value-store could not copy the blocks: %s",
                  strerror(-status));
    } else if (sessions_n_sealed(session, server->descriptors) != request->n_copied) {
        flow_fail(server, request, HCATTN__ERROR_CODE__INTERNAL, NULL, "the value-stores' copy is not complete");
    } else if (sessions_move(session, SESSION_READY) == 0) {
        LOG_INFO("session %016llx forked from %016llx: %u blocks", (unsigned long long)session->id,
                 (unsigned long long)message_of(request)->session, request->n_copied);
        forked(server, request, session);
    }
}
