/*
 * server.h - the running store: registers with the coordinator, carries out its orders, serves workers' requests.
 *
 * Threads    everything here is one working thread (the one that called server_new()); beside it the I/O thread of link.h,
 *            a thread for every granted ring, ZeroMQ's own, and the pool. Its turns and the rings' follow each other.
 * Life       a coordinator that hangs up is not an end: the data socket is closed, so that nothing sent on the old route is
 *            ever served, and the store registers again with a new route and the segment it holds.
 */
#pragma once

#include "common/exit_status.h"
#include "common/options.h"
#include "value-store/store.h"

struct server;

struct server_config {
    struct store_config store;
    char runtime_dir[OPTIONS_PATH_SIZE];
    uint64_t reconnect_timeout_ms; /* how long a coordinator may be away */
};

enum server_status {
    SERVER_OK = EXIT_STATUS_OK,
    SERVER_FAILED = EXIT_STATUS_FAILED,
    SERVER_REFUSED = EXIT_STATUS_REFUSED,
    SERVER_LEFT = EXIT_STATUS_LEFT,
};

/* Binds the calling thread and starts the others. Logs what was achieved, or what went wrong. Errors of store_open(). */
int server_new(const struct server_config *config, struct server **ret_server);
struct server *server_free(struct server *server); /* accepts NULL, returns NULL */

/* Until a signal can be read from signal_fd (0), no coordinator is to be had (1), it refuses this store (2), or it
 * has no use for it any more (3). */
enum server_status server_run(struct server *server, int signal_fd);
