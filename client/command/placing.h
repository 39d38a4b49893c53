/*
 * placing.h - which NUMA node each store of `hcattn up` belongs to, and how much memory it gets.
 *
 * By default one store for each node with memory and cpus that we may use; all of them together take half of the control
 * group's limit or half of each node, whichever is smaller, and no more than is free. Threads: the main thread.
 */
#pragma once

#include "common/options.h"

#include <stdint.h>

#define PLACING_MAX_STORES 12u
#define PLACING_TEXT       256

struct placing_store {
    uint32_t node;         /* the kernel's number */
    uint64_t memory_bytes; /* 0: what --memory says */
};

struct placing {
    uint32_t n_stores;
    struct placing_store stores[PLACING_MAX_STORES];
    uint32_t n_cpus; /* that we may use */
};

/* Of --stores, --nodes, --memory and --strict-numa. Errors come with a sentence: -EINVAL what they say cannot be; others: the
 * machine's nodes cannot be read or, strictly, bound to. */
int placing_plan(const struct options *options, struct placing *ret_placing, char sentence[PLACING_TEXT]);

/* "2 cpus are shared by 1 worker and 1 store", or an empty text where there are cpus enough. Returns text. */
const char *placing_sharing(const struct placing *placing, uint32_t n_workers, char text[PLACING_TEXT]);
