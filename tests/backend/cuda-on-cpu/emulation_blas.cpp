/*
 * emulation_blas.cpp - cuBLAS on the emulated device: inputs as f32, OpenBLAS, rounded to the output's type. See cublas_v2.h.
 *
 * Threads    the calling one (the serial OpenBLAS).
 */
#include <cblas.h>
#include <cublas_v2.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <vector>

#include "tests/backend/cuda-on-cpu/emulation.h"

struct cublasContext {
    cudaStream_t stream;
};

/* A matrix of n_rows x n_columns as it lies on the device. */
struct matrix {
    void *numbers;
    cudaDataType type;
    int n_rows, n_columns, stride;
};

static size_t number_bytes(cudaDataType type)
{
    return type == CUDA_R_32F ? 4 : 2;
}

static float number_at(const struct matrix *m, size_t i)
{
    if (m->type == CUDA_R_32F)
        return static_cast<const float *>(m->numbers)[i];
    const unsigned short bits = static_cast<const unsigned short *>(m->numbers)[i];
    return m->type == CUDA_R_16F ? __half2float(__ushort_as_half(bits)) : __bfloat162float(__ushort_as_bfloat16(bits));
}

static void put(const struct matrix *m, size_t i, float value)
{
    if (m->type == CUDA_R_32F)
        static_cast<float *>(m->numbers)[i] = value;
    else
        static_cast<unsigned short *>(m->numbers)[i] = m->type == CUDA_R_16F
                                                           ? __half_as_ushort(__float2half_rn(value))
                                                           : __bfloat16_as_ushort(__float2bfloat16_rn(value));
}

static std::vector<float> read_matrix(const struct matrix *m)
{
    std::vector<float> all((size_t)m->n_rows * (size_t)m->n_columns);
    size_t at = 0;
    for (int column = 0; column < m->n_columns; column++)
        for (int row = 0; row < m->n_rows; row++)
            all[at++] = number_at(m, (size_t)column * (size_t)m->stride + (size_t)row);
    return all;
}

static void check_matrix(const struct matrix *m, const char *what)
{
    if (m->n_rows && m->n_columns)
        emulation_check_device(
            m->numbers, ((size_t)(m->n_columns - 1) * (size_t)m->stride + (size_t)m->n_rows) * number_bytes(m->type),
            what);
}

static void multiply(cublasOperation_t op_a, cublasOperation_t op_b, int m, int n, int k, float alpha,
                     const struct matrix *a, const struct matrix *b, float beta, const struct matrix *c)
{
    check_matrix(a, "matrix A of a product");
    check_matrix(b, "matrix B of a product");
    check_matrix(c, "matrix C of a product");
    const std::vector<float> in_a = read_matrix(a), in_b = read_matrix(b);
    std::vector<float> out = beta != 0 ? read_matrix(c) : std::vector<float>((size_t)m * (size_t)n);
    cblas_sgemm(CblasColMajor, op_a == CUBLAS_OP_T ? CblasTrans : CblasNoTrans,
                op_b == CUBLAS_OP_T ? CblasTrans : CblasNoTrans, m, n, k, alpha, in_a.data(), std::max(a->n_rows, 1),
                in_b.data(), std::max(b->n_rows, 1), beta, out.data(), m);
    for (int column = 0; column < n; column++)
        for (int row = 0; row < m; row++)
            put(c, (size_t)column * (size_t)c->stride + (size_t)row, out[(size_t)column * (size_t)m + (size_t)row]);
}

