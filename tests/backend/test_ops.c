/* test_ops.c - every operation but the products (test_matmul.c) on every back end against the reference. */
#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "tests/backend/fixture.h"

#define MAX_NUMBERS (1u << 20)

static float a[MAX_NUMBERS], b[MAX_NUMBERS], out[MAX_NUMBERS], expected[MAX_NUMBERS];

static void names_and_memory(void **state)
{
    const struct fixture *fixture = *state;
    assert_ptr_equal(backend_find("reference"), &backend_reference);
    assert_ptr_equal(backend_find("cpu"), &backend_cpu);
    assert_null(backend_find("quantum"));
    for (uint32_t i = 0; i < fixture->n_instances; i++) {
        const struct fixture_instance *on = &fixture->instances[i];
        for (size_t n_bytes = 0; n_bytes < 300; n_bytes += 37) {
            uint8_t *memory = on->ops->alloc(on->backend, n_bytes);
            assert_non_null(memory);
            assert_int_equal((uintptr_t)memory % 64, 0);
            for (size_t at = 0; at < n_bytes; at++)
                assert_int_equal(memory[at], 0);
            on->ops->free(on->backend, memory);
        }
        on->ops->free(on->backend, NULL);
        assert_null(on->ops->alloc(on->backend, SIZE_MAX));
        assert_null(on->ops->alloc(on->backend, SIZE_MAX / 2 + 1));
        assert_null(on->ops->close(NULL));
    }
    assert_string_equal(fixture->instances[1].name, "cpu, plain, 1 thread");
    assert_string_equal(fixture->instances[2].name, "cpu, plain, 2 threads");
    if (!kernels_get(KERNELS_ISA_AVX512)) {
        struct backend_options options = {.isa = KERNELS_ISA_AVX512};
        struct backend *backend = NULL;
        char error[64] = "";
        assert_int_equal(backend_cpu.open(&options, &backend, error, sizeof error), -ENOTSUP);
        assert_null(backend);
        assert_true(error[0] != '\0');
    }
}

/* Bytes this process has in memory. */
static size_t resident_bytes(void)
{
    unsigned long all = 0, resident = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    assert_non_null(file);
    assert_int_equal(fscanf(file, "%lu %lu", &all, &resident), 2);
    fclose(file);
    return resident * (size_t)sysconf(_SC_PAGESIZE);
}

/* What is counted is what was given out, goes back to where it was, and is what the process really holds. */
static void bytes_are_counted(void **state)
{
    const struct fixture *fixture = *state;
    static const size_t sizes[] = {1, 5000, 1 << 20, (3 << 20) + 100, 70 << 20, 20 << 20};
    for (uint32_t i = 0; i < fixture->n_instances; i++) {
        const struct fixture_instance *on = &fixture->instances[i];
        const size_t before = on->ops->bytes(on->backend), held_before = resident_bytes();
        uint8_t *memory[6];
        size_t given = 0;
        for (size_t k = 0; k < 6; k++) {
            memory[k] = on->ops->alloc(on->backend, sizes[k]);
            assert_non_null(memory[k]);
            assert_int_equal((uintptr_t)memory[k] % 64, 0);
            for (size_t at = 0; at < sizes[k]; at += 1023)
                assert_int_equal(memory[k][at], 0);
            assert_int_equal(memory[k][sizes[k] - 1], 0);
            memset(memory[k], 0xff, sizes[k]);
            given += sizes[k];
            const size_t counted = on->ops->bytes(on->backend) - before;
            assert_true(counted >= given && counted <= given + (k + 1) * 8192);
        }
        const size_t counted = on->ops->bytes(on->backend) - before;
        const size_t held = resident_bytes() - held_before;
#ifdef HCATTN_SANITIZED /* and what sanitizers add to the heap */
        assert_true(held >= counted - counted / 20);
#else
        assert_true(held >= counted - counted / 20 && held <= counted + counted / 20);
#endif
        for (size_t k = 0; k < 6; k++)
            on->ops->free(on->backend, memory[k]);
        assert_int_equal(on->ops->bytes(on->backend), before);
    }
}

