/*
 * pass_logits.c - log-probabilities of a position on demand, computed for its neighbours with it: the product with the
 * vocabulary's matrix costs little more for 64 rows than for one.
 *
 * Owner      pass.h. Threads: the engine thread.
 */
#include <errno.h>
#include <math.h>
#include <stdlib.h>

#include "common/pool.h"
#include "gpu-worker/eval/pass_private.h"

int pass_logits_new(const struct network *network, struct pass_logits **ret_logits)
{
    struct pass_logits *logits = calloc(1, sizeof(*logits));
    if (logits == NULL)
        return -ENOMEM;
    size_t h = network->shape.n_embd, vocab = network->shape.n_vocab;
    logits->network = network;
    logits->h = backend_shared_alloc(network->ops, network->backend, PASS_LOGIT_ROWS * h * sizeof(float));
    logits->logits = backend_shared_alloc(network->ops, network->backend, PASS_LOGIT_ROWS * vocab * sizeof(float));
    if (logits->h == NULL || logits->logits == NULL) {
        pass_logits_free(logits);
        return -ENOMEM;
    }
    *ret_logits = logits;
    return 0;
}

struct pass_logits *pass_logits_free(struct pass_logits *logits)
{
    if (logits == NULL)
        return NULL;
    const struct network *network = logits->network;
    if (logits->h != NULL)
        network->ops->free(network->backend, logits->h);
    if (logits->logits != NULL)
        network->ops->free(network->backend, logits->logits);
    free(logits);
    return NULL;
}

static void log_sum(void *context, uint32_t item, uint32_t thread)
{
    (void)thread;
    struct pass_logits *logits = context;
    uint32_t n_vocab = logits->network->shape.n_vocab;
    const float *row = logits->logits + (size_t)item * n_vocab;
    float max = -INFINITY;
    for (uint32_t i = 0; i < n_vocab; i++)
        max = row[i] > max ? row[i] : max;
    double sum = 0;
    for (uint32_t i = 0; i < n_vocab; i++)
        sum += exp((double)row[i] - (double)max);
    logits->log_sums[item] = (double)max + log(sum);
}

static int compute(struct pass_logits *logits, struct pool *pool, const float *x)
{
    const struct network *network = logits->network;
    const struct model_shape *shape = &network->shape;
    const struct weight *output = network->output;
    network->ops->rms_norm(network->backend, x + (size_t)logits->first * shape->n_embd, logits->n, shape->n_embd,
                           network->output_norm, shape->rms_eps, logits->h);
    network->ops->matmul(network->backend, &output, 1, logits->h, logits->n, &logits->logits);
    int r = backend_wait(network->ops, network->backend);
    if (r == 0)
        pool_run(pool, logits->n, log_sum, logits);
    return r;
}

int pass_logits_read(struct pass_logits *logits, struct pool *pool, const float *x, uint32_t n_rows, uint32_t row,
                     float *logprobs)
{
    if (row < logits->first || row >= logits->first + logits->n) {
        logits->first = row / PASS_LOGIT_ROWS * PASS_LOGIT_ROWS;
        logits->n = n_rows - logits->first < PASS_LOGIT_ROWS ? n_rows - logits->first : PASS_LOGIT_ROWS;
        int r = compute(logits, pool, x);
        if (r < 0) {
            logits->n = 0;
            return r;
        }
    }
    uint32_t n_vocab = logits->network->shape.n_vocab, index = row - logits->first;
    const float *from = logits->logits + (size_t)index * n_vocab;
    for (uint32_t i = 0; i < n_vocab; i++)
        logprobs[i] = (float)((double)from[i] - logits->log_sums[index]);
    return 0;
}
