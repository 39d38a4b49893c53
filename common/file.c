#include "common/file.h"

#include <errno.h>
#include <stdint.h>
#include <unistd.h>

int file_read_all(int fd, void *bytes, size_t n_bytes)
{
    for (uint8_t *at = bytes; n_bytes > 0;) {
        ssize_t n = read(fd, at, n_bytes);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return n < 0 ? -errno : -EBADMSG;
        at += n;
        n_bytes -= (size_t)n;
    }
    return 0;
}

int file_write_all(int fd, const void *bytes, size_t n_bytes)
{
    for (const uint8_t *at = bytes; n_bytes > 0;) {
        ssize_t n = write(fd, at, n_bytes);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return n < 0 ? -errno : -EIO;
        at += n;
        n_bytes -= (size_t)n;
    }
    return 0;
}
