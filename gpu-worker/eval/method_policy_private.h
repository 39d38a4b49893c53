/*
 * method_policy_private.h - what the files of a service's policy as a method share.
 *
 * An item is one position of the tail and one KV head; it is worked on by one thread, with what that thread alone has.
 *
 * Owner      a method (method.h). Threads: items in parallel, everything else the engine thread.
 */
#pragma once

#include "gpu-worker/eval/method.h"
#include "gpu-worker/fastgen/fastgen.h"
#include "gpu-worker/keys/key_cache.h"
#include "gpu-worker/policy/exact_set.h"
#include "gpu-worker/policy/policy.h"

enum {
    METHOD_POLICY_MAX_EXACT = LAYOUT_N_SINKS + EXACT_SET_WINDOW_BLOCKS * LAYOUT_BLOCK_TOKENS,
    METHOD_POLICY_LOOK_EVERY = 8 /* positions */
};

/* What happened in the attention of one item; see struct method_attention. */
struct method_policy_looked {
    float recall, mass, output_error, tail_error;
};

/* A selection, by block number. */
struct method_policy_selection {
    uint64_t *masks;   /* [max_blocks] */
    float *masses;     /* [group][n_blocks of the item] */
    float *references; /* [group] */
    float *weights;    /* [group][64 x n_blocks of the item]; NULL: mode rescore */
};

struct method_policy_thread {
    void *scratch; /* of selection_run(); NULL: the policy reads everything */
    struct method_policy_selection selection, exact_selection;
    float *exact_scores; /* [group][METHOD_POLICY_MAX_EXACT] */
    float *keys;         /* [64][head_dim] */
    /* one lane's part of the selection */
    const void **rows;
    const float **v_sums;
    uint64_t *masks;
    float *masses, *weights;                          /* [group][max_blocks], [group][64 x max_blocks] */
    float *partials, *lane_partials, *exact_partials; /* [group][2 + head_dim] */
    float *out;                                       /* [group][head_dim] */
    /* for who looks */
    void *exact_scratch, *exact_query;
    float *scores; /* [group][64 x max_blocks] */
};

struct method_policy {
    struct job_tools tools;
    struct policy policy;
    struct row_shape shape;
    uint32_t n_heads, group, max_blocks, n_threads;
    size_t row_bytes;
    struct key_cache *keys; /* of old blocks, all layers; NULL before the tail */
    struct method_policy_thread *threads;
    struct fastgen_profile *profile; /* NULL: every head keeps its keys */
    uint64_t n_positions;
    uint32_t *n_selected; /* [items of a layer] */
    /* looks: the same keys as they are, of the layer at hand alone */
    struct key_head *exact_heads; /* [n_kv_heads] */
    struct key_quantizer exact_quantizer;
    struct key_cache *exact_keys;
    struct method_policy_looked *looked; /* [items of a layer / METHOD_POLICY_LOOK_EVERY] */
};

/* A layer of a tail at work. */
struct method_policy_job {
    struct method_policy *policy;
    const struct pass_tail_layer *layer;
    float scale;
    bool looks;
};

struct method_policy_item {
    uint32_t position, kv_head, n_blocks; /* n_blocks: old */
    bool is_fixed;                        /* FastGen's set: no keys, no tail */
    const float *q;                       /* [group][head_dim] */
};

/* ---- method_policy_item.c: what a session does for one position ---- */

/* pool_run()'s: items are [kv_head][position], so that a thread stays with the rows of one head. */
void method_policy_item_run(void *context, uint32_t index, uint32_t thread);
/* thread->exact_scores, for selectors that order all tokens by weight. Returns how many. */
uint32_t method_policy_item_score_exact(const struct method_policy_job *job, const struct method_policy_item *item,
                                        struct method_policy_thread *thread);

/* ---- method_policy_looks.c ---- */

/* Compares the item's selection and its output (thread->out) with exact scores; thread->exact_partials: the exact set. */
void method_policy_looks_run(const struct method_policy_job *job, const struct method_policy_item *item,
                             struct method_policy_thread *thread, struct method_policy_looked *ret_looked);

/* ---- method_policy_memory.c ---- */

/* Caches and scratch for a tail of n positions; does nothing where they are there. -ENOMEM: what is there stays for fini. */
int method_policy_memory_init(struct method_policy *policy, bool looks, uint32_t n);
void method_policy_memory_fini(struct method_policy *policy);
