/*
 * test_matvec.c - matrices of all types in the CUDA back end's kernels, compiled for the CPU: products against the reference,
 * bits that do not depend on the batch, rows as embeddings, whole matrices in f16. Shapes of ../test_matmul.c.
 */
#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "gpu-worker/model/dequantize.h"
#include "kernels/half.h"
#include "tests/backend/cuda-on-cpu/device.h"
#include "tests/backend/fixture.h"

#define MAX_TOKENS  21u
#define MAX_ROWS    130u
#define MAX_COLUMNS 1024u

static float x[MAX_TOKENS * MAX_COLUMNS], y[MAX_TOKENS * MAX_ROWS], alone[MAX_ROWS];
static float numbers[MAX_ROWS * MAX_COLUMNS];
static uint16_t halves[MAX_ROWS * MAX_COLUMNS];

static const struct {
    uint32_t n_rows, n_columns;
} shapes[] = {
    {1, 1},  {5, 1},   {4, 7},   {7, 33},   {31, 100}, {1, 32},   {3, 32},   {8, 64},
    {9, 96}, {16, 32}, {65, 96}, {130, 64}, {1, 256},  {17, 256}, {40, 768}, {33, 1024},
};
#define N_SHAPES (sizeof shapes / sizeof *shapes)

/* The next type and shape that fit each other, from *k on; false: no more. numbers[] are then the tensor's. */
static bool next_case(size_t *k, struct tensor *ret_tensor)
{
    for (; *k < FIXTURE_N_TYPES * N_SHAPES; ++*k) {
        const enum tensor_type type = fixture_types[*k / N_SHAPES];
        const uint32_t n_rows = shapes[*k % N_SHAPES].n_rows, n_columns = shapes[*k % N_SHAPES].n_columns;
        const size_t row_bytes = tensor_row_bytes(type, n_columns);
        if (!row_bytes)
            continue;
        ++*k;
        *ret_tensor = fixture_tensor(type, n_rows, n_columns);
        for (uint32_t r = 0; r < n_rows; r++)
            assert_int_equal(dequantize_row(type, (const char *)ret_tensor->data + r * row_bytes, n_columns,
                                            numbers + (size_t)r * n_columns),
                             0);
        return true;
    }
    return false;
}

/* |error| <= 3e-6 sum |w x|: the rounding of up to 1024 / 32 + 5 sums in f32 */
static void check_products(const struct tensor *tensor, uint32_t n_tokens)
{
    for (uint32_t t = 0; t < n_tokens; t++) {
        for (uint32_t r = 0; r < tensor->n_rows; r++) {
            double sum = 0, size = 0;
            for (uint32_t c = 0; c < tensor->n_columns; c++) {
                const double term =
                    (double)numbers[(size_t)r * tensor->n_columns + c] * (double)x[(size_t)t * tensor->n_columns + c];
                sum += term;
                size += fabs(term);
            }
            const double got = (double)y[(size_t)t * tensor->n_rows + r];
            if (!(fabs(got - sum) <= 3e-6 * size + 1e-30))
                fail_msg("%s %ux%u, token %u of %u, row %u: %.9g, not %.9g (of %.3g)", tensor_type_name(tensor->type),
                         tensor->n_rows, tensor->n_columns, t, n_tokens, r, got, sum, size);
        }
    }
}

static void products(void **state)
{
    (void)state;
    static const uint32_t batches[] = {21, 3, 1, 8};
    struct tensor tensor;
    for (size_t k = 0; next_case(&k, &tensor);) {
        const uint32_t n_rows = tensor.n_rows, n_columns = tensor.n_columns;
        const size_t row_bytes = n_columns * sizeof *x;
        for (int i = 0; i < DEVICE_N_RUNS; i++) {
            const struct device_run run = device_run(i);
            const uint32_t n_tokens = batches[(k + (size_t)i) % 4];
            fixture_fill(x, (size_t)n_tokens * n_columns, 3.0f);
            void *matrix = device_new(tensor.data, tensor.n_bytes);
            float *in = device_new(x, n_tokens * row_bytes);
            float *to = device_new(NULL, (size_t)n_tokens * n_rows * sizeof *y);
            assert_int_equal(cuda_matvec(&run.queue, tensor.type, matrix, n_rows, n_columns, in, n_tokens, to),
                             cudaSuccess);
            device_read(y, to, (size_t)n_tokens * n_rows * sizeof *y);
            check_products(&tensor, n_tokens);
            /* the last token alone: the same bits, from another kernel */
            assert_int_equal(cuda_matvec(&run.queue, tensor.type, matrix, n_rows, n_columns,
                                         in + (size_t)(n_tokens - 1) * n_columns, 1, to),
                             cudaSuccess);
            device_read(alone, to, n_rows * sizeof *y);
            assert_memory_equal(alone, y + (size_t)(n_tokens - 1) * n_rows, n_rows * sizeof *y);
            device_free(matrix);
            device_free(in);
            device_free(to);
        }
        fixture_tensor_free(&tensor);
    }
}