cublasStatus_t cublasCreate(cublasHandle_t *handle)
{
    const cudaError_t error = emulation_begin(EMULATION_ALLOCATES);
    if (error)
        return error == cudaErrorMemoryAllocation ? CUBLAS_STATUS_ALLOC_FAILED : CUBLAS_STATUS_NOT_INITIALIZED;
    *handle = new cublasContext{};
    emulation_count_object(1);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasDestroy(cublasHandle_t handle)
{
    if (!handle)
        return CUBLAS_STATUS_NOT_INITIALIZED;
    delete handle;
    emulation_count_object(-1);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetStream(cublasHandle_t handle, cudaStream_t stream)
{
    if (!handle)
        return CUBLAS_STATUS_NOT_INITIALIZED;
    handle->stream = stream;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetWorkspace(cublasHandle_t handle, void *workspace, size_t n_bytes)
{
    if (!handle)
        return CUBLAS_STATUS_NOT_INITIALIZED;
    if ((uintptr_t)workspace % 256)
        return CUBLAS_STATUS_INVALID_VALUE;
    if (n_bytes)
        emulation_check_device(workspace, n_bytes, "workspace of cuBLAS");
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetVersion(cublasHandle_t handle, int *version)
{
    if (!handle)
        return CUBLAS_STATUS_NOT_INITIALIZED;
    *version = 130000;
    return CUBLAS_STATUS_SUCCESS;
}

const char *cublasGetStatusName(cublasStatus_t status)
{
    switch (status) {
    case CUBLAS_STATUS_SUCCESS:
        return "CUBLAS_STATUS_SUCCESS";
    case CUBLAS_STATUS_NOT_INITIALIZED:
        return "CUBLAS_STATUS_NOT_INITIALIZED";
    case CUBLAS_STATUS_ALLOC_FAILED:
        return "CUBLAS_STATUS_ALLOC_FAILED";
    case CUBLAS_STATUS_INVALID_VALUE:
        return "CUBLAS_STATUS_INVALID_VALUE";
    case CUBLAS_STATUS_EXECUTION_FAILED:
        return "CUBLAS_STATUS_EXECUTION_FAILED";
    case CUBLAS_STATUS_NOT_SUPPORTED:
        return "CUBLAS_STATUS_NOT_SUPPORTED";
    }
    return "unknown";
}

/* What cuBLAS takes with sums in f32: inputs of 16 bits with outputs of their type or f32, or all f32. */
static bool is_supported(cudaDataType a_type, cudaDataType b_type, cudaDataType c_type, cublasComputeType_t compute)
{
    return compute == CUBLAS_COMPUTE_32F && a_type == b_type && (c_type == a_type || c_type == CUDA_R_32F);
}

cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t handle, cublasOperation_t transa, cublasOperation_t transb,
                                          int m, int n, int k, const void *alpha, const void *a, cudaDataType a_type,
                                          int lda, long long int stride_a, const void *b, cudaDataType b_type, int ldb,
                                          long long int stride_b, const void *beta, void *c, cudaDataType c_type,
                                          int ldc, long long int stride_c, int n_batch, cublasComputeType_t compute,
                                          cublasGemmAlgo_t algorithm)
{
    const int a_rows = transa == CUBLAS_OP_T ? k : m, b_rows = transb == CUBLAS_OP_T ? n : k;
    (void)algorithm;
    if (!handle)
        return CUBLAS_STATUS_NOT_INITIALIZED;
    if (m < 0 || n < 0 || k < 0 || n_batch < 0 || lda < std::max(a_rows, 1) || ldb < std::max(b_rows, 1) ||
        ldc < std::max(m, 1))
        return CUBLAS_STATUS_INVALID_VALUE;
    if (!is_supported(a_type, b_type, c_type, compute))
        return CUBLAS_STATUS_NOT_SUPPORTED;
    if (emulation_begin_work(handle->stream))
        return CUBLAS_STATUS_EXECUTION_FAILED;
    if (!m || !n)
        return CUBLAS_STATUS_SUCCESS;
    const float by = *static_cast<const float *>(alpha), kept = *static_cast<const float *>(beta);
    const auto multiply_all = [=] {
        for (int i = 0; i < n_batch; i++) {
            const auto at = [i](const void *base, long long int stride, cudaDataType type) {
                return (void *)((uintptr_t)base + (uintptr_t)(stride * i) * number_bytes(type));
            };
            const struct matrix in_a = {at(a, stride_a, a_type), a_type, a_rows, transa == CUBLAS_OP_T ? m : k, lda};
            const struct matrix in_b = {at(b, stride_b, b_type), b_type, b_rows, transb == CUBLAS_OP_T ? k : n, ldb};
            const struct matrix out = {at(c, stride_c, c_type), c_type, m, n, ldc};
            multiply(transa, transb, m, n, k, by, &in_a, &in_b, kept, &out);
        }
    };
    if (emulation_is_recording(handle->stream))
        emulation_record(handle->stream, multiply_all);
    else
        multiply_all();
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t transa, cublasOperation_t transb, int m, int n,
                            int k, const void *alpha, const void *a, cudaDataType a_type, int lda, const void *b,
                            cudaDataType b_type, int ldb, const void *beta, void *c, cudaDataType c_type, int ldc,
                            cublasComputeType_t compute, cublasGemmAlgo_t algorithm)
{
    return cublasGemmStridedBatchedEx(handle, transa, transb, m, n, k, alpha, a, a_type, lda, 0, b, b_type, ldb, 0,
                                      beta, c, c_type, ldc, 0, 1, compute, algorithm);
}
