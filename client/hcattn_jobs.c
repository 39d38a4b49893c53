/*
 * hcattn_jobs.c - see hcattn_jobs.h.
 *
 * Owner      the messages point into the caller's structures; the pointers to them are freed with the call.
 * Invariant  rows are told in order, each once: one that the caller has is skipped, one behind a gap is asked for again.
 */
#include "client/hcattn_jobs.h"
#include "client/call.h"
#include "client/message.h"
#include "common/utf8.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct running {
    const struct hcattn_job_events *events;
    uint32_t n_rows; /* the caller has */
    bool gap;        /* a row of this attempt is missing: its end is none */
    struct hcattn_job_done done;
};

struct texts {
    Hcattn__NamedText *messages;
    Hcattn__NamedText **pointers;
};

static void texts_fini(struct texts *texts)
{
    free(texts->messages);
    free(texts->pointers);
}

/* -EINVAL, -ENOMEM with a sentence. */
static int texts_init(struct texts *texts, const struct hcattn_text *from, size_t n, struct hcattn_error *error)
{
    *texts = (struct texts){.messages = calloc(n + 1, sizeof(*texts->messages)),
                            .pointers = calloc(n + 1, sizeof(Hcattn__NamedText *))};
    int result = 0;
    if (!texts->messages || !texts->pointers)
        result = call_fail(error, HCATTN_NO_MEMORY, "no memory for the texts");
    for (size_t i = 0; !result && i < n; i++) {
        size_t offset = 0;
        if (!from[i].name || !from[i].text)
            result = call_fail(error, HCATTN_INVALID_ARGUMENT, "text %zu has no name or no text", i + 1);
        else if (utf8_check(from[i].name, strlen(from[i].name), &offset) < 0)
            result = call_fail(error, HCATTN_INVALID_ARGUMENT, "the name of text %zu is not UTF-8", i + 1);
        else if (utf8_check(from[i].text, strlen(from[i].text), &offset) < 0)
            result = call_fail(error, HCATTN_INVALID_ARGUMENT, "text '%.100s' is not UTF-8 (at byte %zu)", from[i].name,
                               offset);
        if (result)
            break;
        hcattn__named_text__init(&texts->messages[i]);
        texts->messages[i].name = (char *)from[i].name;
        texts->messages[i].text = (char *)from[i].text;
        texts->pointers[i] = &texts->messages[i];
    }
    if (result)
        texts_fini(texts);
    return result;
}

static enum call_step told(int result)
{
    return result ? CALL_STOPPED : CALL_GOES_ON;
}

static enum call_step take_progress(const struct running *running, const Hcattn__JobProgress *message)
{
    if (!running->events->progress)
        return CALL_GOES_ON;
    double done = message->done >= 0 && message->done <= 1 ? message->done : 0;
    struct hcattn_job_progress progress = {.phase = message->phase, .done = done, .left_us = message->left_us};
    return told(running->events->progress(running->events->context, &progress));
}

static enum call_step take_row(struct running *running, const Hcattn__EvalRow *message)
{
    if (message->index < running->n_rows)
        return CALL_GOES_ON; /* from before the job was sent again */
    if (message->index > running->n_rows) {
        running->gap = true;
        return CALL_OUT_OF_STEP;
    }
    uint64_t n_heads = (uint64_t)message->n_layers * message->n_kv_heads;
    if (message->n_kept_by_head && n_heads && message->n_kept_by_head != n_heads)
        return CALL_MALFORMED;
    struct hcattn_attention_row *attention = calloc(message->n_attention + 1, sizeof(*attention));
    if (!attention) {
        running->gap = true; /* no memory now: asked for again */
        return CALL_OUT_OF_STEP;
    }
    for (size_t i = 0; i < message->n_attention; i++)
        attention[i] = (struct hcattn_attention_row){.recall = message->attention[i]->recall,
                                                     .mass = message->attention[i]->mass,
                                                     .output_error = message->attention[i]->output_error,
                                                     .tail_error = message->attention[i]->tail_error};
    struct hcattn_eval_row row = {
        .index = message->index,
        .text = message->text,
        .preset = message->preset,
        .meaning = message->meaning,
        .baseline = message->baseline,
        .context = message->context,
        .tail = message->tail,
        .kld_mean = message->kld_mean,
        .kld_p99 = message->kld_p99,
        .top1 = message->top1,
        .perplexity = message->perplexity,
        .full_perplexity = message->full_perplexity,
        .kept = message->kept,
        .n_layers = message->n_layers,
        .n_kv_heads = message->n_kv_heads,
        .kept_by_head = message->n_kept_by_head && n_heads ? message->kept_by_head : NULL,
        .device_bytes_fraction = message->device_bytes_fraction,
        .device_bytes_measured = message->device_bytes_measured,
        .exact_bytes = message->exact_bytes,
        .table_bytes = message->table_bytes,
        .store_bytes = message->store_bytes,
        .attention = attention,
        .n_attention = message->n_attention,
    };
    running->n_rows++;
    enum call_step step = CALL_GOES_ON;
    if (running->events->row)
        step = told(running->events->row(running->events->context, &row));
    free(attention);
    return step;
}

