/* test_compare.c - distributions compared by hand, and the time that is left. */
#include "tests/unit/gpu-worker/cmocka_all.h"

#include <math.h>
#include <string.h>

#include "gpu-worker/eval/eval_compare.h"
#include "gpu-worker/eval/eval_progress.h"

static bool is_near(double a, double b)
{
    return fabs(a - b) <= 1e-6 * fmax(fabs(a), fabs(b));
}

static void put(float *logprobs, double a, double b, double c)
{
    logprobs[0] = (float)log(a);
    logprobs[1] = (float)log(b);
    logprobs[2] = (float)log(c);
}

static void test_two_positions(void **state)
{
    (void)state;
    struct eval_compare *compare = NULL;
    struct eval_compared got;
    float other[3];
    assert_int_equal(eval_compare_new(2, 3, (const uint32_t[]){2}, 1, &compare), 0);
    put(eval_compare_full(compare, 0), 0.5, 0.25, 0.25);
    put(eval_compare_full(compare, 1), 0.1, 0.8, 0.1);

    put(other, 0.25, 0.25, 0.5);
    eval_compare_add(compare, 0, other);
    put(other, 0.2, 0.6, 0.2);
    eval_compare_add(compare, 1, other);
    eval_compare_finish(compare, &got);
    const double first = 0.5 * log(2) + 0.25 * log(0.5), second = 0.2 * log(0.5) + 0.8 * log(0.8 / 0.6);
    assert_true(is_near(got.kld_mean, (first + second) / 2));
    assert_true(is_near(got.kld_p99, fmax(first, second)));
    assert_true(is_near(got.top1, 0.5));
    assert_true(is_near(got.perplexity, 2)); /* only the first position's next token is known */
    assert_true(is_near(got.full_perplexity, 4));

    /* the next method starts from nothing */
    eval_compare_add(compare, 0, eval_compare_full(compare, 0));
    eval_compare_add(compare, 1, eval_compare_full(compare, 1));
    eval_compare_finish(compare, &got);
    assert_true(got.kld_mean <= 0 && got.kld_p99 <= 0);
    assert_true(is_near(got.top1, 1) && is_near(got.perplexity, 4));
    assert_null(eval_compare_free(compare));
    assert_null(eval_compare_free(NULL));
}

/* Of n positions with divergences that grow, p99 is the nearest rank's. */
static void check_p99(uint32_t n, uint32_t rank)
{
    struct eval_compare *compare = NULL;
    struct eval_compared got;
    float other[3];
    double expected = 0;
    assert_int_equal(eval_compare_new(n, 3, NULL, 0, &compare), 0);
    for (uint32_t i = 0; i < n; i++) {
        const double p = 0.5 - (i + 1.0) / (3.0 * n);
        put(eval_compare_full(compare, i), 0.5, 0.25, 0.25);
        put(other, p, 0.75 - p, 0.25);
        eval_compare_add(compare, i, other);
        if (i + 1 == rank)
            expected = 0.5 * log(0.5 / p) + 0.25 * log(0.25 / (0.75 - p));
    }
    eval_compare_finish(compare, &got);
    assert_true(fabs(got.kld_p99 - expected) < 1e-6);
    assert_true(got.perplexity <= 0); /* nothing is known */
    eval_compare_free(compare);
}

static void test_p99(void **state)
{
    (void)state;
    check_p99(1, 1);
    check_p99(64, 64);
    check_p99(100, 99);
    check_p99(192, 191);
    check_p99(256, 254);
}

static void test_no_probability(void **state)
{
    (void)state;
    struct eval_compare *compare = NULL;
    struct eval_compared got;
    float other[3];
    assert_int_equal(eval_compare_new(1, 3, NULL, 0, &compare), 0);
    put(eval_compare_full(compare, 0), 0.5, 0.5, 0);
    put(other, 0.5, 0.25, 0.25);
    eval_compare_add(compare, 0, other);
    eval_compare_finish(compare, &got);
    assert_true(is_near(got.kld_mean, 0.5 * log(2)));
    put(other, NAN, NAN, NAN); /* a broken model is not a perfect one */
    eval_compare_add(compare, 0, other);
    eval_compare_finish(compare, &got);
    assert_true(isnan(got.kld_mean));
    eval_compare_free(compare);
}

static void test_progress(void **state)
{
    (void)state;
    struct eval_progress progress;
    assert_int_equal(eval_progress_init(&progress, 2, 1), 0);
    assert_true(eval_progress_done(&progress, 0) <= 0);
    const uint64_t us[] = {800, 40, 100, 60}; /* of a text: 1000 */
    double last = 0;
    for (uint32_t text = 0; text < 2; text++)
        for (uint32_t part = 0; part < 4; part++) {
            for (uint32_t k = 1; k <= 4; k++) {
                eval_progress_work(&progress, us[part] / 4);
                const double done = eval_progress_done(&progress, k / 4.0);
                assert_true(done >= last && done <= 1);
                last = done;
            }
            eval_progress_next(&progress);
            const double done = eval_progress_done(&progress, 0);
            uint64_t spent = text * 1000;
            for (uint32_t i = 0; i <= part; i++)
                spent += us[i];
            if (text == 1 || part == 3) /* every part was measured */
                assert_true(fabs(done - (double)spent / 2000) < 0.01);
            last = done;
        }
    assert_true(last >= 1);
    eval_progress_fini(&progress);
}

/* The first text's guesses are replaced by what was measured of other presets. */
static void test_progress_learns(void **state)
{
    (void)state;
    struct eval_progress progress;
    assert_int_equal(eval_progress_init(&progress, 1, 3), 0);
    const uint64_t us[] = {1000, 0, 2000, 1000};
    for (uint32_t part = 0; part < 4; part++) {
        eval_progress_work(&progress, us[part]);
        eval_progress_next(&progress);
    }
    /* 4000 spent, and two presets of 3000 to come; what was said before may have been more */
    assert_true(eval_progress_done(&progress, 0) >= 0.4 - 0.01);
    eval_progress_work(&progress, 2000);
    eval_progress_next(&progress);
    eval_progress_work(&progress, 1000);
    eval_progress_next(&progress);
    assert_true(fabs(eval_progress_done(&progress, 0) - 0.7) < 0.01);
    eval_progress_fini(&progress);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_two_positions),   cmocka_unit_test(test_p99),
        cmocka_unit_test(test_no_probability),  cmocka_unit_test(test_progress),
        cmocka_unit_test(test_progress_learns),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
