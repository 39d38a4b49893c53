/*
 * random.h - random numbers from the kernel: incarnations, ids, session keys.
 *
 * Not for sampling: that is counter-based and reproducible. Threads: any.
 */
#pragma once

#include <stdint.h>

uint64_t random_u64(void); /* uniform over all values but 0, which means "none" everywhere */
