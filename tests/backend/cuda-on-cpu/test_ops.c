/*
 * test_ops.c - the CUDA back end's operations but the products (test_matvec.c), compiled for the CPU, against the reference:
 * the shapes of ../test_ops.c, several block sizes, threads in order and at random.
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

#define MAX_NUMBERS (1u << 20)

static float a[MAX_NUMBERS], b[MAX_NUMBERS], out[MAX_NUMBERS], expected[MAX_NUMBERS];

static const struct backend_ops *const reference = &backend_reference;
static struct backend *reference_backend;

static int open_reference(void **state)
{
    (void)state;
    char error[64];
    kernels_thread_setup();
    return reference->open(&(struct backend_options){0}, &reference_backend, error, sizeof error);
}

static int close_reference(void **state)
{
    (void)state;
    reference_backend = reference->close(reference_backend);
    return 0;
}

/* |error| <= 1e-5 |expected|; the same bits alone as in a batch, and in place. */
static void rms_norm(void **state)
{
    (void)state;
    static const uint32_t sizes[] = {1, 7, 8, 64, 100, 576, 1000, 4096};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        const uint32_t n = sizes[s], n_tokens = s % 2 ? 20 : 5;
        const size_t n_bytes = (size_t)n_tokens * n * sizeof *a, row_bytes = n * sizeof *a;
        struct tensor tensor = fixture_tensor(TENSOR_F32, 1, n);
        fixture_fill(a, (size_t)n_tokens * n, 5.0f);
        memset(a + n, 0, row_bytes); /* a row of zeros: only eps */
        struct weight *weight = NULL;
        assert_int_equal(reference->weight_new(reference_backend, &tensor, &weight), 0);
        reference->rms_norm(reference_backend, a, n_tokens, n, weight, 1e-5f, expected);
        reference->weight_free(reference_backend, weight);
        for (int i = 0; i < DEVICE_N_RUNS; i++) {
            const struct device_run run = device_run(i);
            float *x = device_new(a, n_bytes), *w = device_new(tensor.data, row_bytes), *y = device_new(NULL, n_bytes);
            assert_int_equal(cuda_rms_norm(&run.queue, x, n_tokens, n, w, 1e-5f, y), cudaSuccess);
            device_read(out, y, n_bytes);
            fixture_near("rms_norm", "cuda", out, expected, (size_t)n_tokens * n, 1e-30, 1e-5);
            for (uint32_t t = 0; t < n_tokens; t += 3) {
                assert_int_equal(cuda_rms_norm(&run.queue, x + (size_t)t * n, 1, n, w, 1e-5f, y), cudaSuccess);
                device_read(b, y, row_bytes);
                assert_memory_equal(b, out + (size_t)t * n, row_bytes);
            }
            assert_int_equal(cuda_rms_norm(&run.queue, x, n_tokens, n, w, 1e-5f, x), cudaSuccess);
            device_read(b, x, n_bytes);
            assert_memory_equal(b, out, n_bytes);
            device_free(x);
            device_free(y);
            device_free(w);
        }
        fixture_tensor_free(&tensor);
    }
}

/* |error| <= 5e-6 for |x| <= 2, at any position; what is not rotated stays to the bit; the same bits alone. */
static void rope(void **state)
{
    (void)state;
    static const struct {
        uint32_t head_dim, n_rotated, n_heads, n_tokens;
    } cases[] = {{64, 64, 3, 1},    {64, 64, 9, 50},  {80, 32, 1, 7}, {2, 2, 1, 3},
                 {128, 128, 4, 17}, {256, 256, 2, 5}, {4, 4, 1, 2100}};
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        const uint32_t n_tokens = cases[c].n_tokens, n_heads = cases[c].n_heads, head_dim = cases[c].head_dim;
        const size_t n = (size_t)n_tokens * n_heads * head_dim, row = (size_t)n_heads * head_dim;
        const uint32_t n_rotated = cases[c].n_rotated;
        float frequencies[128];
        uint32_t positions[2100];
        for (uint32_t i = 0; i < n_rotated / 2; i++)
            frequencies[i] = powf(10000.0f, -2.0f * (float)i / (float)n_rotated);
        for (uint32_t t = 0; t < n_tokens; t++)
            positions[t] = t % 3 == 2 ? 4000000 - t : t;
        fixture_fill(a, n, 2.0f);
        const struct backend_rope rotation = {
            .n_rotated = n_rotated, .frequencies = frequencies, .magnitude = c % 2 ? 1.25f : 1.0f};
        memcpy(expected, a, n * sizeof *a);
        reference->rope(reference_backend, expected, n_tokens, n_heads, head_dim, positions, &rotation);
        for (int i = 0; i < DEVICE_N_RUNS; i++) {
            const struct device_run run = device_run(i);
            float *x = device_new(a, n * sizeof *a), *f = device_new(frequencies, n_rotated / 2 * sizeof *f);
            uint32_t *p = device_new(positions, n_tokens * sizeof *p);
            assert_int_equal(cuda_rope(&run.queue, x, n_tokens, n_heads, head_dim, p, n_rotated, f, rotation.magnitude),
                             cudaSuccess);
            device_read(out, x, n * sizeof *a);
            fixture_near("rope", "cuda", out, expected, n, 5e-6, 0);
            for (size_t head = 0; head < (size_t)n_tokens * n_heads; head++)
                assert_memory_equal(out + head * head_dim + n_rotated, a + head * head_dim + n_rotated,
                                    (head_dim - n_rotated) * sizeof *a);
            float *last = device_new(a + n - row, row * sizeof *a);
            assert_int_equal(
                cuda_rope(&run.queue, last, 1, n_heads, head_dim, p + n_tokens - 1, n_rotated, f, rotation.magnitude),
                cudaSuccess);
            device_read(b, last, row * sizeof *a);
            assert_memory_equal(b, out + n - row, row * sizeof *a);
            device_free(x);
            device_free(f);
            device_free(p);
            device_free(last);
        }
    }
}

