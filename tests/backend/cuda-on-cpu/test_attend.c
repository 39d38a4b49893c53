/*
 * test_attend.c - exact attention partials by the CUDA back end's kernels, compiled for the CPU, against the reference: the cases
 * of ../test_ops.c, several block sizes, threads in order and at random.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/backend/cuda-on-cpu/device.h"
#include "tests/backend/fixture.h"

#define MAX_ITEMS   5u
#define MAX_PIECES  9u
#define MAX_NUMBERS (448u * 258u)

struct attend_case {
    uint32_t n_items, n_queries[MAX_ITEMS], group, head_dim, n_pieces, causal_piece, causal_first;
};

static const struct attend_case cases[] = {
    {1, {1}, 1, 64, 1, 1, 0},             /* one query, one piece */
    {3, {3, 3, 3}, 3, 64, 4, 3, 10},      /* decode with a causal last piece */
    {5, {1, 2, 9, 4, 7}, 1, 80, 3, 3, 0}, /* items of different sizes */
    {2, {96, 95}, 3, 64, 5, 4, 0},        /* a prefill tile of 32 positions */
    {1, {128}, 2, 31, 2, 0, 5},           /* causal piece first, from the middle of a block */
    {1, {70}, 7, 128, 3, 2, 0},           /* groups that do not fit the tiles */
    {1, {5}, 5, 256, 2, 1, 63},           /* everything visible in the causal piece; the largest heads */
    {1, {4}, 4, 8, 0, 0, 0},              /* no pieces */
    {3, {4, 3, 6}, 4, 128, 9, 8, 3},      /* lists that are cut, of several lengths */
    {2, {2, 1}, 2, 256, 6, 6, 0},         /* the same, without a causal piece */
};
#define N_CASES (sizeof cases / sizeof *cases)

static uint8_t rows[MAX_PIECES][64 * 4 * 256];
static float q[MAX_NUMBERS], before[MAX_NUMBERS], expected[MAX_NUMBERS], got[MAX_NUMBERS], alone[MAX_NUMBERS];
static struct backend_piece pieces[MAX_ITEMS][MAX_PIECES];
static struct backend_attend items[MAX_ITEMS];
static struct backend *reference;

static int open_reference(void **state)
{
    (void)state;
    char error[64];
    return backend_reference.open(&(struct backend_options){0}, &reference, error, sizeof error);
}

static int close_reference(void **state)
{
    (void)state;
    reference = backend_reference.close(reference);
    return 0;
}

/* Host items over `expected`; returns how many queries they have. */
static uint32_t build(const struct attend_case *c, enum kernels_rows codec, bool fresh)
{
    static float numbers[2 * 256];
    const uint32_t width = KERNELS_PARTIAL_FLOATS(c->head_dim);
    const bool is_first = fresh && codec == KERNELS_ROWS_Q8_0; /* empty, and said to be: whatever they hold */
    uint32_t n_queries = 0;
    for (uint32_t p = 0; p < MAX_PIECES; p++) {
        for (uint32_t t = 0; t < 64; t++) {
            fixture_fill(numbers, 2 * c->head_dim, 2.0f);
            kernels_get(KERNELS_ISA_PLAIN)
                ->encode_row(numbers, numbers + c->head_dim, c->head_dim, codec,
                             rows[p] + t * kernels_row_bytes(c->head_dim, codec));
        }
    }
    for (uint32_t i = 0; i < c->n_items; i++) {
        for (uint32_t p = 0; p < c->n_pieces; p++) {
            const uint64_t mask = (uint64_t)fixture_random() << 32 | fixture_random();
            pieces[i][p] = (struct backend_piece){.rows = rows[(p + i) % MAX_PIECES],
                                                  .mask = p % 3 == 0   ? ~UINT64_C(0)
                                                          : p % 3 == 1 ? mask & mask >> 1
                                                                       : mask};
        }
        items[i] = (struct backend_attend){.q = q + n_queries * c->head_dim,
                                           .partials = expected + n_queries * width,
                                           .pieces = pieces[i],
                                           .n_pieces = c->n_pieces > 5 ? c->n_pieces - 3 * i : c->n_pieces,
                                           .n_queries = c->n_queries[i],
                                           .group = c->group,
                                           .causal_piece = c->causal_piece,
                                           .causal_first = c->causal_first,
                                           .is_first = is_first};
        n_queries += c->n_queries[i];
    }
    fixture_fill(q, n_queries * c->head_dim, 3.0f);
    for (uint32_t query = 0; query < n_queries; query++)
        for (uint32_t d = 0; d < width; d++)
            before[query * width + d] = !fresh     ? (float)((query * 31 + d * 7) % 17) * 0.1f + 0.1f
                                        : is_first ? NAN
                                        : d == 0   ? -INFINITY
                                                   : 0.0f;
    memcpy(expected, before, n_queries * width * sizeof *before);
    return n_queries;
}

