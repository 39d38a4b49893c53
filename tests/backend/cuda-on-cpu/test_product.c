/*
 * test_product.c - `matmul` of the cuda back end on the emulated device, with cuBLAS and without, against sums in double: all types
 * of weights, odd shapes, few tokens and many, extreme rows; bits whatever the batch; what cuBLAS refuses.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "gpu-worker/backend/cuda/cuda_internal.h"
#include "gpu-worker/model/dequantize.h"
#include "tests/backend/cuda-on-cpu/blas_load.h"
#include "tests/backend/cuda-on-cpu/emulation_control.h"
#include "tests/backend/fixture.h"

#define MAX_TOKENS  257u
#define MAX_ROWS    130u
#define MAX_COLUMNS 1024u

static const uint32_t batches[] = {1, 7, 8, 9, 16, 17, 64, 257};
static const struct {
    uint32_t n_rows, n_columns;
} shapes[] = {{1, 1}, {5, 1}, {7, 33}, {31, 100}, {3, 32}, {65, 96}, {130, 64}, {17, 256}, {33, 1024}};
#ifdef HCATTN_SANITIZED
#define STEP 5 /* memory is what these builds look at; all of it takes them minutes */
#else
#define STEP 1
#endif
#define N_BATCHES (sizeof batches / sizeof *batches)
#define N_SHAPES  (sizeof shapes / sizeof *shapes)

static float x[MAX_TOKENS * MAX_COLUMNS], y[MAX_TOKENS * MAX_ROWS];
static float numbers[MAX_ROWS * MAX_COLUMNS];
static struct backend *cuda;

/* On a real device that is no failure. */
static void need_cublas(void)
{
#ifdef HCATTN_ON_DEVICE
    if (cuda->blas == NULL)
        skip();
#else
    assert_non_null(cuda->blas);
#endif
}

static void open_cuda(bool with_blas)
{
    char error[256];
    blas_load_set_there(with_blas);
    assert_int_equal(
        backend_cuda.open(&(struct backend_options){.device = BACKEND_DEVICE_BY_WORKER}, &cuda, error, sizeof error),
        0);
}

static int open_it(void **state)
{
    (void)state;
    open_cuda(true);
    return 0;
}

static int close_it(void **state)
{
    (void)state;
    cuda = backend_cuda.close(cuda);
    return 0;
}

/* y of the cuda back end; the sentence where it fails. */
static const char *multiply(const struct tensor *tensor, uint32_t n_tokens)
{
    const size_t x_bytes = (size_t)n_tokens * tensor->n_columns * sizeof *x;
    const size_t y_bytes = (size_t)n_tokens * tensor->n_rows * sizeof *y;
    struct weight *weight = NULL;
    assert_int_equal(backend_cuda.weight_new(cuda, tensor, &weight), 0);
    float *in = backend_cuda.alloc(cuda, x_bytes), *out = backend_cuda.alloc(cuda, y_bytes);
    backend_cuda.device->to_device(cuda, in, x, x_bytes);
    backend_cuda.matmul(cuda, (const struct weight *const *)&weight, 1, in, n_tokens, &out);
    backend_cuda.device->to_host(cuda, y, out, y_bytes);
    const char *sentence = backend_cuda.device->finish(cuda) < 0 ? backend_cuda.device->error(cuda) : NULL;
    backend_cuda.free(cuda, in);
    backend_cuda.free(cuda, out);
    backend_cuda.weight_free(cuda, weight);
    return sentence;
}

static struct tensor random_tensor(enum tensor_type type, uint32_t n_rows, uint32_t n_columns)
{
    struct tensor tensor = fixture_tensor(type, n_rows, n_columns);
    for (uint32_t r = 0; r < n_rows; r++)
        assert_int_equal(dequantize_row(type, (const char *)tensor.data + r * tensor_row_bytes(type, n_columns),
                                        n_columns, numbers + (size_t)r * n_columns),
                         0);
    return tensor;
}

