/*
 * policy.h - what a session keeps on the device and reads from the stores: selector x codec, by name (proto/policy.h).
 *
 * Owner      a run; a plain value. Threads: any.
 */
#pragma once

#include <stdint.h>

#include "gpu-worker/keys/quantizers.h"
#include "proto/layout.h"
#include "proto/policy.h"

struct policy {
    struct policy_terms terms;
    const struct key_quantizer *quantizer; /* NULL: selector full, which looks at no keys */
    enum aggregate_mode mode;
};

/* The policy of a name, with a sentence on failure: -EINVAL; what quantizers_find() returns; -ENOENT above all. */
int policy_find(struct quantizers *quantizers, const char *name, struct policy *ret_policy, char *sentence,
                size_t sentence_size);
