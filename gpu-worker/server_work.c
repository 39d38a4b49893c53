/* server_work.c - text, runs and their tokens, on the work socket. */
#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/log.h"
#include "gpu-worker/server_private.h"
#include "proto/work.pb-c.h"

static void send_failure(struct server *server, uint64_t work, int error, const char *sentence, uint64_t bytes_asked,
                         uint64_t bytes_free);

void server_work_reply(struct server *server, const Hcattn__Work__WorkReply *reply)
{
    enum { MARGIN = 1024 }; /* of what the coordinator makes of it for the client */
    size_t n_bytes = hcattn__work__work_reply__get_packed_size(reply);
    if (n_bytes > SOCKET_MAX_FRAME_BYTES - MARGIN) {
        server_work_error(server, reply->work, -E2BIG, "the answer would be larger than 64 MiB");
        return;
    }
    uint8_t *bytes = malloc(n_bytes == 0 ? 1 : n_bytes);
    if (bytes == NULL) {
        LOG_ERROR("no memory for a reply of %zu bytes", n_bytes);
        return;
    }
    hcattn__work__work_reply__pack(reply, bytes);
    struct frame frame = {.data = bytes, .n_bytes = n_bytes};
    int r = socket_send(server->work, &frame, 1, false);
    if (r < 0 && !server->is_stuck) { /* registering anew drops all runs: a stream never misses a token */
        LOG_WARNING("the coordinator does not read its replies: %s", strerror(-r));
        server->is_stuck = true;
    }
    free(bytes);
}

#define REPLY(name, work_id, case_name, member, value)                                                                 \
    Hcattn__Work__WorkReply name = HCATTN__WORK__WORK_REPLY__INIT;                                                     \
    name.work = (work_id);                                                                                             \
    name.reply_case = HCATTN__WORK__WORK_REPLY__REPLY_##case_name;                                                     \
    name.member = (value)

static Hcattn__ErrorCode code_of(int error)
{
    switch (-error) {
    case EINVAL:
    case EILSEQ:
    case E2BIG:
        return HCATTN__ERROR_CODE__INVALID_ARGUMENT;
    case ESRCH:
        return HCATTN__ERROR_CODE__NOT_FOUND;
    case ECANCELED:
        return HCATTN__ERROR_CODE__CANCELLED;
    case ENOTSUP:
    case ENOENT:
        return HCATTN__ERROR_CODE__NOT_SUPPORTED;
    case EEXIST:
    case ESTALE:
        return HCATTN__ERROR_CODE__CONFLICT;
    case EBUSY:
        return HCATTN__ERROR_CODE__BUSY;
    case ETIMEDOUT:
    case EHOSTUNREACH:
        return HCATTN__ERROR_CODE__UNAVAILABLE;
    case ENOMEM:
        return HCATTN__ERROR_CODE__NO_MEMORY;
    default:
        return HCATTN__ERROR_CODE__INTERNAL;
    }
}

void server_work_error(struct server *server, uint64_t work, int error, const char *sentence)
{
    send_failure(server, work, error, sentence, 0, 0);
}

/* With the bytes that were asked for and free, where it is for want of memory. */
static void send_failure(struct server *server, uint64_t work, int error, const char *sentence, uint64_t bytes_asked,
                         uint64_t bytes_free)
{
    Hcattn__Error message = HCATTN__ERROR__INIT;
    message.code = code_of(error);
    message.bytes_asked = bytes_asked;
    message.bytes_free = bytes_free;
    message.sentence = (char *)(uintptr_t)sentence;
    REPLY(reply, work, ERROR, error, &message);
    server_work_reply(server, &reply);
}

/* ---- text ---- */

/*
 * What follows a conversation that a session holds: the template's words for the new messages, without a second beginning.
 * Encoded after a made-up exchange and cut behind the end token of its answer, which the session has already.
 */
