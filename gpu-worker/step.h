/*
 * step.h - one forward pass over a batch: rows of many sessions, prefill and decode together.
 *
 * Per layer: norm, q/k/v, RoPE; decode rows: the exact set on the device, scores and selection over old tokens; new rows to
 * the stores and the selected old tokens asked of them; merge; output projection, FFN. A prefill row attends exactly, to
 * rows read from the stores' segments once they are acknowledged, in the very order of partials that a decode step has:
 * under policy `full` both give the same bits.
 *
 * Canonical order of a query's attention: exact set (sinks, blocks before, own block), then lanes 0 .. 11; a lane's partial
 * is what lane_attend() makes of its old blocks in order of number.
 *
 * Halves     the batch is cut into one or two micro-batches of whole runs. With two, the stores work for one while the
 *            worker computes for the other. A row's bits do not depend on the cut.
 * Appends    a half without prefill rows and without old tokens needs no answer to go on: ids and rows of layer 0 are sent and
 *            not waited for, all other layers' rows travel in one request at the end, behind which the logits are computed.
 *
 * Owner      the engine; used by its thread only.
 */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "gpu-worker/call.h"
#include "gpu-worker/link.h"
#include "gpu-worker/network.h"
#include "gpu-worker/run.h"
#include "gpu-worker/stores.h"

enum transport { TRANSPORT_ROUTED, TRANSPORT_DIRECT };

enum { STEP_MAX_HALVES = 2 };

/*
 * What a decode row asks of the stores in one layer, by KV head, its old blocks in order of lane, then of number:
 * lane l's are [lane_first[l], lane_first[l + 1]).
 */
struct step_selection {
    uint32_t n_blocks;
    uint32_t lane_first[LAYOUT_N_LANES + 1];
    uint64_t *masks;      /* [n_kv_heads][n_blocks] */
    float *masses;        /* [n_kv_heads][group][n_blocks]; used if the policy has a tail */
    float *references;    /* [n_heads] */
    float *weights;       /* [n_kv_heads][group][64 n_blocks], in this order of blocks; mode weights only, else NULL */
    uint32_t *n_selected; /* [n_kv_heads] */
    bool *is_fixed;       /* [n_kv_heads]: the masks are FastGen's, nothing was scored: exact, without a tail */
};

struct step_row {
    struct run *run;
    uint32_t position;
    bool is_decode;
    bool wants_logits;
    bool is_chosen;        /* wants no more of them than a token, which the device has chosen */
    uint32_t decode_index; /* among the decode rows */
    uint32_t logits_index; /* among the rows that want logits */
    uint32_t first_item;   /* decode: of its exact sets, one a KV head, in step->items of the half's layer at hand */
    struct step_selection selection; /* decode; n_blocks 0: nothing is old */
};

struct step_limits {
    uint32_t max_rows;   /* of a step */
    uint32_t max_decode; /* decode rows of a step, and commits */
    uint32_t n_ctx;
    uint32_t max_halves;
    uint32_t max_weights; /* floats of approximate weights in one request: what rows of mode weights may ask together */
};

/* One store's part of what a half asks for at a time. */
struct step_call {
    struct call call;
    bool is_done; /* answered, or nothing is left to ask */
    uint32_t n_appends, n_items;
    struct run **append_owner; /* [max entries] */
    uint32_t *item_row;        /* [max_decode x n_kv_heads] */
    uint32_t *item_lanes;
    uint32_t *item_result;
};

struct step_half {
    uint32_t first, end; /* rows */
    bool has_commits;    /* the step's commits ride with it */
    bool is_deferred;    /* nothing in it waits for an answer */
    bool is_waiting;     /* calls are out */
    bool keeps_slots;    /* all are answered, and the device may still read what lies there */
    bool is_journaled;
    uint32_t first_layer, n_layers; /* whose rows the calls append; the items' layer is the first */
    uint32_t n_calls;
    struct step_call *calls; /* [STORES_MAX] */
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
    uint32_t n_halves;
    struct step_half halves[STEP_MAX_HALVES];

    /* device memory; T = max_rows */
    float *x, *h;           /* [T][n_embd] */
    float *q, *attention;   /* [T][n_heads][head_dim] */
    float *k, *v;           /* [T][n_kv_heads][head_dim] */
    float *gate, *up;       /* [T][n_ff] */
    uint8_t *row_bytes;     /* [T][n_kv_heads] rows of the layer at hand */
    uint8_t *deferred_rows; /* [n_layers][max_decode][n_kv_heads] rows: of deferred halves */
    float *logits;          /* [max_decode][n_vocab], in the order of rows that want them */
    float *exact_partials;  /* [max_decode][n_heads][2 + head_dim] */
    float *tile_q;        /* [n_kv_heads][64 x group][head_dim]; these two not where the back end has prefill_begin() */
    float *tile_partials; /* [n_kv_heads][1 + 12][64 x group][2 + head_dim] */

    /* the host's copies of device memory; the very same where device memory is the host's */
    float *host_q; /* of decode rows */
    uint8_t *host_row_bytes, *host_deferred_rows;
    float *host_logits;
    uint32_t *chosen;       /* [max_decode], in the order of rows that want logits; NULL: the device does not choose */
    float *direct_partials; /* host: [max_decode][n_kv_heads][12][group][2 + head_dim], transport direct */

