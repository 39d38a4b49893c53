/*
 * test_selection.c - selections on the device against selection_run(), from the same scores: masks, n_kept, masses, references and
 * weights to the bit. Every selector, with and without a tail, scores of ordinary and of broken models, two items a call.
 */
#include <assert.h>
#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "gpu-worker/backend/cuda/cuda_keys.h"
#include "gpu-worker/backend/cuda/cuda_selection.h"
#include "tests/backend/cuda-on-cpu/device.h"
#include "tests/unit/policy/fixture.h"

static_assert(CUDA_SELECTION_MAX_GROUP == KEY_CODEC_MAX_QUERIES, "as selection.h has it");
static_assert(CUDA_SELECTION_MAX_EXACT == SELECTION_MAX_EXACT, "as selection.h has it");
static_assert(SELECTION_GRID_PER_OCTAVE == 8 && SELECTION_GRID_OCTAVES == 40, "SELECTION_STEPS of cuda_selection.cuh");
static_assert(LAYOUT_N_SINKS == 4, "SELECTION_SINKS of cuda_selection.cuh");

#define N_ITEMS     2u
#define MOST_BLOCKS 41u

static const struct {
    enum policy_selector selector;
    float parameter;
} terms[] = {
    {POLICY_SELECTOR_DEVIATION, 0.02f}, {POLICY_SELECTOR_MASS, 0.9f},      {POLICY_SELECTOR_L2, 0.003f},
    {POLICY_SELECTOR_DEVIATION, 0.3f},  {POLICY_SELECTOR_MASS, 0.5f},      {POLICY_SELECTOR_L2, 0.05f},
    {POLICY_SELECTOR_DEVIATION, 0.0f},  {POLICY_SELECTOR_MASS, 1.0f},      {POLICY_SELECTOR_L2, 0.0f},
    {POLICY_SELECTOR_DEVIATION, 2.0f},  {POLICY_SELECTOR_MASS, 0.0f},      {POLICY_SELECTOR_L2, 2.0f},
    {POLICY_SELECTOR_DEVIATION, 1e-6f}, {POLICY_SELECTOR_MASS, 0.999999f}, {POLICY_SELECTOR_L2, 1e-7f},
};
#define N_TERMS (sizeof terms / sizeof *terms)

static uint64_t masks[MOST_BLOCKS];
static float numbers[FIXTURE_HEAD_DIM * MOST_BLOCKS * 64];

static void compare(const char *what, const struct fixture *fixture, const float *there, size_t stride, size_t n,
                    const float *expected, size_t expected_stride)
{
    const uint32_t group = fixture->group;
    device_read(numbers, there, group * stride * sizeof *numbers);
    for (uint32_t head = 0; head < group; head++)
        for (size_t i = 0; i < n; i++) {
            const float got = numbers[head * stride + i], wanted = expected[head * expected_stride + i];
            if (got != wanted) /* 0 and -0 are alike */
                fail_msg("%s of head %u, %zu: %.9g, not %.9g (selector %d, %g; %u blocks, %u heads)", what, head, i,
                         (double)got, (double)wanted, fixture->policy.terms.selector,
                         (double)fixture->policy.terms.parameter, fixture->n_blocks, group);
        }
}

/* Zeros and the largest scores. */
static void *state_new(const struct fixture *fixture)
{
    const size_t n = (size_t)fixture->n_blocks * 64;
    void *state = calloc(1, cuda_selection_state_bytes(fixture->group));
    assert_non_null(state);
    for (uint32_t head = 0; head < fixture->group; head++)
        for (size_t j = LAYOUT_N_SINKS; j < n; j++) {
            const float score = fixture->scores[head * n + j];
            if (score > -INFINITY && cuda_keys_order(score) > cuda_selection_largest(state)[head])
                cuda_selection_largest(state)[head] = cuda_keys_order(score);
        }
    void *there = device_new(state, cuda_selection_state_bytes(fixture->group));
    free(state);
    return there;
}

