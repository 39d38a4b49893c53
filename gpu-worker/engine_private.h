/* engine_private.h - the engine's state, shared by engine.c and the files beside it named engine_... only. */
#pragma once

#include <pthread.h>

#include "gpu-worker/engine.h"

struct command_queue {
    struct engine_command *first, *last;
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
    struct run *runs;                     /* in order of arrival */
    uint16_t *fetch_rows;                 /* one block: [layer][kv_head][64][K|V] */
    struct sampler_candidate *candidates; /* [n_vocab] */
    uint32_t epoch;
    bool quit;
    pthread_t thread;
    bool thread_started;

    pthread_mutex_t lock; /* of the queues below */
    struct command_queue control, work;
    struct engine_event *first_event, *last_event;
    int wake_fd, event_fd;

    _Atomic uint64_t progress, n_tokens;
    _Atomic bool busy;
    _Atomic(const char *) phase;
};

/* engine_queue.c */

/* The oldest command, now the caller's; NULL: none. */
struct engine_command *engine_pop(struct engine *engine, struct command_queue *queue);
void engine_command_free(struct engine_command *command);
/* Tells an event; takes it (NULL: nothing, out of memory is the only loss and fails the run). */
void engine_tell(struct engine *engine, struct engine_event *event);
struct engine_event *engine_new_event(struct engine *engine, enum engine_event_kind kind, const struct run *run);

/* engine_run.c */

/* Reads the journal and brings the session's device memory to where the run starts. -EAGAIN: a store is missing;
 * -ECONNRESET; other errors are the run's (run_fail() was called). */
int engine_prepare(struct engine *engine, struct run *run);
/* Nothing to compute (any more): tells the end. */
bool engine_is_finished(const struct run *run);
void engine_finish(struct engine *engine, struct run *run);
/* A row's logits have come: chooses the next token or tells a score. */
void engine_take_logits(struct engine *engine, struct run *run, uint32_t position, float *logits);
/* The journal holds the pending id: tells it. */
void engine_tell_pending(struct engine *engine, struct run *run);
/* Quantizes the blocks that are old for a query at `position`. -ESTALE, -ENOMEM. */
int engine_add_keys(struct engine *engine, struct run *run, uint32_t position);

/* engine_rebuild.c: fetches a block's rows [layer][kv_head][n_tokens][K|V] through its store into engine->fetch_rows. */
int engine_fetch_block(struct engine *engine, struct run *run, uint32_t block, uint32_t n_tokens);
int engine_rebuild(struct engine *engine, struct run *run, uint32_t n_rows);
