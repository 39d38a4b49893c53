/* blas_load.c - see blas_load.h; stands in for cuda_blas_load.c: the same functions, with the emulation's types. */
#include "tests/backend/cuda-on-cpu/blas_load.h"

#include <stdio.h>
#include <stdlib.h>

#include <cublas_v2.h>

#include "gpu-worker/backend/cuda/cuda_blas_load.h"

static bool there = true;
static int refused = -1;

void blas_load_set_there(bool is_there)
{
    there = is_there;
}

void blas_load_refuse(int n)
{
    refused = n;
}

static bool is_refused(void)
{
    return refused >= 0 && refused-- == 0;
}

static int create(void **ret_handle)
{
    cublasHandle_t handle = NULL;
    int status = (int)cublasCreate(&handle);
    *ret_handle = handle;
    return status;
}

static int destroy(void *handle)
{
    return (int)cublasDestroy(handle);
}

static int set_stream(void *handle, void *stream)
{
    return (int)cublasSetStream(handle, stream);
}

static int set_workspace(void *handle, void *workspace, size_t n_bytes)
{
    return (int)cublasSetWorkspace(handle, workspace, n_bytes);
}

static int get_version(void *handle, int *ret_version)
{
    return (int)cublasGetVersion(handle, ret_version);
}

static const char *status_name(int status)
{
    return cublasGetStatusName((cublasStatus_t)status);
}

static int gemm(void *handle, int op_a, int op_b, int m, int n, int k, const void *alpha, const void *a, int a_type,
                int lda, const void *b, int b_type, int ldb, const void *beta, void *c, int c_type, int ldc, int sums,
                int algorithm)
{
    if (is_refused())
        return CUBLAS_STATUS_NOT_SUPPORTED;
    return (int)cublasGemmEx(handle, (cublasOperation_t)op_a, (cublasOperation_t)op_b, m, n, k, alpha, a,
                             (cudaDataType)a_type, lda, b, (cudaDataType)b_type, ldb, beta, c, (cudaDataType)c_type,
                             ldc, (cublasComputeType_t)sums, (cublasGemmAlgo_t)algorithm);
}

static int gemm_batched(void *handle, int op_a, int op_b, int m, int n, int k, const void *alpha, const void *a,
                        int a_type, int lda, long long stride_a, const void *b, int b_type, int ldb, long long stride_b,
                        const void *beta, void *c, int c_type, int ldc, long long stride_c, int n_batch, int sums,
                        int algorithm)
{
    if (is_refused())
        return CUBLAS_STATUS_NOT_SUPPORTED;
    return (int)cublasGemmStridedBatchedEx(handle, (cublasOperation_t)op_a, (cublasOperation_t)op_b, m, n, k, alpha, a,
                                           (cudaDataType)a_type, lda, stride_a, b, (cudaDataType)b_type, ldb, stride_b,
                                           beta, c, (cudaDataType)c_type, ldc, stride_c, n_batch,
                                           (cublasComputeType_t)sums, (cublasGemmAlgo_t)algorithm);
}

bool cuda_blas_load(struct cuda_blas_functions *ret_functions, char *error, size_t error_size)
{
    if (!there || getenv("HCATTN_TEST_CUDA_NO_BLAS") != NULL) {
        snprintf(error, error_size, "libcublas.so.13: cannot open shared object file: No such file or directory");
        return false;
    }
    *ret_functions = (struct cuda_blas_functions){.create = create,
                                                  .destroy = destroy,
                                                  .set_stream = set_stream,
                                                  .set_workspace = set_workspace,
                                                  .get_version = get_version,
                                                  .status_name = status_name,
                                                  .gemm = gemm,
                                                  .gemm_batched = gemm_batched};
    return true;
}
