/* opening.c - see opening.h. */
#include "client/command/opening.h"

struct hcattn_session_config opening_config(const struct options *options)
{
    uint32_t exact = options_u32(options, "exact-tokens");
    if (options_given(options, "exact-tokens") && exact == 0)
        exact = HCATTN_EXACT_NONE;
    return (struct hcattn_session_config){.policy = options_string(options, "policy"), .exact_tokens = exact};
}