static int encode_continued(const struct server *server, const struct chat_message *messages, size_t n_messages,
                            uint32_t **ret_ids, size_t *ret_n_ids, char *error, size_t error_size)
{
    struct chat_message *all = calloc(n_messages + 2, sizeof(*all));
    uint32_t *ids, *base;
    size_t n_ids, n_base;
    if (all == NULL)
        return -ENOMEM;
    all[0] = (struct chat_message){.role = "user", .content = "?", .n_content_bytes = 1};
    all[1] = (struct chat_message){.role = "assistant", .content = "!", .n_content_bytes = 1};
    memcpy(all + 2, messages, n_messages * sizeof(*all));
    int r = chat_encode(server->chat, all, 2, false, &base, &n_base, error, error_size);
    if (r < 0) {
        free(all);
        return r;
    }
    r = chat_encode(server->chat, all, n_messages + 2, true, &ids, &n_ids, error, error_size);
    free(all);
    if (r < 0) {
        free(base);
        return r;
    }
    size_t cut = n_base;
    while (cut > 0 && !tokenizer_is_end(server->tokenizer, base[cut - 1]))
        cut--;
    free(base);
    cut = cut == 0 ? n_base : cut;
    cut = cut < n_ids ? cut : n_ids;
    memmove(ids, ids + cut, (n_ids - cut) * sizeof(*ids));
    *ret_ids = ids;
    *ret_n_ids = n_ids - cut;
    return 0;
}

static int encode_chat(const struct server *server, const Hcattn__Chat *chat, uint32_t **ret_ids, size_t *ret_n_ids,
                       char *error, size_t error_size)
{
    if (server->chat == NULL) {
        snprintf(error, error_size, "chat is not possible with this model: %s; use raw text", server->chat_error);
        return -ENOTSUP;
    }
    struct chat_message *messages = calloc(chat->n_messages + 1, sizeof(*messages));
    if (messages == NULL)
        return -ENOMEM;
    for (size_t i = 0; i < chat->n_messages; i++)
        messages[i] = (struct chat_message){.role = chat->messages[i]->role,
                                            .content = chat->messages[i]->content,
                                            .n_content_bytes = strlen(chat->messages[i]->content)};
    int r = chat->continued
                ? encode_continued(server, messages, chat->n_messages, ret_ids, ret_n_ids, error, error_size)
                : chat_encode(server->chat, messages, chat->n_messages, true, ret_ids, ret_n_ids, error, error_size);
    free(messages);
    return r;
}

static int copy_ids(const struct server *server, const Hcattn__Tokens *tokens, uint32_t **ret_ids, size_t *ret_n_ids,
                    char *error, size_t error_size)
{
    uint32_t n_vocab = tokenizer_n_vocab(server->tokenizer);
    for (size_t i = 0; i < tokens->n_ids; i++)
        if (tokens->ids[i] >= n_vocab) {
            snprintf(error, error_size, "token %u is not in the vocabulary of %u tokens", tokens->ids[i], n_vocab);
            return -EINVAL;
        }
    uint32_t *ids = malloc((tokens->n_ids + 1) * sizeof(*ids));
    if (ids == NULL)
        return -ENOMEM;
    memcpy(ids, tokens->ids, tokens->n_ids * sizeof(*ids));
    *ret_ids = ids;
    *ret_n_ids = tokens->n_ids;
    return 0;
}

static int encode_input(const struct server *server, const Hcattn__Work__Prepare *prepare, uint32_t **ret_ids,
                        size_t *ret_n_ids, char *error, size_t error_size)
{
    const Hcattn__Input *input = prepare->input;
    unsigned flags = 0;
    switch (input == NULL ? HCATTN__INPUT__INPUT__NOT_SET : input->input_case) {
    case HCATTN__INPUT__INPUT_TEXT:
        if (prepare->start && !input->no_bos)
            flags |= TOKENIZER_ADD_BOS;
        if (input->parse_special || prepare->parse_special)
            flags |= TOKENIZER_PARSE_SPECIAL;
        return tokenizer_encode(server->tokenizer, input->text, strlen(input->text), flags, ret_ids, ret_n_ids);
    case HCATTN__INPUT__INPUT_TOKENS:
        return copy_ids(server, input->tokens, ret_ids, ret_n_ids, error, error_size);
    case HCATTN__INPUT__INPUT_CHAT:
        return encode_chat(server, input->chat, ret_ids, ret_n_ids, error, error_size);
    default:
        snprintf(error, error_size, "the request has no input");
        return -EINVAL;
    }
}

