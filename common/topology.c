/*
 * topology.c - hwloc: nodes, whose cpus are whose, and binding.
 *
 * hwloc's objects are the NUMA nodes that this process may take memory from; a node's cpus are its cpuset cut with what the
 * scheduler allows us (affinity of the main thread at load time, which cpusets are part of).
 */
#include "common/topology.h"

#include <assert.h>
#include <errno.h>
#include <hwloc.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGE_BYTES 4096

struct place {
    hwloc_obj_t object;
    hwloc_bitmap_t cpus; /* the node's own ones that we may use */
    uint32_t n_cores;
};

struct topology {
    hwloc_topology_t hwloc;
    hwloc_bitmap_t allowed_cpus;
    struct place *places; /* [n_nodes], by the kernel's number */
    uint32_t n_nodes;
    bool is_this_system;
    bool memory_is_hidden; /* no node tells its size: so in some virtual machines and containers */
};

/* hwloc leaves errno at 0 in some failures, and says EINVAL for "this operating system cannot". */
static int last_error(void)
{
    return errno ? -errno : -EIO;
}

static uint32_t count_cores(const struct topology *topology, hwloc_const_bitmap_t cpus)
{
    uint32_t n_cores = 0;
    hwloc_obj_t core = NULL;
    while ((core = hwloc_get_next_obj_by_type(topology->hwloc, HWLOC_OBJ_CORE, core)))
        n_cores += hwloc_bitmap_intersects(core->cpuset, cpus) ? 1 : 0;
    return n_cores ? n_cores : (uint32_t)hwloc_bitmap_weight(cpus); /* a machine that does not tell its cores */
}

static int by_number(const void *a, const void *b)
{
    const struct place *first = a, *second = b;
    return (first->object->os_index > second->object->os_index) - (first->object->os_index < second->object->os_index);
}

/* A node without cpus has those of its nearest neighbour in hwloc's eyes: they stay that neighbour's, which the kernel
 * numbers first. */
static int read_nodes(struct topology *topology)
{
    int n = hwloc_get_nbobjs_by_type(topology->hwloc, HWLOC_OBJ_NUMANODE);
    if (n < 1 || hwloc_bitmap_iszero(topology->allowed_cpus))
        return -EIO;
    topology->places = calloc((size_t)n, sizeof(*topology->places));
    hwloc_bitmap_t rest = hwloc_bitmap_dup(topology->allowed_cpus);
    int error = topology->places && rest ? 0 : -ENOMEM;
    if (!error) {
        topology->n_nodes = (uint32_t)n;
        topology->memory_is_hidden = true;
        for (uint32_t i = 0; i < topology->n_nodes; i++)
            topology->places[i].object = hwloc_get_obj_by_type(topology->hwloc, HWLOC_OBJ_NUMANODE, i);
        qsort(topology->places, topology->n_nodes, sizeof(*topology->places), by_number);
    }
    for (uint32_t i = 0; i < topology->n_nodes && !error; i++) {
        struct place *place = &topology->places[i];
        place->cpus = hwloc_bitmap_alloc();
        if (!place->cpus) {
            error = -ENOMEM;
            break;
        }
        hwloc_bitmap_and(place->cpus, place->object->cpuset, rest);
        hwloc_bitmap_andnot(rest, rest, place->cpus);
        place->n_cores = count_cores(topology, place->cpus);
        topology->memory_is_hidden = topology->memory_is_hidden && place->object->attr->numanode.local_memory == 0;
    }
    hwloc_bitmap_free(rest);
    return error;
}

static int read_allowed(struct topology *topology, const char *cpus)
{
    topology->allowed_cpus = hwloc_bitmap_alloc();
    if (!topology->allowed_cpus)
        return -ENOMEM;
    if (cpus && hwloc_bitmap_list_sscanf(topology->allowed_cpus, cpus) < 0)
        return -EINVAL;
    bool is_known = cpus || (topology->is_this_system &&
                             hwloc_get_cpubind(topology->hwloc, topology->allowed_cpus, HWLOC_CPUBIND_PROCESS) == 0);
    hwloc_const_bitmap_t allowed = hwloc_topology_get_allowed_cpuset(topology->hwloc);
    if (is_known)
        hwloc_bitmap_and(topology->allowed_cpus, topology->allowed_cpus, allowed);
    else
        hwloc_bitmap_copy(topology->allowed_cpus, allowed);
    return 0;
}

static int set_source(struct topology *topology, const char *source)
{
    errno = 0;
    if (source[0] == '<')
        return hwloc_topology_set_xmlbuffer(topology->hwloc, source, (int)strlen(source) + 1) < 0 ? last_error() : 0;
    return hwloc_topology_set_synthetic(topology->hwloc, source) < 0 ? last_error() : 0;
}

