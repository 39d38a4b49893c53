/*
 * policy.h - what a session keeps on the device and reads from the stores: residency x selector, by name.
 *
 * Owner      constant tables. Threads: any.
 * Invariant  a selector is deterministic: a query gets the same masks whatever the batch.
 */
#pragma once

#include <stdint.h>

#include "gpu-worker/keys/codec.h"
#include "proto/layout.h"

struct selector {
    const char *name;
    /* Chooses the old tokens that a step reads: masks [n_blocks], out, of the old blocks 0 .. n_blocks - 1; only tokens of
     * exact_set_old_mask(). The same for every layer and KV head. */
    void (*select)(uint32_t n_blocks, uint64_t *masks);
};

struct policy {
    const char *name;
    const struct selector *selector;
    const struct key_codec *codec;
    uint32_t mode; /* enum aggregate_mode */
};

/* The policy of a name ("full"); NULL: there is none. */
const struct policy *policy_find(const char *name);
/* Name of the i-th policy; NULL after the last. */
const char *policy_name(uint32_t i);
