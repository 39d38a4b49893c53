/* request.c - one request of an exchange slot, from its header to the reply's. */
#include "value-store/request.h"
#include "common/clock.h"
#include "value-store/shared_copy.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct serving {
    struct blocks *blocks;
    const uint8_t *request;
    uint8_t *reply;
    uint64_t reply_area_bytes;
    struct request_header header; /* copied and checked */
    struct request_result result;
};

static int refuse(struct serving *serving, uint32_t kind, uint32_t index, int status)
{
    serving->result.status = status;
    serving->result.entry = REPLY_ENTRY(kind, index);
    return status;
}

static bool table_ok(const struct request_header *header, uint32_t offset, uint32_t n, size_t entry_bytes)
{
    return n == 0 || shared_range_ok(offset, (uint64_t)n * entry_bytes, sizeof(*header), header->n_bytes);
}

static int read_header(struct serving *serving, const struct request_slot *slot)
{
    struct request_header *header = &serving->header;
    if (slot->n_bytes < sizeof(*header) || slot->n_bytes > slot->request_bytes)
        return -EINVAL;
    shared_copy(header, slot->request_area, sizeof(*header));
    if (header->magic != REQUEST_MAGIC || header->n_bytes != slot->n_bytes || header->request != slot->request)
        return -EINVAL;
    if (!table_ok(header, header->appends_offset, header->n_appends, sizeof(struct append_entry)) ||
        !table_ok(header, header->items_offset, header->n_items, sizeof(struct aggregate_item)) ||
        !table_ok(header, header->blocks_offset, header->n_blocks, sizeof(struct block_handle)) ||
        !table_ok(header, header->fetches_offset, header->n_fetches, sizeof(struct fetch_entry)))
        return -EINVAL;
    return 0;
}

/* ---- appends ---- */

static int append_one(struct serving *serving, const struct append_entry *entry)
{
    const struct row_shape *shape = blocks_shape(serving->blocks);
    uint64_t n_bytes = serving->header.n_bytes;
    uint32_t ids[LAYOUT_BLOCK_TOKENS];
    if ((entry->flags & ~(APPEND_IDS | APPEND_ROWS | APPEND_DECODED)) != 0 || entry->n_tokens > LAYOUT_BLOCK_TOKENS)
        return -EINVAL;
    struct blocks_append append = {
        .session = entry->session,
        .handle = entry->handle,
        .layer = entry->layer,
        .first_token = entry->first_token,
        .n_tokens = entry->n_tokens,
    };
    if (entry->flags & APPEND_IDS) {
        if (!shared_range_ok(entry->ids_offset, entry->n_tokens * sizeof(uint32_t), 0, n_bytes))
            return -EINVAL;
        shared_copy(ids, serving->request + entry->ids_offset, entry->n_tokens * sizeof(uint32_t));
        append.ids = ids;
        append.decoded = (entry->flags & APPEND_DECODED) != 0;
    }
    if (entry->flags & APPEND_ROWS) {
        uint64_t rows_bytes = entry->n_tokens * shape->n_kv_heads * layout_row_bytes(shape);
        if (!shared_range_ok(entry->rows_offset, rows_bytes, 0, n_bytes))
            return -EINVAL;
        append.rows = serving->request + entry->rows_offset;
    }
    return blocks_append(serving->blocks, &append);
}

static int serve_appends(struct serving *serving)
{
    const uint8_t *entries = serving->request + serving->header.appends_offset;
    for (uint32_t i = 0; i < serving->header.n_appends; i++) {
        struct append_entry entry;
        shared_copy(&entry, entries + (size_t)i * sizeof(entry), sizeof(entry));
        int result = append_one(serving, &entry);
        if (result < 0)
            return refuse(serving, REPLY_ENTRY_APPEND, i, result);
    }
    return 0;
}

/* ---- aggregates ---- */

static int serve_aggregates(struct serving *serving, struct aggregate *aggregate)
{
    struct aggregate_call call = {
        .blocks = serving->blocks,
        .request = serving->request,
        .request_bytes = serving->header.n_bytes,
        .reply = serving->reply,
        .reply_bytes = serving->reply_area_bytes,
        .layer = serving->header.layer,
        .n_items = serving->header.n_items,
        .n_blocks = serving->header.n_blocks,
        .items_offset = serving->header.items_offset,
        .blocks_offset = serving->header.blocks_offset,
    };
    struct aggregate_result done;
    uint32_t item;
    if (call.n_items == 0)
        return 0;
    int result = aggregate_run(aggregate, &call, &done, &item);
    if (result < 0)
        return refuse(serving, REPLY_ENTRY_AGGREGATE, item, result);
    serving->result.n_rows_read += done.n_rows;
    if (done.reply_bytes > serving->result.n_bytes)
        serving->result.n_bytes = (uint32_t)done.reply_bytes;
    return 0;
}

