/* opening.c - see opening.h. */
#include "client/command/opening.h"
#include "proto/policy.h"

#include <errno.h>
#include <stdio.h>

enum { ALL, FASTGEN };
const char *const opening_residencies[] = {"all", "fastgen", NULL};

#define ASK_MS 10000u /* the coordinator answers at once, whatever it does */

static bool residency_given(const struct options *options)
{
    return options_given(options, "residency") || options_given(options, "fastgen-recovery");
}

static int refuse(char *sentence, size_t size, const char *text)
{
    snprintf(sentence, size, "%s", text);
    return -EINVAL;
}

int opening_policy(const struct options *options, const char *base, char ret_policy[HCATTN_POLICY_SIZE], char *sentence,
                   size_t sentence_size)
{
    struct policy_terms terms;
    char policy[HCATTN_POLICY_SIZE + 32];
    int result = policy_parse(base, &terms, sentence, sentence_size);
    if (result < 0)
        return result;
    bool all = options_given(options, "residency") && options_choice(options, "residency") == ALL;
    bool recovery_given = options_given(options, "fastgen-recovery");
    bool has_one = terms.fastgen > 0;
    if (all && recovery_given)
        return refuse(sentence, sentence_size, "--fastgen-recovery has no meaning with --residency all");
    if (all && has_one) {
        snprintf(sentence, sentence_size, "--residency all: policy %.64s has FastGen residency; name another one",
                 base);
        return -EINVAL;
    }
    if (residency_given(options) && !all && (recovery_given || !has_one))
        snprintf(policy, sizeof(policy), "%s,fastgen=%s", base, options_text(options, "fastgen-recovery"));
    else
        snprintf(policy, sizeof(policy), "%s", base);
    result = policy_parse(policy, &terms, sentence, sentence_size);
    if (!result)
        snprintf(ret_policy, HCATTN_POLICY_SIZE, "%.*s", HCATTN_POLICY_SIZE - 1, policy);
    return result;
}

int opening_config(const struct options *options, struct hcattn *client, char policy[HCATTN_POLICY_SIZE],
                   struct hcattn_session_config *ret_config, struct hcattn_error *ret_error)
{
    const char *given = options_string(options, "policy");
    uint32_t exact = options_u32(options, "exact-tokens");
    if (options_given(options, "exact-tokens") && exact == 0)
        exact = HCATTN_EXACT_NONE;
    struct hcattn_session_config config = {.policy = given, .exact_tokens = exact};
    if (residency_given(options)) {
        struct hcattn_stats stats = {.n_ctx = 0};
        struct hcattn_error error = {.code = HCATTN_INVALID_ARGUMENT};
        int result = given ? 0 : hcattn_stats(client, ASK_MS, &stats, &error);
        if (!result)
            result =
                opening_policy(options, given ? given : stats.policy, policy, error.sentence, sizeof(error.sentence));
        hcattn_stats_free(&stats);
        if (result < 0) {
            *ret_error = error;
            return result;
        }
        config.policy = policy;
    }
    *ret_config = config;
    return 0;
}
