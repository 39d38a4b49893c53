#include "coordinator/rebuild.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void read_terms(const struct session_record *record, struct session_terms *terms)
{
    *terms = (struct session_terms){.model = {record->model[0], record->model[1]},
                                    .opened_unix_s = record->opened_unix_s,
                                    .exact_tokens = record->exact_tokens,
                                    .flags = record->flags,
                                    .idle_timeout_s = record->idle_timeout_s,
                                    .moves = atomic_load_explicit(&record->moves, memory_order_acquire)};
    memcpy(terms->lane_store, record->lane_store[terms->moves % 2], sizeof(terms->lane_store));
    memcpy(terms->policy, record->policy, sizeof(terms->policy));
    terms->policy[sizeof(terms->policy) - 1] = 0;
    if (terms->policy[0] == 0)
        strcpy(terms->policy, "unknown"); /* a record without a policy is none that we wrote */
}

/* But for where lanes are. */
static bool same_terms(const struct session_terms *a, const struct session_terms *b)
{
    return memcmp(a->model, b->model, sizeof(a->model)) == 0 && a->exact_tokens == b->exact_tokens &&
           a->flags == b->flags && strcmp(a->policy, b->policy) == 0;
}

/* The record of one more store. Where lanes are is true as the record with the most moves has it. */
static void merge_terms(struct session *session, uint32_t store, const struct session_terms *terms)
{
    if (session->terms.policy[0] == 0) {
        session->terms = *terms;
    } else if (!same_terms(&session->terms, terms) ||
               (session->terms.moves == terms->moves &&
                memcmp(session->terms.lane_store, terms->lane_store, sizeof(terms->lane_store)) != 0)) {
        session->terms_conflict = true;
    } else if (terms->moves > session->terms.moves) {
        session->outdated |= session->records;
        session->terms = *terms;
    } else if (terms->moves < session->terms.moves) {
        session->outdated |= UINT64_C(1) << store;
    }
}

static int find_or_add(struct sessions *sessions, uint64_t id, struct session **ret_session)
{
    struct session *session = sessions_find(sessions, id);
    if (session) {
        *ret_session = session;
        return 0;
    }
    return sessions_add(sessions, id, SESSION_RECOVERING, ret_session);
}

static int read_records(struct sessions *sessions, uint32_t store, const struct segment_view *view)
{
    for (uint64_t i = 0; i < view->header.session_capacity; i++) {
        const struct session_record *record = descriptors_record(view, i);
        if (atomic_load_explicit(&record->state, memory_order_acquire) != SESSION_RECORD_LIVE || record->session == 0)
            continue;
        struct session *session;
        int result = find_or_add(sessions, record->session, &session);
        if (result != 0)
            return result;
        struct session_terms terms;
        read_terms(record, &terms);
        if (session->state == SESSION_RECOVERING)
            merge_terms(session, store, &terms);
        session->records |= UINT64_C(1) << store;
    }
    return 0;
}

static int add_found(struct session *session, const struct found_block *found)
{
    if (session->n_found == session->found_capacity) {
        uint32_t capacity = session->found_capacity ? session->found_capacity * 2 : 16;
        struct found_block *grown = realloc(session->found, capacity * sizeof(*grown));
        if (!grown)
            return -ENOMEM;
        session->found = grown;
        session->found_capacity = capacity;
    }
    session->found[session->n_found++] = *found;
    return 0;
}

static int read_blocks(struct sessions *sessions, struct placement *placement, uint32_t store,
                       const struct segment_view *view)
{
    for (uint32_t i = 0; i < view->header.n_blocks; i++) {
        const struct block_header *header = descriptors_block(view, i);
        uint32_t state = atomic_load_explicit(&header->state, memory_order_acquire);
        if (state == BLOCK_FREE || header->magic != BLOCK_MAGIC || header->session == 0)
            continue;
        struct session *session;
        int result = find_or_add(sessions, header->session, &session);
        if (result != 0)
            return result;
        struct found_block found = {
            .handle = {i, header->handle.generation},
            .previous = header->previous,
            .previous_store = header->previous_store,
            .number = header->number,
            .n_ids = atomic_load_explicit(&header->n_ids, memory_order_acquire),
            .store = (uint8_t)store,
        };
        if (placement_claim(placement, store, found.handle) != 0)
            continue;
        result = add_found(session, &found);
        if (result != 0)
            return result;
    }
    return 0;
}

