/*
 * codec_pq_plain.c - search and scores of product-quantized keys in plain C loops: the truth that the other tables are tested
 * against.
 */
#include "gpu-worker/keys/codec_pq.h"

#include <math.h>

#include "kernels/half.h"

/* Sum of squares by the tree of codec_pq.h; destroys x. */
static float tree(float *x, uint32_t n_dims)
{
    for (uint32_t n = n_dims; n > 1; n /= 2)
        for (uint32_t i = 0; i < n / 2; i++)
            x[i] = x[2 * i] + x[2 * i + 1];
    return x[0];
}

static float square_distance(const float *x, const float *centroid, uint32_t n_dims)
{
    float squares[PQ_MAX_DIMS];
    for (uint32_t i = 0; i < n_dims; i++) {
        const float difference = x[i] - centroid[i];
        squares[i] = difference * difference;
    }
    return tree(squares, n_dims);
}

/* Not above the distance, as computed, of any centroid in the box: rounding is monotonic. */
static float box_distance(const struct pq_space *space, const float *x, uint32_t leaf)
{
    const uint32_t n_leaves = pq_n_leaves(space->n_centroids);
    float squares[PQ_MAX_DIMS];
    for (uint32_t i = 0; i < space->n_dims; i++) {
        const float *box = space->boxes + (size_t)i * 2 * n_leaves + leaf;
        const float below = box[0] - x[i], above = x[i] - box[n_leaves];
        const float outside = below > above ? below : above;
        squares[i] = outside > 0 ? outside * outside : 0;
    }
    return tree(squares, space->n_dims);
}

struct best {
    float distance;
    uint32_t number;
};

static void look(const struct pq_space *space, const float *centroids, const float *x, uint32_t leaf, struct best *best)
{
    const uint32_t size = pq_leaf(space->n_centroids);
    for (uint32_t i = leaf * size; i < (leaf + 1) * size; i++) {
        const float distance = square_distance(x, centroids + (size_t)i * space->n_dims, space->n_dims);
        if (distance < best->distance || (distance == best->distance && i < best->number))
            *best = (struct best){distance, i};
    }
}

static void nearest(const struct pq_space *space, const float *x, uint32_t n, uint16_t *numbers, float *distances)
{
    const uint32_t n_leaves = pq_n_leaves(space->n_centroids);
    float centroids[PQ_MAX_CENTROIDS * PQ_MAX_DIMS]; /* 128 KiB */
    for (size_t i = 0; i < (size_t)space->n_centroids * space->n_dims; i++)
        centroids[i] = half_decode(space->centroids[i]);
    for (uint32_t j = 0; j < n; j++, x += space->n_dims) {
        float boxes[PQ_MAX_LEAVES];
        uint32_t first = 0;
        for (uint32_t l = 0; l < n_leaves; l++) {
            boxes[l] = box_distance(space, x, l);
            first = boxes[l] < boxes[first] ? l : first;
        }
        struct best best = {INFINITY, UINT32_MAX};
        look(space, centroids, x, first, &best);
        for (uint32_t l = 0; l < n_leaves; l++)
            if (l != first && boxes[l] <= best.distance)
                look(space, centroids, x, l, &best);
        numbers[j] = (uint16_t)best.number;
        if (distances)
            distances[j] = best.distance;
    }
}

static uint32_t number_of(const uint8_t *packed, uint32_t n_high, uint32_t key)
{
    uint32_t number = packed[(size_t)8 * n_high + key];
    for (uint32_t i = 0; i < n_high; i++) {
        const uint32_t bit = key * n_high + i;
        number |= (packed[bit / 8] >> (bit % 8) & 1u) << (8 + i);
    }
    return number;
}

static void score(const struct pq_table *table, const float *q, uint32_t n_queries, const void *tiles, uint32_t n_tiles,
                  float *scores, size_t stride)
{
    const uint32_t n_dims = table->n_dims, n_high = pq_bits(table->n_centroids) - 8;
    for (uint32_t i = 0; i < n_queries; i++)
        for (uint32_t j = 0; j < n_tiles * PQ_KEYS; j++)
            scores[i * stride + j] = 0;
    for (uint32_t s = 0; s < table->n_spaces; s++, q += n_dims) {
        float centroids[PQ_MAX_CENTROIDS * PQ_MAX_DIMS];
        const struct pq_space space = pq_table_space(table, s);
        for (size_t i = 0; i < (size_t)space.n_centroids * n_dims; i++)
            centroids[i] = half_decode(space.centroids[i]);
        for (uint32_t j = 0; j < n_tiles * PQ_KEYS; j++) {
            const uint8_t *packed =
                (const uint8_t *)tiles + j / PQ_KEYS * pq_tile_bytes(table) + s * pq_space_bytes(table->n_centroids);
            const float *centroid = centroids + (size_t)number_of(packed, n_high, j % PQ_KEYS) * n_dims;
            for (uint32_t i = 0; i < n_queries; i++)
                for (uint32_t d = 0; d < n_dims; d++)
                    scores[i * stride + j] =
                        fmaf(q[(size_t)i * table->head_dim + d], centroid[d], scores[i * stride + j]);
        }
    }
}

const struct pq_kernels codec_pq_plain = {.nearest = nearest, .score = score};
