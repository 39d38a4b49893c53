/*
 * test_attend.c - attention partials of every table and row codec against sums in double, and the promise that a query's
 * bits do not depend on what else is in the call.
 */
#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <cmocka.h>

#include "tests/unit/kernels/halves.h"

#define MAX_QUERIES 192u
#define MAX_PARTIAL KERNELS_PARTIAL_FLOATS(KERNELS_MAX_HEAD_DIM)

#ifdef HCATTN_SANITIZED /* memory is what these builds look at; all of it takes them minutes */
static const uint32_t head_dims[] = {1, 20, 64, 72};
static const uint32_t query_counts[] = {1, 3, 9, 25};
#else
static const uint32_t head_dims[] = {1, 2, 7, 8, 16, 20, 31, 64, 72, 80, 96, 128, 200, 255, 256};
static const uint32_t query_counts[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 24, 25, 28, 192};
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

static float q[MAX_QUERIES * KERNELS_MAX_HEAD_DIM];
static enum kernels_rows codec; /* of the test that runs */
static uint16_t rows[KERNELS_BLOCK_TOKENS * 2 * KERNELS_MAX_HEAD_DIM];
static uint64_t masks[MAX_QUERIES];
static float partials[MAX_QUERIES * MAX_PARTIAL];
static float other[MAX_QUERIES * MAX_PARTIAL];

static void fill(uint32_t n_queries, uint32_t head_dim)
{
    const struct kernels *plain = kernels_get(KERNELS_ISA_PLAIN);
    for (size_t i = 0; i < (size_t)n_queries * head_dim; i++)
        q[i] = random_float(3.0f);
    for (uint32_t t = 0; t < KERNELS_BLOCK_TOKENS; t++) {
        float k[KERNELS_MAX_HEAD_DIM], v[KERNELS_MAX_HEAD_DIM];
        for (uint32_t d = 0; d < head_dim; d++) {
            k[d] = random_float(2.0f);
            v[d] = random_float(2.0f);
        }
        plain->encode_row(k, v, head_dim, codec, (char *)rows + t * kernels_row_bytes(head_dim, codec));
    }
}

static void empty(float *into, uint32_t n_queries, uint32_t head_dim)
{
    memset(into, 0, (size_t)n_queries * KERNELS_PARTIAL_FLOATS(head_dim) * sizeof(float));
    for (uint32_t i = 0; i < n_queries; i++)
        into[(size_t)i * KERNELS_PARTIAL_FLOATS(head_dim)] = -INFINITY;
}

static uint64_t mask_of_kind(int kind, uint32_t query)
{
    switch (kind) {
    case 0:
        return 0;
    case 1:
        return UINT64_C(1) << (query * 37 % 64);
    case 2:
        return ~UINT64_C(0);
    case 3:
        return UINT64_C(0x00ff000000001009);
    case 4: /* causal */
        return ~UINT64_C(0) >> (63 - query / 3 % 64);
    default:
        return random_bits() & random_bits();
    }
}

static double half_to_double(const void *at)
{
    _Float16 half;
    memcpy(&half, at, sizeof half);
    return (double)half;
}

/* Element d of K (part 0) or V (part 1) of row t, by the words of the format. */
static double number_at(uint32_t head_dim, uint32_t t, uint32_t part, uint32_t d)
{
    const char *row = (const char *)rows + t * kernels_row_bytes(head_dim, codec);
    if (codec == KERNELS_ROWS_F16)
        return half_to_double(row + 2 * (part * head_dim + d));
    const uint32_t n_groups = (head_dim + 31) / 32;
    return half_to_double(row + 2 * head_dim + 2 * (part * n_groups + d / 32)) * (signed char)row[part * head_dim + d];
}

