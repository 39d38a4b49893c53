#include "gpu-worker/step.h"

#include <assert.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- shapes ---- */

uint32_t step_group(const struct step *step)
{
    return step->network->shape.n_heads / step->shape.n_kv_heads;
}

float step_scale(const struct step *step)
{
    return 1.0f / sqrtf((float)step->shape.head_dim);
}

enum kernels_rows step_codec(const struct step *step)
{
    return (enum kernels_rows)step->shape.codec;
}
static_assert((int)KERNELS_ROWS_F16 == (int)ROW_CODEC_F16 && (int)KERNELS_ROWS_Q8_0 == (int)ROW_CODEC_Q8_0,
              "kernels know rows by the numbers that the layout gives them");

size_t step_token_bytes(const struct step *step)
{
    return step->shape.n_kv_heads * layout_row_bytes(&step->shape);
}

uint8_t *step_row_bytes(const struct step *step, const struct step_half *half, uint32_t layer, uint32_t row)
{
    if (!half->is_deferred)
        return step->row_bytes + row * step_token_bytes(step);
    size_t index = (size_t)layer * step->limits.max_decode + step->rows[row].decode_index;
    return step->deferred_rows + index * step_token_bytes(step);
}

const uint8_t *step_host_row_bytes(const struct step *step, const struct step_half *half, uint32_t layer, uint32_t row)
{
    const uint8_t *device = half->is_deferred ? step->deferred_rows : step->row_bytes;
    const uint8_t *host = half->is_deferred ? step->host_deferred_rows : step->host_row_bytes;
    return host + (step_row_bytes(step, half, layer, row) - device);
}

int step_make_room(struct step *step, size_t n_pieces)
{
    if (n_pieces <= step->pieces_size)
        return 0;
    size_t size = n_pieces + n_pieces / 2;
    struct backend_piece *pieces = calloc(size, sizeof(*pieces));
    if (pieces == NULL)
        return -ENOMEM;
    free(step->pieces);
    step->pieces = pieces;
    step->pieces_size = size;
    return 0;
}

/* ---- life ---- */

struct step *step_free(struct step *step)
{
    if (step == NULL)
        return NULL;
    const struct backend_ops *ops = step->network->ops;
    void *const device[] = {step->x,         step->h,
                            step->q,         step->attention,
                            step->k,         step->v,
                            step->gate,      step->up,
                            step->row_bytes, step->deferred_rows,
                            step->logits,    step->exact_partials,
                            step->tile_q,    step->tile_partials};
    void *const host[] = {step->host_q, step->host_row_bytes, step->host_deferred_rows, step->host_logits};
    for (size_t i = 0; i < sizeof(device) / sizeof(device[0]); i++)
        if (device[i] != NULL)
            ops->free(step->network->backend, device[i]);
    for (size_t i = 0; ops->device != NULL && i < sizeof(host) / sizeof(host[0]); i++)
        step_host_free(step, host[i]);
    step_host_free(step, step->direct_partials);
    step_host_free(step, step->chosen);
    for (uint32_t h = 0; h < STEP_MAX_HALVES; h++) {
        struct step_call *calls = step->halves[h].calls;
        for (uint32_t i = 0; calls != NULL && i < STORES_MAX; i++) {
            free(calls[i].append_owner);
            free(calls[i].item_row);
            free(calls[i].item_lanes);
            free(calls[i].item_result);
        }
        free(calls);
    }
    step_select_free(step);
    free(step->rows);
    free(step->commits);
    free(step->pieces);
    free(step->items);
    free(step->merges);
    free(step->fetches);
    free(step->fetch_blocks);
    free(step->changes);
    free(step->ids);
    free(step->positions);
    free(step->lane_partials);
    free(step);
    return NULL;
}

void *step_host_alloc(const struct step *step, size_t n_bytes)
{
    const struct backend_ops *ops = step->network->ops;
    return ops->device == NULL ? ops->alloc(step->network->backend, n_bytes)
                               : ops->device->host_alloc(step->network->backend, n_bytes);
}

void step_host_free(const struct step *step, void *memory)
{
    const struct backend_ops *ops = step->network->ops;
    if (memory != NULL && ops->device == NULL)
        ops->free(step->network->backend, memory);
    else if (memory != NULL)
        ops->device->host_free(step->network->backend, memory);
}

