/*
 * cpu_internal.h - the cpu back end's state, shared by its operations.
 *
 * Owner      the engine's thread. Threads: the pool's, only inside one operation.
 * Memory     every buffer an operation needs is made by open() or weight_new(), so that no operation can run out of it.
 */
#pragma once

#include <stdbool.h>

#include "gpu-worker/backend/backend.h"
#include "gpu-worker/backend/cpu/cpu_kernels.h"
#include "gpu-worker/backend/cpu/cpu_packed.h"
#include "gpu-worker/backend/memory.h"
#include "gpu-worker/backend/nodes.h"

#define CPU_CHUNK_TOKENS  512u  /* matmul works through a larger batch in pieces of this many tokens */
#define CPU_ROPE_TOKENS   2048u /* and rope in such pieces; more than a step has, so that all layers share one */
#define CPU_ROPE_ANGLES   (KERNELS_MAX_HEAD_DIM / 2)
#define CPU_FLOAT_UNIT    4u         /* rows of a float matrix that are split as one */
#define CPU_WORTH_SHARING (1u << 16) /* numbers below which an element-wise operation stays in the calling thread */

/* Neighbouring rows of a matrix, in one memory. */
struct cpu_part {
    uint32_t first_row, n_rows; /* n_rows may be 0 */
    struct cpu_packed packed;   /* data NULL: a float matrix, read at `rows` */
    const void *rows;           /* in the mapped file, or a copy of our own */
    void *copy;                 /* of a node; owned */
};

/* A matrix is one part, or one for each node: part i is node i's, whose threads alone multiply it. Where a part ends is where a
 * tile or a unit of rows does. */
struct weight {
    struct tensor tensor; /* of the mapped file; embed() reads it, from wherever the system keeps the file */
    bool is_packed;
    enum tensor_type float_type;
    float *vector; /* a vector's f32 values, owned; the part's rows are the same */
    uint32_t n_parts;
    struct cpu_part parts[];
};

/* A node's memory. */
struct cpu_node {
    struct backend *backend;
    uint32_t index;
    struct memory_home home;
    struct memory_arena arena;
};

/* cos and sin of a rotary embedding at some positions: made once per step, used by every layer. */
struct cpu_rope_cache {
    uint32_t n_tokens, n_angles;
    float magnitude;
    float frequencies[CPU_ROPE_ANGLES];
    uint32_t positions[CPU_ROPE_TOKENS];
    float (*angles)[2]; /* [n_tokens][n_angles] {cos, sin} x magnitude */
};

struct backend {
    const struct kernels *kernels;
    const struct cpu_kernels *ops;
    struct pool *pool;
    struct memory_arena arena;          /* of weights */
    struct nodes *nodes;                /* NULL: weights are not split */
    uint32_t n_nodes;                   /* 1 without nodes */
    struct cpu_node *node_memories;     /* [n_nodes], or NULL */
    size_t n_bytes;                     /* see backend_ops.bytes */
    struct cpu_activation *activations; /* [CPU_CHUNK_TOKENS][activation_blocks] */
    uint32_t activation_blocks;
    struct cpu_rope_cache rope;
    char description[64];
};

/* A weight's rows: taken over, given back (cpu_weight.c). Arguments as in backend.h. */
int cpu_weight_new(struct backend *backend, const struct tensor *tensor, struct weight **ret_weight);
struct weight *cpu_weight_free(struct backend *backend, struct weight *weight);
size_t cpu_weight_bytes(const struct weight *weight);
int cpu_weight_node_bytes(struct backend *backend, uint32_t node, uint64_t *ret_bytes_on_node, uint64_t *ret_bytes);

/* The operations, one file each group. Arguments as in backend.h. */
void cpu_matmul(struct backend *backend, const struct weight *const *weights, uint32_t n_weights, const float *x,
                uint32_t n_tokens, float *const *y);
void cpu_attend(struct backend *backend, const struct backend_attend *items, uint32_t n_items, uint32_t head_dim,
                enum kernels_rows codec, float scale);
void cpu_rows_embed(struct backend *backend, const struct weight *weight, const uint32_t *ids, uint32_t n_tokens,
                    float *out);
void cpu_rows_rms_norm(struct backend *backend, const float *x, uint32_t n_tokens, uint32_t n,
                       const struct weight *weight, float eps, float *out);
void cpu_rows_rope(struct backend *backend, float *x, uint32_t n_tokens, uint32_t n_heads, uint32_t head_dim,
                   const uint32_t *positions, const struct backend_rope *rope);
void cpu_rows_swiglu(struct backend *backend, float *gate, const float *up, uint32_t n_tokens, uint32_t n);
void cpu_rows_add(struct backend *backend, float *x, const float *y, size_t n);
void cpu_rows_encode(struct backend *backend, const float *k, const float *v, uint32_t n_tokens, uint32_t n_kv_heads,
                     uint32_t head_dim, enum kernels_rows codec, void *rows);
