/*
 * step_select.c - scores and selection of a layer's decode rows: one item a row and KV head, spread over the pool, or all of them
 * asked of the device.
 *
 * A selection is made by block number and then put in the order in which the stores take it: by lane. Results are the host's.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/pool.h"
#include "gpu-worker/policy/exact_set.h"
#include "gpu-worker/policy/selection.h"
#include "gpu-worker/step.h"

/* Tokens of an exact set that leaves anything old. */
enum { MAX_EXACT = LAYOUT_N_SINKS + EXACT_SET_WINDOW_BLOCKS * LAYOUT_BLOCK_TOKENS };

/* What one thread needs. */
struct select_thread {
    void *scratch;       /* of selection_run(); grows with what the rows' quantizers ask for */
    uint64_t *masks;     /* [max_blocks] */
    float *masses;       /* [group][max_blocks] */
    float *weights;      /* [group][64 max_blocks] */
    float *exact_scores; /* [group][MAX_EXACT] */
    float *keys;         /* [64][head_dim] */
};

struct step_scratch {
    uint32_t max_blocks, n_threads;
    size_t thread_bytes; /* of each thread's scratch */
    struct select_thread *threads;
    /* of the rows' selections */
    uint64_t *masks;
    float *masses, *references, *weights; /* weights [limits.max_weights]: as soon as a row wants some */
    size_t n_weights;                     /* of this batch */
    uint32_t *n_selected;
    bool *is_fixed;
    uint32_t *item_rows;          /* [max_decode]: rows of the half that select */
    struct backend_select *items; /* [max_decode x n_kv_heads]; where a device selects */
};

static void *aligned(size_t n_bytes)
{
    return aligned_alloc(64, (n_bytes + 63) / 64 * 64);
}

static bool thread_new(const struct step *step, uint32_t max_blocks, struct select_thread *thread)
{
    size_t group = step_group(step), d = step->shape.head_dim;
    thread->masks = aligned(max_blocks * sizeof(uint64_t));
    if (step->network->ops->device != NULL)
        return thread->masks != NULL; /* of heads without keys */
    thread->masses = aligned(group * max_blocks * sizeof(float));
    thread->weights = aligned(group * max_blocks * LAYOUT_BLOCK_TOKENS * sizeof(float));
    thread->exact_scores = aligned(group * MAX_EXACT * sizeof(float));
    thread->keys = aligned(LAYOUT_BLOCK_TOKENS * d * sizeof(float));
    return thread->masks != NULL && thread->masses != NULL && thread->weights != NULL && thread->exact_scores != NULL &&
           thread->keys != NULL;
}

/* Memory that a device writes results to. */
static void *result_alloc(const struct step *step, size_t n_bytes)
{
    return step->network->ops->device == NULL ? aligned(n_bytes) : step_host_alloc(step, n_bytes);
}

static void result_free(const struct step *step, void *memory)
{
    if (step->network->ops->device == NULL)
        free(memory);
    else
        step_host_free(step, memory);
}

int step_select_new(struct step *step)
{
    struct step_scratch *scratch = calloc(1, sizeof(*scratch));
    step->scratch = scratch;
    if (scratch == NULL)
        return -ENOMEM;
    size_t n_rows = step->limits.max_decode, n_heads = step->network->shape.n_heads, n_kv = step->shape.n_kv_heads;
    scratch->max_blocks = step->limits.n_ctx / LAYOUT_BLOCK_TOKENS + 2;
    scratch->n_threads = pool_n_threads(step->pool);
    scratch->threads = calloc(scratch->n_threads, sizeof(*scratch->threads));
    scratch->masks = result_alloc(step, n_rows * n_kv * scratch->max_blocks * sizeof(uint64_t));
    scratch->masses = result_alloc(step, n_rows * n_heads * scratch->max_blocks * sizeof(float));
    scratch->references = result_alloc(step, n_rows * n_heads * sizeof(float));
    scratch->n_selected = result_alloc(step, n_rows * n_kv * sizeof(uint32_t));
    scratch->items = calloc(n_rows * n_kv, sizeof(*scratch->items));
    scratch->is_fixed = calloc(n_rows * n_kv, sizeof(bool));
    scratch->item_rows = calloc(n_rows, sizeof(uint32_t));
    if (scratch->threads == NULL || scratch->masks == NULL || scratch->masses == NULL || scratch->references == NULL ||
        scratch->items == NULL || scratch->n_selected == NULL || scratch->is_fixed == NULL ||
        scratch->item_rows == NULL)
        return -ENOMEM;
    for (uint32_t i = 0; i < scratch->n_threads; i++)
        if (!thread_new(step, scratch->max_blocks, &scratch->threads[i]))
            return -ENOMEM;
    return 0;
}

