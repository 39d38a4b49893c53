/* message.c - see message.h. */
#include "client/message.h"
#include "client/call.h"
#include "common/utf8.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static const int errnos[] = {
    [HCATTN_OK] = 0,
    [HCATTN_INVALID_ARGUMENT] = -EINVAL,
    [HCATTN_NOT_FOUND] = -ENOENT,
    [HCATTN_CONTEXT_EXCEEDED] = -E2BIG,
    [HCATTN_NO_MEMORY] = -ENOMEM,
    [HCATTN_BUSY] = -EBUSY,
    [HCATTN_UNAVAILABLE] = -ENOTCONN,
    [HCATTN_CANCELLED] = -ECANCELED,
    [HCATTN_NOT_SUPPORTED] = -EOPNOTSUPP,
    [HCATTN_CONFLICT] = -ESTALE,
    [HCATTN_INTERNAL] = -EIO,
};

int message_errno(enum hcattn_code code)
{
    return (size_t)code < sizeof(errnos) / sizeof(errnos[0]) ? errnos[code] : -EIO;
}

int message_error(const Hcattn__Error *message, struct hcattn_error *ret_error)
{
    enum hcattn_code code = (enum hcattn_code)message->code;
    if ((unsigned)code > HCATTN_INTERNAL || code == HCATTN_OK)
        code = HCATTN_INTERNAL; /* a newer coordinator's, or none: an Error is never success */
    int error = call_fail(ret_error, code, "%s",
                          message->sentence && message->sentence[0] ? message->sentence : hcattn_code_name(code));
    if (ret_error) {
        ret_error->n_prompt_tokens = message->n_prompt_tokens;
        ret_error->n_tokens = message->n_tokens;
        ret_error->max_tokens = message->max_tokens;
        ret_error->n_ctx = message->n_ctx;
        ret_error->bytes_asked = message->bytes_asked;
        ret_error->bytes_free = message->bytes_free;
        ret_error->n_queued = message->n_queued;
        ret_error->max_queued = message->max_queued;
    }
    return error;
}

bool message_is_last(const Hcattn__Reply *reply)
{
    switch (reply->reply_case) {
    case HCATTN__REPLY__REPLY_ACCEPTED:
    case HCATTN__REPLY__REPLY_PROGRESS:
    case HCATTN__REPLY__REPLY_GENERATED:
    case HCATTN__REPLY__REPLY_SCORED:
    case HCATTN__REPLY__REPLY_JOB_PROGRESS:
    case HCATTN__REPLY__REPLY_JOB_ROW:
    case HCATTN__REPLY__REPLY_STORE_DRAIN_PROGRESS:
    case HCATTN__REPLY__REPLY__NOT_SET:
        return false;
    default:
        return true;
    }
}

static int check_text(const char *text, const char *what, struct hcattn_error *error)
{
    size_t offset = 0;
    if (!text || utf8_check(text, strlen(text), &offset) == 0)
        return 0;
    return call_fail(error, HCATTN_INVALID_ARGUMENT, "%s is not UTF-8 (at byte %zu)", what, offset);
}

static int set_chat(struct message_input *message, const struct hcattn_input *input, struct hcattn_error *error)
{
    size_t n = input->n_messages;
    message->messages = calloc(n ? n : 1, sizeof(*message->messages));
    message->pointers = calloc(n ? n : 1, sizeof(Hcattn__ChatMessage *));
    if (!message->messages || !message->pointers)
        return call_fail(error, HCATTN_NO_MEMORY, "no memory for the messages");
    for (size_t i = 0; i < n; i++) {
        const struct hcattn_message *from = &input->messages[i];
        if (!from->role || !from->content)
            return call_fail(error, HCATTN_INVALID_ARGUMENT, "message %zu has no role or no content", i + 1);
        int result = check_text(from->role, "a role", error);
        if (!result)
            result = check_text(from->content, "a message", error);
        if (result)
            return result;
        hcattn__chat_message__init(&message->messages[i]);
        message->messages[i].role = (char *)from->role;
        message->messages[i].content = (char *)from->content;
        message->pointers[i] = &message->messages[i];
    }
    hcattn__chat__init(&message->chat);
    message->chat.messages = message->pointers;
    message->chat.n_messages = n;
    message->chat.continued = input->continued;
    message->input.input_case = HCATTN__INPUT__INPUT_CHAT;
    message->input.chat = &message->chat;
    return 0;
}

