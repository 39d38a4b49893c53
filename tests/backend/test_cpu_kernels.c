/*
 * test_cpu_kernels.c - the tables of the cpu back end against its plain one, the 16-wide one on AVX2 registers included:
 * quantized products have the same bits everywhere.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "gpu-worker/backend/cpu/cpu_kernels.h"
#include "tests/backend/fixture.h"
#include "tests/backend/halves.h"

#define MAX_TOKENS  9u
#define MAX_ROWS    50u
#define MAX_COLUMNS 1024u

static float x[MAX_TOKENS * MAX_COLUMNS], y[MAX_TOKENS * MAX_ROWS], expected[MAX_TOKENS * MAX_ROWS];
static struct cpu_activation in[MAX_TOKENS * MAX_COLUMNS / CPU_BLOCK], in_plain[MAX_TOKENS * MAX_COLUMNS / CPU_BLOCK];
static const struct cpu_kernels *tables[4];
static size_t n_tables;

static int find_tables(void **state)
{
    (void)state;
    kernels_thread_setup();
    if (kernels_get(KERNELS_ISA_AVX2)) {
        tables[n_tables++] = &cpu_avx2_kernels;
        tables[n_tables++] = &halves_kernels;
    }
    if (kernels_get(KERNELS_ISA_AVX512))
        tables[n_tables++] = &cpu_avx512_kernels;
    return 0;
}

static void inputs_are_quantized_alike(void **state)
{
    (void)state;
    const uint32_t n_columns = 1024;
    fixture_fill(x, n_columns, 4.0f);
    memset(x + 64, 0, 32 * sizeof *x);
    x[100] = 1e20f;
    x[130] = NAN;
    x[170] = -INFINITY;
    x[200] = -1e-33f;
    for (int i = 224; i < 256; i++)
        x[i] *= 1e-31f;
    for (int i = 256; i < 288; i++)
        x[i] = (float)(i % 2 ? 0.5 : -1.5); /* ties */
    x[256] = CPU_LARGEST;
    cpu_plain_kernels.quantize(x, n_columns, in_plain);
    for (uint32_t b = 0; b < n_columns / CPU_BLOCK; b++) {
        int32_t total = 0;
        if (b == 4 || b == 5) {
            assert_true(isnan(in_plain[b].scale) && isnan(in_plain[b].sum));
            continue;
        }
        for (uint32_t i = 0; i < CPU_BLOCK; i++) {
            float value = (float)in_plain[b].q[i] * in_plain[b].scale;
            assert_true(fabsf(value - x[b * CPU_BLOCK + i]) <= 0.51f * in_plain[b].scale + 1e-30f);
            assert_true(in_plain[b].q[i] >= -CPU_LARGEST);
            total += in_plain[b].q[i];
        }
        assert_true(in_plain[b].sum == in_plain[b].scale * (float)total);
        assert_true(fabsf(in_plain[b].half_sums[0] + in_plain[b].half_sums[1] - in_plain[b].sum) <=
                    0.1f * in_plain[b].scale);
    }
    for (size_t i = 0; i < n_tables; i++) {
        memset(in, 0xff, sizeof in);
        tables[i]->quantize(x, n_columns, in);
        for (uint32_t b = 0; b < n_columns / CPU_BLOCK; b++) {
            assert_memory_equal(in[b].q, in_plain[b].q, sizeof in[b].q);
            if (isnan(in_plain[b].scale))
                assert_true(isnan(in[b].scale) && isnan(in[b].sum) && isnan(in[b].half_sums[0]) &&
                            isnan(in[b].half_sums[1]));
            else
                assert_memory_equal(&in[b], &in_plain[b], sizeof *in);
        }
    }
}

static struct memory_arena arena;

static void pack(const struct tensor *tensor, uint32_t tile_rows, struct cpu_packed *packed)
{
    assert_int_equal(cpu_packed_init(packed, tensor, tile_rows, &arena), 0);
    for (uint32_t tile = 0; tile < packed->n_tiles; tile++)
        cpu_packed_fill(packed, tensor, tile);
}

