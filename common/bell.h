/*
 * bell.h - a doorbell in shared memory: one side rings, the other sleeps until it rings.
 *
 * Owner      lies in memory that two processes map; any of them may ring or wait.
 * Threads    any number of ringers; one waiter at a time is what it is made for, more are woken together.
 * Trust      a peer that writes nonsense can only make a wait end early or last until its deadline.
 */
#pragma once

#include <assert.h>
#include <stdatomic.h>
#include <stdint.h>

struct bell {
    _Atomic uint32_t count;     /* futex word; grows with every ring */
    _Atomic uint32_t n_waiting; /* a ring without a waiter needs no system call */
    uint8_t padding[56];        /* a cache line of its own */
};
static_assert(sizeof(struct bell) == 64, "one cache line");

/* Everything written before is seen by a waiter that sees the new count. */
void bell_ring(struct bell *bell);

/* What to give bell_wait(): read before looking for work, so that a ring in between is not missed. */
static inline uint32_t bell_count(struct bell *bell)
{
    return atomic_load_explicit(&bell->count, memory_order_acquire);
}

/*
 * Returns 0 once the count is not `seen` any more (spurious wake-ups are possible), -ETIMEDOUT at the deadline
 * (clock.h; CLOCK_NEVER waits for ever). Looks for up to spin_us before it sleeps: for machines with free cores.
 */
int bell_wait(struct bell *bell, uint32_t seen, uint64_t deadline_us, uint32_t spin_us);
