/*
 * blocks_private.h - what blocks.c and the other blocks_*.c share.
 *
 * Sizes and offsets are copied from the segment's header once. `entries` mirrors in dense memory what searches need of the
 * headers, which lie megabytes apart; blocks_set_state() keeps both equal.
 */
#pragma once

#include "value-store/blocks.h"

struct block_entry {
    uint64_t session; /* 0: free */
    uint32_t number;
    uint32_t state;      /* enum block_state */
    uint32_t generation; /* unless free */
    uint64_t mark;       /* last reservation order that named the block */
};

struct blocks {
    uint8_t *segment;
    uint64_t n_bytes;
    uint64_t sessions_offset;
    uint64_t blocks_offset;
    uint64_t block_bytes;
    uint64_t incarnation;
    uint64_t n_orders; /* reservation orders so far */
    uint32_t n_blocks;
    uint32_t session_capacity;
    struct row_shape shape;
    const struct kernels *kernels;
    uint32_t n_in_state[3]; /* by enum block_state */
    struct block_entry entries[];
};

/* All copied from a header that was checked; entries are all free. NULL: out of memory. */
struct blocks *blocks_new(void *segment, const struct blocks_owner *owner);

struct block_header *blocks_header(const struct blocks *blocks, uint32_t index);
struct session_record *blocks_session_record(const struct blocks *blocks, uint32_t index);

/* Writes the header's state last, with release order, and the entry. */
void blocks_set_state(struct blocks *blocks, uint32_t index, enum block_state state);

/* A header that says: free, with this generation. */
void blocks_write_free_header(struct blocks *blocks, uint32_t index, uint32_t generation);

void blocks_write_sums(struct blocks *blocks, struct block_header *header, uint32_t layer);
bool blocks_complete(const struct blocks *blocks, const struct block_header *header);
void blocks_seal(struct blocks *blocks, struct block_header *header);