static void a_nan_stays_in_its_row(void **state)
{
    (void)state;
    const uint32_t n_rows = 17, n_columns = 256, n_tokens = 6;
    const struct device_run run = device_run(1);
    for (size_t k = 0; k < FIXTURE_N_TYPES; k++) {
        struct tensor tensor = fixture_tensor(fixture_types[k], n_rows, n_columns);
        fixture_fill(x, (size_t)n_tokens * n_columns, 1.0f);
        x[2 * n_columns + 77] = NAN;
        x[4 * n_columns + 255] = INFINITY;
        void *matrix = device_new(tensor.data, tensor.n_bytes);
        float *in = device_new(x, (size_t)n_tokens * n_columns * sizeof *x);
        float *to = device_new(NULL, (size_t)n_tokens * n_rows * sizeof *y);
        assert_int_equal(cuda_matvec(&run.queue, tensor.type, matrix, n_rows, n_columns, in, n_tokens, to),
                         cudaSuccess);
        device_read(y, to, (size_t)n_tokens * n_rows * sizeof *y);
        for (uint32_t t = 0; t < n_tokens; t++)
            for (uint32_t r = 0; r < n_rows; r++)
                assert_int_equal(isfinite(y[t * n_rows + r]) != 0, t != 2 && t != 4);
        device_free(matrix);
        device_free(in);
        device_free(to);
        fixture_tensor_free(&tensor);
    }
}

/* To the bit. */
static void rows_as_embeddings(void **state)
{
    (void)state;
    struct tensor tensor;
    for (size_t k = 0; next_case(&k, &tensor);) {
        uint32_t ids[MAX_TOKENS];
        for (uint32_t t = 0; t < MAX_TOKENS; t++)
            ids[t] = fixture_random() % tensor.n_rows;
        const size_t row_bytes = tensor.n_columns * sizeof *x;
        for (int i = 0; i < DEVICE_N_RUNS; i++) {
            const struct device_run run = device_run(i);
            void *matrix = device_new(tensor.data, tensor.n_bytes);
            uint32_t *rows = device_new(ids, sizeof ids);
            float *to = device_new(NULL, MAX_TOKENS * row_bytes);
            assert_int_equal(cuda_embed(&run.queue, tensor.type, matrix, tensor.n_columns, rows, MAX_TOKENS, to),
                             cudaSuccess);
            device_read(x, to, MAX_TOKENS * row_bytes);
            for (uint32_t t = 0; t < MAX_TOKENS; t++)
                assert_memory_equal(x + (size_t)t * tensor.n_columns, numbers + (size_t)ids[t] * tensor.n_columns,
                                    row_bytes);
            device_free(matrix);
            device_free(rows);
            device_free(to);
        }
        fixture_tensor_free(&tensor);
    }
}

/* To the bit: the numbers rounded to nearest even. */
static void whole_matrices_in_f16(void **state)
{
    (void)state;
    struct tensor tensor;
    for (size_t k = 0; next_case(&k, &tensor);) {
        const size_t n = (size_t)tensor.n_rows * tensor.n_columns;
        const struct device_run run = device_run((int)(k % DEVICE_N_RUNS));
        void *matrix = device_new(tensor.data, tensor.n_bytes);
        uint16_t *to = device_new(NULL, n * sizeof *to);
        assert_int_equal(cuda_dequantize_f16(&run.queue, tensor.type, matrix, tensor.n_rows, tensor.n_columns, 1, to),
                         cudaSuccess);
        device_read(halves, to, n * sizeof *halves);
        for (size_t i = 0; i < n; i++)
            assert_int_equal(halves[i], half_encode(numbers[i]));
        device_free(matrix);
        device_free(to);
        fixture_tensor_free(&tensor);
    }
}

static void what_is_empty_or_unknown(void **state)
{
    (void)state;
    const struct device_run run = device_run(0);
    float *memory = device_new(NULL, 1024);
    uint16_t *to = (uint16_t *)(void *)memory;
    assert_int_equal(cuda_matvec(&run.queue, TENSOR_Q4_0, memory, 0, 32, memory, 1, memory), cudaSuccess);
    assert_int_equal(cuda_matvec(&run.queue, TENSOR_Q4_0, memory, 1, 32, memory, 0, memory), cudaSuccess);
    assert_int_equal(cuda_dequantize_f16(&run.queue, TENSOR_Q4_0, memory, 0, 32, 1, to), cudaSuccess);
    const enum tensor_type unknown = (enum tensor_type)23; /* IQ4_XS */
    assert_int_equal(cuda_matvec(&run.queue, unknown, memory, 1, 32, memory, 1, memory), cudaErrorInvalidValue);
    assert_int_equal(cuda_dequantize_f16(&run.queue, unknown, memory, 1, 32, 1, to), cudaErrorInvalidValue);
    device_free(memory);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(products),
        cmocka_unit_test(a_nan_stays_in_its_row),
        cmocka_unit_test(rows_as_embeddings),
        cmocka_unit_test(whole_matrices_in_f16),
        cmocka_unit_test(what_is_empty_or_unknown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
