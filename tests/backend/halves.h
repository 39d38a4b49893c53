/* halves.h - the 16-wide table of the cpu back end on AVX2 registers; needs AVX2. */
#pragma once

#include "gpu-worker/backend/cpu/cpu_kernels.h"

extern const struct cpu_kernels halves_kernels;