static int allocate_device(struct step *step)
{
    const struct model_shape *shape = &step->network->shape;
    const struct backend_ops *ops = step->network->ops;
    struct backend *backend = step->network->backend;
    size_t T = step->limits.max_rows, d = shape->head_dim, partial = KERNELS_PARTIAL_FLOATS(d);
    size_t tile = LAYOUT_BLOCK_TOKENS * (size_t)shape->n_heads; /* queries of a prefill tile, all KV heads */
    if (ops->device != NULL)
        tile = 0;
    const struct {
        void *memory; /* of a pointer */
        size_t n_bytes;
        void *host; /* of a pointer to the host's copy, or NULL */
    } parts[] = {
        {&step->x, T * shape->n_embd * 4, NULL},
        {&step->h, T * shape->n_embd * 4, NULL},
        {&step->q, T * shape->n_heads * d * 4, &step->host_q},
        {&step->attention, T * shape->n_heads * d * 4, NULL},
        {&step->k, T * shape->n_kv_heads * d * 4, NULL},
        {&step->v, T * shape->n_kv_heads * d * 4, NULL},
        {&step->gate, T * shape->n_ff * 4, NULL},
        {&step->up, T * shape->n_ff * 4, NULL},
        {&step->row_bytes, T * step_token_bytes(step), &step->host_row_bytes},
        {&step->deferred_rows, (size_t)shape->n_layers * step->limits.max_decode * step_token_bytes(step),
         &step->host_deferred_rows},
        {&step->logits, (size_t)step->limits.max_decode * shape->n_vocab * 4, &step->host_logits},
        {&step->exact_partials, (size_t)step->limits.max_decode * shape->n_heads * partial * 4, NULL},
        {&step->tile_q, tile * d * 4, NULL},
        {&step->tile_partials, (1 + LAYOUT_N_LANES) * tile * partial * 4, NULL},
    };
    for (size_t i = 0; i < sizeof(parts) / sizeof(parts[0]); i++) {
        if (parts[i].n_bytes == 0)
            continue;
        void *memory = ops->alloc(backend, parts[i].n_bytes);
        if (memory == NULL)
            return -ENOMEM;
        memcpy(parts[i].memory, &memory, sizeof(memory));
        if (parts[i].host == NULL)
            continue;
        if (ops->device != NULL)
            memory = step_host_alloc(step, parts[i].n_bytes);
        if (memory == NULL)
            return -ENOMEM;
        memcpy(parts[i].host, &memory, sizeof(memory));
    }
    if (ops->device != NULL && ops->device->sample != NULL) {
        step->chosen = step_host_alloc(step, step->limits.max_decode * sizeof(*step->chosen));
        if (step->chosen == NULL)
            return -ENOMEM;
    }
    if (step->transport != TRANSPORT_DIRECT)
        return 0;
    size_t partials = (size_t)step->limits.max_decode * shape->n_heads * LAYOUT_N_LANES * partial;
    step->direct_partials = step_host_alloc(step, partials * sizeof(float));
    return step->direct_partials == NULL ? -ENOMEM : 0;
}

static int allocate_host(struct step *step)
{
    size_t max_rows = step->limits.max_rows, max_decode = step->limits.max_decode, n_kv = step->shape.n_kv_heads;
    size_t tile_items = n_kv * (1 + LAYOUT_N_LANES), decode_items = max_decode * n_kv;
    step->rows = calloc(max_rows, sizeof(*step->rows));
    step->commits = calloc(max_decode, sizeof(struct run *));
    step->ids = calloc(max_rows, sizeof(*step->ids));
    step->positions = calloc(max_rows, sizeof(*step->positions));
    step->items = calloc(tile_items > decode_items ? tile_items : decode_items, sizeof(*step->items));
    step->lane_partials = calloc(max_decode * n_kv * LAYOUT_N_LANES, sizeof(*step->lane_partials));
    step->merges = calloc(decode_items, sizeof(*step->merges));
    for (uint32_t h = 0; h < STEP_MAX_HALVES; h++) {
        step->halves[h].calls = calloc(STORES_MAX, sizeof(struct step_call));
        if (step->halves[h].calls == NULL)
            return -ENOMEM;
    }
    if (step->rows == NULL || step->commits == NULL || step->ids == NULL || step->positions == NULL ||
        step->items == NULL || step->lane_partials == NULL || step->merges == NULL)
        return -ENOMEM;
    return step_select_new(step);
}

int step_new(struct network *network, const struct kernels *kernels, struct stores *stores, struct link *link,
             struct pool *pool, enum transport transport, const struct step_limits *limits, struct step **ret_step)
{
    struct step *step = calloc(1, sizeof(*step));
    if (step == NULL)
        return -ENOMEM;
    step->network = network;
    step->kernels = kernels;
    step->stores = stores;
    step->link = link;
    step->pool = pool;
    step->transport = transport;
    step->limits = *limits;
    step->shape = stores->shape;
    if (allocate_device(step) < 0 || allocate_host(step) < 0) {
        step_free(step);
        return -ENOMEM;
    }
    *ret_step = step;
    return 0;
}

