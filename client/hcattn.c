/* hcattn.c - see hcattn.h: the client itself, text, the service; sessions are in hcattn_sessions.c. */
#include "client/hcattn.h"
#include "client/call.h"
#include "client/message.h"
#include "client/question.h"
#include "client/stream.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define CONNECT_TIMEOUT_MS 5000u
#define LOST_TIMEOUT_MS    90000u /* peers of a lost coordinator try for 60 s to come back */

static const char *const code_names[] = {
    "OK",          "INVALID_ARGUMENT", "NOT_FOUND",     "CONTEXT_EXCEEDED", "NO_MEMORY", "BUSY",
    "UNAVAILABLE", "CANCELLED",        "NOT_SUPPORTED", "CONFLICT",         "INTERNAL",
};

const char *hcattn_code_name(enum hcattn_code code)
{
    return (size_t)code < sizeof(code_names) / sizeof(code_names[0]) ? code_names[code] : "INTERNAL";
}

const char *hcattn_head_class_name(enum hcattn_head_class head_class)
{
    static const char *const names[] = {"full", "special", "punctuation", "frequent", "local"};
    return (size_t)head_class < sizeof(names) / sizeof(names[0]) ? names[head_class] : "unknown";
}

const char *hcattn_finish_name(enum hcattn_finish finish)
{
    switch (finish) {
    case HCATTN_FINISH_LENGTH:
        return "length";
    case HCATTN_FINISH_END:
        return "end";
    case HCATTN_FINISH_STOP:
        return "stop";
    }
    return "unknown";
}

/* ---- the client ---- */

int hcattn_open(const struct hcattn_config *config, struct hcattn **ret_client, struct hcattn_error *ret_error)
{
    static const struct hcattn_config standard;
    if (!config)
        config = &standard;
    struct hcattn *client = calloc(1, sizeof(*client));
    if (!client)
        return call_fail(ret_error, HCATTN_NO_MEMORY, "no memory for a client");
    pthread_mutex_init(&client->mutex, NULL);
    client->cancel_fd = -1;
    client->connect_timeout_us =
        1000 * (uint64_t)(config->connect_timeout_ms ? config->connect_timeout_ms : CONNECT_TIMEOUT_MS);
    client->lost_timeout_us = 1000 * (uint64_t)(config->lost_timeout_ms ? config->lost_timeout_ms : LOST_TIMEOUT_MS);
    int error = hosts_open(&client->hosts, config, ret_error);
    if (!error) {
        client->cancel_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        if (client->cancel_fd < 0)
            error = call_fail(ret_error, HCATTN_INTERNAL, "cannot make an event descriptor (errno %d)", errno);
    }
    if (error) {
        hcattn_close(client);
        return error;
    }
    *ret_client = client;
    return 0;
}

struct hcattn *hcattn_close(struct hcattn *client)
{
    if (!client)
        return NULL;
    hosts_close(&client->hosts);
    if (client->cancel_fd >= 0)
        close(client->cancel_fd);
    pthread_mutex_destroy(&client->mutex);
    free(client);
    return NULL;
}

size_t hcattn_n_hosts(const struct hcattn *client)
{
    return client->hosts.n;
}

const char *hcattn_host(const struct hcattn *client, size_t index)
{
    return index < client->hosts.n ? client->hosts.all[index].endpoint : NULL;
}

void hcattn_cancel(struct hcattn *client)
{
    call_cancel(client);
}

/* ---- one question, one answer ---- */

int hcattn_tokenize(struct hcattn *client, const struct hcattn_input *input, uint32_t timeout_ms,
                    struct hcattn_tokens *ret_tokens, struct hcattn_error *ret_error)
{
    struct message_input message;
    int error = message_set_input(&message, input, ret_error);
    if (error)
        return error;
    Hcattn__Tokenize tokenize = HCATTN__TOKENIZE__INIT;
    tokenize.input = &message.input;
    struct call call = {.request = HCATTN__REQUEST__INIT, .timeout_ms = timeout_ms};
    call.request.request_case = HCATTN__REQUEST__REQUEST_TOKENIZE;
    call.request.tokenize = &tokenize;
    struct question question = {.wanted = HCATTN__REPLY__REPLY_TOKENIZED};
    Hcattn__Reply *reply = question_ask(client, &call, &question, &error, ret_error);
    message_unset_input(&message);
    if (error)
        return error;
    const Hcattn__Tokenized *tokenized = reply->tokenized;
    struct hcattn_piece *pieces = NULL;
    if (tokenized->n_pieces && tokenized->n_pieces == tokenized->n_ids) {
        pieces = calloc(tokenized->n_pieces, sizeof(*pieces));
        if (!pieces) {
            hcattn__reply__free_unpacked(reply, NULL);
            return call_fail(ret_error, HCATTN_NO_MEMORY, "no memory for %zu tokens", tokenized->n_ids);
        }
        for (size_t i = 0; i < tokenized->n_pieces; i++)
            pieces[i] = (struct hcattn_piece){.bytes = tokenized->pieces[i].data, .n_bytes = tokenized->pieces[i].len};
    }
    *ret_tokens = (struct hcattn_tokens){.n_ids = tokenized->n_ids,
                                         .ids = tokenized->ids,
                                         .n_pieces = pieces ? tokenized->n_pieces : 0,
                                         .pieces = pieces,
                                         .owner = reply};
    return 0;
}

