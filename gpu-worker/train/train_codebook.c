/*
 * train_codebook.c - the job that trains product-quantized keys' codebooks (HCAttention, arXiv 2507.19823): contexts through the
 * model, keys kept in half precision, then k-means for every layer, KV head and sub-space.
 *
 * Owner      job.h. Threads: the engine thread; the pool trains as many sub-spaces at once as it has threads.
 * Samples    a text has few tokens for thousands of centroids, and stands at the beginning of a context: each key counts several
 *            times, as it would be at other places of a long one (train_rotate.h).
 * Memory     keys of up to MAX_SAMPLES tokens, MAX_KEY_BYTES; one struct kmeans a thread.
 * Invariant  a sub-space's centroids follow from the texts, the sizes and its own seed: neither the number of threads nor an
 *            interruption changes them. What is finished is in the checkpoint (train_codebook_checkpoint.h); keys are collected
 *            again.
 */
#include <errno.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/pool.h"
#include "gpu-worker/eval/pass.h"
#include "gpu-worker/keys/quantizers.h"
#include "gpu-worker/network.h"
#include "gpu-worker/train/kmeans.h"
#include "gpu-worker/train/train.h"
#include "gpu-worker/train/train_codebook_checkpoint.h"
#include "gpu-worker/train/train_rotate.h"
#include "gpu-worker/train/train_texts.h"
#include "kernels/half.h"

enum {
    MAX_SAMPLES = 40000, /* of a sub-space */
    MIN_TOKENS = 4096,   /* however large the model's keys are */
    DEFAULT_ITERATIONS = 200,
    USUAL_ITERATIONS = 60, /* until nothing improves; for the estimate of what is done */
    SAVE_US = 20000000,
};
#define MAX_KEY_BYTES (UINT64_C(512) << 20)

/* One of the pool's threads at work. */
struct slot {
    struct kmeans *kmeans;
    uint32_t space;
    bool busy;
};

struct training {
    struct train_codebook_request request;
    struct row_shape shape;
    struct train_texts *texts; /* NULL: not begun */
    /* collecting */
    uint32_t context; /* at hand */
    uint64_t n_collected;
    struct pass *pass;
    uint64_t begun_us;
    uint16_t *keys; /* [layer][kv_head][n_tokens][head_dim] halves */
    /* training; slots NULL: not yet */
    const struct backend_rope *rope;
    uint32_t n_offsets, n_places; /* where a key could stand; of these, how many count */
    uint32_t n_spaces, n_slots;
    struct slot *slots;
    struct train_codebook_space *spaces; /* [n_spaces] */
    struct key_codebook *codebook;
    struct train_codebook_checkpoint *checkpoint;
    _Atomic uint32_t next; /* sub-space that nobody has begun */
    uint64_t deadline_us, saved_us;
    double collecting; /* its share of the whole time, as far as is known */
    double done;
    char phase[96], path[PATH_MAX]; /* of what was learnt */
};

static uint32_t spaces_of_head(const struct training *training)
{
    return training->shape.head_dim / training->request.n_dims;
}

static uint32_t n_samples(const struct training *training)
{
    return (uint32_t)training->texts->n_tokens * training->n_places;
}

static uint16_t *keys_of(const struct training *training, uint32_t head)
{
    return training->keys + (size_t)head * training->texts->n_tokens * training->shape.head_dim;
}

static void training_free(void *state)
{
    struct training *training = state;
    if (training == NULL)
        return;
    if (training->checkpoint != NULL)
        train_codebook_checkpoint_save(training->checkpoint, training->spaces, training->codebook);
    train_codebook_checkpoint_close(training->checkpoint, false);
    for (uint32_t i = 0; training->slots != NULL && i < training->n_slots; i++)
        kmeans_free(training->slots[i].kmeans);
    free(training->slots);
    free(training->spaces);
    key_codebook_free(training->codebook);
    free(training->keys);
    pass_free(training->pass);
    train_texts_free(training->texts);
    job_texts_free(training->request.texts, training->request.n_texts);
    free(training);
}

/* ---- collecting ---- */

