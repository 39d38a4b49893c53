/* tensor.h - one tensor of a model file as it lies in the mapped file. */
#pragma once

#include <stdint.h>
#include <stddef.h>

/* Numbers are GGUF's. */
enum tensor_type {
    TENSOR_F32 = 0,
    TENSOR_F16 = 1,
    TENSOR_Q4_0 = 2,
    TENSOR_Q4_1 = 3,
    TENSOR_Q5_0 = 6,
    TENSOR_Q5_1 = 7,
    TENSOR_Q8_0 = 8,
    TENSOR_Q4_K = 12,
    TENSOR_Q5_K = 13,
    TENSOR_Q6_K = 14,
    TENSOR_BF16 = 30,
};

struct tensor {
    char name[64];
    enum tensor_type type;
    uint32_t n_rows;    /* outputs; 1 for a vector */
    uint32_t n_columns; /* inputs; the contiguous dimension */
    const void *data;   /* in the mapped file, checked to lie inside it; not necessarily aligned beyond 32 bytes */
    size_t n_bytes;
};

/* Shape of a type's storage: a row is whole blocks of n_columns columns in n_bytes bytes. */
struct tensor_block {
    const char *name; /* "Q4_1" */
    uint32_t n_columns;
    uint32_t n_bytes;
};

/* NULL: not a type this program knows. */
const struct tensor_block *tensor_block(uint32_t type);

/* Name of a type for messages, of GGUF types that are refused too ("IQ4_XS"); "unknown" for the rest. */
const char *tensor_type_name(uint32_t type);

/* Bytes of one row; 0: n_columns is 0 or not whole blocks, or the type is unknown. */
size_t tensor_row_bytes(enum tensor_type type, uint32_t n_columns);
