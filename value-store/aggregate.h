/*
 * aggregate.h - sums over selected rows: one partial per lane of every item, spread over a pool of threads.
 *
 * Threads    aggregate_run() from the working thread, which lends itself to the pool.
 * Invariant  a partial depends on its lane's runs and its queries only: they are attended to in the order given, from an
 *            empty partial, by one thread. So results are the same bits for any number of threads and stores.
 *            Everything of a request is checked before the first row is read; nothing is read from it twice.
 * Sources    partial softmax and its merge: FlashDecoding; see kernels.h.
 */
#pragma once

#include "common/pool.h"
#include "kernels/kernels.h"
#include "value-store/blocks.h"

struct aggregate;

/* `pool` may be NULL (one thread); `progress` too: bumped for every partial. Both outlive the result. -ENOMEM. */
int aggregate_new(const struct kernels *kernels, struct pool *pool, _Atomic uint64_t *progress,
                  struct aggregate **ret_aggregate);
struct aggregate *aggregate_free(struct aggregate *aggregate); /* accepts NULL, returns NULL */

/* The aggregates of one request; memory of request and reply may be written by the worker meanwhile. */
struct aggregate_call {
    const struct blocks *blocks;
    const uint8_t *request; /* area that item and run offsets refer to */
    uint64_t request_bytes;
    uint8_t *reply;
    uint64_t reply_bytes;
    uint32_t layer;
    uint32_t n_items;
    uint32_t n_runs;
    uint64_t items_offset; /* both tables lie within the request (checked by the caller) */
    uint64_t runs_offset;
};

struct aggregate_result {
    uint64_t n_rows;      /* read */
    uint64_t reply_bytes; /* end of the last result; 0: none */
};

/*
 * Checks all items, then computes them. On an error *ret_item says which item was refused and nothing was computed.
 * -EINVAL  no such layer, KV head or mode, no queries, no runs, scale not finite, runs outside the table or not in
 *          ascending order of (lane, block number), `lanes` not what the runs touch, offsets outside or not aligned
 * -ESTALE  a run's handle is not of this session now;  -ENODATA  a mask names a row that is not there;  -ENOMEM
 */
int aggregate_run(struct aggregate *aggregate, const struct aggregate_call *call, struct aggregate_result *ret_result,
                  uint32_t *ret_item);
