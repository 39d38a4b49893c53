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
#define OWN_BYTES   ((size_t)1 << 20) /* in a home: a mapping of its own from this size on */

struct memory_header {
    size_t n_bytes;  /* taken, this header included */
    size_t n_mapped; /* 0: from the heap or a chunk */
    struct memory_chunk *chunk;
};
static_assert(sizeof(struct memory_header) <= ALIGNMENT, "the header fits before the memory");

struct memory_chunk {
    size_t n_bytes;
    size_t n_used;
    size_t n_alive; /* allocations in it, and one for the arena that cuts from it */
    struct memory_home *home;
    struct memory_chunk *next, *before; /* of the home */
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

/* The same with a page before and one after it that nobody can touch: no other mapping can become one with it. */
static void *map_apart(size_t n_bytes)
{
    const size_t room = n_bytes + 2 * MEMORY_HUGE_PAGE_BYTES;
    if (room < n_bytes)
        return NULL;
    char *area = mmap(NULL, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (area == MAP_FAILED)
        return NULL;
    char *base = area + PAGE_BYTES;
    base += (MEMORY_HUGE_PAGE_BYTES - (uintptr_t)base % MEMORY_HUGE_PAGE_BYTES) % MEMORY_HUGE_PAGE_BYTES;
    const size_t before = (size_t)(base - area) - PAGE_BYTES, after = room - before - n_bytes - 2 * PAGE_BYTES;
    if (before)
        munmap(area, before);
    if (after)
        munmap(base + n_bytes + PAGE_BYTES, after);
    if (mprotect(base, n_bytes, PROT_READ | PROT_WRITE) < 0) {
        munmap(base - PAGE_BYTES, n_bytes + 2 * PAGE_BYTES);
        return NULL;
    }
    (void)madvise(base, n_bytes, MADV_HUGEPAGE);
    return base;
}

static struct memory_chunk *chunk_new(struct memory_home *home, size_t n_bytes)
{
    struct memory_chunk *chunk = home ? map_apart(n_bytes) : map(n_bytes);
    if (!chunk)
        return NULL;
    if (home)
        home->bind(home->context, chunk, n_bytes);
    *chunk = (struct memory_chunk){.n_bytes = n_bytes, .n_used = ALIGNMENT, .n_alive = 1, .home = home};
    if (home) {
        chunk->next = home->chunks;
        if (chunk->next)
            chunk->next->before = chunk;
        home->chunks = chunk;
    }
    return chunk;
}

static void chunk_free(struct memory_chunk *chunk)
{
    if (!chunk->home) {
        munmap(chunk, chunk->n_bytes);
        return;
    }
    if (chunk->next)
        chunk->next->before = chunk->before;
    if (chunk->before)
        chunk->before->next = chunk->next;
    else
        chunk->home->chunks = chunk->next;
    munmap((char *)chunk - PAGE_BYTES, chunk->n_bytes + 2 * PAGE_BYTES);
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
        chunk_free(chunk);
}

/* The next piece of a chunk that has the room. */
static void *cut(struct memory_chunk *chunk, size_t rounded, size_t n_counted)
{
    struct memory_header *header = (struct memory_header *)((uintptr_t)chunk + chunk->n_used);
    chunk->n_used += rounded;
    chunk->n_alive++;
    touch(header, rounded); /* never given out before: the mapping's zeros */
    return finish(header, n_counted, 0, chunk);
}

void *memory_alloc_in(struct memory_arena *arena, size_t n_bytes)
{
    const size_t own_bytes = arena->home ? OWN_BYTES : MEMORY_LARGE;
    if (n_bytes > SIZE_MAX / 2)
        return NULL;
    if (!arena->home && (MEMORY_LARGE > CHUNK_BYTES || n_bytes >= own_bytes))
        return memory_alloc(n_bytes);
    const size_t rounded = (n_bytes + 2 * ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    struct memory_chunk *chunk = arena->current;
    if (n_bytes >= own_bytes) {
        const size_t n_mapped = (ALIGNMENT + rounded + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
        chunk = chunk_new(arena->home, n_mapped);
        if (!chunk)
            return NULL;
        void *memory = cut(chunk, rounded, n_mapped);
        release(chunk);
        return memory;
    }
    if (!chunk || CHUNK_BYTES - chunk->n_used < rounded) {
        chunk = chunk_new(arena->home, CHUNK_BYTES);
        if (!chunk)
            return NULL;
        memory_arena_fini(arena);
        arena->current = chunk;
    }
    return cut(chunk, rounded, rounded);
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

void memory_home_visit(const struct memory_home *home,
                       void (*visit)(void *context, const void *address, size_t n_bytes), void *context)
{
    for (const struct memory_chunk *chunk = home->chunks; chunk; chunk = chunk->next)
        visit(context, chunk, chunk->n_bytes);
}
