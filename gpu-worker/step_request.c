/* step_request.c - the stores' part of a layer: one request per store, sent, answered, and sent again when a store is lost. */
#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "gpu-worker/payload.h"
#include "gpu-worker/policy/exact_set.h"
#include "gpu-worker/step.h"

enum { RETRY_US = 2000 };

static size_t max_owners(const struct step_limits *limits)
{
    return (size_t)limits->max_rows + limits->max_decode;
}

static uint32_t whole_pages(uint64_t n_bytes)
{
    uint64_t pages = (n_bytes + LAYOUT_PAGE_BYTES - 1) / LAYOUT_PAGE_BYTES;
    return (uint32_t)(pages * LAYOUT_PAGE_BYTES);
}

uint32_t step_request_bytes(const struct row_shape *shape, uint32_t n_heads, const struct step_limits *limits)
{
    uint64_t row = shape->n_kv_heads * layout_row_bytes(shape) + sizeof(struct append_entry) + 64;
    uint64_t decode = (uint64_t)n_heads * shape->head_dim * sizeof(float) +
                      shape->n_kv_heads * (sizeof(struct aggregate_item) + 16) +
                      (limits->n_ctx / LAYOUT_BLOCK_TOKENS + 2) * sizeof(struct mask_run);
    return whole_pages(LAYOUT_PAGE_BYTES + max_owners(limits) * row + limits->max_decode * decode);
}

uint32_t step_reply_bytes(const struct row_shape *shape, uint32_t n_heads, const struct step_limits *limits)
{
    uint64_t partial = KERNELS_PARTIAL_FLOATS(shape->head_dim) * sizeof(float);
    uint64_t decode = (uint64_t)n_heads * LAYOUT_N_LANES * partial + shape->n_kv_heads * 16;
    uint64_t block = (uint64_t)shape->n_layers * shape->n_kv_heads * layout_head_rows_bytes(shape); /* a fetch */
    uint64_t bytes = limits->max_decode * decode > block ? limits->max_decode * decode : block;
    return whole_pages(LAYOUT_PAGE_BYTES + bytes);
}

/* ---- what a store is asked ---- */

static struct step_call *call_for(struct step *step, uint32_t store)
{
    for (uint32_t i = 0; i < step->n_calls; i++)
        if (step->calls[i].store == store)
            return &step->calls[i];
    struct step_call *call = &step->calls[step->n_calls];
    if (call->append_owner == NULL) {
        size_t n_items = (size_t)step->limits.max_decode * step->shape.n_kv_heads;
        call->append_owner = calloc(max_owners(&step->limits), sizeof(struct run *));
        call->item_row = calloc(n_items, sizeof(uint32_t));
        call->item_lanes = calloc(n_items, sizeof(uint32_t));
        call->item_result = calloc(n_items, sizeof(uint32_t));
        if (call->append_owner == NULL || call->item_row == NULL || call->item_lanes == NULL ||
            call->item_result == NULL)
            return NULL;
    }
    call->store = store;
    call->is_sent = call->is_done = false;
    call->retry_us = 0;
    step->n_calls++;
    return call;
}

/* Lanes of a row's selection that live in a store. */
static uint32_t row_lanes(const struct step_row *row, uint32_t store)
{
    uint32_t lanes = 0;
    for (uint32_t block = 0; block < row->n_old_blocks; block++)
        if (row->masks[block] != 0 && run_store(row->run, block) == store)
            lanes |= 1u << block % LAYOUT_N_LANES;
    return lanes;
}

