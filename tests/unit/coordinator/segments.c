/* segments.c - see segments.h. */
#include "tests/unit/coordinator/segments.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define CAPACITY 16u

const struct row_shape segments_shape = {2, 1, 4, ROW_CODEC_F16};

void segments_make(struct hand_segment *segment, uint32_t store, uint64_t incarnation, uint32_t n_blocks,
                   const struct row_shape *shape)
{
    uint64_t block_bytes = layout_block_bytes(shape);
    uint64_t n_bytes = 2 * LAYOUT_PAGE_BYTES + n_blocks * block_bytes;
    *segment = (struct hand_segment){.fd = -1};
    assert(CAPACITY * sizeof(struct session_record) <= LAYOUT_PAGE_BYTES);
    int result = segment_create("test", n_bytes, &segment->fd);
    assert(result == 0);
    result = segment_map(segment->fd, n_bytes, true, &segment->mapping);
    assert(result == 0);
    (void)result;
    segment->header = segment->mapping.address;
    *segment->header = (struct segment_header){.magic = SEGMENT_MAGIC,
                                               .layout = LAYOUT_VERSION,
                                               .n_bytes = n_bytes,
                                               .incarnation = incarnation,
                                               .session_capacity = CAPACITY,
                                               .sessions_offset = LAYOUT_PAGE_BYTES,
                                               .blocks_offset = 2 * LAYOUT_PAGE_BYTES,
                                               .block_bytes = block_bytes,
                                               .n_blocks = n_blocks,
                                               .store = store,
                                               .shape = *shape,
                                               .numa_node = -1};
    for (uint32_t i = 0; i < n_blocks; i++) {
        struct block_header *block = segments_block(segment, i);
        block->magic = BLOCK_MAGIC;
        block->layout = LAYOUT_VERSION;
        block->handle.index = i;
    }
    atomic_store_explicit(&segment->header->ready, 1, memory_order_release);
}

void segments_drop(struct hand_segment *segment)
{
    segment_unmap(&segment->mapping);
    if (segment->fd >= 0)
        close(segment->fd);
    segment->fd = -1;
}

struct session_record *segments_record(struct hand_segment *segment, uint32_t index)
{
    return (struct session_record *)((uintptr_t)segment->mapping.address + segment->header->sessions_offset) + index;
}

struct block_header *segments_block(struct hand_segment *segment, uint32_t index)
{
    return layout_block(segment->mapping.address, index);
}

void segments_write_record(struct hand_segment *segment, uint32_t index, uint64_t session, uint64_t model,
                           const uint8_t lanes[LAYOUT_N_LANES], uint32_t flags)
{
    struct session_record *record = segments_record(segment, index);
    *record = (struct session_record){.session = session, .model = {model, model}, .flags = flags};
    memcpy(record->lane_store[0], lanes, LAYOUT_N_LANES);
    snprintf(record->policy, sizeof(record->policy), "full");
    atomic_store_explicit(&record->state, SESSION_RECORD_LIVE, memory_order_release);
}

void segments_move_record(struct hand_segment *segment, uint32_t index, const uint8_t lanes[LAYOUT_N_LANES])
{
    struct session_record *record = segments_record(segment, index);
    uint32_t moves = atomic_load(&record->moves) + 1;
    memcpy(record->lane_store[moves % 2], lanes, LAYOUT_N_LANES);
    atomic_store_explicit(&record->moves, moves, memory_order_release);
}

void segments_write_block(struct hand_segment *segment, struct block_handle handle, uint64_t session, uint32_t number,
                          struct block_handle previous, uint32_t previous_store, uint32_t n_ids)
{
    struct block_header *block = segments_block(segment, handle.index);
    block->handle = handle;
    block->previous = previous;
    block->previous_store = previous_store;
    block->number = number;
    block->session = session;
    for (uint32_t i = 0; i < n_ids && i < LAYOUT_BLOCK_TOKENS; i++)
        block->ids[i] = i;
    atomic_store_explicit(&block->n_ids, n_ids, memory_order_release);
    atomic_store_explicit(&block->state, BLOCK_OPEN, memory_order_release);
}
