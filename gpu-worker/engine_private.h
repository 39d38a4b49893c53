/* engine_private.h - the engine's state, shared by engine.c and the files beside it named engine_... only. */
#pragma once

#include <pthread.h>

#include "gpu-worker/engine.h"

struct command_queue {
    struct engine_command *first, *last;
};

/* The job that is done beside the sessions; engine_jobs.c. */
struct engine_job {
    struct job job; /* ops NULL: none */
    uint64_t work;
    uint64_t started_us, told_us;
    uint64_t slice_us; /* its last slice took */
    uint64_t owed_us;  /* steps took since then */
};

struct engine {
    struct engine_options options;
    struct network *network;
    const struct kernels *kernels;
    const struct tokenizer *tokenizer;
    struct stores stores;
    struct link link;
    struct step *step;
    struct session *sessions;
    struct run *runs; /* in order of arrival */
    struct job_tools tools;
    struct engine_job job;
    uint64_t n_uses;      /* sessions are marked with it */
    uint8_t *device_rows; /* one block: [layer][kv_head][64] rows; NULL where its memory is the host's */
    bool has_lost_device; /* nothing works any more: it was told */
    struct sampler_candidate *candidates; /* [n_vocab] */
    float *raw_logits;                    /* [n_vocab] */
    uint32_t epoch;
    bool quit;
    pthread_t thread;
    bool thread_started;

    pthread_mutex_t lock; /* of the queues below */
    struct command_queue control, work;
    struct engine_event *first_event, *last_event;
    int wake_fd, event_fd;

    /* of past steps, smoothed: what the next one may take on */
    double prefill_row_us, decode_step_us;

    _Atomic bool has_control; /* control commands wait */
    _Atomic uint32_t n_stops; /* stops and forgets ever asked for */
    uint32_t n_stops_seen;
    _Atomic uint64_t device_bytes;
    _Atomic uint64_t progress, n_tokens;
    _Atomic bool busy;
    _Atomic(const char *) phase;
};

/* engine.c: until the device has done what was asked for. -ENOMEM, -EIO; -ENODEV: as engine_device_check(). */
int engine_device_wait(struct engine *engine);
/* Returns r, which may have come from the device. -ENODEV: it is lost, which is told once; the thread ends soon. */
int engine_device_check(struct engine *engine, int r);
/* What an error means that may have come from the device. */
const char *engine_device_sentence(const struct engine *engine, int r);

/* engine_queue.c */

/* The oldest command, now the caller's; NULL: none. */
struct engine_command *engine_pop(struct engine *engine, struct command_queue *queue);
void engine_command_free(struct engine_command *command);
/* Tells an event; takes it (NULL: nothing, out of memory is the only loss and fails the run). */
void engine_tell(struct engine *engine, struct engine_event *event);
struct engine_event *engine_new_event(struct engine *engine, enum engine_event_kind kind, const struct run *run);

/* engine_exchange.c: before the first store; and once a store's exchange is there. */
void engine_exchange_init(struct engine *engine);
void engine_exchange_made(struct engine *engine, uint32_t store);

/* engine_run.c */

/* Reads the journal and brings the session's device memory to where the run starts. -EAGAIN: a store is missing;
 * -ECONNRESET; other errors are the run's (run_fail() was called). */
int engine_prepare(struct engine *engine, struct run *run);
/* Nothing to compute (any more): tells the end. */
bool engine_is_finished(const struct run *run);
void engine_finish(struct engine *engine, struct run *run);
/* A row's logits have come: chooses the next token or tells a score. */
void engine_take_logits(struct engine *engine, struct run *run, uint32_t position, float *logits);
/* The same of a row whose next token the device has chosen. */
void engine_take_token(struct engine *engine, struct run *run, uint32_t id);
/* The journal holds the pending id: tells it. */
void engine_tell_pending(struct engine *engine, struct run *run);
/* engine_room.c: device memory for a run, from its next position to its end; idle sessions that were used longest ago lose
 * theirs. -EDQUOT: not now, others run; -ENOMEM: run_fail() was called. */
int engine_make_room(struct engine *engine, struct run *run);
struct session *engine_find_session(struct engine *engine, uint64_t id);
void engine_forget_session(struct engine *engine, uint64_t id);
int engine_open_session(struct engine *engine, struct run *run);

/* engine_run.c: Quantizes the blocks that are old for a query at `position`. -ESTALE, -ENOMEM. */
int engine_add_keys(struct engine *engine, struct run *run, uint32_t position);

/* engine_step.c: one batch over all runs. -ECONNRESET: the coordinator is lost. */
int engine_step(struct engine *engine);
void engine_between_layers(void *context); /* the engine: cancels within a step */

/* engine_jobs.c */

void engine_job_free(struct job *job);
/* Takes the command's job, or tells that there is one already. */
void engine_job_start(struct engine *engine, struct engine_command *command);
void engine_job_stop(struct engine *engine, uint64_t work); /* if it is that one: ends it and tells so */
void engine_job_drop(struct engine *engine);                /* nobody waits for it any more */
void engine_job_advance(struct engine *engine);             /* there is one: a slice */
bool engine_job_is_due(const struct engine *engine);        /* there is one, and steps have had their share */

/* engine_profile.c: the session has the profile that this run's decode steps need (FastGen). -ESTALE, -ENOMEM. */
int engine_profile(struct engine *engine, struct run *run);

/* engine_rebuild.c: the session's exact set and keys as the query at n_rows needs them. -ETIMEDOUT, -ECONNRESET, what a
 * store refused with, -ENOMEM; then the session holds nothing. */
int engine_rebuild(struct engine *engine, struct run *run, uint32_t n_rows);
