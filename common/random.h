/*
 * random.h - random numbers from the kernel: incarnations, ids, session keys.
 *
 * Not for sampling: that is counter-based and reproducible. Threads: any.
 */
#pragma once

#include <stdint.h>

uint64_t random_u64(void); /* uniform over all values but 0, which means "none" everywhere */

/* The incarnation that a supervisor gave as up to 16 hexadecimal digits, or a random one for NULL. -EINVAL: no such number. */
int random_incarnation(const char *hex, uint64_t *ret_incarnation);
