/*
 * cuda_halves.h - numbers as halves for tensor cores, and back: rows with a power of two each, so that none overflows and what
 * is lost is what is 2^-29 of the row's largest or less. Entry points as cuda_ops.h says.
 */
#pragma once

#include "gpu-worker/backend/cuda/cuda_ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/*
 * x [n_tokens][n_heads][n_columns] becomes out [n_heads / group][n_tokens x group][n_columns] halves, times 2^e of each row: its
 * largest finite magnitude lies in [2^14, 2^15) then (rows below 2^-112 become smaller). factors [rows]: 2^-e. Rows beyond the
 * last, up to n_rows_out, are zeros. With one head of one query the rows stay in their order.
 */
cudaError_t cuda_halves_rows(const struct cuda_queue *queue, const float *x, uint32_t n_tokens, uint32_t n_heads,
                             uint32_t group, uint32_t n_columns, uint32_t n_rows_out, uint16_t *out, float *factors);

/* y [n_rows][y_stride], n_columns of each row, = c [n_rows][n_columns] times factors [n_rows] */
cudaError_t cuda_halves_scale(const struct cuda_queue *queue, const float *c, const float *factors, uint32_t n_rows,
                              uint32_t n_columns, float *y, size_t y_stride);

/* *bits <- the larger of it and the largest finite magnitude of a matrix, as the bits of an f32 */
cudaError_t cuda_halves_largest(const struct cuda_queue *queue, enum tensor_type type, const void *matrix,
                                uint32_t n_rows, uint32_t n_columns, uint32_t *bits);

/* 2^e and 2^-e for a largest magnitude (its bits), as cuda_halves_rows(). */
float cuda_halves_factor(uint32_t bits, float *ret_back);

#ifdef __cplusplus
}
#endif
