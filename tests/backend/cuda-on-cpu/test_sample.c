/*
 * test_sample.c - the choice of tokens on the device against sampler_choose(): the same token, but where the draw or a cut falls
 * within 1e-8 of all weight of a boundary between two tokens; the same in every order, block size and batch.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "gpu-worker/backend/cuda/cuda_sample.h"
#include "gpu-worker/sampler.h"
#include "tests/backend/cuda-on-cpu/device.h"
#include "tests/backend/fixture.h"

#define MAX_VOCAB   128256u
#define MAX_ROWS    24u
#define N_IDS       80u
#define MAX_BIASES  6u
#define MAX_CHANGES (N_IDS + MAX_BIASES)
#define TOLERANCE   1e-8

/* One row of a case: what the host chooses, and what the device chose. */
struct one {
    struct sampling sampling;
    struct sampler_bias biases[MAX_BIASES];
    uint32_t ids[N_IDS], position, n_changes, expected;
    struct sampler_change changes[MAX_CHANGES];
    float *logits, *changed; /* [n_vocab]; after the host's changes */
};

static struct one rows[MAX_ROWS];
static struct sampler_candidate scratch[MAX_VOCAB];
static uint32_t n_different, n_compared;

/* ---- rows ---- */

enum kind { NORMAL, TIED, EQUAL, FEW, BROKEN, WIDE, INFINITE, N_KINDS };

static float normal(void)
{
    float sum = 0;
    for (int i = 0; i < 12; i++)
        sum += fixture_uniform(0.5f);
    return sum;
}

static void fill(float *logits, uint32_t n_vocab, enum kind kind)
{
    for (uint32_t i = 0; i < n_vocab; i++) {
        const float x = 3.0f * normal();
        switch (kind) {
        case NORMAL:
        case INFINITE:
            logits[i] = x;
            break;
        case TIED: /* zeros of both signs among them */
            logits[i] = rintf(x) * (i % 2 ? 1.0f : 1.0000001f);
            break;
        case EQUAL:
            logits[i] = 1.5f;
            break;
        case FEW:
            logits[i] = fixture_random() % 64 ? -INFINITY : x;
            break;
        case BROKEN:
            logits[i] = i % 3 ? x : NAN;
            break;
        default:
            logits[i] = x * (i % 5 ? 1.0f : 1e37f);
        }
    }
    if (kind == INFINITE)
        logits[n_vocab / 2] = logits[n_vocab - 1] = INFINITY;
}

/* Row number `i` of some case, with logits of its own. */
static void make(struct one *one, uint32_t i, uint32_t n_vocab)
{
    static const float temperatures[] = {1, 0.7f, 0, 0.1f, 3, 1.5f, 1e-38f, 50};
    static const float top_ps[] = {0, 0.9f, 1, 0.5f, 0.01f, 0.999f};
    static const float min_ps[] = {0, 0, 0.05f, 0.5f, 1, 0};
    const uint32_t top_ks[] = {0, 0, 5, 50, 1, n_vocab, 1000};
    one->sampling = (struct sampling){.temperature = temperatures[fixture_random() % 8],
                                      .top_k = top_ks[fixture_random() % 7],
                                      .top_p = top_ps[fixture_random() % 6],
                                      .min_p = min_ps[fixture_random() % 6],
                                      .penalty_window = fixture_random() % 3 ? 64 : 7,
                                      .seed = fixture_random(),
                                      .biases = one->biases};
    if (fixture_random() % 2) {
        one->sampling.repeat_penalty = fixture_random() % 2 ? 1.3f : 1.0f;
        one->sampling.presence_penalty = fixture_random() % 2 ? 0.5f : 0.0f;
        one->sampling.frequency_penalty = fixture_random() % 2 ? 0.25f : 0.0f;
    }
    if (fixture_random() % 2) { /* some of them of the same id, of no id, and of one that penalties change, too */
        one->sampling.n_biases = MAX_BIASES;
        for (uint32_t k = 0; k < MAX_BIASES; k++)
            one->biases[k] =
                (struct sampler_bias){k < 4 ? fixture_random() % n_vocab : n_vocab + 1, fixture_uniform(5.0f)};
        one->biases[3] = (struct sampler_bias){one->biases[1].id, 0.1f};
    }
    one->position = fixture_random() % N_IDS;
    for (uint32_t k = 0; k < N_IDS; k++)
        one->ids[k] = fixture_random() % (n_vocab < 40 ? n_vocab + 2 : 40);
    fill(one->logits, n_vocab, i % 3 ? (enum kind)(fixture_random() % N_KINDS) : NORMAL);
    assert_true(sampler_max_changes(&one->sampling, one->position) <= MAX_CHANGES);
    one->n_changes = sampler_changes(&one->sampling, one->ids, one->position, n_vocab, one->changes);
    memcpy(one->changed, one->logits, n_vocab * sizeof(float));
    one->expected = sampler_choose(&one->sampling, one->ids, one->position, one->changed, n_vocab, scratch);
}

