/* halves_pair.h - the 16-wide scores of the pair codecs on AVX2 registers: the logic of the AVX-512 table. */
#pragma once

#include "gpu-worker/keys/codec_pair.h"

extern const struct pair_kernels halves_pair; /* needs AVX2 */