/* One query in double. Returns the scale of the scores' rounding errors: scale x sum |q k|. */
static double truth(const float *query, uint32_t head_dim, uint64_t mask, float scale, double *max, double *sum,
                    double *out, double *out_size)
{
    double scores[64], size = 0;
    *max = -INFINITY;
    *sum = 0;
    for (uint32_t d = 0; d < head_dim; d++)
        out[d] = out_size[d] = 0;
    for (uint32_t t = 0; t < 64; t++) {
        if (!(mask >> t & 1))
            continue;
        double score = 0, score_size = 0;
        for (uint32_t d = 0; d < head_dim; d++) {
            double product = (double)query[d] * number_at(head_dim, t, 0, d);
            score += product;
            score_size += fabs(product);
        }
        scores[t] = score * (double)scale;
        size = fmax(size, score_size * (double)scale);
        *max = fmax(*max, scores[t]);
    }
    for (uint32_t t = 0; t < 64; t++) {
        if (!(mask >> t & 1))
            continue;
        double weight = exp(scores[t] - *max);
        *sum += weight;
        for (uint32_t d = 0; d < head_dim; d++) {
            double product = weight * number_at(head_dim, t, 1, d);
            out[d] += product;
            out_size[d] += fabs(product);
        }
    }
    return size;
}

/* Bounds: a score is off by at most 1e-6 of sum |q k| x scale; sums relatively by twice that and 1e-5. */
static void check_query(const char *name, const float *partial, const float *query, uint32_t head_dim, uint64_t mask,
                        float scale)
{
    double max, sum, out[KERNELS_MAX_HEAD_DIM], out_size[KERNELS_MAX_HEAD_DIM];
    double size = truth(query, head_dim, mask, scale, &max, &sum, out, out_size);
    if (!mask) {
        assert_true(partial[0] == -INFINITY && partial[1] == 0);
        return;
    }
    double score_error = 1e-6 * size + 1e-7;
    double relative = 2 * score_error + 1e-5;
    int good = fabs((double)partial[0] - max) <= score_error && fabs((double)partial[1] - sum) <= relative * sum;
    for (uint32_t d = 0; d < head_dim; d++)
        good = good && fabs((double)partial[2 + d] - out[d]) <= relative * out_size[d] + 1e-30;
    if (!good)
        fail_msg("%s: head_dim %u mask %016llx: max %.9g (%.9g) sum %.9g (%.9g)", name, head_dim,
                 (unsigned long long)mask, (double)partial[0], max, (double)partial[1], sum);
}

static void every_table_is_near_the_truth(void **state_)
{
    codec = *(const enum kernels_rows *)*state_;
    for (const struct kernels *const *table = halves_tables(); *table; table++) {
        for (size_t h = 0; h < sizeof head_dims / sizeof *head_dims; h++) {
            for (size_t n = 0; n < sizeof query_counts / sizeof *query_counts; n++) {
                uint32_t head_dim = head_dims[h], n_queries = query_counts[n];
                float scale = 1.0f / sqrtf((float)head_dim);
                fill(n_queries, head_dim);
                for (int kind = 0; kind < 6; kind++) {
                    for (uint32_t i = 0; i < n_queries; i++)
                        masks[i] = mask_of_kind(kind, i);
                    empty(partials, n_queries, head_dim);
                    (*table)->attend_block(q, n_queries, head_dim, codec, rows, masks, scale, partials);
                    for (uint32_t i = 0; i<n_queries; i += n_queries> 9 ? 17 : 1)
                        check_query((*table)->name, partials + (size_t)i * KERNELS_PARTIAL_FLOATS(head_dim),
                                    q + (size_t)i * head_dim, head_dim, masks[i], scale);
                }
            }
        }
    }
}

