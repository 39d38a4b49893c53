/* cublas_of_one.c - a library that is called as cuBLAS is, and has one of its functions. */

int cublasCreate_v2(void **ret_handle);

int cublasCreate_v2(void **ret_handle)
{
    *ret_handle = 0;
    return 0;
}
