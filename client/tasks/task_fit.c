/* task_fit.c - see task.h: the size of a task whose prompt has a number of tokens. */
#include "client/tasks/task.h"

#include <errno.h>

#define MAX_COUNTS 12

/* Where a line through two measured sizes reaches `wanted`, strictly between lo and hi. */
static size_t guess(size_t lo, size_t hi, double tokens_per_size, size_t n_lo_tokens, size_t wanted)
{
    double at = (double)lo + (double)(wanted - n_lo_tokens) / tokens_per_size;
    if (!(at > (double)lo + 1))
        return lo + 1;
    return at < (double)(hi - 1) ? (size_t)at : hi - 1;
}

int task_fit(const struct task *task, uint64_t seed, size_t n_tokens,
             int (*count)(void *context, const char *text, size_t *ret_n_tokens), void *context,
             struct task_sample *ret_sample, size_t *ret_n_tokens)
{
    /* A word or a line has at least one token: more of them than tokens never fit. */
    size_t lo = task->n_min, hi = task->n_min + n_tokens + 1, n_lo_tokens = 0, n = 0;
    struct task_sample best = {.n_answers = 0}, sample;
    int result = task_make(task, seed, lo, &best);
    if (!result)
        result = count(context, best.prompt, &n_lo_tokens);
    if (!result && n_lo_tokens > n_tokens)
        result = -E2BIG;
    double tokens_per_size = 16;
    for (int i = 1; !result && i < MAX_COUNTS && hi - lo > 1; i++) {
        size_t size = guess(lo, hi, tokens_per_size, n_lo_tokens, n_tokens);
        result = task_make(task, seed, size, &sample);
        if (result < 0)
            break;
        result = count(context, sample.prompt, &n);
        if (!result && n > n_lo_tokens)
            tokens_per_size = (double)(n - n_lo_tokens) / (double)(size - lo);
        if (!result && n <= n_tokens) {
            task_sample_fini(&best);
            best = sample;
            lo = size;
            n_lo_tokens = n;
            continue;
        }
        hi = size;
        task_sample_fini(&sample);
    }
    if (result < 0) {
        task_sample_fini(&best);
        return result;
    }
    *ret_sample = best;
    *ret_n_tokens = n_lo_tokens;
    return 0;
}