/* ---- boundaries ---- */

static int by_order(const void *a, const void *b)
{
    const struct sampler_candidate *left = a, *right = b;
    if (left->logit != right->logit)
        return left->logit > right->logit ? -1 : 1;
    return left->id < right->id ? -1 : 1;
}

/*
 * Of a row that is drawn: how near to a boundary between two tokens its cuts and its draw are, as a share of all weight. A top-p
 * cut that falls the other way changes all that follows: only the draw that follows the host's cuts is looked at.
 */
static double nearest_boundary(const struct one *one, uint32_t n_vocab)
{
    const struct sampling *s = &one->sampling;
    uint32_t n = 0;
    for (uint32_t id = 0; id < n_vocab; id++)
        if (one->changed[id] > -INFINITY)
            scratch[n++] = (struct sampler_candidate){one->changed[id], id};
    qsort(scratch, n, sizeof *scratch, by_order);
    n = s->top_k && s->top_k < n ? s->top_k : n;
    double *sums = malloc((n + 1) * sizeof *sums), nearest = 1;
    sums[0] = 0;
    for (uint32_t i = 0; i < n; i++) {
        const double weight = exp(((double)scratch[i].logit - (double)scratch[0].logit) / (double)s->temperature);
        sums[i + 1] = sums[i] + weight;
        if (s->min_p > 0)
            nearest = fmin(nearest, fabs(weight / (double)s->min_p - 1));
    }
    const double all = sums[n];
    if (s->top_p > 0 && s->top_p < 1) {
        const double goal = (double)s->top_p * all;
        uint32_t n_kept = 0;
        for (uint32_t i = 0; i <= n; i++)
            nearest = fmin(nearest, fabs(sums[i] - goal) / all);
        while (n_kept < n && sums[n_kept] < goal)
            n_kept++;
        n = n_kept;
    }
    for (uint32_t i = 1; s->min_p > 0 && i < n; i++)
        if (sums[i + 1] - sums[i] < (double)s->min_p)
            n = i;
    const double goal = sampler_uniform(s->seed, one->position) * sums[n];
    for (uint32_t i = 0; i <= n; i++)
        nearest = fmin(nearest, fabs(sums[i] - goal) / sums[n]);
    free(sums);
    return nearest;
}

/* ---- the device ---- */

/* Rows first .. first + n - 1 in one call; what came out to ret_ids, what became of the logits to `after` of each. */
static void run(const struct cuda_queue *queue, uint32_t first, uint32_t n, uint32_t n_vocab, uint32_t *ret_ids)
{
    static float after[MAX_VOCAB];
    struct backend_sample host[MAX_ROWS];
    const size_t n_bytes = n_vocab * sizeof(float);
    uint32_t *ids = NULL;
    assert_int_equal(cudaMallocHost((void **)&ids, n * sizeof *ids), cudaSuccess);
    for (uint32_t i = 0; i < n; i++) {
        const struct one *one = &rows[first + i];
        host[i] = (struct backend_sample){.logits = device_new(one->logits, n_bytes),
                                          .changes = device_new(one->changes, sizeof one->changes),
                                          .n_changes = one->n_changes,
                                          .top_k = one->sampling.top_k,
                                          .temperature = one->sampling.temperature,
                                          .top_p = one->sampling.top_p,
                                          .min_p = one->sampling.min_p,
                                          .uniform = sampler_uniform(one->sampling.seed, one->position),
                                          .id = ids + i};
    }
    struct backend_sample *there = device_new(host, n * sizeof *host);
    void *memory = device_new(NULL, cuda_sample_bytes(n));
    assert_int_equal(cuda_sample(queue, there, n, n_vocab, memory), cudaSuccess);
    assert_int_equal(cudaDeviceSynchronize(), cudaSuccess);
    memcpy(ret_ids, ids, n * sizeof *ids);
    for (uint32_t i = 0; i < n; i++) {
        device_read(after, host[i].logits, n_bytes);
        for (uint32_t id = 0; id < n_vocab; id++)
            if (after[id] != rows[first + i].changed[id] && !(isnan(after[id]) && isnan(rows[first + i].changed[id])))
                fail_msg("row %u: the logit of %u became %g instead of %g", i, id, (double)after[id],
                         (double)rows[first + i].changed[id]);
        device_free(host[i].logits);
        device_free((void *)(uintptr_t)host[i].changes);
    }
    device_free(there);
    device_free(memory);
    assert_int_equal(cudaFreeHost(ids), cudaSuccess);
}

