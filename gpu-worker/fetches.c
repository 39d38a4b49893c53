#include "gpu-worker/fetches.h"

#include <errno.h>

#include "common/clock.h"
#include "gpu-worker/payload.h"

enum { RETRY_US = 2000, MOST_BLOCKS = 16 /* more would not be faster, and be copied later */ };

uint32_t fetches_most_blocks(const struct stores *stores, uint32_t n_layers)
{
    enum { ALIGNMENT = 16 };
    uint64_t n_heads = (uint64_t)n_layers * stores->shape.n_kv_heads;
    uint64_t by_reply =
        (stores->reply_bytes - sizeof(struct reply_header)) / n_heads / layout_head_rows_bytes(&stores->shape);
    uint64_t by_request =
        (stores->request_bytes - sizeof(struct request_header) - ALIGNMENT) / n_heads / sizeof(struct fetch_entry);
    uint64_t most = by_reply < by_request ? by_reply : by_request;
    return most < MOST_BLOCKS ? (uint32_t)most : MOST_BLOCKS;
}

void fetches_begin(struct fetches *fetches, struct stores *stores, struct link *link, struct fetch *all, uint32_t n)
{
    *fetches = (struct fetches){
        .stores = stores,
        .link = link,
        .all = all,
        .n = n,
    };
}

/* The store in whose exchange it lies; NULL: that exchange is gone. */
static struct store *store_of(const struct fetches *fetches, const struct fetch *fetch)
{
    struct store *store = stores_get(fetches->stores, fetch->store);
    return store != NULL && store->route == fetch->route ? store : NULL;
}

/* ---- sending ---- */

static int write_request(const struct fetches *fetches, const struct fetch *fetch, const struct store *store,
                         uint32_t slot, uint64_t request, uint32_t *ret_n_bytes)
{
    const struct row_shape *shape = &fetches->stores->shape;
    const uint32_t n_heads = fetch->n_layers * shape->n_kv_heads, n_entries = n_heads * fetch->n_blocks;
    struct payload payload;
    payload_begin(&payload, stores_request(store, slot), store->request_bytes);
    int64_t at = payload_take(&payload, (uint64_t)n_entries * sizeof(struct fetch_entry));
    if (at < 0)
        return (int)at;
    struct fetch_entry *entry = payload_at(&payload, (uint32_t)at);
    for (uint32_t head = 0; head < n_heads; head++) {
        uint32_t result = payload_result(&payload, fetch->n_tokens * layout_row_bytes(shape));
        for (uint32_t i = 0, left = fetch->n_tokens; i < fetch->n_blocks; i++, entry++) {
            uint32_t n_tokens = left < LAYOUT_BLOCK_TOKENS ? left : LAYOUT_BLOCK_TOKENS;
            *entry = (struct fetch_entry){
                .session = fetch->run->request->session,
                .handle = fetch->run->request->blocks[fetch->blocks[i]],
                .layer = fetch->first_layer + head / shape->n_kv_heads,
                .kv_head = head % shape->n_kv_heads,
                .n_tokens = n_tokens,
                .result_offset = result + i * (uint32_t)layout_head_rows_bytes(shape),
            };
            left -= n_tokens;
        }
    }
    if (payload.result_used > store->reply_bytes)
        return -ENOSPC;
    struct request_header header = {.request = request, .n_fetches = n_entries, .fetches_offset = (uint32_t)at};
    payload_finish(&payload, &header);
    *ret_n_bytes = payload.used;
    return 0;
}

/* Sends it if its store can take it now. */
static int try_send(const struct fetches *fetches, struct fetch *fetch)
{
    struct link *link = fetches->link;
    struct store *store = stores_get(fetches->stores, fetch->store);
    uint32_t slot, n_bytes = 0;
    if (store == NULL || !store->is_ready || (fetch->retry_us != 0 && clock_now_us() < fetch->retry_us))
        return 0;
    uint64_t request = link->next_request++;
    if (stores_take_slot(store, request, &slot) < 0) { /* all quarantined: one comes back, or the store does */
        fetch->retry_us = clock_deadline_us(RETRY_US);
        return 0;
    }
    int r = write_request(fetches, fetch, store, slot, request, &n_bytes);
    if (r == 0 && store->has_ring)
        stores_post(store, slot, request, n_bytes);
    else if (r == 0)
        r = link_send(link, store->route, request, slot, n_bytes);
    if (r < 0) {
        stores_free_slot(store, slot);
        fetch->retry_us = clock_deadline_us(RETRY_US);
        return r == -EAGAIN || r == -ENOTCONN ? 0 : r;
    }
    fetch->state = FETCH_SENT;
    fetch->by_ring = store->has_ring;
    fetch->slot = slot;
    fetch->route = store->route;
    fetch->request = request;
    fetch->deadline_us = clock_deadline_us(link->request_timeout_us);
    return 0;
}

/* ---- answers ---- */

/* `status`: what the descriptor says; 0: look at the reply, which is there. */
static void take_answer(const struct fetches *fetches, struct fetch *fetch, int32_t status)
{
    struct store *store = store_of(fetches, fetch);
    const struct reply_header *reply = stores_reply(store, fetch->slot);
    if (status == 0 && stores_is_answered(store, fetch->slot, fetch->request))
        status = reply->magic == REPLY_MAGIC ? reply->status : -EPROTO;
    else if (status == 0)
        status = -EPROTO;
    if (status == -EHOSTUNREACH || status == -ENOENT) {
        /* not there yet, or not any more: the coordinator's StoreUp and the deadline decide */
        stores_free_slot(store, fetch->slot);
        fetch->state = FETCH_UNSENT;
        fetch->retry_us = clock_deadline_us(RETRY_US);
        return;
    }
    fetch->state = FETCH_ANSWERED;
    fetch->status = status <= 0 ? status : -EPROTO;
}

