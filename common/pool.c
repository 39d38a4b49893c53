/*
 * pool.c - a pool of threads without locks on the way of an item.
 *
 * One 64-bit ticket holds (round, items left to take). Taking an item is a compare-and-swap of the whole ticket, so it can
 * only succeed while the round it was read in still has items: the fields of the round (run, context, end) that were
 * read after the ticket are then the right ones, and a thread that wakes late cannot take an item of a round it has not
 * seen. There is a ticket for items that every thread may take and, with groups, one for each group: a round fills either
 * the first or the others, and all are empty when it ends. Threads sleep on `round`, the caller on `unfinished`; both may
 * look for a moment first (pool_set_spin()), since a thread that sleeps takes longer to come back than a small product
 * takes.
 */
#include "common/pool.h"

#include "common/clock.h"
#include "common/signals.h"

#include <assert.h>
#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef void pool_function(void *context, uint32_t item, uint32_t thread);

struct pool_thread {
    struct pool *pool;
    pthread_t handle;
    uint32_t index;
};

/* Items that some threads may take; a cache line each. */
struct pool_queue {
    _Alignas(64) _Atomic uint64_t ticket; /* round << 32 | items left to take */
    _Atomic uint32_t end;                 /* number after the last item */
};

struct pool {
    uint32_t n_threads; /* the caller included */
    uint32_t n_groups;
    uint32_t *groups;          /* [n_threads] */
    struct pool_queue *queues; /* for all threads; then, with several groups, one for each */
    uint32_t n_started;
    void (*setup)(void *context, uint32_t thread);
    void *setup_context;
    _Atomic uint32_t n_to_set_up; /* futex */

    _Atomic uint32_t round;      /* futex; also bumped to stop */
    _Atomic uint32_t unfinished; /* futex: items of this round not done yet */
    _Atomic uint32_t n_sleeping; /* threads on `round`: without any a new round needs no system call */
    _Atomic uint32_t n_waiting;  /* the caller on `unfinished` */
    _Atomic uint32_t spin_us;
    _Atomic(pool_function *) run;
    _Atomic(void *) context;
    atomic_bool stop;

    struct pool_thread threads[];
};

/* The pool whose item this thread is in: running a pool from one of its own items would wait for itself. */
static _Thread_local const struct pool *inside;

static void futex_wait(_Atomic uint32_t *word, uint32_t expected)
{
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, expected, NULL, NULL, 0);
}

static void futex_wake(_Atomic uint32_t *word, uint32_t n)
{
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, n, NULL, NULL, 0);
}

/* Until the word has another value than `value`, for spin_us at most. False: it has it still. */
static bool has_changed(_Atomic uint32_t *word, uint32_t value, uint32_t spin_us)
{
    enum { LOOKS = 16 }; /* between looks at the clock */
    if (atomic_load_explicit(word, memory_order_acquire) != value)
        return true;
    if (spin_us == 0)
        return false;
    uint64_t until = clock_deadline_us(spin_us);
    do {
        for (int i = 0; i < LOOKS; i++) {
            if (atomic_load_explicit(word, memory_order_acquire) != value)
                return true;
#if defined(__x86_64__)
            __builtin_ia32_pause();
#endif
        }
    } while (clock_now_us() < until);
    return false;
}

/* Sleeps while the word has the value; whoever changes it looks at n_sleepers after that and wakes. */
static void sleep_on(_Atomic uint32_t *word, uint32_t value, _Atomic uint32_t *n_sleepers)
{
    atomic_fetch_add_explicit(n_sleepers, 1, memory_order_seq_cst);
    if (atomic_load_explicit(word, memory_order_seq_cst) == value)
        futex_wait(word, value);
    atomic_fetch_sub_explicit(n_sleepers, 1, memory_order_seq_cst);
}

static uint32_t spin_us_of(struct pool *pool)
{
    return atomic_load_explicit(&pool->spin_us, memory_order_relaxed);
}

static void wait_until_set_up(struct pool *pool)
{
    uint32_t value;
    while ((value = atomic_load_explicit(&pool->n_to_set_up, memory_order_acquire)) != 0)
        futex_wait(&pool->n_to_set_up, value);
}

static void wait_until_finished(struct pool *pool)
{
    uint32_t value;
    while ((value = atomic_load_explicit(&pool->unfinished, memory_order_acquire)) != 0)
        if (!has_changed(&pool->unfinished, value, spin_us_of(pool)))
            sleep_on(&pool->unfinished, value, &pool->n_waiting);
}

