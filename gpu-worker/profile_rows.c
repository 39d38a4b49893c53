/* profile_rows.c - a small batch through all layers, over stored keys and values, with the weights written down. */
#include "gpu-worker/profile_rows.h"

#include <errno.h>
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "common/pool.h"
#include "gpu-worker/fastgen/fastgen_weights.h"

enum {
    ROWS_ITEM = 4,             /* rows that one thread computes at a time */
    WEIGHTS_BYTES = 32u << 20, /* of the weights that are kept at a time */
};
_Static_assert((int)ROWS_ITEM <= (int)FASTGEN_WEIGHTS_POSITIONS, "an item is a call of fastgen_weights()");

/* Device memory of the batch. */
enum part { PART_X, PART_H, PART_Q, PART_ATTENTION, PART_GATE, PART_UP, N_PARTS };

struct work {
    const struct profile_rows *rows;
    struct fastgen_profile *profile;
    const struct model_shape *shape;
    uint32_t positions[FASTGEN_MAX_ROWS], ids[FASTGEN_MAX_ROWS];
    uint32_t n_rows; /* of the batch */
    float *parts[N_PARTS];
    float *weights; /* [wave's rows][n_kv_heads][stride] */
    size_t stride;
    char *scratch; /* [thread][scratch_bytes] */
    size_t scratch_bytes;
    uint32_t layer, first, end; /* rows of the wave */
    uint32_t wave;              /* rows, at most */
    atomic_int error;
};

struct head_rows {
    const struct work *work;
    uint32_t kv_head;
};

static const void *block_of(void *context, uint32_t block)
{
    const struct head_rows *head = context;
    const struct profile_rows *rows = head->work->rows;
    return rows->rows(rows->context, head->work->layer, head->kv_head, block);
}

/* Some rows of the wave and one KV head. The last rows see most: they come first. */
static void weigh_item(void *context, uint32_t item, uint32_t thread)
{
    struct work *work = context;
    const struct model_shape *shape = work->shape;
    uint32_t group = shape->n_heads / shape->n_kv_heads, d = shape->head_dim, head = item % shape->n_kv_heads;
    uint32_t back = item / shape->n_kv_heads * ROWS_ITEM, end = work->end - back;
    uint32_t first = end - work->first > ROWS_ITEM ? end - ROWS_ITEM : work->first;
    const float *q[ROWS_ITEM];
    float *out[ROWS_ITEM];
    for (uint32_t i = first; i < end; i++) {
        size_t offset = ((size_t)i * shape->n_heads + (size_t)head * group) * d;
        q[i - first] = work->parts[PART_Q] + offset;
        out[i - first] = work->parts[PART_ATTENTION] + offset;
    }
    struct head_rows head_rows = {.work = work, .kv_head = head};
    struct fastgen_rows some = {
        .kernels = work->rows->kernels,
        .head_dim = d,
        .group = group,
        .codec = work->rows->codec,
        .scale = 1.0f / sqrtf((float)d),
        .n_positions = end - first,
        .positions = work->positions + first,
        .q = q,
        .block = block_of,
        .context = &head_rows,
    };
    /* [kv_head][row of the wave][stride]: rows of one head lie together */
    float *weights = work->weights + ((size_t)head * work->wave + (first - work->first)) * work->stride;
    bool is_last = work->layer + 1 == shape->n_layers; /* nothing comes behind it */
    int r = fastgen_weights(&some, work->scratch + thread * work->scratch_bytes, weights, work->stride,
                            is_last ? NULL : out);
    if (r < 0)
        atomic_store_explicit(&work->error, r, memory_order_relaxed);
}

static void add_head(void *context, uint32_t head, uint32_t thread)
{
    (void)thread;
    struct work *work = context;
    for (uint32_t i = work->first; i < work->end; i++)
        fastgen_profile_add_row(work->profile, work->layer, head, work->positions[i],
                                work->weights + ((size_t)head * work->wave + (i - work->first)) * work->stride);
}

