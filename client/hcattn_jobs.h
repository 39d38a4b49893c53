/*
 * hcattn_jobs.h - jobs of a running service: evaluations, codebooks, statistics. Part of libhcattn.
 *
 * A job is work on the model that is no session's; a worker does it beside the sessions, one at a time (HCATTN_BUSY
 * otherwise), and ends it when its client is gone.
 *
 * Owner, threads, errors  as hcattn.h. Structures given to a callback are valid during it only.
 * Deadline   timeout_ms is how long nothing at all may be heard of the job: each progress and row begins it anew. 0: none.
 * Lost peers a job that was lost with its coordinator is sent again: progress may start again, a row that the caller has is not
 *            told twice. One that was lost with its worker ends with HCATTN_UNAVAILABLE; asked for again by the caller, a
 *            training goes on where it was and an evaluation begins anew.
 */
#pragma once

#include "client/hcattn.h"

#ifdef __cplusplus
extern "C" {
#endif

#define HCATTN_JOB_PATH_SIZE 4096

struct hcattn_text {
    const char *name; /* of the rows that are about it */
    const char *text; /* UTF-8 */
};

struct hcattn_job_progress {
    const char *phase; /* what it is doing, for people */
    double done;       /* 0 .. 1 of the whole job */
    uint64_t left_us;  /* estimate; 0: none yet */
};

/* Of one layer, over its heads and the tail's tokens. */
struct hcattn_attention_row {
    float recall;       /* of the exact selection among what was selected */
    float mass;         /* exact attention mass of exact set and selection */
    float output_error; /* |o - o exact| / |o exact|, root mean square */
    float tail_error;   /* |log of approximate / exact mass| of what is not selected, mean */
};

struct hcattn_eval_row {
    uint32_t index; /* rows come in order, from 0 */
    const char *text;
    const char *preset;
    const char *meaning; /* what the preset stands for */
    bool baseline;       /* exists in evaluations only: no session can have it */
    uint64_t context;    /* tokens */
    uint64_t tail;
    double kld_mean; /* nats, of full attention's distributions to the preset's */
    double kld_p99;
    double top1; /* share of positions with the same most likely token, 0 .. 1 */
    double perplexity;
    double full_perplexity;
    double kept; /* share of old tokens that were read, mean over layers and heads */
    uint32_t n_layers;
    uint32_t n_kv_heads;
    const float *kept_by_head;                    /* [n_layers][n_kv_heads]; NULL: not told */
    double device_bytes_fraction;                 /* of f16 K and V, per old token: what the codec says */
    double device_bytes_measured;                 /* the same from memory really allocated; 0: nothing was */
    double exact_bytes;                           /* of the exact set, for a session of this context */
    double table_bytes;                           /* codebooks or statistics, once a model */
    double store_bytes;                           /* rows read from the stores per token */
    const struct hcattn_attention_row *attention; /* [n_attention], by layer */
    size_t n_attention;                           /* 0 unless asked for */
};

/* Any of them may be NULL; a result other than 0 ends the job: the call returns -ECANCELED. As hcattn_events. */
struct hcattn_job_events {
    void *context;
    int (*progress)(void *context, const struct hcattn_job_progress *progress);
    int (*row)(void *context, const struct hcattn_eval_row *row);
};

/* Quality of presets against full attention, teacher-forced over the last tokens of each text. */
struct hcattn_evaluate {
    const struct hcattn_text *texts;
    size_t n_texts;
    uint32_t
        context;   /* tokens of each text that are used, whole blocks of 64; HCATTN_CONTEXT_EXCEEDED if it has fewer */
    uint32_t tail; /* the last so many are decoded, whole blocks */
    const char *const *presets; /* policies (proto/policy.h) and baselines; "all" are all of them; each counts once */
    size_t n_presets;
    bool attention; /* what happens inside the attention, too: takes longer */
};

/* What came of a job. */
struct hcattn_job_done {
    char sentence[HCATTN_SENTENCE_SIZE]; /* for people */
    char path[HCATTN_JOB_PATH_SIZE];     /* of the file that the worker keeps a codebook in, on its host; "": none */
};

/* ret_done of all three may be NULL. */
int hcattn_evaluate(struct hcattn *client, const struct hcattn_evaluate *evaluate,
                    const struct hcattn_job_events *events, uint32_t timeout_ms, struct hcattn_job_done *ret_done,
                    struct hcattn_error *ret_error);

/* Codebooks of the pq codecs (HCAttention), kept beside the model by the worker. An interrupted training goes on. */
struct hcattn_train_codebook {
    const struct hcattn_text *texts; /* none: the text that the worker brings along */
    size_t n_texts;
    uint32_t n_dims;      /* of a sub-space: 2, 4 or 8 */
    uint32_t n_centroids; /* 256 .. 4096, a power of two */
    uint64_t seed;
    uint32_t max_iterations; /* 0: 200 */
    bool again;              /* although there is one; otherwise the job is done at once */
};

int hcattn_train_codebook(struct hcattn *client, const struct hcattn_train_codebook *train,
                          const struct hcattn_job_events *events, uint32_t timeout_ms, struct hcattn_job_done *ret_done,
                          struct hcattn_error *ret_error);

/* Statistics of keys and queries, which the pair codecs need, kept beside the model by the worker. */
struct hcattn_gather_statistics {
    const struct hcattn_text *texts; /* none: the text that the worker brings along */
    size_t n_texts;
    bool again;
};

int hcattn_gather_statistics(struct hcattn *client, const struct hcattn_gather_statistics *gather,
                             const struct hcattn_job_events *events, uint32_t timeout_ms,
                             struct hcattn_job_done *ret_done, struct hcattn_error *ret_error);

#ifdef __cplusplus
}
#endif
