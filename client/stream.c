/* stream.c - see stream.h. */
#include "client/stream.h"
#include "client/call.h"
#include "client/message.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define MAX_STOP 64u

struct stream {
    const struct hcattn_events *events;
    Hcattn__At at; /* what the request says, once `at_known` */
    bool at_known;
    bool accepted; /* told the caller */
    Hcattn__At **request_at;
    uint32_t *request_resume_from; /* NULL: not a Generate */
    uint32_t n_received;           /* generated tokens that the caller has */
    uint64_t next_position;        /* Score: first one that the caller does not have */
    union {
        struct hcattn_appended appended;
        struct hcattn_finished finished;
        struct hcattn_score_done scored;
    } result;
};

static void begin(struct stream *stream, const struct hcattn_events *events, uint64_t at, Hcattn__At **request_at)
{
    static const struct hcattn_events none;
    *stream = (struct stream){.events = events ? events : &none, .request_at = request_at};
    hcattn__at__init(&stream->at);
    if (at != HCATTN_AT_ANY) {
        stream->at.n_tokens = at;
        stream->at_known = true;
        *request_at = &stream->at;
    }
}

static bool prepare_again(void *context, bool lost)
{
    struct stream *stream = context;
    if (!stream->at_known)
        return !lost; /* the same coordinator knows its own request id */
    *stream->request_at = &stream->at;
    if (stream->request_resume_from)
        *stream->request_resume_from = stream->n_received;
    return true;
}

static enum call_step told(int result)
{
    return result ? CALL_STOPPED : CALL_GOES_ON;
}

static enum call_step take_accepted(struct stream *stream, const Hcattn__Accepted *message)
{
    if (!stream->at_known) {
        stream->at.n_tokens = message->at;
        stream->at_known = true;
    } else if (message->at != stream->at.n_tokens) {
        return CALL_MALFORMED;
    }
    if (stream->accepted)
        return CALL_GOES_ON;
    stream->accepted = true;
    if (!stream->events->accepted)
        return CALL_GOES_ON;
    struct hcattn_accepted accepted = {.prompt_ids = message->prompt_ids,
                                       .n_prompt_ids = message->n_prompt_ids,
                                       .at = message->at,
                                       .reserved_tokens = message->reserved_tokens};
    return told(stream->events->accepted(stream->events->context, &accepted));
}

static enum call_step take_progress(struct stream *stream, const Hcattn__Progress *message)
{
    if (!stream->events->progress)
        return CALL_GOES_ON;
    return told(stream->events->progress(stream->events->context, message->n_done, message->n_total));
}

static enum call_step tell_generated(struct stream *stream, uint32_t first, const uint32_t *ids, size_t n_ids,
                                     const char *text, const struct hcattn_logprobs *logprobs)
{
    size_t text_bytes = strlen(text);
    if (!stream->events->generated || (n_ids == 0 && text_bytes == 0))
        return CALL_GOES_ON;
    struct hcattn_generated generated = {
        .first = first, .ids = ids, .n_ids = n_ids, .text = text, .text_bytes = text_bytes, .logprobs = logprobs};
    return told(stream->events->generated(stream->events->context, &generated));
}

static enum call_step take_generated(struct stream *stream, const Hcattn__Generated *message)
{
    uint64_t end = (uint64_t)message->first + message->n_ids;
    if (end > UINT32_MAX || (message->n_logprobs && message->n_logprobs != message->n_ids))
        return CALL_MALFORMED;
    if (message->n_ids && end <= stream->n_received)
        return CALL_GOES_ON; /* sent twice */
    if (message->first != stream->n_received)
        return message->n_ids ? CALL_OUT_OF_STEP : CALL_GOES_ON;
    struct hcattn_logprobs *logprobs = message_logprobs(message->logprobs, message->n_logprobs);
    if (message->n_logprobs && !logprobs)
        return CALL_OUT_OF_STEP; /* no memory now: asked for again */
    stream->n_received = (uint32_t)end;
    enum call_step step = tell_generated(stream, message->first, message->ids, message->n_ids, message->text, logprobs);
    free(logprobs);
    return step;
}

