/* codec_pair_avx2.c - scores of the pair codecs, 32 keys at a time. Compiled with the flags of AVX2; reached through its table. */
#define VECTOR_WIDTH 8
#include "gpu-worker/keys/vector_pair.h"

VECTOR_PAIR(codec_pair_avx2);
