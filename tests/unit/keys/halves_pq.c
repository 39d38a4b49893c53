/* halves_pq.c - the 16-wide scores of product-quantized keys on AVX2 registers; see fixture.h. Compiled with the flags of AVX2. */
#define VECTOR_WIDTH 16
#include "gpu-worker/keys/vector_pq.h"
#include "gpu-worker/keys/vector_pq_nearest.h"
#include "tests/unit/keys/halves_pq.h"

static void nearest(const struct pq_space *space, const float *x, uint32_t n, uint16_t *numbers, float *distances)
{
    pq8_nearest(space, x, n, numbers, distances);
}

static void score(const struct pq_table *table, const float *q, uint32_t n_queries, const void *tiles, uint32_t n_tiles,
                  float *scores, size_t stride)
{
    pq_score(table, q, n_queries, tiles, n_tiles, scores, stride);
}

const struct pq_kernels halves_pq = {.nearest = nearest, .score = score};
