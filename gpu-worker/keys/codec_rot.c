/* codec_rot.c - see codec.h: the rotated codecs rot4, rot3 and rot2, and which instruction set scores them. */
#include "gpu-worker/keys/codec_rot.h"

#include <math.h>
#include <string.h>

#include "gpu-worker/keys/codecs.h"

#define QUERY_LARGEST_INTEGER 127.0f
#define ROUND_MAGIC           12582912.0f /* rounds to the nearest integer, ties to even */

static const struct rot_kernels *rot_kernels(const struct kernels *kernels)
{
#if defined(__x86_64__)
    if (kernels->isa == KERNELS_ISA_AVX512)
        return &codec_rot_avx512;
    if (kernels->isa == KERNELS_ISA_AVX2)
        return &codec_rot_avx2;
#endif
    (void)kernels;
    return &codec_rot_plain;
}

static size_t query_bytes(const struct key_head *head, uint32_t n_queries)
{
    return n_queries * rot_query_bytes(rot_groups(head->head_dim));
}

static void prepare_one(const struct rot_format *format, const float *q, uint32_t head_dim, float scale, void *query)
{
    const uint32_t n_groups = rot_groups(head_dim);
    struct rot_query *numbers = query;
    float *given = (float *)(void *)((uint8_t *)query + sizeof *numbers);
    uint8_t *integers = (uint8_t *)(given + (size_t)16 * n_groups);
    float rotated[KERNELS_MAX_HEAD_DIM], largest = 0;
    memset(query, 0, rot_query_bytes(n_groups));
    codec_rot_rotate(q, head_dim, given, rotated);
    for (uint32_t i = 0; i < head_dim; i++)
        largest = fabsf(rotated[i]) > largest ? fabsf(rotated[i]) : largest;
    const float step = largest / QUERY_LARGEST_INTEGER, inverse = largest > 0 ? QUERY_LARGEST_INTEGER / largest : 0;
    int8_t small[KERNELS_MAX_HEAD_DIM + 3] = {0};
    int32_t sum = 0;
    for (uint32_t i = 0; i < head_dim; i++) {
        small[i] = (int8_t)((rotated[i] * inverse + ROUND_MAGIC) - ROUND_MAGIC);
        sum += small[i];
    }
    for (uint32_t word = 0; word < (head_dim + 3) / 4; word++)
        for (uint32_t lane = 0; lane < ROT_QUERY_LANES; lane += 4)
            memcpy(integers + (size_t)word * ROT_QUERY_LANES + lane, small + (size_t)word * 4, 4);
    numbers->factor = (scale * step) * format->unit;
    numbers->offset = 0.5f * (float)(format->top * sum);
    numbers->scale = scale;
}

static void prepare(const struct rot_format *format, const float *q, uint32_t n_queries, uint32_t head_dim, float scale,
                    void *query)
{
    for (uint32_t i = 0; i < n_queries; i++)
        prepare_one(format, q + (size_t)i * head_dim, head_dim, scale,
                    (uint8_t *)query + i * rot_query_bytes(rot_groups(head_dim)));
}

#define CODEC(n_bits)                                                                                                  \
    static size_t tile_bytes##n_bits(const struct key_head *head)                                                      \
    {                                                                                                                  \
        return rot_tile_bytes(n_bits, head->head_dim);                                                                 \
    }                                                                                                                  \
    static void quantize##n_bits(const struct kernels *kernels, const struct key_head *head, const float *keys,        \
                                 void *tile, float *ret_side)                                                          \
    {                                                                                                                  \
        (void)kernels;                                                                                                 \
        codec_rot_quantize(&codec_rot_formats[n_bits], keys, head->head_dim, tile, ret_side);                          \
    }                                                                                                                  \
    static void prepare##n_bits(const struct kernels *kernels, const struct key_head *head, const float *q,            \
                                uint32_t n_queries, float scale, void *query)                                          \
    {                                                                                                                  \
        (void)kernels;                                                                                                 \
        prepare(&codec_rot_formats[n_bits], q, n_queries, head->head_dim, scale, query);                               \
    }                                                                                                                  \
    static void score##n_bits(const struct kernels *kernels, const struct key_head *head, const void *query,           \
                              uint32_t n_queries, const void *tiles, const float *sides, uint32_t n_tiles,             \
                              float *scores, size_t stride)                                                            \
    {                                                                                                                  \
        rot_kernels(kernels)->score[n_bits](query, n_queries, head->head_dim, tiles, sides, n_tiles, scores, stride);  \
    }                                                                                                                  \
    const struct key_codec codec_rot##n_bits = {.name = "rot" #n_bits,                                                 \
                                                .tile_bytes = tile_bytes##n_bits,                                      \
                                                .quantize = quantize##n_bits,                                          \
                                                .query_bytes = query_bytes,                                            \
                                                .prepare = prepare##n_bits,                                            \
                                                .score = score##n_bits}
CODEC(4);
CODEC(3);
CODEC(2);
