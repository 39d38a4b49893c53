/* tokenizer_fixture.h - the byte-level tokenizer of a tiny model made by tests/models/make-tiny. */
#pragma once

#include "tests/unit/gpu-worker/cmocka_all.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "gpu-worker/model/model.h"
#include "gpu-worker/model/tokenizer.h"

struct tokenizer_fixture {
    struct model *model;
    struct tokenizer *tokenizer;
};

static inline int tokenizer_fixture_set_up(void **state)
{
    static struct tokenizer_fixture fixture;
    char path[] = "/tmp/hcattn-tiny-XXXXXX", command[256], error[256];
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    close(fd);
    snprintf(command, sizeof(command), "python3 tests/models/make-tiny --layers 1 %s", path);
    assert_int_equal(system(command), 0);
    assert_int_equal(model_open(path, &fixture.model, error, sizeof(error)), 0);
    unlink(path);
    assert_int_equal(tokenizer_new(fixture.model->gguf, &fixture.tokenizer, error, sizeof(error)), 0);
    *state = &fixture;
    return 0;
}

static inline int tokenizer_fixture_tear_down(void **state)
{
    struct tokenizer_fixture *fixture = *state;
    tokenizer_free(fixture->tokenizer);
    model_close(fixture->model);
    return 0;
}