static void compare(uint32_t n_rows, uint32_t n_vocab, const uint32_t *ids)
{
    for (uint32_t i = 0; i < n_rows; i++) {
        n_compared++;
        if (ids[i] == rows[i].expected)
            continue;
        n_different++;
        const struct sampling *s = &rows[i].sampling;
        const double nearest = sampler_is_greedy(s) ? 1 : nearest_boundary(&rows[i], n_vocab);
        if (!(nearest < TOLERANCE))
            fail_msg("row %u of %u tokens: %u instead of %u (temperature %g, top_k %u, top_p %g, min_p %g), %g from a "
                     "boundary",
                     i, n_vocab, ids[i], rows[i].expected, (double)s->temperature, s->top_k, (double)s->top_p,
                     (double)s->min_p, nearest);
    }
}

static void tokens_are_the_hosts(void **state)
{
    (void)state;
    static const struct {
        uint32_t n_vocab, n_rows, n_rounds;
    } cases[] = {{1, 8, 1}, {7, 24, 10}, {512, 24, 10}, {5000, 24, 3}, {49152, 8, 1}, {MAX_VOCAB, 6, 1}};
    for (uint32_t i = 0; i < MAX_ROWS; i++) {
        rows[i].logits = malloc(MAX_VOCAB * sizeof(float));
        rows[i].changed = malloc(MAX_VOCAB * sizeof(float));
        assert_true(rows[i].logits && rows[i].changed);
    }
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        const uint32_t n_vocab = cases[c].n_vocab, n_rows = cases[c].n_rows;
        for (uint32_t round = 0; round < cases[c].n_rounds; round++) {
            uint32_t first[MAX_ROWS], ids[MAX_ROWS];
            for (uint32_t i = 0; i < n_rows; i++)
                make(&rows[i], i, n_vocab);
            for (int r = 0; r < (round ? 1 : DEVICE_N_RUNS); r++) {
                const struct device_run device = device_run(round ? (int)(round % DEVICE_N_RUNS) : r);
                run(&device.queue, 0, n_rows, n_vocab, ids);
                if (r)
                    assert_memory_equal(ids, first, n_rows * sizeof *ids);
                memcpy(first, ids, sizeof first);
            }
            compare(n_rows, n_vocab, ids);
            const uint32_t alone = round % n_rows;
            const struct device_run device = device_run(0);
            run(&device.queue, alone, 1, n_vocab, ids);
            assert_int_equal(ids[0], first[alone]);
        }
    }
    for (uint32_t i = 0; i < MAX_ROWS; i++) {
        free(rows[i].logits);
        free(rows[i].changed);
    }
    print_message("%u rows, %u of them on the other side of a boundary\n", n_compared, n_different);
    assert_true(n_different * 50 <= n_compared); /* boundaries are seldom met */
}

static void what_cannot_be(void **state)
{
    (void)state;
    const struct device_run device = device_run(0);
    void *memory = device_new(NULL, 1024);
    assert_int_equal(cuda_sample(&device.queue, memory, 0, 7, memory), cudaSuccess);
    assert_int_equal(cuda_sample(&device.queue, memory, 1, 0, memory), cudaErrorInvalidValue);
    assert_int_equal(cuda_sample(&device.queue, memory, 1, CUDA_SAMPLE_MAX_VOCAB + 1, memory), cudaErrorInvalidValue);
    device_free(memory);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tokens_are_the_hosts),
        cmocka_unit_test(what_cannot_be),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
