/*
 * test_lane.c - sums with given weights and whole lanes: against sums in double, and where bits are promised against the
 * kernels they are made of.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/lane.h"
#include "tests/unit/kernels/halves.h"

#define MAX_BLOCKS  12u
#define MAX_QUERIES 40u
#define MAX_PARTIAL KERNELS_PARTIAL_FLOATS(KERNELS_MAX_HEAD_DIM)
#define ALL         (~UINT64_C(0))

#ifdef HCATTN_SANITIZED
static const uint32_t head_dims[] = {2, 20, 64};
static const uint32_t query_counts[] = {1, 3, 9};
#else
static const uint32_t head_dims[] = {2, 8, 20, 64, 80, 96, 128, 256};
static const uint32_t query_counts[] = {1, 3, 7, 8, 9, 33};
#endif

static uint64_t state = 88172645463325252u;

static uint64_t random_bits(void)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state * 2685821657736338717u;
}

static float random_float(float limit)
{
    return ((float)(random_bits() >> 40) * 0x1p-23f - 1.0f) * limit;
}

static char blocks[MAX_BLOCKS][64 * 1024];
static float numbers[MAX_BLOCKS][64][2][KERNELS_MAX_HEAD_DIM]; /* as decoded */
static float v_sums[MAX_BLOCKS][KERNELS_MAX_HEAD_DIM];
static const void *rows[MAX_BLOCKS];
static const float *sums_of[MAX_BLOCKS];
static uint64_t masks[MAX_BLOCKS];
static float q[MAX_QUERIES * KERNELS_MAX_HEAD_DIM];
static float masses[MAX_QUERIES * (MAX_BLOCKS + 3)];
static float weights[MAX_QUERIES * (MAX_BLOCKS * 64 + 5)];
static float references[MAX_QUERIES];
static float partials[MAX_QUERIES * MAX_PARTIAL], other[MAX_QUERIES * MAX_PARTIAL];

/* What of a lane is there. */
struct options {
    bool tail, weights;
};

/* Rows, queries, masses, weights and references of every block and query; masks are the test's. */
static struct lane fill(uint32_t n_blocks, uint32_t n_queries, uint32_t head_dim, enum kernels_rows codec,
                        struct options options)
{
    const struct kernels *plain = kernels_get(KERNELS_ISA_PLAIN);
    const size_t n_bytes = kernels_row_bytes(head_dim, codec);
    for (uint32_t b = 0; b < n_blocks; b++) {
        for (uint32_t t = 0; t < 64; t++) {
            char *row = blocks[b] + t * n_bytes;
            float kv[2][KERNELS_MAX_HEAD_DIM];
            for (uint32_t d = 0; d < head_dim; d++) {
                kv[0][d] = random_float(2.0f);
                kv[1][d] = random_float(2.0f);
            }
            plain->encode_row(kv[0], kv[1], head_dim, codec, row);
            plain->decode_keys(row, 1, head_dim, codec, numbers[b][t][0]);
            plain->encode_row(kv[1], kv[0], head_dim, codec, (char *)partials); /* decode_keys is for keys alone */
            plain->decode_keys(partials, 1, head_dim, codec, numbers[b][t][1]);
        }
        float sums[2 * KERNELS_MAX_HEAD_DIM];
        plain->block_sums(blocks[b], 64, head_dim, codec, sums);
        memcpy(v_sums[b], sums + head_dim, head_dim * sizeof *sums);
        rows[b] = blocks[b];
        sums_of[b] = v_sums[b];
    }
    for (uint32_t i = 0; i < n_queries * head_dim; i++)
        q[i] = random_float(3.0f);
    for (size_t i = 0; i < sizeof masses / sizeof *masses; i++)
        masses[i] = 3.0f + random_float(3.0f);
    for (size_t i = 0; i < sizeof weights / sizeof *weights; i++)
        weights[i] = 1.0f + random_float(1.0f);
    for (uint32_t i = 0; i < n_queries; i++)
        references[i] = random_float(4.0f);
    return (struct lane){
        .n_queries = n_queries,
        .head_dim = head_dim,
        .n_blocks = n_blocks,
        .codec = codec,
        .q = options.weights ? NULL : q,
        .scale = 1.0f / sqrtf((float)head_dim),
        .rows = rows,
        .v_sums = options.tail ? sums_of : NULL,
        .masks = masks,
        .masses = options.tail ? masses : NULL,
        .masses_stride = MAX_BLOCKS + 3,
        .weights = options.weights ? weights : NULL,
        .weights_stride = MAX_BLOCKS * 64 + 5,
        .references = options.tail || options.weights ? references : NULL,
    };
}

