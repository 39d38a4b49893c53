/*
 * sessions.h - the session table: a cache of what the stores hold, and who works on what.
 *
 * Owner      the server's thread.
 * Words      terms: what a session was opened with. blocks: by number, those that are confirmed are OPEN or SEALED in
 *            their store. found: what a new coordinator read from block headers and has not put together yet.
 * Invariant  states change by the table in sessions.c only; one request works on a session at a time; blocks are given
 *            back only when no worker can still use them (request == NULL).
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "coordinator/descriptors.h"
#include "coordinator/placement.h"
#include "proto/layout.h"

enum session_state {
    SESSION_OPENING,    /* its record is being written */
    SESSION_READY,      /* no request */
    SESSION_RUNNING,    /* a request holds it */
    SESSION_RECOVERING, /* found in segments; a store is missing or it was not judged yet */
    SESSION_CLOSING,    /* its blocks are being freed */
    SESSION_CLOSED,
};

struct session_terms {
    uint64_t model[2];
    uint64_t opened_unix_s;
    uint32_t exact_tokens;
    uint32_t flags; /* SESSION_EPHEMERAL */
    uint32_t idle_timeout_s;
    uint32_t moves; /* how often lanes went to other stores */
    uint8_t lane_store[LAYOUT_N_LANES];
    char policy[LAYOUT_POLICY_BYTES];
};

struct session_block {
    struct block_handle handle;
    uint8_t store;
    bool confirmed;
};

struct found_block {
    struct block_handle handle, previous;
    uint32_t previous_store;
    uint32_t number;
    uint32_t n_ids;
    uint8_t store;
};

struct move;

struct session {
    uint64_t id;
    enum session_state state;
    struct session_terms terms;
    struct session_block *blocks;
    uint32_t n_blocks, block_capacity;
    uint32_t n_pending;    /* operations of stores that are not done */
    int reserve_status;    /* first error of a reservation */
    bool close_wanted;     /* close it as soon as nothing works on it */
    const char *close_why; /* for the log; static text */
    void *request;         /* that works on it; of the server */
    uint64_t worker;       /* incarnation it is bound to: has, or will have, its device memory; 0: none yet */
    uint64_t active_us;    /* last request */
    uint64_t freed_bytes;  /* while closing */
    uint64_t records;      /* bit per store in which the record was found */
    uint64_t outdated;     /* those of them that say where lanes were before a move */
    bool terms_conflict;   /* records of different stores disagree */
    struct move *move;     /* of lanes to other stores; of moves.c */
    struct found_block *found;
    uint32_t n_found, found_capacity;
};

struct sessions;

int sessions_new(uint32_t capacity, struct sessions **ret_sessions);
struct sessions *sessions_free(struct sessions *sessions); /* accepts NULL, returns NULL */

const char *sessions_state_name(enum session_state state);

/* A new entry, opening or recovering. -EEXIST; -ENOSPC: the table is full (recovering ones are always taken); -ENOMEM;
 * -EINVAL: id 0. */
int sessions_add(struct sessions *sessions, uint64_t id, enum session_state state, struct session **ret_session);
struct session *sessions_find(const struct sessions *sessions, uint64_t id); /* NULL: none */
struct session *sessions_next(const struct sessions *sessions, uint32_t *cursor);
uint32_t sessions_count(const struct sessions *sessions);
void sessions_remove(struct sessions *sessions, struct session *session); /* state closed */

int sessions_move(struct session *session, enum session_state state); /* -EPROTO: not a legal move */

/* Appends blocks that placement gave. -ENOMEM. Then those of [from, n_blocks) are cut off (they are the caller's). */
int sessions_add_blocks(struct session *session, const struct placed_block *blocks, uint32_t n_blocks);
void sessions_cut_blocks(struct session *session, uint32_t from);
uint32_t sessions_first_unconfirmed(const struct session *session); /* n_blocks: all are confirmed */

/* The segment of that store is gone: handles in it name nothing any more (generation 0 frees nothing). */
void sessions_forget_store(struct session *session, uint32_t store);

/* Stores (bit each) that lanes live in. */
uint64_t sessions_lane_stores(const uint8_t lane_store[LAYOUT_N_LANES]);

/* Stores (bit each) that hold or may hold something of it. */
uint64_t sessions_stores(const struct session *session);

/* Tokens in the journal, from the mapped headers; blocks of an unknown store end the count. */
uint64_t sessions_n_tokens(const struct session *session, const struct descriptors *descriptors);

/* Blocks from the start that are sealed, from the mapped headers. */
uint32_t sessions_n_sealed(const struct session *session, const struct descriptors *descriptors);
/* Are the ids of their first n_blocks sealed blocks equal? */
bool sessions_same_ids(const struct session *a, const struct session *b, const struct descriptors *descriptors,
                       uint32_t n_blocks);

/* Sessions that are bound to that worker and not closing. */
uint32_t sessions_bound_to(const struct sessions *sessions, uint64_t worker);

/* The model of sessions that live (not closing): false when there is none. */
bool sessions_model(const struct sessions *sessions, uint64_t ret_model[2]);

/* Has it been without a request for longer than it may? */
bool sessions_idle(const struct session *session, uint64_t now_us, uint32_t default_timeout_s);
#define SESSIONS_EPHEMERAL_IDLE_S 60u
