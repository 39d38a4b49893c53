/* backend_cuda.c - the cuda back end: opening, memory, weights, and the operations that are one launch each. */
#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpu-worker/backend/cuda/cuda_blas.h"
#include "gpu-worker/backend/cuda/cuda_device.h"
#include "gpu-worker/backend/cuda/cuda_graphs.h"
#include "gpu-worker/backend/cuda/cuda_host.h"
#include "gpu-worker/backend/cuda/cuda_internal.h"
#include "gpu-worker/backend/cuda/cuda_key_ops.h"
#include "gpu-worker/backend/cuda/cuda_key_tables.h"
#include "gpu-worker/backend/cuda/cuda_prefill.h"
#include "gpu-worker/backend/cuda/cuda_product.h"
#include "gpu-worker/model/dequantize.h"

enum { SMALL_COPY_BYTES = 64u << 10 };

struct cuda_allocation {
    void *memory;
    size_t n_bytes;
};

/* ---- memory ---- */

/* Index of the first allocation that does not lie before `memory`. */
static uint32_t find(const struct backend *backend, const void *memory)
{
    uint32_t first = 0, end = backend->n_allocations;
    while (first < end) {
        uint32_t middle = first + (end - first) / 2;
        if ((uintptr_t)backend->allocations[middle].memory < (uintptr_t)memory)
            first = middle + 1;
        else
            end = middle;
    }
    return first;
}

static bool note(struct backend *backend, void *memory, size_t n_bytes)
{
    if (backend->n_allocations == backend->allocations_capacity) {
        uint32_t capacity = backend->allocations_capacity == 0 ? 256 : 2 * backend->allocations_capacity;
        struct cuda_allocation *grown = realloc(backend->allocations, capacity * sizeof *grown);
        if (grown == NULL)
            return false;
        backend->allocations = grown;
        backend->allocations_capacity = capacity;
    }
    uint32_t at = find(backend, memory);
    memmove(backend->allocations + at + 1, backend->allocations + at,
            (backend->n_allocations - at) * sizeof *backend->allocations);
    backend->allocations[at] = (struct cuda_allocation){memory, n_bytes};
    backend->n_allocations++;
    backend->n_bytes += n_bytes;
    return true;
}

/* No memory is no failure of the back end: who asked decides. */
static void *noted(struct backend *backend, cudaError_t error, void *memory, size_t n_bytes)
{
    if (error != cudaSuccess) {
        if (error == cudaErrorMemoryAllocation)
            (void)cudaGetLastError();
        else
            cuda_commands_failed(backend, "cudaMalloc", error);
        return NULL;
    }
    if (note(backend, memory, n_bytes))
        return memory;
    cudaFree(memory);
    return NULL;
}

void *backend_cuda_alloc(struct backend *backend, size_t n_bytes)
{
    void *memory = NULL;
    n_bytes = n_bytes == 0 ? 1 : n_bytes;
    cudaError_t error = cudaMalloc(&memory, n_bytes);
    return noted(backend, error, memory, n_bytes);
}

void backend_cuda_free(struct backend *backend, void *memory)
{
    if (memory == NULL)
        return;
    uint32_t at = find(backend, memory);
    assert(at < backend->n_allocations && backend->allocations[at].memory == memory);
    backend->n_bytes -= backend->allocations[at].n_bytes;
    backend->n_allocations--;
    memmove(backend->allocations + at, backend->allocations + at + 1,
            (backend->n_allocations - at) * sizeof *backend->allocations);
    cuda_commands_failed(backend, "cudaFree", cudaFree(memory));
}

static void *zeroed(struct backend *backend, void *memory, size_t n_bytes)
{
    if (memory == NULL || n_bytes == 0)
        return memory;
    cudaError_t error = cudaMemsetAsync(memory, 0, n_bytes, backend->stream);
    if (!cuda_commands_failed(backend, "cudaMemsetAsync", error))
        return memory;
    backend_cuda_free(backend, memory);
    return NULL;
}

static void *cuda_alloc(struct backend *backend, size_t n_bytes)
{
    return zeroed(backend, backend_cuda_alloc(backend, n_bytes), n_bytes);
}

