/* blas_load.c - ../cuda-on-cpu/blas_load.h on a real device: its own cuBLAS, or none. Linked with --wrap=cuda_blas_load. */
#include "tests/backend/cuda-on-cpu/blas_load.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <cmocka.h>

#include "gpu-worker/backend/cuda/cuda_blas_load.h"

static bool there = true;

bool __real_cuda_blas_load(struct cuda_blas_functions *ret_functions, char *error, size_t error_size);
bool __wrap_cuda_blas_load(struct cuda_blas_functions *ret_functions, char *error, size_t error_size);

void blas_load_set_there(bool is_there)
{
    there = is_there;
}

/* It does as it is asked: a test of refusals is skipped. */
void blas_load_refuse(int n)
{
    if (n >= 0)
        skip();
}

bool __wrap_cuda_blas_load(struct cuda_blas_functions *ret_functions, char *error, size_t error_size)
{
    if (there)
        return __real_cuda_blas_load(ret_functions, error, error_size);
    snprintf(error, error_size, "libcublas.so.13: cannot open shared object file: No such file or directory");
    return false;
}
