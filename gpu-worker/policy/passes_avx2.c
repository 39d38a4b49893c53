/* passes_avx2.c - passes.h on AVX2: 16 lanes as two registers, so that the bits are those of AVX-512. */
#define VECTOR_WIDTH 16
#include "kernels/vector.h"

#include "gpu-worker/policy/passes_loops.h"

PASSES_TABLE(passes_avx2);
