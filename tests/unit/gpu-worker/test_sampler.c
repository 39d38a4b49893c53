/* test_sampler.c - choice of a token. */
#include "tests/unit/gpu-worker/cmocka_all.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "gpu-worker/sampler.h"

enum { V = 50 };

static uint32_t choose(const struct sampling *sampling, const uint32_t *ids, uint32_t position, const float *logits)
{
    float copy[V];
    struct sampler_candidate scratch[V];
    memcpy(copy, logits, sizeof(copy));
    return sampler_choose(sampling, ids, position, copy, V, scratch);
}

static void fill(float *logits)
{
    for (uint32_t i = 0; i < V; i++)
        logits[i] = (float)((i * 37 + 11) % V) * 0.1f;
}

static void greedy_takes_the_largest_and_ties_go_to_the_smaller_id(void **state)
{
    (void)state;
    float logits[V] = {0};
    struct sampling sampling = {0};
    logits[7] = logits[31] = 2;
    assert_int_equal(choose(&sampling, NULL, 0, logits), 7);
    logits[31] = 2.5f;
    assert_int_equal(choose(&sampling, NULL, 0, logits), 31);
}

static void randomness_is_a_function_of_seed_and_position(void **state)
{
    (void)state;
    float logits[V];
    fill(logits);
    uint32_t ids[100] = {0};
    struct sampling a = {.temperature = 1, .seed = 5}, b = {.temperature = 1, .seed = 6};
    uint32_t differs = 0;
    for (uint32_t p = 0; p < 100; p++) {
        uint32_t first = choose(&a, ids, p, logits);
        assert_int_equal(choose(&a, ids, p, logits), first);
        differs += choose(&b, ids, p, logits) != first;
    }
    assert_true(differs > 50);
    for (uint64_t p = 0; p < 1000; p++)
        assert_true(sampler_uniform(3, p) >= 0 && sampler_uniform(3, p) < 1);
}

/* Draws follow the softmax: a chi-square that a wrong temperature would break by far. */
static void draws_follow_the_distribution(void **state)
{
    (void)state;
    enum { N = 20000 };
    float logits[V];
    for (uint32_t i = 0; i < V; i++)
        logits[i] = -INFINITY;
    logits[3] = 0;
    logits[4] = logf(2);
    logits[5] = logf(5);
    uint32_t ids[1] = {0}, n[V] = {0};
    struct sampling sampling = {.temperature = 1};
    for (uint64_t seed = 0; seed < N; seed++) {
        sampling.seed = seed;
        n[choose(&sampling, ids, 1, logits)]++;
    }
    assert_int_equal(n[3] + n[4] + n[5], N);
    const double expected[] = {N / 8.0, N / 4.0, N * 5 / 8.0};
    double chi2 = 0;
    for (int i = 0; i < 3; i++)
        chi2 += pow(n[3 + i] - expected[i], 2) / expected[i];
    assert_true(chi2 < 16); /* p < 0.0005, 2 degrees of freedom */
}

static void cuts_leave_only_the_likely(void **state)
{
    (void)state;
    float logits[V];
    uint32_t ids[1] = {0};
    fill(logits);
    logits[9] = 20;
    logits[12] = 19.5f;
    logits[13] = 18;
    const struct sampling cuts[] = {
        {.temperature = 1, .top_k = 2},
        {.temperature = 1, .top_p = 0.85f},
        {.temperature = 1, .min_p = 0.3f},
    };
    for (size_t c = 0; c < sizeof(cuts) / sizeof(cuts[0]); c++) {
        uint32_t n_second = 0;
        for (uint64_t seed = 0; seed < 500; seed++) {
            struct sampling sampling = cuts[c];
            sampling.seed = seed;
            uint32_t id = choose(&sampling, ids, 1, logits);
            assert_true(id == 9 || id == 12);
            n_second += id == 12;
        }
        assert_true(n_second > 100 && n_second < 300); /* exp(-0.5) : 1 */
    }
    struct sampling one = {.temperature = 5, .top_k = 1};
    assert_int_equal(choose(&one, ids, 1, logits), 9);
}

static void penalties_and_biases_change_the_choice(void **state)
{
    (void)state;
    float logits[V] = {0};
    logits[1] = 3;
    logits[2] = 2;
    logits[3] = -1;
    const uint32_t ids[] = {1, 1, 4};
    struct sampling repeat = {.repeat_penalty = 2, .penalty_window = 64};
    assert_int_equal(choose(&repeat, ids, 3, logits), 2);
    struct sampling frequency = {.frequency_penalty = 0.6f, .penalty_window = 64};
    assert_int_equal(choose(&frequency, ids, 3, logits), 2); /* 3 - 2 x 0.6 */
    struct sampling presence = {.presence_penalty = 0.6f, .penalty_window = 64};
    assert_int_equal(choose(&presence, ids, 3, logits), 1); /* 3 - 0.6 */
    struct sampling forgets = {.repeat_penalty = 2, .penalty_window = 1};
    assert_int_equal(choose(&forgets, ids, 3, logits), 1);
    struct sampler_bias bias[] = {{1, -INFINITY}, {3, 10}, {V + 5, 100}};
    struct sampling biased = {.biases = bias, .n_biases = 3};
    assert_int_equal(choose(&biased, ids, 3, logits), 3);
}

static void log_probabilities_sum_to_one(void **state)
{
    (void)state;
    float logits[V];
    fill(logits);
    logits[2] = 1000; /* far beyond what exp() can hold */
    double sum = 0, lse = sampler_log_sum_exp(logits, V);
    for (uint32_t i = 0; i < V; i++)
        sum += exp((double)logits[i] - lse);
    assert_true(fabs(sum - 1) < 1e-12);
    struct sampler_candidate top[4];
    assert_int_equal(sampler_top(logits, V, 4, top), 4);
    assert_int_equal(top[0].id, 2);
    for (int i = 1; i < 4; i++)
        assert_true(top[i - 1].logit >= top[i].logit);
    assert_int_equal(sampler_top(logits, V, 0, top), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(greedy_takes_the_largest_and_ties_go_to_the_smaller_id),
        cmocka_unit_test(randomness_is_a_function_of_seed_and_position),
        cmocka_unit_test(draws_follow_the_distribution),
        cmocka_unit_test(cuts_leave_only_the_likely),
        cmocka_unit_test(penalties_and_biases_change_the_choice),
        cmocka_unit_test(log_probabilities_sum_to_one),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
