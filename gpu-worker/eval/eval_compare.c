/* eval_compare.c - see eval_compare.h. */
#include "gpu-worker/eval/eval_compare.h"

#include <assert.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

struct eval_compare {
    uint32_t n, n_vocab, n_ids;
    uint32_t *ids;   /* [n_ids] */
    float *full;     /* [n][n_vocab] */
    double *kld;     /* [n] */
    uint32_t n_same; /* positions with the same most likely token */
    double log_sum;  /* of the ids' log-probabilities */
};

int eval_compare_new(uint32_t n, uint32_t n_vocab, const uint32_t *ids, uint32_t n_ids,
                     struct eval_compare **ret_compare)
{
    assert(n > 0 && n_vocab > 0 && n_ids <= n);
    struct eval_compare *compare = calloc(1, sizeof *compare);
    if (compare == NULL)
        return -ENOMEM;
    compare->n = n;
    compare->n_vocab = n_vocab;
    compare->n_ids = n_ids;
    compare->ids = calloc(n, sizeof *compare->ids);
    compare->full = malloc((size_t)n * n_vocab * sizeof *compare->full);
    compare->kld = calloc(n, sizeof *compare->kld);
    if (compare->ids == NULL || compare->full == NULL || compare->kld == NULL) {
        eval_compare_free(compare);
        return -ENOMEM;
    }
    if (n_ids > 0)
        memcpy(compare->ids, ids, n_ids * sizeof *ids);
    *ret_compare = compare;
    return 0;
}

struct eval_compare *eval_compare_free(struct eval_compare *compare)
{
    if (compare == NULL)
        return NULL;
    free(compare->ids);
    free(compare->full);
    free(compare->kld);
    free(compare);
    return NULL;
}

float *eval_compare_full(struct eval_compare *compare, uint32_t i)
{
    return compare->full + (size_t)i * compare->n_vocab;
}

static uint32_t most_likely(const float *logprobs, uint32_t n)
{
    uint32_t best = 0;
    for (uint32_t i = 1; i < n; i++)
        if (logprobs[i] > logprobs[best])
            best = i;
    return best;
}

void eval_compare_add(struct eval_compare *compare, uint32_t i, const float *logprobs)
{
    const float *full = eval_compare_full(compare, i);
    double sum = 0;
    for (uint32_t id = 0; id < compare->n_vocab; id++) {
        const double p = (double)expf(full[id]);
        sum += p == 0 ? 0 : p * ((double)full[id] - (double)logprobs[id]);
    }
    compare->kld[i] = sum < 0 ? 0 : sum; /* rounding may leave less than nothing between equal distributions */
    compare->n_same += most_likely(full, compare->n_vocab) == most_likely(logprobs, compare->n_vocab);
    if (i < compare->n_ids)
        compare->log_sum += (double)logprobs[compare->ids[i]];
}

static int by_size(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

void eval_compare_finish(struct eval_compare *compare, struct eval_compared *ret_compared)
{
    struct eval_compared result = {.top1 = (double)compare->n_same / compare->n};
    double full_sum = 0;
    for (uint32_t i = 0; i < compare->n; i++)
        result.kld_mean += compare->kld[i] / compare->n;
    qsort(compare->kld, compare->n, sizeof *compare->kld, by_size);
    result.kld_p99 = compare->kld[(compare->n * 99 + 99) / 100 - 1];
    for (uint32_t i = 0; i < compare->n_ids; i++)
        full_sum += (double)eval_compare_full(compare, i)[compare->ids[i]];
    if (compare->n_ids > 0) {
        result.perplexity = exp(-compare->log_sum / compare->n_ids);
        result.full_perplexity = exp(-full_sum / compare->n_ids);
    }
    memset(compare->kld, 0, compare->n * sizeof *compare->kld);
    compare->n_same = 0;
    compare->log_sum = 0;
    *ret_compared = result;
}
