/* test_matmul.c - matrices of all types: products against the reference, bits that do not depend on the batch. */
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
#include "tests/backend/fixture.h"

#define MAX_TOKENS  520u
#define MAX_ROWS    130u
#define MAX_COLUMNS 1024u

static float x[MAX_TOKENS * MAX_COLUMNS];
static float y[MAX_TOKENS * MAX_ROWS];
static float expected[MAX_TOKENS * MAX_ROWS];

static const struct {
    uint32_t n_rows, n_columns;
} shapes[] = {
    {1, 1},  {5, 1},   {4, 7},   {7, 33},   {31, 100}, {1, 32},   {3, 32},   {8, 64},
    {9, 96}, {16, 32}, {65, 96}, {130, 64}, {1, 256},  {17, 256}, {40, 768}, {33, 1024},
};
#define N_SHAPES (sizeof shapes / sizeof *shapes)

static bool fits(enum tensor_type type, size_t shape)
{
    return tensor_row_bytes(type, shapes[shape].n_columns) != 0;
}

static bool is_quantized(enum tensor_type type)
{
    return type != TENSOR_F32 && type != TENSOR_F16 && type != TENSOR_BF16;
}

static void multiply(const struct fixture_instance *on, const struct tensor *tensor, const float *in, uint32_t n_tokens,
                     float *out)
{
    struct weight *weight = NULL;
    assert_int_equal(on->ops->weight_new(on->backend, tensor, &weight), 0);
    on->ops->matmul(on->backend, (const struct weight *const *)&weight, 1, in, n_tokens, &out);
    assert_null(on->ops->weight_free(on->backend, weight));
}

/* sum |w x| of every output: the scale of rounding errors */
static double size_of(const struct tensor *tensor, uint32_t row, const float *in)
{
    static float values[MAX_COLUMNS];
    double size = 0;
    const char *data = tensor->data;
    assert_int_equal(dequantize_row(tensor->type, data + row * tensor_row_bytes(tensor->type, tensor->n_columns),
                                    tensor->n_columns, values),
                     0);
    for (uint32_t c = 0; c < tensor->n_columns; c++)
        size += fabs((double)values[c] * (double)in[c]);
    return size;
}

/* Inputs that 16 bits hold exactly leave only rounding: |error| <= 2e-6 sum |w x|. A weight with a minimum is a difference of
 * terms up to some times its size (Q6_K: 32 of 32), which the sum of |w| does not see: hence 2e-5 of the largest. */
static void exact_inputs_give_exact_products(void **state)
{
    const struct fixture *fixture = *state;
    const uint32_t n_tokens = 5;
    for (size_t k = 0; k < FIXTURE_N_TYPES; k++) {
        for (size_t s = 0; s < N_SHAPES; s++) {
            if (!fits(fixture_types[k], s))
                continue;
            const uint32_t n_rows = shapes[s].n_rows, n_columns = shapes[s].n_columns;
            struct tensor tensor = fixture_tensor(fixture_types[k], n_rows, n_columns);
            for (size_t i = 0; i < (size_t)n_tokens * n_columns; i++)
                x[i] = i % n_columns % 32 == 7 ? 32767.0f : (float)(int)(fixture_random() % 65535) - 32767.0f;
            multiply(&fixture->instances[0], &tensor, x, n_tokens, expected);
            for (uint32_t i = 1; i < fixture->n_instances; i++) {
                multiply(&fixture->instances[i], &tensor, x, n_tokens, y);
                for (uint32_t t = 0; t < n_tokens; t++)
                    for (uint32_t r = 0; r < n_rows; r++)
                        fixture_near(tensor_type_name((uint32_t)tensor.type), fixture->instances[i].name,
                                     &y[t * n_rows + r], &expected[t * n_rows + r], 1,
                                     1e-6 + 2e-5 * size_of(&tensor, r, x + (size_t)t * n_columns), 0);
            }
            fixture_tensor_free(&tensor);
        }
    }
}

/* Any input: each x is off by at most half a step of its block, and on the whole the error is that of 16-bit noise. */
static void any_input_within_the_noise_of_16_bits(void **state)
{
    const struct fixture *fixture = *state;
    const uint32_t n_tokens = 6;
    for (size_t k = 0; k < FIXTURE_N_TYPES; k++) {
        for (size_t s = 0; s < N_SHAPES; s++) {
            if (!fits(fixture_types[k], s))
                continue;
            const uint32_t n_rows = shapes[s].n_rows, n_columns = shapes[s].n_columns;
            struct tensor tensor = fixture_tensor(fixture_types[k], n_rows, n_columns);
            fixture_fill(x, (size_t)n_tokens * n_columns, 3.0f);
            multiply(&fixture->instances[0], &tensor, x, n_tokens, expected);
            for (uint32_t i = 1; i < fixture->n_instances; i++) {
                multiply(&fixture->instances[i], &tensor, x, n_tokens, y);
                double error = 0, size = 0;
                for (uint32_t at = 0; at < n_tokens * n_rows; at++) {
                    double difference = (double)y[at] - (double)expected[at];
                    double sum = size_of(&tensor, at % n_rows, x + (size_t)(at / n_rows) * n_columns);
                    assert_true(fabs(difference) <= 1e-4 * sum + 1e-6);
                    error += difference * difference;
                    size += sum * sum / n_columns; /* what a sum of terms with random signs would have */
                }
                double limit = is_quantized(tensor.type) && n_rows > 1 ? 5e-5 : 1e-5;
                if (!(sqrt(error) <= limit * sqrt(size) + 1e-6))
                    fail_msg("%s %ux%u on %s: error %.3g of %.3g", tensor_type_name((uint32_t)tensor.type), n_rows,
                             n_columns, fixture->instances[i].name, sqrt(error), sqrt(size));
            }
            fixture_tensor_free(&tensor);
        }
    }
}

