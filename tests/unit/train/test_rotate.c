/* test_rotate.c - moments over all offsets against an average over turned vectors. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>
#include <string.h>

#include "gpu-worker/train/train_rotate.h"

enum { HEAD_DIM = 8, N_OFFSETS = 777 };

static const float frequencies[] = {1.0f, 0.31f, 0.002f};
static const struct backend_rope rope = {.n_rotated = 6, .frequencies = frequencies, .magnitude = 1};

static void fill(uint32_t seed, float *x)
{
    for (uint32_t i = 0; i < HEAD_DIM; i++)
        x[i] = (float)sin(seed * 12.9898 + i * 78.233);
}

static void a_turn_is_a_later_position(void **state)
{
    (void)state;
    float x[HEAD_DIM], once[HEAD_DIM], twice[HEAD_DIM];
    fill(1, x);
    memcpy(once, x, sizeof x);
    memcpy(twice, x, sizeof x);
    train_rotate(&rope, 7, 0, HEAD_DIM / 2, once);
    train_rotate(&rope, 3, 0, HEAD_DIM / 2, twice);
    train_rotate(&rope, 4, 0, HEAD_DIM / 2, twice);
    for (uint32_t i = 0; i < HEAD_DIM; i++)
        assert_float_equal(once[i], twice[i], 1e-5);
    assert_true(fabs((double)once[0] - ((double)x[0] * cos(7) - (double)x[1] * sin(7))) < 1e-5);
    assert_true(fabs((double)once[1] - ((double)x[0] * sin(7) + (double)x[1] * cos(7))) < 1e-5);
    assert_float_equal(once[6], x[6], 0); /* not rotated by this model */
}

/* Two vectors, so that the matrix is neither symmetric nor of rank one in any block. */
static void averages_equal_sums_over_turned_vectors(void **state)
{
    (void)state;
    for (uint32_t n = 1; n <= N_OFFSETS; n += n == 1 ? 1 : 775) {
        double mean[HEAD_DIM] = {0}, square[HEAD_DIM * HEAD_DIM] = {0}, expected_mean[HEAD_DIM] = {0},
               expected[HEAD_DIM * HEAD_DIM] = {0};
        for (uint32_t seed = 1; seed <= 3; seed++) {
            float x[HEAD_DIM], y[HEAD_DIM];
            fill(seed, x);
            fill(seed + 10, y);
            for (uint32_t i = 0; i < HEAD_DIM; i++) {
                mean[i] += (double)x[i];
                for (uint32_t j = 0; j < HEAD_DIM; j++)
                    square[i * HEAD_DIM + j] += (double)x[i] * (double)y[j];
            }
            for (uint32_t offset = 0; offset < n; offset++) {
                float xt[HEAD_DIM], yt[HEAD_DIM];
                memcpy(xt, x, sizeof x);
                memcpy(yt, y, sizeof y);
                train_rotate(&rope, offset, 0, HEAD_DIM / 2, xt);
                train_rotate(&rope, offset, 0, HEAD_DIM / 2, yt);
                for (uint32_t i = 0; i < HEAD_DIM; i++) {
                    expected_mean[i] += (double)xt[i] / n;
                    for (uint32_t j = 0; j < HEAD_DIM; j++)
                        expected[i * HEAD_DIM + j] += (double)xt[i] * (double)yt[j] / n;
                }
            }
        }
        train_rotate_mean(&rope, n, HEAD_DIM, mean);
        train_rotate_square(&rope, n, HEAD_DIM, square);
        for (uint32_t i = 0; i < HEAD_DIM; i++)
            assert_true(fabs(mean[i] - expected_mean[i]) < 1e-5);
        for (uint32_t i = 0; i < HEAD_DIM * HEAD_DIM; i++)
            assert_true(fabs(square[i] - expected[i]) < 1e-5);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_turn_is_a_later_position),
        cmocka_unit_test(averages_equal_sums_over_turned_vectors),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
