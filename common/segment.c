/* segment.c - memfd_create(2), seals and aligned mappings. */
#include "common/segment.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25 /* Linux 6.1; older libc headers lack it */
#endif

#define PAGE_BYTES     4096
#define SEALS          (F_SEAL_SHRINK | F_SEAL_GROW)
#define PIECE_BYTES    ((uint64_t)1 << 30) /* of fallocate(): a signal can end it between pieces */
#define COLLAPSE_BYTES ((size_t)64 << 20)

/* First line of `path` that starts with `key`: the number after it. UINT64_MAX: no such file, line or number. */
static uint64_t read_number(const char *path, const char *key)
{
    FILE *file = fopen(path, "re");
    if (!file)
        return UINT64_MAX;
    char line[256];
    uint64_t value = UINT64_MAX;
    size_t key_length = strlen(key);
    while (fgets(line, sizeof(line), file)) {
        if (strncmp(line, key, key_length) != 0)
            continue;
        char *end;
        unsigned long long number = strtoull(line + key_length, &end, 10);
        if (end != line + key_length) /* "max" means no limit */
            value = number;
        break;
    }
    fclose(file);
    return value;
}

/* What one level of the control group hierarchy (version 2) leaves; pages of files that can be dropped count as left. */
static uint64_t group_leaves(const char *folder)
{
    char path[PATH_MAX + 32];
    snprintf(path, sizeof(path), "%s/memory.max", folder);
    uint64_t limit = read_number(path, "");
    if (limit == UINT64_MAX)
        return UINT64_MAX;
    snprintf(path, sizeof(path), "%s/memory.current", folder);
    uint64_t used = read_number(path, "");
    snprintf(path, sizeof(path), "%s/memory.stat", folder);
    uint64_t inactive = read_number(path, "inactive_file ");
    if (used == UINT64_MAX)
        return UINT64_MAX;
    if (inactive != UINT64_MAX)
        used -= inactive < used ? inactive : used;
    return used < limit ? limit - used : 0;
}

/* The smallest rest of our group and all groups above it. In a container the path may be one of outside: then only the
 * levels that exist count, and the root of what is mounted is the container's own group. */
static uint64_t control_group_leaves(void)
{
    FILE *file = fopen("/proc/self/cgroup", "re");
    if (!file)
        return UINT64_MAX;
    uint64_t least = UINT64_MAX;
    char line[PATH_MAX];
    while (fgets(line, sizeof(line), file)) {
        if (strncmp(line, "0::/", 4) != 0)
            continue;
        line[strcspn(line, "\n")] = '\0';
        char folder[PATH_MAX + 16];
        snprintf(folder, sizeof(folder), "/sys/fs/cgroup%s", line + 3);
        for (;;) {
            uint64_t rest = group_leaves(folder);
            least = rest < least ? rest : least;
            char *slash = strrchr(folder, '/');
            if (!slash || slash - folder < (ptrdiff_t)strlen("/sys/fs/cgroup"))
                break;
            *slash = '\0';
        }
        break;
    }
    fclose(file);
    return least;
}

uint64_t segment_available_bytes(void)
{
    uint64_t kib = read_number("/proc/meminfo", "MemAvailable:");
    uint64_t available = kib == UINT64_MAX ? UINT64_MAX : kib * 1024;
    uint64_t group = control_group_leaves();
    return group < available ? group : available;
}

/* Promises all pages. Without this a full machine would answer the first touch of a page with SIGBUS. */
static int promise_pages(int fd, uint64_t n_bytes)
{
    for (uint64_t offset = 0; offset < n_bytes; offset += PIECE_BYTES) {
        uint64_t rest = n_bytes - offset;
        int result;
        do
            result = fallocate(fd, 0, (off_t)offset, (off_t)(rest < PIECE_BYTES ? rest : PIECE_BYTES));
        while (result < 0 && errno == EINTR);
        if (result < 0)
            return -errno;
    }
    return 0;
}

int segment_create_bound(const char *name, uint64_t n_bytes,
                         int (*bind)(void *context, void *address, uint64_t n_bytes), void *context, int *ret_bound,
                         int *ret_fd)
{
    if (n_bytes == 0 || n_bytes % PAGE_BYTES != 0 || n_bytes > INT64_MAX)
        return -EINVAL;
    if (n_bytes > segment_available_bytes())
        return -ENOMEM; /* fallocate() would not say so: it would call the out-of-memory killer */
    int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0)
        return -errno;
    int bound = 0;
    int error = ftruncate(fd, (off_t)n_bytes) < 0 ? -errno : 0;
    if (!error && bind) {
        /* The policy of a shared mapping belongs to the file, so it outlives this one. */
        void *address = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (address == MAP_FAILED) {
            error = -errno;
        } else {
            bound = bind(context, address, n_bytes);
            munmap(address, n_bytes);
        }
    }
    if (!error)
        error = promise_pages(fd, n_bytes);
    if (!error && fcntl(fd, F_ADD_SEALS, SEALS | F_SEAL_SEAL) < 0)
        error = -errno;
    if (error) {
        close(fd);
        return error;
    }
    if (ret_bound)
        *ret_bound = bound;
    *ret_fd = fd;
    return 0;
}

