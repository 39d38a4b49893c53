#include "coordinator/sessions.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct sessions {
    uint32_t capacity;
    uint32_t n_entries, entry_capacity;
    struct session **entries; /* no holes */
};

#define TO(state) (1u << (state))
static const struct {
    const char *name;
    uint32_t to;
} states[] = {
    [SESSION_OPENING] = {"opening", TO(SESSION_READY) | TO(SESSION_CLOSING)},
    [SESSION_READY] = {"ready", TO(SESSION_RUNNING) | TO(SESSION_CLOSING)},
    [SESSION_RUNNING] = {"running", TO(SESSION_READY)},
    [SESSION_RECOVERING] = {"recovering", TO(SESSION_READY) | TO(SESSION_CLOSING)},
    [SESSION_CLOSING] = {"closing", TO(SESSION_CLOSED)},
    [SESSION_CLOSED] = {"closed", 0},
};

int sessions_new(uint32_t capacity, struct sessions **ret_sessions)
{
    struct sessions *sessions = calloc(1, sizeof(*sessions));
    if (!sessions)
        return -ENOMEM;
    sessions->capacity = capacity;
    *ret_sessions = sessions;
    return 0;
}

static void free_session(struct session *session)
{
    free(session->blocks);
    free(session->found);
    free(session);
}

struct sessions *sessions_free(struct sessions *sessions)
{
    if (!sessions)
        return NULL;
    for (uint32_t i = 0; i < sessions->n_entries; i++)
        free_session(sessions->entries[i]);
    free(sessions->entries);
    free(sessions);
    return NULL;
}

const char *sessions_state_name(enum session_state state)
{
    return state <= SESSION_CLOSED ? states[state].name : "unknown";
}

struct session *sessions_find(const struct sessions *sessions, uint64_t id)
{
    for (uint32_t i = 0; i < sessions->n_entries; i++)
        if (sessions->entries[i]->id == id)
            return sessions->entries[i];
    return NULL;
}

int sessions_add(struct sessions *sessions, uint64_t id, enum session_state state, struct session **ret_session)
{
    if (id == 0 || (state != SESSION_OPENING && state != SESSION_RECOVERING))
        return -EINVAL;
    if (sessions_find(sessions, id))
        return -EEXIST;
    if (state == SESSION_OPENING && sessions->n_entries >= sessions->capacity)
        return -ENOSPC;
    if (sessions->n_entries == sessions->entry_capacity) {
        uint32_t capacity = sessions->entry_capacity ? sessions->entry_capacity * 2 : 16;
        struct session **entries = realloc(sessions->entries, capacity * sizeof(struct session *));
        if (!entries)
            return -ENOMEM;
        sessions->entries = entries;
        sessions->entry_capacity = capacity;
    }
    struct session *session = calloc(1, sizeof(*session));
    if (!session)
        return -ENOMEM;
    session->id = id;
    session->state = state;
    sessions->entries[sessions->n_entries++] = session;
    *ret_session = session;
    return 0;
}

struct session *sessions_next(const struct sessions *sessions, uint32_t *cursor)
{
    return *cursor < sessions->n_entries ? sessions->entries[(*cursor)++] : NULL;
}

uint32_t sessions_count(const struct sessions *sessions)
{
    return sessions->n_entries;
}

void sessions_remove(struct sessions *sessions, struct session *session)
{
    for (uint32_t i = 0; i < sessions->n_entries; i++)
        if (sessions->entries[i] == session) {
            memmove(&sessions->entries[i], &sessions->entries[i + 1],
                    (sessions->n_entries - i - 1) * sizeof(struct session *));
            sessions->n_entries--;
            free_session(session);
            return;
        }
}

int sessions_move(struct session *session, enum session_state state)
{
    if (state > SESSION_CLOSED || !(states[session->state].to & TO(state)))
        return -EPROTO;
    session->state = state;
    return 0;
}

int sessions_add_blocks(struct session *session, const struct placed_block *blocks, uint32_t n_blocks)
{
    uint32_t n_total = session->n_blocks + n_blocks;
    if (n_total > session->block_capacity) {
        uint32_t capacity = n_total < 2 * session->block_capacity ? 2 * session->block_capacity : n_total;
        struct session_block *grown = realloc(session->blocks, capacity * sizeof(struct session_block));
        if (!grown)
            return -ENOMEM;
        session->blocks = grown;
        session->block_capacity = capacity;
    }
    for (uint32_t i = 0; i < n_blocks; i++)
        session->blocks[session->n_blocks++] = (struct session_block){blocks[i].handle, blocks[i].store, false};
    return 0;
}

void sessions_cut_blocks(struct session *session, uint32_t from)
{
    if (from < session->n_blocks)
        session->n_blocks = from;
}