/* ---- the batch ---- */

void step_clear(struct step *step)
{
    step->n_rows = step->n_decode = step->n_logits = step->n_commits = 0;
    step_select_clear(step);
    step->wait_us = step->select_us = step->attention_us = 0;
}

bool step_add_row(struct step *step, struct run *run, uint32_t position, bool is_decode, bool wants_logits)
{
    if (step->n_rows == step->limits.max_rows || (is_decode && step->n_decode == step->limits.max_decode) ||
        (wants_logits && step->n_logits == step->limits.max_decode))
        return false;
    assert(position < run->n_known);
    struct step_row *row = &step->rows[step->n_rows];
    *row = (struct step_row){
        .run = run,
        .position = position,
        .is_decode = is_decode,
        .wants_logits = wants_logits,
        .decode_index = is_decode ? step->n_decode : 0,
        .logits_index = wants_logits ? step->n_logits : 0,
    };
    if (is_decode && !step_select_begin(step, row)) {
        run_fail(run, -ENOMEM, "no memory to score the session's keys");
        return false;
    }
    step->n_rows++;
    step->n_decode += is_decode;
    step->n_logits += wants_logits;
    return true;
}

bool step_add_commit(struct step *step, struct run *run)
{
    if (step->n_commits == step->limits.max_decode)
        return false;
    step->commits[step->n_commits++] = run;
    return true;
}

/* Whole runs, about as many rows in each half; one half where there is nothing to overlap. */
static void cut(struct step *step)
{
    uint32_t middle = step->n_rows;
    if (step->limits.max_halves > 1 && step->n_decode > 1)
        for (uint32_t i = 1; i < step->n_rows; i++)
            if (step->rows[i].run != step->rows[i - 1].run && i >= step->n_rows / 2) {
                middle = i;
                break;
            }
    step->n_halves = middle < step->n_rows ? 2 : 1;
    for (uint32_t h = 0; h < step->n_halves; h++) {
        struct step_half *half = &step->halves[h];
        half->first = h == 0 ? 0 : middle;
        half->end = h + 1 == step->n_halves ? step->n_rows : middle;
        half->has_commits = h == 0 && step->n_commits > 0;
        half->is_journaled = half->is_waiting = half->keeps_slots = false;
        half->n_calls = 0;
        half->is_deferred = half->end > half->first;
        for (uint32_t i = half->first; i < half->end; i++)
            if (!step->rows[i].is_decode || step->rows[i].selection.n_blocks > 0)
                half->is_deferred = false;
    }
}

/* ---- a layer ---- */

/* New rows that stay in the exact set once the run's last row of this step has been computed. */
static void keep_rows(struct step *step, const struct step_half *half, uint32_t layer)
{
    for (uint32_t i = half->first, end; i < half->end; i = end) {
        struct run *run = step->rows[i].run;
        for (end = i; end < half->end && step->rows[end].run == run; end++)
            ;
        uint32_t last = step->rows[end - 1].position;
        for (uint32_t k = i, n; k < end; k += n) { /* sinks, then those of the window */
            bool is_kept = session_keeps(run->session, step->rows[k].position, last);
            for (n = 1; k + n < end && session_keeps(run->session, step->rows[k + n].position, last) == is_kept; n++)
                ;
            if (is_kept)
                session_put_rows(run->session, layer, step->rows[k].position, n, step_row_bytes(step, half, layer, k),
                                 step_token_bytes(step), layout_row_bytes(&step->shape));
        }
    }
}

static void encode_rows(struct step *step, const struct step_half *half, uint32_t layer)
{
    const struct backend_ops *ops = step->network->ops;
    size_t token = (size_t)step->shape.n_kv_heads * step->shape.head_dim;
    if (half->first == half->end)
        return;
    /* deferred rows of one layer lie together: every row is a decode row */
    ops->encode_rows(step->network->backend, step->k + half->first * token, step->v + half->first * token,
                     half->end - half->first, step->shape.n_kv_heads, step->shape.head_dim, step_codec(step),
                     step_row_bytes(step, half, layer, half->first));
}

