/* down.c - see down.h. */
#include "client/command/down.h"
#include "client/command/command.h"
#include "client/command/lock.h"
#include "client/command/output.h"
#include "common/clock.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>

#define NAME    "hcattn down"
#define LOOK_US 20000u
#define KILL_US 5000000u /* for the kernel to take away what was killed */

static const struct option_spec specs[] = {
    COMMAND_RUNTIME_DIR_OPTION,
    {.name = "timeout",
     .kind = OPTION_DURATION,
     .default_text = "60s",
     .help = "how long to wait before everything is killed"},
};

static const struct options_table table = {
    .program = NAME,
    .summary = "Stops the service that runs in the runtime directory, and waits until it is gone.",
    .specs = specs,
    .n_specs = sizeof(specs) / sizeof(specs[0]),
    .other_names = option_names_all,
};

static bool is_hcattn(pid_t pid)
{
    char path[64], name[32] = "";
    snprintf(path, sizeof(path), "/proc/%d/comm", (int)pid);
    FILE *file = fopen(path, "r");
    if (!file)
        return false;
    bool ours = fgets(name, sizeof(name), file) && strncmp(name, "hcattn", 6) == 0;
    fclose(file);
    return ours;
}

/* `up` if it lives: it stops the others in order. Otherwise those directly. -EPERM, -ESRCH: nobody to signal. */
static int signal_owner(const struct lock_owner *owner, int number)
{
    if (number == SIGTERM && owner->pid && is_hcattn(owner->pid))
        return kill(owner->pid, number) < 0 ? -errno : 0;
    if (number == SIGKILL && owner->pid && is_hcattn(owner->pid))
        kill(owner->pid, number);
    if (owner->group)
        return kill(-owner->group, number) < 0 ? -errno : 0;
    return -ESRCH;
}

static bool wait_free(const char *directory, uint64_t deadline_us, struct lock_owner *owner)
{
    while (lock_probe(directory, owner)) {
        if (clock_remaining_us(deadline_us) == 0)
            return false;
        clock_sleep_us(LOOK_US);
    }
    return true;
}

static int stop(const struct options *options, const char *directory)
{
    struct lock_owner owner = {.pid = 0};
    if (!lock_probe(directory, &owner)) {
        output_format("nothing runs in %s\n", directory);
        return output_status();
    }
    uint64_t timeout_ms = options_duration_ms(options, "timeout");
    uint64_t deadline_us = clock_deadline_us(timeout_ms * 1000);
    if (owner.pid == 0) { /* it has only just begun */
        clock_sleep_us(10 * LOOK_US);
        lock_probe(directory, &owner);
    }
    pid_t pid = owner.pid;
    int error = signal_owner(&owner, SIGTERM);
    if (error == -EPERM)
        return command_fail(COMMAND_ERROR, NAME, "not allowed to stop pid %d", (int)pid);
    if (wait_free(directory, deadline_us, &owner)) {
        output_format("stopped (pid %d)\n", (int)pid);
        return output_status();
    }
    command_fail(0, NAME, "it does not stop within %llu s: killed", (unsigned long long)(timeout_ms / 1000));
    signal_owner(&owner, SIGKILL);
    if (wait_free(directory, clock_deadline_us(KILL_US), &owner))
        return output_status();
    return command_fail(COMMAND_ERROR, NAME, "processes of pid %d are still there", (int)pid);
}

int down_command(int argc, char **argv)
{
    int status = 0;
    struct options *options = command_options(&table, argc, argv, &status);
    if (!options)
        return status;
    char directory[OPTIONS_PATH_SIZE], reason[OPTIONS_ERROR_SIZE];
    if (options_runtime_dir(options_string(options, "runtime-dir"), directory, reason) < 0)
        status = command_fail(COMMAND_USAGE, NAME, "%s", reason);
    else
        status = stop(options, directory);
    options_free(options);
    return status;
}
