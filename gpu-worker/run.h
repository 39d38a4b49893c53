/*
 * run.h - one Append, Generate or Score on a session, as the engine carries it out.
 *
 * Owner      the engine thread; a run_request is made by the server thread and handed over.
 * Invariant  n_known ids are known (input and generated); positions [0, position) have been computed by this worker or
 *            stand in the stores. A generated id is `pending` until the stores' journal holds it; only then it is told.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "gpu-worker/policy/policy.h"
#include "gpu-worker/sampler.h"
#include "gpu-worker/session.h"
#include "gpu-worker/text_stream.h"
#include "proto/layout.h"

struct run_request {
    uint64_t work; /* id that replies carry */
    uint64_t session;
    char policy[LAYOUT_POLICY_BYTES];
    uint32_t exact_tokens;
    uint8_t lane_store[LAYOUT_N_LANES];
    uint32_t n_blocks;
    struct block_handle *blocks; /* by number */
    uint64_t at;                 /* tokens of the session before the input */
    uint32_t n_input;
    uint32_t *input_ids;
    uint32_t max_tokens; /* 0: Append or Score */
    struct sampling sampling;
    bool logprobs;
    uint32_t top_logprobs;
    bool ignore_end;
    uint32_t n_stop;
    char **stop;
    uint32_t resume_from;
    bool score;
    uint64_t score_from;
    bool all_logprobs;
};

struct run_request *run_request_free(struct run_request *request); /* accepts NULL, returns NULL */
/* More is asked of a position than the token that follows: log-probabilities. */
bool run_wants_logits(const struct run_request *request);

enum run_end { RUN_END_NONE, RUN_END_LENGTH, RUN_END_TOKEN, RUN_END_STOP };

/* Log-probabilities of one position. */
struct run_logprobs {
    float logprob;
    uint32_t n_top;
    struct sampler_candidate *top; /* logit holds the log-probability */
    float *all;                    /* [n_vocab], or NULL */
};
void run_logprobs_fini(struct run_logprobs *logprobs);

struct run {
    struct run *next;
    struct run_request *request;
    struct policy policy;
    struct session *session;
    uint32_t *ids;         /* [capacity] */
    uint32_t capacity;     /* at + n_input + max_tokens */
    uint32_t n_known;      /* ids known */
    uint32_t position;     /* next position to compute */
    uint32_t first_decode; /* positions >= this are decode steps */
    uint32_t goal;         /* Append and Score: positions to compute; Generate: capacity */
    bool is_prepared, is_finished;
    bool is_profiled;   /* policies with fastgen: the session's profile is the one this run decodes with */
    int error;          /* -errno: ends with it */
    char sentence[160]; /* of the error */
    uint64_t bytes_asked, bytes_free; /* of the device, with -ENOMEM */

    /* a generated token that waits for the journal */
    bool has_pending;
    uint32_t pending_id;
    struct run_logprobs pending_logprobs;
    char *pending_text;
    enum run_end end; /* set with the last pending token: it is committed by its id alone */

    struct text_stream *text;
    uint32_t n_generated; /* ids after the input, pending one included */

    uint64_t started_us, prefill_us, decode_us, store_wait_us;
    uint64_t n_prefill, n_decode;
};

/* Takes the request, also on failure. -ENOTSUP, -EINVAL with a sentence; -ENOMEM. */
int run_new(struct run_request *request, struct quantizers *quantizers, const struct tokenizer *tokenizer,
            struct run **ret_run, char *sentence, size_t sentence_size);
struct run *run_free(struct run *run); /* accepts NULL, returns NULL */

/* First position after the input. */
uint32_t run_input_end(const struct run *run);
/* Remembers the first error; later ones are its consequences. */
void run_fail(struct run *run, int error, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* Store and handle of the block that holds a position. */
uint32_t run_store(const struct run *run, uint32_t block);
