/*
 * Rows of every type against values that the `gguf` Python package (quants.dequantize) gave for the same bytes.
 */
#include "tests/unit/model/tiny.h"

#include <math.h>

#include "gpu-worker/model/dequantize.h"

/* first two, middle two, last two values; sum of value x (1 + index mod 7) */
static const struct golden {
    enum tensor_type type;
    uint32_t n_columns;
    double samples[6];
    double sum;
} goldens[] = {
    {TENSOR_F32,
     64,
     {0x1.02bc78p+0, -0x1.8cbc18p+0, -0x1.1e6204p+0, 0x1.e8f31ep-1, 0x1.f78f8cp+0, -0x1.1aafe4p+0},
     0x1.256fe6cp+2},
    {TENSOR_F16, 64, {0x1.8fp-9, -0x1.204p-3, -0x1.094p-9, -0x1.b2cp-5, 0x1.408p-3, 0x1.1ep-17}, -0x1.2175e76p+4},
    {TENSOR_BF16, 64, {0x1.78p-1, -0x1.02p+0, -0x1.4ap-1, 0x1.96p+0, 0x1.04p-1, -0x1.1ep+0}, 0x1.532p+3},
    {TENSOR_Q4_0, 64, {-0x1.665p+0, -0x1.998p-1, -0x1.332p-1, -0x1.998p+0, -0x1.998p+0, -0x1.332p-1}, -0x1.47eb8p+5},
    {TENSOR_Q4_1, 64, {0x1.61cp+0, 0x1.c82p+0, 0x1.2ap-1, 0x1.874p-2, 0x1.fb5p+0, 0x1.75p-3}, 0x1.cd0cp+6},
    {TENSOR_Q5_0, 64, {-0x1.332p+0, 0x1.998p-2, 0x1.7fe8p+1, 0x1.332p+1, 0x1.998p-2, 0x1.332p+0}, 0x1.531ep+5},
    {TENSOR_Q5_1, 64, {-0x1.bep-3, -0x1.abcp-2, 0x1.9738p+1, 0x1.b0dp+1, 0x1.1864p+2, 0x1.75p-3}, 0x1.144708p+9},
    {TENSOR_Q8_0, 64, {-0x1.964dp+2, -0x1.e648p+1, -0x1.ffep-3, 0x1.332p+1, 0x1.e648p+1, -0x1.531ep+2}, 0x1.2aba2p+5},
    {TENSOR_Q4_K, 512, {0x1.ac2p+0, 0x1.4a7p-2, 0x1.ecde8p+1, 0x1.df07p+0, 0x1.cd4ap+0, 0x1.9367p+1}, 0x1.c2d777p+11},
    {TENSOR_Q5_K,
     512,
     {0x1.d858p-1, 0x1.2163p+2, 0x1.b379p+0, 0x1.9bcaep+3, 0x1.4b45p+2, 0x1.2e7ap+2},
     0x1.2b3b8178p+13},
    {TENSOR_Q6_K,
     512,
     {-0x1.cb168p+1, 0x1.0656p-2, -0x0p+0, 0x1.3fecp+2, -0x1.d3e2cp+0, -0x1.37ec8p+2},
     -0x1.c7811fcp+8},
};

static uint8_t *fill(uint8_t *out, size_t n_bytes, uint32_t seed)
{
    for (size_t i = 0; i < n_bytes; i++) {
        seed = seed * 1664525u + 1013904223u;
        *out++ = (uint8_t)(seed >> 24);
    }
    return out;
}

static void set_half(uint8_t *at, unsigned bits)
{
    at[0] = (uint8_t)bits;
    at[1] = (uint8_t)(bits >> 8);
}

