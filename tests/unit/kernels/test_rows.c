/* test_rows.c - conversions of f16, sums of a block, exp, CRC-32C, the choice of a table. */
#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/unit/kernels/halves.h"

static uint32_t word_of(float value)
{
    uint32_t word;
    memcpy(&word, &value, sizeof word);
    return word;
}

/* The compiler's own conversion. */
static float half_value(uint16_t bits)
{
    _Float16 half;
    memcpy(&half, &bits, sizeof half);
    return (float)half;
}

static uint16_t half_bits(float value)
{
    _Float16 half = (_Float16)value;
    uint16_t bits;
    memcpy(&bits, &half, sizeof bits);
    return bits;
}

static void every_half_decodes_and_returns(void **unused)
{
    (void)unused;
    static uint16_t all[65536], back[65536];
    static float values[65536];
    for (uint32_t i = 0; i < 65536; i++)
        all[i] = (uint16_t)i;
    for (const struct kernels *const *table = halves_tables(); *table; table++) {
        (*table)->f16_decode(all, 65536, values);
        (*table)->f16_encode(values, 65536, back);
        for (uint32_t i = 0; i < 65536; i++) {
            float expected = half_value((uint16_t)i);
            if (isnan(expected)) {
                assert_true(isnan(values[i]) && isnan(half_value(back[i])));
            } else {
                assert_int_equal(word_of(values[i]), word_of(expected));
                assert_int_equal(back[i], i);
            }
        }
    }
}

static void encoding_rounds_to_nearest_even(void **unused)
{
    (void)unused;
    for (const struct kernels *const *table = halves_tables(); *table; table++) {
        /* around every half, the midpoint to the next and its neighbours; both signs; then what lies far outside */
        for (uint32_t i = 0; i < 0x7c00; i++) {
            float low = half_value((uint16_t)i);
            float high = i + 1 == 0x7c00 ? 65536.0f : half_value((uint16_t)(i + 1));
            float middle = low + (high - low) / 2;
            float cases[8] = {low, middle, nextafterf(middle, 0), nextafterf(middle, 1e6f)};
            for (int c = 0; c < 4; c++)
                cases[4 + c] = -cases[c];
            uint16_t out[8];
            (*table)->f16_encode(cases, 8, out);
            for (int c = 0; c < 8; c++)
                assert_int_equal(out[c], half_bits(cases[c]));
        }
        const float far[] = {1e-10f, -1e-38f, 1e6f, -3e38f, INFINITY, -INFINITY, 65519.99f, 65520.0f, -0.0f};
        uint16_t out[9];
        (*table)->f16_encode(far, 9, out);
        for (int c = 0; c < 9; c++)
            assert_int_equal(out[c], half_bits(far[c]));
    }
}

static void conversions_of_any_length(void **unused)
{
    (void)unused;
    uint16_t from[41], to[42];
    float values[42];
    for (uint32_t i = 0; i < 41; i++)
        from[i] = half_bits((float)i * 0.37f - 5.0f);
    for (const struct kernels *const *table = halves_tables(); *table; table++) {
        for (uint32_t n = 0; n <= 41; n++) {
            values[n] = 99.0f;
            to[n] = 99;
            (*table)->f16_decode(from, n, values);
            (*table)->f16_encode(values, n, to);
            assert_memory_equal(from, to, n * sizeof *to);
            assert_true(values[n] == 99.0f && to[n] == 99);
        }
    }
}

static void sums_of_a_block_equal_plain(void **unused)
{
    (void)unused;
    static const uint32_t head_dims[] = {1, 3, 8, 20, 64, 80, 256};
    static uint16_t rows[64 * 512];
    float expected[512], sums[513];
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        rows[i] = half_bits((float)((i * 7919) % 1009) / 300.0f - 1.6f);
    for (const struct kernels *const *table = halves_tables(); *table; table++) {
        for (size_t h = 0; h < sizeof head_dims / sizeof *head_dims; h++) {
            for (uint32_t n = 0; n <= 64; n += 16) {
                uint32_t width = 2 * head_dims[h];
                kernels_get(KERNELS_ISA_PLAIN)->block_sums(rows, n, head_dims[h], expected);
                sums[width] = 99.0f;
                (*table)->block_sums(rows, n, head_dims[h], sums);
                assert_memory_equal(sums, expected, width * sizeof *sums);
                assert_true(sums[width] == 99.0f);
                double first = 0;
                for (uint32_t t = 0; t < n; t++)
                    first += (double)half_value(rows[(size_t)t * width + width - 1]);
                assert_true(fabs((double)sums[width - 1] - first) < 1e-4);
            }
        }
    }
}

