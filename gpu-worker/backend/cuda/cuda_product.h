/*
 * cuda_product.h - `matmul` of the cuda back end: own kernels for few tokens, cuBLAS for many.
 *
 * Few        up to 8 tokens (a block of cuda_matvec takes 8 through one pass over the matrix; with more it would pass twice), and
 *            any number where there is no cuBLAS: weights and inputs in f32 in registers.
 * Many       weights as halves times a power of two of the matrix (its largest number below 2^15), F16 as it lies; inputs as
 *            halves times a power of two of each row; sums in f32 on tensor cores. BF16 and F32 do not leave the range of
 *            halves thereby, and a weight of BF16 keeps all its bits down to 2^-31 of the largest.
 * Invariant  bits of a row are the same in every batch of up to 8 tokens. In batches of more cuBLAS always gets 128 rows, the last
 *            ones zeros, so that it always takes the same kernel: bits may depend on the place among the 128, not on the others.
 * Memory     two works of at most 64 MiB and what the inputs take as halves, whatever the matrix.
 */
#pragma once

#include <stdint.h>

#include "gpu-worker/backend/cuda/cuda_internal.h"

enum { CUDA_PRODUCT_FEW = 8 /* tokens: MAX_TOKENS of cuda_matvec.cu */ };

/* Looks at the numbers of a matrix that lies on the device by now. Waits. Errors as finish(). */
int cuda_product_prepare(struct backend *backend, struct weight *weight);

void cuda_product_matmul(struct backend *backend, const struct weight *const *weights, uint32_t n_weights,
                         const float *x, uint32_t n_tokens, float *const *y);
