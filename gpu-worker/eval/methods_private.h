/*
 * methods_private.h - what the files of the baselines share.
 *
 * A baseline is a kind (what it keeps of old tokens, and how) and one attention for all: in f32, over rows as they are decoded,
 * or as a format leaves them. The exact set of a position (policy/exact_set.h, no exact tokens) is exact in every kind and read
 * whatever the kind says; only old tokens are its business. The tail is computed block by block, in order, so that a kind may
 * let tokens go as more of them become old.
 *
 * Owner      a method (method.h). Threads: choose() and round() on any, everything else the engine thread.
 */
#pragma once

#include "gpu-worker/eval/method.h"
#include "gpu-worker/fastgen/fastgen.h"
#include "gpu-worker/policy/exact_set.h"

enum {
    METHODS_TILE = 16, /* positions that are worked on together */
    METHODS_TILES = LAYOUT_BLOCK_TOKENS / METHODS_TILE,
    METHODS_MAX_EXACT = LAYOUT_N_SINKS + EXACT_SET_WINDOW_BLOCKS * LAYOUT_BLOCK_TOKENS,
    METHODS_LOOK_EVERY = 8 /* positions */
};

struct methods_baseline;

/* One position and KV head that asks which old tokens it may read. */
struct methods_choice {
    uint32_t layer, kv_head, position, n_blocks; /* n_blocks: old */
    const uint32_t *ids;                         /* of the text */
    const float *q;                              /* [group][head_dim] */
    float *scratch;                              /* [2 x 64 x blocks of the text] */
    uint64_t *masks;                             /* [n_blocks]: what is to be filled; sinks stay out */
};

struct methods_kind {
    const char *name, *example; /* "h2o", "h2o=0.2" */
    const char *number;         /* what stands behind "=", for a sentence; NULL: nothing does */
    const char *meaning[2];     /* around the number in percent, where there is one */
    uint32_t bits;              /* of a format */
    bool accumulates;           /* tail.gained is wanted */
    bool reads_stores;          /* what is read of old tokens comes from stores; else it is on the device */
    int (*observe)(struct methods_baseline *baseline, const struct pass_layer *layer, uint32_t n_prompt); /* or NULL */
    /* K and V [64][head_dim] of a block, from token `first` on, as the format gives them back; NULL: as they are. */
    void (*round)(const struct methods_baseline *baseline, uint32_t first, float *keys, float *values);
    int (*begin)(struct methods_baseline *baseline); /* of the tail; or NULL */
    /* The block `own` of a layer's tail is next; rows of what is old for it are there. Or NULL. */
    void (*turn)(struct methods_baseline *baseline, const struct pass_tail_layer *layer, uint32_t own);
    void (*choose)(const struct methods_baseline *baseline, const struct methods_choice *choice);
    double (*device_bytes)(const struct methods_baseline *baseline, const struct method *method);
};

/* What one thread works with. */
struct methods_thread {
    float *q;        /* [METHODS_TILE x group][head_dim], scaled */
    float *scores;   /* [METHODS_TILE x group][64 x n_blocks]: of the blocks that are read, side by side */
    float *out;      /* [METHODS_TILE x group][head_dim] */
    float *keys;     /* [64][head_dim] */
    float *scratch;  /* [2 x 64 x n_blocks] */
    uint64_t *masks; /* [METHODS_TILE][n_blocks]: all that is read */
    uint32_t *used;  /* [n_blocks]: blocks that are read */
    float *weights;  /* [64 x n_blocks]; for who looks, as what follows */
    float *exact;    /* [group][head_dim] */
    void *look_scratch;
};

struct methods_looked {
    float recall, mass, output_error;
};

/* Of a tail, taken when it begins. */
struct methods_tail {
    uint32_t n;    /* positions; 0: it has not begun */
    float *keys;   /* [n_kv_heads][n_blocks][head_dim][64] */
    float *values; /* [n_kv_heads][n_blocks][64][head_dim] */
    uint32_t n_threads;
    struct methods_thread *threads;
    uint32_t *n_read;              /* [n_kv_heads][n]: old tokens */
    struct methods_looked *looked; /* [n_kv_heads][n / METHODS_LOOK_EVERY] */
    float *
        gained; /* [n_kv_heads][METHODS_TILES][64 x n_blocks]: weights of the block before, means of the group's heads */
};

struct methods_baseline {
    const struct methods_kind *kind;
    double number; /* behind the name's "="; 1 where nothing is */
    struct job_tools tools;
    struct row_shape shape;
    uint32_t n_heads, group, n_blocks; /* n_blocks: of the whole text */
    size_t row_bytes;
    bool looks;
    uint64_t *masks; /* [n_layers][n_kv_heads][n_blocks]: old tokens that are still there (h2o, snapkv) */
    float *sums;     /* [n_layers][n_kv_heads][64 x n_blocks]: accumulated attention (h2o) */
    struct fastgen_profile *profile; /* fastgen-permanent */
    float *extremes;                 /* [n_kv_heads][max|min][head_dim][4 x n_blocks]: of pages of keys (quest) */
    struct methods_tail tail;
};

/* ---- kinds: methods_formats.c, methods_evict.c, methods_quest.c ---- */

extern const struct methods_kind methods_formats_q8_0, methods_formats_q4_0, methods_formats_kivi4,
    methods_formats_kivi2;
extern const struct methods_kind methods_evict_streaming, methods_evict_h2o, methods_evict_snapkv,
    methods_evict_fastgen;
extern const struct methods_kind methods_quest;

/* ---- methods_attention.c ---- */

/* Memory for a tail of n positions; does nothing where it is there. -ENOMEM: what is there stays for fini. */
int methods_attention_init(struct methods_baseline *baseline, uint32_t n);
void methods_attention_fini(struct methods_baseline *baseline);
/* layer->out, tail.n_read and tail.looked. */
void methods_attention_run(struct methods_baseline *baseline, const struct pass_tail_layer *layer);

/* ---- methods_looks.c ---- */

/* Position first + i and what it read (masks) against exact weights and their output; out [group][head_dim]: what it got. */
void methods_looks_run(const struct methods_baseline *baseline, const struct pass_tail_layer *layer, uint32_t kv_head,
                       uint32_t i, const uint64_t *masks, const float *out, struct methods_thread *thread,
                       struct methods_looked *ret_looked);

/* The n-th largest (1 <= n <= n_values) of the values, which change places. No NaN. Expected time linear. */
float methods_looks_nth_largest(float *values, uint32_t n_values, uint32_t n);
