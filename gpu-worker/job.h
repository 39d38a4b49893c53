/*
 * job.h - work on the model that is no session's: evaluations, trainings. Done by the engine in slices, between its steps.
 *
 * Owner      the engine, once it was given. Threads: made by the server thread (job_new of the kinds: cheap, no model work),
 *            everything else is the engine thread's.
 * Slices     advance() works for about slice_us, does something however short that is, and returns: sessions get their steps in
 *            between. Nothing waits.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { JOB_SLICE_US = 100000, JOB_SENTENCE_SIZE = 256 };

struct network;
struct kernels;
struct pool;
struct tokenizer;
struct quantizers;
struct eval_row;

/* What a job works with; the engine's, and alive as long as it. */
struct job_tools {
    struct network *network;
    const struct kernels *kernels;
    struct pool *pool;
    const struct tokenizer *tokenizer;
    struct quantizers *quantizers;
    uint32_t row_codec; /* enum row_codec */
    uint32_t n_ctx;
    uint32_t slice_us; /* JOB_SLICE_US; tests have their own */
};

/* What a slice has to tell; strings are the job's and valid until the next slice. */
struct job_report {
    const char *phase;          /* what it is doing, for people */
    double done;                /* 0 .. 1 of the whole job */
    const struct eval_row *row; /* a row that is complete; NULL: none in this slice */
    const char *path;           /* at the end: of the file that keeps what was learnt; NULL: there is none */
};

struct job {
    const struct job_ops *ops;
    void *state;
};

struct job_ops {
    const char *name;
    /*
     * 1: there is more to do; 0: done, the sentence (JOB_SENTENCE_SIZE) says what came of it; negative errno: failed, the
     * sentence says why. -EINVAL what was asked for cannot be, -E2BIG a text is shorter than the context, -ENOMEM.
     */
    int (*advance)(void *state, const struct job_tools *tools, struct job_report *report, char *sentence);
    void (*free)(void *state); /* accepts NULL */
};

struct job_text {
    char *name, *text; /* zero-terminated, UTF-8 */
};

/* Frees the texts and the array; accepts NULL. */
void job_texts_free(struct job_text *texts, uint32_t n_texts);
