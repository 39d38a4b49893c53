/*
 * method_policy.c - a policy of the service as a method: with a text's pass in the place of stores and sessions, the same key
 * cache, the same selection and the same lanes, so that what an evaluation says is what a session gets.
 *
 * All positions of a layer are there at once: keys of blocks that are old for the last of them are quantized first, then a
 * position looks at those that are old for itself, as if the others did not exist yet. exact_tokens is 0: nothing but sinks
 * and window is exact.
 *
 * FastGen    observe() profiles the prompt, the positions before the tail, once: the tail is read with what was found then.
 * Owner      method.h.
 */
#include <assert.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/pool.h"
#include "gpu-worker/eval/method_policy_private.h"
#include "gpu-worker/fastgen/fastgen_weights.h"
#include "gpu-worker/network.h"

/* ---- FastGen: the text's pass ---- */

struct observe_job {
    struct method_policy *policy;
    const struct pass_layer *layer;
    const uint32_t *positions;
    uint32_t n_positions;
    uint8_t *memory; /* of each thread: scratch, then weights */
    size_t scratch_bytes, thread_bytes, stride;
    _Atomic int error;
};

struct observed_head {
    const uint8_t *rows;
    size_t block_bytes;
};

static const void *observed_block(void *context, uint32_t block)
{
    const struct observed_head *head = context;
    return head->rows + block * head->block_bytes;
}

static void observe_head(void *context, uint32_t kv_head, uint32_t thread)
{
    struct observe_job *job = context;
    struct method_policy *policy = job->policy;
    const struct pass_layer *layer = job->layer;
    const uint32_t d = policy->shape.head_dim;
    const size_t n_blocks = (layer->n_tokens + LAYOUT_BLOCK_TOKENS - 1) / LAYOUT_BLOCK_TOKENS;
    struct observed_head head = {.block_bytes = LAYOUT_BLOCK_TOKENS * policy->row_bytes};
    head.rows = layer->rows + kv_head * n_blocks * head.block_bytes;
    uint8_t *scratch = job->memory + thread * job->thread_bytes;
    float *weights = (float *)(void *)(scratch + job->scratch_bytes);
    for (uint32_t first = 0, n; first < job->n_positions; first += n) {
        const float *q[FASTGEN_WEIGHTS_POSITIONS];
        n = job->n_positions - first < FASTGEN_WEIGHTS_POSITIONS ? job->n_positions - first : FASTGEN_WEIGHTS_POSITIONS;
        for (uint32_t i = 0; i < n; i++)
            q[i] =
                layer->q + ((size_t)job->positions[first + i] * policy->n_heads + (size_t)kv_head * policy->group) * d;
        const struct fastgen_rows rows = {
            .kernels = policy->tools.kernels,
            .head_dim = d,
            .group = policy->group,
            .codec = (enum kernels_rows)policy->shape.codec,
            .scale = pass_scale(layer->pass),
            .n_positions = n,
            .positions = job->positions + first,
            .q = q,
            .block = observed_block,
            .context = &head,
        };
        int error = fastgen_weights(&rows, scratch, weights, job->stride, NULL);
        if (error != 0) {
            job->error = error;
            return;
        }
        for (uint32_t i = 0; i < n; i++)
            fastgen_profile_add_row(policy->profile, layer->layer, kv_head, job->positions[first + i],
                                    weights + i * job->stride);
    }
}