void step_select_free(struct step *step)
{
    struct step_scratch *scratch = step->scratch;
    if (scratch == NULL)
        return;
    for (uint32_t i = 0; scratch->threads != NULL && i < scratch->n_threads; i++) {
        free(scratch->threads[i].scratch);
        free(scratch->threads[i].masks);
        free(scratch->threads[i].masses);
        free(scratch->threads[i].weights);
        free(scratch->threads[i].exact_scores);
        free(scratch->threads[i].keys);
    }
    free(scratch->threads);
    result_free(step, scratch->masks);
    result_free(step, scratch->masses);
    result_free(step, scratch->references);
    result_free(step, scratch->weights);
    result_free(step, scratch->n_selected);
    free(scratch->items);
    free(scratch->is_fixed);
    free(scratch->item_rows);
    free(scratch);
    step->scratch = NULL;
}

/* Everything old, by lane: the same in every layer and head. */
static void select_everything(const struct step *step, struct step_selection *selection)
{
    for (uint32_t head = 0; head < step->shape.n_kv_heads; head++) {
        uint64_t *masks = selection->masks + (size_t)head * selection->n_blocks;
        for (uint32_t lane = 0; lane < LAYOUT_N_LANES; lane++)
            for (uint32_t block = lane; block < selection->n_blocks; block += LAYOUT_N_LANES)
                *masks++ = exact_set_old_mask(block);
        selection->n_selected[head] = selection->n_blocks * LAYOUT_BLOCK_TOKENS - LAYOUT_N_SINKS;
    }
}

/* Room for selections on keys of this quantizer, whose query tables may be large. */
static bool make_scratch(const struct step *step, const struct key_quantizer *quantizer)
{
    struct step_scratch *scratch = step->scratch;
    if (step->network->ops->device != NULL)
        return true;
    size_t n_bytes = selection_scratch_bytes(quantizer, step_group(step), scratch->max_blocks);
    if (n_bytes <= scratch->thread_bytes)
        return true;
    scratch->thread_bytes = 0;
    for (uint32_t i = 0; i < scratch->n_threads; i++) {
        free(scratch->threads[i].scratch);
        scratch->threads[i].scratch = aligned(n_bytes);
        if (scratch->threads[i].scratch == NULL)
            return false;
    }
    scratch->thread_bytes = n_bytes;
    return true;
}

/* A row's part of the memory for weights; engine_step.c sees to it that a batch asks for no more than there is. */
static bool take_weights(struct step *step, struct step_row *row)
{
    struct step_scratch *scratch = step->scratch;
    size_t n = (size_t)step->network->shape.n_heads * row->selection.n_blocks * LAYOUT_BLOCK_TOKENS;
    if (!row->run->policy.terms.weights || n == 0)
        return true;
    if (scratch->weights == NULL) /* address space, for the most part, where it is no device's */
        scratch->weights = result_alloc(step, step->limits.max_weights * sizeof(float));
    if (scratch->weights == NULL || n > step->limits.max_weights - scratch->n_weights)
        return false;
    row->selection.weights = scratch->weights + scratch->n_weights;
    scratch->n_weights += n;
    return true;
}

void step_select_clear(struct step *step)
{
    step->scratch->n_weights = 0;
}

