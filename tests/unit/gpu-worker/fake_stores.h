/*
 * fake_stores.h - stores for tests of who fetches from them: segments with one session's rows, and a thread each that serves the ring.
 *
 * They serve fetches alone, with every offset checked, and misbehave on purpose: are slow, do not answer, or end, upon which
 * control() of the link has another life of the store take over.
 */
#pragma once

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "gpu-worker/link.h"
#include "gpu-worker/run.h"
#include "gpu-worker/stores.h"
#include "kernels/kernels.h"

#define FAKE_STORES_SESSION 0x77u

struct fake_stores;

struct fake_store {
    struct fake_stores *all;
    uint32_t number;
    struct segment_mapping segment;
    int segment_fd;
    struct segment_mapping exchange; /* its own mapping */
    pthread_t thread;
    bool has_thread;
    uint64_t served[STORES_N_SLOTS]; /* the last request of each slot */
    _Atomic bool quit, is_dead;
    _Atomic uint32_t n_served;
    /* set while nothing is asked */
    _Atomic uint32_t n_unanswered; /* the first so many requests are not answered */
    _Atomic uint32_t dies_after;   /* so many answers; 0: never */
    _Atomic uint32_t slow_us;      /* before each answer */
};

struct fake_stores {
    struct row_shape shape;
    struct stores stores;
    struct link link;
    _Atomic bool has_control;
    uint32_t n_stores, n_blocks; /* of the session, all of them full */
    uint32_t n_lives;            /* of all stores */
    struct fake_store *all;
    struct run_request request; /* of the session */
};

/* n_stores with the rows of n_blocks of the session, lanes in turn; the exchanges' areas have so many bytes. */
void fake_stores_start(struct fake_stores *fakes, const struct row_shape *shape, uint32_t n_stores, uint32_t n_blocks,
                       uint32_t request_bytes, uint32_t reply_bytes, const struct stores_device *device);
void fake_stores_stop(struct fake_stores *fakes);
/* Row of a token [K | V], in its segment. */
const void *fake_stores_row(const struct fake_stores *fakes, uint32_t position, uint32_t layer, uint32_t kv_head);
/* Slots of all stores in a state. */
uint32_t fake_stores_n_slots(const struct fake_stores *fakes, enum slot_state state);