int message_set_input(struct message_input *message, const struct hcattn_input *input, struct hcattn_error *error)
{
    *message = (struct message_input){.messages = NULL};
    hcattn__input__init(&message->input);
    message->input.parse_special = input->parse_special;
    message->input.no_bos = input->no_bos;
    if (!!input->text + !!input->ids + !!input->messages > 1)
        return call_fail(error, HCATTN_INVALID_ARGUMENT, "an input is text, ids or messages, not several of them");
    if (input->text) {
        message->input.input_case = HCATTN__INPUT__INPUT_TEXT;
        message->input.text = (char *)input->text;
        return check_text(input->text, "the text", error);
    }
    if (input->ids) {
        hcattn__tokens__init(&message->tokens);
        message->tokens.ids = (uint32_t *)input->ids;
        message->tokens.n_ids = input->n_ids;
        message->input.input_case = HCATTN__INPUT__INPUT_TOKENS;
        message->input.tokens = &message->tokens;
        return 0;
    }
    if (!input->messages)
        return 0;
    int result = set_chat(message, input, error);
    if (result)
        message_unset_input(message);
    return result;
}

void message_unset_input(struct message_input *message)
{
    free(message->messages);
    free(message->pointers);
    message->messages = NULL;
    message->pointers = NULL;
}

struct hcattn_session_stats *message_sessions(Hcattn__SessionStats *const *messages, size_t n)
{
    size_t n_shares = 0;
    for (size_t i = 0; i < n; i++)
        n_shares += messages[i]->n_stores;
    struct hcattn_session_stats *sessions =
        calloc(1, (n + 1) * sizeof(*sessions) + n_shares * sizeof(struct hcattn_store_share));
    struct hcattn_store_share *share = sessions ? (struct hcattn_store_share *)(sessions + n + 1) : NULL;
    for (size_t i = 0; sessions && i < n; i++) {
        const Hcattn__SessionStats *from = messages[i];
        sessions[i] = (struct hcattn_session_stats){
            .session = from->session,
            .state = from->state,
            .policy = from->policy,
            .n_tokens = from->n_tokens,
            .reserved_tokens = from->reserved_tokens,
            .bytes = from->bytes,
            .lane_store = from->lane_store.data,
            .n_lanes = from->lane_store.len,
            .exact_tokens = from->exact_tokens,
            .worker = from->worker,
            .held = from->held,
            .stores = share,
            .n_stores = from->n_stores,
        };
        for (size_t j = 0; j < from->n_stores; j++)
            *share++ = (struct hcattn_store_share){.store = from->stores[j]->store,
                                                   .n_blocks = from->stores[j]->n_blocks,
                                                   .bytes = from->stores[j]->bytes};
    }
    return sessions;
}

struct hcattn_timings message_timings(const Hcattn__Timings *timings)
{
    if (!timings)
        return (struct hcattn_timings){.queued_us = 0};
    return (struct hcattn_timings){
        .queued_us = timings->queued_us,
        .prefill_us = timings->prefill_us,
        .decode_us = timings->decode_us,
        .n_prefill = timings->n_prefill,
        .n_decode = timings->n_decode,
        .store_wait_us = timings->store_wait_us,
    };
}

struct hcattn_logprobs *message_logprobs(Hcattn__TokenLogprobs *const *messages, size_t n)
{
    size_t n_top = 0;
    for (size_t i = 0; i < n; i++)
        n_top += messages[i]->n_top;
    if (n == 0)
        return NULL;
    struct hcattn_logprobs *logprobs = calloc(1, n * sizeof(*logprobs) + n_top * sizeof(struct hcattn_top));
    if (!logprobs)
        return NULL;
    struct hcattn_top *top = (struct hcattn_top *)(logprobs + n);
    for (size_t i = 0; i < n; i++) {
        const Hcattn__TokenLogprobs *from = messages[i];
        logprobs[i].logprob = from->logprob;
        logprobs[i].top = from->n_top ? top : NULL;
        logprobs[i].n_top = from->n_top;
        for (size_t j = 0; j < from->n_top; j++)
            *top++ = (struct hcattn_top){.id = from->top[j]->id, .logprob = from->top[j]->logprob};
        if (from->all.len >= sizeof(float)) {
            logprobs[i].all = (const float *)(const void *)from->all.data; /* malloc'd by the unpacker: aligned */
            logprobs[i].n_all = from->all.len / sizeof(float);
        }
    }
    return logprobs;
}
