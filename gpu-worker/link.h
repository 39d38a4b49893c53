/*
 * link.h - the engine's line to the stores: descriptors through the coordinator, and what interrupts a wait.
 *
 * Owner      the engine thread. The socket is made and used by it alone; other threads wake it through an eventfd.
 */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "common/bell.h"
#include "common/socket.h"
#include "proto/descriptor.h"

struct link {
    struct socket_context *context; /* not owned */
    struct socket *socket;          /* NULL: no coordinator */
    uint64_t route;                 /* our routing id */
    uint64_t worker;                /* incarnation */
    uint64_t next_request;
    int wake_fd;                  /* eventfd; readable: control events wait */
    _Atomic bool *has_control;    /* the same without a system call */
    uint32_t spin_us;             /* before sleeping on a store's bell */
    uint64_t request_timeout_us;  /* for one answer */
    uint64_t recovery_timeout_us; /* for a store to come back */
    int (*control)(void *engine); /* handles control events; -ECONNRESET: the coordinator is lost */
    void *engine;
};

int link_open(struct link *link, uint64_t route, const char *endpoint);
void link_close(struct link *link);
/* -EAGAIN: no room now; -ENOTCONN: no coordinator. */
int link_send(struct link *link, uint64_t to, uint64_t request, uint32_t slot, uint32_t n_bytes);
/* Waits for a descriptor, control events or the deadline. 1: *ret_descriptor; 0: woken or time is up; -ECONNRESET. */
int link_wait(struct link *link, uint64_t deadline_us, struct descriptor *ret_descriptor);

/*
 * The same for one who waits for `answered` (in a reply) to become `request`, by way of a bell: returns 0 as soon as it may
 * have, at least every few milliseconds.
 */
int link_wait_bell(struct link *link, struct bell *bell, const _Atomic uint64_t *answered, uint64_t request,
                   uint64_t deadline_us, struct descriptor *ret_descriptor);