static int plan(struct step *step, uint32_t layer)
{
    step->n_calls = 0;
    memset(step->lane_partials, 0,
           (size_t)step->n_decode * step->shape.n_kv_heads * LAYOUT_N_LANES * sizeof(*step->lane_partials));
    for (uint32_t i = 0; i < step->n_rows; i++) {
        const struct step_row *row = &step->rows[i];
        if (row->run->error != 0)
            continue;
        if (call_for(step, run_store(row->run, row->position / LAYOUT_BLOCK_TOKENS)) == NULL)
            return -ENOMEM;
        for (uint32_t block = 0; row->is_decode && step->transport == TRANSPORT_ROUTED && block < row->n_old_blocks;
             block++)
            if (row->masks[block] != 0 && call_for(step, run_store(row->run, block)) == NULL)
                return -ENOMEM;
    }
    for (uint32_t i = 0; layer == 0 && i < step->n_commits; i++) {
        const struct run *run = step->commits[i];
        if (run->error == 0 && call_for(step, run_store(run, (run->n_known - 1) / LAYOUT_BLOCK_TOKENS)) == NULL)
            return -ENOMEM;
    }
    return 0;
}

/* Rows i .. end - 1 of one run and block: one append. */
static uint32_t same_append(const struct step *step, uint32_t i)
{
    const struct step_row *first = &step->rows[i];
    uint32_t end = i + 1;
    while (end < step->n_rows && step->rows[end].run == first->run &&
           step->rows[end].position / LAYOUT_BLOCK_TOKENS == first->position / LAYOUT_BLOCK_TOKENS)
        end++;
    return end;
}

static int put_append(struct step *step, struct payload *payload, struct append_entry *entry, struct run *run,
                      uint32_t position, uint32_t n, const uint32_t *ids, const uint16_t *rows)
{
    uint32_t block = position / LAYOUT_BLOCK_TOKENS;
    *entry = (struct append_entry){
        .session = run->session->id,
        .handle = run->request->blocks[block],
        .first_token = position % LAYOUT_BLOCK_TOKENS,
        .n_tokens = n,
    };
    if (ids != NULL) {
        int64_t offset = payload_take(payload, n * sizeof(*ids));
        if (offset < 0)
            return (int)offset;
        memcpy(payload_at(payload, (uint32_t)offset), ids, n * sizeof(*ids));
        entry->ids_offset = (uint32_t)offset;
        entry->flags |= APPEND_IDS;
    }
    if (rows != NULL) {
        uint64_t bytes = n * step->shape.n_kv_heads * layout_row_bytes(&step->shape);
        int64_t offset = payload_take(payload, bytes);
        if (offset < 0)
            return (int)offset;
        memcpy(payload_at(payload, (uint32_t)offset), rows, bytes);
        entry->rows_offset = (uint32_t)offset;
        entry->flags |= APPEND_ROWS;
    }
    return 0;
}

static int put_appends(struct step *step, struct payload *payload, struct step_call *call, uint32_t layer,
                       struct request_header *header)
{
    int64_t offset = payload_take(payload, max_owners(&step->limits) * sizeof(struct append_entry));
    if (offset < 0)
        return (int)offset;
    struct append_entry *entries = payload_at(payload, (uint32_t)offset);
    size_t token = (size_t)step->shape.n_kv_heads * 2 * step->shape.head_dim;
    uint32_t n = 0;
    for (uint32_t i = 0, end; i < step->n_rows; i = end) {
        struct run *run = step->rows[i].run;
        uint32_t position = step->rows[i].position;
        end = same_append(step, i);
        if (run->error != 0 || run_store(run, position / LAYOUT_BLOCK_TOKENS) != call->store)
            continue;
        int r = put_append(step, payload, &entries[n], run, position, end - i, layer == 0 ? step->ids + i : NULL,
                           step->row_bytes + i * token);
        if (r < 0)
            return r;
        call->append_owner[n++] = run;
    }
    for (uint32_t i = 0; layer == 0 && i < step->n_commits; i++) {
        struct run *run = step->commits[i];
        uint32_t position = run->n_known - 1;
        if (run->error != 0 || run_store(run, position / LAYOUT_BLOCK_TOKENS) != call->store)
            continue;
        int r = put_append(step, payload, &entries[n], run, position, 1, &run->ids[position], NULL);
        if (r < 0)
            return r;
        call->append_owner[n++] = run;
    }
    call->n_appends = header->n_appends = n;
    header->appends_offset = (uint32_t)offset;
    return 0;
}

