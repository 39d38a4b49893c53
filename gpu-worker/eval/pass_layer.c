/*
 * pass_layer.c - a layer over some rows: projections, exact attention over all blocks up to the own one, output and FFN.
 *
 * Owner      pass.h. Threads: the engine thread.
 * Invariant  a row's bits do not depend on which rows share a call: the back end promises that.
 */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/pool.h"
#include "gpu-worker/eval/pass_private.h"

static uint32_t group_of(const struct pass *pass)
{
    return pass->tools.network->shape.n_heads / pass->shape.n_kv_heads;
}

int pass_scratch_init(struct pass *pass)
{
    const struct network *network = pass->tools.network;
    const struct model_shape *shape = &network->shape;
    struct pass_scratch *scratch = &pass->scratch;
    size_t rows = pass->n_tokens < PASS_MAX_ROWS ? pass->n_tokens : PASS_MAX_ROWS, d = shape->head_dim;
    size_t queries = (size_t)LAYOUT_BLOCK_TOKENS * shape->n_heads; /* of a block, all heads */
    const struct {
        void *memory; /* of a pointer */
        size_t n_bytes;
    } parts[] = {
        {&scratch->h, rows * shape->n_embd * sizeof(float)},
        {&scratch->k, rows * shape->n_kv_heads * d * sizeof(float)},
        {&scratch->v, rows * shape->n_kv_heads * d * sizeof(float)},
        {&scratch->gate, rows * shape->n_ff * sizeof(float)},
        {&scratch->up, rows * shape->n_ff * sizeof(float)},
        {&scratch->attention, rows * shape->n_heads * d * sizeof(float)},
        {&scratch->encoded, rows * shape->n_kv_heads * pass->row_bytes},
        {&scratch->tile_q, queries * d * sizeof(float)},
        {&scratch->tile_partials, queries * KERNELS_PARTIAL_FLOATS(d) * sizeof(float)},
    };
    for (size_t i = 0; i < sizeof(parts) / sizeof(parts[0]); i++) {
        void *memory = backend_shared_alloc(network->ops, network->backend, parts[i].n_bytes);
        if (memory == NULL)
            return -ENOMEM;
        memcpy(parts[i].memory, &memory, sizeof(memory));
    }
    scratch->pieces = calloc((size_t)shape->n_kv_heads * pass->n_blocks, sizeof(*scratch->pieces));
    scratch->items = calloc(shape->n_kv_heads, sizeof(*scratch->items));
    return scratch->pieces == NULL || scratch->items == NULL ? -ENOMEM : 0;
}

void pass_scratch_fini(struct pass *pass)
{
    const struct network *network = pass->tools.network;
    struct pass_scratch *scratch = &pass->scratch;
    void *const device[] = {scratch->h,         scratch->k,       scratch->v,      scratch->gate,         scratch->up,
                            scratch->attention, scratch->encoded, scratch->tile_q, scratch->tile_partials};
    for (size_t i = 0; i < sizeof(device) / sizeof(device[0]); i++)
        if (device[i] != NULL)
            network->ops->free(network->backend, device[i]);
    free(scratch->pieces);
    free(scratch->items);
}

int pass_project(const struct pass *pass, uint32_t layer, const float *x, const uint32_t *positions, uint32_t n,
                 float *q, uint8_t *rows, uint32_t head_rows, uint32_t first)
{
    const struct network *network = pass->tools.network;
    const struct network_layer *weights = &network->layers[layer];
    const struct backend_ops *ops = network->ops;
    struct backend *backend = network->backend;
    const struct model_shape *shape = &network->shape;
    const struct pass_scratch *scratch = &pass->scratch;
    size_t n_kv = shape->n_kv_heads, bytes = pass->row_bytes;

    ops->rms_norm(backend, x, n, shape->n_embd, weights->attn_norm, shape->rms_eps, scratch->h);
    const struct weight *const qkv[] = {weights->attn_q, weights->attn_k, weights->attn_v};
    ops->matmul(backend, qkv, 3, scratch->h, n, (float *const[]){q, scratch->k, scratch->v});
    ops->rope(backend, q, n, shape->n_heads, shape->head_dim, positions, &network->rope);
    ops->rope(backend, scratch->k, n, shape->n_kv_heads, shape->head_dim, positions, &network->rope);
    ops->encode_rows(backend, scratch->k, scratch->v, n, shape->n_kv_heads, shape->head_dim,
                     (enum kernels_rows)pass->shape.codec, scratch->encoded);
    int r = backend_wait(ops, backend);
    if (r < 0)
        return r;
    for (size_t head = 0; head < n_kv; head++)
        for (size_t i = 0; i < n; i++)
            memcpy(rows + (head * head_rows + first + i) * bytes, scratch->encoded + (i * n_kv + head) * bytes, bytes);
    return 0;
}

struct sums_job {
    const struct pass *pass;
    const uint8_t *rows;
    float *sums;
    uint32_t n_blocks, n_whole, head_sums;
};

static void sum_block(void *context, uint32_t item, uint32_t thread)
{
    (void)thread;
    const struct sums_job *job = context;
    const struct pass *pass = job->pass;
    size_t head = item / job->n_whole, block = item % job->n_whole;
    pass->tools.kernels->block_sums(job->rows + (head * job->n_blocks + block) * LAYOUT_BLOCK_TOKENS * pass->row_bytes,
                                    LAYOUT_BLOCK_TOKENS, pass->shape.head_dim, (enum kernels_rows)pass->shape.codec,
                                    job->sums + (head * job->head_sums + block) * 2 * pass->shape.head_dim);
}

