/* test_selection.c - selection_run() against a slow version, the simulation the defaults come from, and cases known by hand. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <assert.h>
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "gpu-worker/policy/exact_set.h"
#include "tests/unit/policy/slow_selection.h"

#define ROUNDING    4e-6 /* of sums of weights, which are at most 1, in single precision */
#define ROUNDING_L2 5e-7 /* of their Euclidean length, which is at most 1, too, but a hundredth of that in most cases */

static const struct {
    enum policy_selector selector;
    float parameter;
} policies[] = {
    {POLICY_SELECTOR_DEVIATION, 0.0f}, {POLICY_SELECTOR_DEVIATION, 0.005f}, {POLICY_SELECTOR_DEVIATION, 0.02f},
    {POLICY_SELECTOR_DEVIATION, 0.3f}, {POLICY_SELECTOR_DEVIATION, 2.0f},   {POLICY_SELECTOR_MASS, 0.0f},
    {POLICY_SELECTOR_MASS, 0.3f},      {POLICY_SELECTOR_MASS, 0.9f},        {POLICY_SELECTOR_MASS, 0.99f},
    {POLICY_SELECTOR_MASS, 0.999999f}, {POLICY_SELECTOR_MASS, 1.0f},        {POLICY_SELECTOR_L2, 0.0f},
    {POLICY_SELECTOR_L2, 0.0003f},     {POLICY_SELECTOR_L2, 0.001f},        {POLICY_SELECTOR_L2, 0.01f},
    {POLICY_SELECTOR_L2, 0.3f},        {POLICY_SELECTOR_L2, 2.0f},
};
#define N_POLICIES (sizeof policies / sizeof policies[0])

#ifdef HCATTN_SANITIZED
static const uint32_t block_counts[] = {1, 2, 17}, groups[] = {1, 3};
#else
static const uint32_t block_counts[] = {1, 2, 3, 16, 17, 61, 200}, groups[] = {1, 3, 8};
#endif
#define N_BLOCK_COUNTS (sizeof block_counts / sizeof block_counts[0])
#define N_GROUPS       (sizeof groups / sizeof groups[0])

static bool selected(const struct fixture *fixture, size_t j)
{
    return fixture->masks[j / 64] >> (j % 64) & 1;
}

/* Up to rounding: the tokens at or above a step's threshold are selected, and it is the first step that is good enough. */
static bool is_step(const struct fixture *fixture, const struct slow *slow, int step, enum policy_selector selector,
                    double parameter)
{
    const double threshold = slow_threshold(slow, step),
                 tie = 1e-5; /* weights as near as this may be told apart or not */
    for (size_t j = 0; j < (size_t)fixture->n_blocks * 64; j++)
        if (slow->w[j] > 1e-33 && fabs(slow->w[j] - threshold) > tie * threshold &&
            selected(fixture, j) != (slow->w[j] >= threshold))
            return false;
    double (*unread)(const struct slow *slow, double threshold) = slow_deviation;
    double bound = parameter;
    if (selector == POLICY_SELECTOR_MASS) {
        unread = slow_unread_mass;
        bound = (1 - parameter) * slow_unread_mass(slow, INFINITY);
    }
    const double rounding = slow->is_l2 ? ROUNDING_L2 + 1e-6 * bound : ROUNDING;
    bool enough = step == SLOW_LAST_STEP || unread(slow, threshold * (1 - tie)) <= bound + rounding;
    bool first =
        step < 0 || slow->top == 0 || unread(slow, slow_threshold(slow, step - 1) * (1 + tie)) > bound - rounding;
    return enough && first;
}

static void check_threshold(const struct fixture *fixture, const struct slow *slow, enum policy_selector selector,
                            double parameter)
{
    int expected =
        selector == POLICY_SELECTOR_MASS ? slow_step_by_mass(slow, parameter) : slow_step_by_deviation(slow, parameter);
    bool found = is_step(fixture, slow, expected, selector, parameter);
    for (int step = -1; step <= SLOW_LAST_STEP && !found; step++) /* the bound lies within rounding of a step's */
        found = is_step(fixture, slow, step, selector, parameter);
    if (!found)
        print_error("selector %d %g, group %u, %u blocks: %u kept, step %d expected\n", (int)selector, parameter,
                    fixture->group, fixture->n_blocks, fixture->item.n_kept, expected);
    assert_true(found);
}