bool step_select_begin(struct step *step, struct step_row *row)
{
    struct step_scratch *scratch = step->scratch;
    struct step_selection *selection = &row->selection;
    size_t i = row->decode_index, n_heads = step->network->shape.n_heads, n_kv = step->shape.n_kv_heads;
    size_t max_blocks = scratch->max_blocks;
    selection->n_blocks = exact_set_n_old_blocks(row->position, row->run->session->exact_tokens);
    if (selection->n_blocks > max_blocks)
        return false;
    selection->masks = scratch->masks + i * n_kv * max_blocks;
    selection->masses = scratch->masses + i * n_heads * max_blocks;
    selection->references = scratch->references + i * n_heads;
    selection->n_selected = scratch->n_selected + i * n_kv;
    selection->is_fixed = scratch->is_fixed + i * n_kv;
    memset(selection->is_fixed, 0, n_kv * sizeof(bool));
    if (row->run->policy.quantizer != NULL && selection->n_blocks > 0 &&
        !make_scratch(step, row->run->policy.quantizer))
        return false;
    if (!take_weights(step, row))
        return false;
    for (uint32_t lane = 0, first = 0; lane <= LAYOUT_N_LANES; lane++) {
        selection->lane_first[lane] = first;
        if (lane < LAYOUT_N_LANES && lane < selection->n_blocks)
            first += (selection->n_blocks - 1 - lane) / LAYOUT_N_LANES + 1;
    }
    if (row->run->policy.terms.selector == POLICY_SELECTOR_FULL && selection->n_blocks > 0) {
        memset(selection->references, 0, n_heads * sizeof(float));
        select_everything(step, selection);
    }
    return true;
}

/* ---- one item ---- */

/* Scores of the exact set's tokens, for selectors that order all tokens by weight. */
static uint32_t score_exact(const struct step *step, const struct step_row *row, const float *q, uint32_t layer,
                            uint32_t kv_head, struct select_thread *thread)
{
    uint32_t group = step_group(step), d = step->shape.head_dim, n = 0;
    struct backend_piece pieces[EXACT_SET_WINDOW_BLOCKS + 1];
    size_t row_bytes = layout_row_bytes(&step->shape);
    if (exact_set_n_old_blocks(row->position, row->run->session->exact_tokens) == 0)
        return 0;
    uint32_t n_pieces = session_pieces(row->run->session, layer, kv_head, row->position, pieces);
    for (uint32_t p = 0; p < n_pieces; p++)
        for (uint32_t token = 0; token < LAYOUT_BLOCK_TOKENS; token++) {
            if ((pieces[p].mask >> token & 1) == 0)
                continue;
            step->kernels->decode_keys((const uint8_t *)pieces[p].rows + token * row_bytes, 1, d, step_codec(step),
                                       thread->keys);
            for (uint32_t k = 0; k < group; k++) {
                float sum = 0;
                for (uint32_t i = 0; i < d; i++)
                    sum += q[(size_t)k * d + i] * thread->keys[i];
                thread->exact_scores[(size_t)k * MAX_EXACT + n] = sum * step_scale(step);
            }
            n++;
        }
    return n;
}

/* From the order of block numbers to the order of lanes. */
static void put_in_lanes(struct step_row *row, uint32_t kv_head, const struct selection_item *item)
{
    struct step_selection *selection = &row->selection;
    uint32_t group = item->group, n_blocks = selection->n_blocks;
    uint64_t *masks = selection->masks + (size_t)kv_head * n_blocks;
    for (uint32_t lane = 0; lane < LAYOUT_N_LANES; lane++)
        for (uint32_t block = lane; block < n_blocks; block += LAYOUT_N_LANES)
            *masks++ = item->masks[block];
    if (selection->is_fixed[kv_head])
        return;
    for (uint32_t k = 0; item->policy->terms.tail && k < group; k++) {
        const float *from = item->masses + (size_t)k * n_blocks;
        float *to = selection->masses + ((size_t)kv_head * group + k) * n_blocks;
        for (uint32_t lane = 0; lane < LAYOUT_N_LANES; lane++)
            for (uint32_t block = lane; block < n_blocks; block += LAYOUT_N_LANES)
                *to++ = from[block];
    }
    if (item->weights == NULL)
        return;
    uint32_t first[n_blocks], n_before = 0; /* of each block among the selected */
    for (uint32_t block = 0; block < n_blocks; block++) {
        first[block] = n_before;
        n_before += (uint32_t)__builtin_popcountll(item->masks[block]);
    }
    size_t stride = (size_t)n_blocks * LAYOUT_BLOCK_TOKENS;
    for (uint32_t k = 0; k < group; k++) {
        float *to = selection->weights + ((size_t)kv_head * group + k) * stride;
        for (uint32_t lane = 0; lane < LAYOUT_N_LANES; lane++)
            for (uint32_t block = lane; block < n_blocks; block += LAYOUT_N_LANES) {
                size_t n = (size_t)__builtin_popcountll(item->masks[block]);
                memcpy(to, item->weights + k * item->weights_stride + first[block], n * sizeof(float));
                to += n;
            }
    }
}

