/*
 * vector_exp.h - exp(x) of a vector, full range, error below 2 units in the last place.
 *
 * exp(x) = 2^n e^r with n = round(x / ln 2) and |r| <= ln(2) / 2 (Cody and Waite's reduction; ln 2 in two parts);
 * e^r = 1 + r + r^2 p(r), p interpolated at Chebyshev nodes (relative error 1.1e-8).
 * Results that would be subnormal are 0, whatever the floating-point mode; -infinity gives 0; NaN stays NaN.
 */
#pragma once

#include <math.h>

#include "kernels/vector.h"

VECTOR_INLINE vf vf_exp(vf x)
{
    vi n = vf_to_int(vf_mul(x, vf_set(1.44269504f)));
    vf whole = vi_to_float(n);
    vf r = vf_fma(whole, vf_set(-0.693147182f), x);
    r = vf_fma(whole, vf_set(1.90465429e-9f), r);
    vf p = vf_fma(vf_set(0.0013926184f), r, vf_set(0.00836317893f));
    p = vf_fma(p, r, vf_set(0.0416665561f));
    p = vf_fma(p, r, vf_set(0.166665763f));
    p = vf_fma(p, r, vf_set(0.5f));
    vf y = vf_add(vf_fma(p, vf_mul(r, r), r), vf_set(1.0f));
    /* y lies in [0.70, 1.42] and 2^-126 <= y 2^n < 2^128 between the limits below, so adding n to the exponent is exact.
     * A NaN has n = INT32_MIN, whose low bits are 0: it stays as it is. */
    y = vf_exponent_add(y, n);
    y = vf_less(x, vf_set(-87.3365402f), vf_zero(), y);
    return vf_less(vf_set(88.7228317f), x, vf_set(INFINITY), y);
}
