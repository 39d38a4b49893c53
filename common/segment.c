/* segment.c - memfd_create(2), seals and aligned mappings. */
#include "common/segment.h"
#include "common/cgroup.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25 /* Linux 6.1; older libc headers lack it */
#endif

#ifndef MFD_HUGE_2MB
#define MFD_HUGE_2MB (21u << 26)
#endif

#define PAGE_BYTES     4096
#define SEALS          (F_SEAL_SHRINK | F_SEAL_GROW)
#define PIECE_BYTES    ((uint64_t)1 << 30) /* of fallocate(): a signal can end it between pieces */
#define COLLAPSE_BYTES ((size_t)64 << 20)

uint64_t segment_available_bytes(void)
{
    uint64_t kib = cgroup_read_number("/proc/meminfo", "MemAvailable:");
    uint64_t available = kib == UINT64_MAX ? UINT64_MAX : kib * 1024;
    struct cgroup_memory group;
    cgroup_memory(&group);
    return group.left_bytes < available ? group.left_bytes : available;
}

static int map_aligned(int fd, uint64_t size, bool writable, struct segment_mapping *ret_mapping)
{
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
        int error = -errno;
        munmap(area, reserved);
        return error;
    }
    if (before > 0)
        munmap(area, before);
    munmap(aligned + span, reserved - before - span);
    *ret_mapping = (struct segment_mapping){.address = aligned, .n_bytes = size, .writable = writable};
    return 0;
}

/* Promises all pages. Without this a full machine would answer the first touch of a page with SIGBUS. */
static int promise_pages(int fd, uint64_t n_bytes, const struct segment_terms *terms)
{
    for (uint64_t offset = 0; offset < n_bytes; offset += PIECE_BYTES) {
        uint64_t rest = n_bytes - offset;
        size_t n = rest < PIECE_BYTES ? rest : PIECE_BYTES;
        int result;
        int told = terms->promised ? terms->promised(terms->context, offset, n_bytes) : 0;
        if (told < 0)
            return told;
        do
            result = fallocate(fd, 0, (off_t)offset, (off_t)n);
        while (result < 0 && errno == EINTR);
        if (result < 0)
            return errno == ENOSPC ? -ENOMEM : -errno; /* what the pool of huge pages says */
    }
    return terms->promised ? terms->promised(terms->context, n_bytes, n_bytes) : 0;
}

int segment_create_on(const char *name, uint64_t n_bytes, const struct segment_terms *terms, int *ret_bound,
                      int *ret_fd)
{
    uint64_t page_bytes = terms->from_huge_pool ? SEGMENT_ALIGNMENT : PAGE_BYTES;
    if (n_bytes == 0 || n_bytes % page_bytes != 0 || n_bytes > INT64_MAX)
        return -EINVAL;
    if (!terms->from_huge_pool && n_bytes > segment_available_bytes())
        return -ENOMEM; /* fallocate() would not say so: it would call the out-of-memory killer */
    int fd =
        memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING | (terms->from_huge_pool ? MFD_HUGETLB | MFD_HUGE_2MB : 0));
    if (fd < 0)
        return -errno;
    int bound = 0;
    int error = ftruncate(fd, (off_t)n_bytes) < 0 ? -errno : 0;
    struct segment_mapping mapping = {0};
    if (!error && terms->bind)
        error = map_aligned(fd, n_bytes, true, &mapping);
    /* The policy of a shared mapping belongs to the file, so it outlives this one. */
    if (!error && terms->bind)
        bound = terms->bind(terms->context, mapping.address, n_bytes);
    if (!error)
        error = promise_pages(fd, n_bytes, terms);
    segment_unmap(&mapping);
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
    return segment_create_on(name, n_bytes, &(const struct segment_terms){0}, NULL, ret_fd);
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
    return error ? error : map_aligned(fd, size, writable, ret_mapping);
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

uint64_t segment_collapse(const struct segment_mapping *mapping, const struct segment_terms *terms)
{
    size_t whole = mapping->n_bytes / SEGMENT_ALIGNMENT * SEGMENT_ALIGNMENT;
    if (whole == 0)
        return 0;
    madvise(mapping->address, whole, MADV_HUGEPAGE);
    /* In large pieces: every call first waits for all cpus to drain their page lists, which took four times as long as
     * the copying with a call for each huge page. A piece that fails is huge up to where it failed. */
    for (size_t offset = 0; offset < whole; offset += COLLAPSE_BYTES) {
        size_t n = whole - offset < COLLAPSE_BYTES ? whole - offset : COLLAPSE_BYTES;
        if (terms->promised && terms->promised(terms->context, offset, whole) < 0)
            break;
        madvise((char *)mapping->address + offset, n, MADV_COLLAPSE);
    }
    return huge_bytes(mapping);
}