static bool scored(const struct fixture *fixture, size_t j)
{
    bool any = false;
    for (uint32_t head = 0; head < fixture->group; head++) {
        float score = fixture->scores[(size_t)head * fixture->n_blocks * 64 + j];
        any |= !isnan(score) && score != -INFINITY;
    }
    return any;
}

#define assert_near(value, expected) assert_true(fabs((double)(value) - (expected)) <= 2e-5 * fabs(expected) + 1e-30)

static void check_sums(const struct fixture *fixture, const struct slow *slow, bool tail)
{
    const size_t n = (size_t)fixture->n_blocks * 64;
    uint32_t n_kept = 0;
    for (size_t j = 0; j < n; j++) {
        n_kept += selected(fixture, j);
        assert_false(selected(fixture, j) && (j < LAYOUT_N_SINKS || !scored(fixture, j)));
    }
    assert_int_equal(fixture->item.n_kept, n_kept);
    for (uint32_t head = 0; head < fixture->group; head++) {
        const double *e = slow->e + head * n;
        const float *weight = fixture->weights + head * n;
        double sum = 0;
        assert_true(fixture->references[head] == (float)slow->reference[head]);
        for (uint32_t block = 0; block < fixture->n_blocks; block++) {
            double mass = 0;
            float found = fixture->masses[(size_t)head * fixture->n_blocks + block];
            for (size_t j = (size_t)block * 64; j < (size_t)block * 64 + 64; j++) {
                if (selected(fixture, j)) {
                    if (e[j] > 2e-38)
                        assert_near(*weight, e[j]);
                    sum += (double)*weight++;
                } else {
                    mass += e[j];
                }
            }
            if (tail) {
                assert_near(found, mass);
                sum += (double)found;
            } else {
                assert_int_equal(((const uint8_t *)&found)[1], 0x5a);
                sum += mass;
            }
        }
        if (slow->total[head] == 0)
            continue;
        const float *partial = fixture->exact + head * (2 + FIXTURE_HEAD_DIM);
        if (partial[0] > -INFINITY)
            sum += (double)partial[1] * exp((double)partial[0] - (double)fixture->references[head]);
        assert_true(fabs(sum / slow->total[head] - 1) < 1e-5); /* selected, tail and exact set are the whole softmax */
    }
}

static void as_the_slow_version_does(void **state)
{
    (void)state;
    uint32_t seed = 1;
    for (int kind = 0; kind < SCORES_N; kind++)
        for (size_t g = 0; g < N_GROUPS; g++)
            for (size_t b = 0; b < N_BLOCK_COUNTS; b++, seed++) {
                struct fixture fixture;
                struct slow by_mean, by_root;
                fixture_init(&fixture, (enum fixture_scores)kind, groups[g], block_counts[b], seed);
                slow_init(&by_mean, &fixture, POLICY_SELECTOR_DEVIATION); /* and mass */
                slow_init(&by_root, &fixture, POLICY_SELECTOR_L2);
                for (const struct kernels *const *table = fixture_tables(); *table != NULL; table++)
                    for (size_t i = 0; i < N_POLICIES; i++) {
                        const bool tail = (i + seed) % 3 != 0;
                        const struct slow *slow = policies[i].selector == POLICY_SELECTOR_L2 ? &by_root : &by_mean;
                        fixture_run(&fixture, *table, policies[i].selector, policies[i].parameter, tail);
                        check_threshold(&fixture, slow, policies[i].selector, (double)policies[i].parameter);
                        check_sums(&fixture, slow, tail);
                    }
                slow_fini(&by_mean);
                slow_fini(&by_root);
                fixture_fini(&fixture);
            }
}

/* What bisection and a stop at the first good step rest on. */
static void deviation_never_falls_with_the_threshold(void **state)
{
    (void)state;
    for (int kind = 0; kind < 2 * SCORES_N; kind++) {
        struct fixture fixture;
        struct slow slow;
        fixture_init(&fixture, (enum fixture_scores)(kind / 2), 3, 9, 5);
        slow_init(&slow, &fixture, kind % 2 ? POLICY_SELECTOR_L2 : POLICY_SELECTOR_DEVIATION);
        for (int i = 0; i <= SLOW_LAST_STEP; i++)
            assert_true(slow.deviation[i] >= slow.deviation[i + 1] - 1e-12);
        slow_fini(&slow);
        fixture_fini(&fixture);
    }
}

