/*
 * train_statistics.c - the job that gathers key_statistics.h: contexts through the model, of each layer the moments of queries
 * and of keys about their block's mean.
 *
 * Owner      job.h. Threads: the engine thread; sums are spread over the pool by rows of the matrices, so that a number does
 *            not depend on how many threads there are.
 * Precision  products of a block of 64 positions are summed in float, blocks in double.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/pool.h"
#include "gpu-worker/eval/pass.h"
#include "gpu-worker/keys/quantizers.h"
#include "gpu-worker/network.h"
#include "gpu-worker/train/train.h"
#include "gpu-worker/train/train_rotate.h"
#include "gpu-worker/train/train_texts.h"

enum {
    MAX_TOKENS = 4096, /* moments change little with more: seconds on a small model */
    CONTEXT = 1024,    /* where in a long context a text stands is made up for: train_rotate.h */
    MATRIX_ROWS = 16   /* of an item: its sums of a block stay in the first-level cache */
};

/* Sums over all contexts, by layer and KV head. */
struct moments {
    double *q;       /* [head_dim] */
    double *qq, *kk; /* [head_dim][head_dim] */
};

struct gathering {
    struct train_statistics_request request;
    struct train_texts *texts; /* NULL: not begun */
    uint32_t context;          /* at hand */
    uint64_t n_done;           /* tokens of contexts that are done */
    struct pass *pass;
    double *sums;                      /* [layer][kv_head][head_dim + 2 x head_dim x head_dim] */
    uint64_t n_queries, n_keys;        /* summed, of one (layer, KV head) */
    struct key_statistics *statistics; /* where samples go: every sample_step-th key */
    uint32_t sample_step;
    struct row_shape shape;
    uint32_t group;
    uint32_t n_offsets; /* at which a context could have begun: train_rotate.h */
    char phase[96];
};

static struct moments moments_of(const struct gathering *gathering, uint32_t layer, uint32_t kv_head)
{
    size_t d = gathering->shape.head_dim;
    double *sums = gathering->sums + ((size_t)layer * gathering->shape.n_kv_heads + kv_head) * (d + 2 * d * d);
    return (struct moments){.q = sums, .qq = sums + d, .kk = sums + d + d * d};
}

/* ---- one layer ---- */

struct layer_job {
    const struct gathering *gathering;
    const struct pass_layer *layer;
    uint32_t n_ranges; /* of matrix rows */
};

/* sums [n][d] += rows [first, first + n) of x x^T */
static void add_product(const float *x, uint32_t first, uint32_t n, uint32_t d, float *sums)
{
    for (uint32_t i = 0; i < n; i++) {
        const float factor = x[first + i];
        float *row = sums + (size_t)i * d;
        for (uint32_t j = 0; j < d; j++)
            row[j] += factor * x[j];
    }
}

static void flush(double *matrix, uint32_t first, uint32_t n, uint32_t d, float *sums)
{
    for (size_t i = 0; i < (size_t)n * d; i++)
        matrix[(size_t)first * d + i] += (double)sums[i];
    memset(sums, 0, (size_t)n * d * sizeof(float));
}

static void add_queries(const struct layer_job *job, uint32_t kv_head, uint32_t first, uint32_t n)
{
    const struct gathering *gathering = job->gathering;
    const struct pass_layer *layer = job->layer;
    struct moments moments = moments_of(gathering, layer->layer, kv_head);
    uint32_t d = gathering->shape.head_dim, group = gathering->group, n_heads = pass_n_heads(layer->pass);
    float sums[MATRIX_ROWS * KERNELS_MAX_HEAD_DIM] = {0};
    for (uint32_t t = 0; t < layer->n_tokens; t++) {
        for (uint32_t h = kv_head * group; h < (kv_head + 1) * group; h++) {
            const float *q = layer->q + ((size_t)t * n_heads + h) * d;
            add_product(q, first, n, d, sums);
            for (uint32_t i = first; i < first + n; i++)
                moments.q[i] += (double)q[i];
        }
        if (t % LAYOUT_BLOCK_TOKENS == LAYOUT_BLOCK_TOKENS - 1 || t + 1 == layer->n_tokens)
            flush(moments.qq, first, n, d, sums);
    }
}

/* A sample as it would be at some other place of a long context; all places in turn, far from each other. */
static void keep_sample(const struct layer_job *job, uint32_t kv_head, uint64_t sample, const float *key)
{
    const struct gathering *gathering = job->gathering;
    const struct job_tools *tools = pass_tools(job->layer->pass);
    uint32_t d = gathering->shape.head_dim;
    float turned[KERNELS_MAX_HEAD_DIM];
    memcpy(turned, key, d * sizeof(*turned));
    train_rotate(&tools->network->rope, train_rotate_offset(sample, gathering->n_offsets), 0, d / 2, turned);
    tools->kernels->f16_encode(turned, d,
                               key_statistics_samples(gathering->statistics, job->layer->layer, kv_head) + sample * d);
}

