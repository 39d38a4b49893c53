/* rpc.c - the client socket: requests come in, replies go out; a client that is gone or does not read loses its request. */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/log.h"
#include "coordinator/state.h"

#define ROUND_MESSAGES 64

int rpc_send(struct server *server, const struct client_route *client, const Hcattn__Reply *reply)
{
    size_t n_bytes = hcattn__reply__get_packed_size(reply);
    uint8_t small[1024];
    uint8_t *bytes = n_bytes <= sizeof(small) ? small : malloc(n_bytes);
    if (!bytes)
        return -ENOMEM;
    hcattn__reply__pack(reply, bytes);
    struct frame frames[2] = {{client->bytes, client->n_bytes}, {bytes, n_bytes}};
    int result = socket_send(server->client_socket, frames, 2, false);
    if (bytes != small)
        free(bytes);
    return result;
}

void rpc_reply(struct server *server, struct request *request, Hcattn__Reply *reply)
{
    if (request->mute)
        return;
    reply->request_id = request->id;
    int result = rpc_send(server, &request->client, reply);
    if (result == -EMSGSIZE) {
        rpc_answer_error(server, &request->client, request->id, HCATTN__ERROR_CODE__INTERNAL,
                         "the answer would be larger than 64 MiB");
        request->mute = true; /* that was the last reply */
    }
    if (result == 0)
        return;
    const char *why = result == -EAGAIN         ? "its client did not read what it was sent"
                      : result == -EHOSTUNREACH ? "its client is gone"
                                                : "its client could not be answered";
    LOG_INFO("request %016llx (%s) cannot be answered: %s (%s)", (unsigned long long)request->id,
             requests_kind_name(request->kind), why, strerror(-result));
    flow_abandon(server, request, why);
}

static void fill(Hcattn__Error *error, Hcattn__ErrorCode code, const struct numbers *numbers, char *sentence)
{
    hcattn__error__init(error);
    error->code = code;
    error->sentence = sentence;
    if (!numbers)
        return;
    error->n_prompt_tokens = numbers->n_prompt_tokens;
    error->n_tokens = numbers->n_tokens;
    error->max_tokens = numbers->max_tokens;
    error->n_ctx = numbers->n_ctx;
    error->bytes_asked = numbers->bytes_asked;
    error->bytes_free = numbers->bytes_free;
    error->n_queued = numbers->n_queued;
    error->max_queued = numbers->max_queued;
}

void rpc_error(struct server *server, struct request *request, Hcattn__ErrorCode code, const struct numbers *numbers,
               const char *format, ...)
{
    char sentence[SERVER_ERROR_BYTES];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(sentence, sizeof(sentence), format, arguments);
    va_end(arguments);
    Hcattn__Error error;
    fill(&error, code, numbers, sentence);
    Hcattn__Reply reply = HCATTN__REPLY__INIT;
    reply.reply_case = HCATTN__REPLY__REPLY_ERROR;
    reply.error = &error;
    rpc_reply(server, request, &reply);
}

void rpc_answer_error(struct server *server, const struct client_route *client, uint64_t request_id,
                      Hcattn__ErrorCode code, const char *sentence)
{
    Hcattn__Error error;
    fill(&error, code, NULL, (char *)(uintptr_t)sentence);
    Hcattn__Reply reply = HCATTN__REPLY__INIT;
    reply.request_id = request_id;
    reply.reply_case = HCATTN__REPLY__REPLY_ERROR;
    reply.error = &error;
    (void)rpc_send(server, client, &reply);
}

/* ---- requests ---- */

/* The request_id of a message that is malformed behind it: field 1, fixed64, which every writer puts first. */
static bool told_id(const struct frame *frame, uint64_t *ret_id)
{
    const uint8_t *bytes = frame->data;
    if (frame->n_bytes < 9 || bytes[0] != (1 << 3 | 1))
        return false;
    uint64_t id = 0;
    for (int i = 8; i >= 1; i--)
        id = id << 8 | bytes[i];
    *ret_id = id;
    return id != 0;
}

static void free_message(void *message)
{
    hcattn__request__free_unpacked(message, NULL);
}

