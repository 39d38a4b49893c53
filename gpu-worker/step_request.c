/* step_request.c - what a store is asked for in a layer: one request for the whole half, written into a slot. */
#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "gpu-worker/payload.h"
#include "gpu-worker/step.h"

/* ---- how large it may get ---- */

static size_t max_owners(const struct step *step)
{
    return (size_t)step->limits.max_rows + (size_t)step->limits.max_decode * (step->shape.n_layers + 1);
}

static uint64_t whole_pages(uint64_t n_bytes)
{
    return (n_bytes + LAYOUT_PAGE_BYTES - 1) / LAYOUT_PAGE_BYTES * LAYOUT_PAGE_BYTES;
}

uint64_t step_request_bytes(const struct row_shape *shape, uint32_t n_heads, const struct step_limits *limits)
{
    enum { ALIGNMENT = 16 };
    uint64_t n_blocks = limits->n_ctx / LAYOUT_BLOCK_TOKENS + 2;
    uint64_t token = shape->n_kv_heads * layout_row_bytes(shape) + ALIGNMENT;
    uint64_t append = token + sizeof(struct append_entry) + sizeof(uint32_t) + ALIGNMENT;
    uint64_t per_head = sizeof(struct aggregate_item) + n_blocks * sizeof(uint64_t) + 6 * ALIGNMENT;
    uint64_t decode = (uint64_t)n_heads * (shape->head_dim + n_blocks + 1) * sizeof(float) +
                      shape->n_kv_heads * per_head + n_blocks * sizeof(struct block_handle) + 4 * ALIGNMENT;
    uint64_t weights = (uint64_t)limits->max_weights * sizeof(float);
    return whole_pages(LAYOUT_PAGE_BYTES + limits->max_rows * append +
                       (uint64_t)limits->max_decode * ((shape->n_layers + 1) * append + decode) + weights);
}

uint64_t step_reply_bytes(const struct row_shape *shape, uint32_t n_heads, const struct step_limits *limits)
{
    uint64_t partial = KERNELS_PARTIAL_FLOATS(shape->head_dim) * sizeof(float);
    uint64_t decode = (uint64_t)n_heads * LAYOUT_N_LANES * partial + shape->n_kv_heads * 16;
    uint64_t block = (uint64_t)shape->n_layers * shape->n_kv_heads * (layout_head_rows_bytes(shape) + 16); /* a fetch */
    uint64_t bytes = limits->max_decode * decode > block ? limits->max_decode * decode : block;
    return whole_pages(LAYOUT_PAGE_BYTES + bytes);
}

/* ---- which stores ---- */

static struct step_call *call_for(struct step *step, struct step_half *half, uint32_t store)
{
    for (uint32_t i = 0; i < half->n_calls; i++)
        if (half->calls[i].call.store == store)
            return &half->calls[i];
    struct step_call *call = &half->calls[half->n_calls];
    if (call->append_owner == NULL) {
        size_t n_items = (size_t)step->limits.max_decode * step->shape.n_kv_heads;
        call->append_owner = calloc(max_owners(step), sizeof(struct run *));
        call->item_row = calloc(n_items, sizeof(uint32_t));
        call->item_lanes = calloc(n_items, sizeof(uint32_t));
        call->item_result = calloc(n_items, sizeof(uint32_t));
        if (call->append_owner == NULL || call->item_row == NULL || call->item_lanes == NULL ||
            call->item_result == NULL)
            return NULL;
    }
    call->call = (struct call){.store = store};
    call->is_done = false;
    half->n_calls++;
    return call;
}

static bool asks_stores(const struct step *step, const struct step_row *row)
{
    return row->is_decode && row->selection.n_blocks > 0 && step->transport != TRANSPORT_DIRECT;
}

/* Lanes of a row's old blocks that live in a store. */
static uint32_t row_lanes(const struct step_row *row, uint32_t store)
{
    uint32_t lanes = 0;
    for (uint32_t lane = 0; lane < LAYOUT_N_LANES; lane++)
        if (row->selection.lane_first[lane] < row->selection.lane_first[lane + 1] && run_store(row->run, lane) == store)
            lanes |= 1u << lane;
    return lanes;
}

static bool commits_now(const struct step_half *half)
{
    return half->has_commits && half->first_layer == 0;
}

