/* test_bell.c - a bell between threads and between processes. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <errno.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/bell.h"
#include "common/clock.h"

enum { N_RINGS = 2000, LONG_US = 20000000 };

static void a_wait_ends_at_its_deadline(void **state)
{
    (void)state;
    struct bell bell = {0};
    uint64_t start = clock_now_us();
    assert_int_equal(bell_wait(&bell, 0, clock_deadline_us(20000), 0), -ETIMEDOUT);
    assert_true(clock_now_us() - start >= 20000);
    assert_int_equal(bell_wait(&bell, 0, 0, 100), -ETIMEDOUT);
    assert_int_equal(atomic_load(&bell.n_waiting), 0);
}

static void a_ring_before_the_wait_is_not_missed(void **state)
{
    (void)state;
    struct bell bell = {0};
    uint32_t seen = bell_count(&bell);
    bell_ring(&bell);
    assert_int_equal(bell_wait(&bell, seen, clock_deadline_us(LONG_US), 0), 0);
    assert_int_equal(bell_wait(&bell, seen, 0, 50), 0);
}

/* Two processes hand a turn over and back; a lost wake-up shows as a wait that lasts until its deadline. */
struct table {
    struct bell bells[2];
    _Atomic uint32_t turn;
};

static uint32_t play(struct table *table, uint32_t me, uint32_t spin_us)
{
    uint32_t n_late = 0;
    for (uint32_t i = 0; i < N_RINGS; i++) {
        uint64_t deadline = clock_deadline_us(LONG_US);
        for (;;) {
            uint32_t seen = bell_count(&table->bells[me]);
            if (atomic_load_explicit(&table->turn, memory_order_acquire) % 2 == me)
                break;
            if (bell_wait(&table->bells[me], seen, deadline, spin_us) < 0)
                return ++n_late;
        }
        atomic_fetch_add_explicit(&table->turn, 1, memory_order_release);
        bell_ring(&table->bells[1 - me]);
    }
    return n_late;
}

static void no_ring_is_lost_between_processes(void **state)
{
    (void)state;
    struct table *table = mmap(NULL, sizeof(*table), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(table != MAP_FAILED);
    for (uint32_t spin_us = 0; spin_us <= 20; spin_us += 20) {
        atomic_store(&table->turn, 0);
        pid_t child = fork();
        if (child == 0)
            _exit(play(table, 1, spin_us) == 0 ? 0 : 1);
        uint32_t n_late = play(table, 0, spin_us);
        int status;
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_int_equal(status, 0);
        assert_int_equal(n_late, 0);
        assert_int_equal(atomic_load(&table->turn), 2 * N_RINGS);
    }
    munmap(table, sizeof(*table));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_wait_ends_at_its_deadline),
        cmocka_unit_test(a_ring_before_the_wait_is_not_missed),
        cmocka_unit_test(no_ring_is_lost_between_processes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
