/* memory.c - see memory.h. A header before every allocation says where it came from. */
#include "gpu-worker/backend/memory.h"

#include <assert.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define ALIGNMENT   64u
#define PAGE_BYTES  ((size_t)4096)
#define CHUNK_BYTES ((size_t)16 << 20)

struct memory_header {
    size_t n_bytes;  /* taken, this header included */
    size_t n_mapped; /* 0: from the heap or a chunk */
    struct memory_chunk *chunk;
};
static_assert(sizeof(struct memory_header) <= ALIGNMENT, "the header fits before the memory");

struct memory_chunk {
    size_t n_used;
    size_t n_alive; /* allocations in it, and one for the arena that cuts from it */
};
static_assert(sizeof(struct memory_chunk) <= ALIGNMENT, "the first allocation starts aligned");

static struct memory_header *header_of(const void *memory)
{
    return (struct memory_header *)((uintptr_t)memory - ALIGNMENT);
}

/* n_bytes (whole pages) that start at a huge page; zero, not touched yet. */
static void *map(size_t n_bytes)
{
    if (n_bytes > SIZE_MAX - MEMORY_HUGE_PAGE_BYTES)
        return NULL;
    const size_t room = n_bytes + MEMORY_HUGE_PAGE_BYTES;
    char *base = mmap(NULL, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED)
        return NULL;
    const size_t before = (MEMORY_HUGE_PAGE_BYTES - (uintptr_t)base % MEMORY_HUGE_PAGE_BYTES) % MEMORY_HUGE_PAGE_BYTES;
    const size_t after = room - before - n_bytes;
    if (before)
        munmap(base, before);
    if (after)
        munmap(base + before + n_bytes, after);
    (void)madvise(base + before, n_bytes, MADV_HUGEPAGE);
    return base + before;
}

static void touch(void *memory, size_t n_bytes)
{
    volatile char *bytes = memory;
    for (size_t i = 0; i < n_bytes; i += PAGE_BYTES)
        bytes[i] = 0;
}

static void *finish(struct memory_header *header, size_t n_bytes, size_t n_mapped, struct memory_chunk *chunk)
{
    *header = (struct memory_header){.n_bytes = n_bytes, .n_mapped = n_mapped, .chunk = chunk};
    return (char *)header + ALIGNMENT;
}

void *memory_alloc(size_t n_bytes)
{
    if (n_bytes > SIZE_MAX / 2)
        return NULL;
    if (n_bytes >= MEMORY_LARGE) {
        const size_t n_mapped = (n_bytes + ALIGNMENT + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
        void *base = map(n_mapped);
        if (!base)
            return NULL;
        touch(base, n_mapped);
        return finish(base, n_mapped, n_mapped, NULL);
    }
    const size_t rounded = (n_bytes + 2 * ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    void *base = aligned_alloc(ALIGNMENT, rounded);
    if (!base)
        return NULL;
    memset(base, 0, rounded);
    return finish(base, rounded, 0, NULL);
}

static void release(struct memory_chunk *chunk)
{
    assert(chunk->n_alive > 0);
    if (--chunk->n_alive == 0)
        munmap(chunk, CHUNK_BYTES);
}

void *memory_alloc_in(struct memory_arena *arena, size_t n_bytes)
{
    if (MEMORY_LARGE > CHUNK_BYTES || n_bytes >= MEMORY_LARGE)
        return memory_alloc(n_bytes);
    const size_t rounded = (n_bytes + 2 * ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    struct memory_chunk *chunk = arena->current;
    if (!chunk || CHUNK_BYTES - chunk->n_used < rounded) {
        chunk = map(CHUNK_BYTES);
        if (!chunk)
            return NULL;
        *chunk = (struct memory_chunk){.n_used = ALIGNMENT, .n_alive = 1};
        memory_arena_fini(arena);
        arena->current = chunk;
    }
    struct memory_header *header = (struct memory_header *)((uintptr_t)chunk + chunk->n_used);
    chunk->n_used += rounded;
    chunk->n_alive++;
    touch(header, rounded); /* never given out before: the mapping's zeros */
    return finish(header, rounded, 0, chunk);
}

void *memory_free(void *memory)
{
    if (!memory)
        return NULL;
    struct memory_header *header = header_of(memory);
    if (header->n_mapped)
        munmap(header, header->n_mapped);
    else if (header->chunk)
        release(header->chunk);
    else
        free(header);
    return NULL;
}

size_t memory_bytes(const void *memory)
{
    return memory ? header_of(memory)->n_bytes : 0;
}

void memory_arena_fini(struct memory_arena *arena)
{
    if (arena->current)
        release(arena->current);
    arena->current = NULL;
}
