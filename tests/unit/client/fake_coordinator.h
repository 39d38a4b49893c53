/*
 * fake_coordinator.h - a coordinator that does as a test says: a ROUTER in a thread, with incarnations and a list of running
 * requests like the real one's.
 *
 * Threads    the handler runs in the fake's thread; what it shares with the test is read after fake_coordinator_stop(),
 *            or is atomic.
 */
#pragma once

#include "common/socket.h"
#include "proto/hcattn.pb-c.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

enum fake_coordinator_step {
    FAKE_KNOWN,   /* the request is listed as running until its last reply */
    FAKE_LOST,    /* it never arrived */
    FAKE_RESTART, /* the coordinator dies and comes back as another one */
};

struct fake_coordinator {
    /* by the test, before the start */
    char endpoint[160];
    enum fake_coordinator_step (*handle)(struct fake_coordinator *fake, const Hcattn__Request *request);
    void *context;
    bool not_ready; /* from the start */
    bool not_ready_after_restart;

    /* for the handler */
    uint64_t incarnation;
    uint64_t n_restarts;
    bool ready;
    uint64_t route; /* of the request at hand */
    uint64_t routes[64];
    size_t n_routes; /* different ones that were ever seen */
    _Atomic uint64_t n_health;

    struct socket_context *sockets;
    struct socket *socket;
    uint64_t running[16];
    size_t n_running;
    pthread_t thread;
    _Atomic bool stop;
};

void fake_coordinator_start(struct fake_coordinator *fake);
void fake_coordinator_stop(struct fake_coordinator *fake);

/* For the handler: to the client whose request is at hand. */
void fake_coordinator_reply(struct fake_coordinator *fake, const Hcattn__Reply *reply);
void fake_coordinator_bytes(struct fake_coordinator *fake, const void *bytes, size_t n_bytes);

/* Shorthands. */
void fake_coordinator_error(struct fake_coordinator *fake, uint64_t request, Hcattn__ErrorCode code,
                            const char *sentence);
void fake_coordinator_accepted(struct fake_coordinator *fake, uint64_t request, uint64_t at, uint32_t *ids, size_t n);
void fake_coordinator_generated(struct fake_coordinator *fake, uint64_t request, uint32_t first, uint32_t *ids,
                                size_t n, const char *text, bool logprobs);
void fake_coordinator_done(struct fake_coordinator *fake, uint64_t request, uint32_t n_generated, const char *text,
                           uint64_t n_tokens);
