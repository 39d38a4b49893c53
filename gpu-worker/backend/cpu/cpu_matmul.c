/*
 * cpu_matmul.c - products of a batch with one or several matrices, spread over the pool.
 *
 * Work is split over output rows and over tokens, never over columns, so the split cannot change a bit.
 */
#include "gpu-worker/backend/cpu/cpu_internal.h"

#include <assert.h>
#include <stdbool.h>

#include "common/pool.h"

#define ITEM_TOKENS      64u        /* inputs of an item stay in the second-level cache */
#define FLOAT_UNIT       4u         /* rows of a float matrix that are split as one */
#define SMALLEST_ITEM    (1u << 16) /* multiply-adds below which a split costs more than it gains */
#define ITEMS_PER_THREAD 4u
#define ITEMS_OF_STREAMS 2u /* for one or two tokens: long items, which keep several long streams from memory */

struct matmul {
    struct backend *backend;
    const struct weight *const *weights;
    float *const *y;
    const float *x;
    uint32_t n_weights;
    uint32_t first_token; /* of the chunk, in y */
    uint32_t n_tokens;
    uint32_t n_columns;
    uint32_t n_ranges; /* of units */
    uint64_t n_units;  /* tiles (packed) or groups of rows (float) of all weights */
};

static uint32_t units_of(const struct weight *weight)
{
    return weight->packed.data ? weight->packed.n_tiles : (weight->tensor.n_rows + FLOAT_UNIT - 1) / FLOAT_UNIT;
}

static void multiply(const struct matmul *matmul, uint32_t w, uint32_t first_unit, uint32_t n_units,
                     uint32_t first_token, uint32_t n_tokens)
{
    const struct weight *weight = matmul->weights[w];
    const struct cpu_kernels *ops = matmul->backend->ops;
    const uint32_t n_rows = weight->tensor.n_rows;
    float *y = matmul->y[w] + (size_t)(matmul->first_token + first_token) * n_rows;
    if (weight->packed.data) {
        ops->matmul_packed(&weight->packed, first_unit, n_units,
                           matmul->backend->activations + (size_t)first_token * weight->packed.n_blocks, n_tokens, y,
                           n_rows);
        return;
    }
    uint32_t first_row = first_unit * FLOAT_UNIT;
    uint32_t rows = n_rows - first_row < n_units * FLOAT_UNIT ? n_rows - first_row : n_units * FLOAT_UNIT;
    ops->matmul_float(weight->float_type, weight->float_data, matmul->n_columns, first_row, rows,
                      matmul->x + (size_t)first_token * matmul->n_columns, n_tokens, y, n_rows);
}

/* Item: one range of units of all weights in a row x one group of tokens. */
static void multiply_item(void *context, uint32_t item, uint32_t thread)
{
    (void)thread;
    const struct matmul *matmul = context;
    const uint32_t first_token = item / matmul->n_ranges * ITEM_TOKENS, range = item % matmul->n_ranges;
    const uint32_t left = matmul->n_tokens - first_token;
    const uint32_t n_tokens = left < ITEM_TOKENS ? left : ITEM_TOKENS;
    uint64_t from = matmul->n_units * range / matmul->n_ranges;
    const uint64_t to = matmul->n_units * (range + 1) / matmul->n_ranges;
    uint64_t base = 0;
    for (uint32_t w = 0; w < matmul->n_weights && from < to; w++) {
        const uint64_t end = base + units_of(matmul->weights[w]);
        if (from < end) {
            const uint64_t stop = to < end ? to : end;
            multiply(matmul, w, (uint32_t)(from - base), (uint32_t)(stop - from), first_token, n_tokens);
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

static void multiply_chunk(struct matmul *matmul, bool quantized, uint64_t n_products)
{
    struct pool *pool = matmul->backend->pool;
    const uint32_t n_threads = pool_n_threads(pool);
    if (quantized)
        pool_run(matmul->n_tokens < 4 ? NULL : pool, matmul->n_tokens, quantize_item, matmul);
    const uint32_t n_groups = (matmul->n_tokens + ITEM_TOKENS - 1) / ITEM_TOKENS;
    uint64_t n_ranges = n_products / SMALLEST_ITEM / n_groups;
    const uint32_t n_items = n_threads * (matmul->n_tokens <= 2 ? ITEMS_OF_STREAMS : ITEMS_PER_THREAD);
    const uint64_t enough = n_groups >= n_items ? 1 : (n_items + n_groups - 1) / n_groups;
    n_ranges = n_ranges < enough ? n_ranges : enough;
    n_ranges = n_ranges < matmul->n_units ? n_ranges : matmul->n_units;
    matmul->n_ranges = n_ranges ? (uint32_t)n_ranges : 1;
    pool_run(pool, n_groups * matmul->n_ranges, multiply_item, matmul);
}

void cpu_matmul(struct backend *backend, const struct weight *const *weights, uint32_t n_weights, const float *x,
                uint32_t n_tokens, float *const *y)
{
    struct matmul matmul = {
        .backend = backend,
        .weights = weights,
        .y = y,
        .n_weights = n_weights,
        .n_columns = n_weights ? weights[0]->tensor.n_columns : 0,
    };
    bool quantized = false;
    uint64_t n_rows = 0;
    for (uint32_t w = 0; w < n_weights; w++) {
        assert(weights[w]->tensor.n_columns == matmul.n_columns);
        quantized = quantized || weights[w]->packed.data;
        matmul.n_units += units_of(weights[w]);
        n_rows += weights[w]->tensor.n_rows;
    }
    for (uint32_t t = 0; t < n_tokens && n_weights; t += matmul.n_tokens) {
        matmul.first_token = t;
        matmul.n_tokens = n_tokens - t < CPU_CHUNK_TOKENS ? n_tokens - t : CPU_CHUNK_TOKENS;
        matmul.x = x + (size_t)t * matmul.n_columns;
        multiply_chunk(&matmul, quantized, n_rows * matmul.n_columns * matmul.n_tokens);
    }
}
