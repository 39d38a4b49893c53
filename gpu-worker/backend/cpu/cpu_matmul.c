/*
 * cpu_matmul.c - products of a batch with one or several matrices, spread over the pool.
 *
 * Work is split over output rows and over tokens, never over columns, so the split cannot change a bit. Rows that lie on a
 * node are work of that node's threads alone; they share it among themselves as it comes.
 */
#include "gpu-worker/backend/cpu/cpu_internal.h"

#include <assert.h>
#include <stdbool.h>

#include "common/pool.h"

#define ITEM_TOKENS      64u        /* inputs of an item stay in the second-level cache */
#define SMALLEST_ITEM    (1u << 16) /* multiply-adds below which a split costs more than it gains */
#define ITEMS_PER_THREAD 4u
#define ITEMS_OF_STREAMS 2u /* for one or two tokens: long items, which keep several long streams from memory */

/* Part i of all matrices. */
struct share {
    uint32_t first_item;
    uint32_t n_ranges; /* of units */
    uint64_t n_units;  /* tiles (packed) or groups of rows (float) */
    uint64_t n_rows;
};

struct matmul {
    struct backend *backend;
    const struct weight *const *weights;
    float *const *y;
    const float *x;
    uint32_t n_weights;
    uint32_t first_token; /* of the chunk, in y */
    uint32_t n_tokens;
    uint32_t n_columns;
    uint32_t n_shares;
    struct share shares[TOPOLOGY_MAX_NODES];
};

static uint32_t units_of(const struct weight *weight, uint32_t share)
{
    if (share >= weight->n_parts)
        return 0;
    const struct cpu_part *part = &weight->parts[share];
    return weight->is_packed ? part->packed.n_tiles : (part->n_rows + CPU_FLOAT_UNIT - 1) / CPU_FLOAT_UNIT;
}

static void multiply(const struct matmul *matmul, uint32_t w, uint32_t share, uint32_t first_unit, uint32_t n_units,
                     uint32_t first_token, uint32_t n_tokens)
{
    const struct weight *weight = matmul->weights[w];
    const struct cpu_part *part = &weight->parts[share];
    const struct cpu_kernels *ops = matmul->backend->ops;
    const uint32_t n_rows = weight->tensor.n_rows;
    float *y = matmul->y[w] + (size_t)(matmul->first_token + first_token) * n_rows + part->first_row;
    if (weight->is_packed) {
        ops->matmul_packed(&part->packed, first_unit, n_units,
                           matmul->backend->activations + (size_t)first_token * part->packed.n_blocks, n_tokens, y,
                           n_rows);
        return;
    }
    uint32_t first_row = first_unit * CPU_FLOAT_UNIT, left = part->n_rows - first_row;
    ops->matmul_float(weight->float_type, part->rows, matmul->n_columns, first_row,
                      left < n_units * CPU_FLOAT_UNIT ? left : n_units * CPU_FLOAT_UNIT,
                      matmul->x + (size_t)first_token * matmul->n_columns, n_tokens, y, n_rows);
}

/* Item: one range of units of a share of all weights in a row x one group of tokens. */
static void multiply_item(void *context, uint32_t item, uint32_t thread)
{
    (void)thread;
    const struct matmul *matmul = context;
    uint32_t s = 0;
    while (s + 1 < matmul->n_shares && item >= matmul->shares[s + 1].first_item)
        s++;
    const struct share *share = &matmul->shares[s];
    item -= share->first_item;
    const uint32_t first_token = item / share->n_ranges * ITEM_TOKENS, range = item % share->n_ranges;
    const uint32_t left = matmul->n_tokens - first_token;
    const uint32_t n_tokens = left < ITEM_TOKENS ? left : ITEM_TOKENS;
    uint64_t from = share->n_units * range / share->n_ranges;
    const uint64_t to = share->n_units * (range + 1) / share->n_ranges;
    uint64_t base = 0;
    for (uint32_t w = 0; w < matmul->n_weights && from < to; w++) {
        const uint64_t end = base + units_of(matmul->weights[w], s);
        if (from < end) {
            const uint64_t stop = to < end ? to : end;
            multiply(matmul, w, s, (uint32_t)(from - base), (uint32_t)(stop - from), first_token, n_tokens);
            from = stop;
        }
        base = end;
    }
}