static void take_prepare(struct server *server, uint64_t work, const Hcattn__Work__Prepare *prepare)
{
    uint32_t *ids;
    size_t n_ids;
    char error[256] = "";
    int r = encode_input(server, prepare, &ids, &n_ids, error, sizeof(error));
    if (r < 0) {
        if (r == -EILSEQ)
            snprintf(error, sizeof(error), "the text is not valid UTF-8");
        server_work_error(server, work, r, error[0] != '\0' ? error : strerror(-r));
        return;
    }
    Hcattn__Work__Prepared prepared = HCATTN__WORK__PREPARED__INIT;
    prepared.ids = ids;
    prepared.n_ids = n_ids;
    ProtobufCBinaryData *pieces = prepare->pieces ? calloc(n_ids + 1, sizeof(*pieces)) : NULL;
    for (size_t i = 0; pieces != NULL && i < n_ids; i++) {
        const char *bytes;
        if (tokenizer_piece(server->tokenizer, ids[i], TOKENIZER_SHOW_SPECIAL, &bytes, &pieces[i].len) == 0)
            pieces[i].data = (uint8_t *)(uintptr_t)bytes;
    }
    prepared.pieces = pieces;
    prepared.n_pieces = pieces == NULL ? 0 : n_ids;
    REPLY(reply, work, PREPARED, prepared, &prepared);
    server_work_reply(server, &reply);
    free(pieces);
    free(ids);
}

static void take_detokenize(struct server *server, uint64_t work, const Hcattn__Work__Detokenize *detokenize)
{
    char *text;
    size_t n_bytes;
    int r = tokenizer_decode(server->tokenizer, detokenize->ids, detokenize->n_ids,
                             detokenize->special ? TOKENIZER_SHOW_SPECIAL : 0, &text, &n_bytes);
    if (r < 0) {
        server_work_error(server, work, r, r == -EINVAL ? "a token is not in the vocabulary" : strerror(-r));
        return;
    }
    Hcattn__Work__Detokenized detokenized = HCATTN__WORK__DETOKENIZED__INIT;
    detokenized.text = text;
    REPLY(reply, work, DETOKENIZED, detokenized, &detokenized);
    server_work_reply(server, &reply);
    free(text);
}

/* ---- runs ---- */

static int copy_sampling(const Hcattn__Sampling *from, struct sampling *to)
{
    enum { DEFAULT_PENALTY_WINDOW = 64 };
    *to = (struct sampling){.penalty_window = DEFAULT_PENALTY_WINDOW};
    if (from == NULL)
        return 0;
    to->temperature = from->temperature;
    to->top_k = from->top_k;
    to->top_p = from->top_p;
    to->min_p = from->min_p;
    to->repeat_penalty = from->repeat_penalty;
    to->presence_penalty = from->presence_penalty;
    to->frequency_penalty = from->frequency_penalty;
    to->penalty_window = from->penalty_window == 0 ? DEFAULT_PENALTY_WINDOW : from->penalty_window;
    to->seed = from->seed;
    if (from->n_logit_bias == 0)
        return 0;
    to->biases = calloc(from->n_logit_bias, sizeof(*to->biases));
    if (to->biases == NULL)
        return -ENOMEM;
    to->n_biases = (uint32_t)from->n_logit_bias;
    for (size_t i = 0; i < from->n_logit_bias; i++)
        to->biases[i] = (struct sampler_bias){.id = from->logit_bias[i]->id, .bias = from->logit_bias[i]->bias};
    return 0;
}

