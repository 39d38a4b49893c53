/* halves.c - see halves.h. Compiled with the flags of AVX2. */
#define VECTOR_WIDTH 16
#include "tests/backend/halves.h"

#include "gpu-worker/backend/cpu/vector_cpu.h"

CPU_TABLE(halves_kernels, "halves");