/*
 * Against sums in double. Inputs and weights as halves are off by up to 2^-11 each, so a product by 2^-10 of the sum of |w x| at
 * most; errors of random signs leave 2^-11 of the root of the sum of squares. Few tokens: rounding of sums in f32 alone.
 */
static void check(const struct tensor *tensor, uint32_t n_tokens, bool in_halves)
{
    double errors = 0, squares = 0;
    const double most = in_halves ? 0x1p-10 : 3e-6, noise = in_halves ? 0x1p-11 : 1e-6;
    for (uint32_t t = 0; t < n_tokens; t++) {
        for (uint32_t r = 0; r < tensor->n_rows; r++) {
            double sum = 0, size = 0;
            for (uint32_t c = 0; c < tensor->n_columns; c++) {
                const double term =
                    (double)numbers[(size_t)r * tensor->n_columns + c] * (double)x[(size_t)t * tensor->n_columns + c];
                sum += term;
                size += fabs(term);
                squares += term * term;
            }
            const double got = (double)y[(size_t)t * tensor->n_rows + r];
            errors += (got - sum) * (got - sum);
            if (!(fabs(got - sum) <= most * size + 1e-30))
                fail_msg("%s %ux%u, token %u of %u, row %u: %.9g, not %.9g (of %.3g)", tensor_type_name(tensor->type),
                         tensor->n_rows, tensor->n_columns, t, n_tokens, r, got, sum, size);
        }
    }
    if (!(sqrt(errors) <= noise * sqrt(squares) + 1e-30))
        fail_msg("%s %ux%u, %u tokens: error %.3g of %.3g", tensor_type_name(tensor->type), tensor->n_rows,
                 tensor->n_columns, n_tokens, sqrt(errors), sqrt(squares));
}

static void all_types_and_shapes(bool with_blas, size_t step)
{
    for (size_t k = 0; k < FIXTURE_N_TYPES * N_SHAPES; k += step) {
        const enum tensor_type type = fixture_types[k / N_SHAPES];
        if (!tensor_row_bytes(type, shapes[k % N_SHAPES].n_columns))
            continue;
        struct tensor tensor = random_tensor(type, shapes[k % N_SHAPES].n_rows, shapes[k % N_SHAPES].n_columns);
        for (size_t b = 0; b < N_BATCHES; b++) {
            emulation_set_seed((k + b) % 3);
            fixture_fill(x, (size_t)batches[b] * tensor.n_columns, 3.0f);
            assert_null(multiply(&tensor, batches[b]));
            check(&tensor, batches[b], with_blas && batches[b] > (type == TENSOR_F16 ? 8 : 16));
        }
        fixture_tensor_free(&tensor);
    }
}

static void products(void **state)
{
    (void)state;
    need_cublas();
    assert_non_null(strstr(backend_cuda.describe(cuda), ", cuBLAS 13."));
    all_types_and_shapes(true, STEP);
}

static void products_without_cublas(void **state)
{
    (void)state;
    backend_cuda.close(cuda);
    open_cuda(false);
    assert_non_null(strstr(backend_cuda.describe(cuda),
                           "no cuBLAS: libcublas.so.13: cannot open shared object file: No such file or directory"));
    all_types_and_shapes(false, 6 * STEP - 1);
    backend_cuda.close(cuda);
    open_cuda(true);
}