/* (reference, sum, out) into one partial, in double. */
static void merge(double *partial, double reference, double sum, const double *out, uint32_t head_dim)
{
    if (sum == 0 || reference == -INFINITY)
        return;
    double max = fmax(partial[0], reference), before = exp(partial[0] - max), now = exp(reference - max);
    partial[0] = max;
    partial[1] = partial[1] * before + sum * now;
    for (uint32_t d = 0; d < head_dim; d++)
        partial[2 + d] = partial[2 + d] * before + out[d] * now;
}

/* One query of a lane, token by token. */
static void truth(const struct lane *lane, uint32_t query, double *partial)
{
    double total = 0, out[KERNELS_MAX_HEAD_DIM] = {0};
    uint32_t nth = 0;
    memset(partial, 0, MAX_PARTIAL * sizeof *partial);
    partial[0] = -INFINITY;
    for (uint32_t b = 0; b < lane->n_blocks; b++) {
        for (uint32_t t = 0; t < 64; t++) {
            double v[KERNELS_MAX_HEAD_DIM], score = 0;
            if (!(lane->masks[b] >> t & 1))
                continue;
            for (uint32_t d = 0; d < lane->head_dim; d++)
                v[d] = (double)numbers[b][t][1][d];
            if (lane->weights) {
                double weight = (double)lane->weights[query * lane->weights_stride + nth++];
                total += weight;
                for (uint32_t d = 0; d < lane->head_dim; d++)
                    out[d] += weight * v[d];
            } else {
                for (uint32_t d = 0; d < lane->head_dim; d++)
                    score += (double)lane->q[query * lane->head_dim + d] * (double)numbers[b][t][0][d];
                merge(partial, score * (double)lane->scale, 1, v, lane->head_dim);
            }
        }
    }
    if (lane->weights)
        merge(partial, (double)lane->references[query], total, out, lane->head_dim);
    if (!lane->masses)
        return;
    total = 0;
    memset(out, 0, sizeof out);
    for (uint32_t b = 0; b < lane->n_blocks; b++) {
        double mass = (double)lane->masses[query * lane->masses_stride + b];
        total += mass;
        for (uint32_t d = 0; d < lane->head_dim && mass != 0; d++)
            out[d] += mass * (double)lane->v_sums[b][d] / 64;
    }
    merge(partial, (double)lane->references[query], total, out, lane->head_dim);
}

/* Values are up to 2 in size, weights positive: out is off by a small share of 2 x sum. */
static void check(const char *what, const struct kernels *table, const struct lane *lane)
{
    for (uint32_t i = 0; i < lane->n_queries; i++) {
        const float *got = partials + i * KERNELS_PARTIAL_FLOATS(lane->head_dim);
        double want[MAX_PARTIAL];
        truth(lane, i, want);
        bool good = want[0] == -INFINITY
                        ? got[0] == -INFINITY && got[1] == 0
                        : fabs((double)got[0] - want[0]) <= 1e-5 && fabs((double)got[1] - want[1]) <= 3e-5 * want[1];
        for (uint32_t d = 0; d < lane->head_dim; d++)
            good = good && fabs((double)got[2 + d] - want[2 + d]) <= 6e-5 * want[1];
        if (!good)
            fail_msg("%s, %s: codec %d head_dim %u query %u of %u: max %.9g (%.9g) sum %.9g (%.9g) out %.9g (%.9g)",
                     what, table->name, (int)lane->codec, lane->head_dim, i, lane->n_queries, (double)got[0], want[0],
                     (double)got[1], want[1], (double)got[2], want[2]);
    }
}