    struct backend_piece *pieces;
    size_t pieces_size; /* how many there is room for */
    struct backend_attend *items;
    struct backend_merge *merges; /* [max_decode x n_kv_heads]; where device memory is not the host's */
    uint32_t *ids, *positions;    /* [T] */
    struct fetch *fetches;        /* of the prefill rows at hand; where device memory is not the host's */
    uint32_t *fetch_blocks;
    uint32_t fetches_size, fetch_blocks_size; /* how many there is room for */
    struct sampler_change *changes;           /* of rows that the device chooses for */
    size_t changes_size;                      /* how many there is room for */
    const float **lane_partials;  /* [max_decode][n_kv_heads][12]: where each lane's partial lies; NULL: none */
    struct step_scratch *scratch; /* step_select.c */

    uint64_t wait_us, select_us, attention_us; /* of this step */
    _Atomic uint64_t *progress; /* grows with every layer, for those who judge whether this process hangs; or NULL */
    void (*between_layers)(void *engine); /* may fail runs (cancel) */
    void *engine;
};

/* Bytes a slot must hold for any step within the limits. */
uint64_t step_request_bytes(const struct row_shape *shape, uint32_t n_heads, const struct step_limits *limits);
uint64_t step_reply_bytes(const struct row_shape *shape, uint32_t n_heads, const struct step_limits *limits);

int step_new(struct network *network, const struct kernels *kernels, struct stores *stores, struct link *link,
             struct pool *pool, enum transport transport, const struct step_limits *limits, struct step **ret_step);
struct step *step_free(struct step *step); /* accepts NULL, returns NULL */

void step_clear(struct step *step);
/* False: no room in this step. */
bool step_add_row(struct step *step, struct run *run, uint32_t position, bool is_decode, bool wants_logits);
bool step_add_commit(struct step *step, struct run *run);

/*
 * Carries the batch out. on_journaled(context, first, end) is called once the stores hold the ids of rows [first, end) (and of
 * the commits, with the first call).
 * A run that a store refuses fails alone (run->error); the others go on.
 * -ECONNRESET: the coordinator is lost; -ETIMEDOUT: a store did not come back; the batch is void, and the sessions of its
 * runs must be rebuilt. -ENOMEM; -EIO, -ENODEV: the device, as backend_device.h says.
 */
int step_run(struct step *step, void (*on_journaled)(void *context, uint32_t first, uint32_t end), void *context);
/* After it: true: the token was chosen where the logits are (sampler_choose()), and is all there is of them here. */
bool step_chose(const struct step *step, uint32_t row, uint32_t *ret_id);
/* Logits [n_vocab] of another row that wanted them. */
float *step_logits(const struct step *step, uint32_t row);

/* ---- shared by the files of the step ---- */

/* The end of the network, of the rows that want logits; waits for the device. */
int step_output(struct step *step);

uint32_t step_group(const struct step *step); /* query heads of a KV head */
float step_scale(const struct step *step);    /* multiplies q . k, here and in the stores alike */
enum kernels_rows step_codec(const struct step *step);
size_t step_token_bytes(const struct step *step); /* rows of one token in one layer */
/* Where a row's encoded K and V of a layer lie: on the device, and for the host. */
uint8_t *step_row_bytes(const struct step *step, const struct step_half *half, uint32_t layer, uint32_t row);
const uint8_t *step_host_row_bytes(const struct step *step, const struct step_half *half, uint32_t layer, uint32_t row);
/* Memory of the host that the device reaches at full speed; step_host_free() accepts NULL. */
void *step_host_alloc(const struct step *step, size_t n_bytes);
void step_host_free(const struct step *step, void *memory);
/* Room for n pieces in step->pieces. -ENOMEM. */
int step_make_room(struct step *step, size_t n_pieces);

/* step_request.c: what a store is asked. Fills the call's slot and link->next_request's request. -ENOSPC: cannot happen. */
int step_plan(struct step *step, struct step_half *half);
int step_write(struct step *step, struct step_half *half, struct step_call *call, const struct store *store,
               uint32_t slot, uint64_t request, uint32_t *ret_n_bytes);
bool step_has_work(const struct step *step, const struct step_half *half, const struct step_call *call);

/* step_calls.c: sending, answers, and sending again when a store is lost. */
int step_send(struct step *step, struct step_half *half, uint32_t first_layer, uint32_t n_layers);
int step_collect(struct step *step, struct step_half *half);                 /* until all are answered */
int step_poll(struct step *step, struct step_half *half, bool *ret_is_done); /* without waiting */
/* A descriptor that came while something else was waited for. */
void step_take_descriptor(struct step *step, const struct descriptor *descriptor);
/* Gives back the slots, once the partials have been read; those of calls without an answer are quarantined. */
void step_release(struct step *step, struct step_half *half);

/* step_select.c: scores, selection; the rows' `selection` of a layer. */
int step_select_new(struct step *step); /* -ENOMEM */
void step_select_free(struct step *step);
bool step_select_begin(struct step *step, struct step_row *row); /* a decode row joins the step; false: no memory */
void step_select_clear(struct step *step);                       /* a new batch */
void step_select(struct step *step, const struct step_half *half, uint32_t layer);
/* The device is done with it: counts what was selected. */
void step_select_count(const struct step *step, const struct step_half *half, uint32_t layer);

/* step_attention.c */
int step_exact(struct step *step, const struct step_half *half,
               uint32_t layer); /* decode rows: the exact set. -ENOMEM */
void step_direct(struct step *step, const struct step_half *half, uint32_t layer); /* lanes from the mapped segments */
void step_merge(struct step *step, const struct step_half *half); /* exact set and lanes -> attention */
/* step_prefill.c: into `attention`, of rows that the stores hold. -ENOMEM; of step_device_prefill() */
int step_prefill_attention(struct step *step, const struct step_half *half, uint32_t layer);
/* step_device.c: the same on a device whose memory is not the host's. Errors as step_run() */
int step_device_prefill(struct step *step, const struct step_half *half, uint32_t layer);