static int begin(struct training *training, const struct job_tools *tools, char *sentence)
{
    const struct model_shape *shape = &tools->network->shape;
    if (shape->head_dim % training->request.n_dims != 0) {
        snprintf(sentence, JOB_SENTENCE_SIZE, "keys of %u dimensions do not divide into sub-spaces of %u",
                 shape->head_dim, training->request.n_dims);
        return -EINVAL;
    }
    training->shape = (struct row_shape){
        .n_layers = shape->n_layers,
        .n_kv_heads = shape->n_kv_heads,
        .head_dim = shape->head_dim,
        .codec = tools->row_codec,
    };
    const uint64_t token_bytes = (uint64_t)shape->n_layers * shape->n_kv_heads * shape->head_dim * sizeof(uint16_t);
    uint64_t max_tokens = MAX_KEY_BYTES / token_bytes;
    max_tokens = max_tokens > MAX_SAMPLES ? MAX_SAMPLES : max_tokens < MIN_TOKENS ? MIN_TOKENS : max_tokens;
    int r = train_texts_new(tools, training->request.texts, training->request.n_texts, TRAIN_CONTEXT, max_tokens,
                            &training->texts, sentence);
    if (r < 0)
        return r;
    training->rope = &tools->network->rope;
    training->n_offsets = train_texts_n_offsets(training->texts, tools);
    training->n_places = MAX_SAMPLES / (uint32_t)training->texts->n_tokens;
    if (training->n_places > training->n_offsets)
        training->n_places = training->n_offsets;
    if (training->n_places == 0)
        training->n_places = 1;
    training->n_spaces = shape->n_layers * shape->n_kv_heads * spaces_of_head(training);
    training->begun_us = clock_now_us();
    training->keys = malloc(training->texts->n_tokens * token_bytes);
    if (training->keys == NULL) {
        snprintf(sentence, JOB_SENTENCE_SIZE, "no memory for the keys of %llu tokens (%llu MiB)",
                 (unsigned long long)training->texts->n_tokens,
                 (unsigned long long)(training->texts->n_tokens * token_bytes >> 20));
        return -ENOMEM;
    }
    return 0;
}

struct layer_job {
    const struct training *training;
    const struct pass_layer *layer;
};

static void collect_head(void *context, uint32_t kv_head, uint32_t thread)
{
    (void)thread;
    const struct layer_job *job = context;
    const struct training *training = job->training;
    const struct row_shape *shape = &training->shape;
    const struct pass_layer *layer = job->layer;
    const struct kernels *kernels = pass_tools(layer->pass)->kernels;
    const uint32_t d = shape->head_dim, n_blocks = (layer->n_tokens + LAYOUT_BLOCK_TOKENS - 1) / LAYOUT_BLOCK_TOKENS;
    const size_t row_bytes = layout_row_bytes(shape);
    const uint8_t *rows = layer->rows + (size_t)kv_head * n_blocks * LAYOUT_BLOCK_TOKENS * row_bytes;
    uint16_t *to = keys_of(training, layer->layer * shape->n_kv_heads + kv_head) + training->n_collected * d;
    for (uint32_t t = 0; t < layer->n_tokens; t++, to += d) {
        float key[KERNELS_MAX_HEAD_DIM];
        kernels->decode_keys(rows + t * row_bytes, 1, d, (enum kernels_rows)shape->codec, key);
        for (uint32_t i = 0; i < d; i++)
            key[i] = codec_pq_cleaned(key[i], PQ_KEY_LARGEST);
        kernels->f16_encode(key, d, to);
    }
}

static int visit(void *context, const struct pass_layer *layer)
{
    const struct training *training = context;
    struct layer_job job = {training, layer};
    pool_run(pass_tools(layer->pass)->pool, training->shape.n_kv_heads, collect_head, &job);
    return 0;
}

/* How long the training will take, roughly: searches, at the speed of AVX2. */
static double training_us(const struct training *training, uint32_t n_threads)
{
    const uint32_t n_dims = training->request.n_dims;
    const double n = n_samples(training), batch = n < KMEANS_BATCH ? n : KMEANS_BATCH;
    const double full_us = n_dims == 2 ? 0.12 : n_dims == 4 ? 0.25 : 0.9; /* among 4096 */
    const double search_us = full_us * (0.4 + 0.6 * training->request.n_centroids / 4096.0);
    return training->n_spaces * (USUAL_ITERATIONS * batch + 2 * n) * search_us / n_threads;
}