static struct cuda_selection_item item_new(const struct fixture *fixture, const struct cuda_selection *selection,
                                           float parameter, bool tail)
{
    const size_t n = (size_t)fixture->n_blocks * 64, group = fixture->group;
    struct cuda_selection_item item = {
        .scores = device_new(NULL, group * selection->stride * sizeof(float)),
        .exact = device_new(fixture->exact, group * (2 + FIXTURE_HEAD_DIM) * sizeof(float)),
        .exact_scores = device_new(fixture->exact_scores, group * FIXTURE_MAX_EXACT * sizeof(float)),
        .state = state_new(fixture),
        .work = device_new(NULL, cuda_selection_work_bytes(selection)),
        .n_blocks = fixture->n_blocks,
        .n_exact = selection->selector == POLICY_SELECTOR_MASS ? fixture->n_exact : 0,
        .parameter = parameter,
        .n_kept = device_new(NULL, sizeof(uint32_t)),
        .masks = device_new(NULL, fixture->n_blocks * sizeof(uint64_t)),
        .masses = tail ? device_new(NULL, group * fixture->n_blocks * sizeof(float)) : NULL,
        .references = device_new(NULL, group * sizeof(float)),
        .weights = device_new(NULL, group * n * sizeof(float)),
        .weights_stride = n,
    };
    for (size_t head = 0; head < group; head++)
        assert_int_equal(cudaMemcpy(item.scores + head * selection->stride, fixture->scores + head * n,
                                    n * sizeof(float), cudaMemcpyHostToDevice),
                         cudaSuccess);
    return item;
}

/* Weights of all old tokens: one bit that differs need not show in masks. selection_run() leaves them in its scratch. */
static void check_weights(const struct cuda_selection_item *item, const struct fixture *fixture,
                          const struct cuda_selection *selection)
{
    const size_t n = (size_t)item->n_blocks * 64, n_bytes = fixture->group * (n + 16) * sizeof(float);
    const float *expected = (const float *)fixture->scratch + (n_bytes + 63) / 64 * 64 / sizeof(float);
    device_read(numbers, (const uint8_t *)item->work + cuda_selection_weights_offset(selection), n * sizeof *numbers);
    for (size_t j = LAYOUT_N_SINKS; j < n; j++)
        if (numbers[j] != expected[j])
            fail_msg("w %zu of %zu: %.9g, not %.9g (selector %d, %u heads)", j, n, (double)numbers[j],
                     (double)expected[j], selection->selector, fixture->group);
}

/* What a fixture expects, by block number, to the order of lanes. */
static void put_in_lanes(struct fixture *fixture, uint32_t n_lanes)
{
    const uint32_t n_blocks = fixture->n_blocks;
    const size_t n = (size_t)n_blocks * 64;
    uint32_t first[MOST_BLOCKS], n_before = 0, at = 0;
    uint64_t by_lane[MOST_BLOCKS];
    for (uint32_t block = 0; block < n_blocks; block++) {
        first[block] = n_before;
        n_before += (uint32_t)__builtin_popcountll(fixture->masks[block]);
    }
    for (uint32_t head = 0; head < fixture->group; head++) {
        float *masses = fixture->masses + (size_t)head * n_blocks, *weights = fixture->weights + head * n;
        size_t n_weights = 0;
        at = 0;
        for (uint32_t lane = 0; lane < n_lanes; lane++)
            for (uint32_t block = lane; block < n_blocks; block += n_lanes, at++) {
                const size_t n_own = (size_t)__builtin_popcountll(fixture->masks[block]);
                memcpy(numbers + n_weights, weights + first[block], n_own * sizeof *numbers);
                numbers[n + at] = masses[block];
                by_lane[at] = fixture->masks[block];
                n_weights += n_own;
            }
        memcpy(weights, numbers, n_weights * sizeof *weights);
        memcpy(masses, numbers + n, n_blocks * sizeof *masses);
    }
    memcpy(fixture->masks, by_lane, n_blocks * sizeof *by_lane);
}

static void item_check(const struct cuda_selection_item *item, struct fixture *fixture,
                       const struct cuda_selection *selection)
{
    uint32_t n_kept;
    put_in_lanes(fixture, selection->n_lanes);
    check_weights(item, fixture, selection);
    device_read(&n_kept, item->n_kept, sizeof n_kept);
    device_read(masks, item->masks, item->n_blocks * sizeof *masks);
    for (uint32_t block = 0; block < item->n_blocks; block++)
        if (masks[block] != fixture->masks[block])
            fail_msg("mask %u of %u: %016llx, not %016llx (selector %d, %g; %u heads, %u kept, not %u)", block,
                     item->n_blocks, (unsigned long long)masks[block], (unsigned long long)fixture->masks[block],
                     fixture->policy.terms.selector, (double)fixture->policy.terms.parameter, fixture->group, n_kept,
                     fixture->item.n_kept);
    assert_int_equal(n_kept, fixture->item.n_kept);
    const size_t n = (size_t)item->n_blocks * 64;
    compare("reference", fixture, item->references, 1, 1, fixture->references, 1);
    compare("weight", fixture, item->weights, n, n_kept, fixture->weights, n);
    if (item->masses)
        compare("mass", fixture, item->masses, item->n_blocks, item->n_blocks, fixture->masses, item->n_blocks);
}

