/* codec_pair_avx512.c - scores of the pair codecs, 64 keys at a time. Compiled with AVX-512's flags; reached through its table. */
#define VECTOR_WIDTH 16
#include "gpu-worker/keys/vector_pair.h"

VECTOR_PAIR(codec_pair_avx512);
