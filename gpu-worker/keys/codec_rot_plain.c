/* codec_rot_plain.c - scores of the rotated codecs in plain C loops: the truth that the other tables are tested against. */
#include "gpu-worker/keys/codec_rot.h"

#include <math.h>
#include <string.h>

static uint32_t word_of(const uint8_t *tile, uint32_t word, uint32_t key)
{
    uint32_t bits;
    memcpy(&bits, tile + (size_t)word * ROT_WORD_BYTES + (size_t)key * 4, sizeof bits);
    return bits;
}

static uint32_t code_of(uint32_t bits, const uint8_t *tile, uint32_t n_groups, uint32_t i, uint32_t key)
{
    static const uint32_t upper[4] = {2, 0, 3, 1};
    const uint32_t g = i / 16, s = i / 4 % 4, b = i % 4;
    if (bits == 4)
        return word_of(tile, 2 * g + s / 2, key) >> (8 * b + 4 * (s % 2)) & 15u;
    const uint32_t low = word_of(tile, g, key) >> (8 * b + 2 * s) & 3u;
    if (bits == 2)
        return low;
    return low | (word_of(tile, n_groups + g / 2, key) >> (8 * b + 4 * (g % 2) + upper[s]) & 1u) << 2;
}

static float dot_mean(const float *q, const int8_t *mean, uint32_t n_groups)
{
    float lanes[16] = {0};
    for (uint32_t i = 0; i < 16 * n_groups; i++)
        lanes[i % 16] = fmaf(q[i], (float)mean[i], lanes[i % 16]);
    for (uint32_t i = 0; i < 8; i++)
        lanes[i] += lanes[i + 8];
    return ((lanes[0] + lanes[2]) + (lanes[1] + lanes[3])) + ((lanes[4] + lanes[6]) + (lanes[5] + lanes[7]));
}

static float scale_of(uint8_t code)
{
    static const uint32_t table[8] = ROT_SCALE_TABLE;
    const uint32_t bits = code ? table[code % 8] + ((uint32_t)code << 20) : 0;
    float a;
    memcpy(&a, &bits, sizeof a);
    return a;
}

static void score(uint32_t bits, const void *query, uint32_t n_queries, uint32_t head_dim, const void *tiles,
                  const float *sides, uint32_t n_tiles, float *scores, size_t stride)
{
    const struct rot_format *format = &codec_rot_formats[bits];
    const uint32_t n_groups = rot_groups(head_dim);
    for (uint32_t t = 0; t < n_tiles; t++) {
        const uint8_t *tile = (const uint8_t *)tiles + t * rot_tile_bytes(bits, head_dim);
        const uint8_t *scales = tile + rot_scales_offset(bits, n_groups);
        const int8_t *mean = (const int8_t *)tile + rot_mean_offset(bits, n_groups);
        uint8_t levels[16 * ROT_MAX_GROUPS];
        float base[KEY_CODEC_MAX_QUERIES];
        for (uint32_t n = 0; n < n_queries; n++) {
            const uint8_t *one = (const uint8_t *)query + n * rot_query_bytes(n_groups);
            base[n] = (((const struct rot_query *)(const void *)one)->scale * sides[t]) *
                      dot_mean(rot_query_floats(one), mean, n_groups);
        }
        for (uint32_t key = 0; key < ROT_KEYS; key++) {
            for (uint32_t i = 0; i < 16 * n_groups; i++)
                levels[i] = format->levels[code_of(bits, tile, n_groups, i, key)];
            for (uint32_t n = 0; n < n_queries; n++) {
                const uint8_t *one = (const uint8_t *)query + n * rot_query_bytes(n_groups);
                const int8_t *integers = (const int8_t *)rot_query_integers(one, n_groups);
                struct rot_query numbers;
                memcpy(&numbers, one, sizeof numbers);
                int32_t sum = 0;
                for (uint32_t i = 0; i < 16 * n_groups; i++)
                    sum += levels[i] * integers[(size_t)i / 4 * ROT_QUERY_LANES + i % 4];
                const float x = (float)sum - numbers.offset;
                scores[n * stride + (size_t)t * ROT_KEYS + key] =
                    fmaf(scale_of(scales[key]) * x, numbers.factor, base[n]);
            }
        }
    }
}

static void score2(const void *query, uint32_t n_queries, uint32_t head_dim, const void *tiles, const float *sides,
                   uint32_t n_tiles, float *scores, size_t stride)
{
    score(2, query, n_queries, head_dim, tiles, sides, n_tiles, scores, stride);
}
static void score3(const void *query, uint32_t n_queries, uint32_t head_dim, const void *tiles, const float *sides,
                   uint32_t n_tiles, float *scores, size_t stride)
{
    score(3, query, n_queries, head_dim, tiles, sides, n_tiles, scores, stride);
}
static void score4(const void *query, uint32_t n_queries, uint32_t head_dim, const void *tiles, const float *sides,
                   uint32_t n_tiles, float *scores, size_t stride)
{
    score(4, query, n_queries, head_dim, tiles, sides, n_tiles, scores, stride);
}

const struct rot_kernels codec_rot_plain = {.score = {[2] = score2, [3] = score3, [4] = score4}};
