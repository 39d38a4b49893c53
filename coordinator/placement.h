/*
 * placement.h - which block of which store: free lists, generations, lanes of a new session, bytes used and free.
 *
 * Owner      the server's thread.
 * Invariant  a (block, generation) is given out once, ever: generations start above what the segment's headers say and
 *            grow with every reservation. used + free == n_blocks of every store.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/layout.h"

#define PLACEMENT_MAX_STORES 64u

struct placed_block {
    struct block_handle handle;
    uint8_t store;
};

struct placement_room {
    uint64_t bytes_asked;
    uint64_t bytes_free; /* that this session could still get: its lanes are bound to their stores */
};

struct placement;

int placement_new(struct placement **ret_placement);
struct placement *placement_free(struct placement *placement); /* accepts NULL, returns NULL */

/* A store with a new or newly found segment: all blocks free. generations [n_blocks]: the last one of each block, as its
 * header says (copied). Replaces what was known of that store. -EINVAL store number; -ENOMEM. */
int placement_add_store(struct placement *placement, uint32_t store, uint32_t n_blocks, uint64_t block_bytes,
                        const uint32_t *generations);
void placement_remove_store(struct placement *placement, uint32_t store);

/* A block that a session holds already (found in the headers). -EBUSY claimed before; -EINVAL no such block. */
int placement_claim(struct placement *placement, uint32_t store, struct block_handle handle);

/* The store's header of that block says at least this generation: later handles are above it. */
void placement_raise(struct placement *placement, uint32_t store, uint32_t index, uint32_t generation);

/* Gives every lane a store, in proportion to free blocks: equally large stores get equally many lanes, each of up to 12
 * stores at least one where they are alike. `ready`: bit per store. -ENODEV: no store. */
int placement_lanes(const struct placement *placement, uint64_t ready, uint8_t ret_lane_store[LAYOUT_N_LANES]);

/*
 * Handles for blocks [first_number, first_number + n_blocks) of a session, all or none. ret_blocks: n_blocks.
 * -ENOMEM: ret_room says what was asked and what is free; -EINVAL: a lane lives in an unknown store.
 */
int placement_reserve(struct placement *placement, const uint8_t lane_store[LAYOUT_N_LANES], uint32_t first_number,
                      uint32_t n_blocks, struct placed_block *ret_blocks, struct placement_room *ret_room);

/* As placement_reserve() would answer now, without taking anything; ret_room is set in any case but -EINVAL. */
int placement_room(const struct placement *placement, const uint8_t lane_store[LAYOUT_N_LANES], uint32_t first_number,
                   uint32_t n_blocks, struct placement_room *ret_room);
/* Could a session of n_blocks in all fit if it were alone? */
bool placement_could_hold(const struct placement *placement, const uint8_t lane_store[LAYOUT_N_LANES],
                          uint64_t n_blocks);

/* One in that store. -ENOMEM; -EINVAL: it is unknown. */
int placement_reserve_in(struct placement *placement, uint32_t store, struct placed_block *ret_block);

/*
 * New stores, out of `targets` (bit each), for the lanes that live in `from`; the others stay. Each lane, with what it has of
 * n_blocks blocks, goes where the most is free for it. -ENODEV: there is no target; -ENOMEM: no room for all, ret_room is set.
 */
int placement_move_lanes(const struct placement *placement, uint64_t targets, uint32_t from,
                         const uint8_t lane_store[LAYOUT_N_LANES], uint32_t n_blocks,
                         uint8_t ret_lane_store[LAYOUT_N_LANES], struct placement_room *ret_room);

/* The store has freed it. -ESTALE: not the generation that was given out, or free already. */
int placement_release(struct placement *placement, uint32_t store, struct block_handle handle);

/* false: no such store. */
bool placement_usage(const struct placement *placement, uint32_t store, uint64_t *ret_bytes_total,
                     uint64_t *ret_bytes_used);
uint32_t placement_n_free(const struct placement *placement, uint32_t store); /* blocks; 0 for an unknown store */
uint64_t placement_block_bytes(const struct placement *placement, uint32_t store);