static enum call_step take_scored(struct stream *stream, const Hcattn__Scored *message)
{
    uint64_t first = message->first;
    if (first > UINT64_MAX - message->n_scores)
        return CALL_MALFORMED;
    if (stream->next_position == 0)
        stream->next_position = first; /* position 0 has no score */
    if (first + message->n_scores <= stream->next_position)
        return CALL_GOES_ON;
    if (first > stream->next_position)
        return CALL_OUT_OF_STEP;
    size_t skip = (size_t)(stream->next_position - first); /* scores of a position are the same each time */
    struct hcattn_logprobs *scores = message_logprobs(message->scores + skip, message->n_scores - skip);
    if (!scores)
        return CALL_OUT_OF_STEP;
    struct hcattn_scored scored = {
        .first = stream->next_position, .scores = scores, .n_scores = message->n_scores - skip};
    stream->next_position = first + message->n_scores;
    enum call_step step = CALL_GOES_ON;
    if (stream->events->scored)
        step = told(stream->events->scored(stream->events->context, &scored));
    free(scores);
    return step;
}

static enum call_step finish_generate(struct stream *stream, const Hcattn__GenerateDone *message)
{
    if (message->n_generated > stream->n_received)
        return CALL_OUT_OF_STEP;
    if (message->n_generated < stream->n_received || message->reason < HCATTN__FINISH_REASON__FINISH_LENGTH ||
        message->reason > HCATTN__FINISH_REASON__FINISH_STOP)
        return CALL_MALFORMED;
    stream->result.finished = (struct hcattn_finished){
        .reason = (enum hcattn_finish)message->reason,
        .n_generated = message->n_generated,
        .n_tokens = message->n_tokens,
        .end_id = message->end_id,
        .timings = message_timings(message->timings),
    };
    /* It is done anyway: what a callback says now changes nothing. */
    tell_generated(stream, stream->n_received, NULL, 0, message->text, NULL);
    return CALL_FINISHED;
}

static enum call_step on_append(void *context, Hcattn__Reply *reply)
{
    struct stream *stream = context;
    switch (reply->reply_case) {
    case HCATTN__REPLY__REPLY_ACCEPTED:
        return take_accepted(stream, reply->accepted);
    case HCATTN__REPLY__REPLY_PROGRESS:
        return take_progress(stream, reply->progress);
    case HCATTN__REPLY__REPLY_APPENDED:
        stream->result.appended = (struct hcattn_appended){.n_input_tokens = reply->appended->n_input_tokens,
                                                           .n_tokens = reply->appended->n_tokens,
                                                           .timings = message_timings(reply->appended->timings)};
        return CALL_FINISHED;
    default:
        return CALL_MALFORMED;
    }
}

static enum call_step on_generate(void *context, Hcattn__Reply *reply)
{
    struct stream *stream = context;
    switch (reply->reply_case) {
    case HCATTN__REPLY__REPLY_ACCEPTED:
        return take_accepted(stream, reply->accepted);
    case HCATTN__REPLY__REPLY_PROGRESS:
        return take_progress(stream, reply->progress);
    case HCATTN__REPLY__REPLY_GENERATED:
        return take_generated(stream, reply->generated);
    case HCATTN__REPLY__REPLY_GENERATE_DONE:
        return finish_generate(stream, reply->generate_done);
    default:
        return CALL_MALFORMED;
    }
}

static enum call_step on_score(void *context, Hcattn__Reply *reply)
{
    struct stream *stream = context;
    switch (reply->reply_case) {
    case HCATTN__REPLY__REPLY_ACCEPTED:
        return take_accepted(stream, reply->accepted);
    case HCATTN__REPLY__REPLY_PROGRESS:
        return take_progress(stream, reply->progress);
    case HCATTN__REPLY__REPLY_SCORED:
        return take_scored(stream, reply->scored);
    case HCATTN__REPLY__REPLY_SCORE_DONE:
        stream->result.scored = (struct hcattn_score_done){.n_tokens = reply->score_done->n_tokens,
                                                           .timings = message_timings(reply->score_done->timings)};
        return CALL_FINISHED;
    default:
        return CALL_MALFORMED;
    }
}

int stream_append(struct hcattn *client, uint64_t session, const struct hcattn_input *input, uint64_t at,
                  const struct hcattn_events *events, uint32_t timeout_ms, struct hcattn_appended *ret_appended,
                  struct hcattn_error *ret_error)
{
    struct message_input message;
    int error = message_set_input(&message, input, ret_error);
    if (error)
        return error;
    Hcattn__Append append = HCATTN__APPEND__INIT;
    append.session = session;
    append.input = &message.input;
    struct stream stream;
    begin(&stream, events, at, &append.at);
    struct call call = {.request = HCATTN__REQUEST__INIT,
                        .on_reply = on_append,
                        .prepare_again = prepare_again,
                        .context = &stream,
                        .timeout_ms = timeout_ms};
    call.request.request_case = HCATTN__REQUEST__REQUEST_APPEND;
    call.request.append = &append;
    error = call_run(client, &call, ret_error);
    message_unset_input(&message);
    if (!error && ret_appended)
        *ret_appended = stream.result.appended;
    return error;
}

