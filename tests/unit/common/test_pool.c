/* test_pool.c - every item once, whatever the counts; nothing of a round before it began; misuse stops the program. */
#include "common/pool.h"
#include "tests/unit/common/helpers.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>

#define MAX_ITEMS 1000

struct round {
    uint32_t n_items, n_threads;
    uint32_t taken[MAX_ITEMS]; /* plain on purpose: the sanitizer sees a pool that does not order them */
    atomic_bool bad;
};

static void take(void *context, uint32_t item, uint32_t thread)
{
    struct round *round = context;
    if (item >= round->n_items || thread >= round->n_threads)
        atomic_store(&round->bad, true);
    else
        round->taken[item]++;
}

static void run_round(struct pool *pool, struct round *round, uint32_t n_items)
{
    memset(round->taken, 0, sizeof(round->taken));
    round->n_items = n_items;
    round->n_threads = pool_n_threads(pool);
    pool_run(pool, n_items, take, round);
    assert_false(atomic_load(&round->bad));
    for (uint32_t i = 0; i < MAX_ITEMS; i++)
        assert_int_equal(round->taken[i], i < n_items);
}

static void every_item_runs_once(void **state)
{
    (void)state;
    static struct round round;
    const uint32_t counts[] = {0, 1, 2, 3, 5, 7, 64, 999, 1000};
    for (uint32_t i = 0; i < 10; i++) {
        uint32_t n_threads = i / 2 + 1;
        struct pool *pool = NULL;
        assert_int_equal(pool_new(n_threads, NULL, NULL, &pool), 0);
        assert_int_equal(pool_n_threads(pool), n_threads);
        pool_set_spin(pool, i % 2 * 20);
        for (size_t k = 0; k < sizeof(counts) / sizeof(counts[0]); k++)
            run_round(pool, &round, counts[k]);
        assert_null(pool_free(pool));
    }
}

static void many_short_rounds_do_not_mix(void **state)
{
    (void)state;
    static struct round rounds[2];
    struct pool *pool = NULL;
    assert_int_equal(pool_new(3, NULL, NULL, &pool), 0);
    for (uint32_t i = 0; i < 3000; i++)
        run_round(pool, &rounds[i % 2], i % 9);
    pool_free(pool);
}

struct grouped {
    struct round round;
    uint32_t first[4]; /* item of each group, and the end */
    const uint32_t *group_of_thread;
};

static void take_own(void *context, uint32_t item, uint32_t thread)
{
    struct grouped *grouped = context;
    const uint32_t group = thread < grouped->round.n_threads ? grouped->group_of_thread[thread] : 3;
    if (group > 2 || item < grouped->first[group] || item >= grouped->first[group + 1])
        atomic_store(&grouped->round.bad, true);
    else
        grouped->round.taken[item]++;
}

/* Groups of 1, 3 and 2 threads; rounds of groups and of all in turn, some groups without an item. */
static void items_of_a_group_run_in_its_threads(void **state)
{
    (void)state;
    static struct grouped grouped;
    static const uint32_t groups[] = {1, 0, 1, 2, 2, 1};
    static const uint32_t counts[][3] = {{5, 9, 7}, {0, 0, 0},   {1, 0, 0}, {0, 1, 0},
                                         {0, 0, 1}, {300, 1, 0}, {2, 0, 90}};
    struct pool *pool = NULL;
    assert_int_equal(pool_new_grouped(6, groups, 3, NULL, NULL, &pool), 0);
    assert_int_equal(pool_n_groups(pool), 3);
    pool_set_spin(pool, 5);
    grouped.group_of_thread = groups;
    for (uint32_t i = 0; i < 600; i++) {
        const uint32_t *n_items = counts[i % 7];
        memset(grouped.round.taken, 0, sizeof(grouped.round.taken));
        grouped.round.n_threads = 6;
        for (uint32_t g = 0; g < 3; g++)
            grouped.first[g + 1] = grouped.first[g] + n_items[g];
        pool_run_grouped(pool, n_items, take_own, &grouped);
        assert_false(atomic_load(&grouped.round.bad));
        for (uint32_t k = 0; k < grouped.first[3] + 3; k++)
            assert_int_equal(grouped.round.taken[k], k < grouped.first[3]);
        run_round(pool, &grouped.round, i % 11);
    }
    pool_free(pool);
}

static void one_group_is_a_pool_like_any(void **state)
{
    (void)state;
    static struct round round;
    const uint32_t n_items = 40;
    struct pool *pool = NULL;
    assert_int_equal(pool_new(3, NULL, NULL, &pool), 0);
    assert_int_equal(pool_n_groups(pool), 1);
    round.n_items = n_items;
    round.n_threads = 3;
    pool_run_grouped(pool, &n_items, take, &round);
    pool_run_grouped(NULL, &n_items, take, &round);
    assert_int_equal(pool_n_groups(NULL), 1);
    assert_false(atomic_load(&round.bad));
    for (uint32_t i = 0; i < n_items; i++)
        assert_int_equal(round.taken[i], 2);
    pool_free(pool);
}

static void no_pool_is_one_thread(void **state)
{
    (void)state;
    static struct round round;
    assert_int_equal(pool_n_threads(NULL), 1);
    run_round(NULL, &round, 17);
    assert_null(pool_free(NULL));
}

