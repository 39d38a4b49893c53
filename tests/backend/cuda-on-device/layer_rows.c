/* layer_rows.c - see layer.h: keys, values and queries that are made, in memory of the host. */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "tests/backend/cuda-on-device/layer.h"

/* ---- numbers ---- */

static uint64_t next(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return *state ^ *state >> 29;
}

/* Nearly normal, variance 1. */
static float normal(uint64_t *state)
{
    const uint64_t bits = next(state) >> 16;
    const float sum = (float)(bits & 0xffff) + (float)(bits >> 16 & 0xffff) + (float)(bits >> 32);
    return (sum - 98302.5f) * 3.0517578e-05f; /* three uniform numbers of 16 bits; 2 / 65536 */
}

static float key_variance(uint32_t i)
{
    return 1.0f / (1.0f + (float)i / 8.0f);
}

/* ---- the distinct blocks ---- */

static void make_block(void *context, uint32_t item, uint32_t thread)
{
    (void)thread;
    struct layer_rows *rows = context;
    const uint32_t block = item / LAYER_N_KV_HEADS, head = item % LAYER_N_KV_HEADS;
    uint64_t state = 0x9e3779b97f4a7c15u * (item + 1);
    float mean[LAYER_DIM], deviation[LAYER_DIM], k[LAYER_DIM], v[LAYER_DIM], sums[2 * LAYER_DIM];
    uint8_t *to = layer_rows_of(rows, block, head);
    for (uint32_t i = 0; i < LAYER_DIM; i++) {
        deviation[i] = sqrtf(key_variance(i));
        mean[i] = rows->constants[head * LAYER_DIM + i] + 0.5f * deviation[i] * normal(&state);
    }
    for (uint32_t t = 0; t < LAYER_TOKENS; t++) {
        for (uint32_t i = 0; i < LAYER_DIM; i++) {
            k[i] = mean[i] + deviation[i] * normal(&state);
            v[i] = normal(&state);
        }
        rows->kernels->encode_row(k, v, LAYER_DIM, KERNELS_ROWS_F16, to + t * LAYER_ROW_BYTES);
    }
    rows->kernels->block_sums(to, LAYER_TOKENS, LAYER_DIM, KERNELS_ROWS_F16, sums);
    memcpy(rows->sums + (size_t)item * LAYER_DIM, sums + LAYER_DIM, LAYER_DIM * sizeof(float));
}

/* ---- queries ---- */

static void make_queries(struct layer_rows *rows)
{
    uint64_t state = 12345;
    for (uint32_t i = 0; i < LAYER_N_KV_HEADS * LAYER_DIM; i++)
        rows->constants[i] = 2 * normal(&state);
    for (uint32_t n = 0; n < rows->size.n_queries * LAYER_N_KV_HEADS; n++) {
        float shared[LAYER_DIM], *q = rows->q + (size_t)n * LAYER_GROUP * LAYER_DIM;
        for (uint32_t i = 0; i < LAYER_DIM; i++)
            shared[i] = sqrtf(0.8f) * normal(&state);
        for (uint32_t g = 0; g < LAYER_GROUP; g++, q += LAYER_DIM) {
            double variance = 0;
            for (uint32_t i = 0; i < LAYER_DIM; i++) {
                q[i] = shared[i] + sqrtf(0.2f) * normal(&state);
                variance += 1.25 * (double)(q[i] * q[i] * key_variance(i));
            }
            const float factor = (float)(LAYER_DEVIATION / sqrt(variance)) / layer_scale();
            for (uint32_t i = 0; i < LAYER_DIM; i++)
                q[i] *= factor;
        }
    }
}

