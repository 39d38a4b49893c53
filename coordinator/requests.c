#include "coordinator/requests.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct requests {
    uint32_t capacity, n_entries;
    struct request *entries[]; /* no holes */
};

#define TO(state) (1u << (state))
static const struct {
    const char *name;
    uint32_t to;
} states[] = {
    [REQUEST_ENTERED] = {"entered",
                         TO(REQUEST_PREPARING) | TO(REQUEST_RESERVING) | TO(REQUEST_QUEUED) | TO(REQUEST_DONE)},
    [REQUEST_PREPARING] = {"preparing", TO(REQUEST_RESERVING) | TO(REQUEST_DONE)},
    [REQUEST_RESERVING] = {"reserving", TO(REQUEST_QUEUED) | TO(REQUEST_WAITING) | TO(REQUEST_DONE)},
    [REQUEST_WAITING] = {"waiting for room", TO(REQUEST_RESERVING) | TO(REQUEST_DONE)},
    [REQUEST_QUEUED] = {"queued", TO(REQUEST_RUNNING) | TO(REQUEST_DONE)},
    [REQUEST_RUNNING] = {"running", TO(REQUEST_QUEUED) | TO(REQUEST_CANCELLING) | TO(REQUEST_DONE)},
    [REQUEST_CANCELLING] = {"cancelling", TO(REQUEST_QUEUED) | TO(REQUEST_DONE)},
    [REQUEST_DONE] = {"done", 0},
};

static const char *const kind_names[] = {
    [REQUEST_OPEN] = "OpenSession",
    [REQUEST_CLOSE] = "CloseSession",
    [REQUEST_APPEND] = "Append",
    [REQUEST_GENERATE] = "Generate",
    [REQUEST_SCORE] = "Score",
    [REQUEST_FORK] = "Fork",
    [REQUEST_SET_POLICY] = "SetPolicy",
    [REQUEST_DESCRIBE] = "DescribeSession",
    [REQUEST_DRAIN] = "Drain",
    [REQUEST_DRAIN_STORE] = "DrainStore",
    [REQUEST_SET_TRANSPORT] = "SetTransport",
    [REQUEST_JOB] = "RunJob",
    [REQUEST_TOKENIZE] = "Tokenize",
    [REQUEST_DETOKENIZE] = "Detokenize",
};

int requests_new(uint32_t capacity, struct requests **ret_requests)
{
    struct requests *requests = calloc(1, sizeof(*requests) + capacity * sizeof(struct request *));
    if (!requests)
        return -ENOMEM;
    requests->capacity = capacity;
    *ret_requests = requests;
    return 0;
}

static void free_request(struct request *request)
{
    if (request->message && request->message_free)
        request->message_free(request->message);
    free(request->ids);
    free(request);
}

struct requests *requests_free(struct requests *requests)
{
    if (requests)
        for (uint32_t i = 0; i < requests->n_entries; i++)
            free_request(requests->entries[i]);
    free(requests);
    return NULL;
}

const char *requests_kind_name(enum request_kind kind)
{
    return kind <= REQUEST_DETOKENIZE ? kind_names[kind] : "unknown";
}

const char *requests_state_name(enum request_state state)
{
    return state <= REQUEST_DONE ? states[state].name : "unknown";
}

bool requests_same_route(const struct client_route *a, const struct client_route *b)
{
    return a->n_bytes == b->n_bytes && memcmp(a->bytes, b->bytes, a->n_bytes) == 0;
}

int requests_add(struct requests *requests, const struct request *given, struct request **ret_request)
{
    if (requests_find(requests, &given->client, given->id))
        return -EEXIST;
    if (requests->n_entries == requests->capacity)
        return -ENOSPC;
    struct request *request = malloc(sizeof(*request));
    if (!request)
        return -ENOMEM;
    *request = *given;
    request->state = REQUEST_ENTERED;
    requests->entries[requests->n_entries++] = request;
    *ret_request = request;
    return 0;
}

struct request *requests_find(const struct requests *requests, const struct client_route *client, uint64_t id)
{
    for (uint32_t i = 0; i < requests->n_entries; i++)
        if (requests->entries[i]->id == id && requests_same_route(&requests->entries[i]->client, client))
            return requests->entries[i];
    return NULL;
}

struct request *requests_find_work(const struct requests *requests, uint64_t worker, uint64_t work)
{
    for (uint32_t i = 0; i < requests->n_entries; i++)
        if (work != 0 && requests->entries[i]->work == work && requests->entries[i]->worker == worker)
            return requests->entries[i];
    return NULL;
}

struct request *requests_next(const struct requests *requests, uint32_t *cursor)
{
    return *cursor < requests->n_entries ? requests->entries[(*cursor)++] : NULL;
}

uint64_t requests_bytes(const struct requests *requests)
{
    uint64_t n_bytes = 0;
    for (uint32_t i = 0; i < requests->n_entries; i++)
        n_bytes += requests->entries[i]->message_bytes;
    return n_bytes;
}

uint32_t requests_count(const struct requests *requests)
{
    return requests->n_entries;
}

uint32_t requests_count_at(const struct requests *requests, uint64_t worker)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < requests->n_entries; i++)
        n += requests->entries[i]->worker == worker;
    return n;
}

void requests_remove(struct requests *requests, struct request *request)
{
    for (uint32_t i = 0; i < requests->n_entries; i++)
        if (requests->entries[i] == request) {
            memmove(&requests->entries[i], &requests->entries[i + 1],
                    (requests->n_entries - i - 1) * sizeof(struct request *));
            requests->n_entries--;
            free_request(request);
            return;
        }
}

int requests_move(struct request *request, enum request_state state, uint64_t now_us)
{
    if (state > REQUEST_DONE || !(states[request->state].to & TO(state)))
        return -EPROTO;
    request->state = state;
    request->waiting_us = now_us;
    return 0;
}

enum admission requests_admit(uint64_t n_ctx, uint64_t at, uint64_t n_input, bool generates, bool default_max_tokens,
                              uint32_t *max_tokens)
{
    if (at > n_ctx || n_input > n_ctx - at)
        return ADMISSION_INPUT_TOO_LONG;
    if (!generates)
        return ADMISSION_OK;
    uint64_t room = n_ctx - at - n_input;
    if (room == 0)
        return ADMISSION_INPUT_TOO_LONG;
    if (*max_tokens <= room)
        return ADMISSION_OK;
    if (!default_max_tokens)
        return ADMISSION_TOO_LONG;
    *max_tokens = (uint32_t)room;
    return ADMISSION_OK;
}
