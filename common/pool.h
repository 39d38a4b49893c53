/*
 * pool.h - one pool of threads: a call is split over items, the caller works too.
 *
 * Owner      whoever made it. Threads: pool_run() and pool_run_grouped() from one thread at a time.
 * Groups     threads may be divided into groups, for example those of a NUMA node: of a grouped call each group has items
 *            of its own, which no other thread runs. Thread 0, the caller, is in a group like all others.
 */
#pragma once

#include <stdint.h>

struct pool;

/* n_threads counts the caller: 1 starts none. `setup` (optional) runs first in every started thread. -ENOMEM, -EAGAIN. */
int pool_new(uint32_t n_threads, void (*setup)(void *context, uint32_t thread), void *context, struct pool **ret_pool);
/* The same in n_groups groups: thread t is in group_of_thread[t] (copied). -EINVAL also: a group without a thread. */
int pool_new_grouped(uint32_t n_threads, const uint32_t *group_of_thread, uint32_t n_groups,
                     void (*setup)(void *context, uint32_t thread), void *context, struct pool **ret_pool);
struct pool *pool_free(struct pool *pool);        /* accepts NULL, returns NULL */
uint32_t pool_n_threads(const struct pool *pool); /* 1 for NULL */
uint32_t pool_n_groups(const struct pool *pool);  /* 1 for NULL and for pool_new() */
/*
 * How long a thread looks for the next call, and the caller for its last thread, before it sleeps; 0 at first. Meant to bridge
 * the moments between the products of one layer, not a wait for another process. Before the first pool_run().
 */
void pool_set_spin(struct pool *pool, uint32_t spin_us);

/* Calls run(context, item, thread) once for every item in [0, n_items), thread in [0, n_threads); returns when all are done.
 * A NULL pool runs all items in the calling thread. Threads wait by futex between calls, after a look of spin_us. */
void pool_run(struct pool *pool, uint32_t n_items, void (*run)(void *context, uint32_t item, uint32_t thread),
              void *context);

/* Calls run() for n_items[g] items of every group g < pool_n_groups(), from threads of that group alone. Items are numbered
 * through: those of group 0, those of group 1, ... */
void pool_run_grouped(struct pool *pool, const uint32_t *n_items,
                      void (*run)(void *context, uint32_t item, uint32_t thread), void *context);
