/* halves_pq.h - a 16-wide table of product-quantized keys that AVX2 can run. */
#pragma once

#include "gpu-worker/keys/codec_pq.h"

extern const struct pq_kernels halves_pq; /* needs AVX2 */