int step_plan(struct step *step, struct step_half *half)
{
    half->n_calls = 0;
    for (uint32_t i = half->first; i < half->end; i++) {
        const struct step_row *row = &step->rows[i];
        if (row->is_decode)
            memset(step->lane_partials + (size_t)row->decode_index * step->shape.n_kv_heads * LAYOUT_N_LANES, 0,
                   (size_t)step->shape.n_kv_heads * LAYOUT_N_LANES * sizeof(*step->lane_partials));
        if (row->run->error != 0)
            continue;
        if (call_for(step, half, run_store(row->run, row->position / LAYOUT_BLOCK_TOKENS)) == NULL)
            return -ENOMEM;
        for (uint32_t lane = 0; asks_stores(step, row) && lane < LAYOUT_N_LANES; lane++)
            if (row->selection.lane_first[lane] < row->selection.lane_first[lane + 1] &&
                call_for(step, half, run_store(row->run, lane)) == NULL)
                return -ENOMEM;
    }
    for (uint32_t i = 0; commits_now(half) && i < step->n_commits; i++) {
        const struct run *run = step->commits[i];
        if (run->error == 0 && call_for(step, half, run_store(run, (run->n_known - 1) / LAYOUT_BLOCK_TOKENS)) == NULL)
            return -ENOMEM;
    }
    return 0;
}

bool step_has_work(const struct step *step, const struct step_half *half, const struct step_call *call)
{
    for (uint32_t i = half->first; i < half->end; i++) {
        const struct step_row *row = &step->rows[i];
        if (row->run->error != 0)
            continue;
        if (run_store(row->run, row->position / LAYOUT_BLOCK_TOKENS) == call->call.store)
            return true;
        if (asks_stores(step, row) && row_lanes(row, call->call.store) != 0)
            return true;
    }
    for (uint32_t i = 0; commits_now(half) && i < step->n_commits; i++) {
        const struct run *run = step->commits[i];
        if (run->error == 0 && run_store(run, (run->n_known - 1) / LAYOUT_BLOCK_TOKENS) == call->call.store)
            return true;
    }
    return false;
}

/* ---- appends ---- */

/* Copies n_bytes into the payload. Offset, or -ENOSPC. */
static int64_t put(struct payload *payload, const void *bytes, uint64_t n_bytes)
{
    int64_t offset = payload_take(payload, n_bytes);
    if (offset >= 0)
        memcpy(payload_at(payload, (uint32_t)offset), bytes, n_bytes);
    return offset;
}

struct new_tokens {
    struct run *run;
    uint32_t position, n, layer;
    bool is_decode;
    const uint32_t *ids; /* NULL: none */
    const void *rows;    /* NULL: none */
};

static int put_append(const struct step *step, struct payload *payload, const struct new_tokens *tokens,
                      struct append_entry *entry)
{
    struct run *run = tokens->run;
    *entry = (struct append_entry){
        .session = run->session->id,
        .handle = run->request->blocks[tokens->position / LAYOUT_BLOCK_TOKENS],
        .layer = tokens->layer,
        .first_token = tokens->position % LAYOUT_BLOCK_TOKENS,
        .n_tokens = tokens->n,
    };
    if (tokens->ids != NULL) {
        int64_t offset = put(payload, tokens->ids, tokens->n * sizeof(*tokens->ids));
        if (offset < 0)
            return -ENOSPC;
        entry->ids_offset = (uint32_t)offset;
        entry->flags |= APPEND_IDS | (tokens->is_decode ? APPEND_DECODED : 0);
    }
    if (tokens->rows != NULL) {
        int64_t offset = put(payload, tokens->rows, tokens->n * step_token_bytes(step));
        if (offset < 0)
            return -ENOSPC;
        entry->rows_offset = (uint32_t)offset;
        entry->flags |= APPEND_ROWS;
    }
    return 0;
}

/* Rows i .. end - 1 of one run and block: one append. Deferred rows lie apart from each other: one row each. */
static uint32_t same_append(const struct step *step, const struct step_half *half, uint32_t i)
{
    const struct step_row *first = &step->rows[i];
    uint32_t end = i + 1;
    while (!half->is_deferred && end < half->end && step->rows[end].run == first->run &&
           step->rows[end].position / LAYOUT_BLOCK_TOKENS == first->position / LAYOUT_BLOCK_TOKENS)
        end++;
    return end;
}

