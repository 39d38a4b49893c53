/* vector_partial.h - merging and finishing partials; element by element, so any width gives the same bits. */
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "kernels/vector.h"
#include "kernels/vector_exp.h"

/* exp of one number, by the arithmetic of vf_exp (scalar moves in and out of a vector). */
VECTOR_INLINE float vector_exp1(float x)
{
    float lanes[VECTOR_WIDTH];
    vf_store(lanes, vf_exp(vf_set(x)));
    return lanes[0];
}

/* into <- merge(into, [max, sum, out]); the exponential of the larger maximum is exactly 1, no fused operations:
 * the merge is commutative. */
VECTOR_INLINE void partial_merge_parts(float *into, float max, float sum, const float *out, uint32_t head_dim)
{
    if (max == -INFINITY)
        return;
    if (into[0] == -INFINITY) {
        into[0] = max;
        into[1] = sum;
        memcpy(into + 2, out, head_dim * sizeof *out);
        return;
    }
    float ours = 1.0f, theirs = 1.0f;
    if (into[0] >= max)
        theirs = vector_exp1(max - into[0]);
    else
        ours = vector_exp1(into[0] - max); /* also where either is NaN, which then shows */
    into[0] = into[0] >= max ? into[0] : max;
    into[1] = into[1] * ours + sum * theirs;
    float *to = into + 2;
    uint32_t i = 0;
    for (; i + VECTOR_WIDTH <= head_dim; i += VECTOR_WIDTH)
        vf_store(to + i, vf_add(vf_mul(vf_load(to + i), vf_set(ours)), vf_mul(vf_load(out + i), vf_set(theirs))));
    for (; i < head_dim; i++)
        to[i] = to[i] * ours + out[i] * theirs;
}

static void partial_merge(float *into, const float *from, uint32_t head_dim)
{
    partial_merge_parts(into, from[0], from[1], from + 2, head_dim);
}

static void partial_finish(const float *partial, uint32_t head_dim, float *out)
{
    const float *from = partial + 2;
    uint32_t i = 0;
    for (; i + VECTOR_WIDTH <= head_dim; i += VECTOR_WIDTH)
        vf_store(out + i, vf_div(vf_load(from + i), vf_set(partial[1])));
    for (; i < head_dim; i++)
        out[i] = from[i] / partial[1];
}
