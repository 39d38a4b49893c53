/* policy.c - see policy.h. */
#include "gpu-worker/policy/policy.h"

#include <errno.h>
#include <stdio.h>

int policy_find(const char *name, struct policy *ret_policy, char *sentence, size_t sentence_size)
{
    struct policy_terms terms;
    int error = policy_parse(name, &terms, sentence, sentence_size);
    if (error != 0)
        return error;
    const struct key_codec *codec = key_codec_find(terms.codec);
    if (codec == NULL && terms.selector != POLICY_SELECTOR_FULL) {
        snprintf(sentence, sentence_size, "policy '%.64s': this worker does not have its key codec", name);
        return -EINVAL;
    }
    *ret_policy = (struct policy){
        .terms = terms,
        .codec = terms.selector == POLICY_SELECTOR_FULL ? NULL : codec,
        .mode = terms.weights ? AGGREGATE_WEIGHTS : AGGREGATE_RESCORE,
    };
    return 0;
}
