#include "tests/system/programs.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/clock.h"

enum { RUN_S = 60 * PATIENCE, MAX_ARGUMENTS = 64 };

static int memory_file(const char *text, size_t n_bytes)
{
    int fd = memfd_create("program", MFD_CLOEXEC);
    assert_true(fd >= 0);
    while (n_bytes > 0) {
        ssize_t n = write(fd, text, n_bytes);
        assert_true(n > 0);
        text += n;
        n_bytes -= (size_t)n;
    }
    assert_int_equal(lseek(fd, 0, SEEK_SET), 0);
    return fd;
}

static _Noreturn void become(const struct program *program, const char *const *arguments, int in, int out, int err)
{
    const char *argv[MAX_ARGUMENTS], *directory = getenv("HCATTN_BIN"); /* set by ctest */
    char path[512];
    size_t n = 1;
    argv[0] = program->name != NULL ? program->name : "hcattn";
    snprintf(path, sizeof(path), "%s/%s", directory != NULL ? directory : ".", argv[0]);
    for (; *arguments != NULL && n + 1 < MAX_ARGUMENTS; arguments++)
        argv[n++] = *arguments;
    argv[n] = NULL;
    dup2(in, STDIN_FILENO);
    dup2(out, STDOUT_FILENO);
    dup2(err, STDERR_FILENO);
    if (program->runtime_dir != NULL)
        setenv("HCATTN_RUNTIME_DIR", program->runtime_dir, 1);
    else
        unsetenv("HCATTN_RUNTIME_DIR");
    for (const char *const *setting = program->environment; setting != NULL && *setting != NULL; setting++)
        putenv((char *)(uintptr_t)*setting);
    execv(path, (char *const *)(uintptr_t)argv);
    _exit(127);
}

static int exit_status(int status)
{
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

int programs_wait(pid_t pid, uint32_t timeout_s)
{
    uint64_t deadline = clock_deadline_us((uint64_t)timeout_s * 1000000);
    int status;
    while (waitpid(pid, &status, WNOHANG) == 0) {
        if (clock_now_us() > deadline)
            kill(pid, SIGKILL);
        clock_sleep_us(2000);
    }
    return exit_status(status);
}

static char *take_text(int fd, size_t *ret_n_bytes)
{
    off_t end = lseek(fd, 0, SEEK_END);
    char *text = calloc(1, (size_t)end + 1);
    assert_non_null(text);
    assert_int_equal(pread(fd, text, (size_t)end, 0), end);
    close(fd);
    *ret_n_bytes = (size_t)end;
    return text;
}

struct outcome programs_run(const struct program *program, const char *const *arguments)
{
    size_t n_input = program->input == NULL ? 0 : program->input_bytes ? program->input_bytes : strlen(program->input);
    int in = memory_file(program->input, n_input), out = memory_file(NULL, 0), err = memory_file(NULL, 0);
    struct outcome outcome = {0};
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0)
        become(program, arguments, in, out, err);
    close(in);
    outcome.status = programs_wait(pid, RUN_S);
    outcome.out = take_text(out, &outcome.out_bytes);
    outcome.err = take_text(err, &outcome.err_bytes);
    return outcome;
}

void programs_free(struct outcome *outcome)
{
    free(outcome->out);
    free(outcome->err);
    *outcome = (struct outcome){0};
}

pid_t programs_start(const struct program *program, const char *const *arguments, const char *log_path)
{
    int in = memory_file(NULL, 0), out = open(log_path, O_CREAT | O_WRONLY | O_APPEND | O_CLOEXEC, 0600);
    assert_true(out >= 0);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0)
        become(program, arguments, in, out, out);
    close(in);
    close(out);
    return pid;
}

uint32_t programs_n_lines(const char *text)
{
    uint32_t n = 0;
    for (; *text != '\0'; text++)
        n += *text == '\n' || text[1] == '\0';
    return n;
}

void programs_assert_done(const struct outcome *outcome)
{
    if (outcome->status != 0 || outcome->err_bytes != 0)
        fail_msg("status %d, stderr: %s", outcome->status, outcome->err);
}

void programs_assert_refused(const struct outcome *outcome, int status, const char *const *parts)
{
    if (outcome->status != status)
        fail_msg("status %d instead of %d; stderr: %s", outcome->status, status, outcome->err);
    if (outcome->out_bytes != 0)
        fail_msg("something on stdout: %s", outcome->out);
    if (programs_n_lines(outcome->err) != 1 || outcome->err[outcome->err_bytes - 1] != '\n')
        fail_msg("not one line: %s", outcome->err);
    for (; *parts != NULL; parts++)
        if (strstr(outcome->err, *parts) == NULL)
            fail_msg("no '%s' in: %s", *parts, outcome->err);
}