static int attend(struct work *work)
{
    for (work->first = 0; work->first < work->n_rows; work->first = work->end) {
        uint32_t left = work->n_rows - work->first, n = left < work->wave ? left : work->wave;
        work->end = work->first + n;
        pool_run(work->rows->pool, (n + ROWS_ITEM - 1) / ROWS_ITEM * work->shape->n_kv_heads, weigh_item, work);
        int r = atomic_load_explicit(&work->error, memory_order_relaxed);
        if (r < 0)
            return r;
        pool_run(work->rows->pool, work->shape->n_kv_heads, add_head, work);
    }
    return 0;
}

static int run_layer(struct work *work, uint32_t layer)
{
    const struct network *network = work->rows->network;
    const struct network_layer *weights = &network->layers[layer];
    const struct backend_ops *ops = network->ops;
    struct backend *backend = network->backend;
    const struct model_shape *shape = work->shape;
    uint32_t T = work->n_rows;
    float *x = work->parts[PART_X], *h = work->parts[PART_H], *q = work->parts[PART_Q];

    work->layer = layer;
    ops->rms_norm(backend, x, T, shape->n_embd, weights->attn_norm, shape->rms_eps, h);
    const struct weight *query = weights->attn_q;
    ops->matmul(backend, &query, 1, h, T, &q);
    ops->rope(backend, q, T, shape->n_heads, shape->head_dim, work->positions, &network->rope);
    int r = backend_wait(ops, backend);
    if (r == 0)
        r = attend(work);
    if (r < 0 || layer + 1 == shape->n_layers)
        return r;
    network_after_attention(network, layer, work->parts[PART_ATTENTION], T, x, h, work->parts[PART_GATE],
                            work->parts[PART_UP]);
    return 0;
}

static int allocate(struct work *work)
{
    const struct network *network = work->rows->network;
    const struct model_shape *shape = work->shape;
    size_t T = work->n_rows, heads = (size_t)shape->n_heads * shape->head_dim;
    const size_t n_floats[N_PARTS] = {
        [PART_X] = T * shape->n_embd, [PART_H] = T * shape->n_embd,  [PART_Q] = T * heads,
        [PART_ATTENTION] = T * heads, [PART_GATE] = T * shape->n_ff, [PART_UP] = T * shape->n_ff,
    };
    for (uint32_t i = 0; i < N_PARTS; i++) {
        work->parts[i] = backend_shared_alloc(network->ops, network->backend, n_floats[i] * sizeof(float));
        if (work->parts[i] == NULL)
            return -ENOMEM;
    }
    uint32_t last = work->positions[work->n_rows - 1];
    work->stride = fastgen_weights_stride(last);
    work->scratch_bytes =
        fastgen_weights_scratch_bytes(ROWS_ITEM, last, shape->n_heads / shape->n_kv_heads, shape->head_dim);
    size_t row_bytes = work->stride * shape->n_kv_heads * sizeof(float);
    work->wave = FASTGEN_MAX_ROWS;
    while (work->wave > ROWS_ITEM && work->wave * row_bytes > WEIGHTS_BYTES)
        work->wave /= 2;
    work->weights = malloc(work->wave * row_bytes);
    work->scratch = aligned_alloc(64, work->scratch_bytes * pool_n_threads(work->rows->pool));
    return work->weights == NULL || work->scratch == NULL ? -ENOMEM : 0;
}

static void release(struct work *work)
{
    const struct network *network = work->rows->network;
    for (uint32_t i = 0; i < N_PARTS; i++)
        if (work->parts[i] != NULL)
            network->ops->free(network->backend, work->parts[i]);
    free(work->weights);
    free(work->scratch);
}

int profile_rows_run(const struct profile_rows *rows, struct fastgen_profile *profile)
{
    const struct network *network = rows->network;
    struct work work = {.rows = rows, .profile = profile, .shape = &network->shape};
    work.n_rows = fastgen_sample(rows->n_tokens, work.positions);
    for (uint32_t i = 0; i < work.n_rows; i++)
        work.ids[i] = rows->ids[work.positions[i]];
    int r = allocate(&work);
    if (r == 0)
        network->ops->embed(network->backend, network->token_embd, work.ids, work.n_rows, work.parts[PART_X]);
    for (uint32_t layer = 0; r == 0 && layer < work.shape->n_layers; layer++) {
        r = run_layer(&work, layer);
        if (r == 0 && rows->between != NULL)
            r = rows->between(rows->between_context);
    }
    if (r == 0)
        fastgen_profile_finish(profile);
    release(&work);
    return r;
}