int rebuild_store(struct sessions *sessions, struct placement *placement, uint32_t store,
                  const struct segment_view *view)
{
    int result = read_records(sessions, store, view);
    return result != 0 ? result : read_blocks(sessions, placement, store, view);
}

static int by_number(const void *a, const void *b)
{
    const struct found_block *left = a, *right = b;
    if (left->number != right->number)
        return left->number < right->number ? -1 : 1;
    return left->store < right->store ? -1 : left->store > right->store;
}

static bool broken(struct rebuild_verdict *verdict, const char *format, ...) __attribute__((format(printf, 2, 3)));
static bool broken(struct rebuild_verdict *verdict, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(verdict->reason, sizeof(verdict->reason), format, arguments);
    va_end(arguments);
    return false;
}

static uint64_t stores_of_lanes(const struct session *session)
{
    return session->terms.policy[0] != 0 ? sessions_lane_stores(session->terms.lane_store) : 0;
}

/* Does found[i] follow found[i - 1] as it should? */
static bool follows(const struct session *session, uint32_t i)
{
    const struct found_block *block = &session->found[i];
    if (block->number != i || block->store != session->terms.lane_store[i % LAYOUT_N_LANES])
        return false;
    if (session->terms.moves > 0)
        return true; /* links name where blocks were before they moved; number and store are what holds */
    if (i == 0)
        return block->previous.generation == 0;
    const struct found_block *before = &session->found[i - 1];
    return block->previous.index == before->handle.index && block->previous.generation == before->handle.generation &&
           block->previous_store == before->store;
}

/* Sets *ret_n_whole: the first blocks that make up the session. */
static bool is_whole(const struct session *session, uint32_t *ret_n_whole, struct rebuild_verdict *verdict)
{
    if (session->terms.policy[0] == 0)
        return broken(verdict, "blocks without a session record");
    if (session->terms_conflict)
        return broken(verdict, "its records in different stores disagree");
    for (uint32_t lane = 0; lane < LAYOUT_N_LANES; lane++)
        if (session->terms.lane_store[lane] >= DESCRIPTORS_MAX_STORES)
            return broken(verdict, "lane %u lives in value-store %u, and there is no store of that number", lane,
                          session->terms.lane_store[lane]);
    uint64_t missing = stores_of_lanes(session) & ~session->records;
    if (missing)
        return broken(verdict, "value-store %d has no record of it", __builtin_ctzll(missing));
    uint32_t n_whole = 0;
    while (n_whole < session->n_found && follows(session, n_whole))
        n_whole++;
    bool ended = false; /* the first block that is not full is the last one with ids */
    for (uint32_t i = 0; i < session->n_found; i++) {
        uint32_t n_ids = session->found[i].n_ids;
        if (n_ids > LAYOUT_BLOCK_TOKENS)
            return broken(verdict, "block %u claims %u ids", session->found[i].number, n_ids);
        if (n_ids > 0 && i >= n_whole)
            return broken(verdict, "block %u is missing or in the wrong place", n_whole);
        if (n_ids > 0 && ended)
            return broken(verdict, "block %u has ids and the one before it is not full", i);
        ended = ended || n_ids < LAYOUT_BLOCK_TOKENS;
    }
    *ret_n_whole = n_whole;
    return true;
}

/* Blocks that lie in another store than their lane's - a move left them - to the end. Returns how many come before. */
static uint32_t strays_last(struct session *session)
{
    uint32_t n_right = 0;
    if (session->terms.policy[0] == 0 || session->terms_conflict)
        return session->n_found;
    for (uint32_t i = 0; i < session->n_found; i++) {
        struct found_block block = session->found[i];
        if (block.store != session->terms.lane_store[block.number % LAYOUT_N_LANES])
            continue;
        session->found[i] = session->found[n_right];
        session->found[n_right++] = block;
    }
    return n_right;
}