int segment_create(const char *name, uint64_t n_bytes, int *ret_fd)
{
    return segment_create_bound(name, n_bytes, NULL, NULL, NULL, ret_fd);
}

int segment_check(int fd, uint64_t n_bytes, uint64_t *ret_n_bytes)
{
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0)
        return errno == EBADF ? -EBADF : -EBADMSG;
    if ((seals & SEALS) != SEALS)
        return -EBADMSG;
    struct stat status;
    if (fstat(fd, &status) < 0)
        return -errno;
    if (status.st_size <= 0 || (n_bytes != 0 && (uint64_t)status.st_size != n_bytes))
        return -EMSGSIZE;
    if ((uint64_t)status.st_blocks * 512 < (uint64_t)status.st_size)
        return -EBADMSG; /* has holes: pages that nobody promised */
    if (ret_n_bytes)
        *ret_n_bytes = (uint64_t)status.st_size;
    return 0;
}

int segment_map(int fd, uint64_t n_bytes, bool writable, struct segment_mapping *ret_mapping)
{
    uint64_t size = 0;
    int error = segment_check(fd, n_bytes, &size);
    if (error)
        return error;
    if (size > SIZE_MAX - 2 * SEGMENT_ALIGNMENT)
        return -ENOMEM;
    /* Reserve more than needed, map over the aligned part, give back the rest. */
    size_t span = (size + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
    size_t reserved = span + SEGMENT_ALIGNMENT;
    char *area = mmap(NULL, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (area == MAP_FAILED)
        return -errno;
    size_t before = (size_t)(-(uintptr_t)area % SEGMENT_ALIGNMENT);
    char *aligned = area + before;
    int protection = writable ? PROT_READ | PROT_WRITE : PROT_READ;
    if (mmap(aligned, size, protection, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
        error = -errno;
        munmap(area, reserved);
        return error;
    }
    if (before > 0)
        munmap(area, before);
    munmap(aligned + span, reserved - before - span);
    *ret_mapping = (struct segment_mapping){.address = aligned, .n_bytes = size, .writable = writable};
    return 0;
}

void segment_unmap(struct segment_mapping *mapping)
{
    if (!mapping || !mapping->address)
        return;
    munmap(mapping->address, mapping->n_bytes);
    *mapping = (struct segment_mapping){0};
}

int segment_reopen_readonly(int fd, int *ret_fd)
{
    char path[64];
    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    int readonly = open(path, O_RDONLY | O_CLOEXEC);
    if (readonly < 0)
        return -errno;
    *ret_fd = readonly;
    return 0;
}

/* ShmemPmdMapped of the mapping that starts at our address, from /proc/self/smaps. */
static uint64_t huge_bytes(const struct segment_mapping *mapping)
{
    FILE *file = fopen("/proc/self/smaps", "re");
    if (!file)
        return 0;
    char line[512];
    uint64_t total = 0;
    uintptr_t first = (uintptr_t)mapping->address;
    bool ours = false;
    while (fgets(line, sizeof(line), file)) {
        unsigned long long start, end, kib;
        if (sscanf(line, "%llx-%llx ", &start, &end) == 2)
            ours = start >= first && end <= first + mapping->n_bytes;
        else if (ours && sscanf(line, "ShmemPmdMapped: %llu", &kib) == 1)
            total += kib * 1024;
    }
    fclose(file);
    return total;
}

uint64_t segment_collapse(const struct segment_mapping *mapping)
{
    size_t whole = mapping->n_bytes / SEGMENT_ALIGNMENT * SEGMENT_ALIGNMENT;
    if (whole == 0)
        return 0;
    madvise(mapping->address, whole, MADV_HUGEPAGE);
    /* In large pieces: every call first waits for all cpus to drain their page lists, which took four times as long as
     * the copying with a call for each huge page. A piece that fails is huge up to where it failed. */
    for (size_t offset = 0; offset < whole; offset += COLLAPSE_BYTES) {
        size_t n = whole - offset < COLLAPSE_BYTES ? whole - offset : COLLAPSE_BYTES;
        madvise((char *)mapping->address + offset, n, MADV_COLLAPSE);
    }
    return huge_bytes(mapping);
}
