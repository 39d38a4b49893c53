/* vector_partial.h - merging and finishing partials; element by element, so any width gives the same bits. */
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "kernels/vector.h"
#include "kernels/vector_exp.h"

/*
 * Merging [max, sum, out] into a partial takes the exponential of one distance, in two steps so that a tile of
 * queries shares the vector of exponentials. The larger maximum's factor is exactly 1 and nothing is fused:
 * the merge is commutative.
 */
VECTOR_INLINE float partial_distance(const float *into, float max)
{
    if (into[0] == -INFINITY || max == -INFINITY)
        return 0.0f;
    return into[0] >= max ? max - into[0] : into[0] - max; /* the latter where either is NaN, which then shows */
}

VECTOR_INLINE void partial_merge_parts(float *into, float max, float sum, const float *out, float factor,
                                       uint32_t head_dim)
{
    if (max == -INFINITY)
        return;
    if (into[0] == -INFINITY) {
        into[0] = max;
        into[1] = sum;
        memcpy(into + 2, out, head_dim * sizeof *out);
        return;
    }
    const int keep = into[0] >= max;
    const float ours = keep ? 1.0f : factor, theirs = keep ? factor : 1.0f;
    into[0] = keep ? into[0] : max;
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
    float factors[VECTOR_WIDTH];
    vf_store(factors, vf_exp(vf_set(partial_distance(into, from[0]))));
    partial_merge_parts(into, from[0], from[1], from + 2, factors[0], head_dim);
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
