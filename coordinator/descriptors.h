/*
 * descriptors.h - the coordinator's duplicates of the stores' segments: they outlive a store.
 *
 * Owner      the server's thread. One segment a store number: its writable descriptor (for the next store that adopts
 *            it) and a read-only mapping (session records, block headers).
 * Invariant  a descriptor is handed to another store only after its owner was reported dead. What a header says about
 *            sizes is copied and checked once, when the segment comes in; later only records and block headers are read.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/segment.h"
#include "proto/layout.h"

#define DESCRIPTORS_MAX_STORES 64u

/* A mapped segment, with sizes that were checked against the mapping. */
struct segment_view {
    const uint8_t *base;
    struct segment_header header; /* the copy that was checked; counts in it are trustworthy */
};

/* The index-th block header or session record; index < header.n_blocks, header.session_capacity. */
const struct block_header *descriptors_block(const struct segment_view *view, uint32_t index);
const struct session_record *descriptors_record(const struct segment_view *view, uint64_t index);

struct descriptors;

int descriptors_new(struct descriptors **ret_descriptors);
struct descriptors *descriptors_free(struct descriptors *descriptors); /* closes all; accepts NULL, returns NULL */

/*
 * Checks, maps and keeps the segment of a store; takes fd over on success only. Replaces the one that was kept (a store
 * that formats again; the same segment once more is fine).
 * -EINVAL store number; -EPROTO no segment, other layout or sizes, of another store, or not owned by `owner`;
 * errors of segment_map().
 */
int descriptors_keep(struct descriptors *descriptors, uint32_t store, uint64_t owner, int fd);
void descriptors_drop(struct descriptors *descriptors, uint32_t store);

/* Is it the segment that is kept for that store? */
bool descriptors_same(const struct descriptors *descriptors, uint32_t store, int fd);
const struct segment_view *descriptors_view(const struct descriptors *descriptors, uint32_t store); /* or NULL */
uint64_t descriptors_owner(const struct descriptors *descriptors, uint32_t store);                  /* 0: none */
bool descriptors_owner_is_dead(const struct descriptors *descriptors, uint32_t store);
void descriptors_owner_died(struct descriptors *descriptors, uint32_t store, uint64_t owner);

/* A descriptor for a worker; the caller closes it. -ENOENT; errors of segment_reopen_readonly(). */
int descriptors_readonly(const struct descriptors *descriptors, uint32_t store, int *ret_fd);
/* A writable descriptor for the next store; the caller closes it. -ENOENT; -EBUSY: the owner is not known dead. */
int descriptors_hand_over(const struct descriptors *descriptors, uint32_t store, int *ret_fd);