/* Runs of a row's selection in a store: by lane, then by block number. */
static uint32_t put_runs(const struct step_row *row, uint32_t store, struct mask_run *runs)
{
    uint32_t n = 0;
    for (uint32_t lane = 0; lane < LAYOUT_N_LANES; lane++)
        for (uint32_t block = lane; block < row->n_old_blocks; block += LAYOUT_N_LANES)
            if (row->masks[block] != 0 && run_store(row->run, block) == store)
                runs[n++] = (struct mask_run){.handle = row->run->request->blocks[block], .mask = row->masks[block]};
    return n;
}

static int put_items(struct step *step, struct payload *payload, struct step_call *call, struct request_header *header)
{
    uint32_t n_kv = step->shape.n_kv_heads, d = step->shape.head_dim, n_heads = step->network->shape.n_heads;
    uint32_t group = n_heads / n_kv, n_items = 0, n_runs = 0;
    call->n_items = 0;
    if (step->transport == TRANSPORT_DIRECT)
        return 0;
    uint64_t max_runs = 0;
    for (uint32_t i = 0; i < step->n_rows; i++)
        max_runs += step->rows[i].is_decode ? step->rows[i].n_old_blocks : 0;
    int64_t runs_at = payload_take(payload, max_runs * sizeof(struct mask_run));
    int64_t items_at = payload_take(payload, (uint64_t)step->n_decode * n_kv * sizeof(struct aggregate_item));
    if (runs_at < 0 || items_at < 0)
        return -ENOSPC;
    struct mask_run *runs = payload_at(payload, (uint32_t)runs_at);
    struct aggregate_item *items = payload_at(payload, (uint32_t)items_at);
    for (uint32_t i = 0; i < step->n_rows; i++) {
        const struct step_row *row = &step->rows[i];
        uint32_t lanes = row->is_decode && row->run->error == 0 ? row_lanes(row, call->store) : 0;
        if (lanes == 0)
            continue;
        int64_t q_at = payload_take(payload, (uint64_t)n_heads * d * sizeof(float));
        if (q_at < 0)
            return -ENOSPC;
        memcpy(payload_at(payload, (uint32_t)q_at), step->q + (size_t)i * n_heads * d,
               (size_t)n_heads * d * sizeof(float));
        uint32_t n = put_runs(row, call->store, runs + n_runs);
        uint64_t result = (uint64_t)__builtin_popcount(lanes) * group * KERNELS_PARTIAL_FLOATS(d) * sizeof(float);
        for (uint32_t head = 0; head < n_kv; head++, n_items++) {
            items[n_items] = (struct aggregate_item){
                .session = row->run->session->id,
                .kv_head = head,
                .mode = row->run->policy->mode,
                .n_queries = group,
                .q_offset = (uint32_t)q_at + head * group * d * (uint32_t)sizeof(float),
                .first_run = n_runs,
                .n_runs = n,
                .lanes = lanes,
                .scale = step_scale(step),
                .result_offset = payload_result(payload, result),
            };
            call->item_row[n_items] = i;
            call->item_lanes[n_items] = lanes;
            call->item_result[n_items] = items[n_items].result_offset;
        }
        n_runs += n;
    }
    call->n_items = header->n_items = n_items;
    header->n_runs = n_runs;
    header->items_offset = (uint32_t)items_at;
    header->runs_offset = (uint32_t)runs_at;
    return 0;
}

/* ---- sending ---- */

