/* budget.c - see budget.h. */
#include "common/budget.h"
#include "common/cgroup.h"
#include "common/segment.h"

static uint64_t smaller(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static uint64_t whole(uint64_t n_bytes)
{
    return n_bytes / SEGMENT_ALIGNMENT * SEGMENT_ALIGNMENT;
}

uint64_t budget_bytes(const struct topology *topology, uint32_t node, const struct budget_terms *terms)
{
    struct topology_node place;
    struct cgroup_memory group;
    if (topology_node(topology, node, &place) < 0)
        return 0;
    cgroup_memory(&group);
    uint64_t share = smaller(group.limit_bytes / terms->n_in_group, place.memory_bytes / terms->n_on_node);
    return whole(share / 100 * terms->percent);
}

uint64_t budget_free_bytes(const struct topology *topology, uint32_t node, const struct budget_terms *terms)
{
    struct topology_node place;
    if (topology_node(topology, node, &place) < 0)
        return 0;
    uint64_t share = smaller(segment_available_bytes() / terms->n_in_group, place.free_bytes / terms->n_on_node);
    return whole(share / 8 * 7);
}