/* Takes and runs items until the queue has none left. */
static void run_queue(struct pool *pool, struct pool_queue *queue, uint32_t thread)
{
    uint64_t ticket = atomic_load_explicit(&queue->ticket, memory_order_acquire);
    while ((uint32_t)ticket != 0) {
        pool_function *run = atomic_load_explicit(&pool->run, memory_order_relaxed);
        void *context = atomic_load_explicit(&pool->context, memory_order_relaxed);
        uint32_t end = atomic_load_explicit(&queue->end, memory_order_relaxed);
        if (!atomic_compare_exchange_weak_explicit(&queue->ticket, &ticket, ticket - 1, memory_order_acq_rel,
                                                   memory_order_acquire))
            continue;
        run(context, end - (uint32_t)ticket, thread);
        if (atomic_fetch_sub_explicit(&pool->unfinished, 1, memory_order_seq_cst) == 1 &&
            atomic_load_explicit(&pool->n_waiting, memory_order_seq_cst) != 0)
            futex_wake(&pool->unfinished, 1);
        ticket = atomic_load_explicit(&queue->ticket, memory_order_acquire);
    }
}

static void run_items(struct pool *pool, uint32_t thread)
{
    inside = pool;
    run_queue(pool, &pool->queues[0], thread);
    if (pool->n_groups > 1)
        run_queue(pool, &pool->queues[1 + pool->groups[thread]], thread);
    inside = NULL;
}

static void *thread_main(void *argument)
{
    struct pool_thread *thread = argument;
    struct pool *pool = thread->pool;
    pthread_setname_np(pthread_self(), "pool");
    if (pool->setup)
        pool->setup(pool->setup_context, thread->index);
    if (atomic_fetch_sub_explicit(&pool->n_to_set_up, 1, memory_order_acq_rel) == 1)
        futex_wake(&pool->n_to_set_up, 1);
    for (;;) {
        uint32_t round = atomic_load_explicit(&pool->round, memory_order_acquire);
        if (atomic_load_explicit(&pool->stop, memory_order_relaxed))
            return NULL;
        run_items(pool, thread->index);
        if (!has_changed(&pool->round, round, spin_us_of(pool)))
            sleep_on(&pool->round, round, &pool->n_sleeping);
    }
}

/* Groups and queues; a group nobody is in would wait for ever. */
static int divide(struct pool *pool, const uint32_t *group_of_thread, uint32_t n_groups)
{
    const uint32_t n_queues = n_groups > 1 ? n_groups + 1 : 1;
    pool->n_groups = n_groups;
    pool->groups = calloc(pool->n_threads, sizeof(*pool->groups));
    pool->queues = aligned_alloc(_Alignof(struct pool_queue), n_queues * sizeof(*pool->queues));
    if (!pool->groups || !pool->queues)
        return -ENOMEM;
    memset(pool->queues, 0, n_queues * sizeof(*pool->queues));
    for (uint32_t group = 0; group < n_groups; group++) {
        uint32_t n = 0;
        for (uint32_t i = 0; i < pool->n_threads; i++)
            n += !group_of_thread || group_of_thread[i] == group;
        if (n == 0)
            return -EINVAL;
    }
    for (uint32_t i = 0; group_of_thread && i < pool->n_threads; i++) {
        if (group_of_thread[i] >= n_groups)
            return -EINVAL;
        pool->groups[i] = group_of_thread[i];
    }
    return 0;
}

int pool_new_grouped(uint32_t n_threads, const uint32_t *group_of_thread, uint32_t n_groups,
                     void (*setup)(void *context, uint32_t thread), void *context, struct pool **ret_pool)
{
    if (n_threads == 0 || n_groups == 0 || n_groups > n_threads)
        return -EINVAL;
    struct pool *pool = calloc(1, sizeof(*pool) + n_threads * sizeof(pool->threads[0]));
    if (!pool)
        return -ENOMEM;
    pool->n_threads = n_threads;
    pool->setup = setup;
    pool->setup_context = context;
    atomic_store(&pool->n_to_set_up, n_threads - 1);
    int error = divide(pool, group_of_thread, n_groups);
    for (uint32_t i = 1; i < n_threads && !error; i++) {
        struct pool_thread *thread = &pool->threads[i];
        thread->pool = pool;
        thread->index = i;
        error = signals_start_thread(&thread->handle, thread_main, thread);
        if (!error)
            pool->n_started = i;
    }
    if (error) {
        pool_free(pool);
        return error;
    }
    wait_until_set_up(pool);
    *ret_pool = pool;
    return 0;
}

