/*
 * codec_pq_table.c - tables of product-quantized keys: centroids sorted into the leaves of a k-d tree, with their boxes.
 *
 * Threads    any.
 * Invariant  what lies in which leaf follows from the values and, of equal ones, from their numbers alone; inside a leaf the
 *            order is that of the codebook.
 */
#include "gpu-worker/keys/codec_pq.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "gpu-worker/keys/key_codebook.h"
#include "kernels/half.h"

struct sort {
    uint32_t n_dims;
    const float *centroids;
    uint16_t *order;
    uint64_t *keys; /* for work */
};

static uint32_t widest(const struct sort *sort, uint32_t begin, uint32_t end)
{
    uint32_t best = 0;
    float width = -1;
    for (uint32_t i = 0; i < sort->n_dims; i++) {
        float low = INFINITY, high = -INFINITY;
        for (uint32_t at = begin; at < end; at++) {
            const float x = sort->centroids[(size_t)sort->order[at] * sort->n_dims + i];
            low = x < low ? x : low;
            high = x > high ? x : high;
        }
        if (high - low > width) {
            width = high - low;
            best = i;
        }
    }
    return best;
}

/* Sorts as the number, and of equal ones as the number of the centroid. */
static uint64_t key_of(float x, uint16_t number)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    bits ^= bits >> 31 ? UINT32_MAX : 0x80000000u;
    return (uint64_t)bits << 32 | number;
}

/* The `middle` lowest of n come first (quickselect; no two are equal). */
static void split(uint64_t *keys, uint32_t n, uint32_t middle)
{
    while (n > 1) {
        const uint64_t pivot = keys[n / 2];
        uint32_t n_below = 0;
        keys[n / 2] = keys[n - 1];
        for (uint32_t i = 0; i + 1 < n; i++) {
            const uint64_t key = keys[i];
            keys[i] = keys[n_below];
            keys[n_below] = key;
            n_below += key < pivot;
        }
        keys[n - 1] = keys[n_below];
        keys[n_below] = pivot;
        if (middle == n_below)
            return;
        if (middle < n_below) {
            n = n_below;
        } else {
            keys += n_below + 1;
            n -= n_below + 1;
            middle -= n_below + 1;
        }
    }
}

static int by_number(const void *a, const void *b)
{
    return *(const uint16_t *)a - *(const uint16_t *)b;
}

static void cut(const struct sort *sort, uint32_t begin, uint32_t end, uint32_t leaf)
{
    uint16_t *order = sort->order + begin;
    const uint32_t n = end - begin;
    if (n == leaf) {
        qsort(order, leaf, sizeof *order, by_number);
        return;
    }
    const uint32_t dim = widest(sort, begin, end);
    for (uint32_t i = 0; i < n; i++)
        sort->keys[i] = key_of(sort->centroids[(size_t)order[i] * sort->n_dims + dim], order[i]);
    split(sort->keys, n, n / 2);
    for (uint32_t i = 0; i < n; i++)
        order[i] = (uint16_t)sort->keys[i];
    cut(sort, begin, begin + n / 2, leaf);
    cut(sort, begin + n / 2, end, leaf);
}

void codec_pq_sort(uint32_t n_dims, uint32_t n_centroids, const float *centroids, uint16_t *order)
{
    uint64_t keys[PQ_MAX_CENTROIDS];
    const struct sort sort = {n_dims, centroids, order, keys};
    for (uint32_t i = 0; i < n_centroids; i++)
        order[i] = (uint16_t)i;
    cut(&sort, 0, n_centroids, pq_leaf(n_centroids));
}

void codec_pq_fill(uint32_t n_dims, uint32_t n_centroids, const float *centroids, const uint16_t *order,
                   uint16_t *halves, float *boxes)
{
    const uint32_t leaf = pq_leaf(n_centroids), n_leaves = pq_n_leaves(n_centroids);
    for (uint32_t l = 0; l < n_leaves; l++)
        for (uint32_t d = 0; d < n_dims; d++) {
            float low = INFINITY, high = -INFINITY;
            for (uint32_t i = l * leaf; i < (l + 1) * leaf; i++) {
                const uint16_t half =
                    half_encode(codec_pq_cleaned(centroids[(size_t)order[i] * n_dims + d], PQ_KEY_LARGEST));
                const float x = half_decode(half);
                halves[(size_t)i * n_dims + d] = half;
                low = x < low ? x : low;
                high = x > high ? x : high;
            }
            boxes[(size_t)d * 2 * n_leaves + l] = low;
            boxes[(size_t)d * 2 * n_leaves + n_leaves + l] = high;
        }
}

int codec_pq_table_new(const struct key_codebook *codebook, uint32_t layer, uint32_t kv_head,
                       struct pq_table **ret_table)
{
    const uint32_t n_dims = codebook->n_dims, n_centroids = codebook->n_centroids;
    const uint32_t n_spaces = codebook->head_dim / n_dims;
    const size_t centroid_bytes = (size_t)n_spaces * n_centroids * n_dims * sizeof(uint16_t); /* a multiple of 64 */
    const size_t box_bytes = n_spaces * pq_box_floats(n_dims, n_centroids) * sizeof(float);
    struct pq_table *table = malloc(sizeof *table);
    void *memory = aligned_alloc(64, centroid_bytes + box_bytes);
    if (table == NULL || memory == NULL) {
        free(table);
        free(memory);
        return -ENOMEM;
    }
    *table = (struct pq_table){.head_dim = codebook->head_dim,
                               .n_dims = n_dims,
                               .n_centroids = n_centroids,
                               .n_spaces = n_spaces,
                               .n_bytes = centroid_bytes + box_bytes,
                               .centroids = memory,
                               .boxes = (float *)(void *)((uint8_t *)memory + centroid_bytes)};
    const float *centroids = key_codebook_head(codebook, layer, kv_head);
    for (uint32_t s = 0; s < n_spaces; s++) {
        uint16_t order[PQ_MAX_CENTROIDS];
        const struct pq_space space = pq_table_space(table, s);
        codec_pq_sort(n_dims, n_centroids, centroids, order);
        codec_pq_fill(n_dims, n_centroids, centroids, order, (uint16_t *)(uintptr_t)space.centroids,
                      (float *)(uintptr_t)space.boxes);
        centroids += (size_t)n_centroids * n_dims;
    }
    *ret_table = table;
    return 0;
}

struct pq_table *codec_pq_table_free(struct pq_table *table)
{
    if (table != NULL)
        free(table->centroids);
    free(table);
    return NULL;
}
