/*
 * hosts_route.c - see hosts.h: which host a call goes to.
 *
 * Invariant  work on a session is never sent to a second host. What opens a session is, when the first was silent.
 */
#include "client/call.h"
#include "client/hosts.h"
#include "common/clock.h"
#include "common/random.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* ---- what a call is about ---- */

enum route {
    ROUTE_ONE,     /* a host as a whole */
    ROUTE_ANY,     /* what every host can answer */
    ROUTE_SESSION, /* the host of a session */
    ROUTE_NEW,     /* where a session is to be */
};

static enum route route_of(const Hcattn__Request *request, uint64_t *ret_session)
{
    uint64_t session = 0;
    enum route route = ROUTE_SESSION;
    switch (request->request_case) {
    case HCATTN__REQUEST__REQUEST_OPEN_SESSION:
        session = request->open_session->session;
        route = ROUTE_NEW;
        break;
    case HCATTN__REQUEST__REQUEST_CLOSE_SESSION:
        session = request->close_session->session;
        break;
    case HCATTN__REQUEST__REQUEST_FORK:
        session = request->fork->session;
        break;
    case HCATTN__REQUEST__REQUEST_APPEND:
        session = request->append->session;
        break;
    case HCATTN__REQUEST__REQUEST_GENERATE:
        session = request->generate->session;
        break;
    case HCATTN__REQUEST__REQUEST_SCORE:
        session = request->score->session;
        break;
    case HCATTN__REQUEST__REQUEST_DESCRIBE_SESSION:
        session = request->describe_session->session;
        break;
    case HCATTN__REQUEST__REQUEST_SET_POLICY:
        session = request->set_policy->session;
        route = session ? ROUTE_SESSION : ROUTE_ONE;
        break;
    case HCATTN__REQUEST__REQUEST_TOKENIZE:
    case HCATTN__REQUEST__REQUEST_DETOKENIZE:
    case HCATTN__REQUEST__REQUEST_HEALTH:
    case HCATTN__REQUEST__REQUEST_STATS:
    case HCATTN__REQUEST__REQUEST_RUN_JOB:
        route = ROUTE_ANY;
        break;
    default:
        route = ROUTE_ONE;
    }
    *ret_session = session;
    return route;
}

/* A host of another model or version than the sessions of this client have. */
static bool is_other(const struct hosts *hosts, const struct host *host)
{
    return hosts->identity[0] && host->identity[0] && strcmp(hosts->identity, host->identity) != 0;
}

static int nobody_answers(struct hosts *hosts, struct hcattn_error *error)
{
    struct hcattn_error first;
    hosts_no_answer(&hosts->all[0], &first);
    return call_fail(error, HCATTN_UNAVAILABLE, "none of %zu hosts answers; the first: %.400s", hosts->n,
                     first.sentence);
}

/* ---- choosing ---- */

/* The better one of two for a new session; equal ones are chosen from by chance: other clients see the same numbers. */
static bool is_better(const struct host_look *look, const struct host_look *than, unsigned n_equal)
{
    if (look->free_bytes != than->free_bytes)
        return look->free_bytes > than->free_bytes;
    if (look->n_sessions != than->n_sessions)
        return look->n_sessions < than->n_sessions;
    return random_u64() % (n_equal + 1) == 0;
}

static bool is_equal(const struct host_look *look, const struct host_look *other)
{
    return look->free_bytes == other->free_bytes && look->n_sessions == other->n_sessions;
}

