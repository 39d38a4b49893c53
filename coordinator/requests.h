/*
 * requests.h - what clients asked for and is not finished: who asked, how far it is, where it runs.
 *
 * Owner      the server's thread. A request owns its ids and, through `message_free`, the client's message.
 * Invariant  states change by the table in requests.c only; (client, id) and work are unique among the entries.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "coordinator/sessions.h"

#define REQUESTS_ROUTE_BYTES 32u

struct client_route { /* ZeroMQ routing id of a client */
    uint8_t n_bytes;
    uint8_t bytes[REQUESTS_ROUTE_BYTES];
};

enum request_kind {
    REQUEST_OPEN,
    REQUEST_CLOSE,
    REQUEST_APPEND,
    REQUEST_GENERATE,
    REQUEST_SCORE,
    REQUEST_FORK,
    REQUEST_SET_POLICY,
    REQUEST_DESCRIBE,
    REQUEST_DRAIN,
    REQUEST_DRAIN_STORE,
    REQUEST_SET_TRANSPORT,
    REQUEST_JOB,
    REQUEST_TOKENIZE,
    REQUEST_DETOKENIZE,
};

enum request_state {
    REQUEST_ENTERED,   /* waits for its session: known, whole, free */
    REQUEST_PREPARING, /* waits for a worker to make ids of the input, or pieces or text of ids, or to count */
    REQUEST_RESERVING, /* waits for the stores (Drain: for the others; DrainStore: for moves; SetTransport: for all pairs) */
    REQUEST_WAITING,    /* in the queue for room: holds its session and no new blocks */
    REQUEST_QUEUED,     /* has room (a job needs none); waits for a worker */
    REQUEST_RUNNING,    /* a worker runs it */
    REQUEST_CANCELLING, /* the worker was told to stop; its final reply is awaited */
    REQUEST_DONE,
};

struct request {
    struct client_route client;
    uint64_t id;
    enum request_kind kind;
    enum request_state state;
    void *message; /* the client's, unpacked */
    size_t message_bytes;
    void (*message_free)(void *message);

    uint64_t session_id;
    struct session *session; /* that it holds (session->request == this), or NULL */
    uint32_t *ids;           /* of the input */
    uint64_t n_ids;
    bool prepared; /* ids are there */
    bool have_at;
    uint64_t at;
    uint32_t max_tokens;
    bool default_max_tokens;
    uint32_t resume_from; /* as the client said */
    uint64_t forwarded;   /* tokens (Score: positions; RunJob: rows) that the client has */
    uint64_t score_base;  /* first position that was scored */

    uint64_t ticket;    /* place in the queue for room, growing; 0: never was in it */
    uint64_t queued_us; /* since when it waits for room */
    uint64_t probed_us; /* when its client was last looked for, or told something of a job */
    uint32_t n_copied;  /* Fork: blocks that are copied */
    uint64_t n_before;  /* Drain: requests that had ended before */

    uint64_t worker;   /* incarnation; 0: not at a worker */
    uint64_t work;     /* id of the work there; 0: none */
    uint32_t n_deaths; /* dispatches that ended by a worker's death, without progress in between */
    uint64_t n_done;   /* of the last Progress */
    bool mute;         /* the client is gone or was answered: replies are dropped */
    bool cancelled;    /* the client asked for it */
    bool restart;      /* stop and run again from resume_from */
    bool started;      /* DrainStore: its supervisor was told to start it */
    bool parking;      /* stop, and run again once the session has moved; its client need not know */

    uint64_t entered_us, dispatched_us; /* first Run */
    uint64_t waiting_us;                /* since when it waits for something that may never come */
    uint64_t heard_us;                  /* last reply of the worker */
};

struct requests;

int requests_new(uint32_t capacity, struct requests **ret_requests);
struct requests *requests_free(struct requests *requests); /* accepts NULL, returns NULL */

const char *requests_kind_name(enum request_kind kind);
const char *requests_state_name(enum request_state state);

/* A copy of `given` with the lists' fields set. Takes given->message over on success. -EEXIST, -ENOSPC, -ENOMEM. */
int requests_add(struct requests *requests, const struct request *given, struct request **ret_request);
struct request *requests_find(const struct requests *requests, const struct client_route *client, uint64_t id);
struct request *requests_find_work(const struct requests *requests, uint64_t worker, uint64_t work);
struct request *requests_next(const struct requests *requests, uint32_t *cursor);
uint64_t requests_bytes(const struct requests *requests); /* of all messages */
uint32_t requests_count(const struct requests *requests);
uint32_t requests_count_at(const struct requests *requests, uint64_t worker);
void requests_remove(struct requests *requests, struct request *request); /* frees it */

int requests_move(struct request *request, enum request_state state, uint64_t now_us); /* -EPROTO: not a legal move */
/* Does it work on the tokens of a session: Append, Generate, Score? */
static inline bool requests_is_work(enum request_kind kind)
{
    return kind == REQUEST_APPEND || kind == REQUEST_GENERATE || kind == REQUEST_SCORE;
}
/* Does a Drain wait for it, and refuse new ones? */
static inline bool requests_is_drained(enum request_kind kind)
{
    return requests_is_work(kind) || kind == REQUEST_OPEN || kind == REQUEST_FORK || kind == REQUEST_JOB;
}
bool requests_same_route(const struct client_route *a, const struct client_route *b);

/* Blocks that a session needs for n_tokens. */
static inline uint64_t requests_blocks_for(uint64_t n_tokens)
{
    return (n_tokens + LAYOUT_BLOCK_TOKENS - 1) / LAYOUT_BLOCK_TOKENS;
}

enum admission {
    ADMISSION_OK,
    ADMISSION_INPUT_TOO_LONG, /* the input alone does not fit */
    ADMISSION_TOO_LONG,       /* with max_tokens it does not */
};

/* Does at + input + max_tokens fit n_ctx? A default max_tokens is reduced to what fits (at least 1). */
enum admission requests_admit(uint64_t n_ctx, uint64_t at, uint64_t n_input, bool generates, bool default_max_tokens,
                              uint32_t *max_tokens);