static int take_strays(const struct session *session, uint32_t first, struct rebuild_verdict *verdict)
{
    verdict->strays = calloc(session->n_found - first + 1u, sizeof(*verdict->strays));
    if (!verdict->strays)
        return -ENOMEM;
    for (uint32_t i = first; i < session->n_found; i++) {
        const struct found_block *block = &session->found[i];
        verdict->strays[verdict->n_strays++] = (struct placed_block){block->handle, block->store};
        verdict->stray_lanes[block->store & 63u] |= UINT32_C(1) << block->number % LAYOUT_N_LANES;
    }
    return 0;
}

/* found -> blocks [0, n) of the session and, of a whole session, the others to verdict->cut. */
static int settle(struct session *session, uint32_t n_kept, struct rebuild_verdict *verdict)
{
    struct placed_block *placed = calloc(session->n_found + 1, sizeof(*placed));
    if (!placed)
        return -ENOMEM;
    for (uint32_t i = 0; i < session->n_found; i++)
        placed[i] = (struct placed_block){session->found[i].handle, session->found[i].store};
    int result = sessions_add_blocks(session, placed, n_kept);
    if (result != 0) {
        free(placed);
        return result;
    }
    for (uint32_t i = 0; i < session->n_blocks; i++)
        session->blocks[i].confirmed = true;
    verdict->n_cut = session->n_found - n_kept;
    memmove(placed, placed + n_kept, verdict->n_cut * sizeof(*placed));
    verdict->cut = placed;
    if (verdict->n_cut > 0)
        verdict->release_from = n_kept;
    free(session->found);
    session->found = NULL;
    session->n_found = session->found_capacity = 0;
    return 0;
}

int rebuild_judge(struct sessions *sessions, uint64_t there, bool all, struct rebuild_verdict *ret_verdict)
{
    uint32_t cursor = 0;
    for (struct session *session; (session = sessions_next(sessions, &cursor));) {
        if (session->state != SESSION_RECOVERING || session->close_wanted)
            continue;
        if (!all && (stores_of_lanes(session) & ~there))
            continue;
        struct rebuild_verdict verdict = {.session = session, .release_from = REBUILD_NOTHING};
        uint32_t n_found = session->n_found, n_right = strays_last(session);
        if (n_right > 0)
            qsort(session->found, n_right, sizeof(*session->found), by_number);
        session->n_found = n_right;
        uint32_t n_kept = n_right;
        verdict.broken = !is_whole(session, &n_kept, &verdict);
        session->n_found = n_found;
        int result = 0;
        if (verdict.broken) {
            n_kept = n_found; /* all are to be freed */
        } else {
            result = take_strays(session, n_right, &verdict);
            session->n_found = n_right;
        }
        if (result == 0)
            result = settle(session, n_kept, &verdict);
        if (result != 0) {
            free(verdict.strays);
            return result;
        }
        if (verdict.broken) {
            session->close_wanted = true;
            session->close_why = "broken";
        } else {
            (void)sessions_move(session, SESSION_READY);
        }
        *ret_verdict = verdict;
        return 0;
    }
    return -ENOENT;
}

static bool has_record(const struct session *session, const struct segment_view *view)
{
    for (uint64_t i = 0; i < view->header.session_capacity; i++) {
        const struct session_record *record = descriptors_record(view, i);
        if (atomic_load_explicit(&record->state, memory_order_acquire) == SESSION_RECORD_LIVE &&
            record->session == session->id)
            return true;
    }
    return false;
}

bool rebuild_still_whole(const struct session *session, uint32_t store, const struct segment_view *view)
{
    if (!(sessions_stores(session) >> store & 1u))
        return true;
    if (!has_record(session, view))
        return false;
    for (uint32_t i = 0; i < session->n_blocks; i++) {
        const struct session_block *block = &session->blocks[i];
        if (block->store != store || !block->confirmed)
            continue;
        if (block->handle.index >= view->header.n_blocks)
            return false;
        const struct block_header *header = descriptors_block(view, block->handle.index);
        if (atomic_load_explicit(&header->state, memory_order_acquire) == BLOCK_FREE ||
            header->session != session->id || header->handle.generation != block->handle.generation ||
            header->number != i)
            return false;
    }
    return true;
}