static void sum_up(void *context, uint32_t item, uint32_t thread)
{
    (void)thread;
    struct layer_rows *rows = context;
    const uint32_t query = item / LAYER_N_KV_HEADS, head = item % LAYER_N_KV_HEADS;
    const uint64_t all[LAYER_GROUP] = {~(uint64_t)0, ~(uint64_t)0, ~(uint64_t)0, ~(uint64_t)0};
    float partials[LAYER_GROUP * LAYER_WIDTH] = {0};
    for (uint32_t g = 0; g < LAYER_GROUP; g++)
        partials[g * LAYER_WIDTH] = -INFINITY;
    for (uint32_t b = 0; b < rows->size.n_distinct; b++)
        rows->kernels->attend_block(layer_q_of(rows, query, head), LAYER_GROUP, LAYER_DIM, KERNELS_ROWS_F16,
                                    layer_rows_of(rows, b, head), all, layer_scale(), partials);
    for (uint32_t g = 0; g < LAYER_GROUP; g++)
        rows->log_sums[item * LAYER_GROUP + g] =
            (double)partials[g * LAYER_WIDTH] + log((double)partials[g * LAYER_WIDTH + 1]);
}

/* ---- memory ---- */

/* Address space; pages are taken when they are written to. */
static void *reserve(size_t n_bytes)
{
    void *memory = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED)
        return NULL;
    (void)madvise(memory, n_bytes, MADV_HUGEPAGE); /* as stores ask for them */
    return memory;
}

struct layer_rows *layer_rows_free(struct layer_rows *rows)
{
    if (!rows)
        return NULL;
    if (rows->rows)
        munmap(rows->rows, rows->most_blocks * LAYER_BLOCK_BYTES);
    if (rows->sums)
        munmap(rows->sums, rows->most_blocks * LAYER_BLOCK_SUMS * sizeof(float));
    free(rows->q);
    free(rows->log_sums);
    free(rows->constants);
    free(rows);
    return NULL;
}

int layer_rows_new(const struct layer_size *size, uint32_t most_blocks, struct pool *pool,
                   const struct kernels *kernels, struct layer_rows **ret_rows)
{
    struct layer_rows *rows = calloc(1, sizeof *rows);
    if (!rows)
        return -ENOMEM;
    rows->size = *size;
    rows->kernels = kernels;
    rows->pool = pool;
    rows->most_blocks = most_blocks;
    rows->rows = reserve(most_blocks * LAYER_BLOCK_BYTES);
    rows->sums = reserve(most_blocks * LAYER_BLOCK_SUMS * sizeof(float));
    rows->q = calloc((size_t)size->n_queries * LAYER_N_HEADS * LAYER_DIM, sizeof(float));
    rows->log_sums = calloc((size_t)size->n_queries * LAYER_N_HEADS, sizeof(double));
    rows->constants = calloc(LAYER_N_KV_HEADS * LAYER_DIM, sizeof(float));
    if (!rows->rows || !rows->sums || !rows->q || !rows->log_sums || !rows->constants) {
        layer_rows_free(rows);
        return -ENOMEM;
    }
    make_queries(rows);
    pool_run(pool, size->n_distinct * LAYER_N_KV_HEADS, make_block, rows);
    pool_run(pool, size->n_queries * LAYER_N_KV_HEADS, sum_up, rows);
    rows->n_blocks = size->n_distinct;
    *ret_rows = rows;
    return 0;
}

/* ---- the context ---- */

static void restore(struct layer_rows *rows, uint32_t block)
{
    const uint32_t from = block % rows->size.n_distinct;
    memcpy(layer_rows_of(rows, block, 0), layer_rows_of(rows, from, 0), LAYER_BLOCK_BYTES);
    memcpy(rows->sums + (size_t)block * LAYER_BLOCK_SUMS, rows->sums + (size_t)from * LAYER_BLOCK_SUMS,
           LAYER_BLOCK_SUMS * sizeof(float));
}

static void extend_by_block(void *context, uint32_t item, uint32_t thread)
{
    (void)thread;
    struct layer_rows *rows = context;
    restore(rows, rows->n_blocks + item);
}

void layer_rows_extend(struct layer_rows *rows, uint32_t n_blocks)
{
    if (n_blocks <= rows->n_blocks)
        return;
    pool_run(rows->pool, n_blocks - rows->n_blocks, extend_by_block, rows);
    rows->n_blocks = n_blocks;
}

