/*
 * cpu_attend.c - exact attention over lists of pieces, spread over the pool by item and by ranges of an item's queries.
 *
 * A query takes its pieces in list order whatever range it is in, and kernels/ gives the same bits for any number of
 * queries, so the split cannot change a bit.
 */
#include "gpu-worker/backend/cpu/cpu_internal.h"

#include "common/pool.h"

#define MAX_RANGE_QUERIES   192u /* masks of a range live on the stack */
#define SMALL_RANGE_QUERIES 24u  /* below this, decoding a block's rows anew costs more than a thread gains */

struct attend {
    struct backend *backend;
    const struct backend_attend *items;
    uint32_t head_dim;
    enum kernels_rows codec;
    float scale;
    uint32_t range_queries;
    uint32_t n_ranges; /* of every item; those past its end are empty */
};

static void attend_range(const struct attend *attend, const struct backend_attend *item, uint32_t first, uint32_t n)
{
    uint64_t masks[MAX_RANGE_QUERIES];
    if (item->is_first)
        backend_make_empty(item->partials + (size_t)first * KERNELS_PARTIAL_FLOATS(attend->head_dim), n,
                           attend->head_dim);
    for (uint32_t p = 0; p < item->n_pieces; p++) {
        const struct backend_piece *piece = &item->pieces[p];
        for (uint32_t i = 0; i < n; i++) {
            masks[i] = piece->mask;
            if (p == item->causal_piece) {
                uint32_t last = item->causal_first + (first + i) / item->group;
                if (last < KERNELS_BLOCK_TOKENS - 1)
                    masks[i] &= (UINT64_C(2) << last) - 1;
            }
        }
        attend->backend->kernels->attend_block(
            item->q + (size_t)first * attend->head_dim, n, attend->head_dim, attend->codec, piece->rows, masks,
            attend->scale, item->partials + (size_t)first * KERNELS_PARTIAL_FLOATS(attend->head_dim));
    }
}

static void attend_item(void *context, uint32_t index, uint32_t thread)
{
    (void)thread;
    const struct attend *attend = context;
    const struct backend_attend *item = &attend->items[index / attend->n_ranges];
    const uint32_t first = index % attend->n_ranges * attend->range_queries;
    if (first >= item->n_queries)
        return;
    const uint32_t left = item->n_queries - first;
    attend_range(attend, item, first, left < attend->range_queries ? left : attend->range_queries);
}

void cpu_attend(struct backend *backend, const struct backend_attend *items, uint32_t n_items, uint32_t head_dim,
                enum kernels_rows codec, float scale)
{
    uint32_t most = 0;
    for (uint32_t i = 0; i < n_items; i++)
        most = items[i].n_queries > most ? items[i].n_queries : most;
    if (most == 0)
        return;
    /* about four ranges a thread in all, each a multiple of 12 queries: whole tiles for groups of 1, 2, 3, 4 and 6 */
    uint32_t n_wanted = (pool_n_threads(backend->pool) * 4 + n_items - 1) / n_items;
    uint32_t range = (most + n_wanted - 1) / n_wanted;
    range = (range + 11) / 12 * 12;
    range = range < SMALL_RANGE_QUERIES ? SMALL_RANGE_QUERIES : range;
    range = range > MAX_RANGE_QUERIES ? MAX_RANGE_QUERIES : range;
    struct attend attend = {
        .backend = backend,
        .items = items,
        .head_dim = head_dim,
        .codec = codec,
        .scale = scale,
        .range_queries = range,
        .n_ranges = (most + range - 1) / range,
    };
    pool_run(backend->pool, n_items * attend.n_ranges, attend_item, &attend);
}
