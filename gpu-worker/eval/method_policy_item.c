/*
 * method_policy_item.c - one position and KV head, as step_select.c and the stores compute it for a session: exact set, scores
 * and selection, lane by lane what is selected and the tail of the rest, merged in the canonical order (exact set, lanes 0 .. 11).
 *
 * Owner      method_policy_private.h. Threads: any, each with its own struct method_policy_thread.
 */
#include <math.h>
#include <string.h>

#include "gpu-worker/eval/method_policy_private.h"
#include "gpu-worker/policy/selection.h"
#include "kernels/lane.h"

#define BLOCK LAYOUT_BLOCK_TOKENS

struct piece {
    const uint8_t *rows;
    uint64_t mask;
};

/* As session_pieces(): sinks, the blocks before, the own block up to the position. */
static uint32_t exact_pieces(const struct method_policy_job *job, const struct method_policy_item *item,
                             struct piece pieces[EXACT_SET_WINDOW_BLOCKS + 1])
{
    const uint32_t own = item->position / BLOCK;
    uint32_t n = 0;
    if (item->n_blocks > 0)
        pieces[n++] = (struct piece){pass_tail_block(job->layer, item->kv_head, 0), ~exact_set_old_mask(0)};
    for (uint32_t block = item->n_blocks; block <= own; block++)
        pieces[n++] = (struct piece){pass_tail_block(job->layer, item->kv_head, block), ~(uint64_t)0};
    pieces[n - 1].mask >>= BLOCK - 1 - item->position % BLOCK;
    return n;
}

static void make_empty(float *partials, uint32_t n, uint32_t head_dim)
{
    const size_t width = KERNELS_PARTIAL_FLOATS(head_dim);
    memset(partials, 0, n * width * sizeof *partials);
    for (uint32_t i = 0; i < n; i++)
        partials[i * width] = -INFINITY;
}

static void attend_exact(const struct method_policy_job *job, const struct method_policy_item *item, float *partials)
{
    const struct method_policy *policy = job->policy;
    const uint32_t group = policy->group, d = policy->shape.head_dim;
    struct piece pieces[EXACT_SET_WINDOW_BLOCKS + 1];
    const uint32_t n = exact_pieces(job, item, pieces);
    make_empty(partials, group, d);
    for (uint32_t i = 0; i < n; i++) {
        uint64_t masks[KEY_CODEC_MAX_QUERIES];
        for (uint32_t k = 0; k < group; k++)
            masks[k] = pieces[i].mask;
        policy->tools.kernels->attend_block(item->q, group, d, (enum kernels_rows)policy->shape.codec, pieces[i].rows,
                                            masks, job->scale, partials);
    }
}

uint32_t method_policy_item_score_exact(const struct method_policy_job *job, const struct method_policy_item *item,
                                        struct method_policy_thread *thread)
{
    const struct method_policy *policy = job->policy;
    const uint32_t group = policy->group, d = policy->shape.head_dim;
    struct piece pieces[EXACT_SET_WINDOW_BLOCKS + 1];
    const uint32_t n_pieces = exact_pieces(job, item, pieces);
    uint32_t n = 0;
    for (uint32_t p = 0; p < n_pieces; p++)
        for (uint64_t rest = pieces[p].mask; rest != 0; rest &= rest - 1, n++) {
            policy->tools.kernels->decode_keys(pieces[p].rows + (size_t)__builtin_ctzll(rest) * policy->row_bytes, 1, d,
                                               (enum kernels_rows)policy->shape.codec, thread->keys);
            for (uint32_t k = 0; k < group; k++) {
                float sum = 0;
                for (uint32_t i = 0; i < d; i++)
                    sum += item->q[(size_t)k * d + i] * thread->keys[i];
                thread->exact_scores[(size_t)k * METHOD_POLICY_MAX_EXACT + n] = sum * job->scale;
            }
        }
    return n;
}

/* Fills thread->selection; returns how many tokens are selected. */
static uint32_t select_tokens(const struct method_policy_job *job, const struct method_policy_item *item,
                              struct method_policy_thread *thread)
{
    const struct method_policy *policy = job->policy;
    const struct policy *terms = &policy->policy;
    struct method_policy_selection *selection = &thread->selection;
    if (item->is_fixed) {
        uint32_t n = 0;
        fastgen_profile_masks(policy->profile, job->layer->layer, item->kv_head, pass_ids(job->layer->pass),
                              item->position, item->n_blocks, selection->masks);
        for (uint32_t block = 0; block < item->n_blocks; block++) {
            selection->masks[block] &= exact_set_old_mask(block);
            n += (uint32_t)__builtin_popcountll(selection->masks[block]);
        }
        return n;
    }
    struct selection_item of_keys = {
        .policy = terms,
        .q = item->q,
        .group = policy->group,
        .head_dim = policy->shape.head_dim,
        .scale = job->scale,
        .exact = thread->exact_partials,
        .keys = policy->keys,
        .layer = job->layer->layer,
        .kv_head = item->kv_head,
        .n_blocks = item->n_blocks,
        .masks = selection->masks,
        .masses = selection->masses,
        .references = selection->references,
        .weights = selection->weights,
        .weights_stride = (size_t)item->n_blocks * BLOCK,
    };
    if (terms->terms.selector == POLICY_SELECTOR_MASS) {
        of_keys.exact_scores = thread->exact_scores;
        of_keys.exact_stride = METHOD_POLICY_MAX_EXACT;
        of_keys.n_exact = method_policy_item_score_exact(job, item, thread);
    }
    selection_run(policy->tools.kernels, &of_keys, thread->scratch);
    return of_keys.n_kept;
}

