/* helpers.c - directories, descriptors and children for tests. */
#include "tests/unit/common/helpers.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

int helpers_folder(void **state)
{
    char *folder = strdup("/tmp/hcattn-test-XXXXXX");
    if (!folder || !mkdtemp(folder))
        return -1;
    *state = folder;
    return 0;
}

int helpers_remove_folder(void **state)
{
    DIR *directory = opendir(*state);
    struct dirent *entry;
    while (directory && (entry = readdir(directory))) {
        const char *path = helpers_path(state, entry->d_name);
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0 && unlink(path) < 0)
            rmdir(path);
    }
    closedir(directory);
    int result = rmdir(*state);
    free(*state);
    return result;
}

const char *helpers_path(void **state, const char *name)
{
    static char paths[4][512];
    static unsigned next;
    char *path = paths[next++ % 4];
    snprintf(path, sizeof(paths[0]), "%s/%s", (const char *)*state, name);
    return path;
}

int helpers_n_descriptors(void)
{
    int n = 0;
    for (int fd = 0; fd < 1024; fd++)
        n += fcntl(fd, F_GETFD) >= 0;
    return n;
}

int helpers_in_child(void (*body)(void))
{
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        struct rlimit none = {0, 0};
        setrlimit(RLIMIT_CORE, &none);
        int null = open("/dev/null", O_WRONLY);
        dup2(null, 2);
        body();
        _exit(0);
    }
    int status = -1;
    waitpid(child, &status, 0);
    return status;
}
