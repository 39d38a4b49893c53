/* clock.c - CLOCK_MONOTONIC and the arithmetic of deadlines. */
#include "common/clock.h"

#include <errno.h>
#include <limits.h>
#include <time.h>

uint64_t clock_now_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
}

uint64_t clock_deadline_us(uint64_t timeout_us)
{
    uint64_t now = clock_now_us();
    return timeout_us > CLOCK_NEVER - now ? CLOCK_NEVER : now + timeout_us;
}

uint64_t clock_remaining_us(uint64_t deadline_us)
{
    if (deadline_us == CLOCK_NEVER)
        return CLOCK_NEVER;
    uint64_t now = clock_now_us();
    return deadline_us > now ? deadline_us - now : 0;
}

int clock_remaining_ms(uint64_t deadline_us)
{
    uint64_t remaining = clock_remaining_us(deadline_us);
    if (remaining == CLOCK_NEVER)
        return -1;
    uint64_t ms = remaining / 1000 + (remaining % 1000 != 0);
    return ms > INT_MAX ? INT_MAX : (int)ms;
}

void clock_sleep_us(uint64_t duration_us)
{
    struct timespec rest = {.tv_sec = (time_t)(duration_us / 1000000), .tv_nsec = (long)(duration_us % 1000000) * 1000};
    while (clock_nanosleep(CLOCK_MONOTONIC, 0, &rest, &rest) == EINTR)
        ;
}