static void *shared_alloc(struct backend *backend, size_t n_bytes)
{
    void *memory = NULL;
    size_t size = n_bytes == 0 ? 1 : n_bytes;
    cudaError_t error = cudaMallocManaged(&memory, size, cudaMemAttachGlobal);
    return zeroed(backend, noted(backend, error, memory, size), n_bytes);
}

/* What was asked for before may still use it. */
static void cuda_free(struct backend *backend, void *memory)
{
    if (memory == NULL)
        return;
    cuda_commands_play(backend);
    backend_cuda_free(backend, memory); /* which waits */
}

static size_t cuda_bytes(const struct backend *backend)
{
    return backend->n_bytes;
}

static size_t cuda_capacity(const struct backend *backend)
{
    return backend->capacity;
}

/* ---- life ---- */

static struct backend *cuda_close(struct backend *backend)
{
    if (backend == NULL)
        return NULL;
    cuda_prefill_free(backend);
    cuda_commands_free(backend);
    cuda_host_free(backend);
    cuda_key_tables_free(backend);
    backend->blas = cuda_blas_free(backend, backend->blas);
    backend_cuda_free(backend, backend->rope_frequencies);
    assert(backend->n_allocations == 0);
    if (backend->stream != NULL)
        cudaStreamDestroy(backend->stream);
    free(backend->host_frequencies);
    free(backend->allocations);
    free(backend);
    return NULL;
}

/* Without it the back end has kernels of its own, which take longer; who describes it says so. */
static void start_blas(struct backend *backend)
{
    char error[160];
    size_t length = strlen(backend->description), room = sizeof backend->description - length;
    backend->blas = cuda_blas_new(backend, error, sizeof error);
    if (backend->blas != NULL)
        snprintf(backend->description + length, room, ", cuBLAS %s", cuda_blas_version(backend->blas));
    else
        snprintf(backend->description + length, room, ", no cuBLAS: %s", error);
}

static int open_device(struct backend *backend, const struct backend_options *options, char *error, size_t error_size)
{
    struct cuda_device device;
    char described[sizeof backend->description - sizeof "cuda, "];
    int r = cuda_device_open(options, &device, error, error_size);
    if (r < 0)
        return r;
    backend->device = device.number;
    backend->capacity = cuda_device_capacity(&device);
    snprintf(backend->description, sizeof backend->description, "cuda, %s",
             cuda_device_describe(&device, described, sizeof described));
    r = cuda_commands_failed(backend, "cudaStreamCreateWithFlags",
                             cudaStreamCreateWithFlags(&backend->stream, cudaStreamNonBlocking))
            ? backend->error
            : 0;
    backend->queue.stream = backend->stream;
    if (r == 0)
        r = cuda_host_new(backend);
    if (r == 0)
        r = cuda_commands_new(backend);
    if (r == 0)
        r = cuda_prefill_new(backend);
    if (r == 0)
        start_blas(backend);
    if (r < 0)
        snprintf(error, error_size, "%s", backend->error_sentence[0] ? backend->error_sentence : strerror(-r));
    return r;
}

static int cuda_open(const struct backend_options *options, struct backend **ret_backend, char *error,
                     size_t error_size)
{
    struct backend *backend = calloc(1, sizeof *backend);
    if (backend == NULL) {
        snprintf(error, error_size, "no memory for the cuda back end");
        return -ENOMEM;
    }
    int r = open_device(backend, options, error, error_size);
    if (r < 0) {
        cuda_close(backend);
        return r;
    }
    *ret_backend = backend;
    return 0;
}

static const char *cuda_describe(const struct backend *backend)
{
    return backend->description;
}

static int use(struct backend *backend)
{
    return cuda_commands_failed(backend, "cudaSetDevice", cudaSetDevice(backend->device)) ? backend->error : 0;
}

static const char *error_sentence(const struct backend *backend)
{
    return backend->error_sentence;
}

/* ---- weights ---- */