static int observe(struct method *method, const struct pass_layer *layer, uint32_t n_prompt)
{
    struct method_policy *policy = method->state;
    uint32_t positions[FASTGEN_MAX_ROWS];
    struct observe_job job = {.policy = policy, .layer = layer, .positions = positions};
    if (policy->profile == NULL) {
        int error =
            fastgen_profile_new(policy->tools.tokenizer, pass_ids(layer->pass), n_prompt, policy->shape.n_layers,
                                policy->shape.n_kv_heads, policy->policy.terms.fastgen, &policy->profile);
        if (error != 0)
            return error;
    }
    job.n_positions = fastgen_sample(n_prompt, positions);
    job.stride = fastgen_weights_stride(n_prompt - 1);
    job.scratch_bytes =
        fastgen_weights_scratch_bytes(FASTGEN_WEIGHTS_POSITIONS, n_prompt - 1, policy->group, policy->shape.head_dim);
    job.scratch_bytes = (job.scratch_bytes + 63) / 64 * 64;
    job.thread_bytes = job.scratch_bytes + FASTGEN_WEIGHTS_POSITIONS * job.stride * sizeof(float);
    job.memory = aligned_alloc(64, job.thread_bytes * pool_n_threads(policy->tools.pool));
    if (job.memory == NULL)
        return -ENOMEM;
    pool_run(policy->tools.pool, policy->shape.n_kv_heads, observe_head, &job);
    free(job.memory);
    return job.error;
}

/* ---- the tail ---- */

struct keys_job {
    struct key_cache *cache;
    const struct pass_tail_layer *layer;
    const struct kernels *kernels;
    uint32_t cache_layer, n_blocks;
};

static void put_keys(void *context, uint32_t item, uint32_t thread)
{
    (void)thread;
    const struct keys_job *job = context;
    const uint32_t kv_head = item / job->n_blocks, block = item % job->n_blocks;
    if (key_cache_has(job->cache, job->cache_layer, kv_head))
        key_cache_put(job->cache, job->kernels, job->cache_layer, kv_head, block,
                      pass_tail_block(job->layer, kv_head, block));
}

/* Keys of all blocks that are old for the last position. */
static int quantize(struct method_policy *policy, struct key_cache *cache, const struct pass_tail_layer *layer,
                    uint32_t cache_layer)
{
    struct keys_job job = {
        .cache = cache,
        .layer = layer,
        .kernels = policy->tools.kernels,
        .cache_layer = cache_layer,
        .n_blocks = exact_set_n_old_blocks(layer->first + layer->n - 1, 0),
    };
    if (job.n_blocks == 0 || key_cache_quantizer(cache) == NULL)
        return 0;
    int error = key_cache_extend(cache, job.n_blocks);
    if (error == 0)
        pool_run(policy->tools.pool, job.n_blocks * policy->shape.n_kv_heads, put_keys, &job);
    return error;
}

static void count(struct method *method, const struct pass_tail_layer *layer)
{
    const struct method_policy *policy = method->state;
    uint64_t *n_kept = method->n_kept + (size_t)layer->layer * policy->shape.n_kv_heads;
    struct method_attention *attention = &method->attention[layer->layer];
    for (uint32_t kv_head = 0; kv_head < policy->shape.n_kv_heads; kv_head++)
        for (uint32_t i = 0; i < layer->n; i++)
            n_kept[kv_head] += policy->n_selected[(size_t)kv_head * layer->n + i];
    for (uint32_t i = 0; layer->layer == 0 && i < layer->n; i++)
        method->n_old += exact_set_n_old_tokens(layer->first + i, 0);
    if (!method->looks)
        return;
    const uint32_t n_looked = layer->n / METHOD_POLICY_LOOK_EVERY;
    for (uint32_t i = 0; i < n_looked * policy->shape.n_kv_heads; i++) {
        const uint32_t position = layer->first + i % n_looked * METHOD_POLICY_LOOK_EVERY + METHOD_POLICY_LOOK_EVERY - 1;
        if (exact_set_n_old_blocks(position, 0) == 0)
            continue;
        attention->recall += (double)policy->looked[i].recall;
        attention->mass += (double)policy->looked[i].mass;
        attention->output_error += (double)policy->looked[i].output_error;
        attention->tail_error += (double)policy->looked[i].tail_error;
        attention->n++;
    }
}

