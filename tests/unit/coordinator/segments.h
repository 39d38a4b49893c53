/*
 * segments.h - segments made by hand, as a store would leave them. For tests.
 *
 * Owner      the test. Threads: one.
 */
#pragma once

#include <stdint.h>

#include "common/segment.h"
#include "proto/layout.h"

struct hand_segment {
    int fd;
    struct segment_mapping mapping; /* writable */
    struct segment_header *header;
};

extern const struct row_shape segments_shape; /* small: 2 layers, 1 KV head, head_dim 4 */

/* A formatted, ready segment of n_blocks free blocks. Asserts on failure. */
void segments_make(struct hand_segment *segment, uint32_t store, uint64_t incarnation, uint32_t n_blocks,
                   const struct row_shape *shape);
void segments_drop(struct hand_segment *segment);

struct session_record *segments_record(struct hand_segment *segment, uint32_t index);
struct block_header *segments_block(struct hand_segment *segment, uint32_t index);

/* A live record; lane i lives in store lanes[i]. */
void segments_write_record(struct hand_segment *segment, uint32_t index, uint64_t session, uint64_t model,
                           const uint8_t lanes[LAYOUT_N_LANES], uint32_t flags);
/* A record of which lanes went elsewhere: as a store does it. */
void segments_move_record(struct hand_segment *segment, uint32_t index, const uint8_t lanes[LAYOUT_N_LANES]);
/* An open block with n_ids ids; previous generation 0 for the first. */
void segments_write_block(struct hand_segment *segment, struct block_handle handle, uint64_t session, uint32_t number,
                          struct block_handle previous, uint32_t previous_store, uint32_t n_ids);
