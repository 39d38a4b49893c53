/* lock.c - see lock.h. */
#include "client/command/lock.h"
#include "common/options.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

#define NAME "hcattn.lock"

static struct lock_owner read_owner(int fd)
{
    char text[64] = "";
    int pid = 0, group = 0;
    ssize_t n = pread(fd, text, sizeof(text) - 1, 0);
    if (n <= 0 || sscanf(text, "%d %d", &pid, &group) < 1 || pid <= 1 || group < 0 || group == 1)
        return (struct lock_owner){.pid = 0};
    return (struct lock_owner){.pid = pid, .group = group};
}

static int open_file(const char *directory, int flags)
{
    char path[OPTIONS_PATH_SIZE + sizeof(NAME)];
    snprintf(path, sizeof(path), "%s/" NAME, directory);
    int fd = open(path, flags | O_RDWR | O_NOFOLLOW, 0600); /* not close-on-exec: the children keep it */
    return fd < 0 ? -errno : fd;
}

int lock_take(const char *directory, int *ret_fd, struct lock_owner *ret_owner)
{
    int fd = open_file(directory, O_CREAT);
    if (fd < 0)
        return fd;
    if (flock(fd, LOCK_EX | LOCK_NB) < 0) {
        int error = -errno;
        if (ret_owner)
            *ret_owner = read_owner(fd);
        close(fd);
        return error;
    }
    int error = lock_write(fd, &(struct lock_owner){.pid = getpid()});
    if (error) {
        close(fd);
        return error;
    }
    *ret_fd = fd;
    return 0;
}

int lock_write(int fd, const struct lock_owner *owner)
{
    char text[64];
    memset(text, ' ', sizeof(text)); /* always as long: a reader never sees half of an old one */
    int n = snprintf(text, sizeof(text), "%d %d", (int)owner->pid, (int)owner->group);
    text[n] = ' ';
    text[sizeof(text) - 1] = '\n';
    return pwrite(fd, text, sizeof(text), 0) == (ssize_t)sizeof(text) ? 0 : errno ? -errno : -EIO;
}

int lock_probe(const char *directory, struct lock_owner *ret_owner)
{
    int fd = open_file(directory, O_CLOEXEC);
    if (fd < 0)
        return 0;
    int held = flock(fd, LOCK_SH | LOCK_NB) < 0;
    if (held)
        *ret_owner = read_owner(fd);
    close(fd);
    return held;
}