struct results {
    uint64_t masks[64];
    float masses[8 * 64], references[8], weights[8 * 64 * 64];
    uint32_t n_kept;
};

static void take_results(const struct fixture *fixture, struct results *results)
{
    assert_true(fixture->n_blocks <= 64 && fixture->group <= 8);
    memset(results, 0, sizeof *results);
    memcpy(results->masks, fixture->masks, fixture->n_blocks * sizeof(uint64_t));
    memcpy(results->masses, fixture->masses, fixture->group * fixture->n_blocks * sizeof(float));
    memcpy(results->references, fixture->references, fixture->group * sizeof(float));
    memcpy(results->weights, fixture->weights, (size_t)fixture->group * fixture->n_blocks * 64 * sizeof(float));
    results->n_kept = fixture->item.n_kept;
}

static void tables_give_equal_bits(void **state)
{
    (void)state;
    static struct results plain, other;
    for (int kind = 0; kind < SCORES_N; kind++) {
        struct fixture fixture;
        fixture_init(&fixture, (enum fixture_scores)kind, 3, 33, 11);
        for (size_t i = 0; i < N_POLICIES; i++)
            for (const struct kernels *const *table = fixture_tables(); *table != NULL; table++) {
                fixture_run(&fixture, *table, policies[i].selector, policies[i].parameter, true);
                take_results(&fixture, table == fixture_tables() ? &plain : &other);
                if (table != fixture_tables())
                    assert_memory_equal(&plain, &other, sizeof plain);
            }
        fixture_fini(&fixture);
    }
}

/* One scratch for all, in three orders, and each alone in a fresh one. */
static void the_same_alone_and_among_others(void **state)
{
    (void)state;
    enum { N_ITEMS = 18 };
    static_assert(N_ITEMS >= N_POLICIES, "each policy");
    static struct results alone[N_ITEMS], among;
    struct fixture fixtures[N_ITEMS];
    void *own[N_ITEMS], *shared = malloc(selection_scratch_bytes(fixture_quantizer(), 8, 3 * N_ITEMS) + 64);
    assert_non_null(shared);
    void *aligned = (void *)(((uintptr_t)shared + 63) & ~(uintptr_t)63);
    for (const struct kernels *const *table = fixture_tables(); *table != NULL; table++) {
        for (uint32_t i = 0; i < N_ITEMS; i++) {
            fixture_init(&fixtures[i], (enum fixture_scores)(i % SCORES_N), i % 3 == 0 ? 8 : i % 3, 1 + i * 3, i);
            memset(fixtures[i].scratch, 0xff,
                   selection_scratch_bytes(fixture_quantizer(), fixtures[i].group, 1 + i * 3));
            fixture_run(&fixtures[i], *table, policies[i % N_POLICIES].selector, policies[i % N_POLICIES].parameter,
                        true);
            take_results(&fixtures[i], &alone[i]);
            own[i] = fixtures[i].scratch;
            fixtures[i].scratch = aligned;
        }
        static const uint32_t strides[] = {1, 5, 7};
        for (size_t order = 0; order < 3; order++)
            for (uint32_t k = 0; k < N_ITEMS; k++) {
                uint32_t i = k * strides[order] % N_ITEMS;
                fixture_run(&fixtures[i], *table, policies[i % N_POLICIES].selector, policies[i % N_POLICIES].parameter,
                            true);
                take_results(&fixtures[i], &among);
                assert_memory_equal(&alone[i], &among, sizeof among);
            }
        for (uint32_t i = 0; i < N_ITEMS; i++) {
            fixtures[i].scratch = own[i];
            fixture_fini(&fixtures[i]);
        }
    }
    free(shared);
}

/* ---- the simulation: weights sorted (mass), nine halvings of 40 octaves (deviation, l2) ---- */

static uint32_t n_at_least(const struct slow *slow, double threshold)
{
    uint32_t n = 0;
    for (size_t j = LAYOUT_N_SINKS; j < (size_t)slow->n_blocks * 64; j++)
        n += slow->w[j] >= threshold;
    return n;
}

