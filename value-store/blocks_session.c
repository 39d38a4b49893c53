/* blocks_session.c - session records of a segment, and the release of a session's blocks. */
#include "value-store/blocks_private.h"

#include <errno.h>
#include <string.h>

struct session_record *blocks_session_record(const struct blocks *blocks, uint32_t index)
{
    return (struct session_record *)(void *)(blocks->segment + blocks->sessions_offset) + index;
}

static bool is_live(const struct session_record *record)
{
    return atomic_load_explicit(&record->state, memory_order_relaxed) == SESSION_RECORD_LIVE;
}

static struct session_record *find(const struct blocks *blocks, uint64_t session)
{
    for (uint32_t i = 0; i < blocks->session_capacity; i++) {
        struct session_record *record = blocks_session_record(blocks, i);
        if (is_live(record) && record->session == session)
            return record;
    }
    return NULL;
}

const struct session_record *blocks_session_find(const struct blocks *blocks, uint64_t session)
{
    return find(blocks, session);
}

/* Equal in what an order says; lanes, padding and state do not count. */
static bool is_same(const struct session_record *a, const struct session_record *b)
{
    return a->session == b->session && memcmp(a->model, b->model, sizeof(a->model)) == 0 &&
           a->opened_unix_s == b->opened_unix_s && a->exact_tokens == b->exact_tokens && a->flags == b->flags &&
           a->idle_timeout_s == b->idle_timeout_s && strcmp(a->policy, b->policy) == 0;
}

/* Takes the lanes of a record with as many or more moves. */
static int move(struct session_record *known, const struct session_record *record)
{
    uint32_t old = atomic_load_explicit(&known->moves, memory_order_relaxed);
    uint32_t new = atomic_load_explicit(&record->moves, memory_order_relaxed);
    const uint8_t *lanes = record->lane_store[new % 2];
    if (new < old)
        return -ESTALE;
    if (new == old)
        return memcmp(known->lane_store[old % 2], lanes, LAYOUT_N_LANES) == 0 ? 0 : -EEXIST;
    if (new % 2 == old % 2)
        return -EINVAL;
    memcpy(known->lane_store[new % 2], lanes, LAYOUT_N_LANES);
    atomic_store_explicit(&known->moves, new, memory_order_release);
    return 0;
}

int blocks_session_open(struct blocks *blocks, const struct session_record *record)
{
    if (record->session == 0 || !memchr(record->policy, 0, sizeof(record->policy)))
        return -EINVAL;
    struct session_record *known = find(blocks, record->session);
    if (known)
        return is_same(known, record) ? move(known, record) : -EEXIST;
    for (uint32_t i = 0; i < blocks->session_capacity; i++) {
        struct session_record *slot = blocks_session_record(blocks, i);
        if (is_live(slot))
            continue;
        struct session_record copy = *record;
        atomic_store_explicit(&copy.state, SESSION_RECORD_FREE, memory_order_relaxed);
        memcpy(slot, &copy, sizeof(copy));
        atomic_store_explicit(&slot->state, SESSION_RECORD_LIVE, memory_order_release);
        return 0;
    }
    return -ENOSPC;
}

uint32_t blocks_release(struct blocks *blocks, uint64_t session, uint32_t from_number, uint32_t lanes)
{
    uint32_t n_released = 0;
    if (session == 0)
        return 0;
    for (uint32_t i = 0; i < blocks->n_blocks; i++) {
        const struct block_entry *entry = &blocks->entries[i];
        if (entry->session != session || entry->number < from_number)
            continue;
        if (lanes != 0 && (lanes >> entry->number % LAYOUT_N_LANES & 1) == 0)
            continue;
        blocks_set_state(blocks, i, BLOCK_FREE);
        n_released++;
    }
    /* The record goes last: a store killed on the way leaves a session that can still be released, not orphans. */
    struct session_record *record = find(blocks, session);
    if (record && from_number == 0 && lanes == 0)
        atomic_store_explicit(&record->state, SESSION_RECORD_FREE, memory_order_release);
    return n_released;
}