/* Sends a call if its store can take it now; otherwise it stays unsent and is tried again by step_collect(). */
static int try_send(struct step *step, struct step_call *call, uint32_t layer)
{
    struct link *link = step->link;
    struct store *store = stores_get(step->stores, call->store);
    if (store == NULL || !store->is_ready || clock_now_us() < call->retry_us)
        return 0;
    uint64_t request = link->next_request++;
    uint32_t slot;
    call->retry_us = clock_deadline_us(RETRY_US);
    if (stores_take_slot(store, request, &slot) < 0)
        return 0; /* all quarantined: one comes back, or the store does */
    struct payload payload;
    payload_begin(&payload, stores_request(store, slot), store->request_bytes);
    struct request_header header = {.request = request, .layer = layer};
    int r = put_appends(step, &payload, call, layer, &header);
    if (r == 0)
        r = put_items(step, &payload, call, &header);
    if (r == 0) {
        assert(payload.result_used <= store->reply_bytes);
        payload_finish(&payload, &header);
        r = link_send(link, store->route, request, slot, payload.used);
    }
    if (r < 0) {
        stores_free_slot(store, slot);
        return r == -EAGAIN || r == -ENOTCONN ? 0 : r;
    }
    call->is_sent = true;
    call->slot = slot;
    call->route = store->route;
    call->request = request;
    call->deadline_us = clock_deadline_us(link->request_timeout_us);
    return 0;
}

int step_send(struct step *step, uint32_t layer)
{
    int r = plan(step, layer);
    for (uint32_t i = 0; r == 0 && i < step->n_calls; i++)
        r = try_send(step, &step->calls[i], layer);
    return r;
}

/* ---- answers ---- */

static void take_partials(struct step *step, const struct step_call *call, const struct reply_header *reply)
{
    uint32_t n_kv = step->shape.n_kv_heads, group = step->network->shape.n_heads / n_kv;
    size_t partials = group * KERNELS_PARTIAL_FLOATS(step->shape.head_dim);
    for (uint32_t item = 0; item < call->n_items; item++) {
        const struct step_row *row = &step->rows[call->item_row[item]];
        const float *result = (const void *)((const uint8_t *)reply + call->item_result[item]);
        const float **lanes = step->lane_partials + ((size_t)row->decode_index * n_kv + item % n_kv) * LAYOUT_N_LANES;
        for (uint32_t lane = 0; lane < LAYOUT_N_LANES; lane++) {
            if ((call->item_lanes[item] & 1u << lane) == 0)
                continue;
            lanes[lane] = result;
            result += partials;
        }
    }
}

/* A refusal fails the run that the entry belongs to; the rest is sent again without it. */
static void refuse(struct step *step, struct step_call *call, int32_t status, uint32_t entry)
{
    uint32_t kind = entry >> 30, index = entry & 0x3fffffffu;
    struct run *run = NULL;
    if (kind == REPLY_ENTRY_APPEND && index < call->n_appends)
        run = call->append_owner[index];
    else if (kind == REPLY_ENTRY_AGGREGATE && index < call->n_items)
        run = step->rows[call->item_row[index]].run;
    if (run != NULL) {
        run_fail(run, status, "store %u refused %s of the session: %s", call->store,
                 kind == REPLY_ENTRY_APPEND ? "an append" : "an aggregate", strerror(-status));
        return;
    }
    for (uint32_t i = 0; i < call->n_appends; i++)
        run_fail(call->append_owner[i], status, "store %u refused a request: %s", call->store, strerror(-status));
    for (uint32_t i = 0; i < call->n_items; i++)
        run_fail(step->rows[call->item_row[i]].run, status, "store %u refused a request: %s", call->store,
                 strerror(-status));
}

static void take_answer(struct step *step, struct step_call *call, const struct descriptor *descriptor)
{
    struct store *store = stores_get(step->stores, call->store);
    const struct reply_header *reply = stores_reply(store, call->slot);
    if (descriptor->status == -EHOSTUNREACH || descriptor->status == -ENOENT) {
        /* not there yet, or not any more: the coordinator's StoreUp and the deadline decide */
        stores_free_slot(store, call->slot);
        call->is_sent = false;
        call->retry_us = clock_deadline_us(RETRY_US);
        return;
    }
    int32_t status = descriptor->status;
    uint32_t entry = 0;
    if (status == 0) {
        if (reply->magic != REPLY_MAGIC ||
            atomic_load_explicit(&reply->answered, memory_order_acquire) != call->request)
            status = -EPROTO;
        else {
            status = reply->status;
            entry = reply->entry;
        }
    }
    if (status == 0) {
        take_partials(step, call, reply);
        call->is_done = true; /* the slot is kept until the partials have been read */
        return;
    }
    stores_free_slot(store, call->slot);
    call->is_sent = false;
    call->retry_us = 0;
    refuse(step, call, status < 0 ? status : -EPROTO, entry);
}

