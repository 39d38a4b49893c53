/* patience.c - see patience.h. */
#include "client/command/patience.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

bool patience_percent(const char *phase, uint32_t *ret_percent, size_t *ret_length)
{
    size_t length = strcspn(phase, "0123456789");
    char *end;
    unsigned long percent = strtoul(phase + length, &end, 10);
    if (length == 0 || end == phase + length || percent > 100 || strcmp(end, " %") != 0)
        return false;
    *ret_percent = (uint32_t)percent;
    *ret_length = length;
    return true;
}

static bool process_moved(struct patience *patience, const struct hcattn_process_stats *process)
{
    uint32_t percent;
    size_t length;
    char phase[sizeof(patience->seen[0].phase)], program[sizeof(patience->seen[0].program)];
    if (!process->phase || !patience_percent(process->phase, &percent, &length))
        return false;
    snprintf(phase, sizeof(phase), "%.*s", (int)length, process->phase);
    snprintf(program, sizeof(program), "%s", process->program);
    for (size_t i = 0; i < patience->n_seen; i++) {
        if (patience->seen[i].index != process->index || strcmp(patience->seen[i].program, program) != 0 ||
            strcmp(patience->seen[i].phase, phase) != 0)
            continue;
        bool moved = percent > patience->seen[i].percent;
        if (moved)
            patience->seen[i].percent = percent;
        return moved;
    }
    if (patience->n_seen == PATIENCE_MAX)
        return false;
    size_t slot = patience->n_seen++;
    memcpy(patience->seen[slot].phase, phase, sizeof(phase));
    memcpy(patience->seen[slot].program, program, sizeof(program));
    patience->seen[slot].index = process->index;
    patience->seen[slot].percent = percent;
    return true;
}

bool patience_moved(struct patience *patience, const struct hcattn_stats *stats)
{
    bool moved = false;
    for (size_t i = 0; i < stats->n_processes; i++)
        moved |= process_moved(patience, &stats->processes[i]);
    return moved;
}
