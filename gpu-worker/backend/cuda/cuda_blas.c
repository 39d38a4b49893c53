/* cuda_blas.c - see cuda_blas.h. */
#include "gpu-worker/backend/cuda/cuda_blas.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "gpu-worker/backend/cuda/cuda_blas_load.h"
#include "gpu-worker/backend/cuda/cuda_internal.h"

/* What NVIDIA advises for Hopper; others take less. */
#define WORKSPACE_BYTES ((size_t)32 << 20)

struct cuda_blas {
    struct cuda_blas_functions functions;
    void *handle, *workspace;
    char version[24];
};

static int start(struct backend *backend, struct cuda_blas *blas, char *error, size_t error_size)
{
    int number = 0;
    const char *call = "cublasCreate_v2";
    int status = blas->functions.create(&blas->handle);
    if (status == CUDA_BLAS_SUCCESS) {
        call = "cublasSetStream_v2";
        status = blas->functions.set_stream(blas->handle, backend->stream);
    }
    if (status == CUDA_BLAS_SUCCESS) {
        call = "cublasSetWorkspace_v2";
        blas->workspace = backend_cuda_alloc(backend, WORKSPACE_BYTES);
        status = blas->workspace == NULL
                     ? CUDA_BLAS_ALLOC_FAILED
                     : blas->functions.set_workspace(blas->handle, blas->workspace, WORKSPACE_BYTES);
    }
    if (status == CUDA_BLAS_SUCCESS) {
        call = "cublasGetVersion_v2";
        status = blas->functions.get_version(blas->handle, &number);
    }
    if (status != CUDA_BLAS_SUCCESS) {
        snprintf(error, error_size, "%s: %s", call, blas->functions.status_name(status));
        return -EIO;
    }
    snprintf(blas->version, sizeof blas->version, "%d.%d.%d", number / 10000, number / 100 % 100, number % 100);
    return 0;
}

struct cuda_blas *cuda_blas_new(struct backend *backend, char *error, size_t error_size)
{
    struct cuda_blas *blas = calloc(1, sizeof *blas);
    if (blas == NULL) {
        snprintf(error, error_size, "no memory");
        return NULL;
    }
    if (!cuda_blas_load(&blas->functions, error, error_size) || start(backend, blas, error, error_size) < 0)
        return cuda_blas_free(backend, blas);
    return blas;
}

struct cuda_blas *cuda_blas_free(struct backend *backend, struct cuda_blas *blas)
{
    if (blas == NULL)
        return NULL;
    if (blas->handle != NULL)
        blas->functions.destroy(blas->handle); /* waits */
    backend_cuda_free(backend, blas->workspace);
    free(blas);
    return NULL;
}

const char *cuda_blas_version(const struct cuda_blas *blas)
{
    return blas->version;
}

/* In CUDA's terms, which cuda_commands_failed() takes; the sentence is cuBLAS's. */
static cudaError_t failed(struct backend *backend, const char *call, int status)
{
    if (backend->error == 0) {
        backend->error = status == CUDA_BLAS_ALLOC_FAILED ? -ENOMEM : -EIO;
        if (cudaDeviceSynchronize() != cudaSuccess)
            backend->error = -ENODEV;
        snprintf(backend->error_sentence, sizeof backend->error_sentence, "%s: %s", call,
                 backend->blas->functions.status_name(status));
    }
    return status == CUDA_BLAS_ALLOC_FAILED ? cudaErrorMemoryAllocation : cudaErrorInvalidValue;
}

cudaError_t cuda_blas_multiply(struct backend *backend, const struct cuda_blas_product *p)
{
    const struct cuda_blas *blas = backend->blas;
    const float beta = p->adds ? 1.0f : 0.0f;
    /* our rows are its columns */
    const int op_left = p->left_by_rows ? CUDA_BLAS_TRANSPOSED : CUDA_BLAS_AS_IT_IS;
    int status;
    if (p->n_batch == 1) {
        status = blas->functions.gemm(blas->handle, op_left, CUDA_BLAS_AS_IT_IS, p->m, p->n, p->k, &p->alpha, p->left,
                                      CUDA_BLAS_F16, p->left_stride, p->right, CUDA_BLAS_F16, p->right_stride, &beta,
                                      p->c, CUDA_BLAS_F32, p->c_stride, CUDA_BLAS_SUMS_F32, CUDA_BLAS_ITS_CHOICE);
        return status == CUDA_BLAS_SUCCESS ? cudaSuccess : failed(backend, "cublasGemmEx", status);
    }
    status = blas->functions.gemm_batched(
        blas->handle, op_left, CUDA_BLAS_AS_IT_IS, p->m, p->n, p->k, &p->alpha, p->left, CUDA_BLAS_F16, p->left_stride,
        p->left_batch, p->right, CUDA_BLAS_F16, p->right_stride, p->right_batch, &beta, p->c, CUDA_BLAS_F32,
        p->c_stride, p->c_batch, p->n_batch, CUDA_BLAS_SUMS_F32, CUDA_BLAS_ITS_CHOICE);
    return status == CUDA_BLAS_SUCCESS ? cudaSuccess : failed(backend, "cublasGemmStridedBatchedEx", status);
}
