/*
 * model_private.h - what the files of model.h share: the file being read and where to complain.
 */
#pragma once

#include "gpu-worker/model/model.h"

struct model_reader {
    struct model *model;
    const char *path;
    char *error;
    size_t error_size;
};

/* Writes "path: reason" to the error buffer, returns code. */
__attribute__((format(printf, 3, 4))) int model_fail(const struct model_reader *reader, int code, const char *format,
                                                     ...);

/* Key "llama.<name>". -ENOENT is returned without a message (the caller has a default), other errors with one. */
int model_get_u32(const struct model_reader *reader, const char *name, uint32_t *ret_value);
int model_get_f32(const struct model_reader *reader, const char *name, float *ret_value);

/* model_rope.c: fills model->rope; shape is known, tensors are not. */
int model_rope_read(const struct model_reader *reader);

/* model_hash.c */
void model_hash(const struct gguf *gguf, uint8_t hash[MODEL_HASH_BYTES]);