/* The fixed set of a head that keeps no keys; the exact set's tokens are read anyhow. */
static void select_fixed(struct step_row *row, struct selection_item *item)
{
    const struct run *run = row->run;
    fastgen_profile_masks(run->session->profile, item->layer, item->kv_head, run->ids, row->position, item->n_blocks,
                          item->masks);
    item->n_kept = 0;
    for (uint32_t block = 0; block < item->n_blocks; block++) {
        item->masks[block] &= exact_set_old_mask(block);
        item->n_kept += (uint32_t)__builtin_popcountll(item->masks[block]);
    }
}

struct select_job {
    struct step *step;
    uint32_t layer;
};

static void select_item(void *context, uint32_t index, uint32_t thread_index)
{
    const struct select_job *job = context;
    struct step *step = job->step;
    struct select_thread *thread = &step->scratch->threads[thread_index];
    uint32_t n_kv = step->shape.n_kv_heads, n_heads = step->network->shape.n_heads, d = step->shape.head_dim;
    uint32_t group = step_group(step), kv_head = index % n_kv, i = step->scratch->item_rows[index / n_kv];
    struct step_row *row = &step->rows[i];
    const struct policy *policy = &row->run->policy;
    size_t first_head = (size_t)kv_head * group;
    const float *q = step->q + ((size_t)i * n_heads + first_head) * d;
    struct selection_item item = {
        .policy = policy,
        .q = q,
        .group = group,
        .head_dim = d,
        .scale = step_scale(step),
        .exact = step->exact_partials + ((size_t)row->decode_index * n_heads + first_head) * KERNELS_PARTIAL_FLOATS(d),
        .keys = row->run->session->keys,
        .layer = job->layer,
        .kv_head = kv_head,
        .n_blocks = row->selection.n_blocks,
        .masks = thread->masks,
        .masses = thread->masses,
        .references = row->selection.references + first_head,
        .weights = policy->terms.weights ? thread->weights : NULL,
        .weights_stride = (size_t)row->selection.n_blocks * LAYOUT_BLOCK_TOKENS,
    };
    bool is_fixed = !key_cache_has(item.keys, item.layer, kv_head);
    if (policy->terms.selector == POLICY_SELECTOR_MASS && !is_fixed) {
        item.exact_scores = thread->exact_scores;
        item.exact_stride = MAX_EXACT;
        item.n_exact = score_exact(step, row, q, job->layer, kv_head, thread);
    }
    row->selection.is_fixed[kv_head] = is_fixed;
    if (is_fixed)
        select_fixed(row, &item);
    else
        selection_run(step->kernels, &item, thread->scratch);
    put_in_lanes(row, kv_head, &item);
    row->selection.n_selected[kv_head] = item.n_kept;
}

/* ---- by the device ---- */

