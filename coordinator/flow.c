/*
 * flow.c - the way of a request: session, ids, room, worker. flow_reply.c: what comes back.
 *
 * Level-triggered: flow_advance() asks every request that waits whether it can go on now; whatever changes something
 * sets server->dirty. Nothing is remembered about what a request waits for but its state.
 */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "common/log.h"
#include "common/random.h"
#include "coordinator/state.h"

/* ---- ends ---- */

void flow_finish(struct server *server, struct request *request)
{
    if (request->state == REQUEST_DONE)
        return;
    struct session *session = request->session;
    if (session && session->request == request) {
        session->request = NULL;
        session->active_us = server->now_us;
        if (session->state == SESSION_RUNNING)
            (void)sessions_move(session, SESSION_READY);
        else if (session->state == SESSION_OPENING)
            session->close_wanted = true;
    }
    request->session = NULL;
    request->worker = request->work = 0;
    (void)requests_move(request, REQUEST_DONE, server->now_us);
    server->dirty = true;
}

void flow_fail(struct server *server, struct request *request, Hcattn__ErrorCode code, const struct numbers *numbers,
               const char *format, ...)
{
    char sentence[SERVER_ERROR_BYTES];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(sentence, sizeof(sentence), format, arguments);
    va_end(arguments);
    LOG_DEBUG("request %016llx (%s): %s", (unsigned long long)request->id, requests_kind_name(request->kind), sentence);
    rpc_error(server, request, code, numbers, "%s", sentence);
    flow_finish(server, request);
}

/* Nobody wants the rest: a worker that runs it is told to stop, and has the session until it says that it did. */
static void end_quietly(struct server *server, struct request *request)
{
    if (request->state == REQUEST_RUNNING) {
        workers_stop(server, request);
        (void)requests_move(request, REQUEST_CANCELLING, server->now_us);
    } else if (request->state != REQUEST_CANCELLING) {
        flow_finish(server, request);
    }
    server->dirty = true;
}

void flow_cancel(struct server *server, struct request *request)
{
    request->cancelled = true;
    request->restart = false;
    if (request->state == REQUEST_RUNNING || request->state == REQUEST_CANCELLING)
        end_quietly(server, request);
    else
        flow_fail(server, request, HCATTN__ERROR_CODE__CANCELLED, NULL, "cancelled");
}

void flow_abandon(struct server *server, struct request *request)
{
    request->mute = true;
    request->restart = false;
    struct session *session = request->session;
    if (session && session->terms.flags & SESSION_EPHEMERAL) {
        session->close_wanted = true;
        session->close_why = "its client is gone";
    }
    end_quietly(server, request);
}

void flow_session_lost(struct server *server, struct request *request, const char *sentence)
{
    rpc_error(server, request, HCATTN__ERROR_CODE__INTERNAL, NULL, "the session is lost: %s", sentence);
    request->mute = true;
    request->restart = false;
    end_quietly(server, request);
}

void flow_again(struct server *server, struct request *request, uint32_t resume_from)
{
    if (request->cancelled)
        return; /* its end is on the way */
    switch (request->state) {
    case REQUEST_RUNNING:
        if (resume_from < request->forwarded) { /* what was sent did not arrive */
            request->restart = true;
            request->resume_from = resume_from;
            workers_stop(server, request);
            (void)requests_move(request, REQUEST_CANCELLING, server->now_us);
        } else {
            flow_accepted(server, request);
        }
        break;
    case REQUEST_CANCELLING: /* its client was taken for gone */
        request->mute = false;
        request->restart = true;
        request->resume_from = resume_from;
        break;
    case REQUEST_QUEUED:
        request->forwarded = resume_from;
        flow_accepted(server, request);
        break;
    default:
        request->forwarded = resume_from;
        break;
    }
}

/* ---- entered ---- */

static bool waits_for_table(struct server *server, struct request *request)
{
    if (!server->table_complete)
        return true; /* it may be in a store that has not registered yet */
    flow_fail(server, request, HCATTN__ERROR_CODE__NOT_FOUND, NULL, "there is no session %016llx",
              (unsigned long long)request->session_id);
    return false;
}

static void opened(struct server *server, struct request *request, const struct session *session)
{
    Hcattn__SessionOpened message = HCATTN__SESSION_OPENED__INIT;
    message.session = session->id;
    message.policy = (char *)(uintptr_t)session->terms.policy;
    message.n_ctx = server->model.n_ctx;
    Hcattn__Reply reply = HCATTN__REPLY__INIT;
    reply.reply_case = HCATTN__REPLY__REPLY_SESSION_OPENED;
    reply.session_opened = &message;
    rpc_reply(server, request, &reply);
    flow_finish(server, request);
}