/* A slice of the context at hand. 1: there is more; 0: all keys are there. */
static int collect(struct training *training, const struct job_tools *tools)
{
    const struct train_texts *texts = training->texts;
    const struct train_context *context = &texts->contexts[training->context];
    int r = 0;
    if (training->pass == NULL) {
        const struct pass_options options = {.visit = visit, .context = training, .skip_attention_of_last = true};
        r = pass_new(tools, &options, context->ids, context->n, &training->pass);
    }
    if (r == 0)
        r = pass_advance(training->pass);
    if (r < 0)
        return r;
    const double part =
        ((double)training->n_collected + pass_done(training->pass) * context->n) / (double)texts->n_tokens;
    if (r == 0) {
        training->pass = pass_free(training->pass);
        training->n_collected += context->n;
        training->context++;
    }
    const double so_far_us = (double)(clock_now_us() - training->begun_us);
    if (training->context <= 1 && part > 0.01) { /* its speed is known; from the second context on it stays */
        const double whole_us = so_far_us / part;
        training->collecting = whole_us / (whole_us + training_us(training, pool_n_threads(tools->pool)));
    }
    training->done = part * training->collecting > training->done ? part * training->collecting : training->done;
    snprintf(training->phase, sizeof training->phase, "keys of %llu tokens", (unsigned long long)texts->n_tokens);
    return training->context < texts->n_contexts;
}

/* ---- training ---- */

static int begin_training(struct training *training, const struct job_tools *tools)
{
    const struct train_codebook_request *request = &training->request;
    const uint32_t n_threads = pool_n_threads(tools->pool);
    const uint8_t *hash = quantizers_model_hash(tools->quantizers);
    training->n_slots = n_threads < training->n_spaces ? n_threads : training->n_spaces;
    training->spaces = calloc(training->n_spaces, sizeof *training->spaces);
    struct slot *slots = calloc(training->n_slots, sizeof *slots);
    training->slots = slots;
    int r = slots == NULL || training->spaces == NULL ? -ENOMEM : 0;
    for (uint32_t i = 0; r == 0 && i < training->n_slots; i++)
        r = kmeans_new(codec_pq_kernels(tools->kernels), request->n_dims, request->n_centroids, n_samples(training),
                       &slots[i].kmeans);
    if (r == 0)
        r = key_codebook_new(&training->shape, hash, request->n_dims, request->n_centroids, &training->codebook);
    if (r < 0)
        return r;
    struct train_codebook_identity identity = {.n_layers = training->shape.n_layers,
                                               .n_kv_heads = training->shape.n_kv_heads,
                                               .head_dim = training->shape.head_dim,
                                               .row_codec = training->shape.codec,
                                               .n_dims = request->n_dims,
                                               .n_centroids = request->n_centroids,
                                               .max_iterations = request->max_iterations,
                                               .n_offsets = training->n_offsets,
                                               .seed = request->seed,
                                               .text_hash = training->texts->hash,
                                               .n_samples = n_samples(training)};
    char path[PATH_MAX] = "";
    memcpy(identity.model_hash, hash, sizeof identity.model_hash);
    quantizers_checkpoint_path(tools->quantizers, request->n_dims, request->n_centroids, path, sizeof path);
    training->checkpoint = train_codebook_checkpoint_open(path, &identity, training->spaces, training->codebook);
    training->saved_us = clock_now_us();
    return 0;
}

/* Seeds of sub-spaces lie far apart, whatever the seed. */
static uint64_t seed_of(uint64_t seed, uint32_t space)
{
    uint64_t z = (seed + 1) * UINT64_C(0x9e3779b97f4a7c15) ^ (space + UINT64_C(1)) * UINT64_C(0xd6e8feb86659fd93);
    z = (z ^ z >> 32) * UINT64_C(0xd6e8feb86659fd93);
    return z ^ z >> 32;
}

