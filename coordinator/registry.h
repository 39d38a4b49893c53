/*
 * registry.h - who takes part: every process that registered, the state it is in, and whether it is known dead.
 *
 * Owner      the server's thread. The registry owns the entries and their pidfds, not the connections.
 * Invariant  at most one entry of a role and index is alive (starting or ready); an earlier life of it may still be
 *            there until it is known dead. States change by the table in registry.c only.
 *
 * Known dead: the pidfd says so, or the supervisor's word for that incarnation, or - when neither is to be had - the
 * hang-up of its socket. Only a process that is dead in here may be inherited from.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "proto/layout.h"

#define REGISTRY_TEXT_BYTES     256
#define REGISTRY_ACHIEVED_BYTES 768 /* a worker with a device says much */
#define REGISTRY_ERROR_BYTES    512
#define REGISTRY_MAX_INDEX      1023u

/* A process that loads or rebuilds may stand still this many times longer than --hang-timeout. */
#define REGISTRY_PATIENCE 10u

enum process_role { PROCESS_STORE, PROCESS_WORKER, PROCESS_SUPERVISOR, PROCESS_COORDINATOR };

enum process_state {
    PROCESS_STARTING, /* registered; does not serve yet */
    PROCESS_READY,
    PROCESS_LOST,    /* hung up; may come back, may be dead */
    PROCESS_FENCING, /* hung; its supervisor was asked to kill it */
    PROCESS_DEAD,    /* known dead */
};

struct process {
    enum process_role role;
    uint32_t index;
    uint64_t incarnation;
    enum process_state state;
    pid_t pid;        /* as the kernel tells it; 0: not visible from here */
    uint32_t own_pid; /* as it calls itself, for people */
    int pidfd;        /* -1: none to be had */
    void *connection; /* of the server; NULL when hung up */
    uint64_t data_route, work_route;
    char achieved[REGISTRY_ACHIEVED_BYTES];
    int32_t numa_node;
    uint32_t home_node, node_cores; /* stores */
    bool replaced;                  /* a later life of it has registered */

    uint64_t memory_bytes;  /* stores */
    struct row_shape shape; /* workers */
    uint64_t model[2];
    char model_name[REGISTRY_TEXT_BYTES];
    uint32_t n_ctx;
    uint64_t weight_bytes;
    uint64_t device_bytes_per_token;
    uint64_t device_budget_bytes, device_bytes; /* device_bytes: in use, all together */
    uint64_t pairs;                             /* bit per store: their exchange is acknowledged */

    enum process_role supervises; /* supervisors */
    uint64_t child;               /* incarnation that runs now; 0: none */
    uint32_t n_starts;

    uint64_t registered_us, changed_us; /* changed: of the state */
    uint64_t heard_us;                  /* last heartbeat, or the registration */
    uint64_t progress, progress_us;     /* progress_us: when it last moved or was not busy */
    bool busy;
    char phase[64];
    uint64_t bytes_served, n_requests, n_tokens;
    uint64_t bytes_resident, bytes_local;          /* stores */
    uint64_t bytes_per_s, window_us, window_bytes; /* served, over the last seconds; the window that runs now */
};

struct heartbeat {
    uint64_t progress;
    bool busy;
    uint64_t bytes_served, n_requests, n_tokens, device_bytes, bytes_resident, bytes_local;
    const char *phase;
};

struct registry;

int registry_new(uint32_t capacity, struct registry **ret_registry);
struct registry *registry_free(struct registry *registry); /* closes pidfds; accepts NULL, returns NULL */

const char *registry_role_name(enum process_role role); /* "value-store" */
const char *registry_state_name(enum process_state state);

/*
 * Adds a process that said Hello; `given` is copied (role, index, incarnation, identity; state and times are set here).
 * Takes given->pidfd over on success. The same incarnation again is the same entry with a new connection and routes.
 * Errors, with a sentence that names the one that is in the way: -EEXIST alive already (or, with a life that is not
 * known dead, the same incarnation is fenced); -ENOSPC; -EINVAL index, incarnation 0 or dead incarnation.
 */
int registry_add(struct registry *registry, const struct process *given, uint64_t now_us, struct process **ret_process,
                 char error[REGISTRY_ERROR_BYTES]);

/* The entry that counts: the latest life of role and index; NULL: none. It may be lost, fencing or dead. */
struct process *registry_find(const struct registry *registry, enum process_role role, uint32_t index);
struct process *registry_find_incarnation(const struct registry *registry, enum process_role role,
                                          uint64_t incarnation);
struct process *registry_supervisor_of(const struct registry *registry, const struct process *process); /* or NULL */
/* Is an earlier life of this one not known dead yet? */
bool registry_predecessor_alive(const struct registry *registry, const struct process *process);

/* In no particular order; *cursor starts at 0; NULL ends. Entries may be removed while walking. */
struct process *registry_next(const struct registry *registry, uint32_t *cursor);

/* -EPROTO: not a legal move; nothing has changed. */
int registry_move(struct process *process, enum process_state state, uint64_t now_us);

/* The connection hung up: lost, or dead when there is no other evidence to wait for. Returns the new state. */
enum process_state registry_hang_up(struct registry *registry, struct process *process, uint64_t now_us);
/* Evidence of death. True: it was not known before. */
bool registry_died(struct process *process, uint64_t now_us);
/* A lost process without pidfd whose supervisor is gone as well: its hang-up is what there is. NULL: none (left). */
struct process *registry_next_orphan(struct registry *registry, uint64_t now_us);
void registry_remove(struct registry *registry, struct process *process); /* dead ones, when nobody needs them */

void registry_heard(struct process *process, const struct heartbeat *heartbeat, uint64_t now_us);
/* Should it be fenced? NULL or the reason: no heartbeat, busy without progress, gone without a word - for too long. */
const char *registry_judge(const struct process *process, uint64_t now_us, uint64_t hang_timeout_us);
