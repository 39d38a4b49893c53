/*
 * pass_private.h - what the files of a pass share: a layer's arithmetic over some rows, and log-probabilities on demand.
 *
 * Owner      pass.h.
 * Memory     scratch belongs to the pass and is used by its tails too: one thread, one layer at a time.
 */
#pragma once

#include "gpu-worker/eval/pass.h"
#include "gpu-worker/network.h"

enum {
    PASS_MAX_ROWS = 256, /* rows that are worked on at once: products are near their best rate, scratch stays small */
    PASS_LOGIT_ROWS = 64 /* positions whose logits are computed together */
};

/* Device memory for PASS_MAX_ROWS rows of one layer, or for the queries of one block. */
struct pass_scratch {
    float *h;                     /* [rows][n_embd] */
    float *k, *v;                 /* [rows][n_kv_heads][head_dim] */
    float *gate, *up;             /* [rows][n_ff] */
    float *attention;             /* [rows][n_heads][head_dim] */
    uint8_t *encoded;             /* [rows][n_kv_heads] rows, as encode_rows() gives them */
    float *tile_q;                /* [n_kv_heads][64 x group][head_dim] */
    float *tile_partials;         /* [n_kv_heads][64 x group][2 + head_dim] */
    struct backend_piece *pieces; /* [n_kv_heads][n_blocks] */
    struct backend_attend *items; /* [n_kv_heads] */
};

/* Logits of PASS_LOGIT_ROWS positions in a row, kept until others are asked for. */
struct pass_logits {
    const struct network *network;
    uint32_t first, n; /* rows of x that are here; n = 0: none */
    float *h, *logits; /* device [PASS_LOGIT_ROWS][n_embd], [PASS_LOGIT_ROWS][n_vocab] */
    double log_sums[PASS_LOGIT_ROWS];
};

enum pass_stage { PASS_PROJECTING, PASS_ATTENDING, PASS_DONE };

struct pass {
    struct job_tools tools;
    struct pass_options options;
    struct row_shape shape;
    uint32_t n_tokens, n_blocks;
    uint32_t *ids, *positions; /* [n_tokens] */
    size_t row_bytes;

    float *x;      /* [n_tokens][n_embd]: hidden states, of the layer at hand, in the end of the last */
    float *q;      /* [n_tokens][n_heads][head_dim], of the layer at hand */
    uint8_t *rows; /* [layers kept][n_kv_heads][n_blocks x 64] rows */
    float *sums;   /* [layers kept][n_kv_heads][n_blocks][K|V][head_dim] */
    struct pass_scratch scratch;
    struct pass_logits *logits; /* a cache: filled by who reads */

    enum pass_stage stage;
    uint32_t layer, next; /* the layer at hand; its first row that this stage has not done */
    uint32_t max_rows;    /* of a piece of work: fewer on a slow device. Cannot change a bit */
    int error;            /* the pass ended with it */
};

struct pass_tail {
    const struct pass *pass;
    int (*attend)(void *context, const struct pass_tail_layer *layer);
    void *context;
    uint32_t first, n, n_blocks; /* n_blocks: those the tail touches */
    float *x, *q, *out;          /* as the pass's, [n] */
    uint8_t *rows;               /* [n_kv_heads][n_blocks x 64], of the layer at hand */
    float *sums;                 /* [n_kv_heads][whole blocks][K|V][head_dim] */
    struct pass_logits *logits;  /* a cache: filled by who reads */
    uint32_t layer;              /* next */
    int error;
};

/* ---- pass_layer.c ---- */

int pass_scratch_init(struct pass *pass); /* -ENOMEM: what is there stays for fini */
void pass_scratch_fini(struct pass *pass);

/*
 * From hidden states x [n][n_embd] (n <= PASS_MAX_ROWS) to queries q [n][n_heads][head_dim] and to encoded rows, which go to
 * rows [n_kv_heads][head_rows], from number `first` of each head on. Errors of these: the device's (backend_device.h).
 */
int pass_project(const struct pass *pass, uint32_t layer, const float *x, const uint32_t *positions, uint32_t n,
                 float *q, uint8_t *rows, uint32_t head_rows, uint32_t first);
/* Sums of the whole blocks of [n_kv_heads][n_blocks] blocks of rows. sums [n_kv_heads][n_whole][K|V][head_dim] at head_sums. */
void pass_sum_blocks(const struct pass *pass, const uint8_t *rows, uint32_t n_blocks, uint32_t n_whole, float *sums,
                     uint32_t head_sums);
/* Exact attention of positions [first, first + n), n <= PASS_MAX_ROWS, of the layer at hand; to scratch.attention. */
int pass_attend(const struct pass *pass, uint32_t first, uint32_t n);
/* x [n][n_embd] <- the layer's output, from its attention [n][n_heads][head_dim]; any n. */
void pass_finish(const struct pass *pass, uint32_t layer, float *x, const float *attention, uint32_t n);

/* ---- pass_logits.c ---- */

int pass_logits_new(const struct network *network, struct pass_logits **ret_logits); /* -ENOMEM */
struct pass_logits *pass_logits_free(struct pass_logits *logits);                    /* accepts NULL, returns NULL */
/* Log-probabilities [n_vocab] from row `row` of x [n_rows][n_embd], always the same x. */
int pass_logits_read(struct pass_logits *logits, struct pool *pool, const float *x, uint32_t n_rows, uint32_t row,
                     float *logprobs);
