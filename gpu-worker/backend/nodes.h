/*
 * nodes.h - a worker's threads and weights spread over NUMA nodes: who is where, and what became of it.
 *
 * Owner      the worker's main; the back end splits weights by it.
 * Threads    which thread is on which node never changes after nodes_new(). The results of binding are written by the
 *            threads that bind, and read once all have.
 * Invariant  at least two nodes, each with memory and at least one thread; threads of a node are neighbours in number.
 *
 * A node here is one with memory and allowed cpus. Cpus of a node without memory work for the nearest that has both.
 */
#pragma once

#include <stdatomic.h>
#include <stdint.h>

#include "common/topology.h"

struct nodes_node {
    uint32_t index;           /* in the topology */
    uint32_t os_index;        /* what people call it */
    uint32_t n_threads;       /* that read weights of this node */
    atomic_int thread_result; /* 0, or why one of them is not bound; -EALREADY: none was yet */
    atomic_int memory_result; /* 0, or why some of its memory is not bound; -EALREADY: none was yet */
};

struct nodes {
    const struct topology *topology; /* not owned */
    uint32_t n_nodes;
    uint32_t n_threads;
    uint32_t *node_of_thread;  /* [n_threads] 0 .. n_nodes - 1, ascending */
    uint32_t *place_of_thread; /* [n_threads] index in the topology of the node whose cpus it runs on */
    struct nodes_node nodes[TOPOLOGY_MAX_NODES];
};

/* Threads in proportion to allowed cpus. -ENODATA: one node only has memory and cpus; -ERANGE: fewer threads than nodes, or
 * more nodes than TOPOLOGY_MAX_NODES; -ENOMEM. */
int nodes_new(const struct topology *topology, uint32_t n_threads, struct nodes **ret_nodes);
struct nodes *nodes_free(struct nodes *nodes); /* accepts NULL, returns NULL */

/* first[n_nodes + 1]: node i has units first[i] .. first[i + 1] - 1 of n_units, in proportion to its threads; with few units
 * some nodes have none. */
void nodes_split(const struct nodes *nodes, uint32_t n_units, uint32_t *ret_first);

/* Binds the calling thread, number `thread` of the pool, to the cpus of its node. */
void nodes_bind_thread(struct nodes *nodes, uint32_t thread);

/* Has pages of a mapping come from the node while it has room; before first touch. Where that may not be done, they come from
 * where the thread runs that touches them first. */
void nodes_bind_memory(struct nodes *nodes, uint32_t node, void *address, uint64_t n_bytes);

/* The first reason why threads, memory of some node are not bound; 0: there is none. */
int nodes_threads_refused(const struct nodes *nodes);
int nodes_memory_refused(const struct nodes *nodes);

/* What the system says of the pages of a node's weights; `error`: that it could not be asked. */
struct nodes_pages {
    int error;
    uint64_t bytes, bytes_on_node;
};

/* "weights split over 2 nodes (node 0: 6 threads, 62.1 MiB, 100 % local; node 1: ...)", with what is not bound.
 * pages [n_nodes]. Returns text. */
const char *nodes_describe(const struct nodes *nodes, const struct nodes_pages *pages, char *text, size_t text_size);

/* Bytes of all nodes that are on their node, in percent, rounded down; 100 where there are none; -1: not known. */
int nodes_percent_local(const struct nodes *nodes, const struct nodes_pages *pages);
