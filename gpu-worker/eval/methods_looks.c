/*
 * methods_looks.c - what a baseline read and what it got, against exact weights of all tokens at that position.
 *
 * Exact weights are means of the group's query heads, and with them comes the exact output (fastgen_weights.h; keys of q8_0
 * rows are rounded to f16 there). Recall: of as many old tokens as were read, those with the largest weights.
 *
 * Owner      methods_private.h. Threads: any, each with its own struct methods_thread.
 */
#include <assert.h>
#include <string.h>

#include "gpu-worker/eval/methods_private.h"
#include "gpu-worker/fastgen/fastgen_weights.h"

#define BLOCK LAYOUT_BLOCK_TOKENS

/* Hoare's selection: [first, end) shrinks around the place that is asked for. */
float methods_looks_nth_largest(float *values, uint32_t n_values, uint32_t n)
{
    assert(n >= 1 && n <= n_values);
    int64_t low = 0, high = (int64_t)n_values - 1, wanted = (int64_t)n - 1;
    while (low < high) {
        const float pivot = values[low + (high - low) / 2];
        int64_t i = low, j = high;
        while (i <= j) {
            while (values[i] > pivot)
                i++;
            while (values[j] < pivot)
                j--;
            if (i <= j) {
                const float value = values[i];
                values[i++] = values[j];
                values[j--] = value;
            }
        }
        if (wanted <= j)
            high = j;
        else if (wanted >= i)
            low = i;
        else
            break;
    }
    return values[wanted];
}

struct head {
    const struct pass_tail_layer *layer;
    uint32_t kv_head;
};

static const void *block_of(void *context, uint32_t block)
{
    const struct head *head = context;
    return pass_tail_block(head->layer, head->kv_head, block);
}

static float recall(const struct methods_thread *thread, const uint64_t *masks, uint32_t n_blocks)
{
    const uint32_t n_tokens = n_blocks * BLOCK - LAYOUT_N_SINKS;
    uint32_t n = 0, n_both = 0, n_equal = 0;
    for (uint32_t block = 0; block < n_blocks; block++)
        n += (uint32_t)__builtin_popcountll(masks[block] & exact_set_old_mask(block));
    if (n == 0)
        return 1;
    memcpy(thread->scratch, thread->weights + LAYOUT_N_SINKS, n_tokens * sizeof(float));
    const float limit = methods_looks_nth_largest(thread->scratch, n_tokens, n);
    uint32_t n_at_limit = n;
    for (uint32_t j = LAYOUT_N_SINKS; j < n_blocks * BLOCK; j++) {
        const bool is_read = (masks[j / BLOCK] >> (j % BLOCK) & 1) != 0, is_above = thread->weights[j] > limit;
        n_at_limit -= is_above;
        n_both += is_read && is_above;
        n_equal += is_read && !is_above && !(thread->weights[j] < limit);
    }
    n_both += n_equal < n_at_limit ? n_equal : n_at_limit;
    return (float)n_both / (float)n;
}

void methods_looks_run(const struct methods_baseline *baseline, const struct pass_tail_layer *layer, uint32_t kv_head,
                       uint32_t i, const uint64_t *masks, const float *out, struct methods_thread *thread,
                       struct methods_looked *ret_looked)
{
    const uint32_t d = baseline->shape.head_dim, position = layer->first + i;
    const uint32_t n_blocks = exact_set_n_old_blocks(position, 0);
    const float *q = layer->q + ((size_t)i * baseline->n_heads + (size_t)kv_head * baseline->group) * d;
    struct head head = {layer, kv_head};
    const struct fastgen_rows rows = {
        .kernels = baseline->tools.kernels,
        .head_dim = d,
        .group = baseline->group,
        .codec = (enum kernels_rows)baseline->shape.codec,
        .scale = pass_scale(layer->pass),
        .n_positions = 1,
        .positions = &position,
        .q = &q,
        .block = block_of,
        .context = &head,
    };
    *ret_looked = (struct methods_looked){0};
    if (n_blocks == 0 || fastgen_weights(&rows, thread->look_scratch, thread->weights, fastgen_weights_stride(position),
                                         &thread->exact) != 0)
        return;
    double mass = 0, error = 0, size = 0;
    for (uint32_t j = 0; j <= position; j++)
        if ((masks[j / BLOCK] >> (j % BLOCK) & 1) != 0)
            mass += (double)thread->weights[j];
    for (uint32_t j = 0; j < baseline->group * d; j++) {
        const double off = (double)out[j] - (double)thread->exact[j];
        error += off * off;
        size += (double)thread->exact[j] * (double)thread->exact[j];
    }
    ret_looked->recall = recall(thread, masks, n_blocks);
    ret_looked->mass = (float)mass;
    ret_looked->output_error = (float)(size > 0 ? error / size : 0);
}