int topology_load_from(const char *source, const char *cpus, struct topology **ret_topology)
{
    struct topology *topology = calloc(1, sizeof(*topology));
    if (!topology)
        return -ENOMEM;
    errno = 0;
    if (hwloc_topology_init(&topology->hwloc) < 0) {
        int error = last_error();
        free(topology);
        return error;
    }
    /* Only cores and memory are of interest: asking PCI and GPUs costs start-up time. But what holds the cpus of a node
     * together (package, group, cache) must stay: without it hwloc gives all cpus of the machine to each node. */
    hwloc_topology_set_all_types_filter(topology->hwloc, HWLOC_TYPE_FILTER_KEEP_STRUCTURE);
    hwloc_topology_set_io_types_filter(topology->hwloc, HWLOC_TYPE_FILTER_KEEP_NONE);
    hwloc_topology_set_type_filter(topology->hwloc, HWLOC_OBJ_CORE, HWLOC_TYPE_FILTER_KEEP_ALL);
    int error = source ? set_source(topology, source) : 0;
    errno = 0;
    if (!error && hwloc_topology_load(topology->hwloc) < 0)
        error = last_error();
    if (!error) {
        topology->is_this_system = hwloc_topology_is_thissystem(topology->hwloc) != 0;
        error = read_allowed(topology, cpus);
    }
    if (!error)
        error = read_nodes(topology);
    if (error) {
        topology_free(topology);
        return error;
    }
    *ret_topology = topology;
    return 0;
}

int topology_load(struct topology **ret_topology)
{
    return topology_load_from(NULL, NULL, ret_topology);
}

