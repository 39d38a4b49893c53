/*
 * patience.h - does a service that is not ready yet still come nearer to it?
 *
 * What counts is a percentage in a phase ("formatting 42 %") that is larger than any this process has shown in that phase: a
 * process that dies and begins again, over and over, moves nothing, and all that can ever move is bounded.
 *
 * Owner      who waits. Threads: one.
 */
#pragma once

#include "client/hcattn.h"

#include <stdbool.h>

#define PATIENCE_MAX 256u /* phases of processes; more are not looked at */

struct patience {
    struct {
        char program[24];
        uint32_t index;
        char phase[40]; /* without the percentage */
        uint32_t percent;
    } seen[PATIENCE_MAX];
    size_t n_seen;
};

/* Has anything moved since the last call? */
bool patience_moved(struct patience *patience, const struct hcattn_stats *stats);

/* "formatting 42 %": 42 and how long the words before it are. False: there is no percentage in it. */
bool patience_percent(const char *phase, uint32_t *ret_percent, size_t *ret_length);
