/*
 * cublas_v2.h - products of matrices on the emulated device: stands in for NVIDIA's header of this name. Only the calls that
 * docs/cuda.md lists; C and C++. Matrices are column-major, as cuBLAS has them.
 */
#pragma once

#include <cuda_runtime_api.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Numbers are NVIDIA's. */
typedef enum {
    CUBLAS_STATUS_SUCCESS = 0,
    CUBLAS_STATUS_NOT_INITIALIZED = 1,
    CUBLAS_STATUS_ALLOC_FAILED = 3,
    CUBLAS_STATUS_INVALID_VALUE = 7,
    CUBLAS_STATUS_EXECUTION_FAILED = 13,
    CUBLAS_STATUS_NOT_SUPPORTED = 15,
} cublasStatus_t;

typedef enum { CUBLAS_OP_N = 0, CUBLAS_OP_T = 1 } cublasOperation_t;
typedef enum { CUDA_R_32F = 0, CUDA_R_16F = 2, CUDA_R_16BF = 14 } cudaDataType;
typedef enum { CUBLAS_COMPUTE_32F = 68 } cublasComputeType_t;
typedef enum { CUBLAS_GEMM_DEFAULT = -1 } cublasGemmAlgo_t;
typedef struct cublasContext *cublasHandle_t;

cublasStatus_t cublasCreate(cublasHandle_t *handle);
cublasStatus_t cublasDestroy(cublasHandle_t handle);
cublasStatus_t cublasSetStream(cublasHandle_t handle, cudaStream_t stream); /* takes a workspace away from the handle */
cublasStatus_t cublasSetWorkspace(cublasHandle_t handle, void *workspace, size_t n_bytes); /* aligned to 256 bytes */
cublasStatus_t cublasGetVersion(cublasHandle_t handle, int *version);
const char *cublasGetStatusName(cublasStatus_t status);

/* C [m][n] <- alpha op(A) [m][k] op(B) [k][n] + beta C; A and B of one type; alpha and beta are f32 of the host */
cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t transa, cublasOperation_t transb, int m, int n,
                            int k, const void *alpha, const void *a, cudaDataType a_type, int lda, const void *b,
                            cudaDataType b_type, int ldb, const void *beta, void *c, cudaDataType c_type, int ldc,
                            cublasComputeType_t compute, cublasGemmAlgo_t algorithm);

/* n_batch of them, strides in elements */
cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t handle, cublasOperation_t transa, cublasOperation_t transb,
                                          int m, int n, int k, const void *alpha, const void *a, cudaDataType a_type,
                                          int lda, long long int stride_a, const void *b, cudaDataType b_type, int ldb,
                                          long long int stride_b, const void *beta, void *c, cudaDataType c_type,
                                          int ldc, long long int stride_c, int n_batch, cublasComputeType_t compute,
                                          cublasGemmAlgo_t algorithm);

#ifdef __cplusplus
}
#endif
