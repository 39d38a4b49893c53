#include "gpu-worker/step.h"

#include <assert.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "gpu-worker/policy/exact_set.h"

struct step *step_free(struct step *step)
{
    if (step == NULL)
        return NULL;
    const struct backend_ops *ops = step->network->ops;
    void *const device[] = {step->x,
                            step->h,
                            step->q,
                            step->attention,
                            step->k,
                            step->v,
                            step->gate,
                            step->up,
                            step->row_bytes,
                            step->logits,
                            step->exact_partials,
                            step->tile_q,
                            step->tile_partials,
                            step->direct_partials};
    for (size_t i = 0; i < sizeof(device) / sizeof(device[0]); i++)
        if (device[i] != NULL)
            ops->free(step->network->backend, device[i]);
    for (uint32_t i = 0; step->calls != NULL && i < STORES_MAX; i++) {
        free(step->calls[i].append_owner);
        free(step->calls[i].item_row);
        free(step->calls[i].item_lanes);
        free(step->calls[i].item_result);
    }
    free(step->calls);
    free(step->rows);
    free(step->commits);
    free(step->pieces);
    free(step->items);
    free(step->ids);
    free(step->positions);
    free(step->mask_memory);
    free(step->lane_partials);
    free(step);
    return NULL;
}

static int allocate_device(struct step *step)
{
    const struct model_shape *shape = &step->network->shape;
    const struct backend_ops *ops = step->network->ops;
    struct backend *backend = step->network->backend;
    size_t T = step->limits.max_rows, d = shape->head_dim, partial = KERNELS_PARTIAL_FLOATS(d);
    size_t tile = LAYOUT_BLOCK_TOKENS * (size_t)shape->n_heads; /* queries of a prefill tile, all KV heads */
    const struct {
        void *memory; /* of a pointer */
        size_t n_bytes;
    } parts[] = {
        {&step->x, T * shape->n_embd * 4},
        {&step->h, T * shape->n_embd * 4},
        {&step->q, T * shape->n_heads * d * 4},
        {&step->attention, T * shape->n_heads * d * 4},
        {&step->k, T * shape->n_kv_heads * d * 4},
        {&step->v, T * shape->n_kv_heads * d * 4},
        {&step->gate, T * shape->n_ff * 4},
        {&step->up, T * shape->n_ff * 4},
        {&step->row_bytes, T * shape->n_kv_heads * layout_row_bytes(&step->shape)},
        {&step->logits, (size_t)step->limits.max_decode * shape->n_vocab * 4},
        {&step->exact_partials, (size_t)step->limits.max_decode * shape->n_heads * partial * 4},
        {&step->tile_q, tile * d * 4},
        {&step->tile_partials, (1 + LAYOUT_N_LANES) * tile * partial * 4},
        {&step->direct_partials, step->transport == TRANSPORT_DIRECT
                                     ? (size_t)step->limits.max_decode * shape->n_heads * LAYOUT_N_LANES * partial * 4
                                     : 0},
    };
    for (size_t i = 0; i < sizeof(parts) / sizeof(parts[0]); i++) {
        if (parts[i].n_bytes == 0)
            continue;
        void *memory = ops->alloc(backend, parts[i].n_bytes);
        if (memory == NULL)
            return -ENOMEM;
        memcpy(parts[i].memory, &memory, sizeof(memory));
    }
    return 0;
}