void hcattn_tokens_free(struct hcattn_tokens *tokens)
{
    if (!tokens)
        return;
    free((void *)tokens->pieces);
    hcattn__reply__free_unpacked(tokens->owner, NULL);
    *tokens = (struct hcattn_tokens){.n_ids = 0};
}

int hcattn_detokenize(struct hcattn *client, const uint32_t *ids, size_t n_ids, bool special, uint32_t timeout_ms,
                      char **ret_text, struct hcattn_error *ret_error)
{
    Hcattn__Detokenize detokenize = HCATTN__DETOKENIZE__INIT;
    detokenize.ids = (uint32_t *)ids;
    detokenize.n_ids = n_ids;
    detokenize.special = special;
    struct call call = {.request = HCATTN__REQUEST__INIT, .timeout_ms = timeout_ms};
    call.request.request_case = HCATTN__REQUEST__REQUEST_DETOKENIZE;
    call.request.detokenize = &detokenize;
    struct question question = {.wanted = HCATTN__REPLY__REPLY_DETOKENIZED};
    int error = 0;
    Hcattn__Reply *reply = question_ask(client, &call, &question, &error, ret_error);
    if (!reply)
        return error;
    char *text = strdup(reply->detokenized->text);
    hcattn__reply__free_unpacked(reply, NULL);
    if (!text)
        return call_fail(ret_error, HCATTN_NO_MEMORY, "no memory for the text");
    *ret_text = text;
    return 0;
}

int hcattn_health(struct hcattn *client, uint32_t timeout_ms, struct hcattn_health *ret_health,
                  struct hcattn_error *ret_error)
{
    Hcattn__Health health = HCATTN__HEALTH__INIT;
    struct call call = {.request = HCATTN__REQUEST__INIT, .timeout_ms = timeout_ms};
    call.request.request_case = HCATTN__REQUEST__REQUEST_HEALTH;
    call.request.health = &health;
    struct question question = {.wanted = HCATTN__REPLY__REPLY_HEALTH};
    int error = 0;
    Hcattn__Reply *reply = question_ask(client, &call, &question, &error, ret_error);
    if (!reply)
        return error;
    *ret_health = (struct hcattn_health){
        .live = reply->health->live, .ready = reply->health->ready, .coordinator = reply->health->coordinator};
    snprintf(ret_health->sentence, sizeof(ret_health->sentence), "%s", reply->health->sentence);
    hcattn__reply__free_unpacked(reply, NULL);
    return 0;
}

/* ---- stats ---- */

static struct hcattn_process_stats process_stats(const Hcattn__ProcessStats *from)
{
    return (struct hcattn_process_stats){
        .program = from->program,
        .index = from->index,
        .pid = from->pid,
        .state = from->state,
        .node = from->node,
        .n_starts = from->n_starts,
        .achieved = from->achieved,
        .phase = from->phase,
        .bytes_total = from->bytes_total,
        .bytes_used = from->bytes_used,
        .bytes_served = from->bytes_served,
        .n_requests = from->n_requests,
        .n_tokens = from->n_tokens,
        .weight_bytes = from->weight_bytes,
        .incarnation = from->incarnation,
        .device_budget_bytes = from->device_budget_bytes,
        .device_bytes = from->device_bytes,
        .n_sessions = from->n_sessions,
        .home_node = from->home_node,
        .node_cores = from->node_cores,
        .bytes_resident = from->bytes_resident,
        .bytes_local = from->bytes_local,
        .bytes_per_s = from->bytes_per_s,
    };
}