static int copy_lists(const Hcattn__Work__Run *from, struct run_request *to)
{
    to->blocks = calloc(from->n_blocks + 1, sizeof(*to->blocks));
    to->input_ids = calloc(from->n_input_ids + 1, sizeof(*to->input_ids));
    to->stop = calloc(from->n_stop + 1, sizeof(*to->stop));
    if (to->blocks == NULL || to->input_ids == NULL || to->stop == NULL)
        return -ENOMEM;
    for (size_t i = 0; i < from->n_blocks; i++)
        to->blocks[i] = (struct block_handle){from->blocks[i]->index, from->blocks[i]->generation};
    to->n_blocks = (uint32_t)from->n_blocks;
    if (from->n_input_ids > 0)
        memcpy(to->input_ids, from->input_ids, from->n_input_ids * sizeof(*to->input_ids));
    to->n_input = (uint32_t)from->n_input_ids;
    for (; to->n_stop < from->n_stop; to->n_stop++) {
        to->stop[to->n_stop] = strdup(from->stop[to->n_stop]);
        if (to->stop[to->n_stop] == NULL)
            return -ENOMEM;
    }
    return copy_sampling(from->sampling, &to->sampling);
}

/* What a run must be within, so that the engine can count in 32 bits. */
static const char *check_run(const struct server *server, const Hcattn__Work__Run *run)
{
    if (run->lane_store.len != LAYOUT_N_LANES)
        return "a run without stores for its lanes";
    if (strlen(run->policy) >= LAYOUT_POLICY_BYTES)
        return "a policy name that is too long";
    if (run->at > server->options->n_ctx || run->n_input_ids > server->options->n_ctx ||
        run->max_tokens > server->options->n_ctx ||
        run->at + run->n_input_ids + run->max_tokens > server->options->n_ctx)
        return "a run longer than this worker's context";
    if (run->resume_from > run->n_input_ids + run->max_tokens)
        return "a run that resumes behind its end";
    for (size_t i = 0; run->sampling != NULL && i < run->sampling->n_logit_bias; i++)
        if (run->sampling->logit_bias[i]->id >= tokenizer_n_vocab(server->tokenizer))
            return "a logit bias of a token that is not in the vocabulary";
    return NULL;
}

static void take_run(struct server *server, uint64_t work, const Hcattn__Work__Run *run)
{
    const char *sentence = check_run(server, run);
    if (sentence != NULL) {
        server_work_error(server, work, -EINVAL, sentence);
        return;
    }
    struct run_request *request = calloc(1, sizeof(*request));
    struct engine_command *command = calloc(1, sizeof(*command));
    if (request == NULL || command == NULL || copy_lists(run, request) < 0) {
        run_request_free(request);
        free(command);
        server_work_error(server, work, -ENOMEM, "no memory for the request");
        return;
    }
    request->work = work;
    request->session = run->session;
    strcpy(request->policy, run->policy);
    request->exact_tokens = run->exact_tokens;
    memcpy(request->lane_store, run->lane_store.data, LAYOUT_N_LANES);
    request->at = run->at;
    request->max_tokens = run->max_tokens;
    request->logprobs = run->logprobs;
    request->top_logprobs = run->top_logprobs;
    request->ignore_end = run->ignore_end;
    request->resume_from = run->resume_from;
    request->score = run->score;
    request->score_from = run->score_from;
    request->all_logprobs = run->all_logprobs;
    command->kind = ENGINE_RUN;
    command->epoch = server->epoch;
    command->request = request;
    command->fd = -1;
    engine_command(server->engine, command);
}

static void forward(struct server *server, enum engine_command_kind kind, uint64_t work, uint64_t session)
{
    struct engine_command *command = calloc(1, sizeof(*command));
    if (command == NULL)
        abort();
    command->kind = kind;
    command->work = work;
    command->session = session;
    command->fd = -1;
    engine_command(server->engine, command);
}

