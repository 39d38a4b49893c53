/*
 * codec_rot_quantize.c - keys of a block -> a tile of rot4, rot3 or rot2, and the rotation, which queries share.
 *
 * Invariant  plain C in one fixed order without contraction or approximate operations: the same bytes on every instruction
 *            set, whether denormal numbers are flushed or not (none arises). Loops run over the 64 keys side by side, so
 *            that a compiler can use whatever vectors the build allows without changing a sum.
 *
 * Random signs, then Hadamard over blocks of the largest power of two that divides head_dim, make the components of a key's
 * distance to its block's mean nearly normal, whatever the model does (TurboQuant, 2504.19874); Lloyd-Max levels are then the
 * best scalar quantizer. The scale is chosen so that <k, k^> = |k|^2.
 */
#include "gpu-worker/keys/codec_rot.h"

#include <math.h>
#include <string.h>

#define KEY_LARGEST   65504.0f /* of f16, the largest that a row holds */
#define QUERY_LARGEST 0x1p40f
#define SMALLEST      0x1p-40f /* anything smaller is 0: no row has it */

/* Rounds to the nearest integer, ties to even, for |x| < 2^22. */
#define ROUND_MAGIC 12582912.0f

const struct rot_format codec_rot_formats[5] = {
    [2] = {.bits = 2, .top = ROT2_TOP, .unit = ROT2_UNIT, .levels = ROT_TABLE(ROT2_LEVEL, ROT_SELF)},
    [3] = {.bits = 3, .top = ROT3_TOP, .unit = ROT3_UNIT, .levels = ROT_TABLE(ROT3_LEVEL, ROT_SELF)},
    [4] = {.bits = 4, .top = ROT4_TOP, .unit = ROT4_UNIT, .levels = ROT_TABLE(ROT4_LEVEL, ROT_SELF)},
};

/* A broken model's numbers: NaN counts as 0, what is beyond `largest` as `largest`. In integers, as these vectorise. */
static inline float cleaned(float x, float largest)
{
    const float smallest = SMALLEST;
    uint32_t bits, largest_bits, smallest_bits;
    memcpy(&bits, &x, sizeof bits);
    memcpy(&largest_bits, &largest, sizeof bits);
    memcpy(&smallest_bits, &smallest, sizeof bits);
    uint32_t magnitude = bits & 0x7fffffffu;
    magnitude = magnitude < smallest_bits || magnitude > 0x7f800000u ? 0 : magnitude;
    magnitude = magnitude > largest_bits ? largest_bits : magnitude;
    bits = magnitude | (bits & 0x80000000u);
    memcpy(&x, &bits, sizeof bits);
    return x;
}

/* The sign of dimension i: bit 31 of a hash. */
static inline float sign_of(uint32_t i)
{
    uint32_t h = (i + 1) * 0x9e3779b9u;
    h = (h ^ h >> 16) * 0x85ebca6bu;
    h = (h ^ h >> 13) * 0xc2b2ae35u;
    return (h ^ h >> 16) & 0x80000000u ? -1.0f : 1.0f;
}

static uint32_t hadamard_size(uint32_t head_dim)
{
    return head_dim & (0u - head_dim);
}

/* Hadamard, not normalised, over blocks of `size` of x [n][width]: `width` vectors side by side. */
static inline __attribute__((always_inline)) void hadamard(float *x, uint32_t n, uint32_t size, const uint32_t width)
{
    for (uint32_t half = 1; half < size; half *= 2)
        for (uint32_t first = 0; first < n; first += 2 * half)
            for (uint32_t i = first; i < first + half; i++) {
                float *restrict low = x + (size_t)i * width, *restrict high = x + (size_t)(i + half) * width;
                for (uint32_t j = 0; j < width; j++) {
                    const float a = low[j], b = high[j];
                    low[j] = a + b;
                    high[j] = a - b;
                }
            }
}

