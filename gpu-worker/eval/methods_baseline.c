/* methods_baseline.c - see method.h: there are no baselines yet. */
#include <errno.h>
#include <stddef.h>

#include "gpu-worker/eval/method.h"

int methods_baseline_new(struct method *method, const struct job_tools *tools, uint32_t n_tokens, char *sentence,
                         size_t sentence_size)
{
    (void)method, (void)tools, (void)n_tokens, (void)sentence, (void)sentence_size;
    return -ESRCH;
}

const char *methods_baseline_name(uint32_t i)
{
    (void)i;
    return NULL;
}
