/*
 * cuda_product.h - `matmul` of the cuda back end: own kernels for few tokens, cuBLAS for many.
 *
 * Few        up to 16 tokens, of F16 up to 8, and any number where there is no cuBLAS: cuda_matvec, weights and inputs in f32 in
 *            registers, 8 tokens a pass over the matrix. A third pass costs more than a copy of the matrix as halves, written and
 *            read; F16 needs no copy, and a second pass more than a product of cuBLAS (bench/roofline).
 * Many       weights as halves times a power of two of the matrix (its largest number below 2^15), F16 as it lies; inputs as
 *            halves times a power of two of each row; sums in f32 on tensor cores. BF16 and F32 do not leave the range of
 *            halves thereby, and a weight of BF16 keeps all its bits down to 2^-31 of the largest.
 * Invariant  bits of a row are the same in every batch of few tokens. In batches of more cuBLAS always gets 128 rows, the last
 *            ones zeros, so that it always takes the same kernel: bits may depend on the place among the 128, not on the others.
 * Memory     32 MiB of a matrix as halves, 8 MiB of products, and what the inputs take as halves, whatever the matrix.
 */
#pragma once

#include <stdint.h>

#include "gpu-worker/backend/cuda/cuda_internal.h"

enum { CUDA_PRODUCT_FEW = 16, CUDA_PRODUCT_FEW_F16 = 8 /* tokens: passes of cuda_matvec.cu's MAX_TOKENS */ };

/* Looks at the numbers of a matrix that lies on the device by now. Waits. Errors as finish(). */
int cuda_product_prepare(struct backend *backend, struct weight *weight);

void cuda_product_matmul(struct backend *backend, const struct weight *const *weights, uint32_t n_weights,
                         const float *x, uint32_t n_tokens, float *const *y);