void pass_sum_blocks(const struct pass *pass, const uint8_t *rows, uint32_t n_blocks, uint32_t n_whole, float *sums,
                     uint32_t head_sums)
{
    struct sums_job job = {pass, rows, sums, n_blocks, n_whole, head_sums};
    if (n_whole > 0)
        pool_run(pass->tools.pool, pass->shape.n_kv_heads * n_whole, sum_block, &job);
}

/* ---- attention ---- */

struct tile {
    const struct pass *pass;
    uint32_t first, n; /* positions, of one block */
    float *out;        /* [n][n_heads][head_dim] */
};

static void finish_position(void *context, uint32_t item, uint32_t thread)
{
    (void)thread;
    const struct tile *tile = context;
    const struct pass *pass = tile->pass;
    size_t group = group_of(pass), n_heads = pass->tools.network->shape.n_heads, d = pass->shape.head_dim;
    for (size_t h = 0; h < n_heads; h++) {
        size_t query = h / group * group * LAYOUT_BLOCK_TOKENS + item * group + h % group;
        pass->tools.kernels->partial_finish(pass->scratch.tile_partials + query * KERNELS_PARTIAL_FLOATS(d),
                                            (uint32_t)d, tile->out + (item * n_heads + h) * d);
    }
}

/* Positions of one block: every block before it as a whole, its own causally. */
static int attend_tile(const struct pass *pass, const struct tile *tile)
{
    const struct network *network = pass->tools.network;
    const struct pass_scratch *scratch = &pass->scratch;
    uint32_t group = group_of(pass), n_kv = pass->shape.n_kv_heads, d = pass->shape.head_dim;
    uint32_t own = tile->first / LAYOUT_BLOCK_TOKENS, last = (tile->first + tile->n - 1) % LAYOUT_BLOCK_TOKENS;
    size_t queries = (size_t)LAYOUT_BLOCK_TOKENS * group, partial = KERNELS_PARTIAL_FLOATS(d);
    size_t n_heads = network->shape.n_heads;
    for (uint32_t head = 0; head < n_kv; head++) {
        float *q = scratch->tile_q + head * queries * d;
        float *partials = scratch->tile_partials + head * queries * partial;
        struct backend_piece *pieces = scratch->pieces + (size_t)head * pass->n_blocks;
        const uint8_t *rows = pass_rows(pass, pass->layer, head);
        for (size_t i = 0; i < tile->n; i++)
            memcpy(q + i * group * d, pass->q + ((tile->first + i) * n_heads + (size_t)head * group) * d,
                   (size_t)group * d * sizeof(float));
        memset(partials, 0, tile->n * group * partial * sizeof(float));
        for (size_t i = 0; i < (size_t)tile->n * group; i++)
            partials[i * partial] = -INFINITY;
        for (size_t block = 0; block <= own; block++)
            pieces[block] = (struct backend_piece){
                .rows = rows + block * LAYOUT_BLOCK_TOKENS * pass->row_bytes,
                .mask = block < own ? ~(uint64_t)0 : ~(uint64_t)0 >> (LAYOUT_BLOCK_TOKENS - 1 - last),
            };
        scratch->items[head] = (struct backend_attend){
            .q = q,
            .partials = partials,
            .pieces = pieces,
            .n_pieces = own + 1,
            .n_queries = tile->n * group,
            .group = group,
            .causal_piece = own,
            .causal_first = tile->first % LAYOUT_BLOCK_TOKENS,
        };
    }
    network->ops->attend(network->backend, scratch->items, n_kv, d, (enum kernels_rows)pass->shape.codec,
                         pass_scale(pass));
    int r = backend_wait(network->ops, network->backend);
    if (r < 0)
        return r;
    struct tile job = *tile;
    pool_run(pass->tools.pool, tile->n, finish_position, &job);
    return 0;
}

int pass_attend(const struct pass *pass, uint32_t first, uint32_t n)
{
    size_t row = (size_t)pass->tools.network->shape.n_heads * pass->shape.head_dim;
    for (uint32_t i = 0, end; i < n; i = end) {
        end = i + LAYOUT_BLOCK_TOKENS - (first + i) % LAYOUT_BLOCK_TOKENS;
        end = end < n ? end : n;
        struct tile tile = {.pass = pass, .first = first + i, .n = end - i, .out = pass->scratch.attention + i * row};
        int r = attend_tile(pass, &tile);
        if (r < 0)
            return r;
    }
    return 0;
}

void pass_finish(const struct pass *pass, uint32_t layer, float *x, const float *attention, uint32_t n)
{
    const struct network *network = pass->tools.network;
    const struct model_shape *shape = &network->shape;
    const struct pass_scratch *scratch = &pass->scratch;
    for (uint32_t i = 0, T; i < n; i += T) {
        T = n - i < PASS_MAX_ROWS ? n - i : PASS_MAX_ROWS;
        network_after_attention(network, layer, attention + (size_t)i * shape->n_heads * shape->head_dim, T,
                                x + (size_t)i * shape->n_embd, scratch->h, scratch->gate, scratch->up);
    }
}
