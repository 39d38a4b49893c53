/*
 * placement.h - where the pages of the segment really lie, looked at again and again beside the work.
 *
 * All pages are mapped first, since the kernel tells of mapped ones only; they exist already, so nothing is allocated. Then
 * /proc/self/numa_maps is read, at most every ten seconds and never for more than a hundredth of the time.
 *
 * Owner      the working thread; the mapping must stay until placement_stop().
 * Threads    one of its own, bound as the one that starts it; results are atomics of the progress.
 */
#pragma once

#include "common/segment.h"
#include "common/topology.h"
#include "value-store/progress.h"

struct placement;

/* -ENOMEM, -EAGAIN. */
int placement_start(const struct topology *topology, uint32_t node, const struct segment_mapping *mapping,
                    struct progress *progress, struct placement **ret_placement);
struct placement *placement_stop(struct placement *placement); /* accepts NULL, returns NULL; results become 0 */
