/* fleet.c - see fleet.h. */
#include "client/command/fleet.h"
#include "client/command/child.h"
#include "client/command/command.h"
#include "client/command/lock.h"
#include "common/clock.h"
#include "common/signals.h"

#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define MAX_ARGUMENTS 64u
#define RESTART_US    200000u
#define FAST_US       10000000u
#define MAX_FAST      10u

static void fail(struct fleet *fleet, int status, const char *format, ...) __attribute__((format(printf, 3, 4)));

static void fail(struct fleet *fleet, int status, const char *format, ...)
{
    if (fleet->status)
        return;
    fleet->status = status;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(fleet->reason, sizeof(fleet->reason), format, arguments);
    va_end(arguments);
}

static void add(struct fleet *fleet, const char *role, uint32_t index)
{
    fleet->members[fleet->n_members++] = (struct fleet_member){.role = role_find(role), .index = index};
}

int fleet_init(struct fleet *fleet, const struct options *options, const struct placing *placing, const char *directory,
               const char *policy, int lock_fd)
{
    *fleet = (struct fleet){.options = options, .placing = placing, .policy = policy, .lock_fd = lock_fd};
    snprintf(fleet->directory, sizeof(fleet->directory), "%s", directory);
    ssize_t n = readlink("/proc/self/exe", fleet->self, sizeof(fleet->self) - 1);
    if (n < 0)
        return -errno;
    add(fleet, "coordinator", 0);
    for (uint32_t i = 0; i < placing->n_stores && i < FLEET_MAX_STORES; i++)
        add(fleet, "value-store", i);
    uint32_t n_workers = options_u32(options, "workers");
    for (uint32_t i = 0; i < n_workers && i < FLEET_MAX_WORKERS; i++)
        add(fleet, "gpu-worker", i);
    return 0;
}

/* Our default is the truth of all processes: given also when nobody asked for it. */
static bool is_ours(const char *name)
{
    return strcmp(name, "stores") == 0 || strcmp(name, "workers") == 0 || strcmp(name, "policy") == 0 ||
           strcmp(name, "transport") == 0;
}

struct texts {
    char names[MAX_ARGUMENTS / 2][40];
    char index[16], n_stores[16], node[16], memory[24];
};

/* Node and memory, which differ from store to store. */
static size_t add_placing(const struct fleet *fleet, const struct fleet_member *member, struct texts *texts,
                          char *argv[MAX_ARGUMENTS], size_t n)
{
    const struct placing_store *store = &fleet->placing->stores[member->index];
    snprintf(texts->node, sizeof(texts->node), "%" PRIu32, store->node);
    snprintf(texts->memory, sizeof(texts->memory), "%" PRIu64, store->memory_bytes);
    argv[n++] = (char *)"--node";
    argv[n++] = texts->node;
    argv[n++] = (char *)"--memory";
    argv[n++] = store->memory_bytes ? texts->memory : (char *)options_text(fleet->options, "memory");
    return n;
}

/* hcattn run ROLE --index N --runtime-dir D ... -- options of the role. `texts` holds what is not there already. */
static void make_argv(const struct fleet *fleet, const struct fleet_member *member, const char *model,
                      char *argv[MAX_ARGUMENTS], struct texts *texts)
{
    static const char *const passed_to_run[] = {"bin-dir", "stop-timeout", "max-restarts", "log-level", NULL};
    const struct options *options = fleet->options;
    size_t n = 0, n_names = 0;
    snprintf(texts->index, sizeof(texts->index), "%" PRIu32, member->index);
    snprintf(texts->n_stores, sizeof(texts->n_stores), "%" PRIu32, fleet->placing->n_stores);
    argv[n++] = (char *)"hcattn";
    argv[n++] = (char *)"run";
    argv[n++] = (char *)member->role->name;
    argv[n++] = (char *)"--index";
    argv[n++] = texts->index;
    argv[n++] = (char *)"--runtime-dir";
    argv[n++] = (char *)fleet->directory;
    if (options_config_file(options)) {
        argv[n++] = (char *)"--config";
        argv[n++] = (char *)options_config_file(options);
    }
    for (size_t i = 0; passed_to_run[i]; i++) {
        if (!options_given(options, passed_to_run[i]))
            continue;
        snprintf(texts->names[n_names], sizeof(texts->names[0]), "--%s", passed_to_run[i]);
        argv[n++] = texts->names[n_names++];
        argv[n++] = (char *)options_text(options, passed_to_run[i]);
    }
    argv[n++] = (char *)"--";
    for (const char *const *name = role_options(member->role); *name; name++) {
        bool is_model = strcmp(*name, "model") == 0;
        if (!is_model && !is_ours(*name) && !options_given(options, *name))
            continue;
        bool is_flag = strcmp(*name, "strict-numa") == 0;
        bool is_off = is_flag && !options_flag(options, *name);
        snprintf(texts->names[n_names], sizeof(texts->names[0]), is_off ? "--no-%s" : "--%s", *name);
        argv[n++] = texts->names[n_names++];
        if (is_flag)
            continue;
        bool is_policy = strcmp(*name, "policy") == 0, is_stores = strcmp(*name, "stores") == 0;
        argv[n++] = is_stores ? texts->n_stores
                              : (char *)(is_model    ? model
                                         : is_policy ? fleet->policy
                                                     : options_text(options, *name));
    }
    if (member->role->number == HCATTN__CONTROL__ROLE__VALUE_STORE)
        n = add_placing(fleet, member, texts, argv, n);
    argv[n] = NULL;
}