void server_work_receive(struct server *server)
{
    enum {
        AT_ONCE = 64,
        ROUND_US = 20000
    }; /* then events and health get their turn: making ids of a long text takes long */
    uint64_t until_us = clock_deadline_us(ROUND_US);
    for (int i = 0; i < AT_ONCE && clock_now_us() < until_us; i++) {
        struct socket_message *message;
        int r = socket_receive(server->work, false, &message);
        if (r == -EAGAIN)
            return;
        if (r < 0)
            continue;
        Hcattn__Work__WorkRequest *request =
            message->n_frames == 1
                ? hcattn__work__work_request__unpack(NULL, message->frames[0].n_bytes, message->frames[0].data)
                : NULL;
        socket_message_free(message);
        switch (request == NULL ? HCATTN__WORK__WORK_REQUEST__REQUEST__NOT_SET : request->request_case) {
        case HCATTN__WORK__WORK_REQUEST__REQUEST_PREPARE:
            take_prepare(server, request->work, request->prepare);
            break;
        case HCATTN__WORK__WORK_REQUEST__REQUEST_DETOKENIZE:
            take_detokenize(server, request->work, request->detokenize);
            break;
        case HCATTN__WORK__WORK_REQUEST__REQUEST_RUN:
            take_run(server, request->work, request->run);
            break;
        case HCATTN__WORK__WORK_REQUEST__REQUEST_STOP:
            forward(server, ENGINE_STOP, request->stop->work, 0);
            break;
        case HCATTN__WORK__WORK_REQUEST__REQUEST_FORGET:
            forward(server, ENGINE_FORGET, 0, request->forget->session);
            break;
        case HCATTN__WORK__WORK_REQUEST__REQUEST_COUNT:
            forward(server, ENGINE_COUNT, request->work, request->count->session);
            break;
        case HCATTN__WORK__WORK_REQUEST__REQUEST_RUN_JOB:
            server_jobs_take(server, request->work, request->run_job);
            break;
        default:
            LOG_WARNING("a work message that could not be read");
        }
        hcattn__work__work_request__free_unpacked(request, NULL);
    }
}

/* ---- what the engine tells ---- */

static void fill_logprobs(const struct run_logprobs *from, uint32_t n_vocab, Hcattn__TokenLogprobs *to,
                          Hcattn__TopLogprob *top, Hcattn__TopLogprob **top_list)
{
    to->logprob = from->logprob;
    for (uint32_t i = 0; i < from->n_top; i++) {
        top[i] = (Hcattn__TopLogprob)HCATTN__TOP_LOGPROB__INIT;
        top[i].id = from->top[i].id;
        top[i].logprob = from->top[i].logit;
        top_list[i] = &top[i];
    }
    to->top = top_list;
    to->n_top = from->n_top;
    if (from->all != NULL) {
        to->all.data = (uint8_t *)from->all;
        to->all.len = n_vocab * sizeof(float);
    }
}

static void send_token(struct server *server, const struct engine_event *event)
{
    uint32_t n_top = event->logprobs.n_top;
    Hcattn__TokenLogprobs logprobs = HCATTN__TOKEN_LOGPROBS__INIT, *list = &logprobs;
    Hcattn__TopLogprob top[n_top + 1], *top_list[n_top + 1];
    fill_logprobs(&event->logprobs, server->model->shape.n_vocab, &logprobs, top, top_list);
    if (event->kind == ENGINE_SCORED) {
        Hcattn__Scored scored = HCATTN__SCORED__INIT;
        scored.first = event->index;
        scored.scores = &list;
        scored.n_scores = 1;
        REPLY(reply, event->work, SCORED, scored, &scored);
        server_work_reply(server, &reply);
        return;
    }
    uint32_t id = event->id;
    Hcattn__Generated generated = HCATTN__GENERATED__INIT;
    generated.first = event->index;
    generated.ids = &id;
    generated.n_ids = 1;
    generated.text = event->text;
    generated.logprobs = &list;
    generated.n_logprobs = event->has_logprobs ? 1 : 0;
    REPLY(reply, event->work, GENERATED, generated, &generated);
    server_work_reply(server, &reply);
}

