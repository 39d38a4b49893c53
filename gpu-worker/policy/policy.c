/* policy.c - see policy.h. */
#include "gpu-worker/policy/policy.h"

int policy_find(struct quantizers *quantizers, const char *name, struct policy *ret_policy, char *sentence,
                size_t sentence_size)
{
    struct policy_terms terms;
    const struct key_quantizer *quantizer = NULL;
    int error = policy_parse(name, &terms, sentence, sentence_size);
    if (error == 0 && terms.selector != POLICY_SELECTOR_FULL)
        error = quantizers_find(quantizers, &terms, &quantizer, sentence, sentence_size);
    if (error != 0)
        return error;
    *ret_policy = (struct policy){
        .terms = terms,
        .quantizer = quantizer,
        .mode = terms.weights ? AGGREGATE_WEIGHTS : AGGREGATE_RESCORE,
    };
    return 0;
}
