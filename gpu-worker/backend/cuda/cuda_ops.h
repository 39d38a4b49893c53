/*
 * cuda_ops.h - the operations of the CUDA back end, each launched on a stream; C linkage, one .cu file an operation.
 *
 * Owner      the engine's thread.
 * Memory     every pointer is device memory; matrices lie there as in the model's file (row-major blocks of their type, rows
 *            contiguous), base addresses from cudaMalloc() (256 bytes).
 * Invariant  the bits of a row do not depend on which rows share the call (given n_threads).
 * Errors     what the launch gave (cudaSuccess: it is under way); arguments are the caller's to check. Nothing waits.
 *
 * Words      T = n_tokens rows of the batch; shapes are [rows][columns], row-major, contiguous. `type` is one of those that
 *            tensor_block() knows, n_columns whole blocks of it. Empty calls (a size of 0) launch nothing.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <cuda_runtime_api.h>

#include "gpu-worker/backend/backend.h"
#include "gpu-worker/model/tensor.h"
#include "kernels/kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Where to launch. */
struct cuda_queue {
    cudaStream_t stream;
    uint32_t n_threads; /* of a block, a multiple of 32, at most 1024; 0: each kernel's own choice */
};

/* out [T][n] = x / sqrt(mean(x^2) + eps) * weight [n] (f32); out may be x */
cudaError_t cuda_rms_norm(const struct cuda_queue *queue, const float *x, uint32_t n_tokens, uint32_t n,
                          const float *weight, float eps, float *out);

/* rotates x [T][n_heads][head_dim] in place, pairs (2i, 2i + 1); positions [T], frequencies [n_rotated / 2] */
cudaError_t cuda_rope(const struct cuda_queue *queue, float *x, uint32_t n_tokens, uint32_t n_heads, uint32_t head_dim,
                      const uint32_t *positions, uint32_t n_rotated, const float *frequencies, float magnitude);

/* gate [n] <- silu(gate) * up */
cudaError_t cuda_swiglu(const struct cuda_queue *queue, float *gate, const float *up, size_t n);

/* x [n] <- x + y */
cudaError_t cuda_add(const struct cuda_queue *queue, float *x, const float *y, size_t n);

/* out [T][n_columns] = rows ids [T] of a matrix; bits as dequantize_row() gives */
cudaError_t cuda_embed(const struct cuda_queue *queue, enum tensor_type type, const void *matrix, uint32_t n_columns,
                       const uint32_t *ids, uint32_t n_tokens, float *out);

/* rows [T][n_kv_heads][kernels_row_bytes] from k and v [T][n_kv_heads][head_dim]; bits as kernels' encode_row gives */
cudaError_t cuda_encode_rows(const struct cuda_queue *queue, const float *k, const float *v, uint32_t n_tokens,
                             uint32_t n_kv_heads, uint32_t head_dim, enum kernels_rows codec, void *rows);

/* y [T][n_rows] = x [T][n_columns] * matrix^T; weights in registers, sums in f32: made for few tokens, right for any number */
cudaError_t cuda_matvec(const struct cuda_queue *queue, enum tensor_type type, const void *matrix, uint32_t n_rows,
                        uint32_t n_columns, const float *x, uint32_t n_tokens, float *y);

/* out [n_rows][n_columns] halves (by their bits) of numbers times a power of two, rounded to nearest even: inputs of cuBLAS */
cudaError_t cuda_dequantize_f16(const struct cuda_queue *queue, enum tensor_type type, const void *matrix,
                                uint32_t n_rows, uint32_t n_columns, float factor, uint16_t *out);

/* As `copy` of backend.h; items in device memory, most_bytes: the largest n_bytes of them. Pinned host memory will do, too. */
cudaError_t cuda_copy(const struct cuda_queue *queue, const struct backend_copy *items, uint32_t n_items,
                      size_t most_bytes);

/*
 * As `merge` of backend_device.h: partials <- lane by lane as partial_merge of kernels/, then out as partial_finish. items in
 * device memory, what the lanes have there or in pinned host memory. head_dim up to 256, n_threads up to 256.
 */
cudaError_t cuda_merge(const struct cuda_queue *queue, const struct backend_merge *items, uint32_t n_items,
                       uint32_t group, uint32_t head_dim);

/*
 * Exact attention partials, as `attend` of backend.h; items [n_items], and all that they point to, in device memory, rows
 * aligned to 2 bytes. max_queries: the largest n_queries of the items. n_items up to 65535, head_dim up to 256, n_threads up to
 * 256 (cudaErrorInvalidValue otherwise).
 */
cudaError_t cuda_attend(const struct cuda_queue *queue, const struct backend_attend *items, uint32_t n_items,
                        uint32_t max_queries, uint32_t head_dim, enum kernels_rows codec, float scale);

/*
 * The same for few queries over lists of any length, cut over the device; max_pieces: the longest list. A result depends on
 * neither maximum; its bits are not those of cuda_attend(). scratch: cuda_attend_decode_bytes(), NULL where these are 0.
 */
cudaError_t cuda_attend_decode(const struct cuda_queue *queue, const struct backend_attend *items, uint32_t n_items,
                               uint32_t max_queries, uint32_t max_pieces, uint32_t head_dim, enum kernels_rows codec,
                               float scale, float *scratch);
size_t cuda_attend_decode_bytes(uint32_t n_items, uint32_t max_queries, uint32_t max_pieces, uint32_t head_dim);

#ifdef __cplusplus
}
#endif
