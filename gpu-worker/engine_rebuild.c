/*
 * engine_rebuild.c - brings a session's device memory back from the stores: the exact set and the quantized keys, by fetches.
 *
 * The path a device without a mapping of the segments takes; what it builds equals what was lost, since every consumer
 * sees a row as the row codec decodes it. Rows are used where the store has put them.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "gpu-worker/engine_private.h"
#include "gpu-worker/fetches.h"
#include "gpu-worker/policy/exact_set.h"

/* A fetched block: [layer][kv_head][n_tokens] rows. */
struct block {
    const struct row_shape *shape;
    uint32_t number, n_tokens;
    const uint8_t *rows;
    size_t head_bytes;
};

static const void *fetched_head(void *context, uint32_t layer, uint32_t kv_head)
{
    const struct block *block = context;
    return block->rows + ((size_t)layer * block->shape->n_kv_heads + kv_head) * block->head_bytes;
}

/* Puts the first n_tokens of it into the exact set. */
static void put_exact(struct engine *engine, struct session *session, const struct block *block, uint32_t n_tokens)
{
    const struct backend_device_ops *device = engine->network->ops->device;
    const struct row_shape *shape = block->shape;
    const size_t layer_bytes = shape->n_kv_heads * block->head_bytes;
    const uint8_t *rows = block->rows;
    if (device != NULL) {
        device->to_device(engine->network->backend, engine->device_rows, rows, shape->n_layers * layer_bytes);
        rows = engine->device_rows;
    }
    for (uint32_t layer = 0; layer < shape->n_layers; layer++)
        session_put_rows(session, layer, block->number * LAYOUT_BLOCK_TOKENS, n_tokens, rows + layer * layer_bytes,
                         layout_row_bytes(shape), block->head_bytes);
}

/* What a query at n_rows needs of a block. */
static int put_block(struct engine *engine, struct run *run, struct block *block, uint32_t n_rows)
{
    struct session *session = run->session;
    const uint32_t first = block->number * LAYOUT_BLOCK_TOKENS;
    int r = 0;
    if (block->number < exact_set_n_old_blocks(n_rows, session->exact_tokens) &&
        run->policy.terms.fastgen <= 0) /* else once it is known which heads need keys */
        r = key_cache_add(session->keys, engine->kernels, fetched_head, block);
    if (r < 0)
        return r;
    bool in_window = session_keeps(session, first + LAYOUT_N_SINKS, n_rows);
    if (in_window || first == 0)
        put_exact(engine, session, block,
                  !in_window && block->n_tokens > LAYOUT_N_SINKS ? LAYOUT_N_SINKS : block->n_tokens);
    return engine_device_wait(engine); /* the rows are the store's again */
}

/* Asks for all blocks in order and puts each. */
static int put_blocks(struct engine *engine, struct run *run, struct fetches *fetches, uint32_t n_rows)
{
    while (fetches->n_taken < fetches->n) {
        struct fetch *fetch;
        int r = fetches_next(fetches, &fetch);
        if (r < 0)
            return r;
        atomic_fetch_add_explicit(&engine->progress, 1, memory_order_relaxed);
        engine_between_layers(engine);
        if (run->error != 0)
            return run->error;
        if (r == 0)
            continue;
        if (fetch->call.status < 0)
            return fetch->call.status;
        struct block block = {.shape = &engine->stores.shape,
                              .number = fetch->blocks[0],
                              .n_tokens = fetch->n_tokens,
                              .rows = fetches_rows(fetches, fetch),
                              .head_bytes = fetches_head_bytes(fetches, fetch)};
        r = put_block(engine, run, &block, n_rows);
        if (r < 0)
            return r;
        fetches_free(fetches, fetch);
    }
    return 0;
}

static int fetch_all(struct engine *engine, struct run *run, uint32_t n_rows)
{
    const uint32_t n_blocks = (n_rows + LAYOUT_BLOCK_TOKENS - 1) / LAYOUT_BLOCK_TOKENS;
    struct fetch *all = calloc(n_blocks, sizeof(*all));
    uint32_t *numbers = calloc(n_blocks, sizeof(*numbers));
    struct fetches fetches;
    int r = all == NULL || numbers == NULL ? -ENOMEM : 0;
    for (uint32_t i = 0; r == 0 && i < n_blocks; i++) {
        uint32_t n = n_rows - i * LAYOUT_BLOCK_TOKENS;
        numbers[i] = i;
        all[i] = (struct fetch){.run = run,
                                .call.store = run_store(run, i),
                                .n_layers = engine->stores.shape.n_layers,
                                .blocks = &numbers[i],
                                .n_blocks = 1,
                                .n_tokens = n < LAYOUT_BLOCK_TOKENS ? n : LAYOUT_BLOCK_TOKENS};
    }
    if (r == 0) {
        fetches_begin(&fetches, &engine->stores, &engine->link, all, n_blocks);
        r = put_blocks(engine, run, &fetches, n_rows);
        fetches_end(&fetches);
    }
    free(all);
    free(numbers);
    return r;
}

int engine_rebuild(struct engine *engine, struct run *run, uint32_t n_rows)
{
    struct session *session = run->session;
    int r = session_reset(session, &run->policy);
    if (r < 0 || n_rows == 0)
        return r;
    r = fetch_all(engine, run, n_rows);
    if (r < 0) {
        if (session_reset(session, &run->policy) < 0)
            session->n_rows = UINT32_MAX; /* rebuilt, or refused, by the next run */
        return r;
    }
    session->n_rows = session->n_touched = n_rows;
    return 0;
}