/* Many small matrices and a large one, in and out in any order. */
static void bytes_of_weights_are_counted(void **state)
{
    const struct fixture *fixture = *state;
    for (uint32_t i = 0; i < fixture->n_instances; i++) {
        const struct fixture_instance *on = &fixture->instances[i];
        struct tensor small = fixture_tensor(TENSOR_Q4_1, 256, 1024), large = fixture_tensor(TENSOR_Q8_0, 2048, 1024);
        struct tensor vector = fixture_tensor(TENSOR_F32, 1, 1024), floats = fixture_tensor(TENSOR_F16, 64, 1024);
        struct weight *weights[150], *others[3];
        assert_int_equal(on->ops->weight_new(on->backend, &small, &weights[0]),
                         0); /* room for inputs comes with the first */
        const size_t before = on->ops->bytes(on->backend);
        size_t sum = 0;
        for (int w = 1; w < 150; w++) { /* 24 MB: more than one mapping of small ones */
            assert_int_equal(on->ops->weight_new(on->backend, &small, &weights[w]), 0);
            sum += on->ops->weight_bytes(weights[w]);
        }
        assert_int_equal(on->ops->weight_new(on->backend, &large, &others[0]), 0);
        assert_int_equal(on->ops->weight_new(on->backend, &vector, &others[1]), 0);
        assert_int_equal(on->ops->weight_new(on->backend, &floats, &others[2]), 0);
        for (int w = 0; w < 3; w++)
            sum += on->ops->weight_bytes(others[w]);
        assert_int_equal(on->ops->bytes(on->backend), before + sum);
        assert_true(sum >= 149 * small.n_bytes + large.n_bytes + vector.n_bytes + floats.n_bytes);
        for (int w = 1; w < 150; w++)
            on->ops->weight_free(on->backend, weights[w * 7 % 150 == 0 ? 0 : w * 7 % 150]);
        for (int w = 0; w < 3; w++)
            on->ops->weight_free(on->backend, others[w]);
        assert_int_equal(on->ops->bytes(on->backend), before);
        on->ops->weight_free(on->backend, weights[0]);
        fixture_tensor_free(&small);
        fixture_tensor_free(&large);
        fixture_tensor_free(&vector);
        fixture_tensor_free(&floats);
    }
}

/* |error| <= 1e-5 |expected|; the same bits alone as in a batch. */
static void rms_norm(void **state)
{
    const struct fixture *fixture = *state;
    static const uint32_t sizes[] = {1, 7, 8, 64, 100, 576, 1000, 4096};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        const uint32_t n = sizes[s], n_tokens = s % 2 ? 200 : 33;
        struct tensor tensor = fixture_tensor(s % 2 ? TENSOR_F32 : TENSOR_F16, 1, n);
        fixture_fill(a, (size_t)n_tokens * n, 5.0f);
        memset(a + n, 0, n * sizeof *a); /* a row of zeros: only eps */
        for (uint32_t i = 0; i < fixture->n_instances; i++) {
            const struct fixture_instance *on = &fixture->instances[i];
            struct weight *weight = NULL;
            assert_int_equal(on->ops->weight_new(on->backend, &tensor, &weight), 0);
            on->ops->rms_norm(on->backend, a, n_tokens, n, weight, 1e-5f, i ? out : expected);
            if (i) {
                fixture_near("rms_norm", on->name, out, expected, (size_t)n_tokens * n, 1e-30, 1e-5);
                for (uint32_t t = 0; t < n_tokens; t += 11) {
                    on->ops->rms_norm(on->backend, a + (size_t)t * n, 1, n, weight, 1e-5f, b);
                    assert_memory_equal(b, out + (size_t)t * n, n * sizeof *b);
                }
                memcpy(b, a, (size_t)n_tokens * n * sizeof *b); /* in place */
                on->ops->rms_norm(on->backend, b, n_tokens, n, weight, 1e-5f, b);
                assert_memory_equal(b, out, (size_t)n_tokens * n * sizeof *b);
            }
            on->ops->weight_free(on->backend, weight);
        }
        fixture_tensor_free(&tensor);
    }
}