static struct weight *cuda_weight_free(struct backend *backend, struct weight *weight)
{
    if (weight != NULL) {
        cuda_graphs_forget(backend);
        cuda_free(backend, weight->data);
        free(weight);
    }
    return NULL;
}

static int upload(struct backend *backend, void *to, const void *from, size_t n_bytes)
{
    return cuda_commands_failed(backend, "cudaMemcpy", cudaMemcpy(to, from, n_bytes, cudaMemcpyHostToDevice))
               ? backend->error
               : 0;
}

static int cuda_weight_new(struct backend *backend, const struct tensor *tensor, struct weight **ret_weight)
{
    const bool is_vector = tensor->n_rows == 1; /* of norms: f32 */
    size_t n_bytes = is_vector ? tensor->n_columns * sizeof(float)
                               : tensor->n_rows * tensor_row_bytes(tensor->type, tensor->n_columns);
    if (n_bytes == 0)
        return -ENOTSUP;
    struct weight *weight = calloc(1, sizeof *weight);
    float *numbers = is_vector ? malloc(n_bytes) : NULL;
    if (weight != NULL)
        weight->data = backend_cuda_alloc(backend, n_bytes);
    int r = weight == NULL || weight->data == NULL || (is_vector && numbers == NULL) ? -ENOMEM : 0;
    if (r == 0 && is_vector)
        r = dequantize_row(tensor->type, tensor->data, tensor->n_columns, numbers);
    if (r == 0)
        r = upload(backend, weight->data, is_vector ? numbers : tensor->data, n_bytes);
    free(numbers);
    if (r < 0) {
        cuda_weight_free(backend, weight);
        return r;
    }
    weight->type = is_vector ? TENSOR_F32 : tensor->type;
    weight->n_rows = tensor->n_rows;
    weight->n_columns = tensor->n_columns;
    weight->n_bytes = n_bytes;
    r = cuda_product_prepare(backend, weight);
    if (r < 0) {
        cuda_weight_free(backend, weight);
        return r;
    }
    *ret_weight = weight;
    return 0;
}

static size_t cuda_weight_bytes(const struct weight *weight)
{
    return weight->n_bytes;
}

/* ---- operations: arguments as they are written down, and their launches ---- */

struct embed_arguments {
    const struct weight *weight;
    const uint32_t *ids;
    float *out;
    size_t n_tokens;
};

static cudaError_t launch_embed(struct backend *backend, const void *arguments)
{
    const struct embed_arguments *a = arguments;
    return cuda_embed(&backend->queue, a->weight->type, a->weight->data, a->weight->n_columns, a->ids,
                      (uint32_t)a->n_tokens, a->out);
}

static void cuda_embed_op(struct backend *backend, const struct weight *weight, const uint32_t *ids, uint32_t n_tokens,
                          float *out)
{
    const struct embed_arguments a = {weight, cuda_commands_stage_copy(backend, ids, n_tokens * sizeof *ids), out,
                                      n_tokens};
    CUDA_COMMAND(backend, "embed", launch_embed, a);
}

struct norm_arguments {
    const float *x, *weight;
    float *out;
    uint32_t n_tokens, n;
    float eps;
    uint32_t padding;
};

static cudaError_t launch_rms_norm(struct backend *backend, const void *arguments)
{
    const struct norm_arguments *a = arguments;
    return cuda_rms_norm(&backend->queue, a->x, a->n_tokens, a->n, a->weight, a->eps, a->out);
}

static void rms_norm(struct backend *backend, const float *x, uint32_t n_tokens, uint32_t n,
                     const struct weight *weight, float eps, float *out)
{
    const struct norm_arguments a = {x, weight->data, out, n_tokens, n, eps, 0};
    CUDA_COMMAND(backend, "rms_norm", launch_rms_norm, a);
}

struct rope_arguments {
    float *x;
    const uint32_t *positions;
    const float *frequencies;
    uint32_t n_tokens, n_heads, head_dim, n_rotated;
    float magnitude;
    uint32_t padding;
};

