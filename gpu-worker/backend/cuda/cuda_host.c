#include "gpu-worker/backend/cuda/cuda_host.h"

#include <assert.h>
#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "gpu-worker/backend/cuda/cuda_internal.h"

enum {
    PIECE_BYTES = 4u << 20, /* that are refused are not tried in halves */
    PIECE_ALIGNMENT = 2u << 20,
};

/* Memory that the driver knows. */
struct piece {
    uint8_t *host;
    const uint8_t *device; /* the same bytes as the device names them */
    size_t n_bytes;
    bool is_ours; /* pinned for us, not shown */
};

struct cuda_host {
    struct piece *pieces;
    uint32_t n_pieces, capacity;
};

int cuda_host_new(struct backend *backend)
{
    backend->host = calloc(1, sizeof *backend->host);
    return backend->host == NULL ? -ENOMEM : 0;
}

/* Index of the first piece that begins behind `memory`. */
static uint32_t find_behind(const struct cuda_host *host, const void *memory)
{
    uint32_t first = 0, end = host->n_pieces;
    while (first < end) {
        uint32_t middle = first + (end - first) / 2;
        if ((uintptr_t)host->pieces[middle].host <= (uintptr_t)memory)
            first = middle + 1;
        else
            end = middle;
    }
    return first;
}

static bool note(struct cuda_host *host, struct piece piece)
{
    if (host->n_pieces == host->capacity) {
        uint32_t capacity = host->capacity == 0 ? 16 : 2 * host->capacity;
        struct piece *grown = realloc(host->pieces, capacity * sizeof *grown);
        if (grown == NULL)
            return false;
        host->pieces = grown;
        host->capacity = capacity;
    }
    uint32_t at = find_behind(host, piece.host);
    memmove(host->pieces + at + 1, host->pieces + at, (host->n_pieces - at) * sizeof *host->pieces);
    host->pieces[at] = piece;
    host->n_pieces++;
    return true;
}

static void forget(struct cuda_host *host, uint32_t at)
{
    host->n_pieces--;
    memmove(host->pieces + at, host->pieces + at + 1, (host->n_pieces - at) * sizeof *host->pieces);
}

static void release(struct backend *backend, const struct piece *piece)
{
    if (piece->is_ours)
        cuda_commands_failed(backend, "cudaFreeHost", cudaFreeHost(piece->host));
    else
        cuda_commands_failed(backend, "cudaHostUnregister", cudaHostUnregister(piece->host));
}

void cuda_host_free(struct backend *backend)
{
    if (backend->host == NULL)
        return;
    for (uint32_t i = 0; i < backend->host->n_pieces; i++)
        release(backend, &backend->host->pieces[i]);
    free(backend->host->pieces);
    free(backend->host);
    backend->host = NULL;
}

/* ---- pinned for us ---- */

void *cuda_host_take(struct backend *backend, size_t n_bytes)
{
    void *memory = NULL;
    n_bytes = n_bytes == 0 ? 1 : n_bytes;
    cudaError_t error = cudaMallocHost(&memory, n_bytes);
    if (error != cudaSuccess) {
        /* no memory is no failure of the back end: who asked decides */
        if (error == cudaErrorMemoryAllocation)
            (void)cudaGetLastError();
        else
            cuda_commands_failed(backend, "cudaMallocHost", error);
        return NULL;
    }
    if (!note(backend->host, (struct piece){memory, memory, n_bytes, true})) {
        cudaFreeHost(memory);
        return NULL;
    }
    return memset(memory, 0, n_bytes);
}

void cuda_host_give_back(struct backend *backend, void *memory)
{
    if (memory == NULL)
        return;
    struct cuda_host *host = backend->host;
    uint32_t at = find_behind(host, memory);
    assert(at > 0 && host->pieces[at - 1].host == memory && host->pieces[at - 1].is_ours);
    cuda_commands_settle(backend);
    release(backend, &host->pieces[at - 1]);
    forget(host, at - 1);
}

/* ---- shown ---- */

