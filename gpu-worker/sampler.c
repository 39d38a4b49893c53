#include "gpu-worker/sampler.h"

#include <math.h>
#include <stdlib.h>

/* SplitMix64's finalizer (Steele, Lea, Flood 2014). */
static uint64_t mix(uint64_t x)
{
    x ^= x >> 30;
    x *= 0xbf58476d1ce4e5b9u;
    x ^= x >> 27;
    x *= 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

double sampler_uniform(uint64_t seed, uint64_t position)
{
    uint64_t bits = mix(mix(seed + 0x9e3779b97f4a7c15u) + (position + 1) * 0x9e3779b97f4a7c15u);
    return (double)(bits >> 11) * 0x1p-53;
}

double sampler_log_sum_exp(const float *logits, uint32_t n_vocab)
{
    float max = -INFINITY;
    double sum = 0;
    for (uint32_t i = 0; i < n_vocab; i++)
        max = logits[i] > max ? logits[i] : max;
    if (isinf(max))
        return (double)max;
    /* each exponential in single precision: an error of 1e-7 in the sum, at a fifth of the time */
    for (uint32_t i = 0; i < n_vocab; i++)
        sum += (double)expf(logits[i] - max);
    return (double)max + log(sum);
}

/* What is not a number comes last. */
static bool is_before(const struct sampler_candidate *a, const struct sampler_candidate *b)
{
    if (isnan(a->logit) || isnan(b->logit))
        return isnan(b->logit) && (!isnan(a->logit) || a->id < b->id);
    return a->logit > b->logit || (a->logit == b->logit && a->id < b->id);
}

uint32_t sampler_top(const float *logits, uint32_t n_vocab, uint32_t n, struct sampler_candidate *ret_top)
{
    uint32_t n_top = 0;
    for (uint32_t id = 0; id < n_vocab && n > 0; id++) {
        struct sampler_candidate candidate = {.logit = logits[id], .id = id};
        if (n_top == n && !is_before(&candidate, &ret_top[n - 1]))
            continue;
        uint32_t at = n_top < n ? n_top++ : n - 1;
        for (; at > 0 && is_before(&candidate, &ret_top[at - 1]); at--)
            ret_top[at] = ret_top[at - 1];
        ret_top[at] = candidate;
    }
    return n_top;
}

static int compare_candidates(const void *a, const void *b)
{
    return is_before(a, b) ? -1 : 1; /* ids differ: never equal */
}

/* First of the ids that penalties look at; `position`: they look at none. */
static uint32_t first_penalized(const struct sampling *sampling, uint32_t position)
{
    const bool repeats = sampling->repeat_penalty > 0 && sampling->repeat_penalty != 1;
    if (!repeats && sampling->presence_penalty == 0 && sampling->frequency_penalty == 0)
        return position;
    return position > sampling->penalty_window ? position - sampling->penalty_window : 0;
}

/* The change number *cursor and after that is one of an id there is; false: that was the last. */
static bool next_change(const struct sampling *sampling, const uint32_t *ids, uint32_t position, uint32_t n_vocab,
                        uint32_t *cursor, struct sampler_change *ret_change)
{
    for (; *cursor < sampling->n_biases; ++*cursor) {
        const struct sampler_bias *bias = &sampling->biases[*cursor];
        if (bias->id >= n_vocab)
            continue;
        *ret_change = (struct sampler_change){.id = bias->id, .order = (*cursor)++, .add = bias->bias};
        return true;
    }
    const uint32_t first = first_penalized(sampling, position);
    for (; *cursor - sampling->n_biases < position - first; ++*cursor) {
        const uint32_t i = first + (*cursor - sampling->n_biases), id = ids[i];
        bool seen = id >= n_vocab;
        for (uint32_t k = first; k < i && !seen; k++)
            seen = ids[k] == id;
        if (seen)
            continue;
        uint32_t n = 0;
        for (uint32_t k = i; k < position; k++)
            n += ids[k] == id;
        const bool repeats = sampling->repeat_penalty > 0 && sampling->repeat_penalty != 1;
        *ret_change =
            (struct sampler_change){.id = id,
                                    .order = (*cursor)++,
                                    .divide = repeats ? sampling->repeat_penalty : 0,
                                    .subtract = sampling->presence_penalty + sampling->frequency_penalty * (float)n};
        return true;
    }
    return false;
}

static void apply_changes(const struct sampling *sampling, const uint32_t *ids, uint32_t position, float *logits,
                          uint32_t n_vocab)
{
    uint32_t cursor = 0;
    struct sampler_change change;
    while (next_change(sampling, ids, position, n_vocab, &cursor, &change)) {
        float *logit = &logits[change.id];
        *logit += change.add;
        if (change.divide != 0)
            *logit = *logit > 0 ? *logit / change.divide : *logit * change.divide;
        *logit -= change.subtract;
    }
}

static int compare_changes(const void *a, const void *b)
{
    const struct sampler_change *left = a, *right = b;
    if (left->id != right->id)
        return left->id < right->id ? -1 : 1;
    return left->order < right->order ? -1 : 1; /* orders differ: never equal */
}

uint32_t sampler_max_changes(const struct sampling *sampling, uint32_t position)
{
    return sampling->n_biases + (position - first_penalized(sampling, position));
}

uint32_t sampler_changes(const struct sampling *sampling, const uint32_t *ids, uint32_t position, uint32_t n_vocab,
                         struct sampler_change *ret_changes)
{
    uint32_t n = 0, cursor = 0;
    while (next_change(sampling, ids, position, n_vocab, &cursor, &ret_changes[n]))
        n++;
    qsort(ret_changes, n, sizeof(*ret_changes), compare_changes);
    return n;
}

bool sampler_is_greedy(const struct sampling *sampling)
{
    return !(sampling->temperature > 0) || sampling->top_k == 1;
}

static uint32_t draw(const struct sampling *sampling, uint32_t position, const struct sampler_candidate *candidates,
                     uint32_t n)
{
    double temperature = (double)sampling->temperature, max = (double)candidates[0].logit, total = 0;
    for (uint32_t i = 0; i < n; i++)
        total += exp(((double)candidates[i].logit - max) / temperature);
    if (sampling->top_p > 0 && sampling->top_p < 1) {
        double kept = 0, goal = (double)sampling->top_p * total;
        uint32_t n_kept = 0;
        while (n_kept < n && kept < goal)
            kept += exp(((double)candidates[n_kept++].logit - max) / temperature);
        n = n_kept;
        total = kept;
    }
    if (sampling->min_p > 0) { /* relative to the most likely one, whose weight is 1 */
        uint32_t n_kept = 0;
        double kept = 0;
        for (; n_kept < n; n_kept++) {
            double weight = exp(((double)candidates[n_kept].logit - max) / temperature);
            if (weight < (double)sampling->min_p && n_kept > 0)
                break;
            kept += weight;
        }
        n = n_kept;
        total = kept;
    }
    double goal = sampler_uniform(sampling->seed, position) * total, sum = 0;
    for (uint32_t i = 0; i < n; i++) {
        sum += exp(((double)candidates[i].logit - max) / temperature);
        if (sum > goal)
            return candidates[i].id;
    }
    return candidates[n - 1].id;
}

uint32_t sampler_choose(const struct sampling *sampling, const uint32_t *ids, uint32_t position, float *logits,
                        uint32_t n_vocab, struct sampler_candidate *scratch)
{
    apply_changes(sampling, ids, position, logits, n_vocab);

    struct sampler_candidate best = {.logit = NAN};
    sampler_top(logits, n_vocab, 1, &best);
    if (sampler_is_greedy(sampling) || isinf(best.logit))
        return best.id;
    uint32_t n = 0;
    for (uint32_t id = 0; id < n_vocab; id++)
        if (logits[id] > -INFINITY) /* also leaves out NaN */
            scratch[n++] = (struct sampler_candidate){.logit = logits[id], .id = id};
    if (n == 0)
        return best.id;
    qsort(scratch, n, sizeof(*scratch), compare_candidates);
    if (sampling->top_k > 0 && sampling->top_k < n)
        n = sampling->top_k;
    return draw(sampling, position, scratch, n);
}
