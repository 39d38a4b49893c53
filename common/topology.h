/*
 * topology.h - NUMA nodes: what there is, and binding threads and memory to one. The only user of hwloc.
 *
 * Nodes are numbered 0 .. n-1 in here (index); the kernel's number is os_index. Only nodes and cpus that this process is
 * allowed to use are seen. A machine without NUMA has one node.
 *
 * Threads    a loaded topology never changes; any thread may read it. Binding acts on the calling thread.
 * Errors     a container often has no right to bind: that is reported (-EPERM, -ENOSYS) and never fatal in here; the
 *            caller decides (--strict-numa).
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

struct topology;

struct topology_node {
    uint32_t os_index;
    uint32_t n_cpus;       /* allowed to this process; 0: a node with memory only */
    uint64_t memory_bytes; /* installed */
    uint64_t free_bytes;   /* at the time of the call; 0: unknown */
};

int topology_load(struct topology **ret_topology);         /* -ENOMEM, -EIO */
struct topology *topology_free(struct topology *topology); /* accepts NULL, returns NULL */

uint32_t topology_n_nodes(const struct topology *topology);        /* >= 1 */
uint32_t topology_n_allowed_cpus(const struct topology *topology); /* >= 1: affinity and cpuset of this process */
int topology_node(const struct topology *topology, uint32_t index, struct topology_node *ret_node); /* -ENOENT */

/* Binds the calling thread (and the threads it starts later) to the node's allowed cpus. -ENOENT no such node;
 * -ENODATA the node has no allowed cpu; -EPERM, -ENOSYS, -EXDEV as the kernel says. */
int topology_bind_thread(const struct topology *topology, uint32_t index);

/* Binds pages of a mapping to the node (strict: an allocation there fails rather than lands elsewhere). Call it before
 * first touch; pages that are there already are moved where possible. Address: page aligned. Errors as above. */
int topology_bind_memory(const struct topology *topology, uint32_t index, void *address, uint64_t n_bytes);

/* How many bytes of the resident pages of a mapping lie on the node, as the kernel reports it (first touched pages only).
 * -ENOSYS, -EPERM: the kernel does not say. */
int topology_resident_bytes(const struct topology *topology, uint32_t index, const void *address, uint64_t n_bytes,
                            uint64_t *ret_bytes_on_node, uint64_t *ret_bytes_resident);

/* Writes "node 0, 2 cpus, threads bound, memory bound" or "..., memory not bound (Operation not permitted)"; arguments
 * are the results of the two calls above. -EALREADY: was not tried ("threads not bound"). Returns text. */
const char *topology_describe(const struct topology *topology, uint32_t index, int thread_result, int memory_result,
                              char *text, size_t text_size);
