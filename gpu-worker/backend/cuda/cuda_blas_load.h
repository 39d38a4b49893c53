/*
 * cuda_blas_load.h - cuBLAS's library found at run time: the few of its functions that the back end calls.
 *
 * Nothing of cuBLAS is needed to build: prototypes and numbers of its binary interface (the same since version 11) stand here in
 * plain C types. Tests link a file of their own in place of cuda_blas_load.c.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>

/* Numbers of cuBLAS's interface. */
enum {
    CUDA_BLAS_SUCCESS = 0,        /* cublasStatus_t */
    CUDA_BLAS_ALLOC_FAILED = 3,   /* memory of the host or of the device */
    CUDA_BLAS_INVALID_VALUE = 7,  /* an argument */
    CUDA_BLAS_NOT_SUPPORTED = 15, /* a combination of types */
    CUDA_BLAS_AS_IT_IS = 0,       /* cublasOperation_t: CUBLAS_OP_N */
    CUDA_BLAS_TRANSPOSED = 1,     /* CUBLAS_OP_T */
    CUDA_BLAS_F32 = 0,            /* cudaDataType: CUDA_R_32F */
    CUDA_BLAS_F16 = 2,            /* CUDA_R_16F */
    CUDA_BLAS_SUMS_F32 = 68,      /* cublasComputeType_t: CUBLAS_COMPUTE_32F */
    CUDA_BLAS_ITS_CHOICE = -1,    /* cublasGemmAlgo_t: CUBLAS_GEMM_DEFAULT */
};

/* Matrices are column-major; alpha and beta lie on the host. Each returns a cublasStatus_t. */
struct cuda_blas_functions {
    int (*create)(void **ret_handle);
    int (*destroy)(void *handle);
    int (*set_stream)(void *handle, void *stream); /* takes the workspace away again */
    int (*set_workspace)(void *handle, void *workspace, size_t n_bytes);
    int (*get_version)(void *handle, int *ret_version); /* 130000 is 13.0.0 */
    const char *(*status_name)(int status);
    int (*gemm)(void *handle, int op_a, int op_b, int m, int n, int k, const void *alpha, const void *a, int a_type,
                int lda, const void *b, int b_type, int ldb, const void *beta, void *c, int c_type, int ldc, int sums,
                int algorithm);
    int (*gemm_batched)(void *handle, int op_a, int op_b, int m, int n, int k, const void *alpha, const void *a,
                        int a_type, int lda, long long stride_a, const void *b, int b_type, int ldb, long long stride_b,
                        const void *beta, void *c, int c_type, int ldc, long long stride_c, int n_batch, int sums,
                        int algorithm);
};

/* False: there is no cuBLAS here, and one sentence about it. The library stays loaded. */
bool cuda_blas_load(struct cuda_blas_functions *ret_functions, char *error, size_t error_size);
