/* halves_pair.c - see halves_pair.h. Compiled with the flags of AVX2. */
#define VECTOR_WIDTH 16
#include "gpu-worker/keys/vector_pair.h"
#include "tests/unit/keys/halves_pair.h"

VECTOR_PAIR(halves_pair);
