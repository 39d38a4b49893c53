/*
 * segment.h - shared memory as sealed memfds.
 *
 * A segment is a memfd that can neither shrink nor grow, with all of its pages promised by the kernel: once it is mapped,
 * touching it cannot raise SIGBUS. A descriptor from a peer is not trusted: segment_map() checks seals and size first.
 *
 * Owner      whoever created it; descriptors travel by SCM_RIGHTS, the pages live as long as one of them.
 * Threads    any; a mapping is plain memory.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#define SEGMENT_ALIGNMENT ((uint64_t)2 << 20) /* of mapped addresses; sizes only need to be whole pages */

struct segment_mapping {
    void *address;
    uint64_t n_bytes;
    bool writable;
};

/* Creates, promises and seals n_bytes (> 0, a multiple of 4096) of zeroes. `name` shows in /proc only.
 * -ENOMEM more than what this machine or this control group has left (asked before taking: nobody is killed for it);
 * -ENOSPC; -EINVAL; -EMFILE, -ENFILE. */
int segment_create(const char *name, uint64_t n_bytes, int *ret_fd);

/* Where pages come from and who hears of it; all optional. */
struct segment_terms {
    void *context;
    /* Called on a mapping of the segment before its pages exist (topology_bind_memory()); its result is given back and is
     * not an error here. */
    int (*bind)(void *context, void *address, uint64_t n_bytes);
    /* Before each piece of 1 GiB and at the end; a piece takes part of a second. An error ends it there, with that error. */
    int (*promised)(void *context, uint64_t n_done, uint64_t n_bytes);
    bool from_huge_pool; /* the pages that vm.nr_hugepages keeps; n_bytes is a multiple of 2 MiB */
};

/* The same on these terms. -ENOMEM also: the pool has not enough pages, there or on the node; -EINVAL, -ENOSYS: this kernel has no huge pages. */
int segment_create_on(const char *name, uint64_t n_bytes, const struct segment_terms *terms, int *ret_bound,
                      int *ret_fd);

/* What segment_create() would grant at most now: the smaller of available memory and what the control group leaves. */
uint64_t segment_available_bytes(void);

/* Is fd a segment of exactly n_bytes (0: of any size > 0)? -EBADMSG: not a memfd, not sealed, or with holes; -EMSGSIZE:
 * other size;
 * -EBADF. ret_n_bytes may be NULL. */
int segment_check(int fd, uint64_t n_bytes, uint64_t *ret_n_bytes);

/* Maps a checked segment at a multiple of SEGMENT_ALIGNMENT. The descriptor may be closed afterwards. Errors of
 * segment_check(); -EACCES: writable asked of a read-only descriptor; -ENOMEM. */
int segment_map(int fd, uint64_t n_bytes, bool writable, struct segment_mapping *ret_mapping);
void segment_unmap(struct segment_mapping *mapping); /* accepts NULL and an unmapped one; leaves it zeroed */

/* A new descriptor of the same segment that cannot be mapped writable (against accidents: /proc gives it back to an enemy
 * of the same uid). -ENOENT: no /proc. */
int segment_reopen_readonly(int fd, int *ret_fd);

/* Asks for huge pages for what is resident (best effort). terms->promised hears of it in pieces of 64 MiB, and
 * an error of it ends it there. Returns the
 * bytes that the kernel says are mapped by huge pages. */
uint64_t segment_collapse(const struct segment_mapping *mapping, const struct segment_terms *terms);