/* false: there is no sub-space left. */
static bool take_space(struct training *training, struct slot *slot)
{
    const uint32_t n_dims = training->request.n_dims, n_tokens = (uint32_t)training->texts->n_tokens;
    uint32_t space;
    do
        space = atomic_fetch_add(&training->next, 1);
    while (space < training->n_spaces && training->spaces[space].done);
    if (space >= training->n_spaces) {
        atomic_store(&training->next, training->n_spaces); /* it does not run on for ever */
        return false;
    }
    const uint32_t first = space % spaces_of_head(training) * n_dims;
    const uint16_t *keys = keys_of(training, space / spaces_of_head(training)) + first;
    float *sample = kmeans_samples(slot->kmeans);
    for (uint32_t i = 0; i < n_samples(training); i++, sample += n_dims) {
        for (uint32_t j = 0; j < n_dims; j++)
            sample[j] = half_decode(keys[(size_t)(i % n_tokens) * training->shape.head_dim + j]);
        if (training->n_places == 1)
            continue;
        train_rotate(training->rope, train_rotate_offset(i, training->n_offsets), first / 2, n_dims / 2, sample);
        for (uint32_t j = 0; j < n_dims; j++)
            sample[j] = codec_pq_cleaned(sample[j], PQ_KEY_LARGEST);
    }
    kmeans_begin(slot->kmeans, n_samples(training), seed_of(training->request.seed, space),
                 training->request.max_iterations);
    slot->space = space;
    slot->busy = true;
    return true;
}

static void train_slot(void *context, uint32_t item, uint32_t thread)
{
    (void)thread;
    struct training *training = context;
    struct slot *slot = &training->slots[item];
    const size_t n_values = (size_t)training->request.n_centroids * training->request.n_dims;
    do {
        struct kmeans_result result;
        if (!slot->busy && !take_space(training, slot))
            return;
        if (kmeans_advance(slot->kmeans))
            continue;
        memcpy(training->codebook->centroids + slot->space * n_values, kmeans_centroids(slot->kmeans, &result),
               n_values * sizeof(float));
        training->spaces[slot->space] = (struct train_codebook_space){
            .done = true, .n_iterations = result.n_iterations, .error = result.error, .variance = result.variance};
        slot->busy = false;
    } while (clock_now_us() < training->deadline_us);
}

/* 1: there is more. */
static int train(struct training *training, const struct job_tools *tools)
{
    uint32_t n_done = 0;
    training->deadline_us = clock_now_us() + tools->slice_us;
    pool_run(tools->pool, training->n_slots, train_slot, training);
    if (clock_now_us() - training->saved_us > SAVE_US) {
        train_codebook_checkpoint_save(training->checkpoint, training->spaces, training->codebook);
        training->saved_us = clock_now_us();
    }
    for (uint32_t i = 0; i < training->n_spaces; i++)
        n_done += training->spaces[i].done;
    const double part = (double)n_done / training->n_spaces;
    const double done = training->collecting + (1 - training->collecting) * part;
    training->done = done > training->done ? done : training->done;
    snprintf(training->phase, sizeof training->phase, "codebooks, %u of %u", n_done, training->n_spaces);
    return n_done < training->n_spaces;
}

/* Absolute: who reads it may stand in another directory than the worker. */
static const char *path_of_result(struct training *training, const struct job_tools *tools)
{
    char path[PATH_MAX] = "";
    quantizers_codebook_path(tools->quantizers, training->request.n_dims, training->request.n_centroids, path,
                             sizeof path);
    return path[0] != '\0' ? realpath(path, training->path) : NULL;
}