static void cancel(struct server *server, const struct client_route *client, const Hcattn__Request *message)
{
    struct request *request = requests_find(server->requests, client, message->cancel->request);
    bool found = request && request->state != REQUEST_DONE;
    if (found)
        flow_cancel(server, request);
    Hcattn__Cancelled cancelled = HCATTN__CANCELLED__INIT;
    cancelled.found = found;
    Hcattn__Reply reply = HCATTN__REPLY__INIT;
    reply.request_id = message->request_id;
    reply.reply_case = HCATTN__REPLY__REPLY_CANCELLED;
    reply.cancelled = &cancelled;
    (void)rpc_send(server, client, &reply);
}

static uint32_t resume_from(const Hcattn__Request *message)
{
    return message->request_case == HCATTN__REQUEST__REQUEST_GENERATE ? message->generate->resume_from : 0;
}

/* What the message says, as a request. */
static struct request describe(const struct server *server, const struct client_route *client, Hcattn__Request *message)
{
    struct request given = {.client = *client,
                            .id = message->request_id,
                            .message = message,
                            .message_free = free_message,
                            .entered_us = server->now_us,
                            .waiting_us = server->now_us};
    const Hcattn__At *at = NULL;
    switch (message->request_case) {
    case HCATTN__REQUEST__REQUEST_OPEN_SESSION:
        given.kind = REQUEST_OPEN;
        given.session_id = message->open_session->session;
        break;
    case HCATTN__REQUEST__REQUEST_CLOSE_SESSION:
        given.kind = REQUEST_CLOSE;
        given.session_id = message->close_session->session;
        break;
    case HCATTN__REQUEST__REQUEST_APPEND:
        given.kind = REQUEST_APPEND;
        given.session_id = message->append->session;
        at = message->append->at;
        break;
    case HCATTN__REQUEST__REQUEST_GENERATE:
        given.kind = REQUEST_GENERATE;
        given.session_id = message->generate->session;
        given.default_max_tokens = message->generate->max_tokens == 0;
        given.max_tokens =
            given.default_max_tokens ? server->options.default_max_tokens : message->generate->max_tokens;
        given.forwarded = message->generate->resume_from;
        at = message->generate->at;
        break;
    case HCATTN__REQUEST__REQUEST_SCORE:
        given.kind = REQUEST_SCORE;
        given.session_id = message->score->session;
        at = message->score->at;
        break;
    case HCATTN__REQUEST__REQUEST_FORK:
        given.kind = REQUEST_FORK;
        given.session_id = message->fork->new_session;
        break;
    case HCATTN__REQUEST__REQUEST_SET_POLICY:
        given.kind = REQUEST_SET_POLICY;
        given.session_id = message->set_policy->session;
        break;
    case HCATTN__REQUEST__REQUEST_DESCRIBE_SESSION:
        given.kind = REQUEST_DESCRIBE;
        given.session_id = message->describe_session->session;
        break;
    case HCATTN__REQUEST__REQUEST_DRAIN:
        given.kind = REQUEST_DRAIN;
        break;
    case HCATTN__REQUEST__REQUEST_DRAIN_STORE:
        given.kind = REQUEST_DRAIN_STORE;
        break;
    case HCATTN__REQUEST__REQUEST_SET_TRANSPORT:
        given.kind = REQUEST_SET_TRANSPORT;
        break;
    case HCATTN__REQUEST__REQUEST_RUN_JOB:
        given.kind = REQUEST_JOB;
        break;
    case HCATTN__REQUEST__REQUEST_TOKENIZE:
        given.kind = REQUEST_TOKENIZE;
        break;
    default:
        given.kind = REQUEST_DETOKENIZE;
        break;
    }
    given.have_at = at != NULL;
    given.at = at ? at->n_tokens : 0;
    return given;
}

/* The decoder ends a string at its first NUL byte: what is packed again would be shorter than what came. */
static bool was_cut(const Hcattn__Request *message, size_t n_bytes)
{
    return message->request_case != HCATTN__REQUEST__REQUEST__NOT_SET &&
           hcattn__request__get_packed_size(message) < n_bytes;
}

