/*
 * budget.h - how much memory a store may take when nobody said a size: a share of its control group's limit or of its
 * node's memory, whichever is smaller.
 *
 * The share is of the whole, not of what is free: a store that comes back takes over the segment of its earlier life, which
 * is part of its budget, and must not arrive at less.
 */
#pragma once

#include "common/topology.h"

#include <stdint.h>

struct budget_terms {
    uint32_t percent;    /* 1..100 */
    uint32_t n_in_group; /* processes with such a budget in this control group, >= 1 */
    uint32_t n_on_node;  /* those of them on the node, >= 1 */
};

/* Whole 2 MiB; 0: not even that. */
uint64_t budget_bytes(const struct topology *topology, uint32_t node, const struct budget_terms *terms);

/* What each of them could take now without troubling others: 7/8 of what the group, the machine and the node have left. */
uint64_t budget_free_bytes(const struct topology *topology, uint32_t node, const struct budget_terms *terms);
