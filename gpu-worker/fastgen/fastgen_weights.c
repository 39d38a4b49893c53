/*
 * fastgen_weights.c - scores of whole rows, their softmax, and the output that goes with it.
 *
 * Scores come from the kernels' f16 dot products, the softmax from the loops of a selection (policy/passes.h): both exist for
 * every instruction set. A block's keys are laid side by side once for all positions of a call.
 */
#include "gpu-worker/fastgen/fastgen_weights.h"

#include <assert.h>
#include <errno.h>
#include <math.h>
#include <string.h>

#include "gpu-worker/policy/passes.h"

static_assert(PASSES_BLOCK_TOKENS == KERNELS_BLOCK_TOKENS, "passes go over whole blocks");

static const struct passes *passes_for(const struct kernels *kernels)
{
#if defined(__x86_64__)
    if (kernels->isa == KERNELS_ISA_AVX512)
        return &passes_avx512;
    if (kernels->isa == KERNELS_ISA_AVX2)
        return &passes_avx2;
#else
    (void)kernels;
#endif
    return &passes_plain;
}

/* Parts of the scratch; each starts at a multiple of 64 bytes. */
struct parts {
    float *scores; /* [position][group][stride]; exponentials, after the softmax */
    float *sums;   /* [position][group][1 + head_dim] */
    float *block_max;
    float *decoded; /* [64][head_dim] */
    uint16_t *keys; /* [64][head_dim] */
    const void **blocks;
};

static size_t part_bytes(size_t n_bytes)
{
    return (n_bytes + 63) & ~(size_t)63;
}

static size_t lay_out(struct parts *parts, void *scratch, uint32_t n_positions, size_t stride, uint32_t group,
                      uint32_t head_dim)
{
    size_t n_blocks = stride / KERNELS_BLOCK_TOKENS, queries = (size_t)n_positions * group;
    const size_t n_bytes[] = {
        part_bytes(queries * stride * sizeof(float)),
        part_bytes(queries * (1 + head_dim) * sizeof(float)),
        part_bytes((n_blocks + PASSES_LANES) * sizeof(float)),
        part_bytes((size_t)KERNELS_BLOCK_TOKENS * head_dim * sizeof(float)),
        part_bytes((size_t)KERNELS_BLOCK_TOKENS * head_dim * sizeof(uint16_t)),
        part_bytes(n_blocks * sizeof(void *)),
    };
    size_t offset[sizeof n_bytes / sizeof n_bytes[0] + 1] = {0};
    for (size_t i = 0; i < sizeof n_bytes / sizeof n_bytes[0]; i++)
        offset[i + 1] = offset[i] + n_bytes[i];
    if (parts != NULL) {
        char *base = scratch;
        *parts = (struct parts){
            .scores = (float *)(void *)base,
            .sums = (float *)(void *)(base + offset[1]),
            .block_max = (float *)(void *)(base + offset[2]),
            .decoded = (float *)(void *)(base + offset[3]),
            .keys = (uint16_t *)(void *)(base + offset[4]),
            .blocks = (const void **)(void *)(base + offset[5]),
        };
    }
    return offset[sizeof n_bytes / sizeof n_bytes[0]];
}

size_t fastgen_weights_scratch_bytes(uint32_t n_positions, uint32_t last_position, uint32_t group, uint32_t head_dim)
{
    return lay_out(NULL, NULL, n_positions, fastgen_weights_stride(last_position), group, head_dim);
}

/* K of n rows, side by side in half precision. */
static void lay_keys(const struct fastgen_rows *rows, const void *block, uint32_t n, const struct parts *parts)
{
    size_t row_bytes = kernels_row_bytes(rows->head_dim, rows->codec), key = rows->head_dim * sizeof(uint16_t);
    if (rows->codec == KERNELS_ROWS_F16) {
        for (uint32_t j = 0; j < n; j++)
            memcpy((char *)parts->keys + j * key, (const char *)block + j * row_bytes, key);
        return;
    }
    rows->kernels->decode_keys(block, n, rows->head_dim, rows->codec, parts->decoded);
    rows->kernels->f16_encode(parts->decoded, (size_t)n * rows->head_dim, parts->keys);
}

