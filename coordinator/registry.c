#include "coordinator/registry.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define WINDOW_US UINT64_C(3000000) /* of bytes_per_s */

struct registry {
    uint32_t capacity;
    struct process *entries[]; /* NULL: free */
};

#define TO(state) (1u << (state))
static const struct {
    const char *name;
    uint32_t to;
} states[] = {
    [PROCESS_STARTING] = {"starting", TO(PROCESS_READY) | TO(PROCESS_LOST) | TO(PROCESS_FENCING) | TO(PROCESS_DEAD)},
    [PROCESS_READY] = {"ready", TO(PROCESS_STARTING) | TO(PROCESS_LOST) | TO(PROCESS_FENCING) | TO(PROCESS_DEAD)},
    [PROCESS_LOST] = {"lost", TO(PROCESS_STARTING) | TO(PROCESS_FENCING) | TO(PROCESS_DEAD)},
    [PROCESS_FENCING] = {"fencing", TO(PROCESS_DEAD)},
    [PROCESS_DEAD] = {"dead", 0},
};

static const char *const role_names[] = {
    [PROCESS_STORE] = "value-store",
    [PROCESS_WORKER] = "gpu-worker",
    [PROCESS_SUPERVISOR] = "supervisor",
    [PROCESS_COORDINATOR] = "coordinator",
};

int registry_new(uint32_t capacity, struct registry **ret_registry)
{
    struct registry *registry = calloc(1, sizeof(*registry) + capacity * sizeof(struct process *));
    if (!registry)
        return -ENOMEM;
    registry->capacity = capacity;
    *ret_registry = registry;
    return 0;
}

static void free_entry(struct process *process)
{
    if (process && process->pidfd >= 0)
        close(process->pidfd);
    free(process);
}

struct registry *registry_free(struct registry *registry)
{
    if (registry)
        for (uint32_t i = 0; i < registry->capacity; i++)
            free_entry(registry->entries[i]);
    free(registry);
    return NULL;
}

const char *registry_role_name(enum process_role role)
{
    return role <= PROCESS_COORDINATOR ? role_names[role] : "unknown";
}

const char *registry_state_name(enum process_state state)
{
    return state <= PROCESS_DEAD ? states[state].name : "unknown";
}

static bool same_place(const struct process *a, const struct process *b)
{
    return a->role == b->role && a->index == b->index &&
           (a->role != PROCESS_SUPERVISOR || a->supervises == b->supervises);
}

static bool alive(const struct process *process)
{
    return process->state == PROCESS_STARTING || process->state == PROCESS_READY;
}

struct process *registry_next(const struct registry *registry, uint32_t *cursor)
{
    while (*cursor < registry->capacity) {
        struct process *process = registry->entries[(*cursor)++];
        if (process)
            return process;
    }
    return NULL;
}

struct process *registry_find(const struct registry *registry, enum process_role role, uint32_t index)
{
    uint32_t cursor = 0;
    for (struct process *process; (process = registry_next(registry, &cursor));)
        if (process->role == role && process->index == index && !process->replaced)
            return process;
    return NULL;
}

struct process *registry_find_incarnation(const struct registry *registry, enum process_role role, uint64_t incarnation)
{
    uint32_t cursor = 0;
    for (struct process *process; (process = registry_next(registry, &cursor));)
        if (process->role == role && process->incarnation == incarnation)
            return process;
    return NULL;
}

struct process *registry_supervisor_of(const struct registry *registry, const struct process *process)
{
    uint32_t cursor = 0;
    for (struct process *other; (other = registry_next(registry, &cursor));)
        if (other->role == PROCESS_SUPERVISOR && other->supervises == process->role && other->index == process->index &&
            alive(other))
            return other;
    return NULL;
}

bool registry_predecessor_alive(const struct registry *registry, const struct process *process)
{
    uint32_t cursor = 0;
    for (struct process *other; (other = registry_next(registry, &cursor));)
        if (other != process && same_place(other, process) && other->state != PROCESS_DEAD)
            return true;
    return false;
}

/* Copies identity and what may differ between two registrations of one life. */
static void take_over(struct process *entry, const struct process *given, uint64_t now_us)
{
    if (entry->pidfd >= 0)
        close(entry->pidfd);
    uint32_t n_starts = entry->n_starts;
    uint64_t child = entry->child;
    *entry = *given;
    entry->n_starts = n_starts;
    entry->child = child;
    entry->state = PROCESS_STARTING;
    entry->replaced = false;
    entry->registered_us = entry->changed_us = entry->heard_us = entry->progress_us = now_us;
    entry->progress = 0;
    entry->busy = false;
    snprintf(entry->phase, sizeof(entry->phase), "registered");
}

static int refuse_again(const struct process *entry, char error[REGISTRY_ERROR_BYTES])
{
    if (entry->state == PROCESS_FENCING || entry->state == PROCESS_DEAD) {
        snprintf(error, REGISTRY_ERROR_BYTES, "%s %u: this life of it is %s and may not come back",
                 registry_role_name(entry->role), entry->index, registry_state_name(entry->state));
        return -EINVAL;
    }
    if (entry->replaced) {
        snprintf(error, REGISTRY_ERROR_BYTES, "%s %u: a later life of it has taken its place",
                 registry_role_name(entry->role), entry->index);
        return -EINVAL;
    }
    return 0;
}

