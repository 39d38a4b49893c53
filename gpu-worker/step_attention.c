/* step_attention.c - the worker's own part of a decode step's attention: exact set, merge, and the oracle of transport direct. */
#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/pool.h"
#include "gpu-worker/step.h"
#include "kernels/lane.h"

int step_exact(struct step *step, const struct step_half *half, uint32_t layer)
{
    uint32_t n_heads = step->network->shape.n_heads, n_kv = step->shape.n_kv_heads, d = step->shape.head_dim;
    uint32_t group = step_group(step), n_items = 0;
    size_t partial = KERNELS_PARTIAL_FLOATS(d), n_pieces = 0;
    uint64_t start = clock_now_us();
    for (uint32_t i = half->first; i < half->end; i++)
        n_pieces += step->rows[i].is_decode ? (size_t)n_kv * session_max_pieces(step->rows[i].run->session) : 0;
    if (n_pieces == 0)
        return 0;
    if (step_make_room(step, n_pieces) < 0)
        return -ENOMEM;
    struct backend_piece *pieces = step->pieces;
    for (uint32_t i = half->first; i < half->end; i++) {
        struct step_row *row = &step->rows[i];
        if (!row->is_decode)
            continue;
        float *partials = step->exact_partials + (size_t)row->decode_index * n_heads * partial;
        row->first_item = n_items;
        for (uint32_t head = 0; head < n_kv; head++) {
            uint32_t n = session_pieces(row->run->session, layer, head, row->position, pieces);
            size_t first = (size_t)head * group;
            step->items[n_items++] = (struct backend_attend){
                .q = step->q + ((size_t)i * n_heads + first) * d,
                .partials = partials + first * partial,
                .pieces = pieces,
                .n_pieces = n,
                .n_queries = group,
                .group = group,
                .causal_piece = n,
                .is_first = true,
            };
            pieces += n;
        }
    }
    step->network->ops->attend(step->network->backend, step->items, n_items, d, step_codec(step), step_scale(step));
    step->attention_us += clock_now_us() - start;
    return 0;
}

/* ---- transport direct: what the stores would answer, computed on their mapped segments ---- */

struct direct_job {
    struct step *step;
    const struct step_half *half;
    uint32_t layer;
};

static void direct_lane(void *context, uint32_t item, uint32_t thread)
{
    (void)thread;
    const struct direct_job *job = context;
    struct step *step = job->step;
    uint32_t n_kv = step->shape.n_kv_heads, d = step->shape.head_dim, group = step_group(step);
    uint32_t lane = item % LAYOUT_N_LANES, head = item / LAYOUT_N_LANES % n_kv;
    uint32_t i = job->half->first + item / LAYOUT_N_LANES / n_kv;
    const struct step_row *row = &step->rows[i];
    const struct step_selection *selection = &row->selection;
    uint32_t first = selection->lane_first[lane], n = selection->lane_first[lane + 1] - first;
    if (!row->is_decode || row->run->error != 0 || n == 0)
        return;
    const struct policy_terms *terms = &row->run->policy.terms;
    const bool has_tail = terms->tail && !selection->is_fixed[head];
    const bool has_weights = terms->weights && !selection->is_fixed[head];
    const void *rows[n];
    const float *v_sums[n];
    for (uint32_t k = 0, block = lane; k < n; k++, block += LAYOUT_N_LANES) {
        const struct block_header *header = stores_block(
            step->stores, run_store(row->run, block), row->run->request->blocks[block], row->run->session->id, block);
        if (header == NULL)
            return; /* the append of this layer meets the same store and fails the run */
        rows[k] = stores_rows(step->stores, header, job->layer, head);
        v_sums[k] = stores_v_sums(step->stores, header, job->layer, head);
    }
    const uint64_t *masks = selection->masks + (size_t)head * selection->n_blocks;
    size_t n_before = 0;
    for (uint32_t k = 0; has_weights && k < first; k++)
        n_before += (size_t)__builtin_popcountll(masks[k]);
    size_t first_head = (size_t)head * group, weights_stride = (size_t)selection->n_blocks * LAYOUT_BLOCK_TOKENS;
    struct lane work = {
        .n_queries = group,
        .head_dim = d,
        .n_blocks = n,
        .codec = step_codec(step),
        .q = step->host_q + ((size_t)i * step->network->shape.n_heads + first_head) * d,
        .scale = step_scale(step),
        .rows = rows,
        .v_sums = v_sums,
        .masks = masks + first,
        .masses = has_tail ? selection->masses + first_head * selection->n_blocks + first : NULL,
        .masses_stride = selection->n_blocks,
        .references = selection->references + first_head,
    };
    if (has_weights) {
        work.q = NULL;
        work.weights = selection->weights + first_head * weights_stride + n_before;
        work.weights_stride = weights_stride;
    }
    size_t index = ((size_t)row->decode_index * n_kv + head) * LAYOUT_N_LANES + lane;
    float *partials = step->direct_partials + index * group * KERNELS_PARTIAL_FLOATS(d);
    lane_attend(step->kernels, &work, partials);
    step->lane_partials[index] = partials;
}

void step_direct(struct step *step, const struct step_half *half, uint32_t layer)
{
    struct direct_job job = {.step = step, .half = half, .layer = layer};
    pool_run(step->pool, (half->end - half->first) * step->shape.n_kv_heads * LAYOUT_N_LANES, direct_lane, &job);
}

/* ---- merge ---- */

struct merge_job {
    struct step *step;
    const struct step_half *half;
};

static void merge_row(void *context, uint32_t item, uint32_t thread)
{
    (void)thread;
    const struct merge_job *job = context;
    struct step *step = job->step;
    uint32_t n_heads = step->network->shape.n_heads, n_kv = step->shape.n_kv_heads, d = step->shape.head_dim;
    uint32_t group = step_group(step), i = job->half->first + item;
    size_t partial = KERNELS_PARTIAL_FLOATS(d);
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

static void merge_on_device(struct step *step, const struct step_half *half)
{
    static_assert(BACKEND_N_LANES == LAYOUT_N_LANES, "a back end's lanes are the layout's");
    const struct network *network = step->network;
    uint32_t n_heads = network->shape.n_heads, n_kv = step->shape.n_kv_heads, d = step->shape.head_dim, n = 0;
    uint32_t group = step_group(step);
    for (uint32_t i = half->first; i < half->end; i++) {
        const struct step_row *row = &step->rows[i];
        for (uint32_t head = 0; row->is_decode && head < n_kv; head++) {
            size_t index = (size_t)row->decode_index * n_kv + head;
            struct backend_merge *merge = &step->merges[n++];
            merge->partials = step->exact_partials + index * group * KERNELS_PARTIAL_FLOATS(d);
            memcpy(merge->from, step->lane_partials + index * LAYOUT_N_LANES, sizeof(merge->from));
            merge->out = step->attention + ((size_t)i * n_heads + (size_t)head * group) * d;
        }
    }
    if (n > 0)
        network->ops->device->merge(network->backend, step->merges, n, group, d);
}

void step_merge(struct step *step, const struct step_half *half)
{
    struct merge_job job = {.step = step, .half = half};
    uint64_t start = clock_now_us();
    if (step->network->ops->device != NULL) {
        merge_on_device(step, half);
        return;
    }
    /* a handful of rows is merged sooner than other threads wake up */
    pool_run(half->end - half->first < 4 ? NULL : step->pool, half->end - half->first, merge_row, &job);
    step->attention_us += clock_now_us() - start;
}
