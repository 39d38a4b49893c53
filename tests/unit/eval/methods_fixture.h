/* methods_fixture.h - methods on a tiny model without an evaluation around them: a pass they watch, then their tails. */
#pragma once

#include "tests/unit/eval/worker_fixture.h"

#include <math.h>

#include "gpu-worker/eval/method.h"
#include "gpu-worker/keys/quantizers.h"

#define METHODS_TINY "--layers 2 --heads 6 --kv-heads 2 --embd 192 --context 1024"
enum { N_LAYERS = 2, N_KV_HEADS = 2, GROUP = 3, HEAD_DIM = 32, N_HEADS = N_LAYERS * N_KV_HEADS };
enum { CONTEXT = 512, TAIL = 128, PROMPT = CONTEXT - TAIL, MAX_METHODS = 12 };

struct methods_fixture {
    struct worker_fixture *worker;
    struct pass *pass;
    uint32_t n_methods;
    struct method *methods[MAX_METHODS];
    float *logprobs; /* [TAIL][n_vocab] of full attention */
    /* Called beside a method with each layer; either may be NULL, and may change what the method gets. */
    void (*at_prompt)(struct methods_fixture *fixture, struct pass_layer *layer);
    void (*at_tail)(struct methods_fixture *fixture, struct pass_tail_layer *layer);
    void (*after_tail)(struct methods_fixture *fixture, const struct pass_tail_layer *layer);
    void *context;
    struct method *at_work;
};

static inline struct methods_fixture *methods_fixture_new(enum row_codec codec)
{
    struct methods_fixture *fixture = calloc(1, sizeof(*fixture));
    assert_non_null(fixture);
    fixture->worker = worker_fixture_new(METHODS_TINY, "cpu", codec);
    const struct model_shape *shape = &fixture->worker->model->shape;
    const struct row_shape rows = {shape->n_layers, shape->n_kv_heads, shape->head_dim, codec};
    assert_int_equal(shape->head_dim, HEAD_DIM);
    assert_int_equal(quantizers_new(&rows, fixture->worker->model->hash, NULL, &fixture->worker->tools.quantizers), 0);
    return fixture;
}

static inline int methods_fixture_visit(void *context, const struct pass_layer *layer)
{
    struct methods_fixture *fixture = context;
    struct pass_layer of_test = *layer;
    if (fixture->at_prompt != NULL)
        fixture->at_prompt(fixture, &of_test);
    for (uint32_t i = 0; i < fixture->n_methods; i++) {
        struct method *method = fixture->methods[i];
        int error = method->ops->observe == NULL ? 0 : method->ops->observe(method, &of_test, PROMPT);
        if (error != 0)
            return error;
    }
    return 0;
}

/* Makes the methods (NULL-terminated) and lets them watch a text. */
static inline void methods_fixture_begin(struct methods_fixture *fixture, const char *const *names, bool looks)
{
    uint32_t ids[CONTEXT];
    char sentence[JOB_SENTENCE_SIZE] = "";
    const size_t n_vocab = fixture->worker->model->shape.n_vocab;
    for (fixture->n_methods = 0; names[fixture->n_methods] != NULL; fixture->n_methods++) {
        struct method **method = &fixture->methods[fixture->n_methods];
        assert_true(fixture->n_methods < MAX_METHODS);
        if (method_new(names[fixture->n_methods], &fixture->worker->tools, CONTEXT, method, sentence,
                       sizeof(sentence)) != 0)
            fail_msg("%s: %s", names[fixture->n_methods], sentence);
        (*method)->looks = looks;
    }
    worker_fixture_ids(fixture->worker, ids, CONTEXT);
    const struct pass_options options = {.keep_rows = true, .visit = methods_fixture_visit, .context = fixture};
    assert_int_equal(pass_new(&fixture->worker->tools, &options, ids, CONTEXT, &fixture->pass), 0);
    for (int r = 1; r != 0; r = pass_advance(fixture->pass))
        assert_true(r == 1);
    fixture->logprobs = malloc(TAIL * n_vocab * sizeof(float));
    assert_non_null(fixture->logprobs);
    for (uint32_t i = 0; i < TAIL; i++)
        pass_logprobs(fixture->pass, NULL, PROMPT + i, fixture->logprobs + i * n_vocab);
}

static inline int methods_fixture_attend(void *context, const struct pass_tail_layer *layer)
{
    struct methods_fixture *fixture = context;
    struct pass_tail_layer of_test = *layer;
    if (fixture->at_tail != NULL)
        fixture->at_tail(fixture, &of_test);
    int error = fixture->at_work->ops->attend(fixture->at_work, &of_test);
    if (fixture->after_tail != NULL)
        fixture->after_tail(fixture, &of_test);
    return error;
}

/* The tail of one method; returns the mean KL divergence from full attention. */
static inline double methods_fixture_tail(struct methods_fixture *fixture, uint32_t index)
{
    const size_t n_vocab = fixture->worker->model->shape.n_vocab;
    struct pass_tail *tail = NULL;
    double divergence = 0;
    float *logprobs = malloc(n_vocab * sizeof(float));
    assert_non_null(logprobs);
    fixture->at_work = fixture->methods[index];
    assert_int_equal(pass_tail_new(fixture->pass, PROMPT, methods_fixture_attend, fixture, &tail), 0);
    for (int r = 1; r != 0; r = pass_tail_advance(tail))
        assert_true(r == 1);
    for (uint32_t i = 0; i < TAIL; i++) {
        const float *full = fixture->logprobs + i * n_vocab;
        pass_logprobs(fixture->pass, tail, PROMPT + i, logprobs);
        for (size_t id = 0; id < n_vocab; id++)
            divergence += exp((double)full[id]) * ((double)full[id] - (double)logprobs[id]) / TAIL;
    }
    free(logprobs);
    pass_tail_free(tail);
    return divergence;
}

/* Old tokens that a method read, of those there were. */
static inline double methods_fixture_kept(const struct methods_fixture *fixture, uint32_t index)
{
    const struct method *method = fixture->methods[index];
    double kept = 0;
    for (uint32_t i = 0; i < N_HEADS; i++)
        kept += (double)method->n_kept[i] / (double)method->n_old / N_HEADS;
    return kept;
}

/* Ends a text; another may begin. */
static inline void methods_fixture_end(struct methods_fixture *fixture)
{
    for (uint32_t i = 0; i < fixture->n_methods; i++)
        fixture->methods[i] = method_free(fixture->methods[i]);
    fixture->n_methods = 0;
    fixture->pass = pass_free(fixture->pass);
    free(fixture->logprobs);
    fixture->logprobs = NULL;
}

static inline void methods_fixture_free(struct methods_fixture *fixture)
{
    methods_fixture_end(fixture);
    quantizers_free(fixture->worker->tools.quantizers);
    worker_fixture_free(fixture->worker);
    free(fixture);
}
