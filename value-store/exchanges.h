/*
 * exchanges.h - exchange memory of the workers that this store answers, and the rings that were granted to them.
 *
 * Owner      the working thread, not in its turn: whatever removes an exchange or its ring waits for the ring's last request.
 * Trust      a worker may write its exchange at any time: the header is copied once, checked, and never read again.
 */
#pragma once

#include "common/segment.h"
#include "proto/layout.h"
#include "value-store/ring.h"

#define EXCHANGES_MAX 64u

struct exchange {
    uint64_t worker; /* incarnation; 0: free */
    struct segment_mapping mapping;
    struct exchange_header header; /* as it was when it was checked */
    struct ring *ring;             /* NULL: not granted */
    uint64_t served[EXCHANGE_MAX_SLOTS];
};

struct exchanges {
    struct exchange entries[EXCHANGES_MAX];
};

/* Maps what a worker made for (worker, store); replaces what it made before. The descriptor stays the caller's.
 * -EPROTO: header wrong or of another pair; -ENOSPC: too many workers; errors of segment_map(). */
int exchanges_add(struct exchanges *exchanges, uint64_t worker, uint64_t store, int fd);
void exchanges_remove(struct exchanges *exchanges, uint64_t worker); /* unknown: fine */
void exchanges_clear(struct exchanges *exchanges);

/* Starts the worker's ring. Granted already: fine. What lay in the ring when the exchange was mapped is not served.
 * -ENOENT: no such exchange; errors of ring_start(). */
int exchanges_grant(struct exchanges *exchanges, uint64_t worker, struct store *store);
void exchanges_revoke(struct exchanges *exchanges, uint64_t worker); /* unknown or not granted: fine */
void exchanges_revoke_all(struct exchanges *exchanges);

/* NULL: unknown. */
const struct exchange *exchanges_find(const struct exchanges *exchanges, uint64_t worker);

/* slot < header.n_slots */
void *exchanges_request_area(const struct exchange *exchange, uint32_t slot);
void *exchanges_reply_area(const struct exchange *exchange, uint32_t slot);