/* ---- fetches ---- */

enum {
    COPIES = 256,             /* checked, then copied together */
    SHARED_BYTES = 128 * 1024 /* of copies that one thread would do sooner than wake the others */
};

struct copy {
    uint8_t *to;
    const uint8_t *from;
    uint64_t n_bytes;
};

static int check_fetch(struct serving *serving, const struct fetch_entry *entry, struct copy *ret_copy)
{
    const struct row_shape *shape = blocks_shape(serving->blocks);
    if (entry->layer >= shape->n_layers || entry->kv_head >= shape->n_kv_heads || entry->n_tokens == 0 ||
        entry->first_token >= LAYOUT_BLOCK_TOKENS || entry->n_tokens > LAYOUT_BLOCK_TOKENS - entry->first_token)
        return -EINVAL;
    uint64_t row_bytes = layout_row_bytes(shape);
    uint64_t n_bytes = entry->n_tokens * row_bytes;
    if (!shared_range_ok(entry->result_offset, n_bytes, sizeof(struct reply_header), serving->reply_area_bytes))
        return -EINVAL;
    struct blocks_view view;
    int result = blocks_find(serving->blocks, entry->session, entry->handle, &view);
    if (result < 0)
        return result;
    if (entry->first_token + entry->n_tokens > blocks_n_rows(&view, entry->layer))
        return -ENODATA;
    const uint8_t *rows = blocks_head_rows(serving->blocks, &view, entry->layer, entry->kv_head);
    *ret_copy = (struct copy){
        .to = serving->reply + entry->result_offset, .from = rows + entry->first_token * row_bytes, .n_bytes = n_bytes};
    serving->result.n_rows_read += entry->n_tokens;
    if (entry->result_offset + n_bytes > serving->result.n_bytes)
        serving->result.n_bytes = (uint32_t)(entry->result_offset + n_bytes);
    return 0;
}

static void copy_one(void *context, uint32_t item, uint32_t thread)
{
    (void)thread;
    const struct copy *copy = (const struct copy *)context + item;
    memcpy(copy->to, copy->from, copy->n_bytes);
}

static int serve_fetches(struct serving *serving, struct pool *pool)
{
    const uint8_t *entries = serving->request + serving->header.fetches_offset;
    struct copy copies[COPIES];
    uint64_t n_bytes = 0;
    uint32_t n = 0;
    for (uint32_t i = 0; i < serving->header.n_fetches; i++) {
        struct fetch_entry entry;
        shared_copy(&entry, entries + (size_t)i * sizeof(entry), sizeof(entry));
        int result = check_fetch(serving, &entry, &copies[n]);
        if (result < 0)
            return refuse(serving, REPLY_ENTRY_FETCH, i, result);
        n_bytes += copies[n++].n_bytes;
        if (n < COPIES && i + 1 < serving->header.n_fetches)
            continue;
        pool_run(n_bytes < SHARED_BYTES ? NULL : pool, n, copy_one, copies);
        n = 0;
        n_bytes = 0;
    }
    return 0;
}

/* ---- the whole ---- */

static void write_reply(const struct serving *serving, uint64_t request, uint64_t started_us)
{
    const struct request_result *result = &serving->result;
    uint64_t service_us = clock_now_us() - started_us;
    struct reply_header *reply = (struct reply_header *)(void *)serving->reply;
    reply->magic = REPLY_MAGIC;
    reply->status = result->status;
    reply->entry = result->entry;
    reply->n_bytes = result->n_bytes;
    reply->service_us = service_us > UINT32_MAX ? UINT32_MAX : (uint32_t)service_us;
    reply->n_rows_read = result->n_rows_read > UINT32_MAX ? UINT32_MAX : (uint32_t)result->n_rows_read;
    atomic_store_explicit(&reply->answered, request, memory_order_release);
}

void request_serve(struct blocks *blocks, struct aggregate *aggregate, const struct request_slot *slot,
                   struct request_result *ret_result)
{
    uint64_t started_us = clock_now_us();
    struct serving serving = {
        .blocks = blocks,
        .request = slot->request_area,
        .reply = slot->reply_area,
        .reply_area_bytes = slot->reply_bytes,
        .result = {.n_bytes = sizeof(struct reply_header)},
    };
    int result = read_header(&serving, slot);
    if (result < 0)
        refuse(&serving, REPLY_ENTRY_NONE, 0, result);
    if (result == 0)
        result = serve_appends(&serving);
    if (result == 0)
        result = serve_aggregates(&serving, aggregate);
    if (result == 0)
        result = serve_fetches(&serving, aggregate_pool(aggregate));
    if (result < 0)
        serving.result.n_bytes = sizeof(struct reply_header);
    write_reply(&serving, slot->request, started_us);
    *ret_result = serving.result;
}
