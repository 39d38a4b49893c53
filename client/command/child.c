/* child.c - see child.h. */
#include "client/command/child.h"
#include "common/options.h"
#include "common/signals.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

static _Noreturn void run_child(const struct child *child, pid_t parent, int error_fd)
{
    signals_restore();
    if (child->group >= 0)
        setpgid(0, child->group);
    prctl(PR_SET_PDEATHSIG, child->death_signal);
    if (getppid() != parent)
        _exit(127); /* the parent died before the line above */
    if (child->empty_input) {
        int fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
        if (fd >= 0)
            dup2(fd, STDIN_FILENO);
    }
    execv(child->path, child->argv);
    int error = errno;
    ssize_t n = write(error_fd, &error, sizeof(error));
    (void)n;
    _exit(127);
}

int child_start(const struct child *child, pid_t *ret_pid)
{
    int fds[2];
    if (pipe2(fds, O_CLOEXEC) < 0)
        return -errno;
    pid_t parent = getpid();
    pid_t pid = fork();
    if (pid < 0) {
        int error = -errno;
        close(fds[0]);
        close(fds[1]);
        return error;
    }
    if (pid == 0)
        run_child(child, parent, fds[1]);
    close(fds[1]);
    if (child->group >= 0)
        setpgid(pid, child->group); /* both sides: whoever comes first; fails when the child is past exec */
    int error = 0;
    ssize_t n;
    do {
        n = read(fds[0], &error, sizeof(error));
    } while (n < 0 && errno == EINTR);
    close(fds[0]);
    if (n == (ssize_t)sizeof(error)) {
        while (waitpid(pid, NULL, 0) < 0 && errno == EINTR)
            ;
        return -error;
    }
    *ret_pid = pid;
    return 0;
}

static int join(char *ret_path, size_t size, const char *directory, size_t directory_bytes, const char *program)
{
    int n = snprintf(ret_path, size, "%.*s/%s", (int)directory_bytes, directory, program);
    if (n < 0 || (size_t)n >= size)
        return -ENAMETOOLONG;
    return access(ret_path, X_OK) == 0 ? 0 : -ENOENT;
}

int child_find(const char *program, const char *bin_dir, char *ret_path, size_t size)
{
    if (bin_dir)
        return join(ret_path, size, bin_dir, strlen(bin_dir), program);
    char self[4096];
    ssize_t n = readlink("/proc/self/exe", self, sizeof(self) - 1);
    if (n > 0) {
        self[n] = '\0';
        char *slash = strrchr(self, '/');
        if (slash && join(ret_path, size, self, (size_t)(slash - self), program) == 0)
            return 0;
    }
    const char *path = options_environment("PATH");
    while (path && *path) {
        size_t length = strcspn(path, ":");
        if (length && join(ret_path, size, path, length, program) == 0)
            return 0;
        path += length + (path[length] == ':');
    }
    return -ENOENT;
}

const char *child_describe(int wait_status, char *text, size_t size)
{
    if (WIFSIGNALED(wait_status))
        snprintf(text, size, "was killed by signal %d (%s)", WTERMSIG(wait_status), strsignal(WTERMSIG(wait_status)));
    else
        snprintf(text, size, "ended with status %d", WEXITSTATUS(wait_status));
    return text;
}