/* Among those that hosts_look() has heard of and that were not tried. */
static int choose(struct hosts *hosts, const bool *tried, size_t *ret_host, struct hcattn_error *error)
{
    size_t best = SIZE_MAX, waiting = SIZE_MAX, draining = SIZE_MAX, other = SIZE_MAX;
    unsigned n_equal = 0;
    for (size_t i = 0; i < hosts->n; i++) {
        const struct host *host = &hosts->all[i];
        const struct host_look *look = &host->look;
        if (tried[i] || !hosts_told(host))
            continue;
        if (look->has_session) {
            *ret_host = i; /* it knows what to say of it */
            return 0;
        }
        if (is_other(hosts, host)) {
            other = other == SIZE_MAX ? i : other;
        } else if (look->draining) {
            draining = draining == SIZE_MAX ? i : draining;
        } else if (!look->ready) {
            waiting = waiting == SIZE_MAX ? i : waiting;
        } else {
            n_equal = best != SIZE_MAX && is_equal(look, &hosts->all[best].look) ? n_equal + 1 : 0;
            if (best == SIZE_MAX || is_better(look, &hosts->all[best].look, n_equal))
                best = i;
        }
    }
    if (best == SIZE_MAX)
        best = waiting != SIZE_MAX ? waiting : draining; /* which says itself what it waits for */
    if (best == SIZE_MAX && other != SIZE_MAX)
        return call_fail(error, HCATTN_UNAVAILABLE, "no host with %.120s answers; %.120s has %.120s", hosts->identity,
                         hosts->all[other].endpoint, hosts->all[other].identity);
    if (best == SIZE_MAX)
        return nobody_answers(hosts, error);
    *ret_host = best;
    return 0;
}

/* One that was heard of before, or else one that answers now; the first in the list that can. */
static int choose_any(struct hcattn *client, const bool *tried, uint64_t deadline_us, size_t *ret_host,
                      struct hcattn_error *error)
{
    struct hosts *hosts = &client->hosts;
    for (size_t i = 0; i < hosts->n; i++) {
        const struct host *host = &hosts->all[i];
        if (!tried[i] && host->coordinator && host->ready && !hosts_left_alone(host) && !is_other(hosts, host)) {
            *ret_host = i;
            return 0;
        }
    }
    int result = hosts_look(client, 0, false, deadline_us, error);
    if (result < 0)
        return result;
    size_t waiting = SIZE_MAX;
    for (size_t i = 0; i < hosts->n; i++) {
        const struct host *host = &hosts->all[i];
        if (tried[i] || !hosts_told(host) || is_other(hosts, host))
            continue;
        if (host->look.ready) {
            *ret_host = i;
            return 0;
        }
        waiting = waiting == SIZE_MAX ? i : waiting;
    }
    if (waiting == SIZE_MAX)
        return nobody_answers(hosts, error);
    *ret_host = waiting;
    return 0;
}

static int find_session(struct hcattn *client, uint64_t session, uint64_t deadline_us, size_t *ret_host,
                        struct hcattn_error *error)
{
    struct hosts *hosts = &client->hosts;
    if (hosts_find(hosts, session, ret_host) == 0)
        return 0;
    int result = hosts_look(client, session, true, deadline_us, error);
    if (result < 0)
        return result;
    struct host *unsure = NULL;
    for (size_t i = 0; i < hosts->n; i++) {
        struct host *host = &hosts->all[i];
        if (hosts_told(host) && host->look.has_session) {
            hosts_remember(hosts, session, i);
            *ret_host = i;
            return 0;
        }
        if (!unsure && !(hosts_told(host) && host->look.ready))
            unsure = host;
    }
    if (!unsure)
        return call_fail(error, HCATTN_NOT_FOUND, "session %016" PRIx64 " is on none of the %zu hosts", session,
                         hosts->n);
    return call_fail(error, HCATTN_UNAVAILABLE, "session %016" PRIx64 " is on no host that %s; %s %s", session,
                     hosts_told(unsure) ? "is ready" : "answers", unsure->endpoint,
                     hosts_told(unsure) ? "is not" : "does not");
}

/* ---- running ---- */

