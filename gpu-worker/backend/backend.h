/*
 * backend.h - what a device can do: one table of operations per back end.
 *
 * Owner      the worker's engine thread; a back end belongs to one engine.
 * Threads    calls come from one thread; a back end spreads its work itself (cpu: the pool it was given).
 * Invariant  `reference` (plain loops) is the truth; every other back end is tested against it operation by operation.
 *            The result of a row never depends on which rows share the call: bits are equal whatever the batch.
 * Memory     `float *` arguments are device memory from `alloc`, except where "host" is said. For CPU back ends
 *            device memory is ordinary memory.
 *
 * Words      T = n_tokens rows of the batch; shapes are [rows][columns], row-major, contiguous.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "gpu-worker/backend/backend_device.h"
#include "kernels/kernels.h"
#include "gpu-worker/model/tensor.h"

struct backend;
struct nodes;  /* gpu-worker/backend/nodes.h */
struct pool;   /* common/pool.h */
struct weight; /* a matrix as the back end keeps it; opaque */

/* Rotary embedding of one model, shared by all its layers. Frequencies include every scaling of the file. */
struct backend_rope {
    uint32_t n_rotated;       /* rotated dimensions of a head (even, <= head_dim); the rest pass unchanged */
    const float *frequencies; /* host [n_rotated / 2], radians per position */
    float magnitude;          /* multiplies cos and sin (YaRN's attention factor), 1 otherwise */
};

/* One piece of attention: up to 64 contiguous rows of one codec and the tokens wanted from them. */
struct backend_piece {
    const void *rows;
    uint64_t mask;
};

/*
 * Queries of one KV head over a list of pieces: partials[i] <- merge(partials[i], piece by piece in list order).
 * All queries attend to all pieces, except that in the piece with index `causal_piece` (n_pieces: none)
 * query i sees only the tokens j <= causal_first + i / group (a prefill tile of consecutive positions; `group`
 * query heads a position).
 */
struct backend_attend {
    const float *q;  /* [n_queries][head_dim] */
    float *partials; /* [n_queries][2 + head_dim], in and out */
    const struct backend_piece *pieces;
    uint32_t n_pieces;
    uint32_t n_queries;
    uint32_t group;
    uint32_t causal_piece;
    uint32_t causal_first;
    bool is_first; /* the partials are empty before, whatever they hold */
};

/* A copy within device memory; those of one call do not touch each other. */
struct backend_copy {
    void *to;
    const void *from;
    size_t n_bytes;
};

struct backend_options {
    enum kernels_isa isa;
    struct pool *pool; /* not owned; NULL: the calling thread alone */
    /* Not owned; NULL: weights are one piece each. Otherwise the rows of every matrix are split over these nodes, and the groups
     * of the pool are their threads. May be ignored. */
    struct nodes *nodes;
    /* The rest is for back ends with devices of their own. */
    uint32_t worker;             /* number of the worker on its host: takes device number worker modulo their number */
    int32_t device;              /* or this one of those that may be used, >= 0; BACKEND_DEVICE_BY_WORKER: as said */
    const char *visible_devices; /* what CUDA_VISIBLE_DEVICES says, for errors; NULL: it is not set */
};

#define BACKEND_DEVICE_BY_WORKER (-1)
#define BACKEND_PCI_SIZE         24 /* "0000:65:00.0" */

struct backend_ops {
    const char *name; /* "reference", "cpu", "cuda" */

    /* -ENODEV: there is no device; -ENOTSUP: none that it could work with; -EINVAL: not the one of the options; others. Each with
     * one sentence. */
    int (*open)(const struct backend_options *options, struct backend **ret_backend, char *error, size_t error_size);
    /* (optional) PCI address of the device that open() would take, so that threads can be near it before; "": it has none. Errors
     * as open(). */
    int (*locate)(const struct backend_options *options, char ret_pci[BACKEND_PCI_SIZE], char *error,
                  size_t error_size);
    struct backend *(*close)(struct backend *backend);      /* accepts NULL, returns NULL */
    const char *(*describe)(const struct backend *backend); /* "cpu, avx2, 2 threads": what was achieved */

    void *(*alloc)(struct backend *backend, size_t n_bytes); /* 64-byte aligned, zeroed; NULL: no memory */
    void (*free)(struct backend *backend, void *memory);
    /* Bytes in use on the device, as really allocated: given out by alloc, held by weights (mapped ones included), and its own. */
    size_t (*bytes)(const struct backend *backend);

