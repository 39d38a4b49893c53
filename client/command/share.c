/* share.c - see share.h. */
#include "client/command/share.h"
#include "client/command/child.h"
#include "client/command/command.h"
#include "client/command/output.h"

#include <errno.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define PLOT_NO_LIBRARY 3 /* exit status of plot-eval when matplotlib is missing */

int share_find(const char *name, char *ret_path, size_t size)
{
    static const char *const folders[] = {"../share", "../share/hcattn"};
    char self[4096];
    ssize_t n = readlink("/proc/self/exe", self, sizeof(self) - 1);
    if (n < 0)
        return -errno;
    self[n] = '\0';
    char *slash = strrchr(self, '/');
    if (!slash)
        return -ENOENT;
    *slash = '\0';
    for (size_t i = 0; i < sizeof(folders) / sizeof(folders[0]); i++) {
        int length = snprintf(ret_path, size, "%s/%s/%s", self, folders[i], name);
        if (length < 0 || (size_t)length >= size)
            return -ENAMETOOLONG;
        if (access(ret_path, R_OK) == 0)
            return 0;
    }
    return -ENOENT;
}

/* Exit status of `python plot json folder`; -1: it could not be run. */
static int draw(const char *python, const char *plot, const char *json_path, const char *folder)
{
    char *argv[] = {(char *)python, (char *)plot, (char *)json_path, (char *)folder, NULL};
    struct child child = {.path = python, .argv = argv, .death_signal = SIGTERM, .group = -1, .empty_input = true};
    pid_t pid;
    int status;
    if (child_start(&child, &pid) < 0)
        return -1;
    while (waitpid(pid, &status, 0) < 0) {
        if (errno != EINTR)
            return -1;
    }
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

int share_plot(const char *name, const char *json_path, const char *folder)
{
    /* Debian's own first: python3-matplotlib belongs to it, whatever else PATH begins with. */
    char plot[4096], other[4096];
    const char *pythons[2] = {"/usr/bin/python3", NULL};
    if (share_find("plot-eval", plot, sizeof(plot)) < 0) {
        command_fail(0, name, "no plots: plot-eval is not installed beside this program");
        return 0;
    }
    if (child_find("python3", NULL, other, sizeof(other)) == 0 && strcmp(other, pythons[0]) != 0)
        pythons[1] = other;
    output_flush();
    for (size_t i = 0; i < 2; i++) {
        if (!pythons[i] || access(pythons[i], X_OK) < 0)
            continue;
        int status = draw(pythons[i], plot, json_path, folder);
        if (status == 0)
            return 0;
        if (status != PLOT_NO_LIBRARY)
            return command_fail(COMMAND_ERROR, name, "%s %s %s %s did not work", pythons[i], plot, json_path, folder);
    }
    command_fail(0, name, "no plots: install python3-matplotlib, then: python3 %s %s %s", plot, json_path, folder);
    return 0;
}
