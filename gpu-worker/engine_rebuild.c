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
    uint8_t *to = engine->fetch_rows;
    for (uint32_t i = 0; i < shape->n_layers * shape->n_kv_heads; i++) {
        uint32_t at = payload_result(&results, head_bytes(shape, n_tokens));
        memcpy(to, (const uint8_t *)reply + at, head_bytes(shape, n_tokens));
        to += head_bytes(shape, n_tokens);
    }
}

struct fetch {
    uint32_t store, slot;
    uint64_t route, request;
    bool by_ring;
};

/* 1: the store has answered, or its status says why not; 0: no answer, or another life of the store; negative: lost. */
static int wait_for_answer(struct engine *engine, const struct fetch *fetch, int32_t *ret_status)
{
    struct link *link = &engine->link;
    uint64_t deadline = clock_deadline_us(link->request_timeout_us);
    do {
        struct store *store = stores_get(&engine->stores, fetch->store);
        struct descriptor descriptor;
        int r;
        if (fetch->by_ring)
            r = link_wait_bell(link, &stores_ring(store)->replies, &stores_reply(store, fetch->slot)->answered,
                               fetch->request, deadline, &descriptor);
        else
            r = link_wait(link, deadline, &descriptor);
        if (r < 0)
            return r;
        store = stores_get(&engine->stores, fetch->store);
        if (store->route != fetch->route)
            return 0; /* its exchange is new */
        *ret_status = r == 1 && descriptor.request == fetch->request ? descriptor.status : 0;
        if (*ret_status < 0 || stores_is_answered(store, fetch->slot, fetch->request))
            return 1;
    } while (clock_now_us() < deadline);
    stores_quarantine_slot(stores_get(&engine->stores, fetch->store), fetch->slot);
    return 0;
}

static int wait_a_little(struct engine *engine)
{
    struct descriptor late;
    int r = link_wait(&engine->link, clock_deadline_us(RETRY_US), &late);
    return r < 0 ? r : 0;
}

/* One try. 1: fetched; 0: try again; negative: refused or lost. */
static int fetch_once(struct engine *engine, const struct run *run, uint32_t block, uint32_t n_tokens)
{
    struct link *link = &engine->link;
    struct fetch fetch = {.store = run_store(run, block), .request = link->next_request++};
    struct store *store = stores_get(&engine->stores, fetch.store);
    uint32_t n_bytes = 0;
    if (store == NULL || !store->is_ready || stores_take_slot(store, fetch.request, &fetch.slot) < 0)
        return wait_a_little(engine);
    fetch.route = store->route;
    fetch.by_ring = store->has_ring;
    int r = put_fetches(engine, run, store, fetch.slot, block, n_tokens, fetch.request, &n_bytes);
    if (r == 0 && fetch.by_ring)
        stores_post(store, fetch.slot, fetch.request, n_bytes);
    else if (r == 0)
        r = link_send(link, fetch.route, fetch.request, fetch.slot, n_bytes);
    if (r < 0) {
        stores_free_slot(store, fetch.slot);
        return r == -EAGAIN || r == -ENOTCONN ? wait_a_little(engine) : r;
    }
    int32_t status = 0;
    r = wait_for_answer(engine, &fetch, &status);
    if (r <= 0)
        return r;
    store = stores_get(&engine->stores, fetch.store);
    const struct reply_header *reply = stores_reply(store, fetch.slot);
    if (status == 0)
        status = reply->magic == REPLY_MAGIC ? reply->status : -EPROTO;
    if (status == 0)
        take_rows(engine, reply, n_tokens);
    stores_free_slot(store, fetch.slot);
    if (status == -EHOSTUNREACH || status == -ENOENT)
        return wait_a_little(engine);
    return status < 0 ? status : 1;
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

static const void *fetched_head(void *context, uint32_t layer, uint32_t kv_head)
{
    const struct engine *engine = context;
    const struct row_shape *shape = &engine->stores.shape;
    return engine->fetch_rows + ((size_t)layer * shape->n_kv_heads + kv_head) * layout_head_rows_bytes(shape);
}

/* Puts the first n_tokens of the fetched block into the exact set. */
static void put_exact(struct engine *engine, struct session *session, uint32_t block, uint32_t n_tokens,
                      uint32_t n_fetched)
{
    const struct row_shape *shape = &engine->stores.shape;
    size_t row = layout_row_bytes(shape), layer_bytes = shape->n_kv_heads * head_bytes(shape, n_fetched);
    if (engine->device_rows != engine->fetch_rows)
        engine->network->ops->device->to_device(engine->network->backend, engine->device_rows, engine->fetch_rows,
                                                shape->n_layers * layer_bytes);
    for (uint32_t layer = 0; layer < shape->n_layers; layer++)
        session_put_rows(session, layer, block * LAYOUT_BLOCK_TOKENS, n_tokens,
                         engine->device_rows + layer * layer_bytes, row, head_bytes(shape, n_fetched));
}

int engine_rebuild(struct engine *engine, struct run *run, uint32_t n_rows)
{
    struct session *session = run->session;
    int r = session_reset(session, &run->policy);
    if (r < 0 || n_rows == 0)
        return r;
    /* as the next query, at n_rows, needs it */
    uint32_t n_old = exact_set_n_old_blocks(n_rows, session->exact_tokens);
    for (uint32_t block = 0; block * LAYOUT_BLOCK_TOKENS < n_rows; block++) {
        uint32_t n = n_rows - block * LAYOUT_BLOCK_TOKENS;
        n = n < LAYOUT_BLOCK_TOKENS ? n : LAYOUT_BLOCK_TOKENS;
        r = engine_fetch_block(engine, run, block, n);
        if (r < 0)
            return r;
        if (block < n_old && run->policy.terms.fastgen <= 0) /* else once it is known which heads need keys */
            r = key_cache_add(session->keys, engine->kernels, fetched_head, engine);
        if (r < 0)
            return r;
        bool in_window = session_keeps(session, block * LAYOUT_BLOCK_TOKENS + LAYOUT_N_SINKS, n_rows);
        if (in_window || block == 0)
            put_exact(engine, session, block, !in_window && n > LAYOUT_N_SINKS ? LAYOUT_N_SINKS : n, n);
    }
    session->n_rows = session->n_touched = n_rows;
    return engine_device_wait(engine);
}