static void bits_do_not_depend_on_the_batch(void **state_)
{
    codec = *(const enum kernels_rows *)*state_;
    for (const struct kernels *const *table = halves_tables(); *table; table++) {
        for (size_t h = 0; h < sizeof head_dims / sizeof *head_dims; h++) {
            uint32_t head_dim = head_dims[h];
            size_t width = KERNELS_PARTIAL_FLOATS(head_dim);
            float scale = 0.2f;
            fill(MAX_QUERIES, head_dim);
            for (int kind = 1; kind < 7; kind++) {
                /* kind 6: every query another kind of mask */
                for (uint32_t i = 0; i < MAX_QUERIES; i++)
                    masks[i] = mask_of_kind(kind == 6 ? (int)(i % 6) : kind, i);
                empty(partials, MAX_QUERIES, head_dim);
                for (int repeat = 0; repeat < 2; repeat++) /* the second time into partials that are not empty */
                    (*table)->attend_block(q, MAX_QUERIES, head_dim, codec, rows, masks, scale, partials);
                for (size_t n = 0; n < sizeof query_counts / sizeof *query_counts - 1; n++) {
                    uint32_t step = query_counts[n];
                    empty(other, MAX_QUERIES, head_dim);
                    for (uint32_t i = 0; i < MAX_QUERIES; i += step) {
                        uint32_t count = MAX_QUERIES - i < step ? MAX_QUERIES - i : step;
                        for (int repeat = 0; repeat < 2; repeat++)
                            (*table)->attend_block(q + (size_t)i * head_dim, count, head_dim, codec, rows, masks + i,
                                                   scale, other + i * width);
                    }
                    if (memcmp(partials, other, MAX_QUERIES * width * sizeof(float)) != 0)
                        fail_msg("%s: head_dim %u masks %d: %u at a time differ", (*table)->name, head_dim, kind, step);
                }
            }
        }
    }
}

/* Leaves NaNs where the next call's local arrays will lie. */
static __attribute__((noinline)) void dirty_stack(void)
{
    volatile uint8_t bytes[512 << 10];
    for (size_t i = 0; i < sizeof bytes; i++)
        bytes[i] = 0xff;
}

/* K or V of a row: all numbers, or the scales of all, become this half. */
static void set_part(uint32_t head_dim, uint32_t t, uint32_t part, uint16_t bits)
{
    const uint32_t n_groups = (head_dim + 31) / 32;
    const uint32_t n = codec == KERNELS_ROWS_F16 ? head_dim : n_groups;
    char *row = (char *)rows + t * kernels_row_bytes(head_dim, codec);
    char *to = row + (codec == KERNELS_ROWS_F16 ? 2 * part * head_dim : 2 * head_dim + 2 * part * n_groups);
    for (uint32_t i = 0; i < n; i++)
        memcpy(to + 2 * i, &bits, sizeof bits);
}

/* A NaN or infinity in a row reaches only the queries that attend to that row. */
static void masked_rows_add_nothing(void **state_)
{
    codec = *(const enum kernels_rows *)*state_;
    static uint16_t clean[sizeof rows / sizeof *rows];
    for (const struct kernels *const *table = halves_tables(); *table; table++) {
        for (size_t h = 0; h < sizeof head_dims / sizeof *head_dims; h++) {
            uint32_t head_dim = head_dims[h], n_queries = 9;
            size_t width = KERNELS_PARTIAL_FLOATS(head_dim);
            fill(n_queries, head_dim);
            memcpy(clean, rows, sizeof rows);
            set_part(head_dim, 5, 0, 0x7e00);  /* NaN */
            set_part(head_dim, 5, 1, 0xfc00);  /* -infinity */
            set_part(head_dim, 40, 1, 0x7e01); /* NaN */
            set_part(head_dim, 41, 0, 0x7c00); /* infinity */
            for (uint32_t i = 0; i < n_queries; i++) {
                masks[i] = random_bits();
                if (i % 3 != 1)
                    masks[i] &= ~(UINT64_C(1) << 5 | UINT64_C(3) << 40);
                else
                    masks[i] |= UINT64_C(1) << 5;
            }
            empty(partials, n_queries, head_dim);
            empty(other, n_queries, head_dim);
            dirty_stack();
            (*table)->attend_block(q, n_queries, head_dim, codec, rows, masks, 0.125f, partials);
            (*table)->attend_block(q, n_queries, head_dim, codec, clean, masks, 0.125f, other);
            for (uint32_t i = 0; i < n_queries; i++) {
                if (i % 3 != 1)
                    assert_memory_equal(partials + i * width, other + i * width, width * sizeof(float));
                else
                    assert_true(isnan(partials[i * width + 1]));
            }
        }
    }
}

