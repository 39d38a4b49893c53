/*
 * rebuild.h - the session table of a new coordinator, from session records and block headers of the segments.
 *
 * What is in a segment was written by another process: it is copied, checked, and what does not fit together is judged
 * broken - with the reason - and never served.
 *
 * A session is whole when every store of its lanes has the same record, its blocks have the numbers 0 .. n-1, each in the
 * store of its lane, each naming the one before it, and ids fill them in order. Blocks without ids that come after a
 * gap were being reserved when the coordinator died: they are cut off and the session is whole.
 *
 * A coordinator that died while it moved lanes leaves records that differ in where lanes are and blocks in two stores. The
 * record with the most moves is true: it was written when all that it speaks of was there. Blocks elsewhere are strays.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "coordinator/sessions.h"

#define REBUILD_REASON_BYTES 256
#define REBUILD_NOTHING      UINT32_MAX

/* Reads one store's segment into the table and claims its blocks from placement (which knows the store already).
 * -ENOMEM; what was read until then stays. */
int rebuild_store(struct sessions *sessions, struct placement *placement, uint32_t store,
                  const struct segment_view *view);

struct rebuild_verdict {
    struct session *session;
    bool broken;              /* to be closed; blocks [0, n_blocks) are all that was found, in no order */
    uint32_t release_from;    /* whole, but numbers from here on are to be freed in all its stores; REBUILD_NOTHING */
    struct placed_block *cut; /* those blocks; the caller frees the array */
    uint32_t n_cut;
    struct placed_block *strays; /* whole: blocks in stores that are not their lanes'; the caller frees the array */
    uint32_t n_strays;
    uint32_t stray_lanes[64];          /* by store: their lanes, bit each */
    char reason[REBUILD_REASON_BYTES]; /* broken: one sentence */
};

/*
 * Judges a session that is recovering and whose stores are all in `there` (bit per store with a segment) - or, with
 * `all` set, any: no more stores will come. A whole one is ready afterwards; a broken one stays recovering with
 * close_wanted set and is not judged again. 0, -ENOENT: none (left), -ENOMEM.
 */
int rebuild_judge(struct sessions *sessions, uint64_t there, bool all, struct rebuild_verdict *ret_verdict);

/* A store adopted the segment: does it still hold the session's record and its confirmed blocks? */
bool rebuild_still_whole(const struct session *session, uint32_t store, const struct segment_view *view);
