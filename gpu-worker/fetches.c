#include "gpu-worker/fetches.h"

#include <errno.h>

#include "common/clock.h"
#include "gpu-worker/payload.h"

enum { MOST_BLOCKS = 16 /* more would not be faster, and be copied later */ };

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

/* ---- sending ---- */

struct writing {
    const struct row_shape *shape;
    const struct fetch *fetch;
};

static int write_request(void *context, const struct store *store, uint32_t slot, uint64_t request,
                         uint32_t *ret_n_bytes)
{
    const struct writing *writing = context;
    const struct fetch *fetch = writing->fetch;
    const struct row_shape *shape = writing->shape;
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

/* ---- answers ---- */

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
        if (!fetches->all[i].is_freed && call_store(&fetches->all[i].call, fetches->stores) != NULL)
            n_out[fetches->all[i].call.store]++;
    for (uint32_t i = fetches->n_taken, end = end_of_window(fetches); i < end; i++) {
        struct call *call = &fetches->all[i].call;
        call_look(call, fetches->stores);
        if (call->state == CALL_UNSENT && n_out[call->store] < FETCHES_PER_STORE) {
            struct writing writing = {.shape = &fetches->stores->shape, .fetch = &fetches->all[i]};
            int r = call_send(call, fetches->stores, fetches->link, write_request, &writing);
            if (r < 0)
                return r;
        }
        if (call->state != CALL_UNSENT)
            n_out[call->store]++;
    }
    return 0;
}

static void take_descriptor(const struct fetches *fetches, const struct descriptor *descriptor)
{
    for (uint32_t i = fetches->n_taken, end = end_of_window(fetches); i < end; i++)
        if (fetches->all[i].call.state == CALL_SENT && fetches->all[i].call.request == descriptor->request) {
            call_take(&fetches->all[i].call, fetches->stores, descriptor);
            return;
        }
    if (fetches->other != NULL)
        fetches->other(fetches->context, descriptor);
}

int fetches_next(struct fetches *fetches, struct fetch **ret_fetch)
{
    int r = advance(fetches);
    if (r < 0)
        return r;
    struct fetch *fetch = &fetches->all[fetches->n_taken];
    if (fetch->call.state == CALL_ANSWERED) {
        fetches->n_taken++;
        fetches->give_up_us = 0;
        *ret_fetch = fetch;
        return 1;
    }
    if (fetches->give_up_us == 0)
        fetches->give_up_us = clock_deadline_us(fetches->link->recovery_timeout_us);
    if (clock_now_us() >= fetches->give_up_us)
        return -ETIMEDOUT;
    struct descriptor descriptor;
    r = call_wait(&fetch->call, fetches->stores, fetches->link, fetches->give_up_us, &descriptor);
    if (r == 1)
        take_descriptor(fetches, &descriptor);
    return r < 0 ? r : 0;
}

/* ---- rows ---- */

const uint8_t *fetches_rows(const struct fetches *fetches, const struct fetch *fetch)
{
    struct payload results = {.result_used = sizeof(struct reply_header)};
    const uint8_t *reply = (const uint8_t *)stores_reply(call_store(&fetch->call, fetches->stores), fetch->call.slot);
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
    call_free(&fetch->call, fetches->stores);
    fetch->is_freed = true;
    while (fetches->n_freed < fetches->n_taken && fetches->all[fetches->n_freed].is_freed)
        fetches->n_freed++;
}

void fetches_end(struct fetches *fetches)
{
    for (uint32_t i = fetches->n_freed, end = end_of_window(fetches); i < end; i++)
        call_free(&fetches->all[i].call, fetches->stores);
}
