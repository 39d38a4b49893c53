/*
 * tensor.c - the tensor types of GGUF: names and block shapes.
 *
 * Threads    constant tables, any thread.
 */
#include "gpu-worker/model/tensor.h"

#define BLOCK(type, columns, bytes) [TENSOR_##type] = {#type, columns, bytes}

static const struct tensor_block blocks[] = {
    BLOCK(F32, 1, 4),      BLOCK(F16, 1, 2),      BLOCK(BF16, 1, 2),     BLOCK(Q4_0, 32, 18),
    BLOCK(Q4_1, 32, 20),   BLOCK(Q5_0, 32, 22),   BLOCK(Q5_1, 32, 24),   BLOCK(Q8_0, 32, 34),
    BLOCK(Q4_K, 256, 144), BLOCK(Q5_K, 256, 176), BLOCK(Q6_K, 256, 210),
};

/* Only for the line that refuses them. */
static const char *const refused[] = {
    [9] = "Q8_1",     [10] = "Q2_K",  [11] = "Q3_K",   [15] = "Q8_K",  [16] = "IQ2_XXS", [17] = "IQ2_XS",
    [18] = "IQ3_XXS", [19] = "IQ1_S", [20] = "IQ4_NL", [21] = "IQ3_S", [22] = "IQ2_S",   [23] = "IQ4_XS",
    [24] = "I8",      [25] = "I16",   [26] = "I32",    [27] = "I64",   [28] = "F64",     [29] = "IQ1_M",
    [34] = "TQ1_0",   [35] = "TQ2_0", [39] = "MXFP4",
};

const struct tensor_block *tensor_block(uint32_t type)
{
    if (type >= sizeof blocks / sizeof blocks[0] || !blocks[type].name)
        return NULL;
    return &blocks[type];
}

const char *tensor_type_name(uint32_t type)
{
    const struct tensor_block *block = tensor_block(type);
    if (block)
        return block->name;
    if (type < sizeof refused / sizeof refused[0] && refused[type])
        return refused[type];
    return "unknown";
}

size_t tensor_row_bytes(enum tensor_type type, uint32_t n_columns)
{
    const struct tensor_block *block = tensor_block((uint32_t)type);
    if (!block || n_columns % block->n_columns != 0)
        return 0;
    return (size_t)(n_columns / block->n_columns) * block->n_bytes;
}
