/*
 * operate.c - what operators ask: policies of empty sessions and of later ones, a session in detail, Drain, SetTransport.
 *
 * A Drain outlives its request: new sessions, forks and requests are refused until somebody resumes, also when the one who
 * asked is gone. The transport is a setting of the whole service; SetTransport is answered when every pair has arrived there.
 */
#include <stdio.h>
#include <string.h>

#include "common/log.h"
#include "coordinator/state.h"

/* ---- SetPolicy ---- */

static void policy_set(struct server *server, struct request *request, const char *policy)
{
    Hcattn__PolicySet message = HCATTN__POLICY_SET__INIT;
    message.policy = (char *)(uintptr_t)policy;
    Hcattn__Reply reply = HCATTN__REPLY__INIT;
    reply.reply_case = HCATTN__REPLY__REPLY_POLICY_SET;
    reply.policy_set = &message;
    flow_answer(server, request, &reply);
}

static void change_policy(struct server *server, struct request *request, struct session *session, const char *policy)
{
    (void)sessions_move(session, SESSION_RUNNING);
    session->request = request;
    session->active_us = server->now_us;
    request->session = session;
    (void)requests_move(request, REQUEST_RESERVING, server->now_us);
    snprintf(session->terms.policy, sizeof(session->terms.policy), "%s", policy);
    workers_forget(server, session->id);
    if (orders_open_again(server, session) != 0) {
        session->close_wanted = true;
        session->close_why = "out of memory";
        flow_fail(server, request, HCATTN__ERROR_CODE__INTERNAL, NULL, "out of memory");
    }
}

static void enter_policy(struct server *server, struct request *request)
{
    const char *policy = ((const Hcattn__Request *)request->message)->set_policy->policy;
    struct session *session = sessions_find(server->sessions, request->session_id);
    if (request->session_id == 0) {
        LOG_INFO("policy of sessions that name none: %s (it was %s)", policy, server->policy);
        snprintf(server->policy, sizeof(server->policy), "%s", policy);
        policy_set(server, request, policy);
    } else if (!session) {
        (void)flow_waits_for_table(server, request, request->session_id);
    } else if (session->close_wanted || session->state == SESSION_CLOSING) {
        flow_fail(server, request, HCATTN__ERROR_CODE__NOT_FOUND, NULL, "session %016llx is closed",
                  (unsigned long long)session->id);
    } else if (session->state == SESSION_RUNNING) {
        flow_occupied(server, request, session);
    } else if (session->state == SESSION_READY && session->n_pending == 0 && !session->move) {
        struct numbers numbers = {.n_tokens = sessions_n_tokens(session, server->descriptors)};
        if (strcmp(session->terms.policy, policy) == 0)
            policy_set(server, request, policy);
        else if (numbers.n_tokens > 0)
            flow_fail(server, request, HCATTN__ERROR_CODE__CONFLICT, &numbers,
                      "session %016llx holds %llu tokens: its policy, %s, cannot be changed any more",
                      (unsigned long long)session->id, (unsigned long long)numbers.n_tokens, session->terms.policy);
        else
            change_policy(server, request, session, policy);
    }
}

static void reserving_policy(struct server *server, struct request *request)
{
    struct session *session = request->session;
    if (session->n_pending > 0)
        return;
    if (session->reserve_status == 0) {
        policy_set(server, request, session->terms.policy);
        return;
    }
    session->close_wanted = true;
    session->close_why = "a value-store could not write its record again";
    flow_fail(server, request, HCATTN__ERROR_CODE__INTERNAL, NULL,
              "a value-store could not write the session's record: %s; the session is closed",
              strerror(-session->reserve_status));
}

/* ---- DescribeSession ---- */

void operate_counted(struct server *server, struct request *request, const Hcattn__Work__Counted *counted)
{
    const struct session *session = sessions_find(server->sessions, request->session_id);
    if (!session) { /* closed while the worker was asked */
        (void)flow_waits_for_table(server, request, request->session_id);
        return;
    }
    Hcattn__SessionDescribed message = HCATTN__SESSION_DESCRIBED__INIT;
    Hcattn__SessionStats stats;
    stats_session(server, session, &stats);
    message.stats = &stats;
    message.counts = counted ? counted->counts : NULL;
    message.profile = counted ? counted->profile : NULL;
    message.n_layers = server->model.shape.n_layers;
    message.n_kv_heads = server->model.shape.n_kv_heads;
    Hcattn__Reply reply = HCATTN__REPLY__INIT;
    reply.reply_case = HCATTN__REPLY__REPLY_SESSION_DESCRIBED;
    reply.session_described = &message;
    flow_answer(server, request, &reply);
    stats_free_session(&stats);
}

static void enter_describe(struct server *server, struct request *request)
{
    const struct session *session = sessions_find(server->sessions, request->session_id);
    if (!session) {
        (void)flow_waits_for_table(server, request, request->session_id);
        return;
    }
    struct process *worker = workers_holding(server, session);
    if (!worker || !peers_of(worker)) {
        operate_counted(server, request, NULL);
        return;
    }
    (void)requests_move(request, REQUEST_PREPARING, server->now_us);
    workers_count(server, worker, request);
}