static void item_free(struct cuda_selection_item *item)
{
    device_free(item->scores);
    device_free((void *)(uintptr_t)item->exact);
    device_free((void *)(uintptr_t)item->exact_scores);
    device_free(item->state);
    device_free(item->work);
    device_free(item->n_kept);
    device_free(item->masks);
    device_free(item->masses);
    device_free(item->references);
    device_free(item->weights);
}

static void check(enum fixture_scores kind, uint32_t group, const uint32_t n_blocks[N_ITEMS], size_t of_terms,
                  int order)
{
    const struct device_run run = device_run(order);
    const bool tail = (of_terms + (size_t)order) % 3 != 0;
    const struct cuda_selection selection = {.selector = terms[of_terms].selector,
                                             .group = group,
                                             .head_dim = FIXTURE_HEAD_DIM,
                                             .most_blocks = n_blocks[0] > n_blocks[1] ? n_blocks[0] : n_blocks[1],
                                             .stride =
                                                 (n_blocks[0] > n_blocks[1] ? n_blocks[0] : n_blocks[1]) * 64 + 16,
                                             .exact_stride = FIXTURE_MAX_EXACT,
                                             .n_lanes = order % 2 ? LAYOUT_N_LANES : 1,
                                             .weights = true};
    struct fixture fixtures[N_ITEMS];
    struct cuda_selection_item items[N_ITEMS];
    for (uint32_t i = 0; i < N_ITEMS; i++) {
        fixture_init(&fixtures[i], kind, group, n_blocks[i], (uint32_t)of_terms + i);
        if (kind == SCORES_HOLES && group > 1) { /* as large as can be, and larger */
            for (uint32_t j = 5; j < 64; j += 20 - (uint32_t)of_terms)
                fixtures[i].scores[fixtures[i].n_blocks * 64 + j] = j % 2 ? INFINITY : FLT_MAX;
            fixture_update(&fixtures[i]);
        }
        fixture_run(&fixtures[i], kernels_get(KERNELS_ISA_PLAIN), selection.selector, terms[of_terms].parameter, tail);
        items[i] = item_new(&fixtures[i], &selection, terms[of_terms].parameter, tail);
    }
    struct cuda_selection_item *there = device_new(items, sizeof items);
    assert_int_equal(cuda_selection_run(&run.queue, &selection, there, N_ITEMS), cudaSuccess);
    for (uint32_t i = 0; i < N_ITEMS; i++) {
        item_check(&items[i], &fixtures[i], &selection);
        item_free(&items[i]);
        fixture_fini(&fixtures[i]);
    }
    device_free(there);
}

static void selections_are_those_of_the_cpu(void **state)
{
    (void)state;
    static const uint32_t groups[] = {1, 4, 7, 2, 8, 3};
    static const uint32_t sizes[][N_ITEMS] = {{1, 5}, {41, 2}, {16, 33}, {17, 1}, {34, 15}};
    size_t n = 0;
    for (int kind = 0; kind < SCORES_N; kind++)
        for (size_t of_terms = 0; of_terms < N_TERMS; of_terms++, n++)
            check((enum fixture_scores)kind, groups[n % 6], sizes[n % 5], of_terms, (int)(n % 4) % DEVICE_N_RUNS);
}

static void what_is_empty_or_unknown(void **state)
{
    (void)state;
    const struct device_run run = device_run(0);
    struct cuda_selection_item *items = device_new(NULL, sizeof *items);
    struct cuda_selection selection = {
        .selector = POLICY_SELECTOR_MASS, .group = 1, .head_dim = 8, .most_blocks = 4, .n_lanes = 1, .stride = 256};
    assert_int_equal(cuda_selection_run(&run.queue, &selection, items, 0), cudaSuccess);
    selection.group = CUDA_SELECTION_MAX_GROUP + 1;
    assert_int_equal(cuda_selection_run(&run.queue, &selection, items, 1), cudaErrorInvalidValue);
    selection.group = 1;
    selection.n_lanes = 0;
    assert_int_equal(cuda_selection_run(&run.queue, &selection, items, 1), cudaErrorInvalidValue);
    selection.n_lanes = 1;
    selection.selector = POLICY_SELECTOR_FULL;
    assert_int_equal(cuda_selection_run(&run.queue, &selection, items, 1), cudaErrorInvalidValue);
    device_free(items);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(selections_are_those_of_the_cpu),
        cmocka_unit_test(what_is_empty_or_unknown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
