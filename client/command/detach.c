/* detach.c - see detach.h. */
#include "client/command/detach.h"
#include "client/command/command.h"
#include "client/command/output.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define READY      '\001' /* a line of its own; progress lines hold text */
#define LOG_LINES  8u
#define TAIL_BYTES 4096

static int open_log(const char *path)
{
    char old[4096];
    snprintf(old, sizeof(old), "%s.1", path);
    rename(path, old); /* there may be none */
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0600);
    return fd < 0 ? -errno : fd;
}

int detach_fork(const char *log_path, pid_t *ret_pid, int *ret_fd)
{
    int fds[2];
    int log_fd = open_log(log_path);
    if (log_fd < 0)
        return log_fd;
    int null_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (null_fd < 0 || pipe2(fds, O_CLOEXEC) < 0) {
        int error = -errno;
        close(log_fd);
        if (null_fd >= 0)
            close(null_fd);
        return error;
    }
    output_flush();
    pid_t pid = fork();
    if (pid < 0) {
        int error = -errno;
        close(fds[0]);
        close(fds[1]);
        close(log_fd);
        close(null_fd);
        return error;
    }
    if (pid == 0) {
        setsid();
        dup2(null_fd, STDIN_FILENO);
        dup2(log_fd, STDOUT_FILENO);
        dup2(log_fd, STDERR_FILENO);
    }
    close(log_fd);
    close(null_fd);
    close(fds[pid ? 1 : 0]);
    *ret_pid = pid;
    *ret_fd = fds[pid ? 0 : 1];
    return 0;
}

void detach_progress(int fd, const char *text)
{
    dprintf(fd, "%s\n", text);
}

void detach_ready(int fd)
{
    dprintf(fd, "%c\n", READY);
}

/* The last lines that the service has written: they say why it did not start. */
static void show_log(const char *path)
{
    char text[TAIL_BYTES + 1];
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return;
    off_t end = lseek(fd, 0, SEEK_END);
    ssize_t n = pread(fd, text, TAIL_BYTES, end > TAIL_BYTES ? end - TAIL_BYTES : 0);
    close(fd);
    if (n <= 0)
        return;
    text[n] = '\0';
    char *from = text + n;
    for (unsigned lines = 0; from > text; from--) {
        if (from[-1] == '\n' && from != text + n && ++lines == LOG_LINES)
            break;
    }
    fputs(from, stderr);
}

int detach_wait(const char *name, const char *log_path, pid_t pid, int fd)
{
    char *line = NULL;
    size_t size = 0;
    bool ready = false;
    FILE *pipe = fdopen(fd, "r");
    while (pipe && !ready && getline(&line, &size, pipe) > 0) {
        line[strcspn(line, "\n")] = '\0';
        ready = line[0] == READY;
        if (!ready)
            output_progress(false, "%s", line);
    }
    output_progress(false, "%s", "");
    free(line);
    if (pipe)
        fclose(pipe);
    if (ready)
        return 0;
    int wait_status = 0;
    while (waitpid(pid, &wait_status, 0) < 0 && errno == EINTR)
        ;
    show_log(log_path);
    int status = WIFEXITED(wait_status) && WEXITSTATUS(wait_status) ? WEXITSTATUS(wait_status) : COMMAND_ERROR;
    return command_fail(status, name, "the service did not start; its log is %s", log_path);
}
