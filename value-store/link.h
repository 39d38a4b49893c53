/*
 * link.h - the socket to the coordinator as two threads use it, and the I/O thread that reports health on it.
 *
 * Owner      the working thread: it attaches and detaches, sends answers, receives. The I/O thread sends a heartbeat a
 *            second, also while the working thread is deep in a request; a lock keeps the two from sending at once.
 * Invariant  the I/O thread never waits for the coordinator: a heartbeat that finds no room is left out.
 */
#pragma once

#include "proto/control.pb-c.h"
#include "value-store/progress.h"

#include <stddef.h>

#define LINK_MAX_FDS 2

struct link;

/* Starts the I/O thread. `progress` outlives the link. -ENOMEM, -EAGAIN. */
int link_open(struct progress *progress, struct link **ret_link);
struct link *link_close(struct link *link); /* accepts NULL, returns NULL */

void link_attach(struct link *link, int fd); /* a connected socket, now the link's */
void link_detach(struct link *link);         /* closes it; not attached: fine */
void link_registered(struct link *link);     /* heartbeats from now on, until it is detached */
int link_fd(const struct link *link);        /* -1: not attached; working thread only */

/* Waits for room, 10 s at most. -EPIPE: the coordinator is gone; -ETIMEDOUT: it does not read; -ENOTCONN; -EMSGSIZE. */
int link_send(struct link *link, const Hcattn__Control__Control *message, int fd);

/* Never waits; as peer_try_receive(), -ENOTCONN. */
int link_receive(struct link *link, void *buffer, size_t size, size_t *ret_n_bytes, int ret_fds[LINK_MAX_FDS],
                 size_t *ret_n_fds);
