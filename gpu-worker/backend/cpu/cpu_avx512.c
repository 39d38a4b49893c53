/* cpu_avx512.c - the 16-wide table. Compiled with the AVX-512 flags; reached only when kernels_get() has avx512. */
#define VECTOR_WIDTH 16
#include "gpu-worker/backend/cpu/vector_cpu.h"

CPU_TABLE(cpu_avx512_kernels, "avx512");