static const struct {
    const char *name;
    uint32_t n_blocks;
    uint64_t masks[MAX_BLOCKS]; /* only the first is set: all blocks have it */
} mask_sets[] = {
    {"nothing", 5, {0}},
    {"no blocks", 0, {0}},
    {"one row", 7, {0, 0, 0, UINT64_C(1) << 63, 0}},
    {"one row of one block", 1, {1}},
    {"everything", 4, {ALL}},
    {"around the dense rule",
     6,
     {0x7fffffff, 0xffffffff, 0x1ffffffff, UINT64_C(0x7fffffff) << 33, 0, 0xffffffff00000000}},
    {"few rows everywhere", 12, {UINT64_C(0x0001000800040010)}},
    {"31 rows everywhere", 12, {UINT64_C(0x5555555555555554)}}, /* more than two batches wait at once */
    {"exactly two batches", 8, {UINT64_C(0x00ff00ff)}},
    {"mixed",
     12,
     {0x11, ALL, 0, 0x8000000000000001, 0xfffff, 0x7fffffffffffffff, 0x3, 0, 0xff00ff00ff00ff, 0x10, ALL, 0x5}},
};
#define N_MASK_SETS (sizeof mask_sets / sizeof *mask_sets)

static void set_masks(size_t set)
{
    bool only_first = true;
    for (uint32_t b = 1; b < MAX_BLOCKS; b++)
        only_first = only_first && mask_sets[set].masks[b] == 0;
    for (uint32_t b = 0; b < MAX_BLOCKS; b++)
        masks[b] = mask_sets[set].masks[only_first ? 0 : b];
}

static void lanes_are_near_the_truth(void **unused)
{
    (void)unused;
    static const struct options options[] = {{.tail = false}, {.tail = true}, {.weights = true}, {true, true}};
    for (size_t h = 0; h < sizeof head_dims / sizeof *head_dims; h++) {
        for (size_t n = 0; n < sizeof query_counts / sizeof *query_counts; n++) {
            for (size_t set = 0; set < N_MASK_SETS; set++) {
                for (int variant = 0; variant < 8; variant++) {
                    struct lane lane = fill(mask_sets[set].n_blocks, query_counts[n], head_dims[h],
                                            variant / 4 ? KERNELS_ROWS_Q8_0 : KERNELS_ROWS_F16, options[variant % 4]);
                    set_masks(set);
                    for (const struct kernels *const *table = halves_tables(); *table; table++) {
                        memset(partials, 0xff, sizeof partials);
                        lane_attend(*table, &lane, partials);
                        check(mask_sets[set].name, *table, &lane);
                        /* nothing is written past the end */
                        const float *end = partials + lane.n_queries * KERNELS_PARTIAL_FLOATS(lane.head_dim);
                        assert_true(end == partials + sizeof partials / sizeof *partials || isnan(*end));
                    }
                }
            }
        }
    }
}

