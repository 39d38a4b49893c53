/*
 * step.h - one forward pass over a batch: rows of many sessions, prefill and decode together.
 *
 * Per layer: norm, q/k/v, RoPE; new rows to the stores and, for decode rows, the selected old tokens asked of them; the
 * exact set on the device meanwhile; merge; output projection, FFN. A prefill row attends exactly, to rows read from the
 * stores' segments once they are acknowledged, in the very order of partials that a decode step has: under policy `full`
 * both give the same bits.
 *
 * Canonical order of a query's attention: exact set (sinks, block before, own block), then lanes 0 .. 11, in each the old
 * blocks by number; a block's partial merges into its lane's, the lane's into the query's.
 *
 * Owner      the engine; used by its thread only.
 */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "gpu-worker/link.h"
#include "gpu-worker/network.h"
#include "gpu-worker/run.h"
#include "gpu-worker/stores.h"

enum transport { TRANSPORT_ROUTED, TRANSPORT_DIRECT };

struct step_row {
    struct run *run;
    uint32_t position;
    bool is_decode;
    bool wants_logits;
    uint32_t decode_index; /* among the decode rows */
    uint32_t logits_index; /* among the rows that want logits */
    uint32_t n_old_blocks; /* decode: of the selection */
    uint64_t *masks;       /* [n_old_blocks] */
};

struct step_limits {
    uint32_t max_rows;   /* of a step */
    uint32_t max_decode; /* decode rows of a step, and commits */
    uint32_t n_ctx;
};

struct step {
    struct network *network;
    const struct kernels *kernels;
    struct stores *stores;
    struct link *link;
    struct pool *pool;
    enum transport transport;
    struct row_shape shape;
    struct step_limits limits;

    /* the batch: rows of one run are consecutive and in order of position */
    uint32_t n_rows, n_decode, n_logits;
    struct step_row *rows;
    uint32_t n_commits; /* runs whose pending id is committed alone */
    struct run **commits;

    /* device memory; T = max_rows */
    float *x, *h;           /* [T][n_embd] */
    float *q, *attention;   /* [T][n_heads][head_dim] */
    float *k, *v;           /* [T][n_kv_heads][head_dim] */
    float *gate, *up;       /* [T][n_ff] */
    uint16_t *row_bytes;    /* [T][n_kv_heads][K|V] */
    float *logits;          /* [max_decode][n_vocab], in the order of rows that want them */
    float *exact_partials;  /* [max_decode][n_heads][2 + head_dim] */
    float *tile_q;          /* [n_kv_heads][64 x group][head_dim] */
    float *tile_partials;   /* [n_kv_heads][1 + 12][64 x group][2 + head_dim] */
    float *direct_partials; /* [max_decode][n_kv_heads][12][group][2 + head_dim], transport direct */
    struct backend_piece *pieces;
    struct backend_attend *items;
    uint32_t *ids, *positions;   /* [T] */
    uint64_t *mask_memory;       /* [max_decode][n_ctx / 64] */
    const float **lane_partials; /* [max_decode][n_kv_heads][12]: where each lane's partial lies; NULL: none */

    /* the layer's requests */
    uint32_t n_calls;
    struct step_call *calls;    /* [STORES_MAX] */
    uint64_t wait_us;           /* waited for stores in this step */
    _Atomic uint64_t *progress; /* grows with every layer, for those who judge whether this process hangs; or NULL */
};

/* One store's part of a layer. */
struct step_call {
    uint32_t store; /* number */
    bool is_sent, is_done;
    uint32_t slot;
    uint64_t route;
    uint64_t request;
    uint64_t deadline_us; /* of the answer */
    uint64_t retry_us;    /* not sent before */
    uint32_t n_appends, n_items;
    struct run **append_owner; /* [max_rows + max_decode] */
    uint32_t *item_row;        /* [max_decode x n_kv_heads] */
    uint32_t *item_lanes;
    uint32_t *item_result;
};

/* Bytes a slot must hold for any step within the limits. */
uint32_t step_request_bytes(const struct row_shape *shape, uint32_t n_heads, const struct step_limits *limits);
uint32_t step_reply_bytes(const struct row_shape *shape, uint32_t n_heads, const struct step_limits *limits);

int step_new(struct network *network, const struct kernels *kernels, struct stores *stores, struct link *link,
             struct pool *pool, enum transport transport, const struct step_limits *limits, struct step **ret_step);
struct step *step_free(struct step *step); /* accepts NULL, returns NULL */

void step_clear(struct step *step);
bool step_add_row(struct step *step, struct run *run, uint32_t position, bool is_decode, bool wants_logits);
bool step_add_commit(struct step *step, struct run *run);

/*
 * Carries the batch out. on_journaled(context) is called once the stores hold all ids of the batch (after layer 0).
 * A run that a store refuses fails alone (run->error); the others go on.
 * -ECONNRESET: the coordinator is lost; -ETIMEDOUT: a store did not come back; the batch is void, and the sessions of its
 * runs must be rebuilt.
 */
int step_run(struct step *step, void (*on_journaled)(void *context), void *context);
/* Logits [n_vocab] of a row that wanted them. */
float *step_logits(const struct step *step, uint32_t row);

/* step_request.c: the stores' part of a layer. */
int step_send(struct step *step, uint32_t layer);    /* plans the calls and sends what can be sent */
int step_collect(struct step *step, uint32_t layer); /* until all are answered */
void step_release(struct step *step);                /* slots, once the partials have been read */
/* step_attention.c */
float step_scale(const struct step *step);           /* multiplies q . k, here and in the stores alike */
void step_exact(struct step *step, uint32_t layer);  /* decode rows: partials over the exact set */
void step_direct(struct step *step, uint32_t layer); /* decode rows: lanes from the mapped segments */
void step_merge(struct step *step);                  /* decode rows: exact set and lanes -> attention */
void step_prefill_attention(struct step *step, uint32_t layer);
