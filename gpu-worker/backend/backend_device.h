/*
 * backend_device.h - what a back end does beside backend.h if its device's memory is not the host's (cuda).
 *
 * Order      operations, those of backend.h too, are carried out in the order in which they are asked for. None waits, but
 *            finish() and those that say so. Arrays and structs that are handed over (items, pieces, positions) are read before the
 *            call returns; host memory that is named as such is read or written until finish(), or wait() of a mark.
 * Errors     an operation that fails takes all that follow with it: they do nothing. finish() tells, once: -ENOMEM (of the device),
 *            -EIO (a call was refused: our bug, or the driver's), -ENODEV (the device is lost to this process, nothing works
 *            any more); error() has the sentence, with the name of the call.
 * Parts      a step is made of parts, each asked for in much the same form step after step (what stands between two waits for the
 *            stores, in one layer, of one half): a back end may keep a part as a graph.
 *
 * Owner      the back end of that table. Threads: as backend.h; use() by each thread that calls it.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/kernels.h"

#define BACKEND_N_LANES 12u /* LAYOUT_N_LANES: kernels, in C++, cannot have proto/layout.h */

struct backend;
struct backend_piece; /* backend.h */
struct key_cache;     /* gpu-worker/keys/key_cache.h */
struct key_cache_tile;
struct key_quantizer;
struct policy;         /* gpu-worker/policy/policy.h */
struct sampler_change; /* gpu-worker/sampler.h */

/*
 * Which old tokens one decode row reads in one layer and KV head (selection.h; never selector full). The results, in memory of
 * host_alloc(), are in the order in which stores take them: by lane, then by block number.
 */
struct backend_select {
    const struct policy *policy;
    const float *q;                     /* device: [group][head_dim], not scaled */
    const float *exact;                 /* device: [group][2 + head_dim], partials of the exact set */
    const struct backend_piece *pieces; /* the exact set, for selector mass; rows on the device */
    uint32_t n_pieces;
    const struct key_cache *keys; /* has the head's keys */
    uint32_t layer, kv_head;
    uint32_t n_blocks; /* old blocks; > 0 */
    /* out */
    uint64_t *masks;   /* [n_blocks] */
    float *masses;     /* [group][n_blocks]; written if the policy has a tail */
    float *references; /* [group] */
    float *weights;    /* [group][weights_stride]: exponentials of the selected; NULL: not asked for */
    size_t weights_stride;
    uint32_t *n_kept;
};

/* Partials of one row and KV head: the exact set's, and those of the lanes that have one, become its attention. */
struct backend_merge {
    float *partials;                    /* device: [group][2 + head_dim], in and out */
    const float *from[BACKEND_N_LANES]; /* host: each [group][2 + head_dim]; NULL: none */
    float *out;                         /* device: [group][head_dim] */
};

/* Rows of consecutive tokens, of all KV heads: that of (head, token) is at rows + head * head_bytes + token * token_bytes. */
struct backend_span {
    const void *rows;
    uint32_t n_tokens;
    size_t head_bytes, token_bytes;
};

/*
 * Exact attention of n consecutive positions of one session, over rows given span by span in any order: begin, rows, end; one
 * at a time. All positions see all tokens of a span, but in the span that is their own (causal), of n tokens: position i sees
 * tokens 0 .. i.
 */
struct backend_prefill {
    const float *q; /* device: [n][n_heads][head_dim] */
    float *out;     /* device: [n][n_heads][head_dim] */
    uint32_t n, n_heads, n_kv_heads, head_dim;
    enum kernels_rows codec;
    float scale;
};

/* The choice of one token, as sampler_choose() takes it (gpu-worker/sampler.h). */
struct backend_sample {
    float *logits;                        /* device: [n_vocab]; changed in place */
    const struct sampler_change *changes; /* [n_changes], of sampler_changes() */
    uint32_t n_changes;
    uint32_t top_k;
    float temperature, top_p, min_p;
    double uniform; /* of sampler_uniform() */
    uint32_t *id;   /* out, host: of host_alloc() */
};

struct backend_device_ops {
    /* The calling thread is going to use the back end from now on. */
    int (*use)(struct backend *backend);

    /* Memory of the host that the device reaches at full speed. 64-byte aligned, zeroed; NULL: no memory. */
    void *(*host_alloc)(struct backend *backend, size_t n_bytes);
    void (*host_free)(struct backend *backend, void *memory);
    /* Device memory that the host may touch too, once finish() said that nothing is under way: for jobs that mix both. Freed by free(). */
    void *(*shared_alloc)(struct backend *backend, size_t n_bytes);
    /*
     * Host memory that the device may reach from now on without a copy in between, as much of it as the driver takes; what it
     * does not take is copied when it is needed. Returns how many bytes were taken. hide() before it is unmapped; it waits.
     */
    size_t (*show)(struct backend *backend, void *memory, size_t n_bytes);
    void (*hide)(struct backend *backend, void *memory, size_t n_bytes);

    void (*to_device)(struct backend *backend, void *device, const void *host,
                      size_t n_bytes); /* host is read before it returns */
    void (*to_host)(struct backend *backend, void *host, const void *device,
                    size_t n_bytes); /* host: of host_alloc() */

    /* Part `number` (1 ...) begins; 0: no part, until the next one begins. */
    void (*part)(struct backend *backend, uint32_t number);
    /* Waits until all that was asked for is done. */
    int (*finish)(struct backend *backend);
    const char *(*error)(const struct backend *backend);

    /* Rows of sealed blocks (host) to tiles of a session's key cache (device): tiles of one quantizer. */
    void (*quantize)(struct backend *backend, const struct key_quantizer *quantizer, enum kernels_rows codec,
                     const struct key_cache_tile *tiles, uint32_t n_tiles);
    void (*select)(struct backend *backend, const struct backend_select *items, uint32_t n_items, uint32_t group,
                   uint32_t head_dim, enum kernels_rows codec, float scale);
    void (*merge)(struct backend *backend, const struct backend_merge *items, uint32_t n_items, uint32_t group,
                  uint32_t head_dim);

    /* (optional) */
    void (*sample)(struct backend *backend, const struct backend_sample *items, uint32_t n_items, uint32_t n_vocab);

    void (*prefill_begin)(struct backend *backend, const struct backend_prefill *prefill);
    /* Spans on the device, or of the host (on_host). A mark for wait(): of the host's memory, which is not read any more then. */
    uint64_t (*prefill_rows)(struct backend *backend, const struct backend_span *spans, uint32_t n_spans, bool on_host,
                             bool is_causal);
    void (*prefill_end)(struct backend *backend);
    /* Until all up to the mark has happened, with errors as finish(). */
    int (*wait)(struct backend *backend, uint64_t mark);
};