struct ready {
    uint32_t n_calls[8];
    bool signals_blocked[8];
};

static void set_up(void *context, uint32_t thread)
{
    struct ready *ready = context;
    sigset_t mask;
    pthread_sigmask(SIG_SETMASK, NULL, &mask);
    ready->n_calls[thread]++;
    ready->signals_blocked[thread] = sigismember(&mask, SIGTERM) == 1;
}

static void set_up_runs_once_in_every_started_thread(void **state)
{
    (void)state;
    struct ready ready = {0};
    struct pool *pool = NULL;
    assert_int_equal(pool_new(4, set_up, &ready, &pool), 0);
    for (uint32_t i = 0; i < 8; i++) {
        assert_int_equal(ready.n_calls[i], i >= 1 && i <= 3);
        assert_int_equal(ready.signals_blocked[i], i >= 1 && i <= 3);
    }
    pool_free(pool);
    sigset_t mask;
    pthread_sigmask(SIG_SETMASK, NULL, &mask);
    assert_int_equal(sigismember(&mask, SIGTERM), 0); /* the caller's mask is as it was */
}

static void no_threads_are_refused(void **state)
{
    (void)state;
    struct pool *pool = (struct pool *)&pool;
    struct pool *before = pool;
    assert_int_equal(pool_new(0, NULL, NULL, &pool), -EINVAL);
    assert_ptr_equal(pool, before);
    assert_int_equal(pool_new_grouped(3, (const uint32_t[]){0, 0, 2}, 3, NULL, NULL, &pool), -EINVAL); /* nobody in 1 */
    assert_int_equal(pool_new_grouped(3, (const uint32_t[]){0, 1, 2}, 2, NULL, NULL, &pool), -EINVAL);
    assert_int_equal(pool_new_grouped(1, (const uint32_t[]){0}, 2, NULL, NULL, &pool), -EINVAL);
    assert_int_equal(pool_new_grouped(1, (const uint32_t[]){0}, 0, NULL, NULL, &pool), -EINVAL);
    assert_ptr_equal(pool, before);
}

/* Two items that each wait for the other: passes only if they run at the same time. */
static void meet(void *context, uint32_t item, uint32_t thread)
{
    (void)item;
    (void)thread;
    pthread_barrier_wait(context);
}

static void items_run_in_parallel(void **state)
{
    (void)state;
    pthread_barrier_t barrier;
    pthread_barrier_init(&barrier, NULL, 3);
    struct pool *pool = NULL;
    assert_int_equal(pool_new(3, NULL, NULL, &pool), 0);
    for (int i = 0; i < 50; i++)
        pool_run(pool, 3, meet, &barrier);
    pool_free(pool);
    pthread_barrier_destroy(&barrier);
}

static uint64_t cpu_us(void)
{
    struct timespec used;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
    return (uint64_t)used.tv_sec * 1000000 + (uint64_t)used.tv_nsec / 1000;
}

static void sleep_in_first(void *context, uint32_t item, uint32_t thread)
{
    (void)context;
    (void)thread;
    struct timespec pause = {.tv_nsec = 200000000};
    if (item == 0)
        nanosleep(&pause, NULL);
}

/* Both the threads that have nothing to do and the caller that waits for the last item sleep. */
static void waiting_costs_no_cpu(void **state)
{
    (void)state;
    struct pool *pool = NULL;
    assert_int_equal(pool_new(3, NULL, NULL, &pool), 0);
    uint64_t before = cpu_us();
    pool_run(pool, 3, sleep_in_first, NULL);
    pool_run(pool, 3, sleep_in_first, NULL);
    assert_in_range(cpu_us() - before, 0, 200000); /* spinning would take 400,000 and more */
    pool_free(pool);
}

static void use_again(void *context, uint32_t item, uint32_t thread)
{
    (void)item;
    (void)thread;
    static struct round round = {.n_items = 2, .n_threads = 2};
    pool_run(context, 2, take, &round);
}

static void nested_body(void)
{
    signal(SIGABRT, SIG_DFL);
    struct pool *pool = NULL;
    if (pool_new(2, NULL, NULL, &pool) == 0)
        pool_run(pool, 2, use_again, pool);
}

static void nested_body_one_thread(void)
{
    signal(SIGABRT, SIG_DFL);
    struct pool *pool = NULL;
    if (pool_new(1, NULL, NULL, &pool) == 0)
        pool_run(pool, 2, use_again, pool);
}

/* A pool run from its own item would wait for itself for ever; it stops with one thread too, where it would not. */
static void nested_use_is_stopped(void **state)
{
    (void)state;
    int status = helpers_in_child(nested_body);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
    status = helpers_in_child(nested_body_one_thread);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nested_use_is_stopped), /* first: forks */
        cmocka_unit_test(every_item_runs_once),         cmocka_unit_test(many_short_rounds_do_not_mix),
        cmocka_unit_test(no_pool_is_one_thread),        cmocka_unit_test(set_up_runs_once_in_every_started_thread),
        cmocka_unit_test(no_threads_are_refused),       cmocka_unit_test(items_run_in_parallel),
        cmocka_unit_test(waiting_costs_no_cpu),         cmocka_unit_test(items_of_a_group_run_in_its_threads),
        cmocka_unit_test(one_group_is_a_pool_like_any),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