static void unwanted_rows_are_not_read(void **state_)
{
    codec = *(const enum kernels_rows *)*state_;
    const size_t block_bytes = sizeof rows;
    for (const struct kernels *const *table = halves_tables(); *table; table++) {
        for (size_t h = 0; h < sizeof head_dims / sizeof *head_dims; h++) {
            uint32_t head_dim = head_dims[h];
            size_t row_bytes = kernels_row_bytes(head_dim, codec);
            /* the last wanted row ends where readable memory ends */
            char *map = mmap(NULL, 2 * block_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            assert_true(map != MAP_FAILED);
            fill(9, head_dim);
            char *at = map + block_bytes - 33 * row_bytes;
            memcpy(at, rows, 33 * row_bytes);
            assert_int_equal(mprotect(map + block_bytes, block_bytes, PROT_NONE), 0);
            for (uint32_t i = 0; i < 9; i++)
                masks[i] = (random_bits() & 0xffffffffu) | UINT64_C(1) << 32;
            for (uint32_t n = 1; n <= 9; n += 4) {
                empty(partials, n, head_dim);
                (*table)->attend_block(q, n, head_dim, codec, at, masks, 0.125f, partials);
                for (uint32_t i = 0; i < n; i++)
                    check_query((*table)->name, partials + (size_t)i * KERNELS_PARTIAL_FLOATS(head_dim),
                                q + (size_t)i * head_dim, head_dim, masks[i], 0.125f);
            }
            munmap(map, 2 * block_bytes);
        }
    }
}

/* All of K becomes this number, V zero. */
static void set_number(uint32_t head_dim, uint32_t t, float number)
{
    float k[KERNELS_MAX_HEAD_DIM], v[KERNELS_MAX_HEAD_DIM] = {0};
    for (uint32_t d = 0; d < head_dim; d++)
        k[d] = number;
    kernels_get(KERNELS_ISA_PLAIN)
        ->encode_row(k, v, head_dim, codec, (char *)rows + t * kernels_row_bytes(head_dim, codec));
}

static void huge_and_tiny_scores(void **state_)
{
    codec = *(const enum kernels_rows *)*state_;
    for (const struct kernels *const *table = halves_tables(); *table; table++) {
        for (size_t h = 0; h < sizeof head_dims / sizeof *head_dims; h++) {
            uint32_t head_dim = head_dims[h];
            size_t width = KERNELS_PARTIAL_FLOATS(head_dim);
            float scale = 1.0f / sqrtf((float)head_dim);
            fill(3, head_dim);
            const float sizes[3] = {1e30f, 3e38f, 1e-42f};
            for (uint32_t i = 0; i < 3; i++) {
                masks[i] = ~UINT64_C(0);
                for (uint32_t d = 0; d < head_dim; d++)
                    q[i * head_dim + d] = sizes[i]; /* same signs: the dot products themselves stay defined */
            }
            for (uint32_t t = 0; t < 64; t++)
                set_number(head_dim, t, t % 2 ? 1.0f : -1.0f);
            empty(partials, 3, head_dim);
            (*table)->attend_block(q, 3, head_dim, codec, rows, masks, scale, partials);
            for (uint32_t i = 0; i < 3; i++) {
                const float *partial = partials + i * width;
                assert_true(isfinite(partial[0]));
                /* odd tokens share the maximum, even ones are infinitely far below or equal */
                assert_true(fabsf(partial[1] - (i < 2 ? 32.0f : 64.0f)) < 1e-4f);
                float mean[KERNELS_MAX_HEAD_DIM];
                (*table)->partial_finish(partial, head_dim, mean);
                for (uint32_t d = 0; d < head_dim; d++)
                    assert_true(fabsf(mean[d]) <= 2.0f);
            }
        }
    }
}

static void a_nan_query_stays_alone(void **state_)
{
    codec = *(const enum kernels_rows *)*state_;
    const uint32_t head_dim = 64, n = 7;
    size_t width = KERNELS_PARTIAL_FLOATS(head_dim);
    for (const struct kernels *const *table = halves_tables(); *table; table++) {
        fill(n, head_dim);
        for (uint32_t i = 0; i < n; i++)
            masks[i] = ~UINT64_C(0);
        empty(other, n, head_dim);
        (*table)->attend_block(q, n, head_dim, codec, rows, masks, 0.125f, other);
        q[3 * head_dim + 9] = NAN;
        empty(partials, n, head_dim);
        (*table)->attend_block(q, n, head_dim, codec, rows, masks, 0.125f, partials);
        for (uint32_t i = 0; i < n; i++) {
            if (i != 3)
                assert_memory_equal(partials + i * width, other + i * width, width * sizeof(float));
            else
                assert_true(isnan(partials[i * width + 1]) && isnan(partials[i * width + 2]));
        }
    }
}

static void merging(void **state_)
{
    codec = *(const enum kernels_rows *)*state_;
    for (const struct kernels *const *table = halves_tables(); *table; table++) {
        for (size_t h = 0; h < sizeof head_dims / sizeof *head_dims; h++) {
            uint32_t head_dim = head_dims[h];
            size_t bytes = KERNELS_PARTIAL_FLOATS(head_dim) * sizeof(float);
            float scale = 1.0f / sqrtf((float)head_dim);
            float a[MAX_PARTIAL], b[MAX_PARTIAL], ab[MAX_PARTIAL], ba[MAX_PARTIAL], none[MAX_PARTIAL];
            uint64_t left = random_bits(), right = ~left;
            fill(1, head_dim);
            empty(a, 1, head_dim);
            empty(b, 1, head_dim);
            empty(none, 1, head_dim);
            (*table)->attend_block(q, 1, head_dim, codec, rows, &left, scale, a);
            (*table)->attend_block(q, 1, head_dim, codec, rows, &right, scale, b);

            /* the empty partial is neutral on both sides, to the bit */
            memcpy(ab, a, bytes);
            (*table)->partial_merge(ab, none, head_dim);
            assert_memory_equal(ab, a, bytes);
            memcpy(ab, none, bytes);
            (*table)->partial_merge(ab, a, head_dim);
            assert_memory_equal(ab, a, bytes);
            memcpy(ab, none, bytes);
            (*table)->partial_merge(ab, none, head_dim);
            assert_memory_equal(ab, none, bytes);

            /* the parts make the whole; order does not matter; attend_block merges like partial_merge */
            memcpy(ab, a, bytes);
            (*table)->partial_merge(ab, b, head_dim);
            check_query((*table)->name, ab, q, head_dim, ~UINT64_C(0), scale);
            memcpy(ba, b, bytes);
            (*table)->partial_merge(ba, a, head_dim);
            assert_memory_equal(ab, ba, bytes);
            memcpy(ba, a, bytes);
            (*table)->attend_block(q, 1, head_dim, codec, rows, &right, scale, ba);
            assert_memory_equal(ab, ba, bytes);

            float mean[KERNELS_MAX_HEAD_DIM];
            (*table)->partial_finish(ab, head_dim, mean);
            for (uint32_t d = 0; d < head_dim; d++)
                assert_true(mean[d] == ab[2 + d] / ab[1]);

            /* a partial far below disappears, and neither side of it is harmed */
            memcpy(ba, b, bytes);
            ba[0] = a[0] - 500.0f;
            memcpy(ab, a, bytes);
            (*table)->partial_merge(ab, ba, head_dim);
            for (uint32_t i = 0; i < 2 + head_dim; i++)
                assert_true(ab[i] == a[i]);
        }
    }
}

static void scores_of_keys(void **state_)
{
    codec = *(const enum kernels_rows *)*state_;
    for (const struct kernels *const *table = halves_tables(); *table; table++) {
        for (size_t h = 0; h < sizeof head_dims / sizeof *head_dims; h++) {
            uint32_t head_dim = head_dims[h];
            float scores[66], alone;
            scores[65] = 12345.0f;
            fill(1, head_dim);
            for (uint32_t n_keys = 1; n_keys <= 65; n_keys += 8) {
                (*table)->score_f16(q, head_dim, rows, n_keys, 0.5f, scores);
                for (uint32_t k = 0; k < n_keys; k++) {
                    double score = 0, size = 0;
                    for (uint32_t d = 0; d < head_dim; d++) {
                        double product = 0.5 * (double)q[d] * half_to_double(&rows[k * head_dim + d]);
                        score += product;
                        size += fabs(product);
                    }
                    assert_true(fabs((double)scores[k] - score) <= 1e-6 * size);
                    (*table)->score_f16(q, head_dim, rows + (size_t)k * head_dim, 1, 0.5f, &alone);
                    assert_true(alone == scores[k]);
                }
            }
            assert_true(scores[65] == 12345.0f);
        }
    }
}

/* Rows that lie anywhere: the bits of a block of just these rows. */
static void rows_by_pointer_are_a_block(void **state_)
{
    codec = *(const enum kernels_rows *)*state_;
    static char far[200 * 1024];
    static uint16_t together[sizeof rows / sizeof *rows];
    static const uint32_t row_counts[] = {1, 2, 3, 4, 5, 17, 31, 32, 63, 64};
    for (const struct kernels *const *table = halves_tables(); *table; table++) {
        for (size_t h = 0; h < sizeof head_dims / sizeof *head_dims; h++) {
            uint32_t head_dim = head_dims[h];
            size_t n_bytes = kernels_row_bytes(head_dim, codec);
            const void *pointers[128];
            fill(MAX_QUERIES, head_dim);
            for (uint32_t t = 0; t < 64; t++) { /* in another order, at odd places; some rows twice */
                uint32_t from = t % 9 == 8 ? 3 : t * 37 % 64;
                char *to = far + (63 - t) * (2 * 2 * KERNELS_MAX_HEAD_DIM + 62) + 2 * (t % 31);
                memcpy(to, (char *)rows + from * n_bytes, n_bytes);
                memcpy((char *)together + t * n_bytes, to, n_bytes);
                pointers[t] = pointers[64 + t] = to;
            }
            for (size_t r = 0; r < sizeof row_counts / sizeof *row_counts; r++) {
                for (size_t n = 0; n < sizeof query_counts / sizeof *query_counts; n++) {
                    uint32_t n_rows = row_counts[r], n_queries = query_counts[n], n_fetch = n_rows + (r % 2 ? 64 : 0);
                    size_t bytes = n_queries * KERNELS_PARTIAL_FLOATS(head_dim) * sizeof(float);
                    for (uint32_t i = 0; i < n_queries; i++)
                        masks[i] = ~UINT64_C(0) >> (64 - n_rows);
                    empty(partials, n_queries, head_dim);
                    empty(other, n_queries, head_dim);
                    for (int repeat = 0; repeat < 2; repeat++) {
                        (*table)->attend_rows(q, n_queries, head_dim, codec, pointers, n_rows,
                                              r % 3 ? n_rows : n_rows / 2, n_fetch, 0.2f, partials);
                        (*table)->attend_block(q, n_queries, head_dim, codec, together, masks, 0.2f, other);
                    }
                    if (memcmp(partials, other, bytes) != 0)
                        fail_msg("%s: head_dim %u, %u rows, %u queries", (*table)->name, head_dim, n_rows, n_queries);
                }
            }
        }
    }
}

int main(void)
{
    kernels_thread_setup();
    static enum kernels_rows f16 = KERNELS_ROWS_F16, q8_0 = KERNELS_ROWS_Q8_0;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_prestate(every_table_is_near_the_truth, &f16),
        cmocka_unit_test_prestate(every_table_is_near_the_truth, &q8_0),
        cmocka_unit_test_prestate(bits_do_not_depend_on_the_batch, &f16),
        cmocka_unit_test_prestate(bits_do_not_depend_on_the_batch, &q8_0),
        cmocka_unit_test_prestate(masked_rows_add_nothing, &f16),
        cmocka_unit_test_prestate(masked_rows_add_nothing, &q8_0),
        cmocka_unit_test_prestate(unwanted_rows_are_not_read, &f16),
        cmocka_unit_test_prestate(unwanted_rows_are_not_read, &q8_0),
        cmocka_unit_test_prestate(huge_and_tiny_scores, &f16),
        cmocka_unit_test_prestate(huge_and_tiny_scores, &q8_0),
        cmocka_unit_test_prestate(rows_by_pointer_are_a_block, &f16),
        cmocka_unit_test_prestate(rows_by_pointer_are_a_block, &q8_0),
        cmocka_unit_test_prestate(a_nan_query_stays_alone, &f16),
        cmocka_unit_test_prestate(merging, &f16),
        cmocka_unit_test_prestate(scores_of_keys, &f16),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
