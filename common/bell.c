/* bell.c - see bell.h. */
#include "common/bell.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "common/clock.h"

static void pause_briefly(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

void bell_ring(struct bell *bell)
{
    atomic_fetch_add_explicit(&bell->count, 1, memory_order_seq_cst);
    if (atomic_load_explicit(&bell->n_waiting, memory_order_seq_cst) != 0)
        syscall(SYS_futex, &bell->count, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* Not private: the word is shared between processes. */
static void sleep_until(struct bell *bell, uint32_t seen, uint64_t deadline_us)
{
    struct timespec left, *timeout = NULL;
    if (deadline_us != CLOCK_NEVER) {
        uint64_t us = clock_remaining_us(deadline_us);
        left = (struct timespec){.tv_sec = (time_t)(us / 1000000), .tv_nsec = (long)(us % 1000000 * 1000)};
        timeout = &left;
    }
    syscall(SYS_futex, &bell->count, FUTEX_WAIT, seen, timeout, NULL, 0);
}

int bell_wait(struct bell *bell, uint32_t seen, uint64_t deadline_us, uint32_t spin_us)
{
    if (spin_us > 0) {
        uint64_t until = clock_deadline_us(spin_us);
        do {
            for (int i = 0; i < 32; i++) {
                if (bell_count(bell) != seen)
                    return 0;
                pause_briefly();
            }
        } while (clock_now_us() < until);
    }
    if (bell_count(bell) != seen)
        return 0;
    if (clock_remaining_us(deadline_us) == 0)
        return -ETIMEDOUT;
    atomic_fetch_add_explicit(&bell->n_waiting, 1, memory_order_seq_cst);
    if (bell_count(bell) == seen)
        sleep_until(bell, seen, deadline_us);
    atomic_fetch_sub_explicit(&bell->n_waiting, 1, memory_order_seq_cst);
    return bell_count(bell) != seen ? 0 : clock_remaining_us(deadline_us) == 0 ? -ETIMEDOUT : 0;
}
