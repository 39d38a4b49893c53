/*
 * engine_jobs.c - the job beside the sessions: one at a time, a slice now and then.
 *
 * While sessions work, a job gets as much time as their steps took, so that both go on; when none does, all of it.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "gpu-worker/engine_private.h"
#include "gpu-worker/keys/quantizers.h"

void engine_job_free(struct job *job)
{
    if (job->ops != NULL)
        job->ops->free(job->state);
    *job = (struct job){0};
}

static struct engine_event *new_event(struct engine *engine, enum engine_event_kind kind, uint64_t work)
{
    struct engine_event *event = engine_new_event(engine, kind, NULL);
    if (event != NULL)
        event->work = work;
    return event;
}

/* path may be NULL. */
static void tell_end(struct engine *engine, uint64_t work, int error, const char *sentence, const char *path)
{
    struct engine_event *event = new_event(engine, error < 0 ? ENGINE_FAILED : ENGINE_JOB_DONE, work);
    if (event != NULL) {
        event->error = error;
        event->text = strdup(sentence);
        event->path = path == NULL ? NULL : strdup(path);
    }
    engine_tell(engine, event);
}

void engine_job_start(struct engine *engine, struct engine_command *command)
{
    struct engine_job *job = &engine->job;
    if (job->job.ops != NULL) {
        tell_end(engine, command->work, -EBUSY, "the worker does another job; try again when it is done", NULL);
        return;
    }
    *job = (struct engine_job){.job = command->job, .work = command->work, .started_us = clock_now_us()};
    command->job = (struct job){0};
}

void engine_job_stop(struct engine *engine, uint64_t work)
{
    if (engine->job.job.ops == NULL || engine->job.work != work)
        return;
    engine_job_free(&engine->job.job);
    tell_end(engine, work, -ECANCELED, "cancelled", NULL);
}

void engine_job_drop(struct engine *engine)
{
    engine_job_free(&engine->job.job);
}

/* Everything a row points to lies behind it. */
static struct eval_row *copy_row(const struct eval_row *row)
{
    size_t n_heads = (size_t)row->n_layers * row->n_kv_heads, n_layers = row->attention == NULL ? 0 : row->n_layers;
    size_t text = strlen(row->text) + 1, preset = strlen(row->preset) + 1, meaning = strlen(row->meaning) + 1;
    struct eval_row *copy =
        malloc(sizeof(*copy) + n_layers * sizeof(*row->attention) + n_heads * sizeof(float) + text + preset + meaning);
    if (copy == NULL)
        return NULL;
    *copy = *row;
    struct method_attention *attention = (struct method_attention *)(copy + 1);
    float *kept = (float *)(attention + n_layers);
    char *words = (char *)(kept + n_heads);
    if (n_layers > 0)
        copy->attention = memcpy(attention, row->attention, n_layers * sizeof(*attention));
    copy->kept_by_head = memcpy(kept, row->kept_by_head, n_heads * sizeof(*kept));
    copy->text = memcpy(words, row->text, text);
    copy->preset = memcpy(words + text, row->preset, preset);
    copy->meaning = memcpy(words + text + preset, row->meaning, meaning);
    return copy;
}

static void tell_progress(struct engine *engine, const struct job_report *report)
{
    enum { EVERY_US = 200000 };
    struct engine_job *job = &engine->job;
    uint64_t now = clock_now_us();
    if (report->row != NULL) {
        struct engine_event *event = new_event(engine, ENGINE_JOB_ROW, job->work);
        if (event != NULL && (event->row = copy_row(report->row)) == NULL)
            event = engine_event_free(event);
        engine_tell(engine, event);
    }
    if (now - job->told_us < EVERY_US)
        return;
    job->told_us = now;
    struct engine_event *event = new_event(engine, ENGINE_JOB_PROGRESS, job->work);
    if (event == NULL)
        return;
    event->text = strdup(report->phase == NULL || report->phase[0] == 0 ? job->job.ops->name : report->phase);
    event->job_done = report->done;
    if (report->done > 0 && report->done < 1)
        event->job_left_us = (uint64_t)((double)(now - job->started_us) / report->done * (1 - report->done));
    engine_tell(engine, event);
}

void engine_job_advance(struct engine *engine)
{
    struct engine_job *job = &engine->job;
    struct job_report report = {0};
    char sentence[JOB_SENTENCE_SIZE] = "";
    uint64_t start = clock_now_us();
    int r = job->job.ops->advance(job->job.state, &engine->tools, &report, sentence);
    job->owed_us = 0;
    job->slice_us = clock_now_us() - start;
    atomic_fetch_add_explicit(&engine->progress, 1, memory_order_relaxed);
    if (engine_device_check(engine, r) == -ENODEV)
        return;
    if (r >= 0)
        tell_progress(engine, &report);
    if (r > 0)
        return;
    tell_end(engine, job->work, r, sentence[0] != '\0' ? sentence : strerror(-r), report.path);
    engine_job_free(&job->job);
}

bool engine_job_is_due(const struct engine *engine)
{
    return engine->job.job.ops != NULL && engine->job.owed_us >= engine->job.slice_us;
}