static void quantize_item(void *context, uint32_t item, uint32_t thread)
{
    (void)thread;
    const struct matmul *matmul = context;
    const uint32_t n_blocks = matmul->n_columns / CPU_BLOCK;
    matmul->backend->ops->quantize(matmul->x + (size_t)item * matmul->n_columns, matmul->n_columns,
                                   matmul->backend->activations + (size_t)item * n_blocks);
}

/* Into how many ranges of units for n_threads. */
static uint32_t ranges_of(const struct matmul *matmul, const struct share *share, uint32_t n_threads, uint32_t n_groups)
{
    const uint64_t n_products = share->n_rows * matmul->n_columns * matmul->n_tokens;
    const uint32_t n_items = n_threads * (matmul->n_tokens <= 2 ? ITEMS_OF_STREAMS : ITEMS_PER_THREAD);
    const uint64_t enough = n_groups >= n_items ? 1 : (n_items + n_groups - 1) / n_groups;
    uint64_t n_ranges = n_products / SMALLEST_ITEM / n_groups;
    n_ranges = n_ranges < enough ? n_ranges : enough;
    n_ranges = n_ranges < share->n_units ? n_ranges : share->n_units;
    return n_ranges ? (uint32_t)n_ranges : 1;
}

static void multiply_chunk(struct matmul *matmul, bool quantized)
{
    struct pool *pool = matmul->backend->pool;
    const struct nodes *nodes = matmul->backend->nodes;
    if (quantized)
        pool_run(matmul->n_tokens < 4 ? NULL : pool, matmul->n_tokens, quantize_item, matmul);
    const uint32_t n_groups = (matmul->n_tokens + ITEM_TOKENS - 1) / ITEM_TOKENS;
    uint32_t n_items[TOPOLOGY_MAX_NODES], n_all = 0;
    for (uint32_t s = 0; s < matmul->n_shares; s++) {
        struct share *share = &matmul->shares[s];
        share->first_item = n_all;
        share->n_ranges = ranges_of(matmul, share, nodes ? nodes->nodes[s].n_threads : pool_n_threads(pool), n_groups);
        n_items[s] = share->n_units ? n_groups * share->n_ranges : 0;
        n_all += n_items[s];
    }
    pool_run_grouped(pool, n_items, multiply_item, matmul);
}

void cpu_matmul(struct backend *backend, const struct weight *const *weights, uint32_t n_weights, const float *x,
                uint32_t n_tokens, float *const *y)
{
    struct matmul matmul;
    matmul.backend = backend;
    matmul.weights = weights;
    matmul.y = y;
    matmul.n_weights = n_weights;
    matmul.n_columns = n_weights ? weights[0]->tensor.n_columns : 0;
    matmul.n_shares = backend->n_nodes;
    bool quantized = false;
    for (uint32_t w = 0; w < n_weights; w++) {
        assert(weights[w]->tensor.n_columns == matmul.n_columns);
        quantized = quantized || weights[w]->is_packed;
    }
    for (uint32_t s = 0; s < matmul.n_shares; s++) {
        struct share *share = &matmul.shares[s];
        *share = (struct share){0};
        for (uint32_t w = 0; w < n_weights; w++) {
            share->n_units += units_of(weights[w], s);
            share->n_rows += s < weights[w]->n_parts ? weights[w]->parts[s].n_rows : 0;
        }
    }
    for (uint32_t t = 0; t < n_tokens && n_weights; t += matmul.n_tokens) {
        matmul.first_token = t;
        matmul.n_tokens = n_tokens - t < CPU_CHUNK_TOKENS ? n_tokens - t : CPU_CHUNK_TOKENS;
        matmul.x = x + (size_t)t * matmul.n_columns;
        multiply_chunk(&matmul, quantized);
    }
}