/* What requests to the stores are written from: of decode rows the queries, of all rows what is appended. */
static void copy_to_host(struct step *step, const struct step_half *half, uint32_t layer)
{
    const struct network *network = step->network;
    const struct backend_device_ops *device = network->ops->device;
    size_t queries = (size_t)network->shape.n_heads * step->shape.head_dim;
    if (device == NULL || half->first == half->end)
        return;
    const uint8_t *rows = step_row_bytes(step, half, layer, half->first);
    size_t offset = (size_t)(rows - (half->is_deferred ? step->deferred_rows : step->row_bytes));
    device->to_host(network->backend, (half->is_deferred ? step->host_deferred_rows : step->host_row_bytes) + offset,
                    rows, (half->end - half->first) * step_token_bytes(step));
    for (uint32_t i = half->first, n; i < half->end; i += n) {
        for (n = 1; i + n < half->end && step->rows[i + n].is_decode == step->rows[i].is_decode; n++)
            ;
        if (step->rows[i].is_decode && !half->is_deferred)
            device->to_host(network->backend, step->host_q + i * queries, step->q + i * queries,
                            n * queries * sizeof(float));
    }
}

/* The device is done with the half's layer; partials of the last one have been read, too. */
static int wait_for_device(struct step *step, struct step_half *half)
{
    int r = backend_wait(step->network->ops, step->network->backend);
    if (r == 0 && half->keeps_slots)
        step_release(step, half);
    half->keeps_slots = false;
    return r;
}

/* What follows, up to the next wait, is asked for alike step after step. */
static void begin_part(const struct step *step, const struct step_half *half, uint32_t layer)
{
    const struct backend_device_ops *device = step->network->ops->device;
    if (device != NULL)
        device->part(step->network->backend, 1 + STEP_MAX_HALVES * layer + (uint32_t)(half - step->halves));
}

/* A half's layer up to its requests to the stores. */
static int run_before(struct step *step, struct step_half *half, uint32_t layer)
{
    const struct network *network = step->network;
    const struct network_layer *weights = &network->layers[layer];
    const struct backend_ops *ops = network->ops;
    struct backend *backend = network->backend;
    const struct model_shape *shape = &network->shape;
    uint32_t first = half->first, T = half->end - half->first;
    float *x = step->x + (size_t)first * shape->n_embd, *h = step->h + (size_t)first * shape->n_embd;
    float *q = step->q + (size_t)first * shape->n_heads * shape->head_dim;
    float *k = step->k + (size_t)first * shape->n_kv_heads * shape->head_dim;
    float *v = step->v + (size_t)first * shape->n_kv_heads * shape->head_dim;

    ops->rms_norm(backend, x, T, shape->n_embd, weights->attn_norm, shape->rms_eps, h);
    const struct weight *const qkv[] = {weights->attn_q, weights->attn_k, weights->attn_v};
    ops->matmul(backend, qkv, 3, h, T, (float *const[]){q, k, v});
    ops->rope(backend, q, T, shape->n_heads, shape->head_dim, step->positions + first, &network->rope);
    ops->rope(backend, k, T, shape->n_kv_heads, shape->head_dim, step->positions + first, &network->rope);
    encode_rows(step, half, layer);
    keep_rows(step, half, layer);
    int r = step_exact(step, half, layer);
    if (r < 0)
        return r;
    step_select(step, half, layer);
    copy_to_host(step, half, layer);
    if (!half->is_deferred || layer == 0) {
        r = wait_for_device(step, half);
        if (r < 0)
            return r;
        step_select_count(step, half, layer);
        r = step_send(step, half, layer, 1);
    }
    if (r == 0 && step->transport == TRANSPORT_DIRECT)
        step_direct(step, half, layer);
    return r;
}

struct journal_listener {
    void (*tell)(void *context, uint32_t first, uint32_t end);
    void *context;
};

static void is_journaled(struct step_half *half, const struct journal_listener *listener)
{
    if (half->is_journaled)
        return;
    half->is_journaled = true;
    listener->tell(listener->context, half->first, half->end);
}

/* The answers of a layer; of a deferred half only those that have come. */
static int take_answers(struct step *step, struct step_half *half, const struct journal_listener *listener)
{
    bool done = true;
    int r = 0;
    if (!half->is_waiting)
        return 0;
    if (half->is_deferred)
        r = step_poll(step, half, &done);
    else
        r = step_collect(step, half);
    if (r < 0 || !done)
        return r;
    if (!half->is_deferred)
        step_merge(step, half);
    if (step->network->ops->device != NULL && !half->is_deferred)
        half->keeps_slots = true; /* until the device has read what lies there */
    else
        step_release(step, half);
    is_journaled(half, listener);
    return 0;
}

