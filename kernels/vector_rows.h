/* vector_rows.h - conversions of f16 and the sums of a block, for any vector width. */
#pragma once

#include <string.h>

#include "kernels/kernels.h"
#include "kernels/vector.h"

static void f16_encode(const float *from, size_t n, uint16_t *to)
{
    size_t i = 0;
    for (; i + VECTOR_WIDTH <= n; i += VECTOR_WIDTH)
        vf_encode(to + i, vf_load(from + i));
    if (i < n) {
        float in[VECTOR_WIDTH] = {0};
        uint16_t out[VECTOR_WIDTH];
        memcpy(in, from + i, (n - i) * sizeof *in);
        vf_encode(out, vf_load(in));
        memcpy(to + i, out, (n - i) * sizeof *out);
    }
}

static void f16_decode(const uint16_t *from, size_t n, float *to)
{
    size_t i = 0;
    for (; i + VECTOR_WIDTH <= n; i += VECTOR_WIDTH)
        vf_store(to + i, vf_decode(from + i));
    if (i < n) {
        uint16_t in[VECTOR_WIDTH] = {0};
        float out[VECTOR_WIDTH];
        memcpy(in, from + i, (n - i) * sizeof *in);
        vf_store(out, vf_decode(in));
        memcpy(to + i, out, (n - i) * sizeof *out);
    }
}

/* Plain additions in token order: the same bits as the plain table's. */
static void block_sums(const uint16_t *rows, uint32_t n_tokens, uint32_t head_dim, float *sums)
{
    const size_t width = (size_t)2 * head_dim;
    size_t i = 0;
    for (; i + VECTOR_WIDTH <= width; i += VECTOR_WIDTH) {
        vf sum = vf_zero();
        for (uint32_t t = 0; t < n_tokens; t++)
            sum = vf_add(sum, vf_decode(rows + t * width + i));
        vf_store(sums + i, sum);
    }
    if (i < width) {
        vf sum = vf_zero();
        float out[VECTOR_WIDTH];
        for (uint32_t t = 0; t < n_tokens; t++) {
            uint16_t in[VECTOR_WIDTH] = {0};
            memcpy(in, rows + t * width + i, (width - i) * sizeof *in);
            sum = vf_add(sum, vf_decode(in));
        }
        vf_store(out, sum);
        memcpy(sums + i, out, (width - i) * sizeof *out);
    }
}