/* Rows that halves could not hold as they are keep what they are beside any other row. */
static void extreme_rows(void **state)
{
    (void)state;
    need_cublas();
    static const float sizes[] = {1e30f, 1e-30f, 65520.0f, 1e-6f, 3e38f, 0.0f};
    const uint32_t n_tokens = 18, n_columns = 96, n_rows = 9;
    for (size_t k = 0; k < FIXTURE_N_TYPES; k++) {
        if (!tensor_row_bytes(fixture_types[k], n_columns))
            continue;
        struct tensor tensor = random_tensor(fixture_types[k], n_rows, n_columns);
        for (uint32_t t = 0; t < n_tokens; t++)
            fixture_fill(x + t * n_columns, n_columns, t < 6 ? sizes[t] / 1024 : 1.0f);
        x[1 * n_columns + 3] = 1e-38f; /* small ones beside a small one */
        x[7 * n_columns + 5] = 1e-9f;
        assert_null(multiply(&tensor, n_tokens));
        check(&tensor, n_tokens, true);
        for (uint32_t r = 0; r < n_rows; r++)
            assert_true(y[5 * n_rows + r] == 0.0f);

        x[2 * n_columns + 77] = NAN;
        x[4 * n_columns + 95] = INFINITY;
        assert_null(multiply(&tensor, n_tokens));
        for (uint32_t t = 0; t < n_tokens; t++)
            for (uint32_t r = 0; r < n_rows; r++)
                assert_int_equal(isfinite(y[t * n_rows + r]) != 0, t != 2 && t != 4);
        fixture_tensor_free(&tensor);
    }
}

/* Weights far out of the range of halves, and some that are tiny beside others. */
static void extreme_weights(void **state)
{
    (void)state;
    need_cublas();
    const uint32_t n_rows = 9, n_columns = 64, n_tokens = 17;
    static const float sizes[] = {1e25f, 1e-25f, 1.0f};
    for (size_t k = 0; k < 6; k++) {
        const enum tensor_type type = k % 2 ? TENSOR_BF16 : TENSOR_F32;
        static uint16_t short_ones[9 * 64];
        fixture_fill(numbers, n_rows * n_columns, sizes[k / 2]);
        for (uint32_t i = 0; i < n_rows * n_columns; i++) {
            uint32_t word;
            if (i % 5 == 0)
                numbers[i] *= 1e-6f;
            memcpy(&word, &numbers[i], sizeof word);
            short_ones[i] = (uint16_t)(word >> 16);
            word &= 0xffff0000u;
            if (type == TENSOR_BF16)
                memcpy(&numbers[i], &word, sizeof word);
        }
        const struct tensor tensor = {.type = type,
                                      .n_rows = n_rows,
                                      .n_columns = n_columns,
                                      .data = type == TENSOR_BF16 ? (const void *)short_ones : numbers,
                                      .n_bytes = n_rows * tensor_row_bytes(type, n_columns)};
        fixture_fill(x, (size_t)n_tokens * n_columns, 1.0f);
        assert_null(multiply(&tensor, n_tokens));
        check(&tensor, n_tokens, true);
    }
}

/* A row's bits are those of the same row in a batch of any other size that goes the same way: cuBLAS sees one shape. */
static void bits_whatever_the_batch(void **state)
{
    (void)state;
    need_cublas();
    static float all[MAX_TOKENS * MAX_ROWS];
    static const uint32_t some[] = {MAX_TOKENS, 200, 128, 99, 17};
    struct tensor tensor = random_tensor(TENSOR_Q4_K, 65, 256);
    fixture_fill(x, (size_t)MAX_TOKENS * 256, 3.0f);
    assert_null(multiply(&tensor, MAX_TOKENS));
    memcpy(all, y, sizeof all);
    for (size_t i = 0; i < sizeof some / sizeof *some; i++) {
        assert_null(multiply(&tensor, some[i]));
        assert_memory_equal(y, all, (size_t)some[i] * 65 * sizeof *y);
    }
    fixture_tensor_free(&tensor);
}

