/* codec_pair.c - see codec.h: the codecs pair3, pair2, pair1, klt2, klt1 and klt0, prepared queries, and which instruction set scores them. */
#include "gpu-worker/keys/codec_pair.h"

#include <math.h>

#include "gpu-worker/keys/codecs.h"

#define QUERY_LARGEST 0x1p40f
#define ROUND_MAGIC   12582912.0f /* rounds to the nearest integer, ties to even */

static const struct pair_kernels *pair_kernels(const struct kernels *kernels)
{
#if defined(__x86_64__)
    if (kernels->isa == KERNELS_ISA_AVX512)
        return &codec_pair_avx512;
    if (kernels->isa == KERNELS_ISA_AVX2)
        return &codec_pair_avx2;
#endif
    (void)kernels;
    return &codec_pair_plain;
}

static size_t tile_bytes(const struct key_head *head)
{
    const struct pair_table *table = head->table;
    return pair_tile_bytes(&table->layout);
}

static void quantize(const struct kernels *kernels, const struct key_head *head, const float *keys, void *tile,
                     float *ret_side)
{
#if defined(__x86_64__)
    if (kernels->isa == KERNELS_ISA_AVX512 || kernels->isa == KERNELS_ISA_AVX2) {
        codec_pair_quantize_avx2(head->table, keys, tile, ret_side);
        return;
    }
#endif
    (void)kernels;
    codec_pair_quantize(head->table, keys, tile, ret_side);
}

static size_t query_bytes(const struct key_head *head, uint32_t n_queries)
{
    const struct pair_table *table = head->table;
    return n_queries * pair_query_bytes(&table->layout);
}

/* B q */
static void synthesize(const struct pair_table *table, const float *q, float *coordinates)
{
    const uint32_t n = table->n_coordinates;
    if (!table->dense) {
        for (uint32_t i = 0; i < n; i++)
            coordinates[i] = table->synthesis[i] * q[table->dimension[i]];
        return;
    }
    memset(coordinates, 0, n * sizeof *coordinates);
    for (uint32_t i = 0; i < table->layout.head_dim; i++)
        for (uint32_t c = 0; c < n; c++)
            coordinates[c] += table->synthesis[(size_t)i * n + c] * q[i];
}

static void prepare_one(const struct pair_table *table, const float *q, float scale, uint8_t *query)
{
    struct pair_query *numbers = (struct pair_query *)(void *)query;
    float *given = (float *)(void *)(query + sizeof *numbers);
    uint8_t *tables = query + (pair_query_tables(query, &table->layout) - query);
    float coordinates[KERNELS_MAX_HEAD_DIM], values[PAIR_MAX_GROUPS * PAIR_CODEWORDS], least[PAIR_MAX_GROUPS];
    float along = 0, widest = 0, offset = 0;
    memset(query, 0, pair_query_bytes(&table->layout));
    for (uint32_t i = 0; i < table->layout.head_dim; i++) {
        given[i] = fabsf(q[i]) < QUERY_LARGEST ? q[i] : q[i] != q[i] ? 0 : copysignf(QUERY_LARGEST, q[i]);
        along += given[i] * table->direction[i];
    }
    synthesize(table, given, coordinates);
    for (uint32_t g = 0; g < table->layout.n_groups; g++) {
        const struct pair_group *group = &table->groups[g];
        const float *codeword = table->codewords + group->codewords;
        float lowest = INFINITY, highest = -INFINITY;
        for (uint32_t c = 0; c < PAIR_CODEWORDS; c++, codeword += group->n) {
            float value = 0;
            for (uint32_t i = 0; i < group->n; i++)
                value += coordinates[group->first + i] * codeword[i];
            values[g * PAIR_CODEWORDS + c] = value;
            lowest = value < lowest ? value : lowest;
            highest = value > highest ? value : highest;
        }
        least[g] = lowest;
        offset += lowest;
        widest = highest - lowest > widest ? highest - lowest : widest;
    }
    const float inverse = widest > 0x1p-100f ? 255.0f / widest : 0;
    for (uint32_t g = 0; g < table->layout.n_groups; g++)
        for (uint32_t c = 0; c < PAIR_CODEWORDS; c++)
            tables[g * PAIR_CODEWORDS + c] =
                (uint8_t)(((values[g * PAIR_CODEWORDS + c] - least[g]) * inverse + ROUND_MAGIC) - ROUND_MAGIC);
    numbers->factor = scale * (widest / 255.0f);
    numbers->offset = scale * offset;
    numbers->scale = scale;
    numbers->along = scale * along;
}

static void prepare(const struct kernels *kernels, const struct key_head *head, const float *q, uint32_t n_queries,
                    float scale, void *query)
{
    (void)kernels;
    const struct pair_table *table = head->table;
    for (uint32_t i = 0; i < n_queries; i++)
        prepare_one(table, q + (size_t)i * table->layout.head_dim, scale,
                    (uint8_t *)query + i * pair_query_bytes(&table->layout));
}

static void score(const struct kernels *kernels, const struct key_head *head, const void *query, uint32_t n_queries,
                  const void *tiles, const float *sides, uint32_t n_tiles, float *scores, size_t stride)
{
    const struct pair_table *table = head->table;
    pair_kernels(kernels)->score(&table->layout, query, n_queries, tiles, sides, n_tiles, scores, stride);
}

#define CODEC(symbol, called)                                                                                          \
    const struct key_codec symbol = {.name = called,                                                                   \
                                     .tile_bytes = tile_bytes,                                                         \
                                     .quantize = quantize,                                                             \
                                     .query_bytes = query_bytes,                                                       \
                                     .prepare = prepare,                                                               \
                                     .score = score}
CODEC(codec_pair3, "pair3");
CODEC(codec_pair2, "pair2");
CODEC(codec_pair1, "pair1");
CODEC(codec_pair_klt2, "klt2");
CODEC(codec_pair_klt1, "klt1");
CODEC(codec_pair_klt0, "klt0");