static int allocate_host(struct step *step)
{
    size_t max_rows = step->limits.max_rows, max_decode = step->limits.max_decode;
    size_t n_kv = step->shape.n_kv_heads, n_blocks = step->limits.n_ctx / LAYOUT_BLOCK_TOKENS + 2;
    size_t tile_pieces = n_kv * (n_blocks + SESSION_MAX_PIECES), decode_pieces = max_decode * n_kv * SESSION_MAX_PIECES;
    size_t tile_items = n_kv * (1 + LAYOUT_N_LANES), decode_items = max_decode * n_kv;
    step->rows = calloc(max_rows, sizeof(*step->rows));
    step->commits = calloc(max_decode, sizeof(struct run *));
    step->ids = calloc(max_rows, sizeof(*step->ids));
    step->positions = calloc(max_rows, sizeof(*step->positions));
    step->pieces = calloc(tile_pieces > decode_pieces ? tile_pieces : decode_pieces, sizeof(*step->pieces));
    step->items = calloc(tile_items > decode_items ? tile_items : decode_items, sizeof(*step->items));
    step->mask_memory = calloc(max_decode * n_blocks, sizeof(*step->mask_memory));
    step->lane_partials = calloc(max_decode * n_kv * LAYOUT_N_LANES, sizeof(*step->lane_partials));
    step->calls = calloc(STORES_MAX, sizeof(*step->calls));
    return step->rows != NULL && step->commits != NULL && step->ids != NULL && step->positions != NULL &&
                   step->pieces != NULL && step->items != NULL && step->mask_memory != NULL &&
                   step->lane_partials != NULL && step->calls != NULL
               ? 0
               : -ENOMEM;
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

void step_clear(struct step *step)
{
    step->n_rows = step->n_decode = step->n_logits = step->n_commits = 0;
    step->wait_us = 0;
}

bool step_add_row(struct step *step, struct run *run, uint32_t position, bool is_decode, bool wants_logits)
{
    if (step->n_rows == step->limits.max_rows || (is_decode && step->n_decode == step->limits.max_decode) ||
        (wants_logits && step->n_logits == step->limits.max_decode))
        return false;
    assert(position < run->n_known);
    struct step_row *row = &step->rows[step->n_rows++];
    *row = (struct step_row){
        .run = run,
        .position = position,
        .is_decode = is_decode,
        .wants_logits = wants_logits,
        .logits_index = wants_logits ? step->n_logits++ : 0,
    };
    if (is_decode) {
        row->decode_index = step->n_decode++;
        row->n_old_blocks = exact_set_n_old_blocks(position);
        row->masks = step->mask_memory + (size_t)row->decode_index * (step->limits.n_ctx / LAYOUT_BLOCK_TOKENS + 2);
        run->policy->selector->select(row->n_old_blocks, row->masks);
    }
    return true;
}

bool step_add_commit(struct step *step, struct run *run)
{
    if (step->n_commits == step->limits.max_decode)
        return false;
    step->commits[step->n_commits++] = run;
    return true;
}

float *step_logits(const struct step *step, uint32_t row)
{
    assert(step->rows[row].wants_logits);
    return step->logits + (size_t)step->rows[row].logits_index * step->network->shape.n_vocab;
}

/* New rows that stay in the exact set once the run's last row of this step has been computed. */
static void keep_rows(struct step *step, uint32_t layer)
{
    size_t token = (size_t)step->shape.n_kv_heads * 2 * step->shape.head_dim;
    for (uint32_t i = 0, end; i < step->n_rows; i = end) {
        struct run *run = step->rows[i].run;
        for (end = i; end < step->n_rows && step->rows[end].run == run; end++)
            ;
        uint32_t last = step->rows[end - 1].position;
        for (uint32_t k = i; k < end; k++)
            if (session_keeps(step->rows[k].position, last))
                session_put_rows(run->session, layer, step->rows[k].position, step->row_bytes + k * token);
    }
}

static int run_attention(struct step *step, uint32_t layer)
{
    int r = step_send(step, layer);
    if (r < 0)
        return r;
    keep_rows(step, layer);
    step_exact(step, layer);
    if (step->transport == TRANSPORT_DIRECT)
        step_direct(step, layer);
    r = step_collect(step, layer);
    if (r < 0)
        return r;
    step_merge(step);
    step_release(step);
    step_prefill_attention(step, layer);
    return 0;
}

static int run_layer(struct step *step, uint32_t layer)
{
    const struct network *network = step->network;
    const struct network_layer *weights = &network->layers[layer];
    const struct backend_ops *ops = network->ops;
    struct backend *backend = network->backend;
    const struct model_shape *shape = &network->shape;
    uint32_t T = step->n_rows;

    ops->rms_norm(backend, step->x, T, shape->n_embd, weights->attn_norm, shape->rms_eps, step->h);
    const struct weight *const qkv[] = {weights->attn_q, weights->attn_k, weights->attn_v};
    ops->matmul(backend, qkv, 3, step->h, T, (float *const[]){step->q, step->k, step->v});
    ops->rope(backend, step->q, T, shape->n_heads, shape->head_dim, step->positions, &network->rope);
    ops->rope(backend, step->k, T, shape->n_kv_heads, shape->head_dim, step->positions, &network->rope);
    ops->encode_rows(backend, step->k, step->v, T, shape->n_kv_heads, shape->head_dim, step->row_bytes);

    int r = run_attention(step, layer);
    if (r < 0)
        return r;

    const struct weight *output = weights->attn_output;
    ops->matmul(backend, &output, 1, step->attention, T, &step->h);
    ops->add(backend, step->x, step->h, (size_t)T * shape->n_embd);
    ops->rms_norm(backend, step->x, T, shape->n_embd, weights->ffn_norm, shape->rms_eps, step->h);
    const struct weight *const gate_up[] = {weights->ffn_gate, weights->ffn_up};
    ops->matmul(backend, gate_up, 2, step->h, T, (float *const[]){step->gate, step->up});
    ops->swiglu(backend, step->gate, step->up, T, shape->n_ff);
    const struct weight *down = weights->ffn_down;
    ops->matmul(backend, &down, 1, step->gate, T, &step->h);
    ops->add(backend, step->x, step->h, (size_t)T * shape->n_embd);
    return 0;
}

static void run_output(struct step *step)
{
    const struct network *network = step->network;
    const struct model_shape *shape = &network->shape;
    if (step->n_logits == 0)
        return;
    /* rows that want logits move to the front of h; T >= n_logits */
    for (uint32_t i = 0; i < step->n_rows; i++)
        if (step->rows[i].wants_logits)
            memcpy(step->h + (size_t)step->rows[i].logits_index * shape->n_embd, step->x + (size_t)i * shape->n_embd,
                   shape->n_embd * sizeof(float));
    network->ops->rms_norm(network->backend, step->h, step->n_logits, shape->n_embd, network->output_norm,
                           shape->rms_eps, step->x);
    const struct weight *output = network->output;
    network->ops->matmul(network->backend, &output, 1, step->x, step->n_logits, &step->logits);
}

int step_run(struct step *step, void (*on_journaled)(void *context), void *context)
{
    for (uint32_t i = 0; i < step->n_rows; i++) {
        step->ids[i] = step->rows[i].run->ids[step->rows[i].position];
        step->positions[i] = step->rows[i].position;
    }
    if (step->n_rows == 0) { /* commits alone */
        int r = step_send(step, 0);
        if (r == 0)
            r = step_collect(step, 0);
        if (r < 0)
            return r;
        step_release(step);
        on_journaled(context);
        return 0;
    }
    const struct network *network = step->network;
    network->ops->embed(network->backend, network->token_embd, step->ids, step->n_rows, step->x);
    for (uint32_t layer = 0; layer < step->shape.n_layers; layer++) {
        int r = run_layer(step, layer);
        if (r < 0)
            return r;
        if (layer == 0)
            on_journaled(context);
        if (step->progress != NULL)
            atomic_fetch_add_explicit(step->progress, 1, memory_order_relaxed);
    }
    run_output(step);
    return 0;
}
