/* check_openblas.c - exit status 0: the OpenBLAS that is linked is the serial one. */
int openblas_get_parallel(void);

int main(void)
{
    return openblas_get_parallel();
}
