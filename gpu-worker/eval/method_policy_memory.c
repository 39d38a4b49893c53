/*
 * method_policy_memory.c - what a policy's method needs for a tail: made when the tail begins, so that many methods of one text
 * can wait for their turn.
 *
 * Owner      method_policy_private.h.
 */
#include <errno.h>
#include <stdlib.h>

#include "common/pool.h"
#include "gpu-worker/eval/method_policy_private.h"
#include "gpu-worker/policy/selection.h"

static void *aligned(size_t n_bytes)
{
    return aligned_alloc(64, (n_bytes + 63) / 64 * 64);
}

static void *cache_alloc(void *context, size_t n_bytes)
{
    (void)context;
    return aligned(n_bytes);
}

static void cache_free(void *context, void *memory, size_t n_bytes)
{
    (void)context, (void)n_bytes;
    free(memory);
}

static const struct key_cache_memory cache_memory = {.alloc = cache_alloc, .free = cache_free};

static bool selection_init(const struct method_policy *policy, bool weights, struct method_policy_selection *selection)
{
    const size_t group = policy->group, n = policy->max_blocks;
    selection->masks = aligned(n * sizeof(uint64_t));
    selection->masses = aligned(group * n * sizeof(float));
    selection->references = aligned(group * sizeof(float));
    selection->weights = weights ? aligned(group * n * LAYOUT_BLOCK_TOKENS * sizeof(float)) : NULL;
    return selection->masks != NULL && selection->masses != NULL && selection->references != NULL &&
           (!weights || selection->weights != NULL);
}

static void selection_fini(struct method_policy_selection *selection)
{
    free(selection->masks);
    free(selection->masses);
    free(selection->references);
    free(selection->weights);
}

static int exact_keys_init(struct method_policy *policy)
{
    struct row_shape shape = policy->shape;
    shape.n_layers = 1;
    policy->exact_heads = calloc(shape.n_kv_heads, sizeof *policy->exact_heads);
    if (policy->exact_heads == NULL)
        return -ENOMEM;
    for (uint32_t i = 0; i < shape.n_kv_heads; i++)
        policy->exact_heads[i].head_dim = shape.head_dim;
    policy->exact_quantizer = (struct key_quantizer){.codec = key_codec_find(POLICY_CODEC_F16),
                                                     .n_layers = 1,
                                                     .n_kv_heads = shape.n_kv_heads,
                                                     .heads = policy->exact_heads};
    return key_cache_new(&policy->exact_quantizer, &shape, NULL, &cache_memory, &policy->exact_keys);
}

static bool looks_init(const struct method_policy *policy, struct method_policy_thread *thread)
{
    const struct key_quantizer *quantizer = &policy->exact_quantizer;
    const size_t group = policy->group, n = policy->max_blocks;
    thread->exact_scratch = aligned(selection_scratch_bytes(quantizer, policy->group, policy->max_blocks));
    thread->exact_query = aligned(quantizer->codec->query_bytes(&quantizer->heads[0], policy->group));
    thread->scores = aligned(group * n * LAYOUT_BLOCK_TOKENS * sizeof(float));
    return thread->exact_scratch != NULL && thread->exact_query != NULL && thread->scores != NULL &&
           selection_init(policy, false, &thread->exact_selection);
}

static bool thread_init(const struct method_policy *policy, bool looks, struct method_policy_thread *thread)
{
    const size_t group = policy->group, d = policy->shape.head_dim, n = policy->max_blocks;
    const size_t partials_bytes = group * KERNELS_PARTIAL_FLOATS(d) * sizeof(float);
    const struct key_quantizer *quantizer = policy->policy.quantizer;
    const bool weights = policy->policy.terms.weights;
    if (quantizer != NULL) {
        thread->scratch = aligned(selection_scratch_bytes(quantizer, policy->group, policy->max_blocks));
        if (thread->scratch == NULL)
            return false;
    }
    thread->exact_scores = aligned(group * METHOD_POLICY_MAX_EXACT * sizeof(float));
    thread->keys = aligned(LAYOUT_BLOCK_TOKENS * d * sizeof(float));
    thread->rows = calloc(n, sizeof *thread->rows);
    thread->v_sums = calloc(n, sizeof *thread->v_sums);
    thread->masks = aligned(n * sizeof(uint64_t));
    thread->masses = aligned(group * n * sizeof(float));
    thread->weights = weights ? aligned(group * n * LAYOUT_BLOCK_TOKENS * sizeof(float)) : NULL;
    thread->partials = aligned(partials_bytes);
    thread->lane_partials = aligned(partials_bytes);
    thread->exact_partials = aligned(partials_bytes);
    thread->out = aligned(group * d * sizeof(float));
    return thread->exact_scores != NULL && thread->keys != NULL && thread->rows != NULL && thread->v_sums != NULL &&
           thread->masks != NULL && thread->masses != NULL && (!weights || thread->weights != NULL) &&
           thread->partials != NULL && thread->lane_partials != NULL && thread->exact_partials != NULL &&
           thread->out != NULL && selection_init(policy, weights, &thread->selection) &&
           (!looks || looks_init(policy, thread));
}

int method_policy_memory_init(struct method_policy *policy, bool looks, uint32_t n)
{
    if (policy->threads != NULL)
        return 0;
    const bool *absent = policy->profile == NULL ? NULL : fastgen_profile_absent(policy->profile);
    int error = key_cache_new(policy->policy.quantizer, &policy->shape, absent, &cache_memory, &policy->keys);
    if (error == 0 && looks)
        error = exact_keys_init(policy);
    if (error != 0)
        return error;
    const size_t n_items = (size_t)n * policy->shape.n_kv_heads;
    policy->n_threads = pool_n_threads(policy->tools.pool);
    policy->n_selected = calloc(n_items, sizeof *policy->n_selected);
    policy->looked = calloc(n_items / METHOD_POLICY_LOOK_EVERY + 1, sizeof *policy->looked);
    policy->threads = calloc(policy->n_threads, sizeof *policy->threads);
    if (policy->n_selected == NULL || policy->looked == NULL || policy->threads == NULL)
        return -ENOMEM;
    for (uint32_t i = 0; i < policy->n_threads; i++)
        if (!thread_init(policy, looks, &policy->threads[i]))
            return -ENOMEM;
    return 0;
}

static void thread_fini(struct method_policy_thread *thread)
{
    selection_fini(&thread->selection);
    selection_fini(&thread->exact_selection);
    free(thread->scratch);
    free(thread->exact_scores);
    free(thread->keys);
    free(thread->rows);
    free(thread->v_sums);
    free(thread->masks);
    free(thread->masses);
    free(thread->weights);
    free(thread->partials);
    free(thread->lane_partials);
    free(thread->exact_partials);
    free(thread->out);
    free(thread->exact_scratch);
    free(thread->exact_query);
    free(thread->scores);
}

void method_policy_memory_fini(struct method_policy *policy)
{
    for (uint32_t i = 0; policy->threads != NULL && i < policy->n_threads; i++)
        thread_fini(&policy->threads[i]);
    free(policy->threads);
    policy->threads = NULL;
    free(policy->n_selected);
    free(policy->looked);
    policy->keys = key_cache_free(policy->keys);
    policy->exact_keys = key_cache_free(policy->exact_keys);
    free(policy->exact_heads);
}
