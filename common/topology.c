/*
 * topology.c - hwloc: nodes, binding, and proof of placement.
 *
 * hwloc's objects are all NUMA nodes that this process may use; a node's cpus are taken from its cpuset cut with what the
 * scheduler allows us (affinity of the main thread at load time, which cpusets are part of).
 */
#include "common/topology.h"

#include <assert.h>
#include <errno.h>
#include <hwloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define PAGE_BYTES      4096
#define PAGES_AT_A_TIME 1024 /* of topology_resident_bytes() */

struct topology {
    hwloc_topology_t hwloc;
    hwloc_bitmap_t allowed_cpus;
    uint32_t n_nodes;
};

/* hwloc leaves errno at 0 in some failures, and says EINVAL for "this operating system cannot". */
static int last_error(void)
{
    return errno ? -errno : -EIO;
}

int topology_load(struct topology **ret_topology)
{
    struct topology *topology = calloc(1, sizeof(*topology));
    if (!topology)
        return -ENOMEM;
    int error = 0;
    errno = 0;
    if (hwloc_topology_init(&topology->hwloc) < 0) {
        error = last_error();
        free(topology);
        return error;
    }
    /* Only cores and memory are of interest: asking PCI, GPUs and caches costs start-up time. */
    hwloc_topology_set_all_types_filter(topology->hwloc, HWLOC_TYPE_FILTER_KEEP_NONE);
    errno = 0;
    if (hwloc_topology_load(topology->hwloc) < 0)
        error = last_error();
    topology->allowed_cpus = error ? NULL : hwloc_bitmap_alloc();
    if (!error && !topology->allowed_cpus)
        error = -ENOMEM;
    if (!error) {
        if (hwloc_get_cpubind(topology->hwloc, topology->allowed_cpus, HWLOC_CPUBIND_PROCESS) < 0)
            hwloc_bitmap_copy(topology->allowed_cpus, hwloc_topology_get_allowed_cpuset(topology->hwloc));
        int n_nodes = hwloc_get_nbobjs_by_type(topology->hwloc, HWLOC_OBJ_NUMANODE);
        if (n_nodes < 1 || hwloc_bitmap_iszero(topology->allowed_cpus))
            error = -EIO;
        topology->n_nodes = (uint32_t)n_nodes;
    }
    if (error) {
        topology_free(topology);
        return error;
    }
    *ret_topology = topology;
    return 0;
}

struct topology *topology_free(struct topology *topology)
{
    if (!topology)
        return NULL;
    hwloc_bitmap_free(topology->allowed_cpus);
    hwloc_topology_destroy(topology->hwloc);
    free(topology);
    return NULL;
}

uint32_t topology_n_nodes(const struct topology *topology)
{
    return topology->n_nodes;
}

uint32_t topology_n_allowed_cpus(const struct topology *topology)
{
    return (uint32_t)hwloc_bitmap_weight(topology->allowed_cpus);
}

static hwloc_obj_t node_object(const struct topology *topology, uint32_t index)
{
    return index < topology->n_nodes ? hwloc_get_obj_by_type(topology->hwloc, HWLOC_OBJ_NUMANODE, index) : NULL;
}

/* The node's cpus that we may use. A bitmap to free, or NULL when out of memory. */
static hwloc_bitmap_t node_cpus(const struct topology *topology, hwloc_obj_t node)
{
    hwloc_bitmap_t cpus = hwloc_bitmap_alloc();
    if (cpus)
        hwloc_bitmap_and(cpus, node->cpuset, topology->allowed_cpus);
    return cpus;
}

/* "Node 0 MemFree:  123 kB" of sysfs; a machine without that file (no NUMA) answers for its only node. */
static uint64_t free_bytes(uint32_t os_index)
{
    char path[96], line[160];
    snprintf(path, sizeof(path), "/sys/devices/system/node/node%u/meminfo", os_index);
    FILE *file = fopen(path, "re");
    if (!file)
        return (uint64_t)sysconf(_SC_AVPHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
    uint64_t bytes = 0;
    while (fgets(line, sizeof(line), file)) {
        const char *found = strstr(line, "MemFree:");
        unsigned long long kib;
        if (found && sscanf(found, "MemFree: %llu", &kib) == 1)
            bytes = kib * 1024;
    }
    fclose(file);
    return bytes;
}

int topology_node(const struct topology *topology, uint32_t index, struct topology_node *ret_node)
{
    hwloc_obj_t object = node_object(topology, index);
    if (!object)
        return -ENOENT;
    hwloc_bitmap_t cpus = node_cpus(topology, object);
    if (!cpus)
        return -ENOMEM;
    struct topology_node node = {
        .os_index = object->os_index,
        .n_cpus = (uint32_t)hwloc_bitmap_weight(cpus),
        .memory_bytes = object->attr->numanode.local_memory,
        .free_bytes = free_bytes(object->os_index),
    };
    hwloc_bitmap_free(cpus);
    if (node.memory_bytes == 0) /* hidden in some virtual machines and containers */
        node.memory_bytes = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE) / topology->n_nodes;
    *ret_node = node;
    return 0;
}

