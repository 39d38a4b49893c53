/*
 * engine.h - the working thread of a worker: takes runs, steps through batches of them, tells what comes out.
 *
 * Threads    engine_new(), engine_command() and engine_event() belong to the server thread; everything else happens in the
 *            engine's own thread. The two share nothing but the two queues, `progress`, `busy`, `n_tokens` and the phase.
 * Lifetime   commands and events are heap objects that change hands with the call.
 * Epoch      one registration with a coordinator. Runs and events of an earlier epoch are dropped: their clients ask again.
 */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "gpu-worker/run.h"
#include "gpu-worker/step.h"

enum engine_command_kind {
    /* control: handled even in the middle of a step */
    ENGINE_COORDINATOR_UP, /* route, endpoint */
    ENGINE_COORDINATOR_DOWN,
    ENGINE_STORE_UP,    /* store, incarnation, route, fd (closed by the engine) */
    ENGINE_STORE_READY, /* store, incarnation */
    ENGINE_STORE_DOWN,  /* store, incarnation */
    /* work: handled between steps */
    ENGINE_RUN,    /* request */
    ENGINE_STOP,   /* work */
    ENGINE_FORGET, /* session */
    ENGINE_QUIT,
};

struct engine_command {
    struct engine_command *next;
    enum engine_command_kind kind;
    uint32_t epoch;
    uint32_t store;
    uint64_t incarnation, route, work, session;
    int fd;
    char endpoint[128];
    struct run_request *request;
};

enum engine_event_kind {
    ENGINE_EXCHANGE,  /* store, incarnation, fd: to be sent to the store; closed by the receiver */
    ENGINE_PROGRESS,  /* n_done, n_total */
    ENGINE_GENERATED, /* index, id, text, logprobs */
    ENGINE_SCORED,    /* index = position, logprobs */
    ENGINE_FINISHED,  /* end, index = tokens generated, id = end token, text, n_tokens, timings */
    ENGINE_FAILED,    /* error, text = sentence */
    ENGINE_WARNING,   /* text: a line for the log */
};

struct engine_event {
    struct engine_event *next;
    enum engine_event_kind kind;
    uint32_t epoch;
    uint64_t work;
    uint32_t store;
    uint64_t incarnation;
    int fd;
    uint64_t n_done, n_total;
    uint32_t index, id;
    char *text;
    bool has_logprobs;
    struct run_logprobs logprobs;
    enum run_end end;
    uint64_t n_tokens;
    int error;
    uint64_t prefill_us, decode_us, store_wait_us, n_prefill, n_decode;
};
struct engine_event *engine_event_free(struct engine_event *event); /* closes fd; accepts NULL, returns NULL */

struct engine_options {
    uint64_t incarnation;
    enum transport transport;
    uint32_t n_ctx;
    uint32_t prefill_chunk; /* prompt tokens of a step */
    uint32_t max_batch;     /* runs that decode in one step */
    uint64_t request_timeout_us;
    uint64_t recovery_timeout_us;
    void (*thread_setup)(void *context);
    void *thread_context;
};

struct engine;

/* Starts the thread. Everything given stays the caller's and outlives the engine. */
int engine_new(const struct engine_options *options, struct network *network, const struct kernels *kernels,
               struct pool *pool, const struct tokenizer *tokenizer, struct socket_context *sockets,
               struct engine **ret_engine);
struct engine *engine_free(struct engine *engine); /* ends the thread; accepts NULL, returns NULL */

void engine_command(struct engine *engine, struct engine_command *command);
struct engine_event *engine_event(struct engine *engine); /* the oldest; NULL: none */
int engine_event_fd(const struct engine *engine);         /* readable: there may be events */

uint64_t engine_progress(const struct engine *engine);
bool engine_busy(const struct engine *engine);
uint64_t engine_n_tokens(const struct engine *engine);
const char *engine_phase(const struct engine *engine); /* "idle", "step", "rebuilding" */
