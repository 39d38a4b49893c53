/* test_blas.c - an independent witness of the reference back end: its matrix products against OpenBLAS. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <cblas.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "gpu-worker/backend/backend.h"

static float *random_floats(size_t n, uint32_t seed)
{
    float *values = malloc(n * sizeof(*values));
    for (size_t i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        values[i] = (float)(seed >> 8) / (float)(1 << 24) - 0.5f;
    }
    return values;
}

static void check(struct backend *backend, uint32_t n_rows, uint32_t n_columns, uint32_t n_tokens)
{
    float *w = random_floats((size_t)n_rows * n_columns, 1), *x = random_floats((size_t)n_tokens * n_columns, 2);
    float *y = calloc((size_t)n_tokens * n_rows, sizeof(*y)), *expected = calloc((size_t)n_tokens * n_rows, sizeof(*y));
    struct tensor tensor = {.name = "w",
                            .type = TENSOR_F32,
                            .n_rows = n_rows,
                            .n_columns = n_columns,
                            .data = w,
                            .n_bytes = (size_t)n_rows * n_columns * sizeof(*w)};
    struct weight *weight;
    assert_int_equal(backend_reference.weight_new(backend, &tensor, &weight), 0);
    const struct weight *const weights[] = {weight};
    backend_reference.matmul(backend, weights, 1, x, n_tokens, (float *const[]){y});
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)n_tokens, (int)n_rows, (int)n_columns, 1, x,
                (int)n_columns, w, (int)n_columns, 0, expected, (int)n_rows);
    for (size_t i = 0; i < (size_t)n_tokens * n_rows; i++)
        assert_true(fabsf(y[i] - expected[i]) <= 1e-6f * sqrtf((float)n_columns));
    backend_reference.weight_free(backend, weight);
    free(w);
    free(x);
    free(y);
    free(expected);
}

static void the_reference_multiplies_as_blas_does(void **state)
{
    (void)state;
    static const uint32_t sizes[] = {1, 2, 7, 33, 64, 130};
    enum { N = sizeof(sizes) / sizeof(sizes[0]) };
    struct backend *backend;
    char error[128];
    struct backend_options options = {.isa = KERNELS_ISA_PLAIN};
    assert_int_equal(openblas_get_parallel(), 0); /* one pool of threads: ours */
    assert_int_equal(backend_reference.open(&options, &backend, error, sizeof(error)), 0);
    for (uint32_t i = 0; i < N; i++)
        for (uint32_t k = 0; k < N; k++)
            for (uint32_t t = 0; t < N; t++)
                check(backend, sizes[i], sizes[k], sizes[t]);
    backend_reference.close(backend);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(the_reference_multiplies_as_blas_does)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