/* And from the answers on. */
static int run_after(struct step *step, struct step_half *half, uint32_t layer, const struct journal_listener *listener)
{
    const struct network *network = step->network;
    const struct model_shape *shape = &network->shape;
    uint32_t first = half->first, T = half->end - half->first;
    float *x = step->x + (size_t)first * shape->n_embd, *h = step->h + (size_t)first * shape->n_embd;
    float *gate = step->gate + (size_t)first * shape->n_ff, *up = step->up + (size_t)first * shape->n_ff;

    begin_part(step, half, layer);
    if (half->is_deferred)
        step_merge(step, half); /* nothing but the exact set */
    int r = take_answers(step, half, listener);
    if (r == 0)
        r = step_prefill_attention(step, half, layer);
    if (r < 0)
        return r;
    network_after_attention(network, layer, step->attention + (size_t)first * shape->n_heads * shape->head_dim, T, x, h,
                            gate, up);
    return 0;
}

/* ---- all layers ---- */

/* The rest of what a deferred half has to append goes out; the first part has long been answered. */
static int send_deferred(struct step *step, struct step_half *half, const struct journal_listener *listener)
{
    int r = half->is_waiting ? step_collect(step, half) : 0;
    if (r == 0)
        r = wait_for_device(step, half); /* the rows are the host's */
    if (r < 0)
        return r;
    step_release(step, half);
    is_journaled(half, listener);
    return step->shape.n_layers > 1 ? step_send(step, half, 1, step->shape.n_layers - 1) : 0;
}

static bool is_abandoned(const struct step *step)
{
    for (uint32_t i = 0; i < step->n_rows; i++)
        if (step->rows[i].run->error == 0)
            return false;
    return true;
}

static int run_layers(struct step *step, const struct journal_listener *listener)
{
    uint32_t n_layers = step->shape.n_layers;
    struct step_half *first = &step->halves[0], *second = step->n_halves > 1 ? &step->halves[1] : NULL;
    int r = run_before(step, first, 0);
    for (uint32_t layer = 0; r == 0 && layer < n_layers; layer++) {
        /* the stores have work for one half while this computes for the other */
        if (second != NULL)
            r = run_before(step, second, layer);
        if (r == 0)
            r = run_after(step, first, layer, listener);
        if (r == 0 && layer + 1 < n_layers)
            r = run_before(step, first, layer + 1);
        if (r == 0 && second != NULL)
            r = run_after(step, second, layer, listener);
        if (r < 0)
            break;
        if (step->progress != NULL)
            atomic_fetch_add_explicit(step->progress, 1, memory_order_relaxed);
        if (step->between_layers != NULL)
            step->between_layers(step->engine);
        if (is_abandoned(step) && step->n_commits == 0)
            break;
    }
    return r;
}

static int run_batch(struct step *step, const struct journal_listener *listener)
{
    int r = 0;
    if (step->n_rows == 0) { /* commits alone */
        r = step_send(step, &step->halves[0], 0, 0);
        if (r == 0)
            r = step_collect(step, &step->halves[0]);
        if (r == 0)
            is_journaled(&step->halves[0], listener);
        return r;
    }
    const struct network *network = step->network;
    network->ops->embed(network->backend, network->token_embd, step->ids, step->n_rows, step->x);
    r = run_layers(step, listener);
    for (uint32_t h = 0; r == 0 && h < step->n_halves; h++)
        if (step->halves[h].is_deferred)
            r = send_deferred(step, &step->halves[h], listener);
    if (r == 0)
        r = step_output(step);
    for (uint32_t h = 0; r == 0 && h < step->n_halves; h++)
        if (step->halves[h].is_waiting)
            r = step_collect(step, &step->halves[h]);
    return r;
}

int step_run(struct step *step, void (*on_journaled)(void *context, uint32_t first, uint32_t end), void *context)
{
    const struct journal_listener listener = {.tell = on_journaled, .context = context};
    for (uint32_t i = 0; i < step->n_rows; i++) {
        step->ids[i] = step->rows[i].run->ids[step->rows[i].position];
        step->positions[i] = step->rows[i].position;
    }
    cut(step);
    int r = run_batch(step, &listener);
    if (step->network->ops->device != NULL) {
        step->network->ops->device->part(step->network->backend, 0);
        int last = backend_wait(step->network->ops, step->network->backend);
        r = r < 0 ? r : last;
    }
    for (uint32_t h = 0; h < step->n_halves; h++)
        step_release(step, &step->halves[h]);
    return r;
}