/* One piece, if the driver takes it. */
static bool take_piece(struct backend *backend, uint8_t *memory, size_t n_bytes)
{
    struct piece piece = {.host = memory, .n_bytes = n_bytes};
    void *device = NULL;
    bool is_taken = cudaHostRegister(memory, n_bytes, cudaHostRegisterMapped | cudaHostRegisterPortable) == cudaSuccess;
    if (is_taken && cudaHostGetDevicePointer(&device, memory, 0) == cudaSuccess) {
        piece.device = device;
        if (note(backend->host, piece))
            return true;
    }
    if (is_taken)
        cudaHostUnregister(memory);
    (void)cudaGetLastError(); /* what is refused is copied */
    return false;
}

size_t cuda_host_show(struct backend *backend, void *memory, size_t n_bytes)
{
    if (n_bytes == 0)
        return 0;
    if (take_piece(backend, memory, n_bytes))
        return n_bytes;
    if (n_bytes <= PIECE_BYTES)
        return 0;
    size_t half = (n_bytes / 2 + PIECE_ALIGNMENT - 1) / PIECE_ALIGNMENT * PIECE_ALIGNMENT;
    size_t n_taken = cuda_host_show(backend, memory, half);
    return n_taken + cuda_host_show(backend, (uint8_t *)memory + half, n_bytes - half);
}

void cuda_host_hide(struct backend *backend, void *memory, size_t n_bytes)
{
    struct cuda_host *host = backend->host;
    uint32_t at = find_behind(host, memory), end = at;
    if (at > 0 && host->pieces[at - 1].host == memory)
        at--;
    while (end < host->n_pieces && (uintptr_t)host->pieces[end].host < (uintptr_t)memory + n_bytes)
        end++;
    if (at == end)
        return;
    cuda_commands_settle(backend);
    for (; end > at; end--) {
        release(backend, &host->pieces[at]);
        forget(host, at);
    }
}

/* ---- reached ---- */

const void *cuda_host_find(const struct backend *backend, const void *memory, size_t n_bytes)
{
    const struct cuda_host *host = backend->host;
    uint32_t at = find_behind(host, memory);
    if (at == 0)
        return NULL;
    const struct piece *piece = &host->pieces[at - 1];
    size_t offset = (uintptr_t)memory - (uintptr_t)piece->host;
    return offset <= piece->n_bytes && n_bytes <= piece->n_bytes - offset ? piece->device + offset : NULL;
}

const void *cuda_host_reach(struct backend *backend, const void *memory, size_t n_bytes)
{
    const void *device = cuda_host_find(backend, memory, n_bytes);
    return device != NULL ? device : cuda_commands_stage_copy(backend, memory, n_bytes);
}

/* ---- partials of the stores ---- */

struct merge_arguments {
    const struct backend_merge *items;
    uint32_t n_items, group, head_dim, padding;
};

static cudaError_t launch_merge(struct backend *backend, const void *arguments)
{
    const struct merge_arguments *a = arguments;
    return cuda_merge(&backend->queue, a->items, a->n_items, a->group, a->head_dim);
}

void cuda_host_merge(struct backend *backend, const struct backend_merge *items, uint32_t n_items, uint32_t group,
                     uint32_t head_dim)
{
    const size_t n_bytes = group * KERNELS_PARTIAL_FLOATS((size_t)head_dim) * sizeof(float);
    void *staged;
    if (n_items == 0)
        return;
    struct merge_arguments a = {.n_items = n_items, .group = group, .head_dim = head_dim};
    a.items = cuda_commands_stage(backend, n_items * sizeof *a.items, &staged);
    if (a.items == NULL)
        return;
    struct backend_merge *to = staged;
    for (uint32_t i = 0; i < n_items; i++) {
        to[i] = (struct backend_merge){.partials = items[i].partials, .out = items[i].out};
        for (uint32_t lane = 0; lane < BACKEND_N_LANES; lane++) {
            if (items[i].from[lane] == NULL)
                continue;
            to[i].from[lane] = cuda_host_reach(backend, items[i].from[lane], n_bytes);
            if (to[i].from[lane] == NULL)
                return;
        }
    }
    CUDA_COMMAND(backend, "merge", launch_merge, a);
}
