/*
 * fetches.h - rows back from the stores: several requests at a time, taken in the order in which they are listed.
 *
 * A fetch asks one store for rows of a session: consecutive layers, all KV heads, some blocks. It is sent by ring or as a
 * descriptor, and again when its store did not answer in time or came back as another life of it. A few are out at a time for each
 * store, so that stores copy rows while others are read.
 *
 * Owner      who lists them: a step, or the engine while no step runs. Threads: the engine thread.
 * Invariant  every slot that was taken is free or quarantined after fetches_end().
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "gpu-worker/call.h"
#include "gpu-worker/run.h"

/* Of a store's slots: what is left is for the calls of a step. */
enum { FETCHES_PER_STORE = 3 };

struct fetch {
    /* what is asked for */
    const struct run *run;
    uint32_t first_layer, n_layers;
    const uint32_t *blocks; /* numbers, all of them in the call's store */
    uint32_t n_blocks;
    uint32_t n_tokens; /* of all blocks, whole ones but the last */
    struct call call;
    bool is_freed;
};

struct fetches {
    struct stores *stores;
    struct link *link;
    struct fetch *all;
    uint32_t n;
    uint32_t n_taken;    /* those before it were given by fetches_next() */
    uint32_t n_freed;    /* those before it are all freed */
    uint64_t give_up_us; /* since the next one is waited for; 0: it is not */
    /* Answers to requests that are no fetches; NULL: nobody waits for any. */
    void (*other)(void *context, const struct descriptor *descriptor);
    void *context;
};

/* Most whole blocks of n_layers that one fetch can bring. */
uint32_t fetches_most_blocks(const struct stores *stores, uint32_t n_layers);

/* all [n]: what is asked for, call.store, and zeroes. The rest of `fetches`, if it is wanted, is set behind. */
void fetches_begin(struct fetches *fetches, struct stores *stores, struct link *link, struct fetch *all, uint32_t n);
/*
 * 1: the next in order is answered: its rows stay until fetches_free(), or the next call (in which a store's exchange may go).
 * 0: not yet, after some waiting: is it still wanted? -ETIMEDOUT: its store did not come back; -ECONNRESET; others as link_send().
 */
int fetches_next(struct fetches *fetches, struct fetch **ret_fetch);
/* Of an answered fetch: rows of (first layer, KV head 0), a token after the other; those of the next KV head, and after the last
 * those of the next layer, come fetches_head_bytes() behind. */
const uint8_t *fetches_rows(const struct fetches *fetches, const struct fetch *fetch);
size_t fetches_head_bytes(const struct fetches *fetches, const struct fetch *fetch);
/* Its rows have been read. */
void fetches_free(struct fetches *fetches, struct fetch *fetch);
/* Gives back all slots; those of fetches without an answer are quarantined. */
void fetches_end(struct fetches *fetches);
