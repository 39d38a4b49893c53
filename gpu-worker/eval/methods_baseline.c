/*
 * methods_baseline.c - baselines as methods: their names and numbers, and what of a method does not depend on the kind.
 *
 * Owner      method.h.
 */
#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpu-worker/eval/methods_private.h"
#include "gpu-worker/network.h"

static const struct methods_kind *const kinds[] = {
    &methods_formats_q8_0, &methods_formats_q4_0, &methods_formats_kivi4,   &methods_formats_kivi2, &methods_evict_h2o,
    &methods_evict_snapkv, &methods_quest,        &methods_evict_streaming, &methods_evict_fastgen,
};
enum { N_KINDS = sizeof kinds / sizeof kinds[0] };

const char *methods_baseline_name(uint32_t i)
{
    return i < N_KINDS ? kinds[i]->example : NULL;
}

/* ---- life ---- */

static int observe(struct method *method, const struct pass_layer *layer, uint32_t n_prompt)
{
    struct methods_baseline *baseline = method->state;
    return baseline->kind->observe(baseline, layer, n_prompt);
}

static void count(struct method *method, const struct pass_tail_layer *layer)
{
    const struct methods_baseline *baseline = method->state;
    const uint32_t n_kv_heads = baseline->shape.n_kv_heads, n_looked = layer->n / METHODS_LOOK_EVERY;
    uint64_t *n_kept = method->n_kept + (size_t)layer->layer * n_kv_heads;
    struct method_attention *attention = &method->attention[layer->layer];
    for (uint32_t kv_head = 0; kv_head < n_kv_heads; kv_head++)
        for (uint32_t i = 0; i < layer->n; i++)
            n_kept[kv_head] += baseline->tail.n_read[(size_t)kv_head * layer->n + i];
    for (uint32_t i = 0; layer->layer == 0 && i < layer->n; i++)
        method->n_old += exact_set_n_old_tokens(layer->first + i, 0);
    for (uint32_t i = 0; baseline->looks && i < n_looked * n_kv_heads; i++) {
        const uint32_t position = layer->first + i % n_looked * METHODS_LOOK_EVERY + METHODS_LOOK_EVERY - 1;
        const struct methods_looked *looked = &baseline->tail.looked[i];
        if (exact_set_n_old_blocks(position, 0) == 0)
            continue;
        attention->recall += (double)looked->recall;
        attention->mass += (double)looked->mass;
        attention->output_error += (double)looked->output_error;
        attention->n++;
    }
}

static int attend(struct method *method, const struct pass_tail_layer *layer)
{
    struct methods_baseline *baseline = method->state;
    assert(layer->first % LAYOUT_BLOCK_TOKENS == 0 && layer->n % LAYOUT_BLOCK_TOKENS == 0);
    assert(layer->first + layer->n <= baseline->n_blocks * LAYOUT_BLOCK_TOKENS);
    if (baseline->tail.n == 0) {
        baseline->looks = method->looks;
        int error = methods_attention_init(baseline, layer->n);
        if (error == 0 && baseline->kind->begin != NULL)
            error = baseline->kind->begin(baseline);
        if (error != 0)
            return error;
        baseline->tail.n = layer->n;
    }
    methods_attention_run(baseline, layer);
    count(method, layer);
    return 0;
}

static void account(const struct method *method, struct method_account *ret_account)
{
    const struct methods_baseline *baseline = method->state;
    const size_t n_heads = (size_t)baseline->shape.n_layers * baseline->shape.n_kv_heads;
    struct method_account result = {
        .device_bytes = baseline->kind->device_bytes(baseline, method),
        .exact_bytes = (double)(n_heads * METHODS_MAX_EXACT * baseline->row_bytes),
    };
    uint64_t n_rows = 0;
    for (size_t i = 0; i < n_heads; i++)
        n_rows += method->n_kept[i];
    if (baseline->kind->reads_stores && baseline->tail.n > 0)
        result.store_bytes = (double)n_rows * (double)baseline->row_bytes / baseline->tail.n;
    *ret_account = result;
}

static void free_state(struct method *method)
{
    struct methods_baseline *baseline = method->state;
    if (baseline == NULL)
        return;
    methods_attention_fini(baseline);
    fastgen_profile_free(baseline->profile);
    free(baseline->masks);
    free(baseline->sums);
    free(baseline->extremes);
    free(baseline);
    method->state = NULL;
}

/* ---- names ---- */

static const struct methods_kind *find_kind(const char *name, size_t n)
{
    for (uint32_t i = 0; i < N_KINDS; i++)
        if (strlen(kinds[i]->name) == n && memcmp(kinds[i]->name, name, n) == 0)
            return kinds[i];
    return NULL;
}

/* Digits and a point; above 0, at most 1. */
static bool read_number(const char *text, double *ret_number)
{
    char *end;
    const size_t n = strspn(text, "0123456789.");
    if (n == 0 || text[n] != '\0' || n > 12)
        return false;
    double number = strtod(text, &end);
    if (*end != '\0' || !(number > 0 && number <= 1))
        return false;
    *ret_number = number;
    return true;
}

static int read_name(const char *name, const struct methods_kind **ret_kind, double *ret_number, char *sentence,
                     size_t sentence_size)
{
    const size_t n = strcspn(name, "=,");
    const struct methods_kind *kind = find_kind(name, n);
    double number = 1;
    if (kind == NULL)
        return -ESRCH;
    if (kind->number == NULL && name[n] != '\0') {
        snprintf(sentence, sentence_size, "%s stands alone: nothing can be said behind it", kind->name);
        return -EINVAL;
    }
    if (kind->number != NULL && (name[n] != '=' || !read_number(name + n + 1, &number))) {
        snprintf(sentence, sentence_size, "%s needs %s, above 0 and at most 1, as in %s", kind->name, kind->number,
                 kind->example);
        return -EINVAL;
    }
    *ret_kind = kind;
    *ret_number = number;
    return 0;
}

int methods_baseline_new(struct method *method, const struct job_tools *tools, uint32_t n_tokens, char *sentence,
                         size_t sentence_size)
{
    static const struct method_ops all = {NULL, attend, account, free_state},
                                   with_prompt = {observe, attend, account, free_state};
    const struct model_shape *shape = &tools->network->shape;
    const struct methods_kind *kind;
    double number;
    int error = read_name(method->name, &kind, &number, sentence, sentence_size);
    if (error != 0)
        return error;
    struct methods_baseline *baseline = calloc(1, sizeof *baseline);
    if (baseline == NULL)
        return -ENOMEM;
    baseline->kind = kind;
    baseline->number = number;
    baseline->tools = *tools;
    baseline->shape = (struct row_shape){.n_layers = shape->n_layers,
                                         .n_kv_heads = shape->n_kv_heads,
                                         .head_dim = shape->head_dim,
                                         .codec = tools->row_codec};
    baseline->n_heads = shape->n_heads;
    baseline->group = shape->n_heads / shape->n_kv_heads;
    baseline->n_blocks = (n_tokens + LAYOUT_BLOCK_TOKENS - 1) / LAYOUT_BLOCK_TOKENS;
    baseline->row_bytes = layout_row_bytes(&baseline->shape);
    method->state = baseline;
    method->ops = kind->observe != NULL ? &with_prompt : &all;
    method->baseline = true;
    if (kind->number == NULL)
        snprintf(method->meaning, sizeof method->meaning, "%s", kind->meaning[0]);
    else
        snprintf(method->meaning, sizeof method->meaning, "%s %.4g %% %s", kind->meaning[0], 100 * number,
                 kind->meaning[1]);
    return 0;
}
