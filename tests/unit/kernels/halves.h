/* halves.h - what the tests of kernels/ share: the 16-wide table on AVX2 registers, and every table to test. */
#pragma once

#include "kernels/kernels.h"

extern const struct kernels halves_table; /* isa AVX512, name "halves"; needs AVX2 */

/* exp by width 16 on AVX2 registers: 16 numbers. */
void halves_exp(const float *x, float *y);

/* Tables this machine can run, the plain one first; ends with NULL. */
const struct kernels *const *halves_tables(void);