static void simulate_deviation(struct fixture *fixture, enum policy_selector selector, double epsilon)
{
    const double halving = 40 / exp2(9), step = 1.0 / SELECTION_GRID_PER_OCTAVE;
    struct slow slow;
    slow_init(&slow, fixture, selector);
    double low = 0, high = 40;
    for (int k = 0; k < 9; k++) {
        double middle = (low + high) / 2;
        bool enough = slow_deviation(&slow, slow.top * exp2(-middle)) <= epsilon;
        *(enough ? &high : &low) = middle;
    }
    fixture_run(fixture, kernels_get(KERNELS_ISA_AUTO), selector, (float)epsilon, true);
    uint32_t n_kept = fixture->item.n_kept;
    double least = INFINITY;
    for (size_t j = 0; j < (size_t)fixture->n_blocks * 64; j++)
        least = selected(fixture, j) ? fmin(least, slow.w[j]) : least;
    assert_true(slow_deviation(&slow, least) <= epsilon + (slow.is_l2 ? ROUNDING_L2 : ROUNDING));
    if (n_kept > 0) { /* the simulation keeps the largest even then */
        assert_true(n_kept >= n_at_least(&slow, slow.top * exp2(halving + 1e-5 - high)));
        assert_true(n_kept <= n_at_least(&slow, slow.top * exp2(-high - step - 1e-5)));
    }
    slow_fini(&slow);
}

static void as_the_simulation_does(void **state)
{
    (void)state;
    static const double epsilons[] = {0.01, 0.02, 0.05, 0.2}, lengths[] = {0.0004, 0.00085, 0.002, 0.02};
    const double step = 1.0 / SELECTION_GRID_PER_OCTAVE;
    for (uint32_t seed = 0; seed < 12; seed++) {
        struct fixture fixture;
        struct slow slow;
        fixture_init(&fixture, seed % 2 ? SCORES_NORMAL : SCORES_PEAKED, 3, 5 + seed * 3, seed);
        slow_init(&slow, &fixture, POLICY_SELECTOR_MASS);
        for (size_t i = 0; i < sizeof epsilons / sizeof epsilons[0]; i++) {
            simulate_deviation(&fixture, POLICY_SELECTOR_DEVIATION, epsilons[i]);
            simulate_deviation(&fixture, POLICY_SELECTOR_L2, lengths[i]);
        }
        for (double p = 0.5; p < 0.99; p += 0.12) { /* kept: everything before the sum has reached p */
            fixture_run(&fixture, kernels_get(KERNELS_ISA_AUTO), POLICY_SELECTOR_MASS, (float)p, true);
            double total = slow_unread_mass(&slow, INFINITY), least = INFINITY;
            for (size_t j = LAYOUT_N_SINKS; j < (size_t)fixture.n_blocks * 64; j++)
                if (total - slow_unread_mass(&slow, slow.w[j] * (1 + 1e-12)) < p * total)
                    least = fmin(least, slow.w[j]);
            if (least == INFINITY) {
                assert_int_equal(fixture.item.n_kept, 0);
                continue;
            }
            assert_true(fixture.item.n_kept >= n_at_least(&slow, least * (1 + 1e-4)));
            assert_true(fixture.item.n_kept <= n_at_least(&slow, least * exp2(-step) * (1 - 1e-4)));
        }
        slow_fini(&slow);
        fixture_fini(&fixture);
    }
}

/* ---- by hand ---- */

static void full_takes_every_old_token(void **state)
{
    (void)state;
    struct fixture fixture;
    fixture_init(&fixture, SCORES_HOLES, 3, 5, 1);
    fixture_run(&fixture, kernels_get(KERNELS_ISA_AUTO), POLICY_SELECTOR_FULL, 0, false);
    for (uint32_t block = 0; block < 5; block++)
        assert_int_equal(fixture.masks[block], exact_set_old_mask(block));
    assert_int_equal(fixture.item.n_kept, 5 * 64 - LAYOUT_N_SINKS);
    assert_int_equal(((const uint8_t *)fixture.masses)[0], 0x5a);
    fixture_fini(&fixture);
}

static uint32_t kept(struct fixture *fixture, const struct kernels *kernels, enum policy_selector selector,
                     float parameter)
{
    fixture_run(fixture, kernels, selector, parameter, true);
    return fixture->item.n_kept;
}

