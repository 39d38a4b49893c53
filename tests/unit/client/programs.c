/* programs.c - see programs.h. */
#include "tests/unit/client/programs.h"
#include "common/clock.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define LOOK_US 10000u

void programs_setup(struct programs *programs, const char *mode)
{
    *programs = (struct programs){.directory = "/tmp/hcattn-test-XXXXXX", .mode = mode};
    if (!mkdtemp(programs->directory))
        abort();
    snprintf(programs->log, sizeof(programs->log), "%s/test.log", programs->directory);
    snprintf(programs->out, sizeof(programs->out), "%s/out", programs->directory);
    snprintf(programs->in, sizeof(programs->in), "%s/in", programs->directory);
}

void programs_cleanup(struct programs *programs)
{
    DIR *directory = opendir(programs->directory);
    struct dirent *entry;
    while (directory && (entry = readdir(directory)) != NULL)
        unlinkat(dirfd(directory), entry->d_name, 0);
    if (directory)
        closedir(directory);
    rmdir(programs->directory);
}

pid_t programs_start(const struct programs *programs, bool fakes, const char *const *arguments)
{
    const char *argv[48] = {"hcattn", arguments[0], "--runtime-dir", programs->directory};
    size_t n = 4;
    if (fakes) {
        argv[n++] = "--bin-dir";
        argv[n++] = PROGRAMS_FAKES;
    }
    for (size_t i = 1; arguments[i] && n < 47; i++)
        argv[n++] = arguments[i];
    argv[n] = NULL;
    pid_t pid = fork();
    if (pid < 0)
        abort();
    if (pid > 0)
        return pid;
    int fd = open(programs->log, O_WRONLY | O_CREAT | O_APPEND, 0600);
    int in_fd = open(programs->in, O_RDONLY);
    int out_fd = programs->split ? open(programs->out, O_WRONLY | O_CREAT | O_TRUNC, 0600) : fd;
    if (in_fd < 0)
        in_fd = open("/dev/null", O_RDONLY);
    dup2(in_fd, STDIN_FILENO);
    dup2(out_fd, STDOUT_FILENO);
    dup2(fd, STDERR_FILENO);
    setenv("HCATTN_TEST_MODE", programs->mode, 1);
    execv(PROGRAMS_HCATTN, (char *const *)argv);
    _exit(127);
}

int programs_wait(pid_t pid, int seconds)
{
    uint64_t deadline = clock_deadline_us((uint64_t)seconds * 1000000);
    int status = 0;
    while (waitpid(pid, &status, WNOHANG) == 0) {
        if (clock_remaining_us(deadline) == 0) {
            kill(pid, SIGKILL);
            waitpid(pid, &status, 0);
            return -1;
        }
        clock_sleep_us(LOOK_US);
    }
    return status;
}

int programs_run(const struct programs *programs, bool fakes, const char *const *arguments)
{
    int status = programs_wait(programs_start(programs, fakes, arguments), 60);
    return status >= 0 && WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

size_t programs_read(const char *path, char *text, size_t size)
{
    int fd = open(path, O_RDONLY);
    ssize_t n = fd < 0 ? 0 : read(fd, text, size - 1);
    if (fd >= 0)
        close(fd);
    text[n > 0 ? n : 0] = '\0';
    return n > 0 ? (size_t)n : 0;
}

bool programs_log_has(const struct programs *programs, const char *text)
{
    static char log[1 << 16];
    programs_read(programs->log, log, sizeof(log));
    if (strstr(log, text))
        return true;
    fprintf(stderr, "no '%s' in:\n%s\n", text, log);
    return false;
}

static pid_t find_start(const struct programs *programs, const char *program, unsigned n, char *ret_line, size_t size)
{
    static char text[1 << 16];
    char path[96];
    snprintf(path, sizeof(path), "%s/started", programs->directory);
    programs_read(path, text, sizeof(text));
    for (char *line = text, *end; (end = strchr(line, '\n')) != NULL; line = end + 1) {
        *end = '\0';
        if (strncmp(line, program, strlen(program)) != 0 || line[strlen(program)] != ' ')
            continue;
        if (n-- > 0)
            continue;
        if (ret_line)
            snprintf(ret_line, size, "%s", line);
        return (pid_t)strtol(line + strlen(program), NULL, 10);
    }
    return 0;
}

pid_t programs_started(const struct programs *programs, const char *program, unsigned n, int seconds, char *line,
                       size_t size)
{
    uint64_t deadline = clock_deadline_us((uint64_t)seconds * 1000000);
    pid_t pid;
    while ((pid = find_start(programs, program, n, line, size)) == 0 && clock_remaining_us(deadline) > 0)
        clock_sleep_us(LOOK_US);
    return pid;
}

bool programs_gone(pid_t pid, int seconds)
{
    uint64_t deadline = clock_deadline_us((uint64_t)seconds * 1000000);
    while (kill(pid, 0) == 0) {
        if (clock_remaining_us(deadline) == 0)
            return false;
        clock_sleep_us(LOOK_US);
    }
    return true;
}
