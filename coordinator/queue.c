/*
 * queue.c - room for a request: blocks now, a place in the line for them, or a refusal with numbers.
 *
 * What could fit if others ended waits, first come first served: a later request that needs blocks never overtakes an earlier
 * one, however small it is. The line is bounded in number (--max-queue) and in time (--queue-timeout); who stands in it holds
 * its session and no new blocks. A client that is gone is noticed by a HealthReply that nobody asked for (request_id 0).
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "coordinator/state.h"

#define PROBE_US 1000000u

uint32_t queue_n_waiting(const struct server *server)
{
    uint32_t n = 0, cursor = 0;
    for (const struct request *request; (request = requests_next(server->requests, &cursor));)
        n += request->state == REQUEST_WAITING;
    return n;
}

/* A request without a ticket has yet to queue up: behind all that wait. */
static bool is_next(const struct server *server, const struct request *request)
{
    uint32_t cursor = 0;
    for (const struct request *other; (other = requests_next(server->requests, &cursor));)
        if (other != request && other->state == REQUEST_WAITING &&
            (request->ticket == 0 || other->ticket < request->ticket))
            return false;
    return true;
}

/* Blocks of the session that the request needs in the end. */
static uint64_t needed(const struct request *request)
{
    return requests_blocks_for(request->at + request->n_ids + request->max_tokens + 1);
}

static struct numbers numbers_of(const struct server *server, const struct request *request,
                                 const struct placement_room *room)
{
    return (struct numbers){.n_prompt_tokens = request->n_ids,
                            .n_tokens = request->at,
                            .max_tokens = request->max_tokens,
                            .n_ctx = server->model.n_ctx,
                            .bytes_asked = room->bytes_asked,
                            .bytes_free = room->bytes_free,
                            .n_queued = queue_n_waiting(server),
                            .max_queued = server->options.max_queued};
}

static void no_room(struct server *server, struct request *request, const struct placement_room *room)
{
    struct numbers numbers = numbers_of(server, request, room);
    flow_fail(server, request, HCATTN__ERROR_CODE__NO_MEMORY, &numbers,
              "the value-stores have no room: %llu bytes asked, %llu free for this session",
              (unsigned long long)room->bytes_asked, (unsigned long long)room->bytes_free);
}

static void queue_up(struct server *server, struct request *request, const struct placement_room *room)
{
    struct numbers numbers = numbers_of(server, request, room);
    if (server->options.max_queued == 0 ||
        !placement_could_hold(server->placement, request->session->terms.lane_store, needed(request))) {
        no_room(server, request, room);
        return;
    }
    if (request->ticket == 0 && numbers.n_queued >= server->options.max_queued) {
        flow_fail(
            server, request, HCATTN__ERROR_CODE__BUSY, &numbers,
            "the value-stores have no room now (%llu bytes asked, %llu free for this session), and %u requests wait "
            "for some already; at most %u may",
            (unsigned long long)room->bytes_asked, (unsigned long long)room->bytes_free, numbers.n_queued,
            numbers.max_queued);
        return;
    }
    if (request->ticket == 0) {
        request->ticket = ++server->next_ticket;
        request->queued_us = request->probed_us = server->now_us;
    }
    (void)requests_move(request, REQUEST_WAITING, server->now_us);
}

static void order(struct server *server, struct request *request, uint32_t first, uint32_t n)
{
    struct session *session = request->session;
    struct placement_room room = {0, 0};
    struct placed_block *blocks = calloc(n, sizeof(*blocks));
    int result =
        blocks ? placement_reserve(server->placement, session->terms.lane_store, first, n, blocks, &room) : -ENOMEM;
    if (result == 0) {
        result = sessions_add_blocks(session, blocks, n);
        for (uint32_t i = 0; result != 0 && i < n; i++)
            (void)placement_release(server->placement, blocks[i].store, blocks[i].handle);
        if (result == 0)
            result = orders_reserve(server, session, first);
    }
    free(blocks);
    if (result == -ENOMEM && room.bytes_asked > 0)
        queue_up(server, request, &room);
    else if (result != 0)
        flow_fail(server, request, HCATTN__ERROR_CODE__INTERNAL, NULL, "no blocks could be reserved: %s",
                  strerror(-result));
}

bool queue_reserve(struct server *server, struct request *request)
{
    struct session *session = request->session;
    struct placement_room room;
    uint64_t need = needed(request);
    if (need <= session->n_blocks)
        return true;
    uint32_t first = session->n_blocks, n = (uint32_t)(need - first);
    if (!is_next(server, request) &&
        placement_room(server->placement, session->terms.lane_store, first, n, &room) != -EINVAL)
        queue_up(server, request, &room);
    else
        order(server, request, first, n);
    return false;
}

void queue_advance(struct server *server, struct request *request)
{
    const struct session *session = request->session;
    struct placement_room room;
    if (moves_hold(session) || !is_next(server, request) ||
        placement_room(server->placement, session->terms.lane_store, session->n_blocks,
                       (uint32_t)(needed(request) - session->n_blocks), &room) == -ENOMEM)
        return;
    (void)requests_move(request, REQUEST_RESERVING, server->now_us);
    server->dirty = true; /* the next one's turn may have come, too */
}

void queue_probe(struct server *server, struct request *request)
{
    if (server->now_us - request->probed_us <= PROBE_US)
        return;
    request->probed_us = server->now_us;
    if (!request->mute && stats_health(server, &request->client, 0) == -EHOSTUNREACH)
        flow_abandon(server, request, "its client is gone");
}

void queue_tick(struct server *server, struct request *request)
{
    uint64_t now_us = server->now_us;
    if (now_us - request->queued_us > server->options.queue_timeout_us) {
        const struct session *session = request->session;
        struct placement_room room = {0, 0};
        (void)placement_room(server->placement, session->terms.lane_store, session->n_blocks,
                             (uint32_t)(needed(request) - session->n_blocks), &room);
        struct numbers numbers = numbers_of(server, request, &room);
        flow_fail(
            server, request, HCATTN__ERROR_CODE__NO_MEMORY, &numbers,
            "the value-stores had no room within %g s: %llu bytes asked, %llu free for this session, %u requests wait",
            (double)server->options.queue_timeout_us / 1e6, (unsigned long long)room.bytes_asked,
            (unsigned long long)room.bytes_free, numbers.n_queued);
    } else {
        queue_probe(server, request);
    }
}