/* The items on the device, with all that they point to. */
struct on_device {
    void *rows;
    float *q, *partials;
    struct backend_piece *pieces;
    struct backend_attend *items;
};

static struct on_device upload(const struct attend_case *c, uint32_t n_queries)
{
    const uint32_t width = KERNELS_PARTIAL_FLOATS(c->head_dim);
    struct on_device on = {.rows = device_new(rows, sizeof rows),
                           .q = device_new(q, n_queries * c->head_dim * sizeof *q),
                           .partials = device_new(before, n_queries * width * sizeof *before)};
    struct backend_piece copies[MAX_ITEMS][MAX_PIECES];
    struct backend_attend item_copies[MAX_ITEMS];
    memcpy(copies, pieces, sizeof copies);
    for (uint32_t i = 0; i < c->n_items; i++)
        for (uint32_t p = 0; p < c->n_pieces; p++)
            copies[i][p].rows = (char *)on.rows + ((const uint8_t *)pieces[i][p].rows - rows[0]);
    on.pieces = device_new(copies, sizeof copies);
    for (uint32_t i = 0; i < c->n_items; i++) {
        item_copies[i] = items[i];
        item_copies[i].q = on.q + (items[i].q - q);
        item_copies[i].partials = on.partials + (items[i].partials - expected);
        item_copies[i].pieces = on.pieces + i * MAX_PIECES;
    }
    on.items = device_new(item_copies, c->n_items * sizeof *item_copies);
    return on;
}

static void forget(struct on_device *on)
{
    device_free(on->rows);
    device_free(on->q);
    device_free(on->partials);
    device_free(on->pieces);
    device_free(on->items);
}

/* maximum within 2e-5, sum and out within 1e-4 of their sizes (values of up to 2) */
static void check(const struct attend_case *c, uint32_t n_queries)
{
    const size_t width = KERNELS_PARTIAL_FLOATS(c->head_dim);
    for (uint32_t query = 0; query < n_queries; query++) {
        const float *have = got + query * width, *want = expected + query * width;
        if (want[0] == -INFINITY) {
            assert_memory_equal(have, want, width * sizeof *have);
            continue;
        }
        fixture_near("attend: maximum", "cuda", have, want, 1, 2e-5, 2e-6);
        fixture_near("attend: sum", "cuda", have + 1, want + 1, 1, 0, 1e-4);
        fixture_near("attend: out", "cuda", have + 2, want + 2, c->head_dim, 2e-4 * (double)want[1], 0);
    }
}

/* By cuda_attend(), or by cuda_attend_decode(), whose result does not depend on the longest list of the call. */
static void launch(bool is_decode, const struct cuda_queue *queue, const struct on_device *on, uint32_t n_items,
                   uint32_t max_queries, uint32_t max_pieces, uint32_t head_dim, enum kernels_rows codec)
{
    const float scale = 1.0f / sqrtf((float)head_dim);
    if (!is_decode) {
        assert_int_equal(cuda_attend(queue, on->items, n_items, max_queries, head_dim, codec, scale), cudaSuccess);
        return;
    }
    const size_t n_bytes = cuda_attend_decode_bytes(n_items, max_queries, max_pieces, head_dim);
    assert_int_equal(n_bytes == 0, max_pieces <= 4);
    float *scratch = n_bytes ? device_new(NULL, n_bytes) : NULL;
    assert_int_equal(
        cuda_attend_decode(queue, on->items, n_items, max_queries, max_pieces, head_dim, codec, scale, scratch),
        cudaSuccess);
    device_free(scratch);
}

