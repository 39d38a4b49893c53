/*
 * cuda_blas.h - products of matrices of halves on tensor cores, by cuBLAS where it is.
 *
 * Owner      the back end (backend->blas; NULL: there is none). Threads: its own.
 * Memory     cuBLAS works in 32 MiB that the back end gave it and counts: a product allocates nothing, and may be captured.
 * Invariant  the same product of the same shapes has the same bits on the same device, call after call: one stream, a workspace
 *            of its own, no atomics. A product of other shapes may be added up in another order.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cuda_runtime_api.h>

struct backend;
struct cuda_blas;

/* NULL: no cuBLAS, and one sentence why; the back end goes on without. */
struct cuda_blas *cuda_blas_new(struct backend *backend, char *error, size_t error_size);
struct cuda_blas *cuda_blas_free(struct backend *backend, struct cuda_blas *blas);

/* "13.1.0" */
const char *cuda_blas_version(const struct cuda_blas *blas);

/*
 * For each of n_batch: c [n][c_stride], columns 0 .. m - 1 of each row <- alpha x sum over k of left x right + (adds ? c : 0).
 * left is a matrix [m][left_stride] of rows of k halves (left_by_rows) or [k][left_stride] of rows of m; right is
 * [n][right_stride], rows of k halves. Strides in numbers; those of the batch go from matrix to matrix.
 */
struct cuda_blas_product {
    const uint16_t *left, *right;
    float *c;
    int m, n, k;
    int left_stride, right_stride, c_stride;
    bool left_by_rows, adds;
    float alpha;
    int n_batch;
    long long left_batch, right_batch, c_batch;
};

/* On the back end's stream; what cuBLAS refuses is kept as the back end's failure, in its words. */
cudaError_t cuda_blas_multiply(struct backend *backend, const struct cuda_blas_product *product);
