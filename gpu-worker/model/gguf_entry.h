/*
 * gguf_entry.h - one metadata entry of a mapped file, between gguf.c (reads and checks) and gguf_values.c (converts).
 */
#pragma once

#include "gpu-worker/model/gguf.h"

enum gguf_value_type {
    GGUF_VALUE_U8 = 0,
    GGUF_VALUE_I8 = 1,
    GGUF_VALUE_U16 = 2,
    GGUF_VALUE_I16 = 3,
    GGUF_VALUE_U32 = 4,
    GGUF_VALUE_I32 = 5,
    GGUF_VALUE_F32 = 6,
    GGUF_VALUE_BOOL = 7,
    GGUF_VALUE_STRING = 8,
    GGUF_VALUE_ARRAY = 9,
    GGUF_VALUE_U64 = 10,
    GGUF_VALUE_I64 = 11,
    GGUF_VALUE_F64 = 12,
    GGUF_N_VALUE_TYPES,
};

struct gguf_entry {
    enum gguf_value_type type; /* of an element, for arrays */
    bool is_array;
    uint64_t n_elements; /* 1 unless an array */
    const uint8_t *data;
};

extern const uint8_t gguf_value_bytes[GGUF_N_VALUE_TYPES]; /* 0: string, array */

const struct gguf_entry *gguf_find_entry(const struct gguf *gguf, const char *key); /* NULL: no such key */