static void open_new(struct server *server, struct request *request, const char *policy)
{
    const Hcattn__OpenSession *open = ((const Hcattn__Request *)request->message)->open_session;
    struct session *session;
    if (!stores_all_ready(server) || !server->model.known)
        return;
    if (request->session_id == 0)
        request->session_id = random_u64();
    int result = sessions_add(server->sessions, request->session_id, SESSION_OPENING, &session);
    if (result != 0) {
        flow_fail(server, request, HCATTN__ERROR_CODE__BUSY, NULL, "%u sessions are open; at most %u",
                  sessions_count(server->sessions), server->options.max_sessions);
        return;
    }
    session->terms = (struct session_terms){.model = {server->model.hash[0], server->model.hash[1]},
                                            .opened_unix_s = (uint64_t)time(NULL),
                                            .exact_tokens = open->exact_tokens,
                                            .flags = open->ephemeral ? SESSION_EPHEMERAL : 0,
                                            .idle_timeout_s = open->idle_timeout_s};
    snprintf(session->terms.policy, sizeof(session->terms.policy), "%s", policy);
    (void)placement_lanes(server->placement, stores_ready_mask(server), session->terms.lane_store);
    session->active_us = server->now_us;
    session->request = request;
    request->session = session;
    (void)requests_move(request, REQUEST_RESERVING, server->now_us);
    if (orders_open(server, session) != 0)
        flow_fail(server, request, HCATTN__ERROR_CODE__INTERNAL, NULL, "out of memory");
}

static void enter_open(struct server *server, struct request *request)
{
    const Hcattn__OpenSession *open = ((const Hcattn__Request *)request->message)->open_session;
    const char *policy = open->policy[0] ? open->policy : server->options.policy;
    struct session *session = sessions_find(server->sessions, request->session_id);
    if (!session) {
        open_new(server, request, policy);
        return;
    }
    if ((session->state != SESSION_READY && session->state != SESSION_RUNNING) || session->close_wanted)
        return; /* being opened, found or closed */
    if (strcmp(session->terms.policy, policy) != 0 || session->terms.exact_tokens != open->exact_tokens) {
        flow_fail(server, request, HCATTN__ERROR_CODE__CONFLICT, NULL,
                  "session %016llx is open with policy %s and %u exact tokens", (unsigned long long)session->id,
                  session->terms.policy, session->terms.exact_tokens);
        return;
    }
    session->active_us = server->now_us;
    opened(server, request, session);
}

static void enter_close(struct server *server, struct request *request)
{
    struct session *session = sessions_find(server->sessions, request->session_id);
    if (!session) {
        (void)waits_for_table(server, request);
        return;
    }
    if (session->state == SESSION_RECOVERING && !session->close_wanted)
        return;
    if (!session->close_wanted)
        session->close_why = "asked for";
    session->close_wanted = true;
    (void)requests_move(request, REQUEST_RESERVING, server->now_us);
    if (session->request)
        flow_cancel(server, session->request);
    server->dirty = true;
}

void flow_closed(struct server *server, const struct session *session)
{
    uint32_t cursor = 0;
    for (struct request *request; (request = requests_next(server->requests, &cursor));) {
        if (request->kind != REQUEST_CLOSE || request->session_id != session->id || request->state != REQUEST_RESERVING)
            continue;
        Hcattn__SessionClosed closed = HCATTN__SESSION_CLOSED__INIT;
        closed.freed_bytes = session->freed_bytes;
        Hcattn__Reply reply = HCATTN__REPLY__INIT;
        reply.reply_case = HCATTN__REPLY__REPLY_SESSION_CLOSED;
        reply.session_closed = &closed;
        rpc_reply(server, request, &reply);
        flow_finish(server, request);
    }
}

/* Another request works on the session: wait for it only if it is about to end. */
static void occupied(struct server *server, struct request *request, const struct session *session)
{
    const struct request *other = session->request;
    if (other->state != REQUEST_CANCELLING || other->restart)
        flow_fail(server, request, HCATTN__ERROR_CODE__BUSY, NULL, "session %016llx runs another request (%s, %s)",
                  (unsigned long long)session->id, requests_kind_name(other->kind), requests_state_name(other->state));
}