static void start_member(struct fleet *fleet, struct fleet_member *member, const char *model)
{
    char *argv[MAX_ARGUMENTS];
    struct texts texts;
    make_argv(fleet, member, model, argv, &texts);
    if (fleet->group && kill(-fleet->group, 0) < 0)
        fleet->group = 0; /* the last one of it has died */
    struct child child = {
        .path = fleet->self, .argv = argv, .death_signal = SIGTERM, .group = fleet->group, .empty_input = true};
    int error = child_start(&child, &member->pid);
    if (error) {
        fail(fleet, COMMAND_ERROR, "cannot start %s: %s", fleet->self, strerror(-error));
        return;
    }
    member->started_us = clock_now_us();
    member->start_us = CLOCK_NEVER;
    if (fleet->group == 0) {
        fleet->group = member->pid;
        lock_write(fleet->lock_fd, &(struct lock_owner){.pid = getpid(), .group = fleet->group});
    }
}

int fleet_start(struct fleet *fleet, const char *model)
{
    for (size_t i = 0; i < fleet->n_members && !fleet->status; i++) {
        struct fleet_member *member = &fleet->members[i];
        if (member->pid == 0 && clock_now_us() >= member->start_us)
            start_member(fleet, member, model);
    }
    return fleet->status ? -ECHILD : 0;
}

static void member_died(struct fleet *fleet, struct fleet_member *member, int wait_status)
{
    char how[128];
    child_describe(wait_status, how, sizeof(how));
    member->pid = 0;
    member->start_us = CLOCK_NEVER;
    if (WIFEXITED(wait_status) && WEXITSTATUS(wait_status) != 0) {
        fail(fleet, WEXITSTATUS(wait_status) == COMMAND_USAGE ? COMMAND_USAGE : COMMAND_ERROR, "%s %u %s",
             member->role->name, member->index, how);
        return;
    }
    /* Killed, or stopped by somebody else: the service wants it. */
    bool fast = clock_now_us() - member->started_us < FAST_US;
    member->n_fast = fast ? member->n_fast + 1 : 0;
    if (member->n_fast > MAX_FAST)
        fail(fleet, COMMAND_ERROR, "the supervisor of %s %u %s, again and again", member->role->name, member->index,
             how);
    else
        member->start_us = clock_deadline_us(RESTART_US);
}

void fleet_reap(struct fleet *fleet)
{
    int wait_status;
    pid_t pid;
    while ((pid = waitpid(-1, &wait_status, WNOHANG)) > 0) {
        for (size_t i = 0; i < fleet->n_members; i++) {
            if (fleet->members[i].pid == pid)
                member_died(fleet, &fleet->members[i], wait_status);
        }
    }
}

int fleet_timeout_ms(const struct fleet *fleet)
{
    uint64_t wake = CLOCK_NEVER;
    for (size_t i = 0; i < fleet->n_members; i++) {
        const struct fleet_member *member = &fleet->members[i];
        if (member->pid == 0 && member->start_us < wake)
            wake = member->start_us;
    }
    return clock_remaining_ms(wake);
}

static bool any_alive(const struct fleet *fleet, Hcattn__Control__Role role)
{
    for (size_t i = 0; i < fleet->n_members; i++) {
        if (fleet->members[i].role->number == role && fleet->members[i].pid)
            return true;
    }
    return false;
}

static void signal_all(const struct fleet *fleet, Hcattn__Control__Role role, int number)
{
    for (size_t i = 0; i < fleet->n_members; i++) {
        if (fleet->members[i].role->number == role && fleet->members[i].pid)
            kill(fleet->members[i].pid, number);
    }
}

/* One role. Returns false when the user does not want to wait any longer. */
static bool stop_role(struct fleet *fleet, Hcattn__Control__Role role, int signal_fd, uint64_t timeout_us)
{
    uint64_t deadline_us = clock_deadline_us(timeout_us);
    bool patient = true;
    signal_all(fleet, role, SIGTERM);
    while (any_alive(fleet, role)) {
        if (clock_remaining_us(deadline_us) == 0 || !patient) {
            signal_all(fleet, role, SIGKILL);
            deadline_us = CLOCK_NEVER; /* SIGKILL cannot be refused */
            patient = true;
        }
        struct pollfd item = {.fd = signal_fd, .events = POLLIN};
        int ms = clock_remaining_ms(deadline_us);
        poll(&item, 1, ms < 0 || ms > 200 ? 200 : ms);
        int number;
        while (signals_read(signal_fd, &number) == 0) {
            if (number != SIGCHLD)
                patient = false;
        }
        fleet_reap(fleet);
    }
    return patient;
}

void fleet_stop(struct fleet *fleet, int signal_fd, uint64_t timeout_us)
{
    static const Hcattn__Control__Role order[] = {HCATTN__CONTROL__ROLE__GPU_WORKER, HCATTN__CONTROL__ROLE__VALUE_STORE,
                                                  HCATTN__CONTROL__ROLE__COORDINATOR};
    for (size_t i = 0; i < sizeof(order) / sizeof(order[0]); i++) {
        if (!stop_role(fleet, order[i], signal_fd, timeout_us))
            timeout_us = 0;
    }
    if (fleet->group)
        kill(-fleet->group, SIGKILL); /* nothing is left in it, unless a supervisor was killed in a bad moment */
}
