/*
 * peer.h - Unix SEQPACKET sockets between processes of one host: messages, descriptors, and the news of a death.
 *
 * One socket per peer carries registration, descriptors of segments, and health; when it hangs up the peer is dead
 * (-EPIPE). Message boundaries are kept by the kernel.
 *
 * Threads    a descriptor is used by one thread at a time (one sending and one receiving is fine).
 * Ownership  descriptors that are sent stay the sender's; received ones belong to the receiver, close-on-exec set. After
 *            an error of peer_receive() there is nothing to close.
 * SIGPIPE    is never raised.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define PEER_MAX_MESSAGE ((size_t)192 << 10) /* fits the kernel's default limit of a socket buffer */
#define PEER_MAX_FDS     32

/* Listens on `path` (mode 0600), non-blocking. A socket file that nobody listens on any more is replaced.
 * -EADDRINUSE: a live process listens there; -ENAMETOOLONG; -EEXIST: the path is no socket. */
int peer_listen(const char *path, int *ret_fd);
int peer_unlisten(int fd, const char *path); /* closes and unlinks; fd < 0 is fine; returns -1 */

int peer_accept(int listen_fd, int *ret_fd); /* never waits: -EAGAIN; -EMFILE ... The result is blocking. */

/* Connects, trying again until the deadline while there is no such socket or nobody listens. -ETIMEDOUT, -ENAMETOOLONG,
 * -EACCES. With a deadline that has passed: one try, -ENOENT or -ECONNREFUSED. */
int peer_connect(const char *path, uint64_t deadline_us, int *ret_fd);

/* A connected pair, for a supervisor and its child and for tests. */
int peer_pair(int ret_fds[2]);

/* One message of 1 .. PEER_MAX_MESSAGE bytes with up to PEER_MAX_FDS descriptors; all or nothing.
 * peer_send() waits for room; peer_try_send() never waits: -EAGAIN. -EPIPE: the peer is gone; -EMSGSIZE; -EINVAL. */
int peer_send(int fd, const void *bytes, size_t n_bytes, const int *fds, size_t n_fds);
int peer_try_send(int fd, const void *bytes, size_t n_bytes, const int *fds, size_t n_fds);

/* One message. peer_receive() waits for it, peer_try_receive() does not: -EAGAIN. -EPIPE: hang-up; -EMSGSIZE: the message
 * is longer than `size` or brings more than max_fds descriptors: it is dropped and its descriptors are closed.
 * ret_fds may be NULL with max_fds 0. */
int peer_receive(int fd, void *buffer, size_t size, size_t *ret_n_bytes, int *ret_fds, size_t max_fds,
                 size_t *ret_n_fds);
int peer_try_receive(int fd, void *buffer, size_t size, size_t *ret_n_bytes, int *ret_fds, size_t max_fds,
                     size_t *ret_n_fds);

/* Who is at the other end, as the kernel knows it. A caller refuses a uid that is neither its own nor 0. */
int peer_credentials(int fd, pid_t *ret_pid, uid_t *ret_uid);

/* A descriptor that becomes readable when the process ends. -ESRCH: it has; -ENOSYS. */
int peer_pidfd(pid_t pid, int *ret_fd);
