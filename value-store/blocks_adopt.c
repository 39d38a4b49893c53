/*
 * blocks_adopt.c - taking over the segment of a dead store.
 *
 * Nothing in it is believed before it was checked against the rest: the old store may have died anywhere, and memory that
 * outlived a process may have been written by a bug. One bad header costs its block, never the segment.
 */
#include "value-store/blocks_private.h"

#include <errno.h>
#include <string.h>

static bool record_is_sound(const struct session_record *record)
{
    return record->session != 0 && memchr(record->policy, 0, sizeof(record->policy)) != NULL;
}

static void adopt_records(struct blocks *blocks, struct blocks_adoption *adoption)
{
    for (uint32_t i = 0; i < blocks->session_capacity; i++) {
        struct session_record *record = blocks_session_record(blocks, i);
        uint32_t state = atomic_load_explicit(&record->state, memory_order_acquire);
        if (state == SESSION_RECORD_FREE)
            continue;
        bool is_first = blocks_session_find(blocks, record->session) == record;
        if (state == SESSION_RECORD_LIVE && record_is_sound(record) && is_first)
            continue;
        atomic_store_explicit(&record->state, SESSION_RECORD_FREE, memory_order_release);
        adoption->n_records_dropped++;
    }
}

static bool is_block_header(const struct block_header *header, uint32_t index)
{
    return header->magic == BLOCK_MAGIC && header->layout == LAYOUT_VERSION && header->handle.index == index;
}

/* Of a block that is not free. */
static bool header_is_sound(const struct blocks *blocks, const struct block_header *header, uint32_t state)
{
    uint32_t n_ids = atomic_load_explicit(&header->n_ids, memory_order_acquire);
    if ((state != BLOCK_OPEN && state != BLOCK_SEALED) || header->handle.generation == 0 || header->session == 0 ||
        (header->number == 0) != (header->previous.generation == 0) || n_ids > LAYOUT_BLOCK_TOKENS)
        return false;
    for (uint32_t layer = 0; layer < blocks->shape.n_layers; layer++) {
        if (atomic_load_explicit(&header->n_rows[layer], memory_order_acquire) > n_ids)
            return false;
    }
    return state == BLOCK_OPEN || blocks_complete(blocks, header);
}

/* Sums are written before the count that makes them valid; computing them again costs little for the few open blocks. */
static void mend_open_block(struct blocks *blocks, struct block_header *header, struct blocks_adoption *adoption)
{
    for (uint32_t layer = 0; layer < blocks->shape.n_layers; layer++) {
        if (atomic_load_explicit(&header->n_rows[layer], memory_order_relaxed) != LAYOUT_BLOCK_TOKENS)
            continue;
        blocks_write_sums(blocks, header, layer);
        adoption->n_layers_summed++;
    }
    if (blocks_complete(blocks, header)) {
        blocks_seal(blocks, header);
        adoption->n_sealed++;
    }
}

/* Returns whether the header can be believed; a block of a session without a record is believed and freed. */
static bool adopt_block(struct blocks *blocks, uint32_t i, struct blocks_adoption *adoption)
{
    struct block_header *header = blocks_header(blocks, i);
    uint32_t state = atomic_load_explicit(&header->state, memory_order_acquire);
    if (!is_block_header(header, i))
        return false;
    if (state == BLOCK_FREE)
        return true;
    if (!header_is_sound(blocks, header, state))
        return false;
    if (!blocks_session_find(blocks, header->session)) {
        blocks_set_state(blocks, i, BLOCK_FREE);
        adoption->n_orphans++;
        return true;
    }
    blocks_set_state(blocks, i, (enum block_state)state);
    if (state == BLOCK_OPEN)
        mend_open_block(blocks, header, adoption);
    return true;
}

/*
 * What generation a broken header had cannot be known: its block goes on above every generation that can be believed. Even
 * an old handle that happened to name it again would name another session, and is refused for that.
 */
static void free_broken_blocks(struct blocks *blocks, struct blocks_adoption *adoption)
{
    uint32_t highest = 0;
    for (uint32_t i = 0; i < blocks->n_blocks; i++) {
        const struct block_header *header = blocks_header(blocks, i);
        if (!blocks->entries[i].mark && header->handle.generation > highest)
            highest = header->handle.generation;
    }
    for (uint32_t i = 0; i < blocks->n_blocks; i++) {
        if (!blocks->entries[i].mark)
            continue;
        blocks->entries[i].mark = 0;
        blocks_write_free_header(blocks, i, highest == UINT32_MAX ? highest : highest + 1);
        adoption->n_quarantined++;
    }
}

int blocks_adopt(void *segment, uint64_t n_bytes, const struct blocks_owner *owner,
                 struct blocks_adoption *ret_adoption, struct blocks **ret_blocks)
{
    int result = layout_check_segment(segment, n_bytes);
    if (result < 0)
        return result;
    struct segment_header *header = segment;
    if (header->session_capacity > UINT32_MAX)
        return -EPROTO;
    if (header->store != owner->store)
        return -EXDEV;
    struct blocks *blocks = blocks_new(segment, owner);
    if (!blocks)
        return -ENOMEM;

    struct blocks_adoption adoption = {0};
    adopt_records(blocks, &adoption);
    for (uint32_t i = 0; i < blocks->n_blocks; i++) {
        blocks->entries[i].mark = !adopt_block(blocks, i, &adoption);
        if (owner->progress)
            atomic_fetch_add_explicit(owner->progress, 1, memory_order_relaxed);
    }
    free_broken_blocks(blocks, &adoption);
    header->incarnation = owner->incarnation;
    *ret_adoption = adoption;
    *ret_blocks = blocks;
    return 0;
}