/* Several matrices of one input, one of them in pieces: as each alone. */
static void large_and_together(void **state)
{
    (void)state;
    need_cublas();
    enum { COLUMNS = 32, ROWS = 16384 + 70, TOKENS = 17 };
    struct tensor tensors[2] = {fixture_tensor(TENSOR_Q8_0, ROWS, COLUMNS), fixture_tensor(TENSOR_F16, ROWS, COLUMNS)};
    struct weight *weights[2] = {NULL};
    float *out[2], *got = malloc((size_t)TOKENS * ROWS * sizeof *got), row[COLUMNS];
    fixture_fill(x, TOKENS * COLUMNS, 2.0f);
    float *in = backend_cuda.alloc(cuda, TOKENS * COLUMNS * sizeof *x);
    backend_cuda.device->to_device(cuda, in, x, TOKENS * COLUMNS * sizeof *x);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(backend_cuda.weight_new(cuda, &tensors[i], &weights[i]), 0);
        out[i] = backend_cuda.alloc(cuda, (size_t)TOKENS * ROWS * sizeof *got);
    }
    backend_cuda.matmul(cuda, (const struct weight *const *)weights, 2, in, TOKENS, out);
    for (int i = 0; i < 2; i++) {
        backend_cuda.device->to_host(cuda, got, out[i], (size_t)TOKENS * ROWS * sizeof *got);
        assert_int_equal(backend_cuda.device->finish(cuda), 0);
        for (uint32_t r = 0; r < ROWS; r += r < 16000 ? 997 : 1) {
            assert_int_equal(
                dequantize_row(tensors[i].type,
                               (const char *)tensors[i].data + r * tensor_row_bytes(tensors[i].type, COLUMNS), COLUMNS,
                               row),
                0);
            for (uint32_t t = 0; t < TOKENS; t++) {
                double sum = 0, size = 0;
                for (uint32_t c = 0; c < COLUMNS; c++) {
                    sum += (double)row[c] * (double)x[t * COLUMNS + c];
                    size += fabs((double)row[c] * (double)x[t * COLUMNS + c]);
                }
                assert_true(fabs((double)got[(size_t)t * ROWS + r] - sum) <= 0x1p-10 * size);
            }
        }
        backend_cuda.weight_free(cuda, weights[i]);
        backend_cuda.free(cuda, out[i]);
        fixture_tensor_free(&tensors[i]);
    }
    backend_cuda.free(cuda, in);
    free(got);
}

/* A refusal is told once, with the call's name, and all goes on after it. */
static void what_cublas_refuses(void **state)
{
    (void)state;
    need_cublas();
    struct tensor tensor = random_tensor(TENSOR_Q4_0, 9, 96);
    fixture_fill(x, 17 * 96, 1.0f);
    blas_load_refuse(0);
    const char *sentence = multiply(&tensor, 17);
    assert_non_null(sentence);
    assert_string_equal(sentence, "cublasGemmEx: CUBLAS_STATUS_NOT_SUPPORTED");
    assert_null(multiply(&tensor, 17));
    check(&tensor, 17, true);
    fixture_tensor_free(&tensor);
}

/* All memory is counted, and given back. */
static void memory_is_counted(void **state)
{
    (void)state;
    need_cublas();
    assert_true(backend_cuda.bytes(cuda) >= (size_t)32 << 20); /* cuBLAS's */
    emulation_set_device_bytes((size_t)16 << 20);
    backend_cuda.close(cuda);
    open_cuda(true);
    assert_non_null(
        strstr(backend_cuda.describe(cuda), "no cuBLAS: cublasSetWorkspace_v2: CUBLAS_STATUS_ALLOC_FAILED"));
    emulation_set_device_bytes((size_t)8 << 30);
    backend_cuda.close(cuda);
    open_cuda(true);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(products),
        cmocka_unit_test(products_without_cublas),
        cmocka_unit_test(extreme_rows),
        cmocka_unit_test(extreme_weights),
        cmocka_unit_test(bits_whatever_the_batch),
        cmocka_unit_test(large_and_together),
        cmocka_unit_test(what_cublas_refuses),
        cmocka_unit_test(memory_is_counted),
    };
    return cmocka_run_group_tests(tests, open_it, close_it);
}
