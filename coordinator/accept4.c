/* accept4.c - see accept4.h. <sys/socket.h> is left out: glibc declares accept4() in a way that C cannot define. */
#include "coordinator/accept4.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#define MARGIN 64u /* descriptors that no connection gets; a quarter where there are few */

static uint64_t limit_of_descriptors(void)
{
    struct rlimit limit = {.rlim_cur = 0};
    (void)getrlimit(RLIMIT_NOFILE, &limit);
    return limit.rlim_cur;
}

uint64_t accept4_prepare(void)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < limit.rlim_max) {
        limit.rlim_cur = limit.rlim_max;
        (void)setrlimit(RLIMIT_NOFILE, &limit);
    }
    return limit_of_descriptors();
}

int accept4(int listener, void *address, void *address_bytes, int flags);

int accept4(int listener, void *address, void *address_bytes, int flags)
{
    int fd = (int)syscall(SYS_accept4, listener, address, address_bytes, flags);
    if (fd < 0) {
        if (errno == EMFILE) /* somebody else took the margin */
            errno = ECONNABORTED;
        return -1;
    }
    /* The kernel gives the lowest free number: a high one means that few are left. */
    uint64_t limit = limit_of_descriptors(), margin = limit / 4 < MARGIN ? limit / 4 : MARGIN;
    if ((uint64_t)fd < limit - margin)
        return fd;
    close(fd);
    errno = ECONNABORTED;
    return -1;
}