/* The dense rule makes a lane of which everything is read the same bits as attending block by block. */
static void everything_is_block_by_block(void **unused)
{
    (void)unused;
    for (int c = KERNELS_ROWS_F16; c <= KERNELS_ROWS_Q8_0; c++) {
        for (size_t h = 0; h < sizeof head_dims / sizeof *head_dims; h++) {
            const uint32_t head_dim = head_dims[h], n_queries = MAX_QUERIES, n_blocks = 6;
            struct lane lane = fill(n_blocks, n_queries, head_dim, (enum kernels_rows)c, (struct options){0});
            const size_t width = KERNELS_PARTIAL_FLOATS(head_dim);
            for (uint32_t b = 0; b < n_blocks; b++)
                masks[b] = b == 3 ? ALL << 32 : ALL; /* 32 are dense, too */
            for (const struct kernels *const *table = halves_tables(); *table; table++) {
                memset(other, 0, sizeof other);
                for (uint32_t i = 0; i < n_queries; i++)
                    other[i * width] = -INFINITY;
                for (uint32_t b = 0; b < n_blocks; b++) {
                    uint64_t each[MAX_QUERIES];
                    for (uint32_t i = 0; i < n_queries; i++)
                        each[i] = masks[b];
                    (*table)->attend_block(q, n_queries, head_dim, lane.codec, blocks[b], each, lane.scale, other);
                }
                lane_attend(*table, &lane, partials);
                assert_memory_equal(partials, other, n_queries * width * sizeof *other);
            }
        }
    }
}

static void queries_do_not_know_of_each_other(void **unused)
{
    (void)unused;
    for (int variant = 0; variant < 4; variant++) {
        const uint32_t head_dim = 64, n_queries = 11;
        const size_t width = KERNELS_PARTIAL_FLOATS(head_dim);
        struct lane lane = fill(12, n_queries, head_dim, variant / 2 ? KERNELS_ROWS_Q8_0 : KERNELS_ROWS_F16,
                                (struct options){.tail = true, .weights = variant % 2});
        set_masks(N_MASK_SETS - 1);
        for (const struct kernels *const *table = halves_tables(); *table; table++) {
            lane_attend(*table, &lane, partials);
            for (uint32_t i = 0; i < n_queries; i++) {
                struct lane alone = lane;
                alone.n_queries = 1;
                alone.q = lane.q ? lane.q + i * head_dim : NULL;
                alone.masses = lane.masses + i * lane.masses_stride;
                alone.weights = lane.weights ? lane.weights + i * lane.weights_stride : NULL;
                alone.references = lane.references + i;
                lane_attend(*table, &alone, other);
                assert_memory_equal(other, partials + i * width, width * sizeof *other);
            }
        }
    }
}

/* Masses of 0 and references of -infinity add nothing, not even the bits of what a block holds. */
static void nothing_of_nothing(void **unused)
{
    (void)unused;
    const uint32_t head_dim = 20, n_queries = 3, n_blocks = 5;
    const size_t width = KERNELS_PARTIAL_FLOATS(head_dim);
    for (const struct kernels *const *table = halves_tables(); *table; table++) {
        struct lane lane = fill(n_blocks, n_queries, head_dim, KERNELS_ROWS_F16, (struct options){.tail = true});
        for (uint32_t b = 0; b < n_blocks; b++) {
            masks[b] = b == 2 ? 0xf0 : 0;
            for (uint32_t i = 0; i < n_queries; i++)
                masses[i * lane.masses_stride + b] = b == 1 && i == 1 ? 2.0f : 0.0f;
        }
        references[0] = -INFINITY;
        v_sums[3][4] = INFINITY; /* of a block without mass */
        lane_attend(*table, &lane, partials);
        check("masses of 0", *table, &lane);
        struct lane bare = lane;
        bare.masses = NULL;
        bare.v_sums = NULL;
        bare.references = NULL;
        lane_attend(*table, &bare, other);
        assert_memory_equal(partials, other, width * sizeof *other);
        assert_memory_not_equal(partials + width, other + width, width * sizeof *other);
        assert_memory_equal(partials + 2 * width, other + 2 * width, width * sizeof *other);

        lane = fill(n_blocks, n_queries, head_dim, KERNELS_ROWS_F16, (struct options){true, true});
        for (uint32_t b = 0; b < n_blocks; b++)
            masks[b] = 0x3;
        memset(weights, 0, sizeof weights);
        for (uint32_t i = 0; i < n_queries * lane.masses_stride; i++)
            masses[i] = i / lane.masses_stride == 1 ? masses[i] : 0.0f;
        references[2] = -INFINITY;
        weights[2 * lane.weights_stride] = 1.0f; /* no such query can have a weight: it adds nothing */
        lane_attend(*table, &lane, partials);
        check("weights of 0", *table, &lane);
        for (uint32_t i = 0; i < n_queries; i += 2) {
            assert_true(partials[i * width] == -INFINITY);
            for (uint32_t d = 1; d < width; d++)
                assert_true(partials[i * width + d] == 0);
        }
        assert_true(partials[width] == references[1]);
    }
}

