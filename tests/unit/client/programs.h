/*
 * programs.h - runs `hcattn` and looks after it in tests. Every test has a runtime directory of its own.
 *
 * PROGRAMS_HCATTN and PROGRAMS_FAKES are set by CMake: the command, and the directory of the fake roles.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

struct programs {
    char directory[64]; /* --runtime-dir */
    char log[96];       /* what was written to stderr by all, and to stdout unless `split` */
    char out[96];       /* with `split`: stdout of the last one */
    char in[96];        /* stdin, if the test has written this file */
    bool split;
    const char *mode; /* HCATTN_TEST_MODE */
};

void programs_setup(struct programs *programs, const char *mode);
void programs_cleanup(struct programs *programs);

/* hcattn ARGUMENTS --runtime-dir D --bin-dir FAKES; arguments closed by NULL. `fakes`: --bin-dir is given. */
pid_t programs_start(const struct programs *programs, bool fakes, const char *const *arguments);
int programs_wait(pid_t pid, int seconds); /* wait status; -1: not ended in time (it is killed) */
int programs_run(const struct programs *programs, bool fakes, const char *const *arguments); /* exit status, or -1 */

size_t programs_read(const char *path, char *text, size_t size);
bool programs_log_has(const struct programs *programs, const char *text);

/* The n-th start (from 0) of a program as told in <runtime dir>/started: pid, and the whole line. 0: not within the time. */
pid_t programs_started(const struct programs *programs, const char *program, unsigned n, int seconds, char *line,
                       size_t size);
bool programs_gone(pid_t pid, int seconds); /* no such process any more */
