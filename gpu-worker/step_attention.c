/* step_attention.c - the worker's own part of attention: exact set, merge, exact prefill, and the oracle of transport direct. */
#include <errno.h>
#include <math.h>
#include <string.h>

#include "common/pool.h"
#include "gpu-worker/policy/exact_set.h"
#include "gpu-worker/step.h"

float step_scale(const struct step *step)
{
    return 1.0f / sqrtf((float)step->shape.head_dim);
}

static void make_empty(float *partials, size_t n, uint32_t head_dim)
{
    size_t stride = KERNELS_PARTIAL_FLOATS(head_dim);
    memset(partials, 0, n * stride * sizeof(float));
    for (size_t i = 0; i < n; i++)
        partials[i * stride] = -INFINITY;
}

static uint32_t group_size(const struct step *step)
{
    return step->network->shape.n_heads / step->shape.n_kv_heads;
}

void step_exact(struct step *step, uint32_t layer)
{
    uint32_t n_heads = step->network->shape.n_heads, n_kv = step->shape.n_kv_heads, d = step->shape.head_dim;
    uint32_t group = group_size(step), n_items = 0, n_pieces = 0;
    size_t partial = KERNELS_PARTIAL_FLOATS(d);
    if (step->n_decode == 0)
        return;
    make_empty(step->exact_partials, (size_t)step->n_decode * n_heads, d);
    for (uint32_t i = 0; i < step->n_rows; i++) {
        const struct step_row *row = &step->rows[i];
        for (uint32_t head = 0; row->is_decode && head < n_kv; head++) {
            struct backend_piece *pieces = step->pieces + n_pieces;
            uint32_t n = session_pieces(row->run->session, layer, head, row->position, pieces);
            size_t first = (size_t)head * group;
            step->items[n_items++] = (struct backend_attend){
                .q = step->q + ((size_t)i * n_heads + first) * d,
                .partials = step->exact_partials + ((size_t)row->decode_index * n_heads + first) * partial,
                .pieces = pieces,
                .n_pieces = n,
                .n_queries = group,
                .group = group,
                .causal_piece = n,
            };
            n_pieces += n;
        }
    }
    step->network->ops->attend(step->network->backend, step->items, n_items, d, step_scale(step));
}

/* ---- transport direct: what the stores would answer, computed on their mapped segments ---- */

struct direct_job {
    struct step *step;
    uint32_t layer;
    float scale;
};

static void direct_lane(void *context, uint32_t item, uint32_t thread)
{
    (void)thread;
    const struct direct_job *job = context;
    struct step *step = job->step;
    uint32_t n_kv = step->shape.n_kv_heads, d = step->shape.head_dim, group = group_size(step);
    uint32_t lane = item % LAYOUT_N_LANES, head = item / LAYOUT_N_LANES % n_kv, i = item / LAYOUT_N_LANES / n_kv;
    const struct step_row *row = &step->rows[i];
    if (!row->is_decode || row->run->error != 0)
        return;
    size_t index = ((size_t)row->decode_index * n_kv + head) * LAYOUT_N_LANES + lane;
    float *partials = step->direct_partials + index * group * KERNELS_PARTIAL_FLOATS(d);
    bool any = false;
    uint64_t masks[KERNELS_MAX_HEAD_DIM];
    for (uint32_t block = lane; block < row->n_old_blocks; block += LAYOUT_N_LANES) {
        if (row->masks[block] == 0)
            continue;
        const struct block_header *header = stores_block(
            step->stores, run_store(row->run, block), row->run->request->blocks[block], row->run->session->id, block);
        if (header == NULL)
            continue; /* the append of this layer meets the same store and fails the run */
        if (!any)
            make_empty(partials, group, d);
        any = true;
        for (uint32_t k = 0; k < group; k++)
            masks[k] = row->masks[block];
        step->kernels->attend_block(step->q + ((size_t)i * step->network->shape.n_heads + (size_t)head * group) * d,
                                    group, d, stores_rows(step->stores, header, job->layer, head), masks, job->scale,
                                    partials);
    }
    step->lane_partials[index] = any ? partials : NULL;
}