static int score(const struct fastgen_rows *rows, uint32_t last, const struct parts *parts, size_t stride)
{
    for (uint32_t first = 0, b = 0; first <= last; first += KERNELS_BLOCK_TOKENS, b++) {
        uint32_t n = last + 1 - first < KERNELS_BLOCK_TOKENS ? last + 1 - first : KERNELS_BLOCK_TOKENS;
        parts->blocks[b] = rows->block(rows->context, b);
        if (parts->blocks[b] == NULL)
            return -ESTALE;
        lay_keys(rows, parts->blocks[b], n, parts);
        for (uint32_t i = 0; i < rows->n_positions; i++) {
            if (rows->positions[i] < first)
                continue;
            uint32_t visible = rows->positions[i] - first + 1;
            for (uint32_t g = 0; g < rows->group; g++) {
                float *scores = parts->scores + ((size_t)i * rows->group + g) * stride + first;
                rows->kernels->score_f16(rows->q[i] + (size_t)g * rows->head_dim, rows->head_dim, parts->keys,
                                         visible < n ? visible : n, rows->scale, scores);
                for (uint32_t j = visible; j < KERNELS_BLOCK_TOKENS; j++)
                    scores[j] = -INFINITY;
            }
        }
    }
    return 0;
}

static void soften(const struct fastgen_rows *rows, uint32_t i, const struct parts *parts, size_t stride,
                   float *weights)
{
    const struct passes *passes = passes_for(rows->kernels);
    uint32_t n_blocks = rows->positions[i] / KERNELS_BLOCK_TOKENS + 1;
    float *scores = parts->scores + (size_t)i * rows->group * stride, factors[rows->group];
    for (uint32_t g = 0; g < rows->group; g++) {
        float sum = passes->exponentials(scores + g * stride, n_blocks, passes->largest(scores + g * stride, n_blocks));
        factors[g] = sum > 0 ? 1.0f / (sum * (float)rows->group) : 0;
    }
    passes->average(scores, stride, factors, rows->group, n_blocks, weights, parts->block_max);
}

/* The output of n positions from `i` on gains what rows [first, end) weigh. */
static void weigh(const struct fastgen_rows *rows, uint32_t i, uint32_t n, uint32_t first, uint32_t end,
                  const struct parts *parts, size_t stride)
{
    size_t row_bytes = kernels_row_bytes(rows->head_dim, rows->codec), query = (size_t)i * rows->group;
    while (first < end) {
        uint32_t skipped = first % KERNELS_BLOCK_TOKENS, left = KERNELS_BLOCK_TOKENS - skipped;
        uint32_t n_rows = end - first < left ? end - first : left;
        const char *block = parts->blocks[first / KERNELS_BLOCK_TOKENS];
        const void *pointers[KERNELS_BLOCK_TOKENS];
        for (uint32_t j = 0; j < n_rows; j++)
            pointers[j] = block + (skipped + j) * row_bytes;
        rows->kernels->weigh_rows(n * rows->group, rows->head_dim, rows->codec, pointers, n_rows,
                                  parts->scores + query * stride + first, stride,
                                  parts->sums + query * (1 + rows->head_dim));
        first += n_rows;
    }
}

static void make_outputs(const struct fastgen_rows *rows, const struct parts *parts, size_t stride, float *const *out)
{
    uint32_t d = rows->head_dim, common = UINT32_MAX; /* tokens that all see: one reading of V for all */
    for (uint32_t i = 0; i < rows->n_positions; i++)
        common = rows->positions[i] + 1 < common ? rows->positions[i] + 1 : common;
    memset(parts->sums, 0, (size_t)rows->n_positions * rows->group * (1 + d) * sizeof(float));
    weigh(rows, 0, rows->n_positions, 0, common, parts, stride);
    for (uint32_t i = 0; i < rows->n_positions; i++) {
        weigh(rows, i, 1, common, rows->positions[i] + 1, parts, stride);
        for (uint32_t g = 0; g < rows->group; g++) {
            const float *sums = parts->sums + ((size_t)i * rows->group + g) * (1 + d);
            for (uint32_t k = 0; k < d; k++)
                out[i][(size_t)g * d + k] = sums[0] > 0 ? sums[1 + k] / sums[0] : 0;
        }
    }
}

int fastgen_weights(const struct fastgen_rows *rows, void *scratch, float *weights, size_t stride, float *const *out)
{
    uint32_t last = 0;
    assert(rows->n_positions > 0 && rows->n_positions <= FASTGEN_WEIGHTS_POSITIONS);
    for (uint32_t i = 0; i < rows->n_positions; i++)
        last = rows->positions[i] > last ? rows->positions[i] : last;
    assert(stride >= fastgen_weights_stride(last));
    struct parts parts;
    size_t own_stride = fastgen_weights_stride(last);
    lay_out(&parts, scratch, rows->n_positions, own_stride, rows->group, rows->head_dim);
    if (score(rows, last, &parts, own_stride) < 0)
        return -ESTALE;
    for (uint32_t i = 0; i < rows->n_positions; i++)
        soften(rows, i, &parts, own_stride, weights + i * stride);
    if (out != NULL)
        make_outputs(rows, &parts, own_stride, out);
    return 0;
}