uint32_t sessions_first_unconfirmed(const struct session *session)
{
    uint32_t number = 0;
    while (number < session->n_blocks && session->blocks[number].confirmed)
        number++;
    return number;
}

void sessions_forget_store(struct session *session, uint32_t store)
{
    for (uint32_t i = 0; i < session->n_blocks; i++)
        if (session->blocks[i].store == store)
            session->blocks[i].handle.generation = 0;
    for (uint32_t i = 0; i < session->n_found; i++)
        if (session->found[i].store == store)
            session->found[i].handle.generation = 0;
}

uint64_t sessions_lane_stores(const uint8_t lane_store[LAYOUT_N_LANES])
{
    uint64_t stores = 0;
    for (uint32_t lane = 0; lane < LAYOUT_N_LANES; lane++)
        stores |= UINT64_C(1) << (lane_store[lane] & 63u);
    return stores;
}

uint64_t sessions_stores(const struct session *session)
{
    uint64_t stores = session->records;
    if (session->terms.policy[0] != 0) /* else no record was read: lane_store says nothing */
        stores |= sessions_lane_stores(session->terms.lane_store);
    for (uint32_t i = 0; i < session->n_blocks; i++)
        stores |= UINT64_C(1) << (session->blocks[i].store & 63u);
    for (uint32_t i = 0; i < session->n_found; i++)
        stores |= UINT64_C(1) << (session->found[i].store & 63u);
    return stores;
}

/* The header of the number-th block; NULL: not confirmed, or not the session's as far as can be seen. */
static const struct block_header *header_of(const struct session *session, const struct descriptors *descriptors,
                                            uint32_t number)
{
    const struct session_block *block = &session->blocks[number];
    const struct segment_view *view = block->confirmed ? descriptors_view(descriptors, block->store) : NULL;
    if (!view || block->handle.index >= view->header.n_blocks)
        return NULL;
    const struct block_header *header = descriptors_block(view, block->handle.index);
    return header->session == session->id && header->handle.generation == block->handle.generation ? header : NULL;
}

uint64_t sessions_n_tokens(const struct session *session, const struct descriptors *descriptors)
{
    uint64_t n_tokens = 0;
    for (uint32_t i = 0; i < session->n_blocks; i++) {
        const struct block_header *header = header_of(session, descriptors, i);
        uint32_t n_ids = header ? atomic_load_explicit(&header->n_ids, memory_order_acquire) : 0;
        if (n_ids > LAYOUT_BLOCK_TOKENS)
            break;
        n_tokens += n_ids;
        if (n_ids < LAYOUT_BLOCK_TOKENS)
            break;
    }
    return n_tokens;
}

uint32_t sessions_n_sealed(const struct session *session, const struct descriptors *descriptors)
{
    uint32_t number = 0;
    for (; number < session->n_blocks; number++) {
        const struct block_header *header = header_of(session, descriptors, number);
        if (!header || atomic_load_explicit(&header->state, memory_order_acquire) != BLOCK_SEALED)
            break;
    }
    return number;
}

bool sessions_same_ids(const struct session *a, const struct session *b, const struct descriptors *descriptors,
                       uint32_t n_blocks)
{
    for (uint32_t i = 0; i < n_blocks; i++) {
        const struct block_header *left = i < a->n_blocks ? header_of(a, descriptors, i) : NULL;
        const struct block_header *right = i < b->n_blocks ? header_of(b, descriptors, i) : NULL;
        if (!left || !right || memcmp(left->ids, right->ids, sizeof(left->ids)) != 0)
            return false;
    }
    return true;
}

uint32_t sessions_bound_to(const struct sessions *sessions, uint64_t worker)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < sessions->n_entries; i++) {
        const struct session *session = sessions->entries[i];
        n += session->worker == worker && session->state != SESSION_CLOSING && session->state != SESSION_CLOSED;
    }
    return n;
}

bool sessions_model(const struct sessions *sessions, uint64_t ret_model[2])
{
    for (uint32_t i = 0; i < sessions->n_entries; i++) {
        const struct session *session = sessions->entries[i];
        if (session->state == SESSION_CLOSING || session->state == SESSION_CLOSED || session->terms.policy[0] == 0)
            continue;
        memcpy(ret_model, session->terms.model, sizeof(session->terms.model));
        return true;
    }
    return false;
}

bool sessions_idle(const struct session *session, uint64_t now_us, uint32_t default_timeout_s)
{
    if (session->state != SESSION_READY || session->request || now_us < session->active_us)
        return false;
    uint32_t timeout_s = session->terms.idle_timeout_s ? session->terms.idle_timeout_s : default_timeout_s;
    if (session->terms.flags & SESSION_EPHEMERAL && timeout_s > SESSIONS_EPHEMERAL_IDLE_S)
        timeout_s = SESSIONS_EPHEMERAL_IDLE_S;
    return now_us - session->active_us > (uint64_t)timeout_s * 1000000u;
}