static void bits_do_not_depend_on_the_batch(void **state)
{
    const struct fixture *fixture = *state;
#ifdef HCATTN_SANITIZED
    static const uint32_t steps[] = {3, 33}; /* memory is what these builds look at; all of it takes them minutes */
#else
    static const uint32_t steps[] = {1, 2, 3, 4, 7, 33, 64, 65};
#endif
    for (size_t k = 0; k < FIXTURE_N_TYPES; k++) {
        for (size_t s = 0; s < N_SHAPES; s++) {
            if (!fits(fixture_types[k], s) || shapes[s].n_columns > 256)
                continue;
            const uint32_t n_rows = shapes[s].n_rows, n_columns = shapes[s].n_columns;
            const uint32_t n_tokens = n_rows == 17 ? MAX_TOKENS : 66;
            struct tensor tensor = fixture_tensor(fixture_types[k], n_rows, n_columns);
            fixture_fill(x, (size_t)n_tokens * n_columns, 3.0f);
            for (uint32_t i = 1; i < fixture->n_instances; i++) {
                const struct fixture_instance *on = &fixture->instances[i];
                struct weight *weight = NULL;
                assert_int_equal(on->ops->weight_new(on->backend, &tensor, &weight), 0);
                /* instances come in pairs: 1 thread, then 2 on the same instruction set */
                float *all = expected;
                if (i % 2 == 1)
                    on->ops->matmul(on->backend, (const struct weight *const *)&weight, 1, x, n_tokens, &all);
                for (size_t step = 0; step < sizeof steps / sizeof *steps; step++) {
                    memset(y, 0xff, (size_t)n_tokens * n_rows * sizeof *y);
                    for (uint32_t t = 0; t < n_tokens; t += steps[step]) {
                        uint32_t n = n_tokens - t < steps[step] ? n_tokens - t : steps[step];
                        float *out = y + (size_t)t * n_rows;
                        on->ops->matmul(on->backend, (const struct weight *const *)&weight, 1,
                                        x + (size_t)t * n_columns, n, &out);
                    }
                    if (memcmp(y, expected, (size_t)n_tokens * n_rows * sizeof *y) != 0)
                        fail_msg("%s %ux%u on %s: %u tokens at a time differ", tensor_type_name((uint32_t)tensor.type),
                                 n_rows, n_columns, on->name, steps[step]);
                }
                on->ops->weight_free(on->backend, weight);
            }
            fixture_tensor_free(&tensor);
        }
    }
}

static void several_matrices_of_one_input(void **state)
{
    const struct fixture *fixture = *state;
    const uint32_t n_columns = 256, n_tokens = 70;
    static const uint32_t rows[4] = {33, 1, 130, 9};
    static const enum tensor_type types[4] = {TENSOR_Q4_K, TENSOR_Q8_0, TENSOR_F16, TENSOR_Q6_K};
    static float together[4][70 * MAX_ROWS];
    fixture_fill(x, (size_t)n_tokens * n_columns, 1.0f);
    for (uint32_t i = 0; i < fixture->n_instances; i++) {
        const struct fixture_instance *on = &fixture->instances[i];
        struct tensor tensors[4];
        struct weight *weights[4];
        float *out[4];
        for (int w = 0; w < 4; w++) {
            tensors[w] = fixture_tensor(types[w], rows[w], n_columns);
            assert_int_equal(on->ops->weight_new(on->backend, &tensors[w], &weights[w]), 0);
            out[w] = together[w];
            memset(together[w], 0xff, sizeof together[w]);
        }
        on->ops->matmul(on->backend, (const struct weight *const *)weights, 4, x, n_tokens, out);
        for (int w = 0; w < 4; w++) {
            multiply(on, &tensors[w], x, n_tokens, y);
            assert_memory_equal(y, together[w], (size_t)n_tokens * rows[w] * sizeof *y);
            on->ops->weight_free(on->backend, weights[w]);
            fixture_tensor_free(&tensors[w]);
        }
    }
}

