/*
 * programs.h - runs a program to its end as a shell would: arguments, environment and input in; status, output and errors out.
 *
 * Owner      the test. Threads: one. Failures to start assert (cmocka).
 */
#pragma once

#include "tests/system/service.h"

/* A list of arguments, closed by NULL. */
#define ARGUMENTS(...)                                                                                                 \
    (const char *const[])                                                                                              \
    {                                                                                                                  \
        __VA_ARGS__, NULL                                                                                              \
    }

struct program {
    const char *name;               /* in the build's bin folder; NULL: "hcattn" */
    const char *runtime_dir;        /* HCATTN_RUNTIME_DIR; NULL: unset */
    const char *const *environment; /* more "NAME=VALUE", closed by NULL; or NULL */
    const char *input;              /* standard input; NULL: empty */
    size_t input_bytes;             /* 0: strlen(input) */
};

struct outcome {
    int status; /* exit status; 128 + n: ended by signal n */
    char *out;  /* zero-terminated */
    size_t out_bytes;
    char *err;
    size_t err_bytes;
};

/* arguments: closed by NULL. One that takes longer than a minute (sanitized: six) is killed. */
struct outcome programs_run(const struct program *program, const char *const *arguments);
void programs_free(struct outcome *outcome);

/* Starts it with output and errors in `log_path` (appended) and does not wait. */
pid_t programs_start(const struct program *program, const char *const *arguments, const char *log_path);
/* Its exit status as above; kills it after the time. */
int programs_wait(pid_t pid, uint32_t timeout_s);

uint32_t programs_n_lines(const char *text);

/* status 0 and nothing on stderr; shows what came otherwise. */
void programs_assert_done(const struct outcome *outcome);
/* That status, nothing on stdout, and exactly one line on stderr that contains all of `parts` (closed by NULL). */
void programs_assert_refused(const struct outcome *outcome, int status, const char *const *parts);
