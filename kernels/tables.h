/* tables.h - the tables behind kernels_get(), one source file each. Private to kernels/. */
#pragma once

#include "kernels/kernels.h"

extern const struct kernels plain_table;
extern const struct kernels avx2_table;   /* needs AVX2, FMA, F16C, BMI2 */
extern const struct kernels avx512_table; /* needs AVX-512 F, BW, VL, DQ, VNNI and all of the above */
