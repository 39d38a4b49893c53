/*
 * profile_rows.h - some rows of a prompt once more, over keys and values that are in the stores: what a FastGen profile looks at.
 *
 * The hidden states of the rows are computed anew, layer by layer, as a prefill does (to rounding); keys and values are read, so
 * that all else of the prompt need not be. 16 rows of 4,096 cost 0.8 % of the prefill
 * (measured, SmolLM2-135M: 0.25 of 30 seconds of processor time).
 *
 * Owner      the engine thread; the pool works for it.
 * Invariant  the profile is a function of ids, rows and instruction set: not of threads, stores or what ran beside it.
 * Memory     weights of a few rows of all KV heads at a time (32 MiB where that is possible), a scratch a thread.
 */
#pragma once

#include "gpu-worker/fastgen/fastgen.h"
#include "gpu-worker/network.h"

struct pool;

struct profile_rows {
    const struct network *network;
    const struct kernels *kernels;
    struct pool *pool; /* may be NULL */
    enum kernels_rows codec;
    const uint32_t *ids; /* [n_tokens] */
    uint32_t n_tokens;   /* the profile's, all of whose rows are there */
    /* 64 rows [K|V]; NULL: not there any more. Called by threads of the pool at the same time. */
    const void *(*rows)(void *context, uint32_t layer, uint32_t kv_head, uint32_t block);
    void *context;
    /* After each layer, in the calling thread; a negative errno ends it with that. NULL: nobody asks. */
    int (*between)(void *context);
    void *between_context;
};

/*
 * Rows of fastgen_sample() into the profile, which is new and has that many layers, KV heads and tokens; then
 * fastgen_profile_finish(). -ESTALE: rows were not there; -ENOMEM; or what `between` gave. Then the profile is only to be freed.
 */
int profile_rows_run(const struct profile_rows *rows, struct fastgen_profile *profile);