static cudaError_t launch_rope(struct backend *backend, const void *arguments)
{
    const struct rope_arguments *a = arguments;
    return cuda_rope(&backend->queue, a->x, a->n_tokens, a->n_heads, a->head_dim, a->positions, a->n_rotated,
                     a->frequencies, a->magnitude);
}

/* The model's frequencies on the device; they stay the same, step after step. */
static const float *frequencies_of(struct backend *backend, const struct backend_rope *rope)
{
    uint32_t n = rope->n_rotated / 2;
    if (backend->n_frequencies == n && memcmp(backend->host_frequencies, rope->frequencies, n * sizeof(float)) == 0)
        return backend->rope_frequencies;
    cuda_commands_play(backend);
    backend_cuda_free(backend, backend->rope_frequencies);
    free(backend->host_frequencies);
    backend->n_frequencies = 0;
    backend->host_frequencies = malloc((n + 1) * sizeof(float));
    backend->rope_frequencies = backend_cuda_alloc(backend, n * sizeof(float));
    if (backend->host_frequencies == NULL || backend->rope_frequencies == NULL) {
        cuda_commands_failed(backend, "rope", cudaErrorMemoryAllocation);
        return NULL;
    }
    memcpy(backend->host_frequencies, rope->frequencies, n * sizeof(float));
    if (upload(backend, backend->rope_frequencies, rope->frequencies, n * sizeof(float)) == 0)
        backend->n_frequencies = n;
    return backend->rope_frequencies;
}

static void rope(struct backend *backend, float *x, uint32_t n_tokens, uint32_t n_heads, uint32_t head_dim,
                 const uint32_t *positions, const struct backend_rope *rope)
{
    const struct rope_arguments a = {.x = x,
                                     .positions =
                                         cuda_commands_stage_copy(backend, positions, n_tokens * sizeof *positions),
                                     .frequencies = frequencies_of(backend, rope),
                                     .n_tokens = n_tokens,
                                     .n_heads = n_heads,
                                     .head_dim = head_dim,
                                     .n_rotated = rope->n_rotated,
                                     .magnitude = rope->magnitude};
    CUDA_COMMAND(backend, "rope", launch_rope, a);
}

struct pairs_arguments {
    float *x;
    const float *y;
    size_t n;
};

static cudaError_t launch_swiglu(struct backend *backend, const void *arguments)
{
    const struct pairs_arguments *a = arguments;
    return cuda_swiglu(&backend->queue, a->x, a->y, a->n);
}

static void swiglu(struct backend *backend, float *gate, const float *up, uint32_t n_tokens, uint32_t n)
{
    const struct pairs_arguments a = {gate, up, (size_t)n_tokens * n};
    CUDA_COMMAND(backend, "swiglu", launch_swiglu, a);
}

static cudaError_t launch_add(struct backend *backend, const void *arguments)
{
    const struct pairs_arguments *a = arguments;
    return cuda_add(&backend->queue, a->x, a->y, a->n);
}

static void add(struct backend *backend, float *x, const float *y, size_t n)
{
    const struct pairs_arguments a = {x, y, n};
    CUDA_COMMAND(backend, "add", launch_add, a);
}

struct encode_arguments {
    const float *k, *v;
    void *rows;
    uint32_t n_tokens, n_kv_heads, head_dim;
    enum kernels_rows codec;
};

static cudaError_t launch_encode(struct backend *backend, const void *arguments)
{
    const struct encode_arguments *a = arguments;
    return cuda_encode_rows(&backend->queue, a->k, a->v, a->n_tokens, a->n_kv_heads, a->head_dim, a->codec, a->rows);
}

static void encode_rows(struct backend *backend, const float *k, const float *v, uint32_t n_tokens, uint32_t n_kv_heads,
                        uint32_t head_dim, enum kernels_rows codec, void *rows)
{
    const struct encode_arguments a = {k, v, rows, n_tokens, n_kv_heads, head_dim, codec};
    CUDA_COMMAND(backend, "encode_rows", launch_encode, a);
}

/* ---- copies ---- */

struct copy_arguments {
    void *to;
    const void *from;
    size_t n_bytes;
};

