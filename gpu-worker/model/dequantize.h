/*
 * dequantize.h - a row of a tensor as f32, in plain C: the truth the kernels of every back end are tested against.
 *
 * Threads    pure functions, any thread.
 * Source     block layouts are those of the GGUF files (format of ggml's quantized types).
 */
#pragma once

#include "gpu-worker/model/tensor.h"

/*
 * out [n_columns] <- one row of `type` at data (tensor_row_bytes() bytes, any alignment).
 * -EINVAL: n_columns is not whole blocks of the type, or the type is unknown; out is untouched then.
 */
int dequantize_row(enum tensor_type type, const void *data, uint32_t n_columns, float *out);

/* One IEEE 754 half precision number, given by its bits. Exact. */
float dequantize_f16(uint16_t bits);