/* What is wanted of a host must have come over by now, or it is given up for a while. */
static int run_at(struct hcattn *client, struct call *call, size_t index, uint64_t patience_us, uint64_t deadline_us,
                  enum call_line *ret_line, struct hcattn_error *error)
{
    struct host *host = &client->hosts.all[index];
    int result = call_on(client, host, call, patience_us, deadline_us, ret_line, error);
    call->host = index;
    if (*ret_line != CALL_LINE_GOOD)
        hosts_lose(&client->hosts, host);
    return result;
}

static int run_any(struct hcattn *client, struct call *call, uint64_t deadline_us, struct hcattn_error *error)
{
    bool tried[HOSTS_MAX] = {false};
    for (;;) {
        size_t index = 0;
        enum call_line line;
        int result = choose_any(client, tried, deadline_us, &index, error);
        if (!result)
            result = run_at(client, call, index, client->connect_timeout_us, deadline_us, &line, error);
        else
            line = CALL_LINE_GOOD;
        if (line != CALL_LINE_SILENT)
            return result;
        tried[index] = true;
    }
}

static int run_new(struct hcattn *client, struct call *call, uint64_t session, uint64_t deadline_us,
                   struct hcattn_error *error)
{
    bool tried[HOSTS_MAX] = {false};
    for (;;) {
        size_t index = 0;
        enum call_line line = CALL_LINE_GOOD;
        int result = hosts_look(client, session, false, deadline_us, error);
        if (!result)
            result = choose(&client->hosts, tried, &index, error);
        if (!result)
            result = run_at(client, call, index, client->connect_timeout_us, deadline_us, &line, error);
        if (!result)
            hosts_remember(&client->hosts, session, index);
        if (line != CALL_LINE_SILENT)
            return result;
        tried[index] = true;
    }
}

static int run_session(struct hcattn *client, struct call *call, uint64_t session, uint64_t deadline_us,
                       struct hcattn_error *error)
{
    struct hosts *hosts = &client->hosts;
    size_t index = 0;
    int result = find_session(client, session, deadline_us, &index, error);
    if (result < 0)
        return result;
    const struct host *host = &hosts->all[index];
    if (host->lost && hosts_left_alone(host))
        return call_fail(error, HCATTN_UNAVAILABLE,
                         "the host of session %016" PRIx64 ", %s, does not answer; it is tried again in %llu ms",
                         session, host->endpoint, (unsigned long long)clock_remaining_us(host->retry_us) / 1000);
    bool known = host->coordinator && !host->lost;
    enum call_line line;
    result = run_at(client, call, index, known ? client->lost_timeout_us : client->connect_timeout_us, deadline_us,
                    &line, error);
    bool closes = call->request.request_case == HCATTN__REQUEST__REQUEST_CLOSE_SESSION;
    if (result == -ENOENT || (!result && closes))
        hosts_forget(hosts, session);
    else if (!result && call->request.request_case == HCATTN__REQUEST__REQUEST_FORK)
        hosts_remember(hosts, call->request.fork->new_session, index);
    return result;
}

int hosts_run(struct hcattn *client, struct call *call, struct hcattn_error *error)
{
    struct hosts *hosts = &client->hosts;
    uint64_t deadline_us = call->timeout_ms ? clock_deadline_us((uint64_t)call->timeout_ms * 1000) : CLOCK_NEVER;
    if (hosts->n == 1) {
        uint64_t patience_us = hosts->all[0].coordinator ? client->lost_timeout_us : client->connect_timeout_us;
        enum call_line line;
        return run_at(client, call, 0, patience_us, deadline_us, &line, error);
    }
    uint64_t session = 0;
    switch (route_of(&call->request, &session)) {
    case ROUTE_ANY:
        return run_any(client, call, deadline_us, error);
    case ROUTE_NEW:
        return run_new(client, call, session, deadline_us, error);
    case ROUTE_SESSION:
        return run_session(client, call, session, deadline_us, error);
    case ROUTE_ONE:
        break;
    }
    return call_fail(error, HCATTN_INVALID_ARGUMENT, "this is about one host, and %zu are given: name one of them",
                     hosts->n);
}