    /* (optional) Bytes of the device that this process can have in all; 0: not known. */
    size_t (*capacity)(const struct backend *backend);
    const struct backend_device_ops
        *device; /* NULL: device memory is the host's, and every call returns when all is done */

    /* Take a matrix (rows = outputs, columns = inputs) or a vector; the tensor's bytes may be repacked or kept by reference,
     * so the mapped file must stay. -ENOTSUP: a type this back end has no kernel for; -ENOMEM. */
    int (*weight_new)(struct backend *backend, const struct tensor *tensor, struct weight **ret_weight);
    struct weight *(*weight_free)(struct backend *backend, struct weight *weight);
    size_t (*weight_bytes)(const struct weight *weight); /* bytes it occupies on the device, mapped ones included */
    /* (optional) Bytes that a node (of options.nodes) holds of weights, and how many of them lie there, as the system tells.
     * -ENODATA: weights are not split; others as topology_resident_bytes(). */
    int (*node_bytes)(struct backend *backend, uint32_t node, uint64_t *ret_bytes_on_node, uint64_t *ret_bytes);

    /* out [T][columns] = rows ids[t] (host) of a matrix, as f32 */
    void (*embed)(struct backend *backend, const struct weight *weight, const uint32_t *ids, uint32_t n_tokens,
                  float *out);
    /* out [T][n] = x / sqrt(mean(x^2) + eps) * weight */
    void (*rms_norm)(struct backend *backend, const float *x, uint32_t n_tokens, uint32_t n,
                     const struct weight *weight, float eps, float *out);
    /* y [T][rows] = x [T][columns] * W^T; several matrices of one input are given together so that the input is prepared once */
    void (*matmul)(struct backend *backend, const struct weight *const *weights, uint32_t n_weights, const float *x,
                   uint32_t n_tokens, float *const *y);
    /* rotates x [T][n_heads][head_dim] in place, pairs (2i, 2i + 1), positions[T] (host) */
    void (*rope)(struct backend *backend, float *x, uint32_t n_tokens, uint32_t n_heads, uint32_t head_dim,
                 const uint32_t *positions, const struct backend_rope *rope);
    /* gate [T][n] <- silu(gate) * up */
    void (*swiglu)(struct backend *backend, float *gate, const float *up, uint32_t n_tokens, uint32_t n);
    /* x [n] <- x + y */
    void (*add)(struct backend *backend, float *x, const float *y, size_t n);
    void (*copy)(struct backend *backend, const struct backend_copy *copies, uint32_t n_copies);
    /* rows [T][n_kv_heads][kernels_row_bytes] from k and v [T][n_kv_heads][head_dim] */
    void (*encode_rows)(struct backend *backend, const float *k, const float *v, uint32_t n_tokens, uint32_t n_kv_heads,
                        uint32_t head_dim, enum kernels_rows codec, void *rows);
    /* exact attention partials, items are independent of each other */
    void (*attend)(struct backend *backend, const struct backend_attend *items, uint32_t n_items, uint32_t head_dim,
                   enum kernels_rows codec, float scale);
};

extern const struct backend_ops backend_reference;
extern const struct backend_ops backend_cpu;
extern const struct backend_ops backend_cuda; /* of builds with CUDA only */

/* "reference", "cpu", "cuda" -> its table; NULL: no such back end in this build. */
const struct backend_ops *backend_find(const char *name);

/* Memory that the device works on and the host touches between operations, after backend_wait(). Freed by free(). */
static inline void *backend_shared_alloc(const struct backend_ops *ops, struct backend *backend, size_t n_bytes)
{
    return ops->device == NULL ? ops->alloc(backend, n_bytes) : ops->device->shared_alloc(backend, n_bytes);
}

/* For back ends whose device memory is the host's: `copy`, and n partials [2 + head_dim] that are empty. */
void backend_copy_in_host(struct backend *backend, const struct backend_copy *copies, uint32_t n_copies);
void backend_make_empty(float *partials, size_t n, uint32_t head_dim);

/* Until all that was asked for is done. Errors as backend_device.h says; none where device memory is the host's. */
static inline int backend_wait(const struct backend_ops *ops, struct backend *backend)
{
    return ops->device == NULL ? 0 : ops->device->finish(backend);
}
