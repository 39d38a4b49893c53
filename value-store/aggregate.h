/*
 * aggregate.h - sums over selected rows: one partial per lane of every item, spread over a pool of threads.
 *
 * Threads    aggregate_run() from the thread whose turn it is, which lends itself to the pool.
 * Invariant  a partial depends on its lane's blocks, masks, masses, weights and queries only: one thread computes it, in the
 *            order given (lane_attend). So results are the same bits for any number of threads and stores.
 *            Everything that decides which memory is read or written is checked before the first row is read. Masks are
 *            read a second time when a lane is computed and cut to the rows that were found to be there.
 *            No allocation once a request of the same size was served.
 */
#pragma once

#include "common/pool.h"
#include "kernels/kernels.h"
#include "value-store/blocks.h"

struct aggregate;

/* `pool` may be NULL (one thread); `progress` too: bumped for every partial. Both outlive the result. -ENOMEM. */
int aggregate_new(const struct kernels *kernels, struct pool *pool, _Atomic uint64_t *progress,
                  struct aggregate **ret_aggregate);
struct aggregate *aggregate_free(struct aggregate *aggregate);  /* accepts NULL, returns NULL */
struct pool *aggregate_pool(const struct aggregate *aggregate); /* that it was given */

/* The aggregates of one request; memory of request and reply may be written by the worker meanwhile. */
struct aggregate_call {
    const struct blocks *blocks;
    const uint8_t *request; /* area that items' offsets refer to */
    uint64_t request_bytes;
    uint8_t *reply;
    uint64_t reply_bytes;
    uint32_t layer;
    uint32_t n_items;
    uint32_t n_blocks;
    uint64_t items_offset; /* both tables lie within the request (checked by the caller) */
    uint64_t blocks_offset;
};

struct aggregate_result {
    uint64_t n_rows;      /* bits of the masks */
    uint64_t reply_bytes; /* end of the last result; 0: none */
};

/*
 * Checks all items, then computes them. On an error *ret_item says which item was refused and nothing was computed.
 * -EINVAL  no such layer, KV head or mode, no queries, no blocks, scale not finite, blocks outside the table or not in
 *          ascending order of (lane, block number), `lanes` not what they touch, offsets outside or not aligned, n_weights
 *          not the number of selected rows, masses or weights without references
 * -ESTALE  a handle is not of this session now;  -ENODATA  a mask names a row that is not there, or a mass is given to a
 *          block that has no sums yet;  -ENOMEM
 * Masses, weights, references and queries are data: NaN and infinity come out in the results of their item.
 */
int aggregate_run(struct aggregate *aggregate, const struct aggregate_call *call, struct aggregate_result *ret_result,
                  uint32_t *ret_item);
