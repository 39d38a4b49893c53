/* codec_pair_plain.c - scores of the pair codecs in plain C loops: the truth that the other tables are tested against. */
#include "gpu-worker/keys/codec_pair.h"

#include <math.h>

static float dot_mean(const float *q, const int8_t *mean, uint32_t n_sixteenths)
{
    float lanes[16] = {0};
    for (uint32_t i = 0; i < 16 * n_sixteenths; i++)
        lanes[i % 16] = fmaf(q[i], (float)mean[i], lanes[i % 16]);
    for (uint32_t i = 0; i < 8; i++)
        lanes[i] += lanes[i + 8];
    return ((lanes[0] + lanes[2]) + (lanes[1] + lanes[3])) + ((lanes[4] + lanes[6]) + (lanes[5] + lanes[7]));
}

static void score_one(const struct pair_layout *layout, const uint8_t *query, const uint8_t *tile, float side,
                      float *scores)
{
    struct pair_query numbers;
    memcpy(&numbers, query, sizeof numbers);
    const uint8_t *tables = pair_query_tables(query, layout), *scales = tile + pair_scales_offset(layout);
    const int8_t *along = (const int8_t *)tile + pair_along_offset(layout);
    const int8_t *mean = (const int8_t *)tile + pair_mean_offset(layout);
    const float base = (numbers.scale * pair_mean_step(side)) *
                       dot_mean(pair_query_floats(query), mean, pair_sixteenths(layout->head_dim));
    const float along_scale = numbers.along * pair_along_step(side);
    for (uint32_t key = 0; key < PAIR_KEYS; key++) {
        uint32_t x = 0;
        for (uint32_t g = 0; g < layout->n_groups; g++) {
            const uint32_t byte = tile[(size_t)g / 2 * PAIR_KEYS + key];
            x += tables[g * PAIR_CODEWORDS + ((g % 2 ? byte >> 4 : byte & 15u))];
        }
        const float t = layout->is_klt ? 0 : (float)along[key];
        scores[key] = fmaf(key_scale_value(pair_scale_of(layout, scales[key])),
                           fmaf((float)x, numbers.factor, numbers.offset), fmaf(t, along_scale, base));
    }
}

static void score(const struct pair_layout *layout, const void *query, uint32_t n_queries, const void *tiles,
                  const float *sides, uint32_t n_tiles, float *scores, size_t stride)
{
    for (uint32_t t = 0; t < n_tiles; t++)
        for (uint32_t n = 0; n < n_queries; n++)
            score_one(layout, (const uint8_t *)query + n * pair_query_bytes(layout),
                      (const uint8_t *)tiles + t * pair_tile_bytes(layout), sides[t],
                      scores + n * stride + (size_t)t * PAIR_KEYS);
}

const struct pair_kernels codec_pair_plain = {.score = score};
