/* passes_avx512.c - passes.h on AVX-512; compiled with its flags, reached only where the CPU has it. */
#define VECTOR_WIDTH 16
#include "kernels/vector.h"

#include "gpu-worker/policy/passes_loops.h"

PASSES_TABLE(passes_avx512);