uint32_t layer_rows_peak_block(const struct layer_rows *rows, uint32_t n_blocks, uint32_t i)
{
    const uint32_t n = rows->size.n_queries * rows->size.n_peaks, n_distinct = rows->size.n_distinct;
    return n_distinct + (uint32_t)((uint64_t)(n_blocks - n_distinct) * (2 * i + 1) / (2 * n));
}

/* a [n][n] x = b, in place: b becomes x. Gauss with pivots on the diagonal, which a Gram matrix has. */
static void solve(double a[LAYER_GROUP][LAYER_GROUP], double b[LAYER_GROUP])
{
    for (uint32_t p = 0; p < LAYER_GROUP; p++)
        for (uint32_t i = 0; i < LAYER_GROUP; i++) {
            if (i == p)
                continue;
            const double factor = a[i][p] / a[p][p];
            for (uint32_t j = p; j < LAYER_GROUP; j++)
                a[i][j] -= factor * a[p][j];
            b[i] -= factor * b[p];
        }
    for (uint32_t i = 0; i < LAYER_GROUP; i++)
        b[i] /= a[i][i];
}

/* Moves a key to where query head g scores targets[g], by the shortest way. */
static void move_key(const float *q, const double *targets, float *k)
{
    double gram[LAYER_GROUP][LAYER_GROUP], missing[LAYER_GROUP];
    for (uint32_t g = 0; g < LAYER_GROUP; g++) {
        double score = 0;
        for (uint32_t i = 0; i < LAYER_DIM; i++)
            score += (double)(q[g * LAYER_DIM + i] * k[i]);
        missing[g] = targets[g] / (double)layer_scale() - score;
        for (uint32_t h = 0; h < LAYER_GROUP; h++) {
            gram[g][h] = 0;
            for (uint32_t i = 0; i < LAYER_DIM; i++)
                gram[g][h] += (double)(q[g * LAYER_DIM + i] * q[h * LAYER_DIM + i]);
        }
    }
    solve(gram, missing);
    for (uint32_t g = 0; g < LAYER_GROUP; g++)
        for (uint32_t i = 0; i < LAYER_DIM; i++)
            k[i] += (float)missing[g] * q[g * LAYER_DIM + i];
}

void layer_rows_put_peaks(struct layer_rows *rows, uint32_t n_blocks)
{
    const struct layer_size *size = &rows->size;
    double harmonic = 0;
    for (uint32_t rank = 1; rank <= size->n_peaks; rank++)
        harmonic += 1.0 / rank;
    for (uint32_t i = 0; i < size->n_queries * size->n_peaks; i++) {
        const uint32_t query = i % size->n_queries, rank = 1 + i / size->n_queries, token = i * 7 % LAYER_TOKENS;
        const uint32_t block = layer_rows_peak_block(rows, n_blocks, i);
        const double peak = log(LAYER_SHARE / (1 - LAYER_SHARE) / (rank * harmonic) * n_blocks / size->n_distinct);
        for (uint32_t head = 0; head < LAYER_N_KV_HEADS; head++) {
            uint8_t *row = layer_rows_of(rows, block, head) + token * LAYER_ROW_BYTES;
            float k[LAYER_DIM], v[LAYER_DIM];
            double targets[LAYER_GROUP];
            for (uint32_t g = 0; g < LAYER_GROUP; g++)
                targets[g] = rows->log_sums[(query * LAYER_N_KV_HEADS + head) * LAYER_GROUP + g] + peak;
            rows->kernels->f16_decode((const uint16_t *)(const void *)row, LAYER_DIM, k);
            rows->kernels->f16_decode((const uint16_t *)(const void *)(row + LAYER_ROW_BYTES / 2), LAYER_DIM, v);
            move_key(layer_q_of(rows, query, head), targets, k);
            rows->kernels->encode_row(k, v, LAYER_DIM, KERNELS_ROWS_F16, row);
        }
    }
}

void layer_rows_remove_peaks(struct layer_rows *rows, uint32_t n_blocks)
{
    for (uint32_t i = 0; i < rows->size.n_queries * rows->size.n_peaks; i++)
        restore(rows, layer_rows_peak_block(rows, n_blocks, i));
}
