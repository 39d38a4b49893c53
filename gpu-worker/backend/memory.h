/*
 * memory.h - memory of a back end whose device is plain memory: counted, zeroed, on huge pages where it pays.
 *
 * Owner      the back end that asked. Threads: the engine's.
 * Memory     MEMORY_LARGE bytes and more are mappings of their own, aligned to a huge page and offered to the system as such
 *            (MADV_HUGEPAGE; fine without); smaller ones come from the heap, or from an arena: mappings that live as long as
 *            anything in them, for the many small matrices of a small model. Everything is touched when it is given out, so that
 *            what is counted is what the process holds.
 */
#pragma once

#include <stddef.h>

#define MEMORY_HUGE_PAGE_BYTES ((size_t)2 << 20)

#ifdef HCATTN_SANITIZED /* the heap shows who reads past an end */
#define MEMORY_LARGE ((size_t)64 << 20)
#else
#define MEMORY_LARGE ((size_t)1 << 20)
#endif

struct memory_chunk;

struct memory_arena {
    struct memory_chunk *current; /* where the next small allocation is cut off; NULL at first */
};

/* 64-byte aligned, zeroed; 0 bytes are some. NULL: no memory. */
void *memory_alloc(size_t n_bytes);
void *memory_alloc_in(struct memory_arena *arena, size_t n_bytes);
void *memory_free(void *memory); /* accepts NULL, returns NULL */

/* Bytes it really takes, with rounding; 0 for NULL. */
size_t memory_bytes(const void *memory);

/* What is still alive in it stays so until it is freed. */
void memory_arena_fini(struct memory_arena *arena);