/* |error| <= 1e-6 (|x| + |y|) x magnitude, at any position; what is not rotated stays to the bit. */
static void rope(void **state)
{
    const struct fixture *fixture = *state;
    static const struct {
        uint32_t head_dim, n_rotated, n_heads, n_tokens;
    } cases[] = {{64, 64, 3, 1},     {64, 64, 9, 300}, {80, 32, 1, 7}, {2, 2, 1, 3},
                 {128, 128, 4, 257}, {256, 256, 2, 5}, {4, 4, 1, 2100}};
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        const uint32_t n_tokens = cases[c].n_tokens, n_heads = cases[c].n_heads, head_dim = cases[c].head_dim;
        const size_t n = (size_t)n_tokens * n_heads * head_dim;
        float frequencies[128];
        uint32_t positions[2100];
        for (uint32_t i = 0; i < cases[c].n_rotated / 2; i++)
            frequencies[i] = powf(10000.0f, -2.0f * (float)i / (float)cases[c].n_rotated);
        for (uint32_t t = 0; t < n_tokens; t++)
            positions[t] = t % 3 == 2 ? 1000000 - t : t;
        struct backend_rope rotation = {.n_rotated = cases[c].n_rotated, .frequencies = frequencies, .magnitude = 1};
        fixture_fill(a, n, 2.0f);
        for (int change = 0; change < 4; change++) {
            /* nothing made for other positions, frequencies or magnitudes may be used again */
            if (change == 1)
                positions[n_tokens - 1] += 5;
            if (change == 2)
                frequencies[0] *= 0.5f;
            if (change == 3)
                rotation.magnitude = 1.25f;
            memcpy(expected, a, n * sizeof *a);
            fixture->instances[0].ops->rope(fixture->instances[0].backend, expected, n_tokens, n_heads, head_dim,
                                            positions, &rotation);
            for (uint32_t i = 1; i < fixture->n_instances; i++) {
                const struct fixture_instance *on = &fixture->instances[i];
                memcpy(out, a, n * sizeof *a);
                on->ops->rope(on->backend, out, n_tokens, n_heads, head_dim, positions, &rotation);
                fixture_near("rope", on->name, out, expected, n, 5e-6, 0);
                for (size_t row = 0; row < (size_t)n_tokens * n_heads; row++)
                    assert_memory_equal(out + row * head_dim + rotation.n_rotated,
                                        a + row * head_dim + rotation.n_rotated,
                                        (head_dim - rotation.n_rotated) * sizeof *a);
                /* the last token alone */
                size_t row = (size_t)n_heads * head_dim, at = (size_t)(n_tokens - 1) * row;
                memcpy(b, a + at, row * sizeof *a);
                on->ops->rope(on->backend, b, 1, n_heads, head_dim, positions + n_tokens - 1, &rotation);
                assert_memory_equal(b, out + at, row * sizeof *a);
            }
        }
    }
}

/* |error| <= 2e-6 |expected|, up to the largest and smallest gates. */
static void swiglu(void **state)
{
    const struct fixture *fixture = *state;
    static const struct {
        uint32_t n_tokens, n;
    } cases[] = {{1, 1}, {1, 7}, {3, 8}, {5, 33}, {2, 1536}, {60, 1536}};
    static const float special[] = {0.0f, -0.0f, 1e30f, -1e30f, 88.9f, -88.9f, -87.0f, -103.9f, 3e38f, -3e38f, 1e-30f};
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        const uint32_t n = cases[c].n, n_tokens = cases[c].n_tokens;
        const size_t all = (size_t)n * n_tokens;
        fixture_fill(a, all, 20.0f);
        fixture_fill(b, all, 0.9f);
        for (size_t i = 0; i < sizeof special / sizeof *special && i < all; i++)
            a[i] = special[i];
        memcpy(expected, a, all * sizeof *a);
        fixture->instances[0].ops->swiglu(fixture->instances[0].backend, expected, b, n_tokens, n);
        for (uint32_t i = 1; i < fixture->n_instances; i++) {
            const struct fixture_instance *on = &fixture->instances[i];
            memcpy(out, a, all * sizeof *a);
            on->ops->swiglu(on->backend, out, b, n_tokens, n);
            fixture_near("swiglu", on->name, out, expected, all, 1e-35, 2e-6);
            for (uint32_t t = 0; t < n_tokens; t++) {
                float *row = a + (size_t)t * n, alone[1536];
                memcpy(alone, row, n * sizeof *row);
                on->ops->swiglu(on->backend, alone, b + (size_t)t * n, 1, n);
                assert_memory_equal(alone, out + (size_t)t * n, n * sizeof *row);
            }
        }
    }
}

static void add(void **state)
{
    const struct fixture *fixture = *state;
    static const size_t sizes[] = {0, 1, 7, 8, 33, 8191, 8193, 100000};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        fixture_fill(a, sizes[s], 2.0f);
        fixture_fill(b, sizes[s], 2.0f);
        for (uint32_t i = 0; i < fixture->n_instances; i++) {
            const struct fixture_instance *on = &fixture->instances[i];
            memcpy(out, a, sizes[s] * sizeof *a);
            out[sizes[s]] = 77.0f;
            on->ops->add(on->backend, out, b, sizes[s]);
            for (size_t at = 0; at < sizes[s]; at++)
                assert_true(out[at] == a[at] + b[at]);
            assert_true(out[sizes[s]] == 77.0f);
        }
    }
}

