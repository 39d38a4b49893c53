/* test_merge.c - merging partials of lanes, and many copies in one launch, against the plain kernels and memcpy(). */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "proto/layout.h"
#include "tests/backend/cuda-on-cpu/device.h"
#include "tests/backend/fixture.h"

#define MAX_ITEMS   6u
#define MAX_FLOATS  (8u * (2u + KERNELS_MAX_HEAD_DIM))
#define N_COPIES    40u
#define COPY_BYTES  9000u
#define ARENA_BYTES (N_COPIES * (COPY_BYTES + 32u))

static_assert(BACKEND_N_LANES == LAYOUT_N_LANES, "a session's lanes");

static float partials[MAX_ITEMS][MAX_FLOATS], lanes[MAX_ITEMS][BACKEND_N_LANES][MAX_FLOATS];
static float expected[MAX_ITEMS][MAX_FLOATS], outs[MAX_ITEMS][MAX_FLOATS];
static float got[MAX_ITEMS][MAX_FLOATS], got_outs[MAX_ITEMS][MAX_FLOATS];

/* A partial of some tokens, or an empty one. */
static void fill(float *partial, uint32_t head_dim, bool is_empty)
{
    fixture_fill(partial + 2, head_dim, 3.0f);
    partial[0] = is_empty ? -INFINITY : fixture_uniform(20.0f);
    partial[1] = is_empty ? 0 : 1.0f + fabsf(fixture_uniform(3.0f));
    if (is_empty)
        memset(partial + 2, 0, head_dim * sizeof *partial);
}

/* Item 1 has no lanes; others miss some. */
static bool is_there(uint32_t i, uint32_t l)
{
    return i != 1 && (i * 5 + l * 3) % 4 != 0;
}

static void merges(void **state)
{
    (void)state;
    static const uint32_t dims[] = {64, 128, 256, 80, 31, 1}, groups[] = {3, 4, 8, 1, 7, 2};
    const struct kernels *plain = kernels_get(KERNELS_ISA_PLAIN);
    for (size_t c = 0; c < sizeof dims / sizeof *dims; c++) {
        const uint32_t d = dims[c], group = groups[c], width = KERNELS_PARTIAL_FLOATS(d), n_items = MAX_ITEMS;
        for (uint32_t i = 0; i < n_items; i++) {
            for (uint32_t g = 0; g < group; g++) {
                fill(partials[i] + g * width, d, i == 2);
                for (uint32_t l = 0; l < BACKEND_N_LANES; l++)
                    fill(lanes[i][l] + g * width, d, (i + l + g) % 5 == 0 && i != 2);
                lanes[4][7][g * width] = partials[4][g * width]; /* equal maxima */
                lanes[5][3][g * width] = c % 2 ? NAN : 1e30f;
                memcpy(expected[i] + g * width, partials[i] + g * width, width * sizeof(float));
                for (uint32_t l = 0; l < BACKEND_N_LANES; l++)
                    if (is_there(i, l))
                        plain->partial_merge(expected[i] + g * width, lanes[i][l] + g * width, d);
                plain->partial_finish(expected[i] + g * width, d, outs[i] + g * d);
            }
        }
        for (int r = 0; r < DEVICE_N_RUNS; r++) {
            const struct device_run run = device_run(r);
            float *mine = device_new(partials, sizeof partials), *out = device_new(NULL, sizeof got_outs), *host = NULL;
            assert_int_equal(cudaMallocHost((void **)&host, sizeof lanes), cudaSuccess);
            memcpy(host, lanes, sizeof lanes);
            struct backend_merge items[MAX_ITEMS] = {0};
            for (uint32_t i = 0; i < n_items; i++) {
                items[i].partials = mine + i * MAX_FLOATS;
                items[i].out = out + i * MAX_FLOATS;
                for (uint32_t l = 0; l < BACKEND_N_LANES; l++)
                    if (is_there(i, l))
                        items[i].from[l] = host + (i * BACKEND_N_LANES + l) * MAX_FLOATS;
            }
            struct backend_merge *there = device_new(items, sizeof items);
            assert_int_equal(cuda_merge(&run.queue, there, n_items, group, d), cudaSuccess);
            device_read(got, mine, sizeof got);
            device_read(got_outs, out, sizeof got_outs);
            for (uint32_t i = 0; i < n_items; i++) {
                for (uint32_t k = 0; k < group * width; k++)
                    assert_true(got[i][k] == expected[i][k] || (isnan(got[i][k]) && isnan(expected[i][k])));
                for (uint32_t k = 0; k < group * d; k++)
                    assert_true(got_outs[i][k] == outs[i][k] || (isnan(got_outs[i][k]) && isnan(outs[i][k])));
            }
            device_free(mine);
            device_free(out);
            device_free(there);
            assert_int_equal(cudaFreeHost(host), cudaSuccess);
        }
    }
}

static void copies(void **state)
{
    (void)state;
    static uint8_t from[ARENA_BYTES], to[ARENA_BYTES], want[ARENA_BYTES];
    for (size_t i = 0; i < ARENA_BYTES; i++)
        from[i] = (uint8_t)fixture_random();
    for (int r = 0; r < DEVICE_N_RUNS; r++) {
        const struct device_run run = device_run(r);
        memset(want, 0x5a, sizeof want);
        uint8_t *there = device_new(from, sizeof from), *result = device_new(want, sizeof want);
        struct backend_copy items[N_COPIES];
        size_t most = 0;
        for (uint32_t i = 0; i < N_COPIES; i++) {
            /* aligned to 16, 8, 4, 2 and 1 bytes, both ends apart and alike; none, a row, several chunks */
            const size_t step = (size_t)16 >> i % 5, base = (size_t)i * (COPY_BYTES + 32);
            const size_t n = i % 7 == 0 ? 0 : (fixture_random() % (i % 3 ? 600 : COPY_BYTES)) / step * step;
            const size_t first = i % 2 ? step : 0, other = i % 4 / 2 ? step : 0;
            items[i] = (struct backend_copy){result + base + first, there + base + other, n};
            memcpy(want + base + first, from + base + other, n);
            most = n > most ? n : most;
        }
        struct backend_copy *list = device_new(items, sizeof items);
        assert_int_equal(cuda_copy(&run.queue, list, N_COPIES, most), cudaSuccess);
        device_read(to, result, sizeof to);
        assert_memory_equal(to, want, sizeof to);
        device_free(there);
        device_free(result);
        device_free(list);
    }
}

static void what_cannot_be(void **state)
{
    (void)state;
    const struct device_run run = device_run(0);
    void *memory = device_new(NULL, 1024);
    struct cuda_queue large = {.n_threads = 512};
    assert_int_equal(cuda_merge(&run.queue, memory, 0, 4, 64), cudaSuccess);
    assert_int_equal(cuda_merge(&run.queue, memory, 1, 4, 257), cudaErrorInvalidValue);
    assert_int_equal(cuda_merge(&large, memory, 1, 4, 64), cudaErrorInvalidValue);
    assert_int_equal(cuda_copy(&run.queue, memory, 0, 64), cudaSuccess);
    device_free(memory);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(merges),
        cmocka_unit_test(copies),
        cmocka_unit_test(what_cannot_be),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
