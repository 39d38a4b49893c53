/* peer.c - SOCK_SEQPACKET, SCM_RIGHTS, SO_PEERCRED and pidfds. */
#include "common/peer.h"

#include "common/clock.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#define RETRY_US       20000 /* between two tries of peer_connect() */
#define LISTEN_BACKLOG 64    /* workers and stores of one host, all starting at once */

static void close_all(const int *fds, size_t n_fds)
{
    for (size_t i = 0; i < n_fds; i++)
        close(fds[i]);
}

static int fill_address(const char *path, struct sockaddr_un *ret_address)
{
    size_t length = strlen(path);
    if (length == 0)
        return -EINVAL;
    if (length >= sizeof(ret_address->sun_path))
        return -ENAMETOOLONG;
    memset(ret_address, 0, sizeof(*ret_address));
    ret_address->sun_family = AF_UNIX;
    memcpy(ret_address->sun_path, path, length + 1);
    return 0;
}

/* A whole message has to fit into the buffer; the default is enough unless the machine was tuned down. */
static void enlarge_buffer(int fd)
{
    int wanted = 2 * (int)PEER_MAX_MESSAGE;
    setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &wanted, sizeof(wanted));
}

static int new_socket(void)
{
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return -errno;
    enlarge_buffer(fd);
    return fd;
}

/* One try. Returns a connected descriptor or -errno. */
static int try_connect(const struct sockaddr_un *address)
{
    int fd = new_socket();
    if (fd < 0)
        return fd;
    /* A full backlog would make connect() wait without a limit; non-blocking it says EAGAIN. */
    int flags = fcntl(fd, F_GETFL);
    int error = 0;
    if (fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0 ||
        connect(fd, (const struct sockaddr *)address, sizeof(*address)) < 0 || fcntl(fd, F_SETFL, flags) < 0)
        error = -errno;
    if (error) {
        close(fd);
        return error;
    }
    return fd;
}

/* Makes `path` free to bind: 0, or why it is not. */
static int remove_stale(const struct sockaddr_un *address)
{
    struct stat status;
    if (lstat(address->sun_path, &status) < 0)
        return errno == ENOENT ? 0 : -errno;
    if (!S_ISSOCK(status.st_mode))
        return -EEXIST;
    int fd = try_connect(address);
    if (fd >= 0)
        close(fd);
    else if (fd == -ECONNREFUSED)
        return unlink(address->sun_path) < 0 && errno != ENOENT ? -errno : 0;
    else if (fd == -ENOENT)
        return 0;
    return -EADDRINUSE; /* somebody answered, is too busy to, or speaks another kind of socket */
}

/* Two processes that start at once must not both find the old file and remove each other's new one. */
static int lock_folder_of(const char *path)
{
    char folder[sizeof(((struct sockaddr_un *)NULL)->sun_path)];
    snprintf(folder, sizeof(folder), "%s", path);
    char *slash = strrchr(folder, '/');
    if (!slash)
        strcpy(folder, ".");
    else
        slash[slash == folder] = '\0';
    int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return -errno;
    while (flock(fd, LOCK_EX) < 0) {
        if (errno == EINTR)
            continue;
        int error = -errno;
        close(fd);
        return error;
    }
    return fd;
}

int peer_listen(const char *path, int *ret_fd)
{
    struct sockaddr_un address;
    int error = fill_address(path, &address);
    if (error)
        return error;
    int lock = lock_folder_of(path);
    if (lock < 0)
        return lock;
    int fd = -1;
    error = remove_stale(&address);
    if (!error) {
        fd = new_socket();
        error = fd < 0 ? fd : 0;
    }
    /* The mode of the socket is the mode the file is made with: it is never open to others, not even for a moment. */
    if (!error && (fchmod(fd, 0600) < 0 || bind(fd, (const struct sockaddr *)&address, sizeof(address)) < 0 ||
                   listen(fd, LISTEN_BACKLOG) < 0 || fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK) < 0))
        error = -errno;
    close(lock);
    if (error) {
        if (fd >= 0)
            close(fd);
        return error;
    }
    *ret_fd = fd;
    return 0;
}

int peer_unlisten(int fd, const char *path)
{
    if (fd >= 0) {
        unlink(path);
        close(fd);
    }
    return -1;
}

int peer_accept(int listen_fd, int *ret_fd)
{
    int fd;
    do
        fd = accept4(listen_fd, NULL, NULL, SOCK_CLOEXEC);
    while (fd < 0 && (errno == EINTR || errno == ECONNABORTED));
    if (fd < 0)
        return -errno;
    enlarge_buffer(fd);
    *ret_fd = fd;
    return 0;
}

int peer_connect(const char *path, uint64_t deadline_us, int *ret_fd)
{
    struct sockaddr_un address;
    int error = fill_address(path, &address);
    if (error)
        return error;
    bool may_wait = clock_remaining_us(deadline_us) > 0;
    for (;;) {
        int fd = try_connect(&address);
        if (fd >= 0) {
            *ret_fd = fd;
            return 0;
        }
        if (fd != -ENOENT && fd != -ECONNREFUSED && fd != -EAGAIN && fd != -EINTR)
            return fd;
        if (!may_wait)
            return fd;
        uint64_t remaining = clock_remaining_us(deadline_us);
        if (remaining == 0)
            return -ETIMEDOUT;
        clock_sleep_us(remaining < RETRY_US ? remaining : RETRY_US);
    }
}