static enum call_step on_reply(void *context, Hcattn__Reply *reply)
{
    struct running *running = context;
    switch (reply->reply_case) {
    case HCATTN__REPLY__REPLY_JOB_PROGRESS:
        return take_progress(running, reply->job_progress);
    case HCATTN__REPLY__REPLY_JOB_ROW:
        return reply->job_row->eval ? take_row(running, reply->job_row->eval) : CALL_MALFORMED;
    case HCATTN__REPLY__REPLY_JOB_DONE:
        if (running->gap)
            return CALL_OUT_OF_STEP;
        snprintf(running->done.sentence, sizeof(running->done.sentence), "%s", reply->job_done->sentence);
        if (strlen(reply->job_done->path) < sizeof(running->done.path))
            strcpy(running->done.path, reply->job_done->path);
        return CALL_FINISHED;
    default:
        return CALL_MALFORMED;
    }
}

static bool prepare_again(void *context, bool lost)
{
    struct running *running = context;
    (void)lost;
    running->gap = false;
    return true;
}

static int run(struct hcattn *client, Hcattn__RunJob *job, const struct hcattn_job_events *events, uint32_t timeout_ms,
               struct hcattn_job_done *ret_done, struct hcattn_error *ret_error)
{
    static const struct hcattn_job_events none;
    struct running running = {.events = events ? events : &none};
    struct call call = {.request = HCATTN__REQUEST__INIT,
                        .on_reply = on_reply,
                        .prepare_again = prepare_again,
                        .context = &running,
                        .timeout_ms = timeout_ms,
                        .extends = true};
    call.request.request_case = HCATTN__REQUEST__REQUEST_RUN_JOB;
    call.request.run_job = job;
    int result = call_run(client, &call, ret_error);
    if (!result && ret_done)
        *ret_done = running.done;
    return result;
}

int hcattn_evaluate(struct hcattn *client, const struct hcattn_evaluate *evaluate,
                    const struct hcattn_job_events *events, uint32_t timeout_ms, struct hcattn_job_done *ret_done,
                    struct hcattn_error *ret_error)
{
    struct texts texts;
    int result = texts_init(&texts, evaluate->texts, evaluate->n_texts, ret_error);
    if (result)
        return result;
    Hcattn__Evaluate body = HCATTN__EVALUATE__INIT;
    body.texts = texts.pointers;
    body.n_texts = evaluate->n_texts;
    body.context = evaluate->context;
    body.tail = evaluate->tail;
    body.presets = (char **)evaluate->presets;
    body.n_presets = evaluate->n_presets;
    body.attention = evaluate->attention;
    Hcattn__RunJob job = HCATTN__RUN_JOB__INIT;
    job.job_case = HCATTN__RUN_JOB__JOB_EVALUATE;
    job.evaluate = &body;
    result = run(client, &job, events, timeout_ms, ret_done, ret_error);
    texts_fini(&texts);
    return result;
}

int hcattn_train_codebook(struct hcattn *client, const struct hcattn_train_codebook *train,
                          const struct hcattn_job_events *events, uint32_t timeout_ms, struct hcattn_job_done *ret_done,
                          struct hcattn_error *ret_error)
{
    struct texts texts;
    int result = texts_init(&texts, train->texts, train->n_texts, ret_error);
    if (result)
        return result;
    Hcattn__TrainCodebook body = HCATTN__TRAIN_CODEBOOK__INIT;
    body.texts = texts.pointers;
    body.n_texts = train->n_texts;
    body.n_dims = train->n_dims;
    body.n_centroids = train->n_centroids;
    body.seed = train->seed;
    body.max_iterations = train->max_iterations;
    body.again = train->again;
    Hcattn__RunJob job = HCATTN__RUN_JOB__INIT;
    job.job_case = HCATTN__RUN_JOB__JOB_TRAIN_CODEBOOK;
    job.train_codebook = &body;
    result = run(client, &job, events, timeout_ms, ret_done, ret_error);
    texts_fini(&texts);
    return result;
}

int hcattn_gather_statistics(struct hcattn *client, const struct hcattn_gather_statistics *gather,
                             const struct hcattn_job_events *events, uint32_t timeout_ms,
                             struct hcattn_job_done *ret_done, struct hcattn_error *ret_error)
{
    struct texts texts;
    int result = texts_init(&texts, gather->texts, gather->n_texts, ret_error);
    if (result)
        return result;
    Hcattn__GatherStatistics body = HCATTN__GATHER_STATISTICS__INIT;
    body.texts = texts.pointers;
    body.n_texts = gather->n_texts;
    body.again = gather->again;
    Hcattn__RunJob job = HCATTN__RUN_JOB__INIT;
    job.job_case = HCATTN__RUN_JOB__JOB_GATHER_STATISTICS;
    job.gather_statistics = &body;
    result = run(client, &job, events, timeout_ms, ret_done, ret_error);
    texts_fini(&texts);
    return result;
}