/* The lane's weights of what is selected, [group][64 x max_blocks]: a selection has them in order of blocks. */
static void gather_weights(const struct method_policy *policy, const struct method_policy_item *item, uint32_t lane,
                           struct method_policy_thread *thread)
{
    const struct method_policy_selection *selection = &thread->selection;
    const size_t from_stride = (size_t)item->n_blocks * BLOCK, to_stride = (size_t)policy->max_blocks * BLOCK;
    size_t n_before = 0, n_taken = 0;
    for (uint32_t block = 0; block < item->n_blocks; block++) {
        const size_t n = (size_t)__builtin_popcountll(selection->masks[block]);
        if (block % LAYOUT_N_LANES == lane) {
            for (uint32_t k = 0; k < policy->group; k++)
                memcpy(thread->weights + k * to_stride + n_taken, selection->weights + k * from_stride + n_before,
                       n * sizeof(float));
            n_taken += n;
        }
        n_before += n;
    }
}

/* What the store of a lane would answer, merged. */
static void attend_lane(const struct method_policy_job *job, const struct method_policy_item *item, uint32_t lane,
                        struct method_policy_thread *thread)
{
    const struct method_policy *policy = job->policy;
    const struct method_policy_selection *selection = &thread->selection;
    const uint32_t group = policy->group, d = policy->shape.head_dim;
    const bool has_tail = policy->policy.terms.tail && !item->is_fixed;
    const bool by_weights = policy->policy.mode == AGGREGATE_WEIGHTS && !item->is_fixed;
    uint32_t n = 0;
    for (uint32_t block = lane; block < item->n_blocks; block += LAYOUT_N_LANES, n++) {
        thread->rows[n] = pass_tail_block(job->layer, item->kv_head, block);
        thread->v_sums[n] = pass_tail_block_sums(job->layer, item->kv_head, block) + d;
        thread->masks[n] = selection->masks[block];
        for (uint32_t k = 0; has_tail && k < group; k++)
            thread->masses[(size_t)k * policy->max_blocks + n] = selection->masses[(size_t)k * item->n_blocks + block];
    }
    struct lane work = {
        .n_queries = group,
        .head_dim = d,
        .n_blocks = n,
        .codec = (enum kernels_rows)policy->shape.codec,
        .q = by_weights ? NULL : item->q,
        .scale = job->scale,
        .rows = thread->rows,
        .v_sums = thread->v_sums,
        .masks = thread->masks,
        .masses = has_tail ? thread->masses : NULL,
        .masses_stride = policy->max_blocks,
        .references = selection->references,
    };
    if (by_weights) {
        gather_weights(policy, item, lane, thread);
        work.weights = thread->weights;
        work.weights_stride = (size_t)policy->max_blocks * BLOCK;
    }
    lane_attend(policy->tools.kernels, &work, thread->lane_partials);
    for (uint32_t k = 0; k < group; k++)
        policy->tools.kernels->partial_merge(thread->partials + k * KERNELS_PARTIAL_FLOATS(d),
                                             thread->lane_partials + k * KERNELS_PARTIAL_FLOATS(d), d);
}

void method_policy_item_run(void *context, uint32_t index, uint32_t thread_index)
{
    const struct method_policy_job *job = context;
    struct method_policy *policy = job->policy;
    struct method_policy_thread *thread = &policy->threads[thread_index];
    const uint32_t group = policy->group, d = policy->shape.head_dim;
    const uint32_t n = job->layer->n, i = index % n, kv_head = index / n;
    const size_t first_head = (size_t)i * policy->n_heads + (size_t)kv_head * group;
    struct method_policy_item item = {
        .position = job->layer->first + i,
        .kv_head = kv_head,
        .q = job->layer->q + first_head * d,
    };
    item.n_blocks = exact_set_n_old_blocks(item.position, 0);
    item.is_fixed =
        policy->profile != NULL && fastgen_profile_class(policy->profile, job->layer->layer, kv_head) != FASTGEN_FULL;
    attend_exact(job, &item, thread->exact_partials);
    memcpy(thread->partials, thread->exact_partials, group * KERNELS_PARTIAL_FLOATS(d) * sizeof(float));
    policy->n_selected[index] = 0;
    if (item.n_blocks > 0) {
        if (policy->policy.terms.selector == POLICY_SELECTOR_FULL)
            memset(thread->selection.references, 0, group * sizeof(float));
        policy->n_selected[index] = select_tokens(job, &item, thread);
        for (uint32_t lane = 0; lane < LAYOUT_N_LANES && lane < item.n_blocks; lane++)
            attend_lane(job, &item, lane, thread);
    }
    for (uint32_t k = 0; k < group; k++)
        policy->tools.kernels->partial_finish(thread->partials + k * KERNELS_PARTIAL_FLOATS(d), d,
                                              thread->out + (size_t)k * d);
    memcpy(job->layer->out + first_head * d, thread->out, (size_t)group * d * sizeof(float));
    if (job->looks && item.n_blocks > 0 && i % METHOD_POLICY_LOOK_EVERY == METHOD_POLICY_LOOK_EVERY - 1)
        method_policy_looks_run(
            job, &item, thread,
            &policy->looked[(size_t)kv_head * (n / METHOD_POLICY_LOOK_EVERY) + i / METHOD_POLICY_LOOK_EVERY]);
}
