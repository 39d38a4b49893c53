/*
 * request.h - serves what lies in one slot of an exchange: appends, then aggregates, then fetches; fills the reply.
 *
 * Threads    the thread whose turn it is (turn.h); it lends itself to the pool for aggregates, and for fetches of many rows.
 * Trust      the worker maps both areas writable and may write anything at any time: fields are copied once, checked, then
 *            used. The worst it can get is a wrong answer to its own request.
 */
#pragma once

#include "value-store/aggregate.h"
#include "value-store/blocks.h"

struct request_slot {
    uint64_t request; /* id, from the descriptor */
    uint32_t n_bytes; /* of the request, from the descriptor */
    const void *request_area;
    uint32_t request_bytes;
    void *reply_area;
    uint32_t reply_bytes; /* both at least a page (layout_check_exchange) */
};

struct request_result {
    int status;           /* as in the reply header */
    uint32_t entry;       /* likewise */
    uint32_t n_bytes;     /* of the reply */
    uint64_t n_rows_read; /* by aggregates and fetches */
};

/*
 * Always writes a reply header whose `answered` is the slot's request. Statuses: those of blocks_append() and
 * aggregate_run(); fetches: -EINVAL (no such layer or head, no tokens, offset), -ESTALE, -ENODATA; -EINVAL with
 * REPLY_ENTRY_NONE: the request header itself. Appends before a refused entry stay: they are idempotent.
 */
void request_serve(struct blocks *blocks, struct aggregate *aggregate, const struct request_slot *slot,
                   struct request_result *ret_result);