static void packed_products_have_the_same_bits(void **state)
{
    (void)state;
    static const struct {
        uint32_t n_rows, n_columns;
    } shapes[] = {{2, 32}, {8, 64}, {15, 96}, {16, 256}, {50, 512}, {33, 1024}};
    for (size_t k = 0; k < FIXTURE_N_TYPES; k++) {
        for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
            const uint32_t n_rows = shapes[s].n_rows, n_columns = shapes[s].n_columns;
            if (fixture_types[k] == TENSOR_F32 || fixture_types[k] == TENSOR_F16 || fixture_types[k] == TENSOR_BF16 ||
                tensor_row_bytes(fixture_types[k], n_columns) == 0)
                continue;
            struct tensor tensor = fixture_tensor(fixture_types[k], n_rows, n_columns);
            struct cpu_packed packed;
            fixture_fill(x, (size_t)MAX_TOKENS * n_columns, 2.0f);
            for (uint32_t t = 0; t < MAX_TOKENS; t++)
                cpu_plain_kernels.quantize(x + t * n_columns, n_columns, in + t * n_columns / CPU_BLOCK);
            pack(&tensor, cpu_plain_kernels.tile_rows, &packed);
            cpu_plain_kernels.matmul_packed(&packed, 0, packed.n_tiles, in, MAX_TOKENS, expected, n_rows);
            cpu_packed_fini(&packed);
            for (size_t i = 0; i < n_tables; i++) {
                pack(&tensor, tables[i]->tile_rows, &packed);
                for (uint32_t n_tokens = 1; n_tokens <= MAX_TOKENS; n_tokens += 2) {
                    memset(y, 0xff, sizeof y);
                    for (uint32_t tile = 0; tile < packed.n_tiles; tile += 2)
                        tables[i]->matmul_packed(&packed, tile, packed.n_tiles - tile < 2 ? 1 : 2, in, n_tokens, y,
                                                 n_rows);
                    if (memcmp(y, expected, (size_t)n_tokens * n_rows * sizeof *y) != 0)
                        fail_msg("%s %ux%u: %s differs from plain", tensor_type_name((uint32_t)tensor.type), n_rows,
                                 n_columns, tables[i]->name);
                }
                cpu_packed_fini(&packed);
            }
            fixture_tensor_free(&tensor);
        }
    }
}

/* All quants and all inputs at their largest: integers would overflow first here. */
static void integers_do_not_overflow(void **state)
{
    (void)state;
    const uint32_t n_rows = 16, n_columns = 256;
    for (size_t k = 0; k < FIXTURE_N_TYPES; k++) {
        if (fixture_types[k] == TENSOR_F32 || fixture_types[k] == TENSOR_F16 || fixture_types[k] == TENSOR_BF16)
            continue;
        for (int sign = -1; sign <= 1; sign += 2) {
            for (int byte = 0; byte < 256; byte += 51 + 64 * (fixture_types[k] == TENSOR_Q8_0)) {
                struct tensor tensor = fixture_tensor(fixture_types[k], n_rows, n_columns);
                struct tensor filled = fixture_tensor(fixture_types[k], n_rows, n_columns);
                /* keep what is floating point: everything up to the first quant, and Q6_K's tail */
                const struct tensor_block *shape = tensor_block((uint32_t)tensor.type);
                const size_t heads[] = {[TENSOR_Q4_0] = 2, [TENSOR_Q4_1] = 4,  [TENSOR_Q5_0] = 2,  [TENSOR_Q5_1] = 4,
                                        [TENSOR_Q8_0] = 2, [TENSOR_Q4_K] = 16, [TENSOR_Q5_K] = 16, [TENSOR_Q6_K] = 0};
                const size_t end = tensor.type == TENSOR_Q6_K ? 192 : shape->n_bytes;
                uint8_t *data = (uint8_t *)(uintptr_t)filled.data;
                memcpy(data, tensor.data, tensor.n_bytes);
                for (size_t at = 0; at < filled.n_bytes; at += shape->n_bytes)
                    memset(data + at + heads[filled.type], byte == 204 && filled.type == TENSOR_Q8_0 ? 0x80 : byte,
                           end - heads[filled.type]);
                for (uint32_t c = 0; c < 8 * n_columns; c++)
                    x[c] = (float)sign * 3.0f;
                for (uint32_t t = 0; t < 8; t++)
                    cpu_plain_kernels.quantize(x, n_columns, in + t * n_columns / CPU_BLOCK);
                struct cpu_packed packed;
                pack(&filled, cpu_plain_kernels.tile_rows, &packed);
                cpu_plain_kernels.matmul_packed(&packed, 0, packed.n_tiles, in, 8, expected, n_rows);
                cpu_packed_fini(&packed);
                for (size_t i = 0; i < n_tables; i++) {
                    pack(&filled, tables[i]->tile_rows, &packed);
                    tables[i]->matmul_packed(&packed, 0, packed.n_tiles, in, 8, y, n_rows);
                    cpu_packed_fini(&packed);
                    if (memcmp(y, expected, (size_t)8 * n_rows * sizeof *y) != 0)
                        fail_msg("%s, bytes %02x: %s differs from plain", tensor_type_name((uint32_t)tensor.type),
                                 (unsigned)byte, tables[i]->name);
                }
                fixture_tensor_free(&filled);
                fixture_tensor_free(&tensor);
            }
        }
    }
}