static void known_counts(void **state)
{
    (void)state;
    for (const struct kernels *const *table = fixture_tables(); *table != NULL; table++) {
        struct fixture fixture;
        fixture_init(&fixture, SCORES_EQUAL, 3, 7, 2);
        const uint32_t n_old = 7 * 64 - LAYOUT_N_SINKS;
        assert_int_equal(kept(&fixture, *table, POLICY_SELECTOR_DEVIATION, 0.0f), 0); /* means say it all */
        assert_int_equal(kept(&fixture, *table, POLICY_SELECTOR_L2, 0.0f), 0);
        assert_int_equal(kept(&fixture, *table, POLICY_SELECTOR_MASS, 0.0f), 0);
        assert_int_equal(kept(&fixture, *table, POLICY_SELECTOR_MASS, 0.01f), n_old); /* ties are kept */
        assert_int_equal(kept(&fixture, *table, POLICY_SELECTOR_MASS, 1.0f), n_old);

        /* Two levels in every block: without the upper ones, which are few, nothing deviates. */
        for (size_t j = 0; j < (size_t)3 * 7 * 64; j++)
            fixture.scores[j] = j % 16 == 9 ? 3.0f : 1.25f;
        fixture_update(&fixture);
        assert_int_equal(kept(&fixture, *table, POLICY_SELECTOR_DEVIATION, 0.0f), 7 * 4);
        assert_int_equal(kept(&fixture, *table, POLICY_SELECTOR_DEVIATION, 2.0f), 0);
        assert_int_equal(kept(&fixture, *table, POLICY_SELECTOR_L2, 0.0f), 7 * 4);
        assert_int_equal(kept(&fixture, *table, POLICY_SELECTOR_L2, 2.0f), 0);
        for (uint32_t block = 0; block < 7; block++)
            assert_int_equal((kept(&fixture, *table, POLICY_SELECTOR_DEVIATION, 0.0f), fixture.masks[block]),
                             0x0200020002000200);
        fixture_fini(&fixture);

        fixture_init(&fixture, SCORES_DOMINANT, 1, 3, 2);
        assert_int_equal(kept(&fixture, *table, POLICY_SELECTOR_DEVIATION, 0.02f), 1);
        assert_int_equal(kept(&fixture, *table, POLICY_SELECTOR_MASS, 0.95f), 1);
        assert_int_equal(kept(&fixture, *table, POLICY_SELECTOR_L2, 0.01f), 1);
        fixture_fini(&fixture);

        fixture_init(&fixture, SCORES_EXACT, 3, 4, 2); /* old tokens have 1e-10 of the mass */
        assert_int_equal(kept(&fixture, *table, POLICY_SELECTOR_DEVIATION, 0.0001f), 0);
        assert_int_equal(kept(&fixture, *table, POLICY_SELECTOR_MASS, 0.99f), 0);
        assert_true(kept(&fixture, *table, POLICY_SELECTOR_DEVIATION, 0.0f) > 0);
        assert_int_equal(kept(&fixture, *table, POLICY_SELECTOR_L2, 0.0001f), 0);
        assert_true(kept(&fixture, *table, POLICY_SELECTOR_L2, 0.0f) > 0);
        fixture_fini(&fixture);

        fixture_init(&fixture, SCORES_WIDE, 1, 1, 2); /* weights so small that only 0 is a bound for them */
        for (uint32_t j = LAYOUT_N_SINKS; j < 64; j++)
            fixture.scores[j] = -60 - (float)(j % 7);
        fixture_update(&fixture);
        assert_int_equal(kept(&fixture, *table, POLICY_SELECTOR_DEVIATION, 0.0f),
                         60 - 9);                                                   /* all but the lowest level */
        assert_int_equal(kept(&fixture, *table, POLICY_SELECTOR_L2, 0.0f), 60 - 9); /* no square of theirs is lost */
        fixture_fini(&fixture);
    }
}

