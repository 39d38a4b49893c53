/*
 * codec_pair_quantize.c - keys of a block -> a tile of the pair codecs and its side.
 *
 * Invariant  plain C in one fixed order without contraction or approximate operations: the same bytes on every instruction
 *            set, whether denormal numbers are flushed or not (none arises). Loops run over the 64 keys side by side, so
 *            that a compiler can use whatever vectors the build allows without changing a sum.
 *
 * Each key is divided by its own size before the nearest codewords are looked for, which are made for residuals of the usual
 * spread; a is then the best scale of what they say. What is left along the mean query is kept apart (8 bits), as an error
 * there moves the scores of all queries the same way.
 */
#include "gpu-worker/keys/codec_pair.h"

#include <math.h>

#define KEY_LARGEST 65504.0f /* of f16, the largest that a row holds */
#define SMALLEST    0x1p-40f /* anything smaller is 0: no row has it */
#define ROUND_MAGIC 12582912.0f
#define LANES       8u
#define INLINE      static inline __attribute__((always_inline)) /* into the build for each instruction set */

typedef float lanes __attribute__((vector_size(LANES * sizeof(float)))); /* aligned as r and y are */
typedef int32_t choices __attribute__((vector_size(LANES * sizeof(int32_t))));

/* A broken model's numbers: NaN counts as 0, what is beyond the largest half as that. In integers, as these vectorise. */
INLINE float cleaned(float x)
{
    const float smallest = SMALLEST, largest = KEY_LARGEST;
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

/* r [head_dim][64], the mean taken away; returns the mean's step, a float whose lowest 8 bits are 0. */
INLINE float take_mean(const float *keys, uint32_t head_dim, int8_t *mean, float *r)
{
    float means[KERNELS_MAX_HEAD_DIM], largest = 0;
    for (uint32_t i = 0; i < head_dim; i++)
        for (uint32_t j = 0; j < PAIR_KEYS; j++)
            r[i * PAIR_KEYS + j] = cleaned(keys[(size_t)j * head_dim + i]);
    for (uint32_t i = 0; i < head_dim; i++) {
        float sums[8] = {0};
        for (uint32_t j = 0; j < PAIR_KEYS; j += 8)
            for (uint32_t lane = 0; lane < 8; lane++)
                sums[lane] += r[i * PAIR_KEYS + j + lane];
        means[i] =
            (((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]))) / PAIR_KEYS;
        largest = fabsf(means[i]) > largest ? fabsf(means[i]) : largest;
    }
    const float step = pair_mean_step(largest < SMALLEST ? SMALLEST : largest / 127.0f);
    for (uint32_t i = 0; i < head_dim; i++) {
        const float steps = (means[i] / step + ROUND_MAGIC) - ROUND_MAGIC;
        mean[i] = (int8_t)(steps > 127 ? 127 : steps < -127 ? -127 : steps);
        const float decoded = step * (float)mean[i];
        for (uint32_t j = 0; j < PAIR_KEYS; j++)
            r[i * PAIR_KEYS + j] -= decoded;
    }
    return step;
}

/* y [n_coordinates][64] = A r */
INLINE void analyse(const struct pair_table *table, const float *r, float *y)
{
    for (uint32_t c = 0; c < table->n_coordinates; c++, y += PAIR_KEYS) {
        const uint32_t first = table->dense ? 0 : table->dimension[c];
        const uint32_t end = table->dense ? table->layout.head_dim : first + 1;
        const float *factors = table->analysis + (table->dense ? (size_t)c * table->layout.head_dim : c);
        for (uint32_t key = 0; key < PAIR_KEYS; key += 4 * LANES) {
            lanes sums[4] = {{0}};
            for (uint32_t i = first; i < end; i++) {
                const float factor = factors[i - first];
                const lanes *from = (const lanes *)(const void *)(r + i * PAIR_KEYS + key);
                sums[0] += factor * from[0];
                sums[1] += factor * from[1];
                sums[2] += factor * from[2];
                sums[3] += factor * from[3];
            }
            memcpy(y + key, sums, sizeof sums);
        }
        for (uint32_t j = 0; j < PAIR_KEYS; j++)
            y[j] = fabsf(y[j]) < SMALLEST ? 0 : y[j];
    }
}

/* What the codewords chosen for 64 keys add up to. */
struct sums {
    float products[PAIR_KEYS]; /* <y, codewords> */
    float squares[PAIR_KEYS];  /* |codewords|^2 */
    float along[PAIR_KEYS];    /* u' B' codewords */
};

