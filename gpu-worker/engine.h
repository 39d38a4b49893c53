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

#include "gpu-worker/eval/eval.h"
#include "gpu-worker/run.h"
#include "gpu-worker/step.h"

enum engine_command_kind {
    /* control: handled even in the middle of a step */
    ENGINE_COORDINATOR_UP, /* route, endpoint */
    ENGINE_COORDINATOR_DOWN,
    ENGINE_STORE_UP,    /* store, incarnation, route, fd (closed by the engine) */
    ENGINE_STORE_READY, /* store, incarnation */
    ENGINE_STORE_DOWN,  /* store, incarnation */
    ENGINE_STORE_LEFT,  /* store, incarnation: it does not come back */
    ENGINE_RING_USE,    /* store, incarnation, ring, work = sequence; answered by ENGINE_RING_USED */
    /* work: handled between steps */
    ENGINE_RUN,    /* request */
    ENGINE_STOP,   /* work */
    ENGINE_FORGET, /* session */
    ENGINE_COUNT,  /* work, session; answered by ENGINE_COUNTED or ENGINE_FAILED */
    ENGINE_JOB,    /* work, job; ended by ENGINE_STOP, as a run */
    ENGINE_QUIT,
};

struct engine_command {
    struct engine_command *next;
    enum engine_command_kind kind;
    uint32_t epoch;
    uint32_t store;
    uint64_t incarnation, route, work, session;
    bool ring;
    int fd;
    char endpoint[128];
    struct run_request *request;
    struct job job; /* ops NULL: none */
};

enum engine_event_kind {
    ENGINE_EXCHANGE,     /* store, incarnation, fd: to be sent to the store; closed by the receiver */
    ENGINE_PROGRESS,     /* n_done, n_total */
    ENGINE_GENERATED,    /* index, id, text, logprobs */
    ENGINE_SCORED,       /* index = position, logprobs */
    ENGINE_FINISHED,     /* end, index = tokens generated, id = end token, text, n_tokens, timings */
    ENGINE_FAILED,       /* error, text = sentence, bytes_asked, bytes_free */
    ENGINE_COUNTED,      /* counts */
    ENGINE_JOB_PROGRESS, /* job */
    ENGINE_JOB_ROW,      /* row */
    ENGINE_JOB_DONE,     /* text */
    ENGINE_RING_USED,    /* work = sequence, error */
    ENGINE_WARNING,      /* text: a line for the log */
    ENGINE_DEVICE_LOST,  /* text: why; the process has to end, another one can take its place */
};

/* A session's counts as they are told: sums of what session.h has. */
struct engine_counts {
    struct session_counts counts; /* n_kept is the event's own; its bytes_read is by lane, the one below by store */
    uint32_t n_kept;              /* [n_layers x n_kv_heads] */
    uint32_t n_stores;
    uint32_t store[LAYOUT_N_LANES];
    uint64_t bytes_read[LAYOUT_N_LANES];
    uint64_t exact_bytes, key_bytes;
    /* of a policy with fastgen, once there is one: [n_kept] */
    uint32_t profile_tokens; /* the session held; 0: there is none */
    float recovery;
    uint8_t *classes; /* enum fastgen_class */
    float *kept_mass;
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
    char *text, *path;
    bool has_logprobs;
    struct run_logprobs logprobs;
    enum run_end end;
    uint64_t n_tokens;
    int error;
    uint64_t prefill_us, decode_us, store_wait_us, n_prefill, n_decode;
    uint64_t bytes_asked, bytes_free;
    struct engine_counts *counts;
    double job_done; /* 0 .. 1 */
    uint64_t job_left_us;
    struct eval_row *row;
};
struct engine_event *engine_event_free(struct engine_event *event); /* closes fd; accepts NULL, returns NULL */

struct engine_options {
    uint64_t incarnation;
    enum transport transport;
    uint32_t n_ctx;
    uint32_t row_codec;            /* enum row_codec */
    struct quantizers *quantizers; /* the caller's */
    uint32_t prefill_chunk;        /* prompt tokens of a step, at most */
    uint32_t max_batch;            /* runs that decode in one step */
    uint32_t max_halves;           /* micro-batches: 1 or 2 */
    uint32_t spin_us;              /* before sleeping on a store's bell */
    uint64_t max_step_us;          /* a step with decode rows takes only as much prefill as fits into this */
    uint64_t device_memory;        /* bytes, everything on the device; 0: no limit */
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
uint64_t engine_device_bytes(const struct engine *engine); /* in use, all together */
const char *engine_phase(const struct engine *engine);     /* "idle", "step", "rebuilding" */
