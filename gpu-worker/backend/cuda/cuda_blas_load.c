/* cuda_blas_load.c - see cuda_blas_load.h. */
#include "gpu-worker/backend/cuda/cuda_blas_load.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

static void *open_library(char *error, size_t error_size)
{
    static const char *const names[] = {"libcublas.so.13", "libcublas.so"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        void *library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
        if (library != NULL)
            return library;
        const char *why = dlerror();
        if (i == 0) /* of the version that is meant */
            snprintf(error, error_size, "%s", why != NULL ? why : "libcublas.so.13 cannot be loaded");
    }
    return NULL;
}

bool cuda_blas_load(struct cuda_blas_functions *ret_functions, char *error, size_t error_size)
{
    struct cuda_blas_functions functions;
    const struct {
        const char *name;
        void *to;
    } symbols[] = {
        {"cublasCreate_v2", &functions.create},
        {"cublasDestroy_v2", &functions.destroy},
        {"cublasSetStream_v2", &functions.set_stream},
        {"cublasSetWorkspace_v2", &functions.set_workspace},
        {"cublasGetVersion_v2", &functions.get_version},
        {"cublasGetStatusName", &functions.status_name},
        {"cublasGemmEx", &functions.gemm},
        {"cublasGemmStridedBatchedEx", &functions.gemm_batched},
    };
    void *library = open_library(error, error_size);
    if (library == NULL)
        return false;
    for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++) {
        void *symbol = dlsym(library, symbols[i].name);
        if (symbol == NULL) {
            snprintf(error, error_size, "libcublas has no %s", symbols[i].name);
            dlclose(library);
            return false;
        }
        memcpy(symbols[i].to, &symbol, sizeof symbol); /* an object pointer is no function pointer to C */
    }
    *ret_functions = functions;
    return true;
}
