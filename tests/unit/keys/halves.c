/* halves.c - the 16-wide scores on AVX2 registers; see fixture.h. Compiled with the flags of AVX2. */
#define VECTOR_WIDTH 16
#include "gpu-worker/keys/vector_rot.h"
#include "tests/unit/keys/fixture.h"

VECTOR_ROT(halves_rot);
