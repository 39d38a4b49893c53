/*
 * fleet.h - the supervisors that `hcattn up` runs, one per process of the service.
 *
 * Owner      up.c. Threads: the main thread (child.h).
 * Invariant  members lie in the order in which they are started; they are stopped the other way round: workers, stores,
 *            coordinator. All are in one process group that is not ours: Ctrl-C reaches us alone.
 */
#pragma once

#include "client/command/placing.h"
#include "client/command/role.h"
#include "common/options.h"

#include <stdint.h>
#include <sys/types.h>

#define FLEET_MAX_STORES  PLACING_MAX_STORES
#define FLEET_MAX_WORKERS 16u

struct fleet_member {
    const struct role *role;
    uint32_t index;
    pid_t pid;         /* of its supervisor; 0: none lives */
    uint64_t start_us; /* when to start it again; CLOCK_NEVER: not */
    uint64_t started_us;
    uint32_t n_fast; /* fast deaths in a row */
};

struct fleet {
    const struct options *options; /* of `up` */
    const struct placing *placing; /* of the stores */
    const char *policy;            /* what the option --policy says, with the residency */
    char self[4096];               /* this program */
    char directory[OPTIONS_PATH_SIZE];
    struct fleet_member members[1 + FLEET_MAX_STORES + FLEET_MAX_WORKERS];
    size_t n_members;
    pid_t group; /* 0: none yet */
    int lock_fd;
    int status; /* exit status of the first member that ended for good; 0: all is well */
    char reason[256];
};

/* Of `options`: the number of workers, and what the processes are given. `placing` and `policy` are kept, not copied. */
int fleet_init(struct fleet *fleet, const struct options *options, const struct placing *placing, const char *directory,
               const char *policy, int lock_fd);
/* Starts what is to be started now; fleet->status on failure. model: what the workers are given. */
int fleet_start(struct fleet *fleet, const char *model);

/* After SIGCHLD: takes the dead. Supervisors that were killed are started again by fleet_start(). */
void fleet_reap(struct fleet *fleet);

/* Milliseconds until fleet_start() has something to do; -1: nothing. */
int fleet_timeout_ms(const struct fleet *fleet);

/* Stops all, in order; a supervisor that takes longer than `timeout_us` is killed, and its process with it. `signal_fd`
 * tells of deaths; a second SIGINT or SIGTERM shortens everything. */
void fleet_stop(struct fleet *fleet, int signal_fd, uint64_t timeout_us);