void step_direct(struct step *step, uint32_t layer)
{
    struct direct_job job = {.step = step, .layer = layer, .scale = step_scale(step)};
    if (step->n_decode > 0)
        pool_run(step->pool, step->n_rows * step->shape.n_kv_heads * LAYOUT_N_LANES, direct_lane, &job);
}

void step_merge(struct step *step)
{
    uint32_t n_heads = step->network->shape.n_heads, n_kv = step->shape.n_kv_heads, d = step->shape.head_dim;
    uint32_t group = group_size(step);
    size_t partial = KERNELS_PARTIAL_FLOATS(d);
    for (uint32_t i = 0; i < step->n_rows; i++) {
        const struct step_row *row = &step->rows[i];
        for (uint32_t h = 0; row->is_decode && h < n_heads; h++) {
            float *into = step->exact_partials + ((size_t)row->decode_index * n_heads + h) * partial;
            const float **lanes = step->lane_partials + ((size_t)row->decode_index * n_kv + h / group) * LAYOUT_N_LANES;
            for (uint32_t lane = 0; lane < LAYOUT_N_LANES; lane++)
                if (lanes[lane] != NULL)
                    step->kernels->partial_merge(into, lanes[lane] + (h % group) * partial, d);
            step->kernels->partial_finish(into, d, step->attention + ((size_t)i * n_heads + h) * d);
        }
    }
}

/* ---- prefill: tiles of consecutive positions in one block ---- */

struct tile {
    struct run *run;
    uint32_t first_row, n; /* rows of the step */
    uint32_t first_position;
    uint32_t block;
};

static const struct block_header *tile_block(struct step *step, const struct tile *tile, uint32_t block)
{
    struct run *run = tile->run;
    return stores_block(step->stores, run_store(run, block), run->request->blocks[block], run->session->id, block);
}

static float *tile_partials(const struct step *step, uint32_t kv_head, uint32_t part, uint32_t query)
{
    size_t queries = (size_t)LAYOUT_BLOCK_TOKENS * group_size(step);
    return step->tile_partials + (((size_t)kv_head * (1 + LAYOUT_N_LANES) + part) * queries + query) *
                                     KERNELS_PARTIAL_FLOATS(step->shape.head_dim);
}

/* Items of one KV head under construction: pieces and items are appended to the step's arrays. */
struct tile_items {
    struct step *step;
    const struct tile *tile;
    uint32_t layer, kv_head;
    uint32_t n_items, n_pieces;
};

static bool add_piece(struct tile_items *items, uint32_t block, uint64_t mask)
{
    struct step *step = items->step;
    const struct block_header *header = tile_block(step, items->tile, block);
    if (header == NULL)
        return false;
    step->pieces[items->n_pieces++] =
        (struct backend_piece){.rows = stores_rows(step->stores, header, items->layer, items->kv_head), .mask = mask};
    return true;
}

/* The pieces from `first` on as one item, whose partials are `part` of the tile's; causal: the last of them is. */
static void add_item(struct tile_items *items, uint32_t part, uint32_t first, bool causal)
{
    struct step *step = items->step;
    const struct tile *tile = items->tile;
    uint32_t group = group_size(step), n = items->n_pieces - first;
    size_t queries = (size_t)LAYOUT_BLOCK_TOKENS * group;
    if (n == 0)
        return;
    make_empty(tile_partials(step, items->kv_head, part, 0), (size_t)tile->n * group, step->shape.head_dim);
    step->items[items->n_items++] = (struct backend_attend){
        .q = step->tile_q + items->kv_head * queries * step->shape.head_dim,
        .partials = tile_partials(step, items->kv_head, part, 0),
        .pieces = step->pieces + first,
        .n_pieces = n,
        .n_queries = tile->n * group,
        .group = group,
        .causal_piece = causal ? n - 1 : n,
        .causal_first = tile->first_position % LAYOUT_BLOCK_TOKENS,
    };
}