void codec_rot_rotate(const float *q, uint32_t head_dim, float *given, float *rotated)
{
    const uint32_t size = hadamard_size(head_dim);
    for (uint32_t i = 0; i < head_dim; i++) {
        given[i] = cleaned(q[i], QUERY_LARGEST);
        rotated[i] = given[i] * sign_of(i);
    }
    hadamard(rotated, head_dim, size, 1);
    const float normal = 1.0f / sqrtf((float)size);
    for (uint32_t i = 0; i < head_dim; i++)
        rotated[i] *= normal;
}

/* The mean key in 8 bits; returns its scale. decoded [head_dim] out. */
static float quantize_mean(const float *keys, uint32_t head_dim, int8_t *mean, float *decoded)
{
    float sums[KERNELS_MAX_HEAD_DIM] = {0}, largest = 0;
    for (uint32_t j = 0; j < ROT_KEYS; j++)
        for (uint32_t i = 0; i < head_dim; i++)
            sums[i] += cleaned(keys[(size_t)j * head_dim + i], KEY_LARGEST);
    for (uint32_t i = 0; i < head_dim; i++) {
        sums[i] *= 1.0f / ROT_KEYS;
        largest = fabsf(sums[i]) > largest ? fabsf(sums[i]) : largest;
    }
    if (largest < SMALLEST) {
        memset(mean, 0, head_dim);
        memset(decoded, 0, head_dim * sizeof *decoded);
        return 0;
    }
    const float side = largest / 127.0f;
    for (uint32_t i = 0; i < head_dim; i++) {
        const float rounded = (sums[i] / side + ROUND_MAGIC) - ROUND_MAGIC;
        mean[i] = (int8_t)rounded;
        decoded[i] = side * rounded;
    }
    return side;
}

/* Nearest of 2^((code - 128) / 8); below half of the smallest: 0. */
static uint8_t scale_code(float a)
{
    static const float halfway[8] = {1.04427378f, 1.13878863f, 1.24185781f, 1.35425555f,
                                     1.47682615f, 1.61049033f, 1.75625216f, 1.91520656f}; /* 2^((i + 1/2) / 8) */
    if (!(a >= 8.31991373e-06f))                                                          /* 2^(-127/8 - 1) */
        return 0;
    uint32_t bits;
    memcpy(&bits, &a, sizeof bits);
    const int32_t exponent = (int32_t)(bits >> 23) - 127;
    bits = (bits & 0x7fffffu) | 0x3f800000u;
    float mantissa;
    memcpy(&mantissa, &bits, sizeof mantissa);
    int32_t code = exponent * 8 + 128;
    for (int i = 0; i < 8; i++)
        code += mantissa >= halfway[i];
    return (uint8_t)(code < 1 ? 1 : code > 255 ? 255 : code);
}

/* Where the code of dimension i lies: its lower bits (all, but for rot3) and rot3's upper bit. */
static inline uint32_t code_word(const uint32_t bits, uint32_t i, uint32_t *ret_shift)
{
    const uint32_t g = i / 16, s = i / 4 % 4, b = i % 4;
    *ret_shift = 8 * b + (bits == 4 ? 4 * (s % 2) : 2 * s);
    return bits == 4 ? 2 * g + s / 2 : g;
}
static inline uint32_t upper_word(uint32_t n_groups, uint32_t i, uint32_t *ret_shift)
{
    static const uint8_t bit[4] = {2, 0, 3, 1};
    *ret_shift = 8 * (i % 4) + 4 * (i / 16 % 2) + bit[i / 4 % 4];
    return n_groups + i / 32;
}