/* Fills everything but the input. -ENOMEM */
static int set_sampling(Hcattn__Sampling *message, const struct hcattn_sampling *sampling, Hcattn__LogitBias **ret_bias)
{
    hcattn__sampling__init(message);
    message->temperature = sampling->temperature;
    message->top_k = sampling->top_k;
    message->top_p = sampling->top_p;
    message->min_p = sampling->min_p;
    message->repeat_penalty = sampling->repeat_penalty;
    message->presence_penalty = sampling->presence_penalty;
    message->frequency_penalty = sampling->frequency_penalty;
    message->penalty_window = sampling->penalty_window;
    message->seed = sampling->seed;
    if (sampling->n_bias == 0)
        return 0;
    /* Messages, then pointers to them, in one allocation. */
    Hcattn__LogitBias *bias = calloc(sampling->n_bias, sizeof(*bias) + sizeof(Hcattn__LogitBias *));
    if (!bias)
        return -ENOMEM;
    message->logit_bias = (Hcattn__LogitBias **)(void *)(bias + sampling->n_bias);
    message->n_logit_bias = sampling->n_bias;
    for (size_t i = 0; i < sampling->n_bias; i++) {
        hcattn__logit_bias__init(&bias[i]);
        bias[i].id = sampling->bias[i].id;
        bias[i].bias = sampling->bias[i].bias;
        message->logit_bias[i] = &bias[i];
    }
    *ret_bias = bias;
    return 0;
}

int stream_generate(struct hcattn *client, const struct hcattn_generate *generate, const struct hcattn_events *events,
                    uint32_t timeout_ms, struct hcattn_finished *ret_finished, struct hcattn_error *ret_error)
{
    char *stop[MAX_STOP];
    if (generate->n_stop > MAX_STOP)
        return call_fail(ret_error, HCATTN_INVALID_ARGUMENT, "more than %u stop strings", MAX_STOP);
    for (size_t i = 0; i < generate->n_stop; i++)
        stop[i] = (char *)generate->stop[i];
    struct message_input message;
    int error = message_set_input(&message, &generate->input, ret_error);
    if (error)
        return error;
    Hcattn__Sampling sampling;
    Hcattn__LogitBias *bias = NULL;
    if (set_sampling(&sampling, &generate->sampling, &bias) < 0) {
        message_unset_input(&message);
        return call_fail(ret_error, HCATTN_NO_MEMORY, "no memory for the logit bias");
    }
    Hcattn__Generate body = HCATTN__GENERATE__INIT;
    body.session = generate->session;
    body.input = &message.input;
    body.max_tokens = generate->max_tokens;
    body.sampling = &sampling;
    body.logprobs = generate->logprobs;
    body.top_logprobs = generate->top_logprobs;
    body.ignore_end = generate->ignore_end;
    body.stop = stop;
    body.n_stop = generate->n_stop;
    struct stream stream;
    begin(&stream, events, generate->at, &body.at);
    stream.request_resume_from = &body.resume_from;
    struct call call = {.request = HCATTN__REQUEST__INIT,
                        .on_reply = on_generate,
                        .prepare_again = prepare_again,
                        .context = &stream,
                        .timeout_ms = timeout_ms};
    call.request.request_case = HCATTN__REQUEST__REQUEST_GENERATE;
    call.request.generate = &body;
    error = call_run(client, &call, ret_error);
    free(bias);
    message_unset_input(&message);
    if (!error && ret_finished)
        *ret_finished = stream.result.finished;
    return error;
}

int stream_score(struct hcattn *client, const struct hcattn_score *score, const struct hcattn_events *events,
                 uint32_t timeout_ms, struct hcattn_score_done *ret_done, struct hcattn_error *ret_error)
{
    struct message_input message;
    int error = message_set_input(&message, &score->input, ret_error);
    if (error)
        return error;
    Hcattn__Score body = HCATTN__SCORE__INIT;
    body.session = score->session;
    body.input = &message.input;
    body.from = score->from;
    body.all_logprobs = score->all_logprobs;
    body.top_logprobs = score->top_logprobs;
    struct stream stream;
    begin(&stream, events, score->at, &body.at);
    struct call call = {.request = HCATTN__REQUEST__INIT,
                        .on_reply = on_score,
                        .prepare_again = prepare_again,
                        .context = &stream,
                        .timeout_ms = timeout_ms};
    call.request.request_case = HCATTN__REQUEST__REQUEST_SCORE;
    call.request.score = &body;
    error = call_run(client, &call, ret_error);
    message_unset_input(&message);
    if (!error && ret_done)
        *ret_done = stream.result.scored;
    return error;
}