/* Takes the message over when it returns true. */
static bool enter(struct server *server, const struct client_route *client, Hcattn__Request *message, size_t n_bytes)
{
    char sentence[SERVER_ERROR_BYTES];
    uint64_t id = message->request_id;
    if (id == 0) {
        rpc_answer_error(server, client, 0, HCATTN__ERROR_CODE__INVALID_ARGUMENT, "request_id 0 is none");
        return false;
    }
    struct request *known = requests_find(server->requests, client, id);
    if (known && known->state != REQUEST_DONE) {
        flow_again(server, known, resume_from(message));
        return false;
    }
    if (known)
        requests_remove(server->requests, known);
    Hcattn__ErrorCode code = validate_request(server, message, sentence);
    if (code == HCATTN__ERROR_CODE__OK && was_cut(message, n_bytes)) {
        code = HCATTN__ERROR_CODE__INVALID_ARGUMENT;
        snprintf(sentence, sizeof(sentence), "a text holds a NUL byte (or the message is not packed minimally)");
    }
    if (code != HCATTN__ERROR_CODE__OK) {
        rpc_answer_error(server, client, id, code, sentence);
        return false;
    }
    struct request given = describe(server, client, message), *request;
    if (server->draining && requests_is_drained(given.kind)) {
        rpc_answer_error(server, client, id, HCATTN__ERROR_CODE__UNAVAILABLE,
                         "draining: no new sessions and requests are taken");
        return false;
    }
    given.message_bytes = n_bytes;
    bool fits = requests_bytes(server->requests) + n_bytes <= MAX_REQUEST_BYTES;
    int result = fits ? requests_add(server->requests, &given, &request) : -ENOMEM;
    if (result != 0) {
        snprintf(sentence, sizeof(sentence), "%u requests are in progress already; at most %u",
                 requests_count(server->requests), server->options.max_requests);
        rpc_answer_error(server, client, id, HCATTN__ERROR_CODE__BUSY,
                         result == -ENOSPC ? sentence : "out of memory for another request");
        return false;
    }
    LOG_DEBUG("request %016llx: %s of session %016llx", (unsigned long long)id, requests_kind_name(request->kind),
              (unsigned long long)request->session_id);
    server->dirty = true;
    return true;
}

static void receive_one(struct server *server, const struct socket_message *message)
{
    uint64_t id, n_quiet;
    const struct frame *route = &message->frames[0], *body = &message->frames[message->n_frames - 1];
    struct client_route client = {.n_bytes = 0};
    Hcattn__Request *request = NULL;
    if (message->n_frames == 2 && route->n_bytes > 0 && route->n_bytes <= REQUESTS_ROUTE_BYTES) {
        client.n_bytes = (uint8_t)route->n_bytes;
        memcpy(client.bytes, route->data, route->n_bytes);
        request = hcattn__request__unpack(NULL, body->n_bytes, body->data);
    }
    if (!request) {
        if (client.n_bytes > 0 && told_id(body, &id))
            rpc_answer_error(server, &client, id, HCATTN__ERROR_CODE__INVALID_ARGUMENT,
                             "the message is not a Request (malformed protobuf)");
        else if (server_rate(server, &server->garbage, &n_quiet))
            LOG_WARNING("a client sent what is no Request: dropped (%llu more)", (unsigned long long)n_quiet);
        return;
    }
    bool taken = false;
    switch (request->request_case) {
    case HCATTN__REQUEST__REQUEST_HEALTH:
        (void)stats_health(server, &client, request->request_id);
        break;
    case HCATTN__REQUEST__REQUEST_STATS:
        stats_stats(server, &client, request->request_id);
        break;
    case HCATTN__REQUEST__REQUEST_LIST_SESSIONS:
        stats_list(server, &client, request->request_id);
        break;
    case HCATTN__REQUEST__REQUEST_CANCEL:
        cancel(server, &client, request);
        break;
    default:
        taken = enter(server, &client, request, body->n_bytes);
        break;
    }
    if (!taken)
        hcattn__request__free_unpacked(request, NULL);
}

void rpc_receive(struct server *server)
{
    for (int i = 0; i < ROUND_MESSAGES; i++) {
        struct socket_message *message;
        int result = socket_receive(server->client_socket, false, &message);
        if (result == -EMSGSIZE)
            continue;
        if (result != 0)
            return;
        receive_one(server, message);
        socket_message_free(message);
    }
}