/* How a fetch that is out stands now. */
static void look(const struct fetches *fetches, struct fetch *fetch)
{
    struct store *store = store_of(fetches, fetch);
    if (store == NULL) { /* answered or not, the exchange it lay in is gone */
        fetch->state = FETCH_UNSENT;
        fetch->retry_us = 0;
    } else if (fetch->state == FETCH_SENT && stores_is_answered(store, fetch->slot, fetch->request)) {
        take_answer(fetches, fetch, 0);
    } else if (fetch->state == FETCH_SENT && clock_now_us() >= fetch->deadline_us) {
        stores_quarantine_slot(store, fetch->slot);
        fetch->state = FETCH_UNSENT;
        fetch->retry_us = 0;
    }
}

/* Those that may be out: the next one and what its stores can have beside it. */
static uint32_t end_of_window(const struct fetches *fetches)
{
    const uint32_t most = FETCHES_PER_STORE * LAYOUT_MAX_STORES;
    return fetches->n - fetches->n_taken < most ? fetches->n : fetches->n_taken + most;
}

static int advance(const struct fetches *fetches)
{
    uint8_t n_out[STORES_MAX] = {0};
    for (uint32_t i = fetches->n_freed; i < fetches->n_taken; i++)
        if (fetches->all[i].state != FETCH_FREED && store_of(fetches, &fetches->all[i]) != NULL)
            n_out[fetches->all[i].store]++;
    for (uint32_t i = fetches->n_taken, end = end_of_window(fetches); i < end; i++) {
        struct fetch *fetch = &fetches->all[i];
        if (fetch->state != FETCH_UNSENT)
            look(fetches, fetch);
        if (fetch->state == FETCH_UNSENT && n_out[fetch->store] < FETCHES_PER_STORE) {
            int r = try_send(fetches, fetch);
            if (r < 0)
                return r;
        }
        if (fetch->state != FETCH_UNSENT)
            n_out[fetch->store]++;
    }
    return 0;
}

static void take_descriptor(const struct fetches *fetches, const struct descriptor *descriptor)
{
    for (uint32_t i = fetches->n_taken, end = end_of_window(fetches); i < end; i++) {
        struct fetch *fetch = &fetches->all[i];
        if (fetch->state == FETCH_SENT && fetch->request == descriptor->request) {
            if (store_of(fetches, fetch) != NULL)
                take_answer(fetches, fetch, descriptor->status);
            return;
        }
    }
    if (fetches->other != NULL)
        fetches->other(fetches->context, descriptor);
}

/* Waits until something may have happened to `fetch`. */
static int wait_for(const struct fetches *fetches, const struct fetch *fetch)
{
    struct link *link = fetches->link;
    uint64_t due = fetch->state == FETCH_SENT ? fetch->deadline_us : clock_deadline_us(RETRY_US);
    due = due < fetches->give_up_us ? due : fetches->give_up_us;
    struct descriptor descriptor;
    int r;
    if (fetch->state == FETCH_SENT && fetch->by_ring) {
        struct store *store = store_of(fetches, fetch);
        r = link_wait_bell(link, &stores_ring(store)->replies, &stores_reply(store, fetch->slot)->answered,
                           fetch->request, due, &descriptor);
    } else {
        r = link_wait(link, due, &descriptor);
    }
    if (r == 1)
        take_descriptor(fetches, &descriptor);
    return r < 0 ? r : 0;
}

int fetches_next(struct fetches *fetches, struct fetch **ret_fetch)
{
    int r = advance(fetches);
    if (r < 0)
        return r;
    struct fetch *fetch = &fetches->all[fetches->n_taken];
    if (fetch->state == FETCH_ANSWERED) {
        fetches->n_taken++;
        fetches->give_up_us = 0;
        *ret_fetch = fetch;
        return 1;
    }
    if (fetches->give_up_us == 0)
        fetches->give_up_us = clock_deadline_us(fetches->link->recovery_timeout_us);
    if (clock_now_us() >= fetches->give_up_us)
        return -ETIMEDOUT;
    return wait_for(fetches, fetch);
}

/* ---- rows ---- */

const uint8_t *fetches_rows(const struct fetches *fetches, const struct fetch *fetch)
{
    struct payload results = {.result_used = sizeof(struct reply_header)};
    const uint8_t *reply = (const uint8_t *)stores_reply(store_of(fetches, fetch), fetch->slot);
    return reply + payload_result(&results, 0);
}

size_t fetches_head_bytes(const struct fetches *fetches, const struct fetch *fetch)
{
    struct payload results = {0};
    payload_result(&results, fetch->n_tokens * layout_row_bytes(&fetches->stores->shape));
    return payload_result(&results, 0);
}

void fetches_free(struct fetches *fetches, struct fetch *fetch)
{
    struct store *store = store_of(fetches, fetch);
    if (store != NULL && fetch->state == FETCH_ANSWERED)
        stores_free_slot(store, fetch->slot);
    else if (store != NULL && fetch->state == FETCH_SENT)
        stores_quarantine_slot(store, fetch->slot);
    fetch->state = FETCH_FREED;
    while (fetches->n_freed < fetches->n_taken && fetches->all[fetches->n_freed].state == FETCH_FREED)
        fetches->n_freed++;
}

void fetches_end(struct fetches *fetches)
{
    for (uint32_t i = fetches->n_freed, end = end_of_window(fetches); i < end; i++)
        if (fetches->all[i].state != FETCH_UNSENT)
            fetches_free(fetches, &fetches->all[i]);
}