static void enter_work(struct server *server, struct request *request)
{
    struct session *session = sessions_find(server->sessions, request->session_id);
    if (!session) {
        (void)waits_for_table(server, request);
        return;
    }
    if (session->close_wanted || session->state == SESSION_CLOSING) {
        flow_fail(server, request, HCATTN__ERROR_CODE__NOT_FOUND, NULL, "session %016llx is closed",
                  (unsigned long long)session->id);
        return;
    }
    if (session->state == SESSION_RUNNING) {
        occupied(server, request, session);
        return;
    }
    if (session->state != SESSION_READY || session->n_pending > 0)
        return;                         /* its stores are awaited */
    if (session->reserve_status != 0) { /* of a request that did not wait for it */
        orders_roll_back(server, session);
        return;
    }
    uint64_t n_tokens = sessions_n_tokens(session, server->descriptors);
    struct numbers numbers = {.n_tokens = n_tokens};
    if (!request->have_at)
        request->at = n_tokens;
    if (request->at > n_tokens) {
        flow_fail(server, request, HCATTN__ERROR_CODE__CONFLICT, &numbers,
                  "session %016llx holds %llu tokens, not %llu", (unsigned long long)session->id,
                  (unsigned long long)n_tokens, (unsigned long long)request->at);
        return;
    }
    bool empty = validate_input_empty(flow_input(request));
    if (empty && request->at == 0) {
        flow_fail(server, request, HCATTN__ERROR_CODE__INVALID_ARGUMENT, NULL, "the prompt is empty");
        return;
    }
    (void)sessions_move(session, SESSION_RUNNING);
    session->request = request;
    session->active_us = server->now_us;
    request->session = session;
    (void)requests_move(request, REQUEST_PREPARING, server->now_us);
    if (empty)
        flow_prepared(server, request, NULL, 0);
}

/* ---- room ---- */

void flow_accepted(struct server *server, struct request *request)
{
    Hcattn__Accepted accepted = HCATTN__ACCEPTED__INIT;
    accepted.n_prompt_ids = request->n_ids;
    accepted.prompt_ids = request->ids;
    accepted.at = request->at;
    accepted.reserved_tokens = (uint64_t)request->session->n_blocks * LAYOUT_BLOCK_TOKENS;
    Hcattn__Reply reply = HCATTN__REPLY__INIT;
    reply.reply_case = HCATTN__REPLY__REPLY_ACCEPTED;
    reply.accepted = &accepted;
    rpc_reply(server, request, &reply);
}

static void no_room(struct server *server, struct request *request, int result, const struct placement_room *room)
{
    struct numbers numbers = {.n_prompt_tokens = request->n_ids,
                              .n_tokens = request->at,
                              .max_tokens = request->max_tokens,
                              .n_ctx = server->model.n_ctx,
                              .bytes_asked = room->bytes_asked,
                              .bytes_free = room->bytes_free};
    if (result == -ENOMEM && room->bytes_asked > 0)
        flow_fail(server, request, HCATTN__ERROR_CODE__NO_MEMORY, &numbers,
                  "the value-stores have no room: %llu bytes asked, %llu free for this session",
                  (unsigned long long)room->bytes_asked, (unsigned long long)room->bytes_free);
    else
        flow_fail(server, request, HCATTN__ERROR_CODE__INTERNAL, NULL, "no blocks could be reserved: %s",
                  strerror(-result));
}

/* True: all blocks are there. */
static bool reserve(struct server *server, struct request *request)
{
    struct session *session = request->session;
    uint64_t need = requests_blocks_for(request->at + request->n_ids + request->max_tokens + 1);
    if (need <= session->n_blocks)
        return true;
    uint32_t first = session->n_blocks, n = (uint32_t)(need - first);
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
    request->reserve_asked = true;
    if (result != 0)
        no_room(server, request, result, &room);
    return false;
}

static void reserving_open(struct server *server, struct request *request)
{
    struct session *session = request->session;
    if (session->n_pending > 0)
        return;
    if (session->reserve_status != 0) {
        flow_fail(server, request,
                  session->reserve_status == -ENOSPC ? HCATTN__ERROR_CODE__BUSY : HCATTN__ERROR_CODE__INTERNAL, NULL,
                  "a value-store could not open the session: %s", strerror(-session->reserve_status));
        return;
    }
    if (sessions_move(session, SESSION_READY) != 0)
        return;
    LOG_INFO("session %016llx opened: policy %s%s", (unsigned long long)session->id, session->terms.policy,
             session->terms.flags & SESSION_EPHEMERAL ? ", ephemeral" : "");
    opened(server, request, session);
}

static void reserving_work(struct server *server, struct request *request)
{
    struct session *session = request->session;
    if (session->n_pending > 0)
        return;
    if (session->reserve_status != 0) {
        int status = session->reserve_status;
        orders_roll_back(server, session);
        flow_fail(server, request, HCATTN__ERROR_CODE__INTERNAL, NULL, "a value-store could not reserve blocks: %s",
                  strerror(-status));
        return;
    }
    if (!reserve(server, request))
        return;
    (void)requests_move(request, REQUEST_QUEUED, server->now_us);
    flow_accepted(server, request);
}

