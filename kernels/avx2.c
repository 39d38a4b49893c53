/* avx2.c - the 8-wide table. Compiled with -mavx2 -mfma -mf16c -mbmi2; reached only through kernels_get(). */
#define VECTOR_WIDTH 8
#include "kernels/tables.h"
#include "kernels/vector_table.h"

VECTOR_TABLE(avx2_table, KERNELS_ISA_AVX2, "avx2");
