/* cpu_avx2.c - the 8-wide table. Compiled with the flags of AVX2; reached only when kernels_get() has avx2. */
#define VECTOR_WIDTH 8
#include "gpu-worker/backend/cpu/vector_cpu.h"

CPU_TABLE(cpu_avx2_kernels, "avx2");