static void encode_rows(void **state)
{
    const struct fixture *fixture = *state;
    static uint16_t rows[MAX_NUMBERS], expected_rows[MAX_NUMBERS];
    static const struct {
        uint32_t n_tokens, n_kv_heads, head_dim;
    } cases[] = {{1, 1, 1}, {3, 3, 64}, {5, 2, 31}, {200, 8, 128}, {1, 4, 256}};
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        const size_t n = (size_t)cases[c].n_tokens * cases[c].n_kv_heads * cases[c].head_dim;
        fixture_fill(a, n, 100.0f);
        fixture_fill(b, n, 0.001f);
        a[0] = 1e9f;
        for (uint32_t i = 0; i < fixture->n_instances; i++) {
            const struct fixture_instance *on = &fixture->instances[i];
            memset(rows, 0xff, 2 * n * sizeof *rows);
            on->ops->encode_rows(on->backend, a, b, cases[c].n_tokens, cases[c].n_kv_heads, cases[c].head_dim,
                                 KERNELS_ROWS_F16, i ? rows : expected_rows);
            if (i)
                assert_memory_equal(rows, expected_rows, 2 * n * sizeof *rows);
        }
        assert_int_equal(expected_rows[0], 0x7c00);
        const size_t n_bytes =
            (size_t)cases[c].n_tokens * cases[c].n_kv_heads * kernels_row_bytes(cases[c].head_dim, KERNELS_ROWS_Q8_0);
        for (uint32_t i = 0; i < fixture->n_instances; i++) {
            const struct fixture_instance *on = &fixture->instances[i];
            memset(rows, 0xff, n_bytes + 1);
            on->ops->encode_rows(on->backend, a, b, cases[c].n_tokens, cases[c].n_kv_heads, cases[c].head_dim,
                                 KERNELS_ROWS_Q8_0, i ? rows : expected_rows);
            if (i)
                assert_memory_equal(rows, expected_rows, n_bytes);
            assert_int_equal(((uint8_t *)rows)[n_bytes], 0xff);
        }
        assert_int_equal(((int8_t *)expected_rows)[0], 127);
    }
}

/* ---- attention ---- */

#define MAX_ITEMS  5u
#define MAX_PIECES 9u

struct attend_case {
    uint32_t n_items, n_queries[MAX_ITEMS], group, head_dim, n_pieces, causal_piece, causal_first;
};

static const struct attend_case attend_cases[] = {
    {1, {1}, 1, 64, 1, 1, 0},             /* one query, one piece */
    {3, {3, 3, 3}, 3, 64, 4, 3, 10},      /* decode with a causal last piece */
    {5, {1, 2, 9, 4, 7}, 1, 80, 3, 3, 0}, /* items of different sizes */
    {2, {192, 191}, 3, 64, 9, 8, 0},      /* a prefill tile of 64 positions */
    {1, {128}, 2, 31, 2, 0, 5},           /* causal piece first, from the middle of a block */
    {1, {448}, 7, 128, 3, 2, 0},          /* larger than one range */
    {1, {5}, 5, 256, 2, 1, 63},           /* everything visible in the causal piece */
    {1, {4}, 4, 8, 0, 0, 0},              /* no pieces */
};

static uint16_t block_rows[MAX_PIECES][64 * 2 * 256];
static struct backend_piece pieces[MAX_ITEMS][MAX_PIECES];
static struct backend_attend items[MAX_ITEMS];

static void start_partials(const struct attend_case *c, bool fresh)
{
    size_t at = 0;
    for (uint32_t i = 0; i < c->n_items; i++) {
        for (uint32_t query = 0; query < c->n_queries[i]; query++) {
            float *partial = out + at;
            at += KERNELS_PARTIAL_FLOATS(c->head_dim);
            for (uint32_t d = 0; d < 2 + c->head_dim; d++)
                partial[d] = fresh ? 0.0f : (float)((query * 31 + d * 7) % 17) * 0.1f + 0.1f;
            if (fresh)
                partial[0] = -INFINITY;
        }
    }
}

