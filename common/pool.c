/*
 * pool.c - a pool of threads without locks on the way of an item.
 *
 * One 64-bit ticket holds (round, items left to take). Taking an item is a compare-and-swap of the whole ticket, so it can
 * only succeed while the round it was read in still has items: the fields of the round (run, context, n_items) that were
 * read after the ticket are then the right ones, and a thread that wakes late cannot take an item of a round it has not
 * seen. Threads sleep on `round`, the caller on `unfinished`; both may look for a moment first (pool_set_spin()), since a
 * thread that sleeps takes longer to come back than a small product takes.
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
#include <sys/syscall.h>
#include <unistd.h>

typedef void pool_function(void *context, uint32_t item, uint32_t thread);

struct pool_thread {
    struct pool *pool;
    pthread_t handle;
    uint32_t index;
};

struct pool {
    uint32_t n_threads; /* the caller included */
    uint32_t n_started;
    void (*setup)(void *context, uint32_t thread);
    void *setup_context;
    _Atomic uint32_t n_to_set_up; /* futex */

    _Atomic uint64_t ticket;     /* round << 32 | items left to take */
    _Atomic uint32_t round;      /* futex; also bumped to stop */
    _Atomic uint32_t unfinished; /* futex: items of this round not done yet */
    _Atomic uint32_t n_sleeping; /* threads on `round`: without any a new round needs no system call */
    _Atomic uint32_t n_waiting;  /* the caller on `unfinished` */
    _Atomic uint32_t spin_us;
    _Atomic(pool_function *) run;
    _Atomic(void *) context;
    _Atomic uint32_t n_items;
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

/* Takes and runs items until the round has none left. */
static void run_items(struct pool *pool, uint32_t thread)
{
    uint64_t ticket = atomic_load_explicit(&pool->ticket, memory_order_acquire);
    inside = pool;
    while ((uint32_t)ticket != 0) {
        pool_function *run = atomic_load_explicit(&pool->run, memory_order_relaxed);
        void *context = atomic_load_explicit(&pool->context, memory_order_relaxed);
        uint32_t n_items = atomic_load_explicit(&pool->n_items, memory_order_relaxed);
        if (!atomic_compare_exchange_weak_explicit(&pool->ticket, &ticket, ticket - 1, memory_order_acq_rel,
                                                   memory_order_acquire))
            continue;
        run(context, n_items - (uint32_t)ticket, thread);
        if (atomic_fetch_sub_explicit(&pool->unfinished, 1, memory_order_seq_cst) == 1 &&
            atomic_load_explicit(&pool->n_waiting, memory_order_seq_cst) != 0)
            futex_wake(&pool->unfinished, 1);
        ticket = atomic_load_explicit(&pool->ticket, memory_order_acquire);
    }
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

int pool_new(uint32_t n_threads, void (*setup)(void *context, uint32_t thread), void *context, struct pool **ret_pool)
{
    if (n_threads == 0)
        return -EINVAL;
    struct pool *pool = calloc(1, sizeof(*pool) + n_threads * sizeof(pool->threads[0]));
    if (!pool)
        return -ENOMEM;
    pool->n_threads = n_threads;
    pool->setup = setup;
    pool->setup_context = context;
    atomic_store(&pool->n_to_set_up, n_threads - 1);
    for (uint32_t i = 1; i < n_threads; i++) {
        struct pool_thread *thread = &pool->threads[i];
        thread->pool = pool;
        thread->index = i;
        int error = signals_start_thread(&thread->handle, thread_main, thread);
        if (error) {
            pool_free(pool);
            return error;
        }
        pool->n_started = i;
    }
    wait_until_set_up(pool);
    *ret_pool = pool;
    return 0;
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

void pool_run(struct pool *pool, uint32_t n_items, void (*run)(void *context, uint32_t item, uint32_t thread),
              void *context)
{
    if (!pool || pool->n_threads == 1 || n_items <= 1) {
        assert(!pool || inside != pool);
        const struct pool *outer = inside;
        if (pool)
            inside = pool;
        for (uint32_t item = 0; item < n_items; item++)
            run(context, item, 0);
        inside = outer;
        return;
    }
    assert(!inside); /* from an item of any pool: threads of two pools would fight for the same cpus */
    assert(atomic_load_explicit(&pool->unfinished, memory_order_relaxed) == 0); /* two callers at a time */

    atomic_store_explicit(&pool->run, run, memory_order_relaxed);
    atomic_store_explicit(&pool->context, context, memory_order_relaxed);
    atomic_store_explicit(&pool->n_items, n_items, memory_order_relaxed);
    atomic_store_explicit(&pool->unfinished, n_items, memory_order_relaxed);
    uint32_t round = atomic_load_explicit(&pool->round, memory_order_relaxed) + 1;
    atomic_store_explicit(&pool->ticket, (uint64_t)round << 32 | n_items, memory_order_release);
    atomic_store_explicit(&pool->round, round, memory_order_seq_cst);

    uint32_t n_helpers = n_items < pool->n_threads ? n_items - 1 : pool->n_threads - 1;
    if (atomic_load_explicit(&pool->n_sleeping, memory_order_seq_cst) != 0)
        futex_wake(&pool->round, n_helpers);
    run_items(pool, 0);
    wait_until_finished(pool);
}
