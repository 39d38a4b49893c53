/*
 * topology_resident.c - where pages lie, as /proc/self/numa_maps tells it. move_pages(2), which would tell too, is closed
 * to containers.
 *
 * A line is a mapping: "7f00c0200000 bind:1 file=/memfd:x dirty=512 N0=12 N1=500 kernelpagesize_kB=4".
 */
#include "common/topology.h"

#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

/* One mapping: pages by node times the size of its pages. False: no page size where there are pages. */
static bool read_line(char *line, uint32_t os_index, uint64_t *on_node, uint64_t *resident)
{
    uint64_t n_here = 0, n_all = 0, page_bytes = 0;
    char *rest = NULL;
    for (char *word = strtok_r(line, " \n", &rest); word; word = strtok_r(NULL, " \n", &rest)) {
        unsigned long long number, count;
        int end = 0;
        if (sscanf(word, "N%llu=%llu%n", &number, &count, &end) == 2 && word[end] == '\0') {
            n_all += count;
            n_here += number == os_index ? count : 0;
        } else if (sscanf(word, "kernelpagesize_kB=%llu%n", &count, &end) == 1 && word[end] == '\0') {
            page_bytes = count * 1024;
        }
    }
    if (n_all > 0 && page_bytes == 0)
        return false;
    *on_node += n_here * page_bytes;
    *resident += n_all * page_bytes;
    return true;
}

int topology_resident_read(FILE *numa_maps, uint32_t os_index, const struct topology_range *ranges, size_t n,
                           uint64_t *ret_bytes_on_node, uint64_t *ret_bytes_resident)
{
    char *line = NULL;
    size_t size = 0, at = 0;
    uint64_t on_node = 0, resident = 0;
    int error = 0;
    while (!error && at < n && getline(&line, &size, numa_maps) > 0) {
        char *after;
        unsigned long long start = strtoull(line, &after, 16);
        while (at < n &&
               start >= ranges[at].end) /* lines are sorted, too; the kernel walks what is not read for nothing */
            at++;
        if (after == line || *after != ' ')
            error = -EIO;
        else if (at < n && start >= ranges[at].first && !read_line(after, os_index, &on_node, &resident))
            error = -EIO;
    }
    free(line);
    if (error)
        return error;
    *ret_bytes_on_node = on_node;
    *ret_bytes_resident = resident;
    return 0;
}

static int by_address(const void *a, const void *b)
{
    const struct topology_range *first = a, *second = b;
    return (first->first > second->first) - (first->first < second->first);
}

int topology_resident_ranges(const struct topology *topology, uint32_t index, struct topology_range *ranges, size_t n,
                             uint64_t *ret_bytes_on_node, uint64_t *ret_bytes_resident)
{
    struct topology_node node;
    int error = topology_node(topology, index, &node);
    if (error)
        return error;
    FILE *file = fopen("/proc/self/numa_maps", "re");
    if (!file)
        return -errno;
    if (n > 0)
        qsort(ranges, n, sizeof(*ranges), by_address);
    error = topology_resident_read(file, node.os_index, ranges, n, ret_bytes_on_node, ret_bytes_resident);
    fclose(file);
    return error;
}

int topology_resident_bytes(const struct topology *topology, uint32_t index, const void *address, uint64_t n_bytes,
                            uint64_t *ret_bytes_on_node, uint64_t *ret_bytes_resident)
{
    struct topology_range range = {(uintptr_t)address, (uintptr_t)address + n_bytes};
    return topology_resident_ranges(topology, index, &range, 1, ret_bytes_on_node, ret_bytes_resident);
}
