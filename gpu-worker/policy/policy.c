#include "gpu-worker/policy/policy.h"

#include <stddef.h>
#include <string.h>

#include "gpu-worker/policy/exact_set.h"

/* Every old token: full attention, by way of the stores. */
static void select_full(uint32_t n_blocks, uint64_t *masks)
{
    for (uint32_t block = 0; block < n_blocks; block++)
        masks[block] = exact_set_old_mask(block);
}

static const struct selector full = {.name = "full", .select = select_full};

static const struct policy policies[] = {
    {.name = "full", .selector = &full, .codec = &codec_f16, .mode = AGGREGATE_RESCORE},
};

const struct policy *policy_find(const char *name)
{
    for (size_t i = 0; i < sizeof(policies) / sizeof(policies[0]); i++)
        if (strcmp(policies[i].name, name) == 0)
            return &policies[i];
    return NULL;
}

const char *policy_name(uint32_t i)
{
    return i < sizeof(policies) / sizeof(policies[0]) ? policies[i].name : NULL;
}
