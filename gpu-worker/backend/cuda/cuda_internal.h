/*
 * cuda_internal.h - the state of the cuda back end, shared by the files of this folder that make up its table.
 *
 * Owner      backend_cuda.c. Threads: as backend.h and backend_device.h say.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "gpu-worker/backend/backend.h"
#include "gpu-worker/backend/cuda/cuda_commands.h"
#include "gpu-worker/backend/cuda/cuda_ops.h"

enum { CUDA_ERROR_BYTES = 256 };

/* A matrix or vector as it lies in the file, on the device. */
struct weight {
    enum tensor_type type;
    uint32_t n_rows, n_columns;
    size_t n_bytes;
    void *data;
    float to_halves, from_halves; /* powers of two: its numbers as halves (cuda_product.h), and back */
};

struct cuda_allocation; /* backend_cuda.c: what alloc() and the like gave */
struct cuda_prefill;    /* cuda_prefill.c */
struct cuda_blas;       /* cuda_blas.c */
struct cuda_host;       /* cuda_host.c: pinned memory of the host */
struct cuda_key_tables; /* cuda_key_tables.c: of quantizers */

struct backend {
    int device;
    cudaStream_t stream;
    struct cuda_queue queue;             /* of that stream */
    size_t n_bytes;                      /* of the device, given out and its own */
    size_t capacity;                     /* what was free at open */
    struct cuda_allocation *allocations; /* in order of address */
    uint32_t n_allocations, allocations_capacity;
    struct cuda_commands *commands;
    struct cuda_graphs *graphs; /* cuda_graphs.c */
    struct cuda_blas *blas;     /* NULL: cuBLAS is not there, and own kernels do its work */
    struct cuda_prefill *prefill;
    struct cuda_host *host;
    struct cuda_key_tables *key_tables;
    uint64_t key_operation;  /* number of the one at hand, for key_tables */
    size_t keys_staged;      /* bytes, by cuda_key_quantize.c since it last played */
    float *rope_frequencies; /* on the device, of the rotary embedding that was used last */
    float *host_frequencies;
    uint32_t n_frequencies;
    int error;                             /* -errno: the first failure, until it is told */
    char error_sentence[CUDA_ERROR_BYTES]; /* of it */
    char description[384];
};

/* Device memory that the back end counts as its own: for a purpose (cuda_work) or for good. Not zeroed. NULL: none. */
void *backend_cuda_alloc(struct backend *backend, size_t n_bytes);
void backend_cuda_free(struct backend *backend, void *memory);

/* attend of backend.h: cuda_attention.c. */
void cuda_attention_partials(struct backend *backend, const struct backend_attend *items, uint32_t n_items,
                             uint32_t head_dim, enum kernels_rows codec, float scale);
/* sample of backend_device.h: cuda_choice.c. */
void cuda_choice_sample(struct backend *backend, const struct backend_sample *items, uint32_t n_items,
                        uint32_t n_vocab);
