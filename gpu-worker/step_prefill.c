/* step_prefill.c - exact attention of prefill rows: tiles of consecutive positions in one block, over rows in the stores' segments. */
#include <errno.h>
#include <string.h>

#include "common/pool.h"
#include "gpu-worker/policy/exact_set.h"
#include "gpu-worker/step.h"

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
    size_t queries = (size_t)LAYOUT_BLOCK_TOKENS * step_group(step);
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
    uint32_t group = step_group(step), n = items->n_pieces - first;
    size_t queries = (size_t)LAYOUT_BLOCK_TOKENS * group;
    if (n == 0)
        return;
    step->items[items->n_items++] = (struct backend_attend){
        .q = step->tile_q + items->kv_head * queries * step->shape.head_dim,
        .partials = tile_partials(step, items->kv_head, part, 0),
        .pieces = step->pieces + first,
        .n_pieces = n,
        .n_queries = tile->n * group,
        .group = group,
        .causal_piece = causal ? n - 1 : n,
        .causal_first = tile->first_position % LAYOUT_BLOCK_TOKENS,
        .is_first = true,
    };
}

/* One KV head in the canonical order: part 0 is the exact set, part 1 + lane the old blocks of a lane. */
static bool add_tile_items(struct tile_items *items)
{
    const struct tile *tile = items->tile;
    uint32_t n_old = exact_set_n_old_blocks(tile->first_position, tile->run->session->exact_tokens);
    uint32_t first = items->n_pieces;
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
    uint32_t group = step_group(step), n_heads = step->network->shape.n_heads, d = step->shape.head_dim;
    uint32_t n_old = exact_set_n_old_blocks(job->tile->first_position, job->tile->run->session->exact_tokens);
    for (uint32_t h = 0; h < n_heads; h++) {
        uint32_t query = item * group + h % group;
        float *into = tile_partials(step, h / group, 0, query);
        for (uint32_t lane = 0; lane < LAYOUT_N_LANES && lane < n_old; lane++)
            step->kernels->partial_merge(into, tile_partials(step, h / group, 1 + lane, query), d);
        step->kernels->partial_finish(into, d,
                                      step->attention + ((size_t)(job->tile->first_row + item) * n_heads + h) * d);
    }
}

static int attend_tile(struct step *step, const struct tile *tile, uint32_t layer)
{
    uint32_t group = step_group(step), n_heads = step->network->shape.n_heads, d = step->shape.head_dim;
    size_t queries = (size_t)LAYOUT_BLOCK_TOKENS * group;
    if (step_make_room(step, (size_t)step->shape.n_kv_heads * (tile->block + 2)) < 0)
        return -ENOMEM;
    for (uint32_t i = 0; i < tile->n; i++)
        for (uint32_t head = 0; head < step->shape.n_kv_heads; head++)
            memcpy(step->tile_q + (head * queries + (size_t)i * group) * d,
                   step->q + ((size_t)(tile->first_row + i) * n_heads + (size_t)head * group) * d,
                   (size_t)group * d * sizeof(float));
    struct tile_items items = {.step = step, .tile = tile, .layer = layer};
    for (; items.kv_head < step->shape.n_kv_heads; items.kv_head++)
        if (!add_tile_items(&items)) {
            run_fail(tile->run, -ESTALE, "a block of the session is not in its store any more");
            return 0;
        }
    step->network->ops->attend(step->network->backend, step->items, items.n_items, d, step_codec(step),
                               step_scale(step));
    struct tile_job job = {.step = step, .tile = tile};
    pool_run(step->pool, tile->n, merge_position, &job);
    return 0;
}

/* Positions of one tile have the same old blocks: those of one block, cut where a session's exact tokens end. */
static uint32_t tile_end(const struct step *step, const struct step_half *half, uint32_t i)
{
    const struct step_row *first = &step->rows[i];
    uint32_t exact_tokens = first->run->session->exact_tokens, end = i + 1;
    while (end < half->end && step->rows[end].run == first->run && !step->rows[end].is_decode &&
           step->rows[end].position / LAYOUT_BLOCK_TOKENS == first->position / LAYOUT_BLOCK_TOKENS &&
           (step->rows[end].position < exact_tokens) == (first->position < exact_tokens))
        end++;
    return end;
}

int step_prefill_attention(struct step *step, const struct step_half *half, uint32_t layer)
{
    if (step->network->ops->device != NULL)
        return step_device_prefill(step, half, layer);
    for (uint32_t i = half->first, end; i < half->end; i = end) {
        const struct step_row *row = &step->rows[i];
        end = i + 1;
        if (row->is_decode || row->run->error != 0)
            continue;
        end = tile_end(step, half, i);
        struct tile tile = {.run = row->run,
                            .first_row = i,
                            .n = end - i,
                            .first_position = row->position,
                            .block = row->position / LAYOUT_BLOCK_TOKENS};
        int r = attend_tile(step, &tile, layer);
        if (r < 0)
            return r;
    }
    return 0;
}
