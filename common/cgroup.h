/*
 * cgroup.h - what the control groups of this process, version 1 or 2, let it have of memory.
 *
 * In a container /proc/self/cgroup may name a group of outside: then only the levels that exist inside count, and the root
 * of what is mounted is the container's own group.
 *
 * Threads    any; files are read at each call.
 */
#pragma once

#include <stdint.h>

struct cgroup_memory {
    uint64_t limit_bytes; /* the smallest of our group and all above it; UINT64_MAX: no limit */
    uint64_t left_bytes;  /* the smallest rest of them; pages of files that can be dropped count as left */
};

void cgroup_memory(struct cgroup_memory *ret_memory);

/* The same with other files, for tests: of /proc/self/cgroup and /sys/fs/cgroup. */
void cgroup_memory_at(const char *groups_path, const char *root, struct cgroup_memory *ret_memory);

/* First line of the file that starts with `key`: the number after it. UINT64_MAX: no such file, line or number. */
uint64_t cgroup_read_number(const char *path, const char *key);