/* Two heads, each with one token that stands out: by means both are half of a weight, by root mean squares 0.7 of it. */
static void roots_and_lengths_by_hand(void **state)
{
    (void)state;
    for (const struct kernels *const *table = fixture_tables(); *table != NULL; table++) {
        struct fixture fixture;
        fixture_init(&fixture, SCORES_LAST, 2, 3, 2);
        const size_t n = 3 * 64;
        for (size_t j = 0; j < 2 * n; j++)
            fixture.scores[j] = -INFINITY;
        for (uint32_t j = 0; j < 2 * FIXTURE_MAX_EXACT; j++)
            fixture.exact_scores[j] = -INFINITY;
        fixture.exact_scores[0] = fixture.exact_scores[FIXTURE_MAX_EXACT] = 0;
        fixture.scores[70] = logf(0.25f);      /* w of head 0: 0.2 */
        fixture.scores[n + 130] = logf(0.25f); /* w of head 1: 0.2 */
        fixture_update(&fixture);
        /* w = 0.2 / sqrt(2); in each of two blocks w^2 (63 / 64) about the mean: together w sqrt(63 / 32) */
        const float length = 0.2f / sqrtf(2.0f) * sqrtf(63.0f / 32.0f);
        assert_int_equal(kept(&fixture, *table, POLICY_SELECTOR_L2, length * 1.0001f), 0);
        assert_int_equal(kept(&fixture, *table, POLICY_SELECTOR_L2, length * 0.9999f), 2);
        /* w = 0.1; in each block w (1 - 1 / 64) and 63 times w / 64: together 4 w 63 / 64 */
        const float deviation = 0.4f * 63.0f / 64.0f;
        assert_int_equal(kept(&fixture, *table, POLICY_SELECTOR_DEVIATION, deviation * 1.0001f), 0);
        assert_int_equal(kept(&fixture, *table, POLICY_SELECTOR_DEVIATION, deviation * 0.9999f), 2);
        fixture_fini(&fixture);
    }
}

static void nothing_has_a_weight(void **state)
{
    (void)state;
    for (const struct kernels *const *table = fixture_tables(); *table != NULL; table++) {
        struct fixture fixture;
        fixture_init(&fixture, SCORES_LAST, 2, 3, 2);
        const size_t n = 3 * 64;
        fixture.scores[n - 1] = -INFINITY;
        fixture.scores[2 * n - 1] = NAN;
        fixture_update(&fixture);
        for (size_t i = 0; i < N_POLICIES; i++) {
            assert_int_equal(kept(&fixture, *table, policies[i].selector, policies[i].parameter), 0);
            assert_true(fixture.masses[0] == 0 && fixture.masses[5] == 0);
        }
        /* not even the exact set of one head: the other head decides alone */
        for (uint32_t j = 0; j < FIXTURE_MAX_EXACT; j++)
            fixture.exact_scores[j] = -INFINITY;
        fixture.scores[2 * n - 1] = 20.0f;
        fixture_update(&fixture);
        assert_int_equal(kept(&fixture, *table, POLICY_SELECTOR_L2, 0.001f), 1);
        assert_int_equal(kept(&fixture, *table, POLICY_SELECTOR_DEVIATION, 0.02f), 1);
        assert_int_equal(kept(&fixture, *table, POLICY_SELECTOR_MASS, 0.9f), 1);
        assert_true(fixture.masks[2] == UINT64_C(1) << 63);
        assert_true(fixture.references[0] == -INFINITY && fixture.references[1] == 20.0f);
        assert_true(fixture.weights[0] == 0 && fixture.weights[n] == 1.0f);
        fixture_fini(&fixture);
    }
}

static void an_infinite_score_takes_everything(void **state)
{
    (void)state;
    for (const struct kernels *const *table = fixture_tables(); *table != NULL; table++) {
        struct fixture fixture;
        fixture_init(&fixture, SCORES_NORMAL, 1, 3, 2);
        fixture.scores[100] = INFINITY;
        fixture_update(&fixture);
        assert_int_equal(kept(&fixture, *table, POLICY_SELECTOR_DEVIATION, 0.02f), 1);
        assert_true(selected(&fixture, 100));
        assert_int_equal(kept(&fixture, *table, POLICY_SELECTOR_L2, 0.001f), 1);
        assert_true(selected(&fixture, 100));
        assert_true(fixture.references[0] == FLT_MAX && fixture.weights[0] == 1.0f && fixture.masses[0] == 0);
        fixture_fini(&fixture);
    }
}

static int set_up(void **state)
{
    (void)state;
    kernels_thread_setup();
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(as_the_slow_version_does),
        cmocka_unit_test(deviation_never_falls_with_the_threshold),
        cmocka_unit_test(tables_give_equal_bits),
        cmocka_unit_test(the_same_alone_and_among_others),
        cmocka_unit_test(as_the_simulation_does),
        cmocka_unit_test(full_takes_every_old_token),
        cmocka_unit_test(known_counts),
        cmocka_unit_test(roots_and_lengths_by_hand),
        cmocka_unit_test(nothing_has_a_weight),
        cmocka_unit_test(an_infinite_score_takes_everything),
    };
    return cmocka_run_group_tests(tests, set_up, NULL);
}
