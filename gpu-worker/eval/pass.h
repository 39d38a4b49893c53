/*
 * pass.h - a text through the model outside of any session: layer by layer, all positions of a layer at once, keys and values
 * in the worker's own memory. Then, any number of times, its last positions again with another attention.
 *
 * A pass is what sessions compute: the same operations of the back end, rows encoded by the row codec before anything attends to
 * them, attention in pieces of 64 tokens. (Partials of old tokens are not cut by lane, so bits differ from a session's; logits
 * agree to rounding.)
 *
 * Owner      one job. Threads: the engine thread; the pool works for it.
 * Memory     rows of all layers (or of one layer at a time, with keep_rows false), hidden states of all positions.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "gpu-worker/job.h"
#include "kernels/kernels.h"
#include "proto/layout.h"

struct pass;

/* A layer of the whole text, once queries and keys of all its positions are there. Everything after RoPE, in the model's order. */
struct pass_layer {
    const struct pass *pass;
    uint32_t layer, n_tokens;
    const float *q;      /* [n_tokens][n_heads][head_dim] */
    const uint8_t *rows; /* [n_kv_heads][n_blocks x 64] rows; those behind the last token are zero */
};

struct pass_options {
    bool keep_rows; /* of all layers, for pass_rows() and pass_tail() */
    /* Called with each layer in turn, before its attention; NULL: nobody looks. A negative errno ends the pass with it. */
    int (*visit)(void *context, const struct pass_layer *layer);
    void *context;
    bool skip_attention_of_last; /* nothing behind the visit of the last layer is wanted: no hidden states, no logits */
};

/* n_tokens >= 1; ids are copied. -ENOMEM. */
int pass_new(const struct job_tools *tools, const struct pass_options *options, const uint32_t *ids, uint32_t n_tokens,
             struct pass **ret_pass);
struct pass *pass_free(struct pass *pass); /* accepts NULL, returns NULL */

/* One slice (some rows of one layer). 1: there is more; 0: done; -errno. */
int pass_advance(struct pass *pass);
double pass_done(const struct pass *pass); /* 0 .. 1 */

uint32_t pass_n_tokens(const struct pass *pass);
const struct row_shape *pass_shape(const struct pass *pass);
uint32_t pass_n_heads(const struct pass *pass);
float pass_scale(const struct pass *pass); /* multiplies q . k */
const uint32_t *pass_ids(const struct pass *pass);
const struct job_tools *pass_tools(const struct pass *pass);
/* [n_blocks x 64] rows of one head. */
const uint8_t *pass_rows(const struct pass *pass, uint32_t layer, uint32_t kv_head);
/* [n_blocks][K|V][head_dim]: sums of each whole block, as stores keep them. */
const float *pass_sums(const struct pass *pass, uint32_t layer, uint32_t kv_head);

/*
 * Log-probabilities [n_vocab] of position `position`'s next token, from the pass (after it is done) or, with tail, from that
 * tail (after it is done). Errors: the device's (backend_device.h).
 */
struct pass_tail;
int pass_logprobs(const struct pass *pass, const struct pass_tail *tail, uint32_t position, float *logprobs);

/* ---- the last positions again ---- */

/* One layer of a tail: what an attention gets, and what it has to give. */
struct pass_tail_layer {
    const struct pass *pass;
    uint32_t layer;
    uint32_t first, n;        /* positions [first, first + n); first is a multiple of 64 */
    const float *q;           /* [n][n_heads][head_dim] */
    const uint8_t *tail_rows; /* [n_kv_heads][n rounded up to 64] rows: the tail's own K and V under this attention */
    const float *tail_sums;   /* [n_kv_heads][whole blocks of the tail][K|V][head_dim] */
    float *out;               /* [n][n_heads][head_dim]; what is to be filled */
};

/* `attend` fills layer->out: position first + i attends to rows of the pass before `first` and of the tail up to i. -errno. */
int pass_tail_new(const struct pass *pass, uint32_t first,
                  int (*attend)(void *context, const struct pass_tail_layer *layer), void *context,
                  struct pass_tail **ret_tail);
struct pass_tail *pass_tail_free(struct pass_tail *tail); /* accepts NULL, returns NULL */
int pass_tail_advance(struct pass_tail *tail);            /* one layer. 1: there is more; 0: done; -errno */
double pass_tail_done(const struct pass_tail *tail);

/* Rows [64] of a block for a tail's attention, wherever they lie: the pass's before `first`, the tail's own from there on. */
const uint8_t *pass_tail_block(const struct pass_tail_layer *layer, uint32_t kv_head, uint32_t block);
const float *pass_tail_block_sums(const struct pass_tail_layer *layer, uint32_t kv_head, uint32_t block);
