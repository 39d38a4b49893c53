/* flow_open.c - sessions: opened, found open already, closed. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "common/log.h"
#include "common/random.h"
#include "coordinator/state.h"

static void opened(struct server *server, struct request *request, const struct session *session)
{
    Hcattn__SessionOpened message = HCATTN__SESSION_OPENED__INIT;
    message.session = session->id;
    message.policy = (char *)(uintptr_t)session->terms.policy;
    message.n_ctx = server->model.n_ctx;
    message.exact_tokens = session->terms.exact_tokens;
    Hcattn__Reply reply = HCATTN__REPLY__INIT;
    reply.reply_case = HCATTN__REPLY__REPLY_SESSION_OPENED;
    reply.session_opened = &message;
    flow_answer(server, request, &reply);
}

static void open_new(struct server *server, struct request *request)
{
    const Hcattn__OpenSession *open = ((const Hcattn__Request *)request->message)->open_session;
    struct session *session;
    if (!server->table_complete || !stores_all_ready(server) || !server->model.known)
        return; /* it may be open already, in a store that is still to come */
    if (request->session_id == 0)
        request->session_id = random_u64();
    int result = sessions_add(server->sessions, request->session_id, SESSION_OPENING, &session);
    if (result != 0) {
        flow_fail(server, request, HCATTN__ERROR_CODE__BUSY, NULL, "%u sessions are open; at most %u",
                  sessions_count(server->sessions), server->options.max_sessions);
        return;
    }
    session->terms =
        (struct session_terms){.model = {server->model.hash[0], server->model.hash[1]},
                               .opened_unix_s = (uint64_t)time(NULL),
                               .exact_tokens = open->exact ? open->exact->n_tokens : server->options.exact_tokens,
                               .flags = open->ephemeral ? SESSION_EPHEMERAL : 0,
                               .idle_timeout_s = open->idle_timeout_s};
    snprintf(session->terms.policy, sizeof(session->terms.policy), "%s",
             open->policy[0] ? open->policy : server->policy);
    (void)placement_lanes(server->placement, membership_targets(server), session->terms.lane_store);
    session->active_us = server->now_us;
    session->request = request;
    request->session = session;
    (void)workers_bind(server, session); /* later, where no worker is ready yet */
    (void)requests_move(request, REQUEST_RESERVING, server->now_us);
    if (orders_open(server, session) != 0)
        flow_fail(server, request, HCATTN__ERROR_CODE__INTERNAL, NULL, "out of memory");
}

void flow_enter_open(struct server *server, struct request *request)
{
    const Hcattn__OpenSession *open = ((const Hcattn__Request *)request->message)->open_session;
    struct session *session = sessions_find(server->sessions, request->session_id);
    if (!session) {
        open_new(server, request);
        return;
    }
    if ((session->state != SESSION_READY && session->state != SESSION_RUNNING) || session->close_wanted)
        return; /* being opened, found or closed */
    /* What it does not name - the server's defaults may have changed - agrees with anything. */
    if ((open->policy[0] && strcmp(session->terms.policy, open->policy) != 0) ||
        (open->exact && session->terms.exact_tokens != open->exact->n_tokens)) {
        flow_fail(server, request, HCATTN__ERROR_CODE__CONFLICT, NULL,
                  "session %016llx is open with policy %s and %u exact tokens", (unsigned long long)session->id,
                  session->terms.policy, session->terms.exact_tokens);
        return;
    }
    session->active_us = server->now_us;
    opened(server, request, session);
}

void flow_enter_close(struct server *server, struct request *request)
{
    struct session *session = sessions_find(server->sessions, request->session_id);
    if (!session) {
        (void)flow_waits_for_table(server, request, request->session_id);
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
        flow_answer(server, request, &reply);
    }
}

void flow_reserving_open(struct server *server, struct request *request)
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
    LOG_INFO("session %016llx opened: policy %s, %u exact tokens%s", (unsigned long long)session->id,
             session->terms.policy, session->terms.exact_tokens,
             session->terms.flags & SESSION_EPHEMERAL ? ", ephemeral" : "");
    opened(server, request, session);
}