/* Whole blocks only: others have no mean yet. */
static void add_keys(const struct layer_job *job, uint32_t kv_head, uint32_t first, uint32_t n)
{
    const struct gathering *gathering = job->gathering;
    const struct pass_layer *layer = job->layer;
    struct moments moments = moments_of(gathering, layer->layer, kv_head);
    const struct kernels *kernels = pass_tools(layer->pass)->kernels;
    const uint8_t *rows = pass_rows(layer->pass, layer->layer, kv_head);
    const float *block_sums = pass_sums(layer->pass, layer->layer, kv_head);
    uint32_t d = gathering->shape.head_dim;
    float sums[MATRIX_ROWS * KERNELS_MAX_HEAD_DIM] = {0}, key[KERNELS_MAX_HEAD_DIM];
    for (uint32_t t = 0; t < layer->n_tokens / LAYOUT_BLOCK_TOKENS * LAYOUT_BLOCK_TOKENS; t++) {
        const float *sum = block_sums + (size_t)(t / LAYOUT_BLOCK_TOKENS) * 2 * d;
        kernels->decode_keys(rows + t * layout_row_bytes(&gathering->shape), 1, d,
                             (enum kernels_rows)gathering->shape.codec, key);
        for (uint32_t i = 0; i < d; i++)
            key[i] -= sum[i] / (float)LAYOUT_BLOCK_TOKENS;
        uint64_t number = gathering->n_keys + t, sample = number / gathering->sample_step;
        if (first == 0 && number % gathering->sample_step == 0 && sample < gathering->statistics->n_samples)
            keep_sample(job, kv_head, sample, key);
        add_product(key, first, n, d, sums);
        if (t % LAYOUT_BLOCK_TOKENS == LAYOUT_BLOCK_TOKENS - 1)
            flush(moments.kk, first, n, d, sums);
    }
}

static void add_range(void *context, uint32_t item, uint32_t thread)
{
    (void)thread;
    const struct layer_job *job = context;
    uint32_t d = job->gathering->shape.head_dim, kv_head = item / job->n_ranges;
    uint32_t first = item % job->n_ranges * MATRIX_ROWS, n = d - first < MATRIX_ROWS ? d - first : MATRIX_ROWS;
    add_queries(job, kv_head, first, n);
    add_keys(job, kv_head, first, n);
}

static int visit(void *context, const struct pass_layer *layer)
{
    struct gathering *gathering = context;
    uint32_t n_ranges = (gathering->shape.head_dim + MATRIX_ROWS - 1) / MATRIX_ROWS;
    struct layer_job job = {gathering, layer, n_ranges};
    pool_run(pass_tools(layer->pass)->pool, gathering->shape.n_kv_heads * n_ranges, add_range, &job);
    return 0;
}

/* ---- the job ---- */

static void gathering_free(void *state)
{
    struct gathering *gathering = state;
    if (gathering == NULL)
        return;
    pass_free(gathering->pass);
    train_texts_free(gathering->texts);
    job_texts_free(gathering->request.texts, gathering->request.n_texts);
    key_statistics_free(gathering->statistics);
    free(gathering->sums);
    free(gathering);
}

static int begin_samples(struct gathering *gathering, const struct job_tools *tools)
{
    uint64_t n_keys = 0;
    for (uint32_t i = 0; i < gathering->texts->n_contexts; i++)
        n_keys += gathering->texts->contexts[i].n / LAYOUT_BLOCK_TOKENS * LAYOUT_BLOCK_TOKENS;
    uint64_t step = (n_keys + KEY_STATISTICS_MOST_SAMPLES - 1) / KEY_STATISTICS_MOST_SAMPLES;
    gathering->sample_step = step > 0 ? (uint32_t)step : 1;
    int r = key_statistics_new(&gathering->shape, quantizers_model_hash(tools->quantizers), &gathering->statistics);
    if (r < 0)
        return r;
    return key_statistics_make_samples(gathering->statistics,
                                       (uint32_t)((n_keys + gathering->sample_step - 1) / gathering->sample_step));
}

static int begin(struct gathering *gathering, const struct job_tools *tools, char *sentence)
{
    const struct model_shape *shape = &tools->network->shape;
    size_t d = shape->head_dim;
    gathering->shape = (struct row_shape){
        .n_layers = shape->n_layers,
        .n_kv_heads = shape->n_kv_heads,
        .head_dim = shape->head_dim,
        .codec = tools->row_codec,
    };
    gathering->group = shape->n_heads / shape->n_kv_heads;
    gathering->sums = calloc((size_t)shape->n_layers * shape->n_kv_heads * (d + 2 * d * d), sizeof(double));
    if (gathering->sums == NULL)
        return -ENOMEM;
    int r = train_texts_new(tools, gathering->request.texts, gathering->request.n_texts, CONTEXT, MAX_TOKENS,
                            &gathering->texts, sentence);
    if (r < 0)
        return r;
    gathering->n_offsets = train_texts_n_offsets(gathering->texts, tools);
    return begin_samples(gathering, tools);
}