/* The nearest codewords of one group; codes [64] get them at `shift`. */
INLINE void choose(const struct pair_table *table, uint32_t g, const float *y, const float *inverse, uint32_t shift,
                   uint8_t *codes, struct sums *sums)
{
    const struct pair_group *group = &table->groups[g];
    const float *codewords = table->codewords + group->codewords;
    int32_t chosen[PAIR_KEYS];
    y += (size_t)group->first * PAIR_KEYS;
    for (uint32_t key = 0; key < PAIR_KEYS; key += 2 * LANES) {
        const lanes *z = (const lanes *)(const void *)(y + key), *scale = (const lanes *)(const void *)(inverse + key);
        lanes nearest[2] = {{0}};
        choices best[2] = {{0}};
        for (int32_t c = 0; c < (int32_t)PAIR_CODEWORDS; c++) {
            /* least |z - codeword|^2 = |z|^2 + 2 (|codeword|^2 / 2 - <z, codeword>) */
            const float *codeword = codewords + (size_t)c * group->n,
                        half = table->half_squares[g * PAIR_CODEWORDS + (uint32_t)c];
            lanes towards[2] = {{0}};
            for (uint32_t i = 0; i < group->n; i++) {
                towards[0] += codeword[i] * z[i * PAIR_KEYS / LANES];
                towards[1] += codeword[i] * z[i * PAIR_KEYS / LANES + 1];
            }
            for (int k = 0; k < 2; k++) {
                const lanes distance = half - towards[k] * scale[k];
                const choices nearer = c == 0 ? ~best[k] : distance < nearest[k];
                nearest[k] = (lanes)((nearer & (choices)distance) | (~nearer & (choices)nearest[k]));
                best[k] = (nearer & c) | (~nearer & best[k]);
            }
        }
        memcpy(chosen + key, best, sizeof best);
    }
    for (uint32_t j = 0; j < PAIR_KEYS; j++) {
        const float *codeword = codewords + (size_t)chosen[j] * group->n;
        codes[j] = (uint8_t)(codes[j] | chosen[j] << shift);
        for (uint32_t i = 0; i < group->n; i++) {
            sums->products[j] += codeword[i] * y[i * PAIR_KEYS + j];
            sums->squares[j] += codeword[i] * codeword[i];
            sums->along[j] += codeword[i] * table->along[group->first + i];
        }
    }
}

/* t [64] in 8 bits; returns the code of their step. */
INLINE uint32_t quantize_along(const float *t, int8_t *along)
{
    float largest = 0;
    for (uint32_t j = 0; j < PAIR_KEYS; j++)
        largest = fabsf(t[j]) > largest ? fabsf(t[j]) : largest;
    uint32_t code = key_scale_code(largest * (1.0f / 127.0f));
    if (code && code < 255 && key_scale_value(code) * 127.5f < largest)
        code++;
    const float inverse = code ? key_scale_value(256 - code) : 0;
    for (uint32_t j = 0; j < PAIR_KEYS; j++) {
        const float steps = t[j] * inverse, clamped = steps > 127 ? 127 : steps < -127 ? -127 : steps;
        along[j] = (int8_t)((clamped + ROUND_MAGIC) - ROUND_MAGIC);
    }
    return code;
}

INLINE void quantize(const struct pair_table *table, const float *keys, void *tile, float *ret_side)
{
    const struct pair_layout *layout = &table->layout;
    const uint32_t head_dim = layout->head_dim;
    uint8_t *codes = tile, *scales = codes + pair_scales_offset(layout);
    int8_t *along = (int8_t *)tile + pair_along_offset(layout);
    int8_t *mean = (int8_t *)tile + pair_mean_offset(layout);
    _Alignas(64) float r[KERNELS_MAX_HEAD_DIM * PAIR_KEYS], y[KERNELS_MAX_HEAD_DIM * PAIR_KEYS];
    memset(tile, 0, pair_tile_bytes(layout));
    const float mean_step = take_mean(keys, head_dim, mean, r);
    analyse(table, r, y);

    _Alignas(64) float sizes[PAIR_KEYS] = {0}, inverse[PAIR_KEYS];
    for (uint32_t c = 0; c < table->n_coordinates; c++)
        for (uint32_t j = 0; j < PAIR_KEYS; j++)
            sizes[j] += y[c * PAIR_KEYS + j] * y[c * PAIR_KEYS + j] * table->inverse_spread[c];
    for (uint32_t j = 0; j < PAIR_KEYS; j++) {
        const uint32_t code = key_scale_code(sqrtf(sizes[j]));
        inverse[j] = code ? key_scale_value(256 - code) : 0;
    }

    struct sums sums;
    memset(&sums, 0, sizeof sums);
    for (uint32_t g = 0; g < layout->n_groups; g++)
        choose(table, g, y, inverse, g % 2 * 4, codes + (size_t)g / 2 * PAIR_KEYS, &sums);

    for (uint32_t j = 0; j < PAIR_KEYS; j++) {
        const bool says = inverse[j] > 0 && sums.products[j] > 0 && sums.squares[j] > 0;
        const uint32_t code = says ? key_scale_code(sums.products[j] / sums.squares[j]) : 0;
        const uint32_t upper = (uint32_t)pair_scale_nibble(code) << 4;
        scales[j] = (uint8_t)(layout->is_klt ? scales[j] | upper : code);
    }
    *ret_side = pair_side(mean_step, 0);
    if (layout->is_klt)
        return;
    float t[PAIR_KEYS] = {0};
    for (uint32_t i = 0; i < head_dim; i++)
        for (uint32_t j = 0; j < PAIR_KEYS; j++)
            t[j] += table->direction[i] * r[i * PAIR_KEYS + j];
    for (uint32_t j = 0; j < PAIR_KEYS; j++)
        t[j] -= key_scale_value(scales[j]) * sums.along[j];
    *ret_side = pair_side(mean_step, quantize_along(t, along));
}

void codec_pair_quantize(const struct pair_table *table, const float *keys, void *tile, float *ret_side)
{
    quantize(table, keys, tile, ret_side);
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) void codec_pair_quantize_avx2(const struct pair_table *table, const float *keys,
                                                              void *tile, float *ret_side)
{
    quantize(table, keys, tile, ret_side);
}
#endif