/* ---- Drain ---- */

static void drained(struct server *server, struct request *request)
{
    Hcattn__Drained message = HCATTN__DRAINED__INIT;
    message.n_finished = (uint32_t)(server->n_ended - request->n_before);
    message.n_sessions = sessions_count(server->sessions);
    Hcattn__Reply reply = HCATTN__REPLY__INIT;
    reply.reply_case = HCATTN__REPLY__REPLY_DRAINED;
    reply.drained = &message;
    flow_answer(server, request, &reply);
}

static void enter_drain(struct server *server, struct request *request)
{
    bool resume = ((const Hcattn__Request *)request->message)->drain->resume;
    if (server->draining == resume)
        LOG_INFO("%s", resume ? "takes requests again" : "drains: new sessions and requests are refused");
    server->draining = !resume;
    server->dirty = true;
    request->n_before = server->n_ended;
    if (resume)
        drained(server, request);
    else
        (void)requests_move(request, REQUEST_RESERVING, server->now_us);
}

static void reserving_drain(struct server *server, struct request *request)
{
    uint32_t cursor = 0;
    if (!server->draining) {
        flow_fail(server, request, HCATTN__ERROR_CODE__CONFLICT, NULL, "requests are taken again");
        return;
    }
    for (const struct request *other; (other = requests_next(server->requests, &cursor));)
        if (requests_is_drained(other->kind) && other->state != REQUEST_DONE)
            return;
    drained(server, request);
}

/* ---- SetTransport ---- */

static void enter_transport(struct server *server, struct request *request)
{
    const char *name = ((const Hcattn__Request *)request->message)->set_transport->transport;
    enum server_transport transport =
        strcmp(name, server_transport_names[SERVER_RING]) == 0 ? SERVER_RING : SERVER_ROUTED;
    if (server->transport == SERVER_DIRECT) {
        flow_fail(server, request, HCATTN__ERROR_CODE__NOT_SUPPORTED, NULL,
                  "the service was started with --transport direct, which cannot be changed while it runs");
        return;
    }
    if (server->transport != transport)
        LOG_INFO("transport: %s (it was %s)", name, server_transport_names[server->transport]);
    server->transport = transport;
    (void)requests_move(request, REQUEST_RESERVING, server->now_us);
    rings_follow(server);
}

static void reserving_transport(struct server *server, struct request *request)
{
    const char *name = ((const Hcattn__Request *)request->message)->set_transport->transport;
    char sentence[256];
    if (strcmp(name, server_transport_names[server->transport]) != 0) {
        flow_fail(server, request, HCATTN__ERROR_CODE__CONFLICT, NULL, "the transport was set to %s meanwhile",
                  server_transport_names[server->transport]);
        return;
    }
    if (!rings_settled(server, sentence, sizeof(sentence)))
        return;
    if (rings_failed(server, sentence, sizeof(sentence))) {
        flow_fail(server, request, HCATTN__ERROR_CODE__INTERNAL, NULL, "%s", sentence);
        return;
    }
    Hcattn__TransportSet message = HCATTN__TRANSPORT_SET__INIT;
    message.transport = (char *)(uintptr_t)server_transport_names[server->transport];
    Hcattn__Reply reply = HCATTN__REPLY__INIT;
    reply.reply_case = HCATTN__REPLY__REPLY_TRANSPORT_SET;
    reply.transport_set = &message;
    flow_answer(server, request, &reply);
}

/* ---- by kind ---- */

void operate_enter(struct server *server, struct request *request)
{
    if (request->kind == REQUEST_SET_POLICY)
        enter_policy(server, request);
    else if (request->kind == REQUEST_DESCRIBE)
        enter_describe(server, request);
    else if (request->kind == REQUEST_DRAIN)
        enter_drain(server, request);
    else
        enter_transport(server, request);
}

void operate_reserving(struct server *server, struct request *request)
{
    if (request->kind == REQUEST_SET_POLICY)
        reserving_policy(server, request);
    else if (request->kind == REQUEST_DRAIN)
        reserving_drain(server, request);
    else
        reserving_transport(server, request);
}

void operate_late(struct server *server, struct request *request)
{
    char sentence[256] = "";
    const struct process *worker = registry_find_incarnation(server->registry, PROCESS_WORKER, request->worker);
    if (request->kind == REQUEST_DESCRIBE)
        flow_fail(server, request, HCATTN__ERROR_CODE__UNAVAILABLE, NULL,
                  "gpu-worker %u, which holds the session, did not answer within %g s", worker ? worker->index : 0,
                  (double)server->options.hang_timeout_us / 1e6);
    else if (!rings_settled(server, sentence, sizeof(sentence)))
        flow_fail(server, request, HCATTN__ERROR_CODE__UNAVAILABLE, NULL, "not within %g s: %s",
                  (double)server->options.recovery_timeout_us / 1e6, sentence);
}