/* |error| <= 3e-6 sum |w x|; one token's bits alone as in a batch. */
static void float_products(void **state)
{
    (void)state;
    static const enum tensor_type types[] = {TENSOR_F32, TENSOR_F16, TENSOR_BF16};
    static const uint32_t columns[] = {1, 5, 8, 16, 31, 64, 100, 1000};
    for (size_t k = 0; k < 3; k++) {
        for (size_t s = 0; s < sizeof columns / sizeof *columns; s++) {
            const uint32_t n_rows = 1 + (uint32_t)s * 5, n_columns = columns[s];
            struct tensor tensor = fixture_tensor(types[k], n_rows, n_columns);
            fixture_fill(x, (size_t)MAX_TOKENS * n_columns, 1.0f);
            cpu_plain_kernels.matmul_float(types[k], tensor.data, n_columns, 0, n_rows, x, MAX_TOKENS, expected,
                                           n_rows);
            for (size_t i = 0; i < n_tables; i++) {
                memset(y, 0xff, sizeof y);
                tables[i]->matmul_float(types[k], tensor.data, n_columns, 0, n_rows, x, MAX_TOKENS, y, n_rows);
                fixture_near("matmul_float", tables[i]->name, y, expected, (size_t)MAX_TOKENS * n_rows,
                             3e-6 * n_columns, 1e-6);
                for (uint32_t t = 0; t < MAX_TOKENS; t++) {
                    float alone[MAX_ROWS];
                    for (uint32_t r = 0; r < n_rows; r += 3)
                        tables[i]->matmul_float(types[k], tensor.data, n_columns, r, n_rows - r < 3 ? n_rows - r : 3,
                                                x + (size_t)t * n_columns, 1, alone, n_rows);
                    assert_memory_equal(alone, y + (size_t)t * n_rows, n_rows * sizeof *y);
                }
            }
            fixture_tensor_free(&tensor);
        }
    }
}

static void element_by_element(void **state)
{
    (void)state;
    static float a[1001], b[1001], got[1001], want[1001];
    for (uint32_t n = 1; n <= 1000; n = n * 3 / 2 + 1) {
        fixture_fill(a, n, 30.0f);
        fixture_fill(b, n, 1.0f);
        for (size_t i = 0; i < n_tables; i++) {
            got[n] = 55.0f;
            tables[i]->rms_norm(a, n, b, 1e-5f, got);
            cpu_plain_kernels.rms_norm(a, n, b, 1e-5f, want);
            fixture_near("rms_norm", tables[i]->name, got, want, n, 1e-30, 1e-5);
            memcpy(got, a, n * sizeof *a);
            memcpy(want, a, n * sizeof *a);
            tables[i]->swiglu(got, b, n);
            cpu_plain_kernels.swiglu(want, b, n);
            fixture_near("swiglu", tables[i]->name, got, want, n, 1e-35, 2e-6);
            memcpy(got, a, n * sizeof *a);
            memcpy(want, a, n * sizeof *a);
            tables[i]->add(got, b, n);
            cpu_plain_kernels.add(want, b, n);
            assert_memory_equal(got, want, n * sizeof *got);
            assert_true(got[n] == 55.0f);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(inputs_are_quantized_alike), cmocka_unit_test(packed_products_have_the_same_bits),
        cmocka_unit_test(integers_do_not_overflow),   cmocka_unit_test(float_products),
        cmocka_unit_test(element_by_element),
    };
    return cmocka_run_group_tests(tests, find_tables, NULL);
}
