/*
 * methods_formats.c - formats that keep keys and values of old tokens in fewer bits and use them directly, all of them, at every
 * position. All is on the device; nothing is read from stores.
 *
 *     q8_0, q4_0       llama.cpp's: groups of 32 along head_dim (the last may be shorter) with an f16 scale
 *     kivi4, kivi2     KIVI (2402.02750, section 3): keys by channel over groups of tokens, values by token, asymmetric, with an
 *                      f16 zero and scale. Groups are our blocks (the paper's: 32 to 128 tokens), sinks not among them, and 64
 *                      numbers of a value; the exact window stands for the paper's residual tokens.
 *
 * Owner      methods_private.h. Threads: any.
 */
#include <math.h>

#include "gpu-worker/eval/methods_private.h"

#define BLOCK LAYOUT_BLOCK_TOKENS
enum { GROUP = LAYOUT_Q8_GROUP, KIVI_GROUP = 64 };

static uint32_t n_groups(uint32_t n, uint32_t group)
{
    return (n + group - 1) / group;
}

/* As an f16 keeps it. */
static float as_half(const struct kernels *kernels, float x)
{
    uint16_t half;
    kernels->f16_encode(&x, 1, &half);
    kernels->f16_decode(&half, 1, &x);
    return x;
}

static void choose_all(const struct methods_baseline *baseline, const struct methods_choice *choice)
{
    (void)baseline;
    for (uint32_t block = 0; block < choice->n_blocks; block++)
        choice->masks[block] = exact_set_old_mask(block);
}

/* ---- llama.cpp ---- */

/* scale = largest magnitude / 127; number = round(x / scale). */
static void round_q8_0(const struct kernels *kernels, float *x, uint32_t n)
{
    float largest = 0;
    for (uint32_t i = 0; i < n; i++)
        largest = fmaxf(largest, fabsf(x[i]));
    const float scale = largest / 127, inverse = scale > 0 ? 1 / scale : 0, kept = as_half(kernels, scale);
    for (uint32_t i = 0; i < n; i++)
        x[i] = roundf(x[i] * inverse) * kept;
}

/* scale = the number of the largest magnitude / -8, with its sign: that number is -8 exactly, and 8 does not exist. */
static void round_q4_0(const struct kernels *kernels, float *x, uint32_t n)
{
    float largest = 0;
    for (uint32_t i = 0; i < n; i++)
        largest = fabsf(x[i]) > fabsf(largest) ? x[i] : largest;
    const float scale = largest / -8, inverse = scale < 0 || scale > 0 ? 1 / scale : 0, kept = as_half(kernels, scale);
    for (uint32_t i = 0; i < n; i++)
        x[i] = (fminf(floorf(x[i] * inverse + 8.5f), 15) - 8) * kept;
}

static void round_rows(const struct methods_baseline *baseline, uint32_t first, float *keys, float *values,
                       void (*round_group)(const struct kernels *kernels, float *x, uint32_t n))
{
    const uint32_t d = baseline->shape.head_dim;
    for (uint32_t j = first; j < BLOCK; j++)
        for (uint32_t i = 0; i < d; i += GROUP) {
            const uint32_t n = d - i < GROUP ? d - i : GROUP;
            round_group(baseline->tools.kernels, keys + (size_t)j * d + i, n);
            round_group(baseline->tools.kernels, values + (size_t)j * d + i, n);
        }
}

static void round_rows_q8_0(const struct methods_baseline *baseline, uint32_t first, float *keys, float *values)
{
    round_rows(baseline, first, keys, values, round_q8_0);
}

static void round_rows_q4_0(const struct methods_baseline *baseline, uint32_t first, float *keys, float *values)
{
    round_rows(baseline, first, keys, values, round_q4_0);
}

static double llama_bytes(const struct methods_baseline *baseline, const struct method *method)
{
    (void)method;
    const uint32_t d = baseline->shape.head_dim;
    return 2.0 * baseline->shape.n_layers * baseline->shape.n_kv_heads *
           (d * baseline->kind->bits / 8.0 + 2.0 * n_groups(d, GROUP));
}

/* ---- KIVI ---- */

/* n numbers, `stride` apart: zero = smallest, scale = range / (2^bits - 1), number = round((x - zero) / scale). */
static void round_kivi(const struct methods_baseline *baseline, float *x, uint32_t n, uint32_t stride)
{
    float smallest = x[0], largest = x[0];
    for (uint32_t i = 1; i < n; i++) {
        smallest = fminf(smallest, x[(size_t)i * stride]);
        largest = fmaxf(largest, x[(size_t)i * stride]);
    }
    const float steps = (float)((1u << baseline->kind->bits) - 1), zero = as_half(baseline->tools.kernels, smallest);
    const float scale = as_half(baseline->tools.kernels, (largest - smallest) / steps);
    for (uint32_t i = 0; i < n; i++) {
        float *to = &x[(size_t)i * stride];
        const float number = scale > 0 ? rintf((*to - zero) / scale) : 0;
        *to = fminf(fmaxf(number, 0), steps) * scale + zero;
    }
}

static void round_block_kivi(const struct methods_baseline *baseline, uint32_t first, float *keys, float *values)
{
    const uint32_t d = baseline->shape.head_dim;
    for (uint32_t i = 0; i < d; i++)
        round_kivi(baseline, keys + (size_t)first * d + i, BLOCK - first, d);
    for (uint32_t j = first; j < BLOCK; j++)
        for (uint32_t i = 0; i < d; i += KIVI_GROUP)
            round_kivi(baseline, values + (size_t)j * d + i, d - i < KIVI_GROUP ? d - i : KIVI_GROUP, 1);
}

static double kivi_bytes(const struct methods_baseline *baseline, const struct method *method)
{
    (void)method;
    const uint32_t d = baseline->shape.head_dim;
    return baseline->shape.n_layers * baseline->shape.n_kv_heads *
           (2 * d * baseline->kind->bits / 8.0 + 4.0 * d / BLOCK + 4.0 * n_groups(d, KIVI_GROUP));
}

const struct methods_kind methods_formats_q8_0 = {
    .name = "q8_0",
    .example = "q8_0",
    .meaning = {"llama.cpp's 8-bit format for K and V"},
    .bits = 8,
    .round = round_rows_q8_0,
    .choose = choose_all,
    .device_bytes = llama_bytes,
};
const struct methods_kind methods_formats_q4_0 = {
    .name = "q4_0",
    .example = "q4_0",
    .meaning = {"llama.cpp's 4-bit format for K and V"},
    .bits = 4,
    .round = round_rows_q4_0,
    .choose = choose_all,
    .device_bytes = llama_bytes,
};
const struct methods_kind methods_formats_kivi4 = {
    .name = "kivi4",
    .example = "kivi4",
    .meaning = {"KIVI: keys by channel and values by token in 4 bits"},
    .bits = 4,
    .round = round_block_kivi,
    .choose = choose_all,
    .device_bytes = kivi_bytes,
};
const struct methods_kind methods_formats_kivi2 = {
    .name = "kivi2",
    .example = "kivi2",
    .meaning = {"KIVI: keys by channel and values by token in 2 bits"},
    .bits = 2,
    .round = round_block_kivi,
    .choose = choose_all,
    .device_bytes = kivi_bytes,
};