static void send_finished(struct server *server, const struct engine_event *event)
{
    static const Hcattn__FinishReason reasons[] = {
        [RUN_END_NONE] = HCATTN__FINISH_REASON__FINISH_UNSPECIFIED,
        [RUN_END_LENGTH] = HCATTN__FINISH_REASON__FINISH_LENGTH,
        [RUN_END_TOKEN] = HCATTN__FINISH_REASON__FINISH_END,
        [RUN_END_STOP] = HCATTN__FINISH_REASON__FINISH_STOP,
    };
    Hcattn__Timings timings = HCATTN__TIMINGS__INIT;
    timings.prefill_us = event->prefill_us;
    timings.decode_us = event->decode_us;
    timings.store_wait_us = event->store_wait_us;
    timings.n_prefill = event->n_prefill;
    timings.n_decode = event->n_decode;
    Hcattn__Work__Finished finished = HCATTN__WORK__FINISHED__INIT;
    finished.reason = reasons[event->end];
    finished.n_generated = event->index;
    finished.text = event->text == NULL ? (char *)(uintptr_t) "" : event->text;
    finished.n_tokens = event->n_tokens;
    finished.end_id = event->id;
    finished.timings = &timings;
    REPLY(reply, event->work, FINISHED, finished, &finished);
    server_work_reply(server, &reply);
}

static void send_counts(struct server *server, const struct engine_event *event)
{
    const struct engine_counts *from = event->counts;
    Hcattn__SessionCounts counts = HCATTN__SESSION_COUNTS__INIT;
    Hcattn__StoreRead reads[LAYOUT_N_LANES], *read_list[LAYOUT_N_LANES];
    for (uint32_t i = 0; i < from->n_stores; i++) {
        reads[i] = (Hcattn__StoreRead)HCATTN__STORE_READ__INIT;
        reads[i].store = from->store[i];
        reads[i].bytes = from->bytes_read[i];
        read_list[i] = &reads[i];
    }
    counts.n_steps = from->counts.n_steps;
    counts.n_old_tokens = from->counts.n_old_tokens;
    counts.n_kept = from->counts.n_kept;
    counts.n_n_kept = from->n_kept;
    counts.reads = read_list;
    counts.n_reads = from->n_stores;
    counts.exact_bytes = from->exact_bytes;
    counts.key_bytes = from->key_bytes;
    counts.select_us = from->counts.select_us;
    counts.attention_us = from->counts.attention_us;
    counts.store_wait_us = from->counts.store_wait_us;
    counts.matmul_us = from->counts.matmul_us;
    counts.step_us = from->counts.step_us;
    Hcattn__Work__Counted counted = HCATTN__WORK__COUNTED__INIT;
    Hcattn__HeadProfile profile = HCATTN__HEAD_PROFILE__INIT;
    Hcattn__HeadClass *classes = calloc(from->n_kept + 1, sizeof(*classes));
    counted.counts = &counts;
    if (from->profile_tokens > 0 && classes != NULL) {
        for (uint32_t i = 0; i < from->n_kept; i++)
            classes[i] = (Hcattn__HeadClass)from->classes[i];
        profile.n_tokens = from->profile_tokens;
        profile.recovery = from->recovery;
        profile.n_classes = profile.n_kept_mass = from->n_kept;
        profile.classes = classes;
        profile.kept_mass = from->kept_mass;
        counted.profile = &profile;
    }
    REPLY(reply, event->work, COUNTS, counts, &counted);
    server_work_reply(server, &reply);
    free(classes);
}

void server_work_event(struct server *server, struct engine_event *event)
{
    if (server->work == NULL)
        return;
    switch (event->kind) {
    case ENGINE_PROGRESS: {
        Hcattn__Progress progress = HCATTN__PROGRESS__INIT;
        progress.n_done = event->n_done;
        progress.n_total = event->n_total;
        REPLY(reply, event->work, PROGRESS, progress, &progress);
        server_work_reply(server, &reply);
        break;
    }
    case ENGINE_GENERATED:
    case ENGINE_SCORED:
        send_token(server, event);
        break;
    case ENGINE_FINISHED:
        send_finished(server, event);
        break;
    case ENGINE_FAILED:
        send_failure(server, event->work, event->error, event->text == NULL ? "out of memory" : event->text,
                     event->bytes_asked, event->bytes_free);
        break;
    case ENGINE_COUNTED:
        send_counts(server, event);
        break;
    case ENGINE_JOB_PROGRESS:
    case ENGINE_JOB_ROW:
    case ENGINE_JOB_DONE:
        server_jobs_event(server, event);
        break;
    default:
        break;
    }
}