int peer_pair(int ret_fds[2])
{
    int fds[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds) < 0)
        return -errno;
    enlarge_buffer(fds[0]);
    enlarge_buffer(fds[1]);
    ret_fds[0] = fds[0];
    ret_fds[1] = fds[1];
    return 0;
}

union control {
    struct cmsghdr header; /* alignment */
    char bytes[CMSG_SPACE(PEER_MAX_FDS * sizeof(int))];
};

static int send_message(int fd, const void *bytes, size_t n_bytes, const int *fds, size_t n_fds, int flags)
{
    if (n_bytes == 0 || n_fds > PEER_MAX_FDS)
        return -EINVAL; /* an empty message looks like a hang-up */
    if (n_bytes > PEER_MAX_MESSAGE)
        return -EMSGSIZE;
    struct iovec part = {.iov_base = (void *)(uintptr_t)bytes, .iov_len = n_bytes};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    union control control;
    if (n_fds > 0) {
        memset(&control, 0, sizeof(control));
        message.msg_control = control.bytes;
        message.msg_controllen = CMSG_SPACE(n_fds * sizeof(int));
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(n_fds * sizeof(int));
        memcpy(CMSG_DATA(header), fds, n_fds * sizeof(int));
    }
    ssize_t n;
    do
        n = sendmsg(fd, &message, flags | MSG_NOSIGNAL);
    while (n < 0 && errno == EINTR);
    if (n < 0)
        return errno == ECONNRESET || errno == ENOTCONN ? -EPIPE : -errno;
    return 0;
}

int peer_send(int fd, const void *bytes, size_t n_bytes, const int *fds, size_t n_fds)
{
    return send_message(fd, bytes, n_bytes, fds, n_fds, 0);
}

int peer_try_send(int fd, const void *bytes, size_t n_bytes, const int *fds, size_t n_fds)
{
    return send_message(fd, bytes, n_bytes, fds, n_fds, MSG_DONTWAIT);
}

/* Collects the descriptors of a message; more than PEER_MAX_FDS cannot arrive (MSG_CTRUNC instead). */
static size_t take_descriptors(struct msghdr *message, int fds[PEER_MAX_FDS])
{
    size_t n_fds = 0;
    for (struct cmsghdr *header = CMSG_FIRSTHDR(message); header; header = CMSG_NXTHDR(message, header)) {
        if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS)
            continue;
        size_t n = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < n; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof(fd));
            if (n_fds < PEER_MAX_FDS)
                fds[n_fds++] = fd;
            else
                close(fd);
        }
    }
    return n_fds;
}

static int receive_message(int fd, void *buffer, size_t size, size_t *ret_n_bytes, int *ret_fds, size_t max_fds,
                           size_t *ret_n_fds, int flags)
{
    struct iovec part = {.iov_base = buffer, .iov_len = size};
    union control control;
    struct msghdr message = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof(control.bytes)};
    ssize_t n;
    bool was_reset = false;
    for (;;) {
        n = recvmsg(fd, &message, flags | MSG_CMSG_CLOEXEC);
        if (n >= 0 || (errno != EINTR && (errno != ECONNRESET || was_reset)))
            break;
        /* A peer that hangs up without having read everything shows as a reset, once, before what it sent last. */
        was_reset = was_reset || errno == ECONNRESET;
    }
    if (n < 0)
        return errno == ECONNRESET || errno == ENOTCONN ? -EPIPE : -errno;

    int fds[PEER_MAX_FDS];
    size_t n_fds = take_descriptors(&message, fds);
    int error = 0;
    if (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC) || n_fds > max_fds)
        error = -EMSGSIZE;
    else if (n == 0)
        error = -EPIPE;
    if (error) {
        close_all(fds, n_fds);
        return error;
    }
    if (n_fds > 0)
        memcpy(ret_fds, fds, n_fds * sizeof(int));
    *ret_n_bytes = (size_t)n;
    if (ret_n_fds)
        *ret_n_fds = n_fds;
    return 0;
}

int peer_receive(int fd, void *buffer, size_t size, size_t *ret_n_bytes, int *ret_fds, size_t max_fds,
                 size_t *ret_n_fds)
{
    return receive_message(fd, buffer, size, ret_n_bytes, ret_fds, max_fds, ret_n_fds, 0);
}

int peer_try_receive(int fd, void *buffer, size_t size, size_t *ret_n_bytes, int *ret_fds, size_t max_fds,
                     size_t *ret_n_fds)
{
    return receive_message(fd, buffer, size, ret_n_bytes, ret_fds, max_fds, ret_n_fds, MSG_DONTWAIT);
}

int peer_credentials(int fd, pid_t *ret_pid, uid_t *ret_uid)
{
    struct ucred credentials;
    socklen_t size = sizeof(credentials);
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &credentials, &size) < 0)
        return -errno;
    *ret_pid = credentials.pid;
    *ret_uid = credentials.uid;
    return 0;
}

int peer_pidfd(pid_t pid, int *ret_fd)
{
    int fd = (int)syscall(SYS_pidfd_open, pid, 0); /* close-on-exec by itself */
    if (fd < 0)
        return -errno;
    *ret_fd = fd;
    return 0;
}
