/*
 * server.h - the coordinator: one thread, one poll loop over clients, workers, data plane, peers and timers.
 *
 * Owner      main.c. Never touches model data and never waits for one peer: every send is tried, and what does not go out
 *            now is kept in a bounded queue or given up by rule.
 */
#pragma once

#include <stdint.h>

#define SERVER_ERROR_BYTES      512
#define SERVER_MAX_STORES       64u
#define SERVER_MAX_EXACT_TOKENS (1u << 20)
#define SERVER_IDLE_S           600u /* a session without a request, unless its opener says otherwise */

/* How requests travel to the stores. Direct is a start option of the workers; the other two change while everything runs. */
enum server_transport { SERVER_RING, SERVER_ROUTED, SERVER_DIRECT };
extern const char *const server_transport_names[]; /* by enum, closed by NULL */

struct server_options {
    const char *runtime_dir;
    const char *client_endpoint; /* in addition to client.sock; NULL: none */
    const char *client_secret;   /* file of its secret key; NULL: clients there need no key */
    const char *client_keys;     /* file of their public keys */
    const char *policy;          /* of sessions that name none; policy_parse() takes it */
    enum server_transport transport;
    uint64_t incarnation;
    uint32_t n_stores;  /* expected */
    uint32_t n_workers; /* expected, for the wording; one is enough to serve */
    uint32_t max_sessions, max_requests;
    uint32_t max_queued; /* requests that may wait for room; 0: what does not fit now is refused */
    uint32_t default_max_tokens;
    uint32_t exact_tokens; /* of sessions that name none */
    uint64_t hang_timeout_us, recovery_timeout_us, queue_timeout_us;
};

struct server;

/* Binds all sockets. The options' strings must outlive the server. On failure a sentence in `error`: -EADDRINUSE when a
 * live coordinator has the sockets. */
int server_new(const struct server_options *options, char error[SERVER_ERROR_BYTES], struct server **ret_server);
struct server *server_free(struct server *server); /* accepts NULL, returns NULL */

/* What was achieved, for the start line. Returns text. */
const char *server_describe(const struct server *server, char *text, uint32_t text_size);

/* Serves until signal_fd (of signals_open()) brings SIGTERM or SIGINT; then open requests end with UNAVAILABLE. 0 or the
 * error of poll. */
int server_run(struct server *server, int signal_fd);