/* Has a call still anything to ask, after runs have failed? */
static bool has_work(const struct step *step, const struct step_call *call, uint32_t layer)
{
    for (uint32_t i = 0; i < step->n_rows; i++) {
        const struct step_row *row = &step->rows[i];
        if (row->run->error != 0)
            continue;
        if (run_store(row->run, row->position / LAYOUT_BLOCK_TOKENS) == call->store)
            return true;
        if (row->is_decode && step->transport == TRANSPORT_ROUTED && row_lanes(row, call->store) != 0)
            return true;
    }
    for (uint32_t i = 0; layer == 0 && i < step->n_commits; i++) {
        const struct run *run = step->commits[i];
        if (run->error == 0 && run_store(run, (run->n_known - 1) / LAYOUT_BLOCK_TOKENS) == call->store)
            return true;
    }
    return false;
}

/* Brings unsent, lost and overdue calls forward; returns when the next of them is due. */
static int advance(struct step *step, uint32_t layer, uint64_t *ret_due_us, bool *ret_done)
{
    uint64_t due = CLOCK_NEVER, now = clock_now_us();
    bool done = true;
    for (uint32_t i = 0; i < step->n_calls; i++) {
        struct step_call *call = &step->calls[i];
        struct store *store = stores_get(step->stores, call->store);
        if (call->is_sent && store->route != call->route) {
            /* answered or not, the exchange it lay in is gone */
            call->is_sent = call->is_done = false;
            call->retry_us = 0;
        }
        if (call->is_done)
            continue;
        if (call->is_sent && now >= call->deadline_us) {
            stores_quarantine_slot(store, call->slot);
            call->is_sent = false;
            call->retry_us = 0;
        }
        if (!call->is_sent && !has_work(step, call, layer)) {
            call->is_done = true;
            continue;
        }
        if (!call->is_sent) {
            int r = try_send(step, call, layer);
            if (r < 0)
                return r;
        }
        done = false;
        uint64_t next = call->is_sent ? call->deadline_us : clock_deadline_us(RETRY_US);
        due = next < due ? next : due;
    }
    *ret_due_us = due;
    *ret_done = done;
    return 0;
}

int step_collect(struct step *step, uint32_t layer)
{
    uint64_t start = clock_now_us(), give_up = clock_deadline_us(step->link->recovery_timeout_us);
    for (;;) {
        uint64_t due;
        bool done;
        int r = advance(step, layer, &due, &done);
        if (r < 0)
            return r;
        if (done)
            break;
        if (clock_now_us() >= give_up)
            return -ETIMEDOUT;
        struct descriptor descriptor;
        r = link_wait(step->link, due < give_up ? due : give_up, &descriptor);
        if (r < 0)
            return r;
        for (uint32_t i = 0; r == 1 && i < step->n_calls; i++) {
            struct step_call *call = &step->calls[i];
            if (call->is_sent && !call->is_done && call->request == descriptor.request) {
                take_answer(step, call, &descriptor);
                break;
            }
        }
    }
    step->wait_us += clock_now_us() - start;
    return 0;
}

void step_release(struct step *step)
{
    for (uint32_t i = 0; i < step->n_calls; i++) {
        struct step_call *call = &step->calls[i];
        struct store *store = stores_get(step->stores, call->store);
        if (call->is_sent && store != NULL && store->route == call->route)
            stores_free_slot(store, call->slot);
        call->is_sent = false;
    }
}