static void fill(const struct gathering *gathering, const struct backend_rope *rope, struct key_statistics *statistics)
{
    size_t d = gathering->shape.head_dim;
    statistics->n_tokens = gathering->texts->n_tokens;
    statistics->text_hash = gathering->texts->hash;
    for (uint32_t layer = 0; layer < gathering->shape.n_layers; layer++)
        for (uint32_t head = 0; head < gathering->shape.n_kv_heads; head++) {
            struct moments moments = moments_of(gathering, layer, head);
            train_rotate_mean(rope, gathering->n_offsets, (uint32_t)d, moments.q);
            train_rotate_square(rope, gathering->n_offsets, (uint32_t)d, moments.qq);
            train_rotate_square(rope, gathering->n_offsets, (uint32_t)d, moments.kk);
            struct key_statistics_head to = key_statistics_head(statistics, layer, head);
            for (size_t i = 0; i < d; i++)
                to.q_mean[i] = (float)(moments.q[i] / (double)gathering->n_queries);
            for (size_t i = 0; i < d * d; i++) {
                to.q_square[i] = (float)(moments.qq[i] / (double)gathering->n_queries);
                to.k_spread[i] = (float)(moments.kk[i] / (double)gathering->n_keys);
            }
        }
}

static int end(struct gathering *gathering, const struct job_tools *tools, char *sentence)
{
    struct key_statistics *statistics = gathering->statistics;
    char problem[JOB_SENTENCE_SIZE] = "";
    bool kept = false;
    gathering->statistics = NULL;
    fill(gathering, &tools->network->rope, statistics);
    int r = quantizers_take_statistics(tools->quantizers, statistics, &kept, problem, sizeof(problem));
    unsigned long long n_tokens = gathering->texts->n_tokens;
    if (r < 0)
        snprintf(sentence, JOB_SENTENCE_SIZE, "%s", problem);
    else if (kept)
        snprintf(sentence, JOB_SENTENCE_SIZE, "statistics of %llu tokens, kept beside the model", n_tokens);
    else
        snprintf(sentence, JOB_SENTENCE_SIZE, "statistics of %llu tokens, not kept: %.180s", n_tokens,
                 problem[0] != 0 ? problem : "there is no directory for them");
    return r;
}

/* A slice of the context at hand. 1: there is more. */
static int advance_context(struct gathering *gathering, const struct job_tools *tools)
{
    const struct train_texts *texts = gathering->texts;
    const struct train_context *context = &texts->contexts[gathering->context];
    if (gathering->pass == NULL) {
        struct pass_options options = {.visit = visit, .context = gathering, .skip_attention_of_last = true};
        int r = pass_new(tools, &options, context->ids, context->n, &gathering->pass);
        if (r < 0)
            return r;
    }
    int r = pass_advance(gathering->pass);
    if (r != 0)
        return r;
    gathering->pass = pass_free(gathering->pass);
    gathering->n_queries += (uint64_t)context->n * gathering->group;
    gathering->n_keys += context->n / LAYOUT_BLOCK_TOKENS * LAYOUT_BLOCK_TOKENS;
    gathering->n_done += context->n;
    return ++gathering->context < texts->n_contexts;
}

static int advance(void *state, const struct job_tools *tools, struct job_report *report, char *sentence)
{
    struct gathering *gathering = state;
    snprintf(sentence, JOB_SENTENCE_SIZE, "no memory for the statistics"); /* what fails for another reason says it */
    if (gathering->texts == NULL) {
        const struct policy_terms terms = {.codec = POLICY_CODEC_PAIR2, .selector = POLICY_SELECTOR_DEVIATION};
        if (!gathering->request.again && quantizers_has(tools->quantizers, &terms)) {
            snprintf(sentence, JOB_SENTENCE_SIZE, "the model has statistics already");
            return 0;
        }
        int r = begin(gathering, tools, sentence);
        if (r < 0)
            return r;
    }
    const struct train_texts *texts = gathering->texts;
    int r = advance_context(gathering, tools);
    if (r < 0)
        return r;
    snprintf(gathering->phase, sizeof(gathering->phase), "statistics of queries and keys, %llu tokens",
             (unsigned long long)texts->n_tokens);
    report->phase = gathering->phase;
    double of_pass = gathering->pass == NULL ? 0 : pass_done(gathering->pass) * pass_n_tokens(gathering->pass);
    report->done = ((double)gathering->n_done + of_pass) / (double)texts->n_tokens;
    return r == 0 ? end(gathering, tools, sentence) : 1;
}

static const struct job_ops ops = {.name = "statistics", .advance = advance, .free = gathering_free};

int train_statistics_job_new(struct train_statistics_request *request, struct job *ret_job, char *sentence)
{
    struct gathering *gathering = calloc(1, sizeof(*gathering));
    if (gathering == NULL) {
        job_texts_free(request->texts, request->n_texts);
        snprintf(sentence, JOB_SENTENCE_SIZE, "no memory");
        return -ENOMEM;
    }
    gathering->request = *request;
    *ret_job = (struct job){.ops = &ops, .state = gathering};
    return 0;
}