/* ---- everything that waits ---- */

static void advance(struct server *server, struct request *request)
{
    struct process *worker;
    switch (request->state) {
    case REQUEST_ENTERED:
        if (request->kind == REQUEST_OPEN)
            enter_open(server, request);
        else if (request->kind == REQUEST_CLOSE)
            enter_close(server, request);
        else if (request->kind == REQUEST_TOKENIZE || request->kind == REQUEST_DETOKENIZE)
            (void)requests_move(request, REQUEST_PREPARING, server->now_us);
        else
            enter_work(server, request);
        break;
    case REQUEST_PREPARING:
        if (request->work == 0 && (worker = workers_pick(server, 0)))
            flow_prepare(server, request, worker);
        break;
    case REQUEST_RESERVING:
        if (request->kind == REQUEST_OPEN)
            reserving_open(server, request);
        else if (request->kind != REQUEST_CLOSE)
            reserving_work(server, request);
        break;
    case REQUEST_QUEUED:
        if ((worker = workers_pick(server, request->session->worker)))
            flow_run(server, request, worker);
        break;
    default:
        break;
    }
}

void flow_advance(struct server *server)
{
    uint32_t cursor = 0;
    for (struct request *request; (request = requests_next(server->requests, &cursor));) {
        enum request_state before;
        do {
            before = request->state;
            advance(server, request);
        } while (request->state != before);
    }
    cursor = 0;
    for (struct request *request; (request = requests_next(server->requests, &cursor));)
        if (request->state == REQUEST_DONE) {
            requests_remove(server->requests, request);
            cursor--;
        }
}

/* ---- time ---- */

static const char *awaited(const struct request *request)
{
    switch (request->state) {
    case REQUEST_ENTERED:
        return "its session did not become ready";
    case REQUEST_RESERVING:
        return "a value-store did not answer";
    default:
        return "no worker became ready";
    }
}

static void judge_at_worker(struct server *server, struct request *request)
{
    const struct process *worker = registry_find_incarnation(server->registry, PROCESS_WORKER, request->worker);
    if (!worker || worker->state != PROCESS_READY)
        return; /* its death is what is awaited */
    if (worker->busy)
        request->heard_us = server->now_us;
    if (server->now_us - request->heard_us <= server->options.hang_timeout_us)
        return;
    LOG_WARNING("request %016llx: gpu-worker %u is idle and does not answer it: sent again",
                (unsigned long long)request->id, worker->index);
    workers_stop(server, request);
    flow_redispatch(server, request, true);
}

void flow_tick(struct server *server)
{
    uint64_t now_us = server->now_us;
    uint32_t cursor = 0;
    for (struct request *request; (request = requests_next(server->requests, &cursor));) {
        uint64_t waited_us = now_us - request->waiting_us;
        if (request->state == REQUEST_CANCELLING && waited_us > server->options.hang_timeout_us) {
            LOG_WARNING("request %016llx: its worker did not confirm that it stopped", (unsigned long long)request->id);
            flow_stopped(server, request);
        } else if (request->work != 0 && (request->state == REQUEST_PREPARING || request->state == REQUEST_RUNNING)) {
            judge_at_worker(server, request);
        } else if (request->state != REQUEST_DONE && request->state != REQUEST_RUNNING &&
                   request->state != REQUEST_CANCELLING && waited_us > server->options.recovery_timeout_us) {
            char missing[256];
            (void)stats_ready(server, missing, sizeof(missing));
            flow_fail(server, request, HCATTN__ERROR_CODE__UNAVAILABLE, NULL, "%s within %llu s%s%s", awaited(request),
                      (unsigned long long)(server->options.recovery_timeout_us / 1000000u), missing[0] ? ": " : "",
                      missing);
        }
    }
    cursor = 0;
    for (struct session *session; (session = sessions_next(server->sessions, &cursor));)
        if (!session->close_wanted && sessions_idle(session, now_us, SERVER_IDLE_S)) {
            session->close_wanted = true;
            session->close_why = "idle for too long";
            server->dirty = true;
        }
}

void flow_end_all(struct server *server)
{
    uint32_t cursor = 0;
    for (struct request *request; (request = requests_next(server->requests, &cursor));)
        if (request->state != REQUEST_DONE)
            rpc_answer_error(server, &request->client, request->id, HCATTN__ERROR_CODE__UNAVAILABLE,
                             "the coordinator is shutting down");
}
