/* server_jobs.c - jobs of the worker: from the coordinator's message to the engine, and what comes of them. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "gpu-worker/server_private.h"
#include "gpu-worker/train/train.h"
#include "proto/work.pb-c.h"

static int copy_texts(Hcattn__NamedText *const *texts, size_t n_texts, struct job_text **ret_texts)
{
    struct job_text *copies = calloc(n_texts + 1, sizeof(*copies));
    bool failed = copies == NULL;
    for (size_t i = 0; !failed && i < n_texts; i++) {
        copies[i].name = strdup(texts[i]->name);
        copies[i].text = strdup(texts[i]->text);
        failed = copies[i].name == NULL || copies[i].text == NULL;
    }
    if (failed) {
        job_texts_free(copies, copies == NULL ? 0 : (uint32_t)n_texts);
        return -ENOMEM;
    }
    *ret_texts = copies;
    return 0;
}

static int make_eval(const Hcattn__Evaluate *from, struct job *ret_job, char *sentence)
{
    struct eval_request request = {.context = from->context, .tail = from->tail, .attention = from->attention};
    int r = copy_texts(from->texts, from->n_texts, &request.texts);
    if (r < 0)
        return r;
    request.n_texts = (uint32_t)from->n_texts;
    request.presets = calloc(from->n_presets + 1, sizeof(*request.presets));
    for (; request.presets != NULL && request.n_presets < from->n_presets; request.n_presets++) {
        request.presets[request.n_presets] = strdup(from->presets[request.n_presets]);
        if (request.presets[request.n_presets] == NULL)
            break;
    }
    if (request.presets == NULL || request.n_presets < from->n_presets) {
        for (uint32_t i = 0; i < request.n_presets; i++)
            free(request.presets[i]);
        free(request.presets);
        job_texts_free(request.texts, request.n_texts);
        return -ENOMEM;
    }
    return eval_job_new(&request, ret_job, sentence);
}

static int make_codebook(const Hcattn__TrainCodebook *from, struct job *ret_job, char *sentence)
{
    struct train_codebook_request request = {
        .n_texts = (uint32_t)from->n_texts,
        .n_dims = from->n_dims,
        .n_centroids = from->n_centroids,
        .seed = from->seed,
        .max_iterations = from->max_iterations,
        .again = from->again,
    };
    int r = copy_texts(from->texts, from->n_texts, &request.texts);
    return r < 0 ? r : train_codebook_job_new(&request, ret_job, sentence);
}

static int make_statistics(const Hcattn__GatherStatistics *from, struct job *ret_job, char *sentence)
{
    struct train_statistics_request request = {.n_texts = (uint32_t)from->n_texts, .again = from->again};
    int r = copy_texts(from->texts, from->n_texts, &request.texts);
    return r < 0 ? r : train_statistics_job_new(&request, ret_job, sentence);
}

static int make_job(const Hcattn__RunJob *message, struct job *ret_job, char *sentence)
{
    switch (message->job_case) {
    case HCATTN__RUN_JOB__JOB_EVALUATE:
        return make_eval(message->evaluate, ret_job, sentence);
    case HCATTN__RUN_JOB__JOB_TRAIN_CODEBOOK:
        return make_codebook(message->train_codebook, ret_job, sentence);
    case HCATTN__RUN_JOB__JOB_GATHER_STATISTICS:
        return make_statistics(message->gather_statistics, ret_job, sentence);
    default:
        strcpy(sentence, "a job of a kind that this worker does not know");
        return -EINVAL;
    }
}

void server_jobs_take(struct server *server, uint64_t work, const Hcattn__RunJob *message)
{
    char sentence[JOB_SENTENCE_SIZE] = "";
    struct engine_command *command = calloc(1, sizeof(*command));
    int r = command == NULL ? -ENOMEM : make_job(message, &command->job, sentence);
    if (r < 0) {
        free(command);
        server_work_error(server, work, r, sentence[0] != '\0' ? sentence : strerror(-r));
        return;
    }
    command->kind = ENGINE_JOB;
    command->epoch = server->epoch;
    command->work = work;
    command->fd = -1;
    engine_command(server->engine, command);
}

static void send_row(struct server *server, const struct engine_event *event)
{
    const struct eval_row *from = event->row;
    uint32_t n_layers = from->attention == NULL ? 0 : from->n_layers;
    Hcattn__AttentionRow layers[n_layers + 1], *layer_list[n_layers + 1];
    for (uint32_t i = 0; i < n_layers; i++) {
        hcattn__attention_row__init(&layers[i]);
        layers[i].recall = (float)from->attention[i].recall;
        layers[i].mass = (float)from->attention[i].mass;
        layers[i].output_error = (float)from->attention[i].output_error;
        layers[i].tail_error = (float)from->attention[i].tail_error;
        layer_list[i] = &layers[i];
    }
    Hcattn__EvalRow row = HCATTN__EVAL_ROW__INIT;
    row.index = from->index;
    row.text = (char *)(uintptr_t)from->text;
    row.preset = (char *)(uintptr_t)from->preset;
    row.meaning = (char *)(uintptr_t)from->meaning;
    row.baseline = from->baseline;
    row.context = from->context;
    row.tail = from->tail;
    row.kld_mean = from->kld_mean;
    row.kld_p99 = from->kld_p99;
    row.top1 = from->top1;
    row.perplexity = from->perplexity;
    row.full_perplexity = from->full_perplexity;
    row.kept = from->kept;
    row.n_layers = from->n_layers;
    row.n_kv_heads = from->n_kv_heads;
    row.kept_by_head = (float *)(uintptr_t)from->kept_by_head;
    row.n_kept_by_head = (size_t)from->n_layers * from->n_kv_heads;
    row.device_bytes_fraction = from->device_bytes_fraction;
    row.device_bytes_measured = from->device_bytes_measured;
    row.exact_bytes = from->exact_bytes;
    row.table_bytes = from->table_bytes;
    row.store_bytes = from->store_bytes;
    row.attention = layer_list;
    row.n_attention = n_layers;
    Hcattn__JobRow job_row = HCATTN__JOB_ROW__INIT;
    job_row.eval = &row;
    Hcattn__Work__WorkReply reply = HCATTN__WORK__WORK_REPLY__INIT;
    reply.work = event->work;
    reply.reply_case = HCATTN__WORK__WORK_REPLY__REPLY_JOB_ROW;
    reply.job_row = &job_row;
    server_work_reply(server, &reply);
}

void server_jobs_event(struct server *server, const struct engine_event *event)
{
    Hcattn__Work__WorkReply reply = HCATTN__WORK__WORK_REPLY__INIT;
    Hcattn__JobProgress progress = HCATTN__JOB_PROGRESS__INIT;
    Hcattn__JobDone done = HCATTN__JOB_DONE__INIT;
    char *text = event->text == NULL ? (char *)(uintptr_t) "" : event->text;
    reply.work = event->work;
    switch (event->kind) {
    case ENGINE_JOB_ROW:
        send_row(server, event);
        return;
    case ENGINE_JOB_PROGRESS:
        progress.phase = text;
        progress.done = event->job_done;
        progress.left_us = event->job_left_us;
        reply.reply_case = HCATTN__WORK__WORK_REPLY__REPLY_JOB_PROGRESS;
        reply.job_progress = &progress;
        break;
    default:
        done.sentence = text;
        if (event->path != NULL)
            done.path = event->path;
        reply.reply_case = HCATTN__WORK__WORK_REPLY__REPLY_JOB_DONE;
        reply.job_done = &done;
        break;
    }
    server_work_reply(server, &reply);
}
