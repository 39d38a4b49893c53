/* codec_rot_avx512.c - scores of the rotated codecs, 16 keys at a time. Compiled with AVX-512's flags; reached through its table. */
#define VECTOR_WIDTH 16
#include "gpu-worker/keys/vector_rot.h"

VECTOR_ROT(codec_rot_avx512);
