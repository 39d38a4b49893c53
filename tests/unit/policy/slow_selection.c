/* slow_selection.c - see slow_selection.h. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "tests/unit/policy/slow_selection.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>

static double weight_of(float score, double reference)
{
    double x = fmin((double)score, FLT_MAX) - reference;
    return isnan(score) || score == -INFINITY || x < -87.33654 ? 0 : exp(x);
}

void slow_init(struct slow *slow, const struct fixture *fixture, enum policy_selector selector)
{
    const size_t n = (size_t)fixture->n_blocks * 64;
    *slow = (struct slow){.group = fixture->group, .n_blocks = fixture->n_blocks, .n_exact = fixture->n_exact};
    slow->is_l2 = selector == POLICY_SELECTOR_L2;
    slow->e = calloc(slow->group * n, sizeof(double));
    slow->w = calloc(n, sizeof(double));
    slow->exact_w = calloc(slow->n_exact + 1, sizeof(double));
    slow->reference = calloc(slow->group, sizeof(double));
    slow->total = calloc(slow->group, sizeof(double));
    assert_true(slow->e && slow->w && slow->exact_w && slow->reference && slow->total);
    for (uint32_t head = 0; head < slow->group; head++) {
        const float *scores = fixture->scores + head * n, *exact = fixture->exact_scores + head * FIXTURE_MAX_EXACT;
        double reference = -INFINITY, total = 0;
        for (size_t j = LAYOUT_N_SINKS; j < n; j++)
            if (!isnan(scores[j]))
                reference = fmax(reference, fmin(scores[j], FLT_MAX));
        for (uint32_t j = 0; j < slow->n_exact; j++)
            reference = fmax(reference, (double)exact[j]);
        for (size_t j = LAYOUT_N_SINKS; j < n; j++)
            total += slow->e[head * n + j] = weight_of(scores[j], reference);
        for (uint32_t j = 0; j < slow->n_exact; j++)
            total += weight_of(exact[j], reference);
        slow->reference[head] = reference;
        slow->total[head] = total;
        for (size_t j = 0; j < n && total > 0; j++) {
            const double of_head = slow->e[head * n + j] / total;
            slow->w[j] += (slow->is_l2 ? of_head * of_head : of_head) / slow->group;
        }
        for (uint32_t j = 0; j < slow->n_exact && total > 0; j++)
            slow->exact_w[j] += weight_of(exact[j], reference) / total / slow->group;
    }
    for (size_t j = 0; j < n && slow->is_l2; j++)
        slow->w[j] = sqrt(slow->w[j]);
    for (size_t j = 0; j < n; j++)
        slow->top = fmax(slow->top, slow->w[j]);
    slow->deviation = calloc((size_t)SLOW_LAST_STEP + 2, sizeof(double));
    assert_non_null(slow->deviation);
    for (int step = -1; step <= SLOW_LAST_STEP; step++)
        slow->deviation[step + 1] = slow_deviation(slow, slow_threshold(slow, step));
}

void slow_fini(struct slow *slow)
{
    free(slow->e);
    free(slow->w);
    free(slow->exact_w);
    free(slow->reference);
    free(slow->total);
    free(slow->deviation);
}

double slow_threshold(const struct slow *slow, int step)
{
    if (step < 0)
        return slow->top * (1 + 1e-7);
    if (step == SLOW_LAST_STEP)
        return FLT_MIN;
    return fmax(slow->top * exp2(-(double)step / SELECTION_GRID_PER_OCTAVE), FLT_MIN);
}

double slow_deviation(const struct slow *slow, double threshold)
{
    double deviation = 0;
    for (uint32_t block = 0; block < slow->n_blocks; block++) {
        const double *w = slow->w + (size_t)block * 64;
        const uint32_t first = block == 0 ? LAYOUT_N_SINKS : 0;
        double sum = 0, n = 0;
        for (uint32_t j = first; j < 64; j++)
            if (w[j] < threshold)
                sum += w[j], n++;
        for (uint32_t j = first; j < 64; j++)
            if (w[j] < threshold)
                deviation += slow->is_l2 ? pow(w[j] - sum / n, 2) : fabs(w[j] - sum / n);
    }
    return slow->is_l2 ? sqrt(deviation) : deviation;
}

double slow_unread_mass(const struct slow *slow, double threshold)
{
    double mass = 0;
    for (size_t j = 0; j < (size_t)slow->n_blocks * 64; j++)
        mass += slow->w[j] < threshold ? slow->w[j] : 0;
    for (uint32_t j = 0; j < slow->n_exact; j++)
        mass += slow->exact_w[j] < threshold ? slow->exact_w[j] : 0;
    return mass;
}

int slow_step_by_deviation(const struct slow *slow, double epsilon)
{
    int step = -1;
    while (step < SLOW_LAST_STEP && slow->deviation[step + 1] > epsilon)
        step++;
    return step;
}

static int larger_first(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? 1 : x > y ? -1 : 0;
}

int slow_step_by_mass(const struct slow *slow, double p)
{
    const size_t n = (size_t)slow->n_blocks * 64, n_all = n + slow->n_exact;
    double *sorted = calloc(n_all, sizeof(double)), total = 0, sum = 0;
    assert_non_null(sorted);
    for (size_t j = 0; j < n_all; j++)
        total += sorted[j] = j < n ? slow->w[j] : slow->exact_w[j - n];
    qsort(sorted, n_all, sizeof(double), larger_first);
    size_t last = 0;
    for (sum = sorted[0]; last + 1 < n_all && sum < p * total && sorted[last + 1] > 0; sum += sorted[++last])
        ;
    int step = p > 0 && slow->top > 0 ? 0 : -1;
    if (sorted[last] > slow_threshold(slow, -1)) /* the exact set's largest alone */
        step = -1;
    while (step >= 0 && step < SLOW_LAST_STEP && sorted[last] < slow_threshold(slow, step))
        step++;
    free(sorted);
    return step;
}