static int put_appends(struct step *step, const struct step_half *half, struct payload *payload, struct step_call *call,
                       struct request_header *header)
{
    int64_t offset = payload_take(payload, max_owners(step) * sizeof(struct append_entry));
    if (offset < 0)
        return -ENOSPC;
    struct append_entry *entries = payload_at(payload, (uint32_t)offset);
    uint32_t n = 0;
    for (uint32_t layer = half->first_layer; layer < half->first_layer + half->n_layers; layer++)
        for (uint32_t i = half->first, end; i < half->end; i = end) {
            struct run *run = step->rows[i].run;
            uint32_t position = step->rows[i].position;
            end = same_append(step, half, i);
            if (run->error != 0 || run_store(run, position / LAYOUT_BLOCK_TOKENS) != call->call.store)
                continue;
            struct new_tokens tokens = {.run = run,
                                        .position = position,
                                        .n = end - i,
                                        .layer = layer,
                                        .is_decode = step->rows[i].is_decode,
                                        .ids = layer == 0 ? step->ids + i : NULL,
                                        .rows = step_host_row_bytes(step, half, layer, i)};
            int r = put_append(step, payload, &tokens, &entries[n]);
            if (r < 0)
                return r;
            call->append_owner[n++] = run;
        }
    for (uint32_t i = 0; commits_now(half) && i < step->n_commits; i++) {
        struct run *run = step->commits[i];
        uint32_t position = run->n_known - 1;
        if (run->error != 0 || run_store(run, position / LAYOUT_BLOCK_TOKENS) != call->call.store)
            continue;
        struct new_tokens tokens = {
            .run = run, .position = position, .n = 1, .is_decode = true, .ids = &run->ids[position]};
        int r = put_append(step, payload, &tokens, &entries[n]);
        if (r < 0)
            return r;
        call->append_owner[n++] = run;
    }
    call->n_appends = header->n_appends = n;
    header->appends_offset = (uint32_t)offset;
    return 0;
}

/* ---- aggregates ---- */

/* One row's share of a store: its lanes, and where their blocks are in the row's selection. */
struct share {
    const struct step *step;
    const struct step_row *row;
    uint32_t row_index, lanes, n_blocks;
    uint32_t first_block; /* in the request's table */
};

/* Copies the elements of the share's lanes out of an array over all of the row's blocks. */
static uint8_t *gather(const struct share *share, const void *from, size_t element_bytes, uint8_t *to)
{
    const struct step_selection *selection = &share->row->selection;
    for (uint32_t lane = 0; lane < LAYOUT_N_LANES; lane++) {
        if ((share->lanes & 1u << lane) == 0)
            continue;
        size_t n_bytes = (selection->lane_first[lane + 1] - selection->lane_first[lane]) * element_bytes;
        memcpy(to, (const uint8_t *)from + selection->lane_first[lane] * element_bytes, n_bytes);
        to += n_bytes;
    }
    return to;
}

static void put_handles(const struct share *share, struct block_handle *handles)
{
    const struct step_selection *selection = &share->row->selection;
    for (uint32_t lane = 0; lane < LAYOUT_N_LANES; lane++)
        for (uint32_t i = selection->lane_first[lane], block = lane;
             (share->lanes & 1u << lane) != 0 && i < selection->lane_first[lane + 1]; i++, block += LAYOUT_N_LANES)
            *handles++ = share->row->run->request->blocks[block];
}

/* Weights of the share's selected tokens: a stretch per lane. */
static int put_weights(const struct share *share, struct payload *payload, uint32_t head, struct aggregate_item *item)
{
    const struct step_selection *selection = &share->row->selection;
    const uint64_t *masks = selection->masks + (size_t)head * selection->n_blocks;
    uint32_t group = step_group(share->step), first[LAYOUT_N_LANES], n[LAYOUT_N_LANES], before = 0, total = 0;
    for (uint32_t lane = 0; lane < LAYOUT_N_LANES; lane++) {
        first[lane] = before;
        for (uint32_t i = selection->lane_first[lane]; i < selection->lane_first[lane + 1]; i++)
            before += (uint32_t)__builtin_popcountll(masks[i]);
        n[lane] = (share->lanes & 1u << lane) != 0 ? before - first[lane] : 0;
        total += n[lane];
    }
    int64_t at = payload_take(payload, (uint64_t)group * total * sizeof(float));
    if (at < 0)
        return -ENOSPC;
    float *to = payload_at(payload, (uint32_t)at);
    size_t stride = (size_t)selection->n_blocks * LAYOUT_BLOCK_TOKENS;
    for (uint32_t k = 0; k < group; k++)
        for (uint32_t lane = 0; lane < LAYOUT_N_LANES; lane++) {
            memcpy(to, selection->weights + ((size_t)head * group + k) * stride + first[lane], n[lane] * sizeof(*to));
            to += n[lane];
        }
    item->weights_offset = (uint32_t)at;
    item->n_weights = total;
    return 0;
}

