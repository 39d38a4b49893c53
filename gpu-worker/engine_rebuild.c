/*
 * engine_rebuild.c - brings a session's device memory back from the stores: the exact set and the quantized keys, by fetches.
 *
 * The path a device without a mapping of the segments takes; what it builds equals what was lost, since every consumer
 * sees a row as the row codec decodes it.
 */
#include <errno.h>
#include <string.h>

#include "common/clock.h"
#include "gpu-worker/engine_private.h"
#include "gpu-worker/payload.h"
#include "gpu-worker/policy/exact_set.h"

enum { RETRY_US = 2000 };

static uint64_t head_bytes(const struct row_shape *shape, uint32_t n_tokens)
{
    return n_tokens * layout_row_bytes(shape);
}

/* Writes the fetches of `heads` (layer, kv_head) pairs from `first` on into a slot. */
static int put_fetches(const struct engine *engine, const struct run *run, const struct store *store, uint32_t slot,
                       uint32_t block, uint32_t n_tokens, uint64_t request, uint32_t *ret_n_bytes)
{
    const struct row_shape *shape = &engine->stores.shape;
    uint32_t n_heads = shape->n_layers * shape->n_kv_heads;
    struct payload payload;
    payload_begin(&payload, stores_request(store, slot), store->request_bytes);
    int64_t at = payload_take(&payload, n_heads * sizeof(struct fetch_entry));
    if (at < 0)
        return (int)at;
    struct fetch_entry *entries = payload_at(&payload, (uint32_t)at);
    for (uint32_t i = 0; i < n_heads; i++)
        entries[i] = (struct fetch_entry){
            .session = run->request->session,
            .handle = run->request->blocks[block],
            .layer = i / shape->n_kv_heads,
            .kv_head = i % shape->n_kv_heads,
            .n_tokens = n_tokens,
            .result_offset = payload_result(&payload, head_bytes(shape, n_tokens)),
        };
    struct request_header header = {.request = request, .n_fetches = n_heads, .fetches_offset = (uint32_t)at};
    payload_finish(&payload, &header);
    *ret_n_bytes = payload.used;
    return 0;
}

static void take_rows(struct engine *engine, const struct reply_header *reply, uint32_t n_tokens)
{
    const struct row_shape *shape = &engine->stores.shape;
    struct payload results = {.result_used = sizeof(struct reply_header)};
    uint8_t *to = (uint8_t *)engine->fetch_rows;
    for (uint32_t i = 0; i < shape->n_layers * shape->n_kv_heads; i++) {
        uint32_t at = payload_result(&results, head_bytes(shape, n_tokens));
        memcpy(to, (const uint8_t *)reply + at, head_bytes(shape, n_tokens));
        to += head_bytes(shape, n_tokens);
    }
}

/* One try. 1: fetched; 0: try again; negative: refused or lost. */
static int fetch_once(struct engine *engine, const struct run *run, uint32_t block, uint32_t n_tokens)
{
    struct link *link = &engine->link;
    uint32_t number = run_store(run, block), slot, n_bytes = 0;
    struct store *store = stores_get(&engine->stores, number);
    uint64_t request = link->next_request++, route = store == NULL ? 0 : store->route;
    struct descriptor descriptor;
    if (store == NULL || !store->is_ready || stores_take_slot(store, request, &slot) < 0) {
        int r = link_wait(link, clock_deadline_us(RETRY_US), &descriptor);
        return r < 0 ? r : 0;
    }
    int r = put_fetches(engine, run, store, slot, block, n_tokens, request, &n_bytes);
    if (r == 0)
        r = link_send(link, route, request, slot, n_bytes);
    if (r < 0) {
        stores_free_slot(store, slot);
        if (r != -EAGAIN && r != -ENOTCONN)
            return r;
        r = link_wait(link, clock_deadline_us(RETRY_US), &descriptor);
        return r < 0 ? r : 0;
    }
    uint64_t deadline = clock_deadline_us(link->request_timeout_us);
    do {
        r = link_wait(link, deadline, &descriptor);
        if (r < 0)
            return r;
        store = stores_get(&engine->stores, number);
        if (store->route != route)
            return 0; /* another life: its exchange is new */
    } while ((r == 0 || descriptor.request != request) && clock_now_us() < deadline);
    if (r == 0 || descriptor.request != request) {
        stores_quarantine_slot(store, slot);
        return 0;
    }
    const struct reply_header *reply = stores_reply(store, slot);
    r = descriptor.status;
    if (r == 0)
        r = reply->magic == REPLY_MAGIC && atomic_load_explicit(&reply->answered, memory_order_acquire) == request
                ? reply->status
                : -EPROTO;
    if (r == 0)
        take_rows(engine, reply, n_tokens);
    stores_free_slot(store, slot);
    if (r == -EHOSTUNREACH || r == -ENOENT) {
        r = link_wait(link, clock_deadline_us(RETRY_US), &descriptor);
        return r < 0 ? r : 0;
    }
    return r < 0 ? r : 1;
}