static void ask_device(struct step *step, uint32_t n_rows, uint32_t layer)
{
    struct step_scratch *scratch = step->scratch;
    const struct network *network = step->network;
    uint32_t n_kv = step->shape.n_kv_heads, d = step->shape.head_dim, group = step_group(step), n = 0;
    for (uint32_t k = 0; k < n_rows * n_kv; k++) {
        uint32_t i = scratch->item_rows[k / n_kv], kv_head = k % n_kv;
        struct step_row *row = &step->rows[i];
        struct step_selection *selection = &row->selection;
        size_t first_head = (size_t)kv_head * group, n_blocks = selection->n_blocks;
        selection->is_fixed[kv_head] = !key_cache_has(row->run->session->keys, layer, kv_head);
        if (selection->is_fixed[kv_head]) {
            struct selection_item item = {.policy = &row->run->policy,
                                          .group = group,
                                          .layer = layer,
                                          .kv_head = kv_head,
                                          .n_blocks = selection->n_blocks,
                                          .masks = scratch->threads[0].masks};
            select_fixed(row, &item);
            put_in_lanes(row, kv_head, &item);
            selection->n_selected[kv_head] = item.n_kept;
            continue;
        }
        const struct backend_attend *exact = &step->items[row->first_item + kv_head];
        scratch->items[n++] = (struct backend_select){
            .policy = &row->run->policy,
            .q = exact->q,
            .exact = exact->partials,
            .pieces = exact->pieces,
            .n_pieces = exact->n_pieces,
            .keys = row->run->session->keys,
            .layer = layer,
            .kv_head = kv_head,
            .n_blocks = selection->n_blocks,
            .masks = selection->masks + kv_head * n_blocks,
            .masses = selection->masses + first_head * n_blocks,
            .references = selection->references + first_head,
            .weights =
                selection->weights == NULL ? NULL : selection->weights + first_head * n_blocks * LAYOUT_BLOCK_TOKENS,
            .weights_stride = n_blocks * LAYOUT_BLOCK_TOKENS,
            .n_kept = &selection->n_selected[kv_head],
        };
    }
    if (n > 0)
        network->ops->device->select(network->backend, scratch->items, n, group, d, step_codec(step), step_scale(step));
}

/* ---- all of a layer ---- */

static void count(const struct step *step, const struct step_row *row, uint32_t layer)
{
    const struct step_selection *selection = &row->selection;
    struct session_counts *counts = &row->run->session->counts;
    uint32_t n_kv = step->shape.n_kv_heads;
    if (layer == 0) {
        counts->n_steps++;
        counts->n_old_tokens += selection->n_blocks * LAYOUT_BLOCK_TOKENS - LAYOUT_N_SINKS;
    }
    for (uint32_t head = 0; head < n_kv; head++) {
        const uint64_t *masks = selection->masks + (size_t)head * selection->n_blocks;
        counts->n_kept[(size_t)layer * n_kv + head] += selection->n_selected[head];
        for (uint32_t lane = 0; lane < LAYOUT_N_LANES; lane++)
            for (uint32_t i = selection->lane_first[lane]; i < selection->lane_first[lane + 1]; i++)
                counts->bytes_read[lane] += (uint64_t)__builtin_popcountll(masks[i]) * layout_row_bytes(&step->shape);
    }
}

void step_select(struct step *step, const struct step_half *half, uint32_t layer)
{
    uint64_t start = clock_now_us();
    uint32_t n = 0;
    for (uint32_t i = half->first; i < half->end; i++) {
        const struct step_row *row = &step->rows[i];
        if (row->is_decode && row->run->error == 0 && row->selection.n_blocks > 0 &&
            row->run->policy.terms.selector != POLICY_SELECTOR_FULL)
            step->scratch->item_rows[n++] = i;
    }
    struct select_job job = {.step = step, .layer = layer};
    if (step->network->ops->device != NULL)
        ask_device(step, n, layer);
    else
        pool_run(step->pool, n * step->shape.n_kv_heads, select_item, &job);
    if (n > 0)
        step->select_us += clock_now_us() - start;
}

void step_select_count(const struct step *step, const struct step_half *half, uint32_t layer)
{
    for (uint32_t i = half->first; i < half->end; i++) {
        const struct step_row *row = &step->rows[i];
        if (row->is_decode && row->run->error == 0 && row->selection.n_blocks > 0)
            count(step, row, layer);
    }
}