static void exp_is_right_over_its_range(void **unused)
{
    (void)unused;
    if (!kernels_get(KERNELS_ISA_AVX2))
        skip();
    double worst = 0;
    float x[16], y[16];
    for (double at = -87.33; at < 88.72; at += 0.0016) {
        for (int i = 0; i < 16; i++)
            x[i] = (float)(at + 0.0001 * i);
        halves_exp(x, y);
        for (int i = 0; i < 16; i++) {
            double expected = exp((double)x[i]);
            double ulp = ldexp(1.0, ilogb(expected) - 23);
            worst = fmax(worst, fabs((double)y[i] - expected) / ulp);
        }
    }
    assert_true(worst < 1.5);
    const float edges[16] = {0.0f,  -0.0f,  -INFINITY, INFINITY, NAN,     -88.0f, 89.0f,   -1e30f,
                             1e30f, -3e38f, 3e38f,     1e-40f,   -87.34f, 88.73f, -103.0f, 88.7228317f};
    halves_exp(edges, y);
    for (int i = 0; i < 16; i++) {
        float expected = expf(edges[i]);
        if (isnan(expected))
            assert_true(isnan(y[i]));
        else if (expected < 0x1p-126f)
            assert_true(y[i] == 0.0f && !signbit(y[i]));
        else
            assert_true(y[i] == expected || fabsf(y[i] / expected - 1.0f) < 2e-7f);
    }
    assert_true(y[0] == 1.0f);
}

static void crc32c(void **unused)
{
    (void)unused;
    assert_int_equal(kernels_crc32c(0, "123456789", 9), 0xe3069283u);
    assert_int_equal(kernels_crc32c(0, "", 0), 0);
    uint8_t bytes[100];
    for (uint32_t i = 0; i < 100; i++)
        bytes[i] = (uint8_t)(i * 37 + 11);
    for (size_t n = 0; n <= 100; n++) {
        uint32_t expected = ~0u; /* bit by bit */
        for (size_t i = 0; i < n; i++) {
            expected ^= bytes[i];
            for (int bit = 0; bit < 8; bit++)
                expected = expected >> 1 ^ (expected & 1 ? 0x82f63b78u : 0);
        }
        assert_int_equal(kernels_crc32c(0, bytes, n), ~expected);
        for (size_t cut = 0; cut <= n; cut += 9)
            assert_int_equal(kernels_crc32c(kernels_crc32c(0, bytes, cut), bytes + cut, n - cut), ~expected);
    }
}

static void tables_are_chosen_by_name(void **unused)
{
    (void)unused;
    enum kernels_isa isa = KERNELS_N_ISA;
    assert_int_equal(kernels_isa_parse("avx2", &isa), 0);
    assert_int_equal(isa, KERNELS_ISA_AVX2);
    assert_int_equal(kernels_isa_parse("auto", &isa), 0);
    assert_int_equal(isa, KERNELS_ISA_AUTO);
    assert_int_equal(kernels_isa_parse("AVX2", &isa), -EINVAL);
    assert_int_equal(kernels_isa_parse("", &isa), -EINVAL);
    assert_int_equal(isa, KERNELS_ISA_AUTO);
    assert_non_null(kernels_get(KERNELS_ISA_PLAIN));
    assert_string_equal(kernels_get(KERNELS_ISA_PLAIN)->name, "plain");
    const struct kernels *best = kernels_get(KERNELS_ISA_AUTO);
    assert_non_null(best);
    assert_ptr_equal(best, kernels_get(best->isa));
    for (int other = 0; other < KERNELS_N_ISA; other++)
        if (kernels_get((enum kernels_isa)other))
            assert_true(other == KERNELS_ISA_AUTO || (int)kernels_get((enum kernels_isa)other)->isa == other);
    assert_null(kernels_get(KERNELS_N_ISA));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_half_decodes_and_returns), cmocka_unit_test(encoding_rounds_to_nearest_even),
        cmocka_unit_test(conversions_of_any_length),      cmocka_unit_test(sums_of_a_block_equal_plain),
        cmocka_unit_test(exp_is_right_over_its_range),    cmocka_unit_test(crc32c),
        cmocka_unit_test(tables_are_chosen_by_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
