/* test_blas_load.c - the loader of cuBLAS: a library that is not what it says is refused in one sentence. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "gpu-worker/backend/cuda/cuda_blas_load.h"

static void a_library_without_the_functions(void **state)
{
    (void)state;
    struct cuda_blas_functions functions = {.gemm = NULL};
    char error[128] = "";
    assert_false(cuda_blas_load(&functions, error, sizeof error));
    assert_string_equal(error, "libcublas has no cublasDestroy_v2");
    assert_null(functions.create); /* untouched */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_library_without_the_functions),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