int hcattn_stats(struct hcattn *client, uint32_t timeout_ms, struct hcattn_stats *ret_stats,
                 struct hcattn_error *ret_error)
{
    Hcattn__Stats stats = HCATTN__STATS__INIT;
    struct call call = {.request = HCATTN__REQUEST__INIT, .timeout_ms = timeout_ms};
    call.request.request_case = HCATTN__REQUEST__REQUEST_STATS;
    call.request.stats = &stats;
    struct question question = {.wanted = HCATTN__REPLY__REPLY_STATS};
    int error = 0;
    Hcattn__Reply *reply = question_ask(client, &call, &question, &error, ret_error);
    if (!reply)
        return error;
    const Hcattn__StatsReply *from = reply->stats;
    struct hcattn_process_stats *processes = calloc(from->n_processes + 1, sizeof(*processes));
    struct hcattn_session_stats *sessions = message_sessions(from->sessions, from->n_sessions);
    if (!processes || !sessions) {
        free(processes);
        free(sessions);
        hcattn__reply__free_unpacked(reply, NULL);
        return call_fail(ret_error, HCATTN_NO_MEMORY, "no memory for the statistics");
    }
    for (size_t i = 0; i < from->n_processes; i++)
        processes[i] = process_stats(from->processes[i]);
    *ret_stats = (struct hcattn_stats){
        .version = from->version,
        .model = from->model,
        .transport = from->transport,
        .policy = from->policy,
        .n_ctx = from->n_ctx,
        .default_max_tokens = from->default_max_tokens,
        .device_bytes_per_token = from->device_bytes_per_token,
        .store_bytes_per_token = from->store_bytes_per_token,
        .uptime_s = from->uptime_s,
        .exact_tokens = from->exact_tokens,
        .n_running = from->n_running,
        .n_queued = from->n_queued,
        .max_queued = from->max_queued,
        .draining = from->draining,
        .row_codec = from->row_codec,
        .n_processes = from->n_processes,
        .processes = processes,
        .n_sessions = from->n_sessions,
        .sessions = sessions,
        .owner = reply,
    };
    return 0;
}

void hcattn_stats_free(struct hcattn_stats *stats)
{
    if (!stats)
        return;
    free((void *)stats->processes);
    free((void *)stats->sessions);
    hcattn__reply__free_unpacked(stats->owner, NULL);
    *stats = (struct hcattn_stats){.n_ctx = 0};
}

/* ---- operating ---- */

struct progress {
    int (*tell)(void *context, uint32_t n_running, uint32_t n_queued);
    void *context;
};

static bool tell_progress(void *context, const Hcattn__StatsReply *stats)
{
    const struct progress *progress = context;
    return progress->tell(progress->context, stats->n_running, stats->n_queued) == 0;
}

int hcattn_drain(struct hcattn *client, bool resume,
                 int (*progress)(void *context, uint32_t n_running, uint32_t n_queued), void *context,
                 uint32_t timeout_ms, struct hcattn_drained *ret_drained, struct hcattn_error *ret_error)
{
    Hcattn__Drain drain = HCATTN__DRAIN__INIT;
    drain.resume = resume;
    struct progress told = {.tell = progress, .context = context};
    struct call call = {.request = HCATTN__REQUEST__INIT,
                        .on_stats = progress ? tell_progress : NULL,
                        .context = &told,
                        .timeout_ms = timeout_ms};
    call.request.request_case = HCATTN__REQUEST__REQUEST_DRAIN;
    call.request.drain = &drain;
    struct question question = {.wanted = HCATTN__REPLY__REPLY_DRAINED};
    int error = 0;
    Hcattn__Reply *reply = question_ask(client, &call, &question, &error, ret_error);
    if (!reply)
        return error;
    if (ret_drained)
        *ret_drained =
            (struct hcattn_drained){.n_finished = reply->drained->n_finished, .n_sessions = reply->drained->n_sessions};
    hcattn__reply__free_unpacked(reply, NULL);
    return 0;
}

int hcattn_set_transport(struct hcattn *client, const char *transport, uint32_t timeout_ms,
                         struct hcattn_error *ret_error)
{
    Hcattn__SetTransport body = HCATTN__SET_TRANSPORT__INIT;
    body.transport = (char *)transport;
    struct call call = {.request = HCATTN__REQUEST__INIT, .timeout_ms = timeout_ms};
    call.request.request_case = HCATTN__REQUEST__REQUEST_SET_TRANSPORT;
    call.request.set_transport = &body;
    struct question question = {.wanted = HCATTN__REPLY__REPLY_TRANSPORT_SET};
    int error = 0;
    hcattn__reply__free_unpacked(question_ask(client, &call, &question, &error, ret_error), NULL);
    return error;
}

/* ---- work on a session ---- */

int hcattn_append(struct hcattn *client, uint64_t session, const struct hcattn_input *input, uint64_t at,
                  const struct hcattn_events *events, uint32_t timeout_ms, struct hcattn_appended *ret_appended,
                  struct hcattn_error *ret_error)
{
    return stream_append(client, session, input, at, events, timeout_ms, ret_appended, ret_error);
}

int hcattn_generate(struct hcattn *client, const struct hcattn_generate *generate, const struct hcattn_events *events,
                    uint32_t timeout_ms, struct hcattn_finished *ret_finished, struct hcattn_error *ret_error)
{
    return stream_generate(client, generate, events, timeout_ms, ret_finished, ret_error);
}

int hcattn_score(struct hcattn *client, const struct hcattn_score *score, const struct hcattn_events *events,
                 uint32_t timeout_ms, struct hcattn_score_done *ret_done, struct hcattn_error *ret_error)
{
    return stream_score(client, score, events, timeout_ms, ret_done, ret_error);
}
