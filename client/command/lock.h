/*
 * lock.h - one `hcattn up` per runtime directory: <runtime dir>/hcattn.lock, held by flock().
 *
 * The descriptor is inherited by every process that `up` starts, so the lock is held as long as one of them lives. The
 * file says who: pid of `up` and process group of the others.
 */
#pragma once

#include <sys/types.h>

struct lock_owner {
    pid_t pid;   /* of `up`; 0: not known */
    pid_t group; /* of what it started; 0: none yet */
};

/* -EWOULDBLOCK: held; *ret_owner (may be NULL) says by whom. Errors of open. */
int lock_take(const char *directory, int *ret_fd, struct lock_owner *ret_owner);
int lock_write(int fd, const struct lock_owner *owner);

/* 1 held (*ret_owner), 0 free. Takes nothing. */
int lock_probe(const char *directory, struct lock_owner *ret_owner);
