/* layer_gather.c - see layer.h: rows that a selection names are read and attended to, as value-stores do it. */
#include <errno.h>
#include <stdlib.h>

#include "kernels/lane.h"
#include "proto/layout.h"
#include "tests/backend/cuda-on-device/layer.h"

static_assert(LAYOUT_BLOCK_TOKENS == LAYER_TOKENS, "blocks are those of layout.h");

struct call {
    const struct layer_gather *gather;
    const struct layer_selection *selection;
};

/* First place of a lane in lists that are in order of lanes. */
static uint32_t lane_first(uint32_t n_blocks, uint32_t lane)
{
    const uint32_t each = n_blocks / LAYOUT_N_LANES, more = n_blocks % LAYOUT_N_LANES;
    return lane * each + (lane < more ? lane : more);
}

struct layer_gather *layer_gather_free(struct layer_gather *gather)
{
    if (!gather)
        return NULL;
    free(gather->row_lists);
    free(gather->sum_lists);
    free(gather);
    return NULL;
}

int layer_gather_new(const struct layer_rows *rows, uint32_t n_blocks, struct layer_gather **ret_gather)
{
    struct layer_gather *gather = calloc(1, sizeof *gather);
    if (!gather)
        return -ENOMEM;
    *gather = (struct layer_gather){.rows = rows, .n_blocks = n_blocks};
    gather->row_lists = calloc((size_t)LAYER_N_KV_HEADS * n_blocks, sizeof *gather->row_lists);
    gather->sum_lists = calloc((size_t)LAYER_N_KV_HEADS * n_blocks, sizeof *gather->sum_lists);
    if (!gather->row_lists || !gather->sum_lists) {
        layer_gather_free(gather);
        return -ENOMEM;
    }
    size_t n = 0;
    for (uint32_t head = 0; head < LAYER_N_KV_HEADS; head++)
        for (uint32_t lane = 0; lane < LAYOUT_N_LANES; lane++)
            for (uint32_t block = lane; block < n_blocks; block += LAYOUT_N_LANES, n++) {
                gather->row_lists[n] = layer_rows_of(rows, block, head);
                gather->sum_lists[n] = layer_sums_of(rows, block, head);
            }
    *ret_gather = gather;
    return 0;
}

static void run_lane(void *context, uint32_t item, uint32_t thread)
{
    (void)thread;
    const struct call *call = context;
    const struct layer_gather *gather = call->gather;
    const struct layer_selection *selection = call->selection;
    const uint32_t lane = item / LAYER_N_KV_HEADS, head = item % LAYER_N_KV_HEADS;
    const uint32_t first = lane_first(gather->n_blocks, lane), end = lane_first(gather->n_blocks, lane + 1);
    const size_t at = (size_t)head * gather->n_blocks + first;
    struct lane work = {
        .n_queries = LAYER_GROUP,
        .head_dim = LAYER_DIM,
        .n_blocks = end - first,
        .codec = KERNELS_ROWS_F16,
        .q = selection->q + (size_t)head * LAYER_GROUP * LAYER_DIM,
        .scale = layer_scale(),
        .rows = gather->row_lists + at,
        .masks = selection->masks + at,
    };
    if (selection->masses) {
        work.v_sums = gather->sum_lists + at;
        work.masses = selection->masses + (size_t)head * LAYER_GROUP * gather->n_blocks + first;
        work.masses_stride = gather->n_blocks;
        work.references = selection->references + head * LAYER_GROUP;
    }
    lane_attend(gather->rows->kernels, &work,
                selection->partials + ((size_t)lane * LAYER_N_HEADS + head * LAYER_GROUP) * LAYER_WIDTH);
}

void layer_gather_run(const struct layer_gather *gather, const struct layer_selection *selection)
{
    struct call call = {gather, selection};
    pool_run(gather->rows->pool, LAYOUT_N_LANES * LAYER_N_KV_HEADS, run_lane, &call);
}

double layer_gather_bytes(const struct layer_gather *gather, const struct layer_selection *selection)
{
    uint64_t n_rows = 0;
    for (size_t i = 0; i < (size_t)LAYER_N_KV_HEADS * gather->n_blocks; i++)
        n_rows += (uint64_t)__builtin_popcountll(selection->masks[i]);
    const double sums = selection->masses ? (double)gather->n_blocks * LAYER_BLOCK_SUMS * sizeof(float) : 0;
    return (double)n_rows * LAYER_ROW_BYTES + sums;
}
