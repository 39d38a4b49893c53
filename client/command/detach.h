/*
 * detach.h - `hcattn up --detach`: the service goes on in the background, the caller waits until it is ready.
 *
 * Before threads exist: detach_fork() forks. The child tells its progress through a pipe; the parent shows it.
 */
#pragma once

#include <stdbool.h>
#include <sys/types.h>

/* In the child: *ret_pid 0, *ret_fd the pipe's writing end, stdin /dev/null, stdout and stderr in `log_path` (started anew,
 * the old one kept as <log>.1). In the parent: the child's pid and the reading end. Errors of open, pipe, fork. */
int detach_fork(const char *log_path, pid_t *ret_pid, int *ret_fd);

void detach_progress(int fd, const char *text); /* child */
void detach_ready(int fd);

/* Parent: shows progress until the child is ready (0) or has ended (its exit status, after the end of the log). */
int detach_wait(const char *name, const char *log_path, pid_t pid, int fd);
