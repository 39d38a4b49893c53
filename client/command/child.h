/*
 * child.h - starting programs that do not outlive who started them.
 *
 * Threads    the main thread only: the kernel's parent-death signal is sent when the *thread* that forked ends. Other threads may
 *            exist; between fork and exec only async-signal-safe calls are made.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

struct child {
    const char *path;
    char *const *argv; /* closed by NULL */
    int death_signal;  /* sent to it when we die */
    pid_t group;       /* -1: ours; 0: one of its own; else joins that group */
    bool empty_input;  /* stdin is /dev/null */
};

/* 0 once the program runs. -ENOENT, -EACCES, -ENOEXEC ... from exec; -EAGAIN, -ENOMEM from fork. */
int child_start(const struct child *child, pid_t *ret_pid);

/* Where `program` lies: in bin_dir if that is not NULL, else beside this program, else on PATH. -ENOENT, -ENAMETOOLONG. */
int child_find(const char *program, const char *bin_dir, char *ret_path, size_t size);

/* What waitpid() tells, for people: "was killed by signal 9 (Killed)", "ended with status 1". Returns text. */
const char *child_describe(int wait_status, char *text, size_t size);
