/*
 * topology.h - NUMA nodes: what there is, binding threads and memory to one, and where pages lie. The only user of hwloc.
 *
 * Nodes are numbered 0 .. n-1 in here (index), in the order of the kernel's number (os_index), which may have gaps and is
 * what people write. Only nodes and cpus that this process is allowed to use are seen; offline cpus are not. Every cpu
 * belongs to one node at most: a node with memory only has none. A machine without NUMA has one node.
 *
 * Threads    a loaded topology never changes; any thread may read it. Binding acts on the calling thread.
 * Errors     a container often has no right to bind: that is reported (-EPERM, -ENOSYS) and never fatal in here; the
 *            caller decides (--strict-numa).
 */
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#define TOPOLOGY_MAX_NODES    64u /* that get a store */
#define TOPOLOGY_CPUS_TO_SPIN 8u /* with fewer, workers and stores share theirs: who spins keeps another from working */
/* For people whose memory may not be bound (-EPERM). */
#define TOPOLOGY_BINDING_HELP                                                                                          \
    "in a container this needs 'cap_add: [SYS_NICE]' in compose.yaml (docker run: --cap-add SYS_NICE)"

struct topology;

struct topology_node {
    uint32_t os_index;
    uint32_t n_cpus;       /* allowed to this process; 0: a node with memory only, or all of its cpus are forbidden */
    uint32_t n_cores;      /* that these cpus are threads of */
    uint64_t memory_bytes; /* installed; 0: a node without memory */
    uint64_t free_bytes;   /* at the time of the call, files that can be dropped included */
};

int topology_load(struct topology **ret_topology); /* -ENOMEM, -EIO */

/* Another machine, for tests: `source` is hwloc's XML text (it begins with '<') or synthetic description, NULL: this one;
 * `cpus` is a list as the kernel writes it ("0-3,8"), NULL: what we may use. Nothing can be bound there (-ENOSYS). Without
 * a source hwloc looks at HWLOC_XMLFILE and HWLOC_SYNTHETIC. -EINVAL: not understood; -EIO: none of the cpus is there. */
int topology_load_from(const char *source, const char *cpus, struct topology **ret_topology);
struct topology *topology_free(struct topology *topology); /* accepts NULL, returns NULL */

uint32_t topology_n_nodes(const struct topology *topology);        /* >= 1 */
uint32_t topology_n_allowed_cpus(const struct topology *topology); /* >= 1: affinity and cpuset of this process */
int topology_node(const struct topology *topology, uint32_t index, struct topology_node *ret_node); /* -ENOENT */

int topology_find(const struct topology *topology, uint32_t os_index, uint32_t *ret_index); /* -ENOENT */

/* Nodes that should have a store: with memory and allowed cpus; when there is none (cpus of one node, memory of another),
 * those with memory. Returns how many there are and writes the first `capacity` of them. */
uint32_t topology_store_nodes(const struct topology *topology, uint32_t *ret_indices, uint32_t capacity);

/*
 * The node that a PCI device ("0000:65:00.0") is attached to, as the kernel tells. -EINVAL: no such address; -ENODEV: no such
 * device; -ENODATA: the machine has several nodes and does not tell; -EACCES: none of those that this process may use.
 * (topology_pci.c)
 */
int topology_node_of_pci(const struct topology *topology, const char *address, uint32_t *ret_index);

/* The same of another folder than /sys/bus/pci/devices. */
int topology_node_of_pci_in(const struct topology *topology, const char *folder, const char *address,
                            uint32_t *ret_index);

/* Writes the kernel's numbers, "0, 1, 8". Returns text. */
const char *topology_list(const struct topology *topology, char *text, size_t text_size);

/* Binds the calling thread (and the threads it starts later) to the node's allowed cpus. -ENOENT no such node;
 * -ENODATA the node has no allowed cpu; -EPERM, -ENOSYS, -EXDEV as the kernel says. */
int topology_bind_thread(const struct topology *topology, uint32_t index);

/* Lets the calling thread run on every cpu that this process may use, as before it was bound. -ENOSYS, -EPERM. */
int topology_release_thread(const struct topology *topology);

/* Binds pages of a mapping to the node (strict: an allocation there fails rather than lands elsewhere). Call it before
 * first touch; pages that are there already are moved where possible. Address: page aligned. Errors as above. */
int topology_bind_memory(const struct topology *topology, uint32_t index, void *address, uint64_t n_bytes);

/* The same, but an allocation for which the node has no room lands elsewhere: for memory that nobody promised. */
int topology_prefer_memory(const struct topology *topology, uint32_t index, void *address, uint64_t n_bytes);

/* The node that threads of this one should have their memory on: itself if it has memory, else the nearest with memory and
 * allowed cpus, of several the first. -ENOENT: no such node, or none has both. */
int topology_near_memory(const struct topology *topology, uint32_t index, uint32_t *ret_index);

/* Whether memory can be bound there at all, tried with a page. Errors as above. */
int topology_try_memory(const struct topology *topology, uint32_t index);

/* How many bytes of a mapping are mapped by pages that are there, and how many of these lie on the node: read from
 * /proc/self/numa_maps, which needs no rights. `address` .. `n_bytes` are whole mappings. Pages that this process has not
 * touched yet are not counted. Walks the page table: about a second for 100 GiB of small pages. -ENOENT: no such node, or a kernel
 * without NUMA; -EIO: the file makes no sense. (topology_resident.c) */
int topology_resident_bytes(const struct topology *topology, uint32_t index, const void *address, uint64_t n_bytes,
                            uint64_t *ret_bytes_on_node, uint64_t *ret_bytes_resident);

/* The same for many mappings at once, each of whole pages; sorts them. One look at the file. */
struct topology_range {
    uintptr_t first, end;
};
int topology_resident_ranges(const struct topology *topology, uint32_t index, struct topology_range *ranges, size_t n,
                             uint64_t *ret_bytes_on_node, uint64_t *ret_bytes_resident);

/* The same from a text of that format, for the node of the kernel's number; ranges are sorted. */
int topology_resident_read(FILE *numa_maps, uint32_t os_index, const struct topology_range *ranges, size_t n,
                           uint64_t *ret_bytes_on_node, uint64_t *ret_bytes_resident);

/* Writes "node 0, 2 cpus, threads bound, memory bound" or "..., memory not bound (Operation not permitted)"; arguments
 * are the results of the two calls above. -EALREADY: was not tried ("threads not bound"). Returns text. */
const char *topology_describe(const struct topology *topology, uint32_t index, int thread_result, int memory_result,
                              char *text, size_t text_size);
