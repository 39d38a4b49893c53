/* worker_fixture.h - what a job works with, for tests: a tiny random model on a back end, a tokenizer, the tools. */
#pragma once

#include "tests/unit/gpu-worker/cmocka_all.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/pool.h"
#include "gpu-worker/job.h"
#include "gpu-worker/model/tokenizer.h"
#include "gpu-worker/network.h"
#include "proto/layout.h"

struct worker_fixture {
    struct model *model;
    struct backend_ops ops; /* a copy, so that a test may replace one */
    struct backend *backend;
    struct network *network;
    struct tokenizer *tokenizer;
    struct pool *pool;
    struct job_tools tools; /* quantizers: NULL */
};

/* make_options: of tests/models/make-tiny. */
static inline struct worker_fixture *worker_fixture_new(const char *make_options, const char *backend_name,
                                                        enum row_codec codec)
{
    struct worker_fixture *fixture = calloc(1, sizeof(*fixture));
    assert_non_null(fixture);
    char path[] = "/tmp/hcattn-tiny-XXXXXX", command[512], error[256];
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    close(fd);
    snprintf(command, sizeof(command), "tests/models/make-tiny %s %s", make_options, path);
    assert_int_equal(system(command), 0);
    assert_int_equal(model_open(path, &fixture->model, error, sizeof(error)), 0);
    unlink(path);
    assert_int_equal(tokenizer_new(fixture->model->gguf, &fixture->tokenizer, error, sizeof(error)), 0);
    assert_int_equal(pool_new(2, NULL, NULL, &fixture->pool), 0);
    struct backend_options options = {.isa = KERNELS_ISA_AUTO, .pool = fixture->pool};
    fixture->ops = *backend_find(backend_name);
    assert_int_equal(fixture->ops.open(&options, &fixture->backend, error, sizeof(error)), 0);
    assert_int_equal(network_load(&fixture->ops, fixture->backend, fixture->model, NULL, NULL, &fixture->network, error,
                                  sizeof(error)),
                     0);
    fixture->tools = (struct job_tools){
        .network = fixture->network,
        .kernels = kernels_get(strcmp(backend_name, "reference") == 0 ? KERNELS_ISA_PLAIN : KERNELS_ISA_AUTO),
        .pool = fixture->pool,
        .tokenizer = fixture->tokenizer,
        .row_codec = codec,
        .n_ctx = fixture->model->shape.n_ctx_train,
        .slice_us = JOB_SLICE_US,
    };
    return fixture;
}

static inline void worker_fixture_free(struct worker_fixture *fixture)
{
    network_free(fixture->network);
    fixture->ops.close(fixture->backend);
    pool_free(fixture->pool);
    tokenizer_free(fixture->tokenizer);
    model_close(fixture->model);
    free(fixture);
}

/* n ids of the model's vocabulary that look like chance. */
static inline void worker_fixture_ids(const struct worker_fixture *fixture, uint32_t *ids, uint32_t n)
{
    uint32_t state = 12345;
    for (uint32_t i = 0; i < n; i++) {
        state = state * 1664525 + 1013904223;
        ids[i] = (state >> 8) % fixture->model->shape.n_vocab;
    }
}
