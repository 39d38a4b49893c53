/*
 * shared_copy.h - one reading of memory that another process may be writing.
 *
 * What was checked must be what is used: every field of a request is copied once, and the barrier keeps the compiler from
 * reading it a second time from where it came.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

static inline void shared_copy(void *to, const void *from, size_t n_bytes)
{
    memcpy(to, from, n_bytes);
    __asm__ volatile("" ::: "memory");
}

#define SHARED_ALIGNMENT 16u /* of offsets in requests and replies */

/* Does [offset, offset + n_bytes) lie aligned in [begin, end)? */
static inline bool shared_range_ok(uint64_t offset, uint64_t n_bytes, uint64_t begin, uint64_t end)
{
    return offset % SHARED_ALIGNMENT == 0 && offset >= begin && offset <= end && n_bytes <= end - offset;
}
