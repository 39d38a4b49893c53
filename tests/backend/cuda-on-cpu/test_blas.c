/* test_blas.c - cuBLAS of the emulated device against plain loops: all transpositions, types, strides and batches. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <cublas_v2.h>

#include "kernels/half.h"
#include "tests/backend/cuda-on-cpu/device.h"
#include "tests/backend/fixture.h"

#define M 7
#define N 5
#define K 33

static const cudaDataType types[] = {CUDA_R_32F, CUDA_R_16F, CUDA_R_16BF};

/* Number i of an array of the type; `set` writes it first. Numbers here have few enough digits for each type. */
static float number(void *numbers, cudaDataType type, size_t i, const float *set)
{
    uint16_t *halves = numbers;
    float *floats = numbers, value;
    uint32_t word;
    if (type == CUDA_R_32F) {
        if (set)
            floats[i] = *set;
        return floats[i];
    }
    if (set) {
        memcpy(&word, set, sizeof word);
        halves[i] = type == CUDA_R_16F ? half_encode(*set) : (uint16_t)(word >> 16);
    }
    word = (uint32_t)halves[i] << 16;
    memcpy(&value, &word, sizeof value);
    return type == CUDA_R_16F ? half_decode(halves[i]) : value;
}

static size_t bytes_of(cudaDataType type, size_t n)
{
    return n * (type == CUDA_R_32F ? 4 : 2);
}

/* Products of small whole numbers are exact in every type and order. */
static void products(void **state)
{
    (void)state;
    enum { STRIDE = 40, SIZE = STRIDE * 36, BATCH = 3 };
    static float a[BATCH * SIZE], b[BATCH * SIZE], c[BATCH * SIZE], got[BATCH * SIZE];
    cublasHandle_t handle;
    assert_int_equal(cublasCreate(&handle), CUBLAS_STATUS_SUCCESS);
    assert_int_equal(cublasSetStream(handle, NULL), CUBLAS_STATUS_SUCCESS);
    for (int which = 0; which < 4 * 2 * 3; which++) {
        const bool ta = which & 1, tb = which & 2, wide = which & 4;
        const cudaDataType type = types[which / 8], out_type = wide ? CUDA_R_32F : type;
        const float alpha = 0.5f, beta = which % 3 ? 2.0f : 0.0f;
        for (size_t i = 0; i < BATCH * SIZE; i++) {
            const float value[3] = {(float)(int)(fixture_random() % 3) - 1, (float)(int)(fixture_random() % 3) - 1,
                                    beta != 0 ? 1.0f : NAN};
            number(a, type, i, &value[0]);
            number(b, type, i, &value[1]);
            number(c, out_type, i, &value[2]);
        }
        void *da = device_new(a, bytes_of(type, BATCH * SIZE)), *db = device_new(b, bytes_of(type, BATCH * SIZE));
        void *dc = device_new(c, bytes_of(out_type, BATCH * SIZE));
        assert_int_equal(cublasGemmStridedBatchedEx(handle, ta ? CUBLAS_OP_T : CUBLAS_OP_N,
                                                    tb ? CUBLAS_OP_T : CUBLAS_OP_N, M, N, K, &alpha, da, type, STRIDE,
                                                    SIZE, db, type, STRIDE - 1, SIZE, &beta, dc, out_type, STRIDE - 2,
                                                    SIZE, BATCH, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
                         CUBLAS_STATUS_SUCCESS);
        device_read(got, dc, bytes_of(out_type, BATCH * SIZE));
        for (size_t batch = 0; batch < BATCH; batch++) {
            for (size_t j = 0; j < N; j++) {
                for (size_t i = 0; i < M; i++) {
                    float sum = 0;
                    for (size_t k = 0; k < K; k++)
                        sum += number(a, type, batch * SIZE + (ta ? i * STRIDE + k : k * STRIDE + i), NULL) *
                               number(b, type, batch * SIZE + (tb ? k * (STRIDE - 1) + j : j * (STRIDE - 1) + k), NULL);
                    const float expected = alpha * sum + (beta != 0 ? beta : 0.0f);
                    assert_true(number(got, out_type, batch * SIZE + j * (STRIDE - 2) + i, NULL) == expected);
                }
                /* what lies between the columns stays */
                const size_t between = batch * SIZE + j * (STRIDE - 2) + M;
                const float kept = number(got, out_type, between, NULL);
                assert_true(beta != 0 ? kept == 1.0f : isnan(kept));
            }
        }
        device_free(da);
        device_free(db);
        device_free(dc);
    }
    assert_int_equal(cublasDestroy(handle), CUBLAS_STATUS_SUCCESS);
}

static void what_cublas_refuses(void **state)
{
    (void)state;
    cublasHandle_t handle;
    const float one = 1, zero = 0;
    float *memory = device_new(NULL, 4096);
    assert_int_equal(cublasCreate(&handle), CUBLAS_STATUS_SUCCESS);
    const struct {
        int m, lda;
        cudaDataType a_type, c_type;
        cublasStatus_t status;
    } cases[] = {
        {4, 3, CUDA_R_16F, CUDA_R_32F, CUBLAS_STATUS_INVALID_VALUE},
        {-1, 4, CUDA_R_16F, CUDA_R_32F, CUBLAS_STATUS_INVALID_VALUE},
        {4, 4, CUDA_R_32F, CUDA_R_16F, CUBLAS_STATUS_NOT_SUPPORTED},
        {4, 4, CUDA_R_16F, CUDA_R_16BF, CUBLAS_STATUS_NOT_SUPPORTED},
        {0, 4, CUDA_R_16F, CUDA_R_16F, CUBLAS_STATUS_SUCCESS},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        assert_int_equal(cublasGemmEx(handle, CUBLAS_OP_N, CUBLAS_OP_N, cases[i].m, 4, 4, &one, memory, cases[i].a_type,
                                      cases[i].lda, memory, cases[i].a_type, 4, &zero, memory, cases[i].c_type, 4,
                                      CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
                         cases[i].status);
    assert_string_equal(cublasGetStatusName(CUBLAS_STATUS_NOT_SUPPORTED), "CUBLAS_STATUS_NOT_SUPPORTED");
    assert_int_equal(cublasDestroy(handle), CUBLAS_STATUS_SUCCESS);
    device_free(memory);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(products),
        cmocka_unit_test(what_cublas_refuses),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
