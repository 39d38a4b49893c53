/*
 * memory.h - memory of a back end whose device is plain memory: counted, zeroed, on huge pages where it pays.
 *
 * Owner      the back end that asked. Threads: the engine's.
 * Memory     MEMORY_LARGE bytes and more are mappings of their own, aligned to a huge page and offered to the system as such
 *            (MADV_HUGEPAGE; fine without); smaller ones come from the heap, or from an arena: mappings that live as long as
 *            anything in them, for the many small matrices of a small model. Everything is touched when it is given out, so that
 *            what is counted is what the process holds.
 * Homes      an arena may have a home: all of its memory is mappings then, which `bind` sees before their first page exists,
 *            and between mappings that cannot be touched, so that the system tells of each alone where its pages lie. Threads:
 *            an arena with a home is used by one thread at a time, which need not be the engine's; whoever allocates
 *            touches.
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

struct memory_home {
    void (*bind)(void *context, void *address, size_t n_bytes);
    void *context;
    struct memory_chunk *chunks; /* NULL at first; all mappings that are still there */
};

struct memory_arena {
    struct memory_chunk *current; /* where the next small allocation is cut off; NULL at first */
    struct memory_home *home;     /* or NULL; lives as long as anything that was allocated in it */
};

/* 64-byte aligned, zeroed; 0 bytes are some. NULL: no memory. */
void *memory_alloc(size_t n_bytes);
void *memory_alloc_in(struct memory_arena *arena, size_t n_bytes);
void *memory_free(void *memory); /* accepts NULL, returns NULL */

/* Bytes it really takes, with rounding; 0 for NULL. */
size_t memory_bytes(const void *memory);

/* Calls visit() for every mapping of a home. */
void memory_home_visit(const struct memory_home *home,
                       void (*visit)(void *context, const void *address, size_t n_bytes), void *context);

/* What is still alive in it stays so until it is freed. */
void memory_arena_fini(struct memory_arena *arena);
