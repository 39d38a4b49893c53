/* blas_load.h - cuBLAS as programs on the emulated device find it: the emulation's, or none. */
#pragma once

#include <stdbool.h>

/* Whether back ends that are opened from now on find one; they do at start, unless the variable
 * HCATTN_TEST_CUDA_NO_BLAS is set. */
void blas_load_set_there(bool is_there);

/* The n-th product from now on (0: the next) is refused with CUBLAS_STATUS_NOT_SUPPORTED; -1: none. */
void blas_load_refuse(int n);