static void a_nan_stays_in_its_row(void **state)
{
    const struct fixture *fixture = *state;
    const uint32_t n_rows = 17, n_columns = 256, n_tokens = 6;
    for (size_t k = 0; k < FIXTURE_N_TYPES; k++) {
        struct tensor tensor = fixture_tensor(fixture_types[k], n_rows, n_columns);
        for (uint32_t i = 0; i < fixture->n_instances; i++) {
            fixture_fill(x, (size_t)n_tokens * n_columns, 1.0f);
            multiply(&fixture->instances[i], &tensor, x, n_tokens, expected);
            x[2 * n_columns + 77] = NAN;
            x[4 * n_columns + 255] = INFINITY;
            multiply(&fixture->instances[i], &tensor, x, n_tokens, y);
            for (uint32_t t = 0; t < n_tokens; t++) {
                for (uint32_t r = 0; r < n_rows; r++) {
                    if (t == 2 || t == 4)
                        assert_true(!isfinite(y[t * n_rows + r]));
                    else
                        assert_true(y[t * n_rows + r] == expected[t * n_rows + r]);
                }
            }
        }
        fixture_tensor_free(&tensor);
    }
}

static void zero_and_tiny_inputs(void **state)
{
    const struct fixture *fixture = *state;
    struct tensor tensor = fixture_tensor(TENSOR_Q4_1, 9, 64);
    for (uint32_t i = 0; i < fixture->n_instances; i++) {
        for (uint32_t c = 0; c < 128; c++)
            x[c] = c < 64 ? 0.0f : 1e-39f;
        multiply(&fixture->instances[i], &tensor, x, 2, y);
        for (uint32_t at = 0; at < 18; at++)
            assert_true(fabsf(y[at]) < 1e-35f);
    }
    fixture_tensor_free(&tensor);
}

static void rows_as_embeddings(void **state)
{
    const struct fixture *fixture = *state;
    for (size_t k = 0; k < FIXTURE_N_TYPES; k++) {
        for (size_t s = 0; s < N_SHAPES; s++) {
            if (!fits(fixture_types[k], s))
                continue;
            struct tensor tensor = fixture_tensor(fixture_types[k], shapes[s].n_rows, shapes[s].n_columns);
            uint32_t ids[80];
            for (uint32_t t = 0; t < 80; t++)
                ids[t] = fixture_random() % tensor.n_rows;
            for (uint32_t i = 0; i < fixture->n_instances; i++) {
                const struct fixture_instance *on = &fixture->instances[i];
                struct weight *weight = NULL;
                assert_int_equal(on->ops->weight_new(on->backend, &tensor, &weight), 0);
                on->ops->embed(on->backend, weight, ids, 80, x);
                for (uint32_t t = 0; t < 80; t++) {
                    static float row[MAX_COLUMNS];
                    const char *data = tensor.data;
                    assert_int_equal(dequantize_row(tensor.type,
                                                    data + ids[t] * tensor_row_bytes(tensor.type, tensor.n_columns),
                                                    tensor.n_columns, row),
                                     0);
                    assert_memory_equal(x + (size_t)t * tensor.n_columns, row, tensor.n_columns * sizeof *row);
                }
                on->ops->weight_free(on->backend, weight);
            }
            fixture_tensor_free(&tensor);
        }
    }
}

static void weights_say_what_they_are(void **state)
{
    const struct fixture *fixture = *state;
    for (uint32_t i = 0; i < fixture->n_instances; i++) {
        const struct fixture_instance *on = &fixture->instances[i];
        struct weight *weight = NULL;
        for (size_t k = 0; k < FIXTURE_N_TYPES; k++) {
            struct tensor tensor = fixture_tensor(fixture_types[k], 64, 256);
            assert_int_equal(on->ops->weight_new(on->backend, &tensor, &weight), 0);
            size_t n_bytes = on->ops->weight_bytes(weight);
            assert_true(n_bytes >= tensor.n_bytes && n_bytes <= 2 * tensor.n_bytes + 4096);
            on->ops->weight_free(on->backend, weight);
            fixture_tensor_free(&tensor);
        }
        assert_null(on->ops->weight_free(on->backend, NULL));

        weight = NULL;
        struct tensor bad = {.type = TENSOR_Q4_K, .n_rows = 4, .n_columns = 96, .data = x, .n_bytes = 4096};
        assert_int_equal(on->ops->weight_new(on->backend, &bad, &weight), -ENOTSUP);
        bad.type = (enum tensor_type)23; /* IQ4_XS */
        assert_int_equal(on->ops->weight_new(on->backend, &bad, &weight), -ENOTSUP);
        assert_null(weight);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(exact_inputs_give_exact_products),
        cmocka_unit_test(any_input_within_the_noise_of_16_bits),
        cmocka_unit_test(bits_do_not_depend_on_the_batch),
        cmocka_unit_test(several_matrices_of_one_input),
        cmocka_unit_test(a_nan_stays_in_its_row),
        cmocka_unit_test(zero_and_tiny_inputs),
        cmocka_unit_test(rows_as_embeddings),
        cmocka_unit_test(weights_say_what_they_are),
    };
    return cmocka_run_group_tests(tests, fixture_open, fixture_close);
}