static int end(struct training *training, const struct job_tools *tools, char *sentence)
{
    struct key_codebook *codebook = training->codebook;
    const struct train_codebook_request *request = &training->request;
    char problem[JOB_SENTENCE_SIZE] = "", where[160] = "kept beside the model";
    double error = 0, variance = 0;
    bool kept = false;
    codebook->seed = request->seed;
    codebook->text_hash = training->texts->hash;
    codebook->n_samples = n_samples(training);
    for (uint32_t i = 0; i < training->n_spaces; i++) {
        const struct train_codebook_space *space = &training->spaces[i];
        error += space->error;
        variance += space->variance;
        codebook->n_iterations =
            space->n_iterations > codebook->n_iterations ? space->n_iterations : codebook->n_iterations;
    }
    codebook->error = variance > 0 ? error / variance : 0;
    const double percent = 100 * codebook->error;
    const uint32_t n_iterations = codebook->n_iterations;
    train_codebook_checkpoint_save(training->checkpoint, training->spaces, codebook);
    training->codebook = NULL;
    const int r = quantizers_take_codebook(tools->quantizers, codebook, &kept, problem, sizeof problem);
    training->checkpoint = train_codebook_checkpoint_close(training->checkpoint, r == 0 && kept);
    if (r < 0) {
        snprintf(sentence, JOB_SENTENCE_SIZE, "%s", problem);
        return r;
    }
    if (!kept)
        snprintf(where, sizeof where, "not kept: %.100s",
                 problem[0] != '\0' ? problem : "there is no directory for it");
    snprintf(sentence, JOB_SENTENCE_SIZE,
             "codebook pq%u/%u of %llu tokens, %u iterations at most, error %.3g %% of the keys' variance, %.116s",
             request->n_dims, request->n_centroids, (unsigned long long)training->texts->n_tokens, n_iterations,
             percent, where);
    return 0;
}

/* ---- the job ---- */

static int advance(void *state, const struct job_tools *tools, struct job_report *report, char *sentence)
{
    struct training *training = state;
    int r = 0;
    snprintf(sentence, JOB_SENTENCE_SIZE, "no memory for the training"); /* what fails for another reason says it */
    if (training->texts == NULL) {
        const struct policy_terms terms = {.codec = POLICY_CODEC_PQ,
                                           .n_dims = training->request.n_dims,
                                           .n_centroids = training->request.n_centroids,
                                           .selector = POLICY_SELECTOR_MASS};
        if (!training->request.again && quantizers_has(tools->quantizers, &terms)) {
            snprintf(sentence, JOB_SENTENCE_SIZE, "the model has a codebook pq%u/%u already", terms.n_dims,
                     terms.n_centroids);
            report->path = path_of_result(training, tools);
            return 0;
        }
        r = begin(training, tools, sentence);
        if (r < 0)
            return r;
    }
    if (training->context < training->texts->n_contexts) {
        r = collect(training, tools);
        r = r == 0 ? 1 : r; /* the training follows */
    } else {
        if (training->slots == NULL)
            r = begin_training(training, tools);
        if (r == 0)
            r = train(training, tools);
    }
    if (r < 0)
        return r;
    report->phase = training->phase;
    report->done = training->done;
    if (r > 0)
        return 1;
    r = end(training, tools, sentence);
    report->path = r == 0 ? path_of_result(training, tools) : NULL;
    return r;
}

static const struct job_ops ops = {.name = "codebook", .advance = advance, .free = training_free};

int train_codebook_job_new(struct train_codebook_request *request, struct job *ret_job, char *sentence)
{
    const uint32_t n = request->n_centroids, dims = request->n_dims;
    int r = 0;
    if (dims != 2 && dims != 4 && dims != 8) {
        snprintf(sentence, JOB_SENTENCE_SIZE, "sub-spaces of %u dimensions: there are those of 2, 4 and 8", dims);
        r = -EINVAL;
    } else if (n < PQ_MIN_CENTROIDS || n > PQ_MAX_CENTROIDS || (n & (n - 1)) != 0) {
        snprintf(sentence, JOB_SENTENCE_SIZE, "%u centroids: a power of two from %u to %u is needed", n,
                 PQ_MIN_CENTROIDS, PQ_MAX_CENTROIDS);
        r = -EINVAL;
    }
    struct training *training = r == 0 ? calloc(1, sizeof *training) : NULL;
    if (r == 0 && training == NULL) {
        snprintf(sentence, JOB_SENTENCE_SIZE, "no memory");
        r = -ENOMEM;
    }
    if (r < 0) {
        job_texts_free(request->texts, request->n_texts);
        return r;
    }
    training->request = *request;
    if (training->request.max_iterations == 0)
        training->request.max_iterations = DEFAULT_ITERATIONS;
    training->collecting = 0.5;
    *ret_job = (struct job){.ops = &ops, .state = training};
    return 0;
}
