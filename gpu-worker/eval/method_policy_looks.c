/*
 * method_policy_looks.c - what a selection and its estimates are worth against the exact scores of all tokens.
 *
 * Exact scores come from an f16 key cache (which is the rows' keys themselves where rows are f16), and the exact selection from
 * the same selector on them.
 *
 * Owner      method_policy_private.h. Threads: any, each with its own struct method_policy_thread.
 */
#include <math.h>
#include <string.h>

#include "gpu-worker/eval/method_policy_private.h"
#include "gpu-worker/policy/selection.h"

#define BLOCK LAYOUT_BLOCK_TOKENS

/* thread->scores [group][64 x n_blocks] */
static void score(const struct method_policy_job *job, const struct method_policy_item *item,
                  struct method_policy_thread *thread)
{
    const struct method_policy *policy = job->policy;
    const struct key_codec *codec = policy->exact_quantizer.codec;
    const struct key_head *head = key_quantizer_head(&policy->exact_quantizer, 0, item->kv_head);
    const size_t stride = (size_t)item->n_blocks * BLOCK;
    codec->prepare(policy->tools.kernels, head, item->q, policy->group, job->scale, thread->exact_query);
    for (uint32_t first = 0, n; first < item->n_blocks; first += n) {
        const void *tiles;
        const float *sides;
        n = key_cache_run(policy->exact_keys, 0, item->kv_head, first, &tiles, &sides);
        n = n < item->n_blocks - first ? n : item->n_blocks - first;
        codec->score(policy->tools.kernels, head, thread->exact_query, policy->group, tiles, sides, n,
                     thread->scores + (size_t)first * BLOCK, stride);
    }
}

/* Share of what the selector takes for exact scores that was selected; 1 where it takes nothing. */
static float recall(const struct method_policy_job *job, const struct method_policy_item *item,
                    struct method_policy_thread *thread)
{
    const struct method_policy *policy = job->policy;
    struct selection_item exact = {
        .policy = &policy->policy,
        .q = item->q,
        .group = policy->group,
        .head_dim = policy->shape.head_dim,
        .scale = job->scale,
        .exact = thread->exact_partials,
        .keys = policy->exact_keys,
        .kv_head = item->kv_head,
        .n_blocks = item->n_blocks,
        .masks = thread->exact_selection.masks,
        .masses = thread->exact_selection.masses,
        .references = thread->exact_selection.references,
    };
    if (policy->policy.terms.selector == POLICY_SELECTOR_MASS) {
        exact.exact_scores = thread->exact_scores;
        exact.exact_stride = METHOD_POLICY_MAX_EXACT;
        exact.n_exact = method_policy_item_score_exact(job, item, thread);
    }
    selection_run(policy->tools.kernels, &exact, thread->exact_scratch);
    uint32_t n_both = 0;
    for (uint32_t block = 0; block < item->n_blocks; block++)
        n_both += (uint32_t)__builtin_popcountll(exact.masks[block] & thread->selection.masks[block]);
    return exact.n_kept == 0 ? 1 : (float)n_both / (float)exact.n_kept;
}

/* Exact mass of what one query head reads exactly; and how far the estimate of the rest is off. */
static void weigh(const struct method_policy_job *job, const struct method_policy_item *item,
                  const struct method_policy_thread *thread, uint32_t k, double *ret_mass, double *ret_tail_error)
{
    const struct method_policy *policy = job->policy;
    const struct method_policy_selection *selection = &thread->selection;
    const float *partial = thread->exact_partials + (size_t)k * KERNELS_PARTIAL_FLOATS(policy->shape.head_dim);
    const float *scores = thread->scores + (size_t)k * item->n_blocks * BLOCK;
    double largest = (double)partial[0];
    for (uint32_t i = LAYOUT_N_SINKS; i < item->n_blocks * BLOCK; i++)
        largest = fmax(largest, (double)scores[i]);
    double kept = (double)partial[1] * exp((double)partial[0] - largest), left = 0, estimate = 0;
    for (uint32_t block = 0; block < item->n_blocks; block++) {
        const uint64_t old = exact_set_old_mask(block);
        for (uint32_t i = 0; i < BLOCK; i++) {
            const double weight = exp((double)scores[(size_t)block * BLOCK + i] - largest);
            if ((selection->masks[block] >> i & 1) != 0)
                kept += weight;
            else if ((old >> i & 1) != 0)
                left += weight;
        }
    }
    *ret_mass = kept / (kept + left);
    *ret_tail_error = 0;
    if (!policy->policy.terms.tail || item->is_fixed)
        return;
    for (uint32_t block = 0; block < item->n_blocks; block++)
        estimate += (double)selection->masses[(size_t)k * item->n_blocks + block];
    if (estimate > 0 && left > 0) /* everything was selected, or nothing of the rest weighs anything */
        *ret_tail_error = fabs(log(estimate) + (double)selection->references[k] - log(left) - largest);
}

/* |out - exact|^2 / |exact|^2, over the group. */
static double output_error(const struct method_policy_job *job, const struct method_policy_item *item,
                           const struct method_policy_thread *thread)
{
    const struct method_policy *policy = job->policy;
    const uint32_t group = policy->group, d = policy->shape.head_dim;
    float *partials = thread->lane_partials; /* not in use any more */
    memcpy(partials, thread->exact_partials, group * KERNELS_PARTIAL_FLOATS(d) * sizeof(float));
    for (uint32_t block = 0; block < item->n_blocks; block++) {
        uint64_t masks[KEY_CODEC_MAX_QUERIES];
        for (uint32_t k = 0; k < group; k++)
            masks[k] = exact_set_old_mask(block);
        policy->tools.kernels->attend_block(item->q, group, d, (enum kernels_rows)policy->shape.codec,
                                            pass_tail_block(job->layer, item->kv_head, block), masks, job->scale,
                                            partials);
    }
    double error = 0, size = 0;
    for (uint32_t k = 0; k < group; k++) {
        float exact[KERNELS_MAX_HEAD_DIM];
        policy->tools.kernels->partial_finish(partials + k * KERNELS_PARTIAL_FLOATS(d), d, exact);
        for (uint32_t i = 0; i < d; i++) {
            const double off = (double)thread->out[(size_t)k * d + i] - (double)exact[i];
            error += off * off;
            size += (double)exact[i] * (double)exact[i];
        }
    }
    return size > 0 ? error / size : 0;
}

void method_policy_looks_run(const struct method_policy_job *job, const struct method_policy_item *item,
                             struct method_policy_thread *thread, struct method_policy_looked *ret_looked)
{
    const uint32_t group = job->policy->group;
    struct method_policy_looked looked = {.recall = recall(job, item, thread)};
    double mass = 0, tail_error = 0;
    score(job, item, thread);
    for (uint32_t k = 0; k < group; k++) {
        double of_mass, of_tail;
        weigh(job, item, thread, k, &of_mass, &of_tail);
        mass += of_mass / group;
        tail_error += of_tail / group;
    }
    looked.mass = (float)mass;
    looked.tail_error = (float)tail_error;
    looked.output_error = (float)output_error(job, item, thread);
    *ret_looked = looked;
}