static size_t build_items(const struct attend_case *c, enum kernels_rows codec)
{
    size_t queries = 0;
    for (uint32_t p = 0; p < MAX_PIECES; p++) {
        fixture_fill(b, (size_t)64 * 2 * c->head_dim, 2.0f);
        for (uint32_t t = 0; t < 64; t++)
            kernels_get(KERNELS_ISA_PLAIN)
                ->encode_row(b + 2 * t * c->head_dim, b + (2 * t + 1) * c->head_dim, c->head_dim, codec,
                             (char *)block_rows[p] + t * kernels_row_bytes(c->head_dim, codec));
    }
    for (uint32_t i = 0; i < c->n_items; i++) {
        for (uint32_t p = 0; p < c->n_pieces; p++) {
            uint64_t mask = (uint64_t)fixture_random() << 32 | fixture_random();
            pieces[i][p] = (struct backend_piece){.rows = block_rows[(p + i) % MAX_PIECES],
                                                  .mask = p % 3 == 0   ? ~UINT64_C(0)
                                                          : p % 3 == 1 ? mask & mask >> 1
                                                                       : mask};
        }
        items[i] = (struct backend_attend){
            .q = a + queries * c->head_dim,
            .partials = out + queries * KERNELS_PARTIAL_FLOATS(c->head_dim),
            .pieces = pieces[i],
            .n_pieces = c->n_pieces,
            .n_queries = c->n_queries[i],
            .group = c->group,
            .causal_piece = c->causal_piece,
            .causal_first = c->causal_first,
        };
        queries += c->n_queries[i];
    }
    fixture_fill(a, queries * c->head_dim, 3.0f);
    return queries;
}

/* maximum within 2e-5, sum and out within 1e-4 of their sizes (values of up to 2). */
static void check_partials(const struct attend_case *c, const char *name, size_t n_queries)
{
    const size_t width = KERNELS_PARTIAL_FLOATS(c->head_dim);
    for (size_t query = 0; query < n_queries; query++) {
        const float *got = out + query * width, *want = expected + query * width;
        if (want[0] == -INFINITY) {
            assert_memory_equal(got, want, width * sizeof *got);
            continue;
        }
        fixture_near("attend: maximum", name, got, want, 1, 2e-5, 2e-6);
        fixture_near("attend: sum", name, got + 1, want + 1, 1, 0, 1e-4);
        fixture_near("attend: out", name, got + 2, want + 2, c->head_dim, 2e-4 * (double)want[1], 0);
    }
}

static void attend(void **state)
{
    const struct fixture *fixture = *state;
    for (size_t k = 0; k < 4 * sizeof attend_cases / sizeof *attend_cases; k++) {
        const struct attend_case *c = &attend_cases[k / 4];
        const bool fresh = k % 2 == 0;
        const enum kernels_rows codec = k / 2 % 2 ? KERNELS_ROWS_Q8_0 : KERNELS_ROWS_F16;
        const float scale = 1.0f / sqrtf((float)c->head_dim);
        const size_t n_queries = build_items(c, codec);
        const size_t width = KERNELS_PARTIAL_FLOATS(c->head_dim), n = n_queries * width;
        for (uint32_t i = 0; i < fixture->n_instances; i++) {
            const struct fixture_instance *on = &fixture->instances[i];
            start_partials(c, fresh);
            on->ops->attend(on->backend, items, c->n_items, c->head_dim, codec, scale);
            if (i == 0) {
                memcpy(expected, out, n * sizeof *out);
                continue;
            }
            check_partials(c, on->name, n_queries);

            /* the same bits from 2 threads, and item by item in positions of one at a time */
            if (i % 2 == 1) {
                memcpy(b, out, n * sizeof *out);
            } else {
                assert_memory_equal(b, out, n * sizeof *out);
                continue;
            }
            start_partials(c, fresh);
            for (uint32_t item = 0; item < c->n_items; item++) {
                for (uint32_t query = 0; query < items[item].n_queries; query += c->group) {
                    struct backend_attend one = items[item];
                    uint32_t left = one.n_queries - query;
                    one.q += (size_t)query * c->head_dim;
                    one.partials += query * width;
                    one.n_queries = left < c->group ? left : c->group;
                    one.causal_first += query / c->group;
                    on->ops->attend(on->backend, &one, 1, c->head_dim, codec, scale);
                }
            }
            assert_memory_equal(b, out, n * sizeof *out);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bytes_are_counted),
        cmocka_unit_test(bytes_of_weights_are_counted),
        cmocka_unit_test(names_and_memory),
        cmocka_unit_test(rms_norm),
        cmocka_unit_test(rope),
        cmocka_unit_test(swiglu),
        cmocka_unit_test(add),
        cmocka_unit_test(encode_rows),
        cmocka_unit_test(attend),
    };
    return cmocka_run_group_tests(tests, fixture_open, fixture_close);
}