/* The row the values were made from: random bytes under fixed scales. */
static void make_row(enum tensor_type type, uint32_t n_columns, uint8_t *row)
{
    const struct tensor_block *block = tensor_block((uint32_t)type);
    if (block->n_columns == 1) {
        fill(row, (size_t)n_columns * block->n_bytes, 1);
        for (uint32_t i = 0; i < n_columns; i++) {
            uint8_t *last = row + (i + 1) * block->n_bytes - 1;
            if (type == TENSOR_F16)
                *last &= 0xbb; /* neither infinite nor NaN */
            else
                *last = (uint8_t)(0x3f + (i % 2 << 7)); /* near one */
        }
        return;
    }
    for (uint32_t i = 0; i < n_columns / block->n_columns; i++) {
        uint8_t *at = row + i * block->n_bytes;
        fill(at, block->n_bytes, 1 + i);
        switch (type) {
        case TENSOR_Q5_0:
            set_half(at, 0xb266);
            break;
        case TENSOR_Q4_1:
        case TENSOR_Q5_1:
            set_half(at + 2, 0xbc12);
            set_half(at, 0x3266);
            break;
        case TENSOR_Q8_0:
            set_half(at, 0x2a66);
            break;
        case TENSOR_Q4_K:
        case TENSOR_Q5_K:
            set_half(at, 0x2266);
            set_half(at + 2, 0x2812);
            break;
        case TENSOR_Q6_K:
            set_half(at + 208, 0x1a66);
            break;
        default:
            set_half(at, 0x3266);
        }
    }
}

static void rows_have_the_reference_values(void **state)
{
    (void)state;
    for (size_t k = 0; k < sizeof goldens / sizeof goldens[0]; k++) {
        const struct golden *golden = &goldens[k];
        uint32_t n = golden->n_columns, where[6] = {0, 1, n / 2 - 1, n / 2, n - 2, n - 1};
        size_t n_bytes = tensor_row_bytes(golden->type, n);
        uint8_t *row = malloc(n_bytes + 1);
        float *out = calloc(n, sizeof *out);
        double sum = 0;
        assert_true(n_bytes > 0);
        make_row(golden->type, n, row + 1); /* odd address: rows need no alignment */
        assert_int_equal(dequantize_row(golden->type, row + 1, n, out), 0);
        for (size_t i = 0; i < 6; i++)
            if ((double)out[where[i]] != golden->samples[i])
                fail_msg("%s: value %u is %a, expected %a", tensor_type_name((uint32_t)golden->type), where[i],
                         (double)out[where[i]], golden->samples[i]);
        for (uint32_t i = 0; i < n; i++)
            sum += (double)out[i] * (1 + i % 7);
        if (fabs(sum - golden->sum) > 1e-9 * fabs(golden->sum))
            fail_msg("%s: sum is %a, expected %a", tensor_type_name((uint32_t)golden->type), sum, golden->sum);
        free(out);
        free(row);
    }
}

static void half_precision_is_exact(void **state)
{
    (void)state;
    for (uint32_t bits = 0; bits < 65536; bits++) {
        double sign = bits & 0x8000 ? -1 : 1, expected;
        int exponent = (int)(bits >> 10 & 31), mantissa = (int)(bits & 1023);
        float value = dequantize_f16((uint16_t)bits);
        if (exponent == 31 && mantissa) {
            assert_true(isnan(value));
            continue;
        }
        if (exponent == 31)
            expected = INFINITY;
        else
            expected = exponent ? ldexp(1024 + mantissa, exponent - 25) : ldexp(mantissa, -24);
        assert_true((double)value == sign * expected);
        assert_int_equal(signbit(value) != 0, bits >> 15);
    }
}

static void rows_that_are_not_whole_blocks_are_refused(void **state)
{
    uint8_t row[512] = {0};
    float out = 7;
    (void)state;
    assert_int_equal(dequantize_row(TENSOR_Q8_0, row, 33, &out), -EINVAL);
    assert_int_equal(dequantize_row(TENSOR_Q6_K, row, 128, &out), -EINVAL);
    assert_int_equal(dequantize_row(TENSOR_F32, row, 0, &out), -EINVAL);
    assert_int_equal(dequantize_row((enum tensor_type)5, row, 32, &out), -EINVAL);
    assert_int_equal(dequantize_row((enum tensor_type)1000, row, 32, &out), -EINVAL);
    assert_true(out == 7);
    assert_int_equal(tensor_row_bytes(TENSOR_Q4_K, 255), 0);
    assert_int_equal(tensor_row_bytes(TENSOR_Q4_K, 512), 288);
    assert_int_equal(tensor_row_bytes(TENSOR_F32, 3), 12);
    assert_string_equal(tensor_type_name(23), "IQ4_XS");
    assert_string_equal(tensor_type_name(4), "unknown");
    assert_string_equal(tensor_type_name(UINT32_MAX), "unknown");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_have_the_reference_values),
        cmocka_unit_test(half_precision_is_exact),
        cmocka_unit_test(rows_that_are_not_whole_blocks_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
