/*
 * method.h - one way to keep and read old tokens, as an evaluation compares them: the service's policies, and baselines that
 * exist only here.
 *
 * Owner      an evaluation. Threads: the engine thread; a method spreads its work over the pool itself.
 * Life       new; observe() with each layer of the text's pass (positions before the tail count as the prompt); attend() with
 *            each layer of its tail; account(); free. One life a text. All methods of an evaluation exist from before the
 *            pass until their own tail is compared: memory is taken by observe() and by the first attend(), not by new.
 */
#pragma once

#include "gpu-worker/eval/pass.h"

/* What the device and the stores had to do; sums over the tail are means per tail position where not said otherwise. */
struct method_account {
    double
        device_bytes; /* of keys (and whatever else stays on the device) per old token, all heads: what the format says */
    double device_measured; /* the same from what was really allocated; 0: the baseline has no store of its own */
    double exact_bytes;     /* of the exact set, once a session */
    double table_bytes;     /* codebooks, tables: once a model */
    double store_bytes;     /* rows read from stores per position */
};

/*
 * What happened in the attention of one layer, summed over KV heads and positions that were looked at; means of a group's query
 * heads. Against the exact scores of all tokens at that position, which sees the rows that the method led to:
 */
struct method_attention {
    double recall;       /* share of what the selector takes for exact scores that was read; 1 where it takes nothing */
    double mass;         /* attention of exact set and selection together */
    double output_error; /* |o - o exact|^2 / |o exact|^2 */
    double tail_error;   /* |log of estimated / exact mass| of what was not read; 0 without an estimate */
    uint64_t n;          /* 0: nobody looked */
};

struct method {
    const struct method_ops *ops;
    char name[64], meaning[96];
    bool baseline;
    bool looks;                         /* fill `attention`: costs an exact attention more */
    uint64_t *n_kept;                   /* [n_layers][n_kv_heads]: old tokens read, summed over the tail's positions */
    uint64_t n_old;                     /* old tokens, summed over the tail's positions */
    struct method_attention *attention; /* [n_layers] */
    void *state;
};

struct method_ops {
    int (*observe)(struct method *method, const struct pass_layer *layer, uint32_t n_prompt); /* may be NULL */
    int (*attend)(struct method *method, const struct pass_tail_layer *layer);
    void (*account)(const struct method *method, struct method_account *ret_account);
    void (*free)(struct method *method); /* of the state */
};

/*
 * "default", "rot4,mass=0.9", ... (method_policy.c), or a baseline (methods_*.c). n_tokens: of the whole
 * text. -EINVAL with a sentence; -ENOENT what it needs was not trained, with a sentence; -ENOMEM.
 */
int method_new(const char *name, const struct job_tools *tools, uint32_t n_tokens, struct method **ret_method,
               char *sentence, size_t sentence_size);
struct method *method_free(struct method *method); /* accepts NULL, returns NULL */

/* method_policy.c: fills ops, meaning and state of a service's policy. */
int method_policy_new(struct method *method, const struct job_tools *tools, uint32_t n_tokens, char *sentence,
                      size_t sentence_size);
/* methods_baseline.c: the same; -ESRCH: no baseline of that name. */
int methods_baseline_new(struct method *method, const struct job_tools *tools, uint32_t n_tokens, char *sentence,
                         size_t sentence_size);
/* The i-th baseline as "all" has it ("q8_0", "h2o=0.2", ...); NULL after the last. */
const char *methods_baseline_name(uint32_t i);
