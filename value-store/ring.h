/*
 * ring.h - a thread that serves the posts of one worker's ring, beside the descriptors that come through the coordinator.
 *
 * Owner      exchanges.h: an exchange has at most one ring, started by a grant and stopped before the exchange is unmapped.
 * Threads    ring_start() and ring_stop(): the working thread, not in its turn. The ring's own thread takes the turn for every
 *            post; it is bound as the thread that started it.
 * Trust      the ring lies in memory that the worker writes: an id is read once, `n_bytes` once, and both are checked like a
 *            descriptor's. A worker that rings for nothing costs cpu time only; one that never rings is looked at when its
 *            bell's wait ends.
 */
#pragma once

#include "proto/layout.h"
#include "value-store/store.h"

#define RING_LOOK_US UINT64_C(1000000) /* posts are looked for this often without a ring */

struct ring;

/* Where a ring's posts lie and what was served of them; outlives the ring. */
struct ring_place {
    void *exchange;                       /* mapping */
    const struct exchange_header *header; /* checked copy */
    uint64_t *served; /* [EXCHANGE_MAX_SLOTS]: id of the last post served, kept from one grant to the next */
};

/* The store has a segment until the ring is stopped. -ENOMEM, -EAGAIN. */
int ring_start(struct store *store, const struct ring_place *place, struct ring **ret_ring);

/* What was posted before is served first. Accepts NULL, returns NULL. */
struct ring *ring_stop(struct ring *ring);