/* y [head_dim][64] rotated, not normalised; words cleared. Adds to sums[64] the products of |level| * 2 / unit and |y|. */
static inline __attribute__((always_inline)) void quantize_codes(const uint32_t bits, const float *y, uint32_t head_dim,
                                                                 const float *inverse, uint32_t *words, float *sums)
{
    const struct rot_format *format = &codec_rot_formats[bits];
    const uint32_t half = 1u << (bits - 1);
    float edges[8] = {0}, steps[8];
    for (uint32_t c = 0; c < half; c++) { /* of the positive levels, twice */
        const int32_t level = 2 * format->levels[half + c] - format->top;
        const int32_t below = c ? 2 * format->levels[half + c - 1] - format->top : 0;
        edges[c] = format->unit * 0.25f * (float)(level + below);
        steps[c] = (float)(level - below);
    }
    for (uint32_t i = 0; i < head_dim; i++, y += ROT_KEYS) {
        uint32_t shift, upper_shift;
        uint32_t *restrict word = words + (size_t)code_word(bits, i, &shift) * ROT_KEYS;
        uint32_t *restrict upper = words + (size_t)upper_word(rot_groups(head_dim), i, &upper_shift) * ROT_KEYS;
        for (uint32_t j = 0; j < ROT_KEYS; j++) {
            const float size = fabsf(y[j]), z = size * inverse[j];
            float level = steps[0];
            uint32_t code = 0;
#pragma GCC unroll 8
            for (uint32_t c = 1; c < half; c++) {
                code += z >= edges[c];
                level += z >= edges[c] ? steps[c] : 0;
            }
            sums[j] += level * size;
            code = y[j] < 0 ? half - 1 - code : half + code;
            word[j] |= (bits == 3 ? code & 3u : code) << shift;
            if (bits == 3)
                upper[j] |= code >> 2 << upper_shift;
        }
    }
}

void codec_rot_quantize(const struct rot_format *format, const float *keys, uint32_t head_dim, void *tile,
                        float *ret_side)
{
    const uint32_t n_groups = rot_groups(head_dim), size = hadamard_size(head_dim);
    uint8_t *scales = (uint8_t *)tile + rot_scales_offset(format->bits, n_groups);
    int8_t *mean = (int8_t *)tile + rot_mean_offset(format->bits, n_groups);
    memset(tile, 0, rot_tile_bytes(format->bits, head_dim));

    float decoded[KERNELS_MAX_HEAD_DIM];
    *ret_side = quantize_mean(keys, head_dim, mean, decoded);

    _Alignas(64) float y[KERNELS_MAX_HEAD_DIM * ROT_KEYS]; /* [head_dim][64] */
    for (uint32_t i = 0; i < head_dim; i++) {
        const float sign = sign_of(i);
        for (uint32_t j = 0; j < ROT_KEYS; j++)
            y[i * ROT_KEYS + j] = (cleaned(keys[(size_t)j * head_dim + i], KEY_LARGEST) - decoded[i]) * sign;
    }
    hadamard(y, head_dim, size, ROT_KEYS);

    float squares[ROT_KEYS] = {0}, sums[ROT_KEYS] = {0}, inverse[ROT_KEYS];
    for (uint32_t i = 0; i < head_dim; i++)
        for (uint32_t j = 0; j < ROT_KEYS; j++)
            squares[j] += y[i * ROT_KEYS + j] * y[i * ROT_KEYS + j];
    for (uint32_t j = 0; j < ROT_KEYS; j++)
        inverse[j] = squares[j] > 0 ? 1.0f / sqrtf(squares[j] / (float)head_dim) : 0;
    if (format->bits == 2)
        quantize_codes(2, y, head_dim, inverse, tile, sums);
    else if (format->bits == 3)
        quantize_codes(3, y, head_dim, inverse, tile, sums);
    else
        quantize_codes(4, y, head_dim, inverse, tile, sums);

    const float normal = 1.0f / sqrtf((float)size); /* of the rotation */
    for (uint32_t j = 0; j < ROT_KEYS; j++)
        scales[j] = squares[j] > 0 ? scale_code(squares[j] / (0.5f * format->unit * sums[j]) * normal) : 0;
}