struct topology *topology_free(struct topology *topology)
{
    if (!topology)
        return NULL;
    for (uint32_t i = 0; i < topology->n_nodes; i++)
        hwloc_bitmap_free(topology->places[i].cpus);
    free(topology->places);
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

static const struct place *place_at(const struct topology *topology, uint32_t index)
{
    return index < topology->n_nodes ? &topology->places[index] : NULL;
}

static uint64_t read_kib(const char *line, const char *key)
{
    const char *found = strstr(line, key);
    unsigned long long kib = 0;
    return found && sscanf(found + strlen(key), " %llu", &kib) == 1 ? kib * 1024 : 0;
}

/* Free, and used by files that can be read again, as the kernel estimates MemAvailable for the machine. A machine without
 * that file (no NUMA) answers for its only node. */
static uint64_t free_bytes(uint32_t os_index)
{
    char path[96], line[160];
    snprintf(path, sizeof(path), "/sys/devices/system/node/node%u/meminfo", os_index);
    FILE *file = fopen(path, "re");
    if (!file)
        return (uint64_t)sysconf(_SC_AVPHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
    uint64_t bytes = 0;
    while (fgets(line, sizeof(line), file))
        bytes +=
            read_kib(line, " MemFree:") + read_kib(line, " Inactive(file):") + read_kib(line, " Active(file):") / 2;
    fclose(file);
    return bytes;
}

static uint64_t memory_of(const struct topology *topology, const struct place *place)
{
    if (!topology->memory_is_hidden)
        return place->object->attr->numanode.local_memory;
    return (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE) / topology->n_nodes;
}

int topology_node(const struct topology *topology, uint32_t index, struct topology_node *ret_node)
{
    const struct place *place = place_at(topology, index);
    if (!place)
        return -ENOENT;
    struct topology_node node = {
        .os_index = place->object->os_index,
        .n_cpus = (uint32_t)hwloc_bitmap_weight(place->cpus),
        .n_cores = place->n_cores,
        .memory_bytes = memory_of(topology, place),
    };
    node.free_bytes = topology->is_this_system ? free_bytes(node.os_index) : node.memory_bytes;
    if (node.free_bytes > node.memory_bytes)
        node.free_bytes = node.memory_bytes;
    *ret_node = node;
    return 0;
}

int topology_find(const struct topology *topology, uint32_t os_index, uint32_t *ret_index)
{
    for (uint32_t i = 0; i < topology->n_nodes; i++) {
        if (topology->places[i].object->os_index == os_index) {
            *ret_index = i;
            return 0;
        }
    }
    return -ENOENT;
}

uint32_t topology_store_nodes(const struct topology *topology, uint32_t *ret_indices, uint32_t capacity)
{
    for (int with_cpus = 1; with_cpus >= 0; with_cpus--) {
        uint32_t n = 0;
        for (uint32_t i = 0; i < topology->n_nodes; i++) {
            const struct place *place = &topology->places[i];
            if (memory_of(topology, place) == 0 || (with_cpus && hwloc_bitmap_iszero(place->cpus)))
                continue;
            if (n < capacity)
                ret_indices[n] = i;
            n++;
        }
        if (n > 0)
            return n;
    }
    return 0;
}

const char *topology_list(const struct topology *topology, char *text, size_t text_size)
{
    size_t n = 0;
    text[0] = '\0';
    for (uint32_t i = 0; i < topology->n_nodes && n < text_size; i++)
        n += (size_t)snprintf(text + n, text_size - n, "%s%u", i ? ", " : "", topology->places[i].object->os_index);
    return text;
}

int topology_bind_thread(const struct topology *topology, uint32_t index)
{
    const struct place *place = place_at(topology, index);
    if (!place)
        return -ENOENT;
    if (!topology->is_this_system)
        return -ENOSYS;
    if (hwloc_bitmap_iszero(place->cpus))
        return -ENODATA;
    errno = 0;
    if (hwloc_set_cpubind(topology->hwloc, place->cpus, HWLOC_CPUBIND_THREAD | HWLOC_CPUBIND_STRICT) < 0)
        return last_error();
    return 0;
}

int topology_release_thread(const struct topology *topology)
{
    if (!topology->is_this_system)
        return -ENOSYS;
    errno = 0;
    if (hwloc_set_cpubind(topology->hwloc, topology->allowed_cpus, HWLOC_CPUBIND_THREAD) < 0)
        return last_error();
    return 0;
}

static int set_memory(const struct topology *topology, uint32_t index, void *address, uint64_t n_bytes, int flags)
{
    const struct place *place = place_at(topology, index);
    if (!place)
        return -ENOENT;
    assert((uintptr_t)address % PAGE_BYTES == 0);
    if (!topology->is_this_system)
        return -ENOSYS;
    errno = 0;
    if (hwloc_set_area_membind(topology->hwloc, address, n_bytes, place->object->nodeset, HWLOC_MEMBIND_BIND,
                               HWLOC_MEMBIND_BYNODESET | flags) < 0)
        return last_error();
    return 0;
}

int topology_bind_memory(const struct topology *topology, uint32_t index, void *address, uint64_t n_bytes)
{
    int error = set_memory(topology, index, address, n_bytes, HWLOC_MEMBIND_STRICT | HWLOC_MEMBIND_MIGRATE);
    if (error == 0 || error == -EPERM || error == -ENOSYS || error == -ENOENT)
        return error;
    /* Moving pages that are there is a wish, binding the others is the point. */
    return set_memory(topology, index, address, n_bytes, HWLOC_MEMBIND_STRICT);
}

int topology_prefer_memory(const struct topology *topology, uint32_t index, void *address, uint64_t n_bytes)
{
    return set_memory(topology, index, address, n_bytes, 0);
}

/* Distance between two nodes as the machine tells it; 0: it does not. */
static uint64_t distance_of(const struct topology *topology, const struct place *from, const struct place *to)
{
    struct hwloc_distances_s *matrix;
    unsigned n = 1;
    hwloc_uint64_t forward = 0, backward = 0;
    if (hwloc_distances_get_by_type(topology->hwloc, HWLOC_OBJ_NUMANODE, &n, &matrix,
                                    HWLOC_DISTANCES_KIND_MEANS_LATENCY, 0) < 0 ||
        n == 0)
        return 0;
    int error = hwloc_distances_obj_pair_values(matrix, from->object, to->object, &forward, &backward);
    hwloc_distances_release(topology->hwloc, matrix);
    return error < 0 ? 0 : forward;
}

int topology_near_memory(const struct topology *topology, uint32_t index, uint32_t *ret_index)
{
    const struct place *from = place_at(topology, index), *best = NULL;
    uint64_t least = 0;
    if (!from)
        return -ENOENT;
    if (memory_of(topology, from) > 0) {
        *ret_index = index;
        return 0;
    }
    for (uint32_t i = 0; i < topology->n_nodes; i++) {
        const struct place *place = &topology->places[i];
        if (memory_of(topology, place) == 0 || hwloc_bitmap_iszero(place->cpus))
            continue;
        uint64_t distance = distance_of(topology, from, place);
        if (!best || distance < least) {
            best = place;
            least = distance;
        }
    }
    if (!best)
        return -ENOENT;
    *ret_index = (uint32_t)(best - topology->places);
    return 0;
}

int topology_try_memory(const struct topology *topology, uint32_t index)
{
    void *page = mmap(NULL, PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED)
        return -errno;
    int result = topology_bind_memory(topology, index, page, PAGE_BYTES);
    munmap(page, PAGE_BYTES);
    return result;
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