static int attend(struct method *method, const struct pass_tail_layer *layer)
{
    struct method_policy *policy = method->state;
    struct method_policy_job job = {
        .policy = policy, .layer = layer, .scale = pass_scale(layer->pass), .looks = method->looks};
    assert(layer->first + layer->n <= policy->max_blocks * LAYOUT_BLOCK_TOKENS);
    if (layer->layer == 0) {
        assert(policy->policy.terms.fastgen == 0 || policy->profile != NULL);
        if (policy->profile != NULL)
            fastgen_profile_finish(policy->profile);
        policy->n_positions = layer->n;
        int error = method_policy_memory_init(policy, method->looks, layer->n);
        if (error != 0)
            return error;
    }
    int error = quantize(policy, policy->keys, layer, layer->layer);
    if (error == 0 && method->looks)
        error = quantize(policy, policy->exact_keys, layer, 0);
    if (error != 0)
        return error;
    pool_run(policy->tools.pool, layer->n * policy->shape.n_kv_heads, method_policy_item_run, &job);
    count(method, layer);
    return 0;
}

static void account(const struct method *method, struct method_account *ret_account)
{
    const struct method_policy *policy = method->state;
    const struct key_quantizer *quantizer = policy->policy.quantizer;
    const size_t n_heads = (size_t)policy->shape.n_layers * policy->shape.n_kv_heads;
    const bool *absent = policy->profile == NULL ? NULL : fastgen_profile_absent(policy->profile);
    struct method_account result = {
        .device_bytes = key_cache_bytes_per_token(quantizer, absent),
        .exact_bytes = (double)(n_heads * METHOD_POLICY_MAX_EXACT * policy->row_bytes),
        .table_bytes = quantizer == NULL ? 0 : (double)quantizer->table_bytes,
    };
    uint64_t n_rows = 0;
    for (size_t i = 0; i < n_heads; i++)
        n_rows += method->n_kept[i];
    if (policy->keys != NULL && key_cache_n_blocks(policy->keys) > 0)
        result.device_measured =
            (double)key_cache_bytes(policy->keys) / ((double)key_cache_n_blocks(policy->keys) * LAYOUT_BLOCK_TOKENS);
    if (policy->n_positions > 0)
        result.store_bytes = (double)n_rows * (double)policy->row_bytes / (double)policy->n_positions;
    *ret_account = result;
}

static void free_state(struct method *method)
{
    struct method_policy *policy = method->state;
    if (policy == NULL)
        return;
    method_policy_memory_fini(policy);
    fastgen_profile_free(policy->profile);
    free(policy);
    method->state = NULL;
}

/* A preset's, also where more is asked for behind its name. */
static void find_meaning(struct method *method)
{
    const size_t n = strcspn(method->name, ",");
    const char *meaning, *preset;
    for (uint32_t i = 0; (preset = policy_preset(i, &meaning)) != NULL; i++)
        if (strlen(preset) == n && memcmp(preset, method->name, n) == 0)
            snprintf(method->meaning, sizeof method->meaning, "%s%s", meaning, method->name + n);
}

int method_policy_new(struct method *method, const struct job_tools *tools, uint32_t n_tokens, char *sentence,
                      size_t sentence_size)
{
    static const struct method_ops all = {NULL, attend, account, free_state},
                                   with_fastgen = {observe, attend, account, free_state};
    const struct model_shape *shape = &tools->network->shape;
    struct policy found;
    int error = policy_find(tools->quantizers, method->name, &found, sentence, sentence_size);
    if (error != 0)
        return error;
    struct method_policy *policy = calloc(1, sizeof *policy);
    if (policy == NULL)
        return -ENOMEM;
    policy->tools = *tools;
    policy->policy = found;
    policy->shape = (struct row_shape){.n_layers = shape->n_layers,
                                       .n_kv_heads = shape->n_kv_heads,
                                       .head_dim = shape->head_dim,
                                       .codec = tools->row_codec};
    policy->n_heads = shape->n_heads;
    policy->group = shape->n_heads / shape->n_kv_heads;
    policy->max_blocks = (n_tokens + LAYOUT_BLOCK_TOKENS - 1) / LAYOUT_BLOCK_TOKENS;
    policy->row_bytes = layout_row_bytes(&policy->shape);
    method->state = policy;
    method->ops = found.terms.fastgen > 0 ? &with_fastgen : &all;
    find_meaning(method);
    return 0;
}
