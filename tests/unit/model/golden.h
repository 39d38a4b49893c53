/* golden.h - the real model and llama.cpp's answers about it, for the test_golden_* programs. */
#pragma once

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include <jansson.h>

#include "gpu-worker/model/model.h"
#include "gpu-worker/model/tokenizer.h"

struct golden {
    struct model *model;
    struct tokenizer *tokenizer;
    json_t *data;
};

/* Skips the test where HCATTN_TEST_MODEL does not name the model file. */
static inline void golden_open(struct golden *golden, const char *path)
{
    char error[256] = "";
    json_error_t json_error;
    const char *file = getenv("HCATTN_TEST_MODEL");
    if (!file || !*file) {
        print_message("skipped: set HCATTN_TEST_MODEL=<SmolLM2-135M-Instruct.Q4_1.gguf>\n");
        skip();
    }
    if (model_open(file, &golden->model, error, sizeof error) ||
        tokenizer_new(golden->model->gguf, &golden->tokenizer, error, sizeof error))
        fail_msg("%s", error);
    golden->data = json_load_file(path, 0, &json_error);
    if (!golden->data)
        fail_msg("%s: %s", path, json_error.text);
}

static inline void golden_close(struct golden *golden)
{
    json_decref(golden->data);
    tokenizer_free(golden->tokenizer);
    model_close(golden->model);
}

/* Prints the first difference; returns 0 or 1, to be counted. */
static inline int golden_differs(const char *what, const uint32_t *ids, size_t n_ids, const json_t *expected)
{
    size_t n = json_array_size(expected);
    for (size_t i = 0; i < n || i < n_ids; i++) {
        json_int_t want = i < n ? json_integer_value(json_array_get(expected, i)) : -1;
        json_int_t have = i < n_ids ? (json_int_t)ids[i] : -1;
        if (want == have)
            continue;
        print_error("%s: token %zu is %lld, expected %lld (%zu tokens, expected %zu)\n", what, i, (long long)have,
                    (long long)want, n_ids, n);
        return 1;
    }
    return 0;
}