/* The sums alone: added to what is there, in the order of rows, whatever the split into calls. */
static void weighed_sums_continue(void **unused)
{
    (void)unused;
    const uint32_t n_queries = 9, n_rows = 70;
    for (int c = KERNELS_ROWS_F16; c <= KERNELS_ROWS_Q8_0; c++) {
        for (size_t h = 0; h < sizeof head_dims / sizeof *head_dims; h++) {
            const uint32_t head_dim = head_dims[h], width = 1 + head_dim;
            const enum kernels_rows codec = (enum kernels_rows)c;
            struct lane lane = fill(2, n_queries, head_dim, codec, (struct options){true, true});
            const void *pointers[70];
            for (uint32_t t = 0; t < n_rows; t++)
                pointers[t] = blocks[t % 2] + (t * 29 % 64) * kernels_row_bytes(head_dim, codec);
            for (const struct kernels *const *table = halves_tables(); *table; table++) {
                for (uint32_t i = 0; i < n_queries * width; i++)
                    partials[i] = other[i] = 0.25f;
                partials[n_queries * width] = 99.0f;
                (*table)->weigh_rows(n_queries, head_dim, codec, pointers, n_rows, weights, lane.weights_stride,
                                     partials);
                for (uint32_t t = 0, n = 1; t < n_rows; t += n, n = n_rows - t < 7 ? n_rows - t : 7)
                    for (uint32_t i = 0; i < n_queries; i += 3)
                        (*table)->weigh_rows(3, head_dim, codec, pointers + t, n, weights + i * lane.weights_stride + t,
                                             lane.weights_stride, other + i * width);
                assert_memory_equal(partials, other, n_queries * width * sizeof *other);
                assert_true(partials[n_queries * width] == 99.0f);
                for (uint32_t i = 0; i < n_queries; i++) {
                    double sum = 0.25, out = 0.25;
                    for (uint32_t t = 0; t < n_rows; t++) {
                        double weight = (double)weights[i * lane.weights_stride + t];
                        sum += weight;
                        out += weight * (double)numbers[t % 2][t * 29 % 64][1][head_dim - 1];
                    }
                    assert_true(fabs((double)partials[i * width] - sum) <= 1e-5 * sum);
                    assert_true(fabs((double)partials[i * width + head_dim] - out) <= 2e-5 * sum);
                }

                for (uint32_t i = 0; i < n_queries * width; i++)
                    partials[i] = 0.5f;
                (*table)->weigh_mean(n_queries, head_dim, v_sums[1], masses, lane.masses_stride, partials);
                assert_true(partials[n_queries * width] == 99.0f);
                for (uint32_t i = 0; i < n_queries; i++) {
                    const float mass = masses[i * lane.masses_stride];
                    assert_true(partials[i * width] == 0.5f + mass);
                    for (uint32_t d = 0; d < head_dim; d++) {
                        double out = 0.5 + (double)mass * (double)v_sums[1][d] / 64;
                        assert_true(fabs((double)partials[i * width + 1 + d] - out) <= 1e-5);
                    }
                }
            }
        }
    }
}

int main(void)
{
    kernels_thread_setup();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lanes_are_near_the_truth),
        cmocka_unit_test(everything_is_block_by_block),
        cmocka_unit_test(queries_do_not_know_of_each_other),
        cmocka_unit_test(nothing_of_nothing),
        cmocka_unit_test(weighed_sums_continue),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