int registry_add(struct registry *registry, const struct process *given, uint64_t now_us, struct process **ret_process,
                 char error[REGISTRY_ERROR_BYTES])
{
    if (given->incarnation == 0 || given->index > REGISTRY_MAX_INDEX || given->role > PROCESS_SUPERVISOR) {
        snprintf(error, REGISTRY_ERROR_BYTES, "index %u with incarnation %016llx is not a process", given->index,
                 (unsigned long long)given->incarnation);
        return -EINVAL;
    }
    struct process *entry = NULL;
    for (uint32_t i = 0; i < registry->capacity; i++) {
        struct process *other = registry->entries[i];
        if (!other || !same_place(other, given))
            continue;
        if (other->incarnation == given->incarnation) {
            int result = refuse_again(other, error);
            if (result != 0)
                return result;
            entry = other;
        } else if (alive(other)) {
            snprintf(error, REGISTRY_ERROR_BYTES, "%s %u is alive already (pid %u, %s); give this one another index",
                     registry_role_name(given->role == PROCESS_SUPERVISOR ? given->supervises : given->role),
                     given->index, other->own_pid, registry_state_name(other->state));
            return -EEXIST;
        }
    }
    if (!entry) {
        uint32_t slot = 0;
        while (slot < registry->capacity && registry->entries[slot])
            slot++;
        if (slot == registry->capacity) {
            snprintf(error, REGISTRY_ERROR_BYTES, "%u processes are registered: no more are taken", registry->capacity);
            return -ENOSPC;
        }
        entry = calloc(1, sizeof(*entry));
        if (!entry) {
            snprintf(error, REGISTRY_ERROR_BYTES, "out of memory");
            return -ENOMEM;
        }
        entry->pidfd = -1;
        registry->entries[slot] = entry;
        for (uint32_t i = 0; i < registry->capacity; i++)
            if (i != slot && registry->entries[i] && same_place(registry->entries[i], given))
                registry->entries[i]->replaced = true;
    }
    take_over(entry, given, now_us);
    *ret_process = entry;
    return 0;
}

int registry_move(struct process *process, enum process_state state, uint64_t now_us)
{
    if (state > PROCESS_DEAD || !(states[process->state].to & TO(state)))
        return -EPROTO;
    process->state = state;
    process->changed_us = now_us;
    return 0;
}

static bool has_other_evidence(const struct registry *registry, const struct process *process)
{
    return process->pidfd >= 0 || registry_supervisor_of(registry, process) != NULL;
}

enum process_state registry_hang_up(struct registry *registry, struct process *process, uint64_t now_us)
{
    process->connection = NULL;
    if (process->state == PROCESS_DEAD)
        return PROCESS_DEAD;
    if (!has_other_evidence(registry, process))
        (void)registry_move(process, PROCESS_DEAD, now_us);
    else if (alive(process))
        (void)registry_move(process, PROCESS_LOST, now_us);
    return process->state;
}

bool registry_died(struct process *process, uint64_t now_us)
{
    return registry_move(process, PROCESS_DEAD, now_us) == 0;
}

struct process *registry_next_orphan(struct registry *registry, uint64_t now_us)
{
    uint32_t cursor = 0;
    for (struct process *process; (process = registry_next(registry, &cursor));)
        if ((process->state == PROCESS_LOST || process->state == PROCESS_FENCING) && !process->connection &&
            !has_other_evidence(registry, process)) {
            (void)registry_move(process, PROCESS_DEAD, now_us);
            return process;
        }
    return NULL;
}

void registry_remove(struct registry *registry, struct process *process)
{
    for (uint32_t i = 0; i < registry->capacity; i++)
        if (registry->entries[i] == process) {
            free_entry(process);
            registry->entries[i] = NULL;
            return;
        }
}

static void measure_rate(struct process *process, uint64_t now_us)
{
    uint64_t passed_us = now_us - process->window_us;
    if (process->window_us != 0 && passed_us < WINDOW_US)
        return;
    if (process->window_us != 0 && process->bytes_served >= process->window_bytes)
        process->bytes_per_s =
            (uint64_t)((double)(process->bytes_served - process->window_bytes) * 1e6 / (double)passed_us);
    process->window_us = now_us;
    process->window_bytes = process->bytes_served;
}

void registry_heard(struct process *process, const struct heartbeat *heartbeat, uint64_t now_us)
{
    if (heartbeat->progress != process->progress || !heartbeat->busy || !process->busy)
        process->progress_us = now_us;
    process->heard_us = now_us;
    process->progress = heartbeat->progress;
    process->busy = heartbeat->busy;
    process->bytes_served = heartbeat->bytes_served;
    process->bytes_resident = heartbeat->bytes_resident;
    process->bytes_local = heartbeat->bytes_local;
    measure_rate(process, now_us);
    process->n_requests = heartbeat->n_requests;
    process->n_tokens = heartbeat->n_tokens;
    if (heartbeat->device_bytes > 0) /* before its first report: what it said at registration */
        process->device_bytes = heartbeat->device_bytes;
    snprintf(process->phase, sizeof(process->phase), "%s", heartbeat->phase ? heartbeat->phase : "");
}

static uint64_t since(uint64_t then_us, uint64_t now_us)
{
    return now_us > then_us ? now_us - then_us : 0;
}

const char *registry_judge(const struct process *process, uint64_t now_us, uint64_t hang_timeout_us)
{
    if (process->role == PROCESS_SUPERVISOR)
        return NULL;
    if (process->state == PROCESS_LOST)
        return since(process->changed_us, now_us) > hang_timeout_us ? "hung up and did not come back" : NULL;
    if (!alive(process))
        return NULL;
    if (since(process->heard_us, now_us) > hang_timeout_us)
        return "no heartbeat";
    bool patient = strncmp(process->phase, "loading", 7) == 0 || strncmp(process->phase, "rebuilding", 10) == 0;
    uint64_t timeout_us = patient ? hang_timeout_us * REGISTRY_PATIENCE : hang_timeout_us;
    if (process->busy && since(process->progress_us, now_us) > timeout_us)
        return "busy without progress";
    return NULL;
}
