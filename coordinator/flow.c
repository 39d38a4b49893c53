/*
 * flow.c - the way of a request: session, ids, room (queue.c), worker. flow_reply.c: what comes back. flow_open.c: sessions.
 *
 * Level-triggered: flow_advance() asks every request that waits whether it can go on now; whatever changes something
 * sets server->dirty. Nothing is remembered about what a request waits for but its state.
 */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/log.h"
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
    server->n_ended += requests_is_drained(request->kind);
    (void)requests_move(request, REQUEST_DONE, server->now_us);
    server->dirty = true;
}

void flow_answer(struct server *server, struct request *request, Hcattn__Reply *reply)
{
    rpc_reply(server, request, reply);
    flow_finish(server, request);
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

void flow_abandon(struct server *server, struct request *request, const char *why)
{
    request->mute = true;
    request->restart = false;
    struct session *session = request->session;
    if (session && session->terms.flags & SESSION_EPHEMERAL) {
        session->close_wanted = true;
        session->close_why = why;
    }
    end_quietly(server, request);
}

void flow_session_lost(struct server *server, struct request *request, const char *sentence)
{
    bool not_yet = request->kind == REQUEST_OPEN || request->kind == REQUEST_FORK; /* nothing was lost: ask again */
    rpc_error(server, request, not_yet ? HCATTN__ERROR_CODE__UNAVAILABLE : HCATTN__ERROR_CODE__INTERNAL, NULL,
              "the session is lost: %s", sentence);
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

bool flow_waits_for_table(struct server *server, struct request *request, uint64_t session)
{
    if (!server->table_complete)
        return true;
    const char *why = NULL;
    for (uint32_t i = 0; i < MAX_CLOSED && !why; i++)
        why = server->closed[i].session == session ? server->closed[i].why : NULL;
    if (why)
        flow_fail(server, request, HCATTN__ERROR_CODE__NOT_FOUND, NULL, "session %016llx was closed: %s",
                  (unsigned long long)session, why);
    else
        flow_fail(server, request, HCATTN__ERROR_CODE__NOT_FOUND, NULL, "there is no session %016llx",
                  (unsigned long long)session);
    return false;
}

void flow_occupied(struct server *server, struct request *request, const struct session *session)
{
    const struct request *other = session->request;
    if (other->state != REQUEST_CANCELLING || other->restart || other->parking)
        flow_fail(server, request, HCATTN__ERROR_CODE__BUSY, NULL, "session %016llx runs another request (%s, %s)",
                  (unsigned long long)session->id, requests_kind_name(other->kind), requests_state_name(other->state));
}

static void enter_work(struct server *server, struct request *request)
{
    struct session *session = sessions_find(server->sessions, request->session_id);
    if (!session) {
        (void)flow_waits_for_table(server, request, request->session_id);
        return;
    }
    if (session->close_wanted || session->state == SESSION_CLOSING) {
        flow_fail(server, request, HCATTN__ERROR_CODE__NOT_FOUND, NULL, "session %016llx is closed: %s",
                  (unsigned long long)session->id, session->close_why ? session->close_why : "asked for");
        return;
    }
    if (session->state == SESSION_RUNNING) {
        flow_occupied(server, request, session);
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
    if (!request->session) /* a job */
        return;
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
    if (moves_hold(session) || !queue_reserve(server, request))
        return;
    (void)requests_move(request, REQUEST_QUEUED, server->now_us);
    flow_accepted(server, request);
}

/* ---- everything that waits ---- */

static void enter(struct server *server, struct request *request)
{
    switch (request->kind) {
    case REQUEST_OPEN:
        flow_enter_open(server, request);
        break;
    case REQUEST_CLOSE:
        flow_enter_close(server, request);
        break;
    case REQUEST_FORK:
        fork_enter(server, request);
        break;
    case REQUEST_TOKENIZE:
    case REQUEST_DETOKENIZE:
        (void)requests_move(request, REQUEST_PREPARING, server->now_us);
        break;
    case REQUEST_DRAIN_STORE:
        drain_store_enter(server, request);
        break;
    case REQUEST_APPEND:
    case REQUEST_GENERATE:
    case REQUEST_SCORE:
        enter_work(server, request);
        break;
    case REQUEST_JOB:
        jobs_enter(server, request);
        break;
    default:
        operate_enter(server, request);
        break;
    }
}

static void reserving(struct server *server, struct request *request)
{
    if (requests_is_work(request->kind))
        reserving_work(server, request);
    else if (request->kind == REQUEST_OPEN)
        flow_reserving_open(server, request);
    else if (request->kind == REQUEST_FORK)
        fork_reserving(server, request);
    else if (request->kind == REQUEST_DRAIN_STORE)
        drain_store_waiting(server, request);
    else if (request->kind != REQUEST_CLOSE)
        operate_reserving(server, request);
}

static void preparing(struct server *server, struct request *request)
{
    struct process *worker;
    if (request->work != 0)
        return;
    if (request->kind == REQUEST_DESCRIBE) /* the worker that held the session is gone */
        operate_counted(server, request, NULL);
    else if ((worker = workers_pick(server)))
        flow_prepare(server, request, worker);
}

static void advance(struct server *server, struct request *request)
{
    struct process *worker;
    switch (request->state) {
    case REQUEST_ENTERED:
        enter(server, request);
        break;
    case REQUEST_PREPARING:
        preparing(server, request);
        break;
    case REQUEST_RESERVING:
        reserving(server, request);
        break;
    case REQUEST_WAITING:
        queue_advance(server, request);
        break;
    case REQUEST_QUEUED:
        if (request->kind == REQUEST_JOB)
            jobs_advance(server, request);
        else if (!moves_hold(request->session) && (worker = workers_bind(server, request->session)))
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
    LOG_WARNING("request %016llx: gpu-worker %u is idle and does not answer it: %s", (unsigned long long)request->id,
                worker->index, request->kind == REQUEST_JOB ? "given up" : "sent again");
    workers_stop(server, request);
    flow_redispatch(server, request, true);
}

static void waited_too_long(struct server *server, struct request *request)
{
    char missing[256];
    if (request->kind == REQUEST_DRAIN || request->kind == REQUEST_DRAIN_STORE)
        return; /* as long as it takes */
    if (request->kind == REQUEST_SET_TRANSPORT) {
        operate_late(server, request);
        return;
    }
    (void)stats_ready(server, missing, sizeof(missing));
    flow_fail(server, request, HCATTN__ERROR_CODE__UNAVAILABLE, NULL, "%s within %llu s%s%s", awaited(request),
              (unsigned long long)(server->options.recovery_timeout_us / 1000000u), missing[0] ? ": " : "", missing);
}

void flow_tick(struct server *server)
{
    uint64_t now_us = server->now_us;
    uint32_t cursor = 0;
    for (struct request *request; (request = requests_next(server->requests, &cursor));) {
        if (request->kind == REQUEST_JOB)
            jobs_tick(server, request);
        else if (request->kind == REQUEST_DRAIN_STORE)
            drain_store_tick(server, request);
        uint64_t waited_us = now_us - request->waiting_us;
        if (request->state == REQUEST_CANCELLING && waited_us > server->options.hang_timeout_us) {
            LOG_WARNING("request %016llx: its worker did not confirm that it stopped", (unsigned long long)request->id);
            if (request->parking) /* it may still write */
                moves_give_up(server, request->session);
            flow_stopped(server, request);
        } else if (request->state == REQUEST_WAITING) {
            queue_tick(server, request);
        } else if (request->kind == REQUEST_DESCRIBE && request->state == REQUEST_PREPARING) {
            if (waited_us > server->options.hang_timeout_us)
                operate_late(server, request);
        } else if (request->work != 0 && (request->state == REQUEST_PREPARING || request->state == REQUEST_RUNNING)) {
            judge_at_worker(server, request);
        } else if (request->state != REQUEST_DONE && request->state != REQUEST_RUNNING &&
                   request->state != REQUEST_CANCELLING && waited_us > server->options.recovery_timeout_us) {
            waited_too_long(server, request);
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