static void all_cases(bool is_decode)
{
#ifdef HCATTN_SANITIZED
    const size_t step = 3; /* each case once or twice */
#else
    const size_t step = 1;
#endif
    for (size_t k = 0; k < 4 * N_CASES; k += step) {
        const struct attend_case *c = &cases[k / 4];
        if (is_decode && c->n_queries[0] > 90)
            continue; /* prefill: right, but long here */
        const enum kernels_rows codec = k / 2 % 2 ? KERNELS_ROWS_Q8_0 : KERNELS_ROWS_F16;
        const float scale = 1.0f / sqrtf((float)c->head_dim);
        const uint32_t n_queries = build(c, codec, k % 2 == 0), width = KERNELS_PARTIAL_FLOATS(c->head_dim);
        const size_t n_bytes = n_queries * width * sizeof *got;
        uint32_t max_queries = 0;
        for (uint32_t i = 0; i < c->n_items; i++)
            max_queries = c->n_queries[i] > max_queries ? c->n_queries[i] : max_queries;
        backend_reference.attend(reference, items, c->n_items, c->head_dim, codec, scale);
        for (int i = 0; i < DEVICE_N_RUNS; i++) {
            const struct device_run run = device_run(i);
            struct on_device on = upload(c, n_queries);
            launch(is_decode, &run.queue, &on, c->n_items, max_queries, c->n_pieces, c->head_dim, codec);
            device_read(got, on.partials, n_bytes);
            check(c, n_queries);
            forget(&on);
            if (i)
                assert_memory_equal(got, alone, n_bytes); /* the same bits in every block size and order */
            memcpy(alone, got, n_bytes);
        }

        /* and from an item a position */
        for (uint32_t i = 0; i < c->n_items; i++) {
            const struct device_run run = device_run((int)(k % DEVICE_N_RUNS));
            const struct backend_attend whole = items[i];
            for (uint32_t query = 0; query < whole.n_queries; query += c->group * 13) {
                const uint32_t left = whole.n_queries - query;
                struct attend_case one = *c;
                one.n_items = 1;
                struct backend_attend first = items[0];
                struct backend_piece first_pieces[MAX_PIECES];
                memcpy(first_pieces, pieces[0], sizeof first_pieces);
                memcpy(pieces[0], pieces[i], sizeof first_pieces);
                items[0] = whole;
                items[0].q += (size_t)query * c->head_dim;
                items[0].partials += (size_t)query * width;
                items[0].n_queries = left < c->group ? left : c->group;
                items[0].causal_first += query / c->group;
                struct on_device on = upload(&one, n_queries);
                launch(is_decode, &run.queue, &on, 1, items[0].n_queries, c->n_pieces + (uint32_t)k % 3 * 2,
                       c->head_dim, codec);
                device_read(got, on.partials, n_bytes);
                const size_t at = (size_t)(items[0].partials - expected);
                assert_memory_equal(got + at, alone + at, items[0].n_queries * width * sizeof *got);
                forget(&on);
                items[0] = first;
                memcpy(pieces[0], first_pieces, sizeof first_pieces);
            }
        }
    }
}

static void partials(void **state)
{
    (void)state;
    all_cases(false);
}

static void partials_of_lists_cut_over_the_device(void **state)
{
    (void)state;
    all_cases(true);
}

/* A row that no mask names may hold anything; one that is named shows a NaN to those who see it. */
static void rows_that_are_not_numbers(void **state)
{
    (void)state;
    const struct attend_case c = {1, {6}, 2, 64, 1, 0, 10}; /* positions 10, 11, 12 of the piece */
    const uint32_t n_queries = build(&c, KERNELS_ROWS_F16, true), width = KERNELS_PARTIAL_FLOATS(64);
    const struct device_run run = device_run(1);
    const uint16_t nan = 0x7e00;
    for (uint32_t k = 0; k < 4; k++) { /* token 12: a NaN in K, then in V */
        const uint32_t part = k % 2;
        build(&c, KERNELS_ROWS_F16, true);
        memcpy(rows[0] + 12 * 256 + part * 128 + 20, &nan, sizeof nan);
        memset(rows[0] + 5 * 256, 0xff, 256);
        pieces[0][0].mask = ~(UINT64_C(1) << 5);
        struct on_device on = upload(&c, n_queries);
        launch(k / 2, &run.queue, &on, 1, 6, 1, 64, KERNELS_ROWS_F16);
        device_read(got, on.partials, n_queries * width * sizeof *got);
        for (uint32_t query = 0; query < n_queries; query++) {
            bool finite = true;
            for (uint32_t d = 0; d < width; d++)
                finite = finite && isfinite(got[query * width + d]);
            assert_int_equal(finite, query < 4);
            assert_int_equal(got[query * width] == -INFINITY, false); /* it does not look like an empty one */
        }
        forget(&on);
    }
}

static void what_cannot_be(void **state)
{
    (void)state;
    const struct device_run run = device_run(0);
    struct backend_attend *memory = device_new(NULL, 1024);
    struct cuda_queue large = {.n_threads = 512};
    assert_int_equal(cuda_attend(&run.queue, memory, 0, 1, 64, KERNELS_ROWS_F16, 1), cudaSuccess);
    assert_int_equal(cuda_attend(&run.queue, memory, 1, 1, 257, KERNELS_ROWS_F16, 1), cudaErrorInvalidValue);
    assert_int_equal(cuda_attend(&large, memory, 1, 1, 64, KERNELS_ROWS_F16, 1), cudaErrorInvalidValue);
    assert_int_equal(cuda_attend_decode(&run.queue, memory, 0, 1, 9, 64, KERNELS_ROWS_F16, 1, NULL), cudaSuccess);
    assert_int_equal(cuda_attend_decode(&run.queue, memory, 1, 1, 9, 64, KERNELS_ROWS_F16, 1, NULL),
                     cudaErrorInvalidValue); /* no scratch */
    assert_int_equal(cuda_attend_decode(&large, memory, 1, 1, 1, 64, KERNELS_ROWS_F16, 1, NULL), cudaErrorInvalidValue);
    device_free(memory);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(partials),
        cmocka_unit_test(partials_of_lists_cut_over_the_device),
        cmocka_unit_test(rows_that_are_not_numbers),
        cmocka_unit_test(what_cannot_be),
    };
    return cmocka_run_group_tests(tests, open_reference, close_reference);
}
