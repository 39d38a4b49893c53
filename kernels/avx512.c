/* avx512.c - the 16-wide table. Compiled with the AVX-512 flags; reached only through kernels_get(). */
#define VECTOR_WIDTH 16
#include "kernels/tables.h"
#include "kernels/vector_table.h"

VECTOR_TABLE(avx512_table, KERNELS_ISA_AVX512, "avx512");