static int put_item(const struct share *share, struct payload *payload, uint32_t head, struct aggregate_item *item)
{
    const struct step *step = share->step;
    const struct step_selection *selection = &share->row->selection;
    const struct policy_terms *terms = &share->row->run->policy.terms;
    const bool is_fixed = share->row->selection.is_fixed[head]; /* nothing was scored: no weights, no masses */
    const bool has_tail = terms->tail && !is_fixed, has_weights = terms->weights && !is_fixed;
    uint32_t group = step_group(step), d = step->shape.head_dim;
    size_t first_head = (size_t)share->row_index * step->network->shape.n_heads + head * group;
    int64_t q = put(payload, step->host_q + first_head * d, (uint64_t)group * d * sizeof(float));
    int64_t masks = payload_take(payload, share->n_blocks * sizeof(uint64_t));
    if (q < 0 || masks < 0)
        return -ENOSPC;
    gather(share, selection->masks + (size_t)head * selection->n_blocks, sizeof(uint64_t),
           payload_at(payload, (uint32_t)masks));
    uint64_t result = (uint64_t)__builtin_popcount(share->lanes) * group * KERNELS_PARTIAL_FLOATS(d) * sizeof(float);
    *item = (struct aggregate_item){
        .session = share->row->run->session->id,
        .kv_head = head,
        .mode = has_weights ? AGGREGATE_WEIGHTS : AGGREGATE_RESCORE,
        .n_queries = group,
        .q_offset = (uint32_t)q,
        .first_block = share->first_block,
        .n_blocks = share->n_blocks,
        .lanes = share->lanes,
        .masks_offset = (uint32_t)masks,
        .scale = step_scale(step),
        .result_offset = payload_result(payload, result),
    };
    if (has_tail || has_weights) {
        int64_t references = put(payload, selection->references + head * group, group * sizeof(float));
        if (references < 0)
            return -ENOSPC;
        item->references_offset = (uint32_t)references;
    }
    if (has_tail) {
        int64_t masses = payload_take(payload, (uint64_t)group * share->n_blocks * sizeof(float));
        if (masses < 0)
            return -ENOSPC;
        uint8_t *to = payload_at(payload, (uint32_t)masses);
        for (uint32_t k = 0; k < group; k++)
            to = gather(share, selection->masses + ((size_t)head * group + k) * selection->n_blocks, sizeof(float), to);
        item->masses_offset = (uint32_t)masses;
    }
    return has_weights ? put_weights(share, payload, head, item) : 0;
}

static int put_items(struct step *step, const struct step_half *half, struct payload *payload, struct step_call *call,
                     struct request_header *header)
{
    uint32_t n_kv = step->shape.n_kv_heads, n_blocks = 0, n_rows = 0;
    call->n_items = 0;
    for (uint32_t i = half->first; i < half->end; i++) {
        const struct step_row *row = &step->rows[i];
        if (row->run->error == 0 && asks_stores(step, row) && row_lanes(row, call->call.store) != 0) {
            n_blocks += row->selection.n_blocks;
            n_rows++;
        }
    }
    if (n_rows == 0)
        return 0;
    int64_t blocks_at = payload_take(payload, n_blocks * sizeof(struct block_handle));
    int64_t items_at = payload_take(payload, (uint64_t)n_rows * n_kv * sizeof(struct aggregate_item));
    if (blocks_at < 0 || items_at < 0)
        return -ENOSPC;
    struct aggregate_item *items = payload_at(payload, (uint32_t)items_at);
    n_blocks = 0;
    for (uint32_t i = half->first; i < half->end; i++) {
        const struct step_row *row = &step->rows[i];
        struct share share = {.step = step, .row = row, .row_index = i, .first_block = n_blocks};
        share.lanes = row->run->error == 0 && asks_stores(step, row) ? row_lanes(row, call->call.store) : 0;
        if (share.lanes == 0)
            continue;
        for (uint32_t lane = 0; lane < LAYOUT_N_LANES; lane++)
            if ((share.lanes & 1u << lane) != 0)
                share.n_blocks += row->selection.lane_first[lane + 1] - row->selection.lane_first[lane];
        put_handles(&share, (struct block_handle *)payload_at(payload, (uint32_t)blocks_at) + n_blocks);
        n_blocks += share.n_blocks;
        for (uint32_t head = 0; head < n_kv; head++) {
            struct aggregate_item *item = &items[call->n_items];
            int r = put_item(&share, payload, head, item);
            if (r < 0)
                return r;
            call->item_row[call->n_items] = i;
            call->item_lanes[call->n_items] = share.lanes;
            call->item_result[call->n_items++] = item->result_offset;
        }
    }
    header->n_items = call->n_items;
    header->n_blocks = n_blocks;
    header->items_offset = (uint32_t)items_at;
    header->blocks_offset = (uint32_t)blocks_at;
    return 0;
}

int step_write(struct step *step, struct step_half *half, struct step_call *call, const struct store *store,
               uint32_t slot, uint64_t request, uint32_t *ret_n_bytes)
{
    struct payload payload;
    payload_begin(&payload, stores_request(store, slot), store->request_bytes);
    struct request_header header = {.request = request, .layer = half->first_layer};
    int r = put_appends(step, half, &payload, call, &header);
    if (r == 0)
        r = put_items(step, half, &payload, call, &header);
    if (r < 0)
        return r;
    assert(payload.result_used <= store->reply_bytes);
    payload_finish(&payload, &header);
    *ret_n_bytes = payload.used;
    return 0;
}