int topology_bind_thread(const struct topology *topology, uint32_t index)
{
    hwloc_obj_t object = node_object(topology, index);
    if (!object)
        return -ENOENT;
    hwloc_bitmap_t cpus = node_cpus(topology, object);
    if (!cpus)
        return -ENOMEM;
    int error = 0;
    errno = 0;
    if (hwloc_bitmap_iszero(cpus))
        error = -ENODATA;
    else if (hwloc_set_cpubind(topology->hwloc, cpus, HWLOC_CPUBIND_THREAD | HWLOC_CPUBIND_STRICT) < 0)
        error = last_error();
    hwloc_bitmap_free(cpus);
    return error;
}

int topology_bind_memory(const struct topology *topology, uint32_t index, void *address, uint64_t n_bytes)
{
    hwloc_obj_t object = node_object(topology, index);
    if (!object)
        return -ENOENT;
    assert((uintptr_t)address % PAGE_BYTES == 0);
    errno = 0;
    if (hwloc_set_area_membind(topology->hwloc, address, n_bytes, object->nodeset, HWLOC_MEMBIND_BIND,
                               HWLOC_MEMBIND_BYNODESET | HWLOC_MEMBIND_STRICT | HWLOC_MEMBIND_MIGRATE) == 0)
        return 0;
    int error = last_error();
    if (error == -EPERM || error == -ENOSYS || error == -ENOENT)
        return error;
    /* Moving pages that are there is a wish, binding the others is the point. */
    errno = 0;
    if (hwloc_set_area_membind(topology->hwloc, address, n_bytes, object->nodeset, HWLOC_MEMBIND_BIND,
                               HWLOC_MEMBIND_BYNODESET | HWLOC_MEMBIND_STRICT) == 0)
        return 0;
    return last_error();
}

int topology_resident_bytes(const struct topology *topology, uint32_t index, const void *address, uint64_t n_bytes,
                            uint64_t *ret_bytes_on_node, uint64_t *ret_bytes_resident)
{
    hwloc_obj_t object = node_object(topology, index);
    if (!object)
        return -ENOENT;
    assert((uintptr_t)address % PAGE_BYTES == 0);
    /* move_pages() without target nodes only reports: hwloc's own query does not tell absent pages from others. */
    uint64_t n_pages = (n_bytes + PAGE_BYTES - 1) / PAGE_BYTES, on_node = 0, resident = 0;
    const char *page = address;
    while (n_pages > 0) {
        const void *pages[PAGES_AT_A_TIME];
        int nodes[PAGES_AT_A_TIME];
        size_t n = n_pages < PAGES_AT_A_TIME ? (size_t)n_pages : PAGES_AT_A_TIME;
        for (size_t i = 0; i < n; i++)
            pages[i] = page + i * PAGE_BYTES;
        if (syscall(SYS_move_pages, 0, n, pages, NULL, nodes, 0) < 0)
            return -errno;
        for (size_t i = 0; i < n; i++) {
            resident += nodes[i] >= 0 ? PAGE_BYTES : 0;
            on_node += nodes[i] == (int)object->os_index ? PAGE_BYTES : 0;
        }
        page += n * PAGE_BYTES;
        n_pages -= n;
    }
    *ret_bytes_on_node = on_node;
    *ret_bytes_resident = resident;
    return 0;
}

static const char *outcome(int result, char *text, size_t size)
{
    if (result == 0)
        return "bound";
    if (result == -EALREADY)
        return "not bound";
    snprintf(text, size, "not bound (%s)", strerror(-result));
    return text;
}

const char *topology_describe(const struct topology *topology, uint32_t index, int thread_result, int memory_result,
                              char *text, size_t text_size)
{
    struct topology_node node;
    char threads[96], memory[96];
    int error = topology_node(topology, index, &node);
    if (error)
        snprintf(text, text_size, "node %u of %u: %s", index, topology->n_nodes, strerror(-error));
    else
        snprintf(text, text_size, "node %u, %u cpu%s, threads %s, memory %s", node.os_index, node.n_cpus,
                 node.n_cpus == 1 ? "" : "s", outcome(thread_result, threads, sizeof(threads)),
                 outcome(memory_result, memory, sizeof(memory)));
    return text;
}
