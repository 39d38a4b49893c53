/*
 * clock.h - one monotonic clock and the arithmetic of deadlines.
 *
 * A deadline is a value of clock_now_us() that has meaning in this process only: what crosses a process border is the
 * time that remains. Threads: any. Nothing here fails.
 */
#pragma once

#include <stdint.h>

#define CLOCK_NEVER UINT64_MAX /* the deadline that does not come */

uint64_t clock_now_us(void); /* CLOCK_MONOTONIC, microseconds */

/* Now + timeout; saturates at CLOCK_NEVER. */
uint64_t clock_deadline_us(uint64_t timeout_us);

/* What is left until the deadline; 0: it has passed; CLOCK_NEVER stays CLOCK_NEVER. */
uint64_t clock_remaining_us(uint64_t deadline_us);

/* The same as a timeout for poll(): milliseconds rounded up (never wakes early), -1 for CLOCK_NEVER. */
int clock_remaining_ms(uint64_t deadline_us);

void clock_sleep_us(uint64_t duration_us); /* sleeps at least this long, signals or not */