/* One KV head in the canonical order: part 0 is the exact set, part 1 + lane the old blocks of a lane. */
static bool add_tile_items(struct tile_items *items)
{
    const struct tile *tile = items->tile;
    uint32_t n_old = exact_set_n_old_blocks(tile->first_position), first = items->n_pieces;
    uint32_t last = (tile->first_position + tile->n - 1) % LAYOUT_BLOCK_TOKENS;
    if (n_old > 0 && !add_piece(items, 0, ~exact_set_old_mask(0)))
        return false;
    for (uint32_t block = n_old; block < tile->block; block++)
        if (!add_piece(items, block, ~(uint64_t)0))
            return false;
    if (!add_piece(items, tile->block, ~(uint64_t)0 >> (LAYOUT_BLOCK_TOKENS - 1 - last)))
        return false;
    add_item(items, 0, first, true);
    for (uint32_t lane = 0; lane < LAYOUT_N_LANES; lane++) {
        first = items->n_pieces;
        for (uint32_t block = lane; block < n_old; block += LAYOUT_N_LANES)
            if (!add_piece(items, block, exact_set_old_mask(block)))
                return false;
        add_item(items, 1 + lane, first, false);
    }
    return true;
}

struct tile_job {
    struct step *step;
    const struct tile *tile;
};

static void merge_position(void *context, uint32_t item, uint32_t thread)
{
    (void)thread;
    const struct tile_job *job = context;
    struct step *step = job->step;
    uint32_t group = group_size(step), n_heads = step->network->shape.n_heads, d = step->shape.head_dim;
    uint32_t n_old = exact_set_n_old_blocks(job->tile->first_position);
    for (uint32_t h = 0; h < n_heads; h++) {
        uint32_t query = item * group + h % group;
        float *into = tile_partials(step, h / group, 0, query);
        for (uint32_t lane = 0; lane < LAYOUT_N_LANES && lane < n_old; lane++)
            step->kernels->partial_merge(into, tile_partials(step, h / group, 1 + lane, query), d);
        step->kernels->partial_finish(into, d,
                                      step->attention + ((size_t)(job->tile->first_row + item) * n_heads + h) * d);
    }
}

static void attend_tile(struct step *step, const struct tile *tile, uint32_t layer)
{
    uint32_t group = group_size(step), n_heads = step->network->shape.n_heads, d = step->shape.head_dim;
    size_t queries = (size_t)LAYOUT_BLOCK_TOKENS * group;
    for (uint32_t i = 0; i < tile->n; i++)
        for (uint32_t head = 0; head < step->shape.n_kv_heads; head++)
            memcpy(step->tile_q + (head * queries + (size_t)i * group) * d,
                   step->q + ((size_t)(tile->first_row + i) * n_heads + (size_t)head * group) * d,
                   (size_t)group * d * sizeof(float));
    struct tile_items items = {.step = step, .tile = tile, .layer = layer};
    for (; items.kv_head < step->shape.n_kv_heads; items.kv_head++)
        if (!add_tile_items(&items)) {
            run_fail(tile->run, -ESTALE, "a block of the session is not in its store any more");
            return;
        }
    step->network->ops->attend(step->network->backend, step->items, items.n_items, d, step_scale(step));
    struct tile_job job = {.step = step, .tile = tile};
    pool_run(step->pool, tile->n, merge_position, &job);
}

void step_prefill_attention(struct step *step, uint32_t layer)
{
    for (uint32_t i = 0, end; i < step->n_rows; i = end) {
        const struct step_row *row = &step->rows[i];
        end = i + 1;
        if (row->is_decode || row->run->error != 0)
            continue;
        struct tile tile = {.run = row->run,
                            .first_row = i,
                            .first_position = row->position,
                            .block = row->position / LAYOUT_BLOCK_TOKENS};
        while (end < step->n_rows && step->rows[end].run == row->run && !step->rows[end].is_decode &&
               step->rows[end].position / LAYOUT_BLOCK_TOKENS == tile.block)
            end++;
        tile.n = end - i;
        attend_tile(step, &tile, layer);
    }
}