int pool_new(uint32_t n_threads, void (*setup)(void *context, uint32_t thread), void *context, struct pool **ret_pool)
{
    return pool_new_grouped(n_threads, NULL, 1, setup, context, ret_pool);
}

struct pool *pool_free(struct pool *pool)
{
    if (!pool)
        return NULL;
    assert(inside != pool);
    atomic_store_explicit(&pool->stop, true, memory_order_relaxed);
    atomic_fetch_add_explicit(&pool->round, 1, memory_order_release);
    futex_wake(&pool->round, INT32_MAX);
    for (uint32_t i = 1; i <= pool->n_started; i++)
        pthread_join(pool->threads[i].handle, NULL);
    free(pool->queues);
    free(pool->groups);
    free(pool);
    return NULL;
}

void pool_set_spin(struct pool *pool, uint32_t spin_us)
{
    if (pool)
        atomic_store_explicit(&pool->spin_us, spin_us, memory_order_relaxed);
}

uint32_t pool_n_threads(const struct pool *pool)
{
    return pool ? pool->n_threads : 1;
}

uint32_t pool_n_groups(const struct pool *pool)
{
    return pool ? pool->n_groups : 1;
}

static void run_here(struct pool *pool, uint32_t n_items, pool_function *run, void *context)
{
    assert(!pool || inside != pool);
    const struct pool *outer = inside;
    if (pool)
        inside = pool;
    for (uint32_t item = 0; item < n_items; item++)
        run(context, item, 0);
    inside = outer;
}

static void begin(struct pool *pool, uint32_t n_items, pool_function *run, void *context)
{
    assert(!inside); /* from an item of any pool: threads of two pools would fight for the same cpus */
    assert(atomic_load_explicit(&pool->unfinished, memory_order_relaxed) == 0); /* two callers at a time */
    atomic_store_explicit(&pool->run, run, memory_order_relaxed);
    atomic_store_explicit(&pool->context, context, memory_order_relaxed);
    atomic_store_explicit(&pool->unfinished, n_items, memory_order_relaxed);
}

static void fill(struct pool_queue *queue, uint32_t round, uint32_t end, uint32_t n_items)
{
    atomic_store_explicit(&queue->end, end, memory_order_relaxed);
    atomic_store_explicit(&queue->ticket, (uint64_t)round << 32 | n_items, memory_order_release);
}

/* Tells the threads of the round whose queues are filled, works, and waits for its end. */
static void work(struct pool *pool, uint32_t round, uint32_t n_helpers)
{
    atomic_store_explicit(&pool->round, round, memory_order_seq_cst);
    if (atomic_load_explicit(&pool->n_sleeping, memory_order_seq_cst) != 0)
        futex_wake(&pool->round, n_helpers);
    run_items(pool, 0);
    wait_until_finished(pool);
}

void pool_run(struct pool *pool, uint32_t n_items, void (*run)(void *context, uint32_t item, uint32_t thread),
              void *context)
{
    if (!pool || pool->n_threads == 1 || n_items <= 1) {
        run_here(pool, n_items, run, context);
        return;
    }
    begin(pool, n_items, run, context);
    uint32_t round = atomic_load_explicit(&pool->round, memory_order_relaxed) + 1;
    fill(&pool->queues[0], round, n_items, n_items);
    work(pool, round, n_items < pool->n_threads ? n_items - 1 : pool->n_threads - 1);
}

void pool_run_grouped(struct pool *pool, const uint32_t *n_items,
                      void (*run)(void *context, uint32_t item, uint32_t thread), void *context)
{
    if (pool_n_groups(pool) == 1) {
        pool_run(pool, n_items[0], run, context);
        return;
    }
    uint32_t n_all = 0;
    for (uint32_t group = 0; group < pool->n_groups; group++)
        n_all += n_items[group];
    if (n_all == 0)
        return;
    begin(pool, n_all, run, context);
    uint32_t round = atomic_load_explicit(&pool->round, memory_order_relaxed) + 1, end = 0;
    for (uint32_t group = 0; group < pool->n_groups; group++) {
        end += n_items[group];
        if (n_items[group] > 0)
            fill(&pool->queues[1 + group], round, end, n_items[group]);
    }
    work(pool, round, INT32_MAX); /* which of the sleeping ones have items, the futex does not know */
}
