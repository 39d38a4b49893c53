/* cuda_attention.c - exact partials: which kernel makes them, lists of pieces for it. */
#include <string.h>

#include "gpu-worker/backend/cuda/cuda_internal.h"

/* Queries of an item up to which its pieces are better spread over the device than read once for many queries. */
enum { FEW_QUERIES = 16 };

struct attend_arguments {
    const struct backend_attend *items;
    float *scratch;
    uint32_t n_items, most_queries, most_pieces, head_dim;
    enum kernels_rows codec;
    float scale;
};

static cudaError_t launch_few(struct backend *backend, const void *arguments)
{
    const struct attend_arguments *a = arguments;
    return cuda_attend_decode(&backend->queue, a->items, a->n_items, a->most_queries, a->most_pieces, a->head_dim,
                              a->codec, a->scale, a->scratch);
}

static cudaError_t launch_many(struct backend *backend, const void *arguments)
{
    const struct attend_arguments *a = arguments;
    return cuda_attend(&backend->queue, a->items, a->n_items, a->most_queries, a->head_dim, a->codec, a->scale);
}

/*
 * The kernels' bits differ: those of a decode step always come from one of them, as all its items have a query for each head of a
 * group.
 */
void cuda_attention_partials(struct backend *backend, const struct backend_attend *items, uint32_t n_items,
                             uint32_t head_dim, enum kernels_rows codec, float scale)
{
    size_t n_pieces = 0;
    for (uint32_t i = 0; i < n_items; i++)
        n_pieces += items[i].n_pieces;
    void *host_items, *host_pieces;
    struct attend_arguments a = {.n_items = n_items, .head_dim = head_dim, .codec = codec, .scale = scale};
    a.items = cuda_commands_stage(backend, n_items * sizeof *items, &host_items);
    const struct backend_piece *pieces = cuda_commands_stage(backend, n_pieces * sizeof *pieces, &host_pieces);
    if (a.items == NULL || pieces == NULL)
        return;
    struct backend_attend *staged = host_items;
    struct backend_piece *staged_pieces = host_pieces;
    size_t first = 0;
    for (uint32_t i = 0; i < n_items; i++) {
        staged[i] = items[i];
        staged[i].pieces = pieces + first;
        memcpy(staged_pieces + first, items[i].pieces, items[i].n_pieces * sizeof *pieces);
        first += items[i].n_pieces;
        a.most_queries = items[i].n_queries > a.most_queries ? items[i].n_queries : a.most_queries;
        a.most_pieces = items[i].n_pieces > a.most_pieces ? items[i].n_pieces : a.most_pieces;
    }
    if (a.most_queries > FEW_QUERIES) {
        CUDA_COMMAND(backend, "attend", launch_many, a);
        return;
    }
    const size_t n_bytes = cuda_attend_decode_bytes(n_items, a.most_queries, a.most_pieces, head_dim);
    if (n_bytes > 0) {
        a.scratch = cuda_commands_work(backend, CUDA_WORK_ATTEND, n_bytes);
        if (a.scratch == NULL)
            return;
    }
    CUDA_COMMAND(backend, "attend", launch_few, a);
}
