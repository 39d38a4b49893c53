/*
 * progress.h - what the working thread lets others know of itself; the I/O thread reports it once a second.
 *
 * Threads    written by the working thread (`value` by pool threads too), read by any. Relaxed order: each is news, none
 *            says anything about other memory.
 */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#define PROGRESS_IMPORTING "importing" /* the phase that says how much */

struct progress {
    _Atomic uint64_t value; /* grows while something is done: per partial, per adopted block, per message */
    _Atomic uint64_t bytes_served;
    _Atomic uint64_t n_requests;
    _Atomic uint64_t bytes_imported; /* rows out of other stores' segments */
    _Atomic uint64_t bytes_resident,
        bytes_local;          /* of the segment: mapped pages, and those on the store's node; placement.c */
    _Atomic uint32_t percent; /* of a long phase; 0: not counted */
    atomic_bool busy;
    _Atomic(const char *) phase; /* a literal */
};

static inline void progress_begin(struct progress *progress, const char *phase)
{
    atomic_store_explicit(&progress->phase, phase, memory_order_relaxed);
    atomic_fetch_add_explicit(&progress->value, 1, memory_order_relaxed);
    atomic_store_explicit(&progress->busy, true, memory_order_relaxed);
}

static inline void progress_end(struct progress *progress)
{
    atomic_fetch_add_explicit(&progress->value, 1, memory_order_relaxed);
    atomic_store_explicit(&progress->busy, false, memory_order_relaxed);
    atomic_store_explicit(&progress->percent, 0, memory_order_relaxed);
    atomic_store_explicit(&progress->phase, "idle", memory_order_relaxed);
}
