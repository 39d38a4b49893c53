/* codec_rot_avx2.c - scores of the rotated codecs, 8 keys at a time. Compiled with the flags of AVX2; reached through its table. */
#define VECTOR_WIDTH 8
#include "gpu-worker/keys/vector_rot.h"

VECTOR_ROT(codec_rot_avx2);