/* |error| <= 2e-6 |expected|, up to the largest and smallest gates. */
static void swiglu(void **state)
{
    (void)state;
    static const uint32_t sizes[] = {1, 7, 24, 165, 3072, 92160};
    static const float special[] = {0.0f, -0.0f, 1e30f, -1e30f, 88.9f, -88.9f, -87.0f, -103.9f, 3e38f, -3e38f, 1e-30f};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        const uint32_t n = sizes[s];
        fixture_fill(a, n, 20.0f);
        fixture_fill(b, n, 0.9f);
        for (size_t i = 0; i < sizeof special / sizeof *special && i < n; i++)
            a[i] = special[i];
        memcpy(expected, a, n * sizeof *a);
        reference->swiglu(reference_backend, expected, b, 1, n);
        for (int i = 0; i < DEVICE_N_RUNS; i++) {
            const struct device_run run = device_run(i);
            float *gate = device_new(a, n * sizeof *a), *up = device_new(b, n * sizeof *b);
            assert_int_equal(cuda_swiglu(&run.queue, gate, up, n), cudaSuccess);
            device_read(out, gate, n * sizeof *a);
            fixture_near("swiglu", "cuda", out, expected, n, 1e-35, 2e-6);
            device_free(gate);
            device_free(up);
        }
    }
}

/* To the bit. */
static void add(void **state)
{
    (void)state;
    static const size_t sizes[] = {0, 1, 7, 8, 33, 8191, 8193, 100000};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        const size_t n = sizes[s];
        fixture_fill(a, n + 1, 2.0f);
        fixture_fill(b, n + 1, 2.0f);
        for (int i = 0; i < DEVICE_N_RUNS; i++) {
            const struct device_run run = device_run(i);
            float *x = device_new(a, (n + 1) * sizeof *a), *y = device_new(b, (n + 1) * sizeof *b);
            assert_int_equal(cuda_add(&run.queue, x, y, n), cudaSuccess);
            device_read(out, x, (n + 1) * sizeof *a);
            for (size_t at = 0; at < n; at++)
                assert_true(out[at] == a[at] + b[at]);
            assert_true(out[n] == a[n]);
            device_free(x);
            device_free(y);
        }
    }
}

/* To the bit, with NaNs, infinities, groups of zeros and of numbers too small for a scale. */
static void encode_rows(void **state)
{
    (void)state;
    static uint8_t rows[4 * MAX_NUMBERS], expected_rows[4 * MAX_NUMBERS];
    static const enum kernels_rows codecs[] = {KERNELS_ROWS_F16, KERNELS_ROWS_Q8_0};
    static const struct {
        uint32_t n_tokens, n_kv_heads, head_dim;
    } cases[] = {{1, 1, 1}, {3, 3, 64}, {5, 2, 31}, {50, 8, 128}, {1, 4, 256}, {7, 1, 80}};
    for (size_t c = 0; c < 2 * sizeof cases / sizeof *cases; c++) {
        const uint32_t n_tokens = cases[c / 2].n_tokens, n_kv_heads = cases[c / 2].n_kv_heads;
        const uint32_t head_dim = cases[c / 2].head_dim;
        const size_t n = (size_t)n_tokens * n_kv_heads * head_dim;
        const enum kernels_rows codec = codecs[c % 2];
        const size_t n_bytes = (size_t)n_tokens * n_kv_heads * kernels_row_bytes(head_dim, codec);
        fixture_fill(a, n, 100.0f);
        fixture_fill(b, n, 0.001f);
        a[0] = 1e9f;
        for (size_t i = 0; n > 1000 && i < 96; i++)
            a[128 + i] = i < 32 ? 0.0f : i < 64 ? fixture_uniform(1e-9f) : fixture_uniform(1e-5f);
        if (n > 1000) {
            const uint32_t quiet = 0xffc12345u;
            memcpy(a + 300, &quiet, sizeof quiet);
            b[77] = INFINITY;
            b[177] = -INFINITY;
            a[400] = 65519.9f; /* the largest that stays finite in f16 */
            a[401] = 65520.0f;
        }
        reference->encode_rows(reference_backend, a, b, n_tokens, n_kv_heads, head_dim, codec, expected_rows);
        for (int i = 0; i < DEVICE_N_RUNS; i++) {
            const struct device_run run = device_run(i);
            float *k = device_new(a, n * sizeof *a), *v = device_new(b, n * sizeof *b);
            void *to = device_new(NULL, n_bytes);
            assert_int_equal(cuda_encode_rows(&run.queue, k, v, n_tokens, n_kv_heads, head_dim, codec, to),
                             cudaSuccess);
            device_read(rows, to, n_bytes);
            assert_memory_equal(rows, expected_rows, n_bytes);
            device_free(k);
            device_free(v);
            device_free(to);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rms_norm), cmocka_unit_test(rope),        cmocka_unit_test(swiglu),
        cmocka_unit_test(add),      cmocka_unit_test(encode_rows),
    };
    return cmocka_run_group_tests(tests, open_reference, close_reference);
}