static cudaError_t launch_to_host(struct backend *backend, const void *arguments)
{
    const struct copy_arguments *a = arguments;
    return cudaMemcpyAsync(a->to, a->from, a->n_bytes, cudaMemcpyDeviceToHost, backend->stream);
}

static void to_host(struct backend *backend, void *host, const void *device, size_t n_bytes)
{
    const struct copy_arguments a = {host, device, n_bytes};
    if (n_bytes > 0)
        CUDA_COMMAND(backend, "copy to the host", launch_to_host, a);
}

static cudaError_t launch_on_device(struct backend *backend, const void *arguments)
{
    const struct copy_arguments *a = arguments;
    return cudaMemcpyAsync(a->to, a->from, a->n_bytes, cudaMemcpyDeviceToDevice, backend->stream);
}

static void to_device(struct backend *backend, void *device, const void *host, size_t n_bytes)
{
    const struct copy_arguments a = {device, cuda_commands_stage_copy(backend, host, n_bytes), n_bytes};
    if (n_bytes > 0)
        CUDA_COMMAND(backend, "copy to the device", launch_on_device, a);
}

struct copies_arguments {
    const struct backend_copy *items;
    size_t n_items, most_bytes;
};

static cudaError_t launch_copies(struct backend *backend, const void *arguments)
{
    const struct copies_arguments *a = arguments;
    return cuda_copy(&backend->queue, a->items, (uint32_t)a->n_items, a->most_bytes);
}

/* Small ones in one launch, which a large one would make a grid for: that is a copy of its own. */
static void copy(struct backend *backend, const struct backend_copy *copies, uint32_t n_copies)
{
    struct copies_arguments all = {0};
    void *staged;
    all.items = cuda_commands_stage(backend, n_copies * sizeof *all.items, &staged);
    if (all.items == NULL)
        return;
    struct backend_copy *items = staged;
    for (uint32_t i = 0; i < n_copies; i++) {
        const struct copy_arguments a = {copies[i].to, copies[i].from, copies[i].n_bytes};
        if (a.n_bytes > SMALL_COPY_BYTES) {
            CUDA_COMMAND(backend, "copy on the device", launch_on_device, a);
            continue;
        }
        items[all.n_items++] = (struct backend_copy){a.to, a.from, a.n_bytes};
        all.most_bytes = a.n_bytes > all.most_bytes ? a.n_bytes : all.most_bytes;
    }
    if (all.most_bytes > 0)
        CUDA_COMMAND(backend, "copies on the device", launch_copies, all);
}

/* ---- the table ---- */

static const struct backend_device_ops device_ops = {
    .use = use,
    .host_alloc = cuda_host_take,
    .host_free = cuda_host_give_back,
    .show = cuda_host_show,
    .hide = cuda_host_hide,
    .shared_alloc = shared_alloc,
    .to_device = to_device,
    .to_host = to_host,
    .part = cuda_commands_part,
    .finish = cuda_commands_finish,
    .error = error_sentence,
    .quantize = cuda_key_quantize,
    .select = cuda_key_select,
    .merge = cuda_host_merge,
    .prefill_begin = cuda_prefill_begin,
    .prefill_rows = cuda_prefill_take,
    .prefill_end = cuda_prefill_end,
    .sample = cuda_choice_sample,
    .wait = cuda_commands_wait,
};

const struct backend_ops backend_cuda = {
    .name = "cuda",
    .open = cuda_open,
    .locate = cuda_device_locate,
    .close = cuda_close,
    .describe = cuda_describe,
    .alloc = cuda_alloc,
    .free = cuda_free,
    .bytes = cuda_bytes,
    .capacity = cuda_capacity,
    .device = &device_ops,
    .weight_new = cuda_weight_new,
    .weight_free = cuda_weight_free,
    .weight_bytes = cuda_weight_bytes,
    .embed = cuda_embed_op,
    .rms_norm = rms_norm,
    .matmul = cuda_product_matmul,
    .rope = rope,
    .swiglu = swiglu,
    .add = add,
    .copy = copy,
    .encode_rows = encode_rows,
    .attend = cuda_attention_partials,
};