int engine_fetch_block(struct engine *engine, struct run *run, uint32_t block, uint32_t n_tokens)
{
    uint64_t give_up = clock_deadline_us(engine->options.recovery_timeout_us);
    while (clock_now_us() < give_up) {
        int r = fetch_once(engine, run, block, n_tokens);
        if (r < 0)
            return r;
        atomic_fetch_add_explicit(&engine->progress, 1, memory_order_relaxed);
        if (r == 1)
            return 0;
    }
    return -ETIMEDOUT;
}

static const uint16_t *fetched_head(void *context, uint32_t layer, uint32_t kv_head)
{
    const struct engine *engine = context;
    const struct row_shape *shape = &engine->stores.shape;
    return engine->fetch_rows + ((size_t)layer * shape->n_kv_heads + kv_head) * layout_head_rows_bytes(shape) / 2;
}

/* Puts the first n_tokens of the fetched block into the exact set. */
static void put_exact(struct engine *engine, struct session *session, uint32_t block, uint32_t n_tokens,
                      uint32_t n_fetched)
{
    const struct row_shape *shape = &engine->stores.shape;
    size_t row = 2 * (size_t)shape->head_dim;
    uint16_t rows[shape->n_kv_heads * row];
    for (uint32_t layer = 0; layer < shape->n_layers; layer++)
        for (uint32_t token = 0; token < n_tokens; token++) {
            for (uint32_t head = 0; head < shape->n_kv_heads; head++)
                memcpy(rows + head * row,
                       engine->fetch_rows + (((size_t)layer * shape->n_kv_heads + head) * n_fetched + token) * row,
                       row * sizeof(*rows));
            session_put_rows(session, layer, block * LAYOUT_BLOCK_TOKENS + token, rows);
        }
}

int engine_rebuild(struct engine *engine, struct run *run, uint32_t n_rows)
{
    struct session *session = run->session;
    int r = session_reset(session, run->policy->codec);
    if (r < 0 || n_rows == 0)
        return r;
    /* as the next query, at n_rows, needs it */
    uint32_t n_old = exact_set_n_old_blocks(n_rows);
    for (uint32_t block = 0; block * LAYOUT_BLOCK_TOKENS < n_rows; block++) {
        uint32_t n = n_rows - block * LAYOUT_BLOCK_TOKENS;
        n = n < LAYOUT_BLOCK_TOKENS ? n : LAYOUT_BLOCK_TOKENS;
        r = engine_fetch_block(engine, run, block, n);
        if (r < 0)
            return r;
        if (block < n_old)
            r = key_cache_add(session->keys, engine->kernels, fetched_head, engine);
        if (r < 0)
            return r;
        if (block >= n_old || block == 0)
            put_exact(engine, session, block, block < n_old && n > LAYOUT_N_SINKS ? LAYOUT_N_SINKS : n, n);
    }
    session->n_rows = n_rows;
    return 0;
}
