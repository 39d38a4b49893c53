/* nodes.c - see nodes.h. */
#include "gpu-worker/backend/nodes.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Cpus of one node of the topology. */
struct crew {
    uint32_t place; /* index in the topology */
    uint32_t home;  /* index of the node that has its memory */
    uint32_t n_cpus;
    uint32_t n_threads;
};

/* Every place with cpus; returns how many. */
static uint32_t find_crews(const struct topology *topology, struct crew *crews)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < topology_n_nodes(topology); i++) {
        struct topology_node node;
        uint32_t home;
        if (topology_node(topology, i, &node) == 0 && node.n_cpus > 0 && topology_near_memory(topology, i, &home) == 0)
            crews[n++] = (struct crew){.place = i, .home = home, .n_cpus = node.n_cpus};
    }
    return n;
}

/* One thread for each node, then always where cpus have the fewest. */
static void share_threads(struct crew *crews, uint32_t n_crews, uint32_t n_threads)
{
    uint32_t left = n_threads;
    for (uint32_t i = 0; i < n_crews; i++) {
        crews[i].n_threads = crews[i].place == crews[i].home;
        left -= crews[i].n_threads;
    }
    for (; left > 0; left--) {
        struct crew *next = &crews[0];
        for (uint32_t i = 1; i < n_crews; i++)
            if ((uint64_t)crews[i].n_threads * next->n_cpus < (uint64_t)next->n_threads * crews[i].n_cpus)
                next = &crews[i];
        next->n_threads++;
    }
}

static void number_threads(struct nodes *nodes, const struct crew *crews, uint32_t n_crews)
{
    uint32_t thread = 0;
    for (uint32_t n = 0; n < nodes->n_nodes; n++) {
        for (uint32_t i = 0; i < n_crews; i++) {
            if (crews[i].home != nodes->nodes[n].index)
                continue;
            nodes->nodes[n].n_threads += crews[i].n_threads;
            for (uint32_t k = 0; k < crews[i].n_threads; k++, thread++) {
                nodes->node_of_thread[thread] = n;
                nodes->place_of_thread[thread] = crews[i].place;
            }
        }
    }
}

static int spread(struct nodes *nodes, struct crew *crews)
{
    const uint32_t n_crews = find_crews(nodes->topology, crews);
    for (uint32_t i = 0; i < n_crews; i++) {
        struct topology_node node;
        if (crews[i].place != crews[i].home || topology_node(nodes->topology, crews[i].home, &node) < 0)
            continue;
        if (nodes->n_nodes == TOPOLOGY_MAX_NODES)
            return -ERANGE;
        struct nodes_node *to = &nodes->nodes[nodes->n_nodes++];
        to->index = crews[i].home;
        to->os_index = node.os_index;
        atomic_init(&to->thread_result, -EALREADY);
        atomic_init(&to->memory_result, -EALREADY);
    }
    if (nodes->n_nodes < 2)
        return -ENODATA;
    if (nodes->n_threads < nodes->n_nodes)
        return -ERANGE;
    share_threads(crews, n_crews, nodes->n_threads);
    number_threads(nodes, crews, n_crews);
    return 0;
}

int nodes_new(const struct topology *topology, uint32_t n_threads, struct nodes **ret_nodes)
{
    struct nodes *nodes = calloc(1, sizeof(*nodes));
    struct crew *crews = calloc(topology_n_nodes(topology), sizeof(*crews));
    int error = nodes && crews ? 0 : -ENOMEM;
    if (!error) {
        nodes->topology = topology;
        nodes->n_threads = n_threads;
        nodes->node_of_thread = calloc((size_t)n_threads + 1, sizeof(*nodes->node_of_thread));
        nodes->place_of_thread = calloc((size_t)n_threads + 1, sizeof(*nodes->place_of_thread));
        error = nodes->node_of_thread && nodes->place_of_thread ? spread(nodes, crews) : -ENOMEM;
    }
    free(crews);
    if (error) {
        nodes_free(nodes);
        return error;
    }
    *ret_nodes = nodes;
    return 0;
}

struct nodes *nodes_free(struct nodes *nodes)
{
    if (nodes) {
        free(nodes->node_of_thread);
        free(nodes->place_of_thread);
        free(nodes);
    }
    return NULL;
}

void nodes_split(const struct nodes *nodes, uint32_t n_units, uint32_t *ret_first)
{
    uint64_t n_before = 0;
    for (uint32_t i = 0; i < nodes->n_nodes; i++) {
        ret_first[i] = (uint32_t)((n_units * n_before * 2 + nodes->n_threads) / (2 * (uint64_t)nodes->n_threads));
        n_before += nodes->nodes[i].n_threads;
    }
    ret_first[nodes->n_nodes] = n_units;
}

/* What is told is the first failure, or that all went well. */
static void record(atomic_int *result, int outcome)
{
    int before = -EALREADY;
    if (!atomic_compare_exchange_strong(result, &before, outcome) && before == 0 && outcome < 0)
        atomic_store(result, outcome);
}

void nodes_bind_thread(struct nodes *nodes, uint32_t thread)
{
    struct nodes_node *node = &nodes->nodes[nodes->node_of_thread[thread]];
    record(&node->thread_result, topology_bind_thread(nodes->topology, nodes->place_of_thread[thread]));
}

void nodes_bind_memory(struct nodes *nodes, uint32_t node, void *address, uint64_t n_bytes)
{
    struct nodes_node *to = &nodes->nodes[node];
    record(&to->memory_result, topology_prefer_memory(nodes->topology, to->index, address, n_bytes));
}

int nodes_threads_refused(const struct nodes *nodes)
{
    for (uint32_t i = 0; i < nodes->n_nodes; i++) {
        const int result = atomic_load(&nodes->nodes[i].thread_result);
        if (result < 0 && result != -EALREADY)
            return result;
    }
    return 0;
}

int nodes_memory_refused(const struct nodes *nodes)
{
    for (uint32_t i = 0; i < nodes->n_nodes; i++) {
        const int result = atomic_load(&nodes->nodes[i].memory_result);
        if (result < 0 && result != -EALREADY)
            return result;
    }
    return 0;
}

static int percent(uint64_t part, uint64_t all)
{
    return all == 0 ? 100 : (int)((double)part * 100 / (double)all);
}

int nodes_percent_local(const struct nodes *nodes, const struct nodes_pages *pages)
{
    uint64_t on_node = 0, all = 0;
    for (uint32_t i = 0; i < nodes->n_nodes; i++) {
        if (pages[i].error)
            return -1;
        on_node += pages[i].bytes_on_node;
        all += pages[i].bytes;
    }
    return percent(on_node, all);
}

static const char *not_bound(const char *what, int result, char *text, size_t size)
{
    if (result == 0 || result == -EALREADY)
        return "";
    snprintf(text, size, "%s not bound (%s), ", what, strerror(-result));
    return text;
}

const char *nodes_describe(const struct nodes *nodes, const struct nodes_pages *pages, char *text, size_t text_size)
{
    size_t n = (size_t)snprintf(text, text_size, "weights split over %u nodes (", nodes->n_nodes);
    for (uint32_t i = 0; i < nodes->n_nodes && n < text_size; i++) {
        const struct nodes_node *node = &nodes->nodes[i];
        char threads[96], memory[96], local[48] = "pages not known";
        if (!pages[i].error)
            snprintf(local, sizeof(local), "%.1f MiB, %d %% local", (double)pages[i].bytes / 1048576,
                     percent(pages[i].bytes_on_node, pages[i].bytes));
        n += (size_t)snprintf(text + n, text_size - n, "%snode %u: %u thread%s, %s%s%s", i ? "; " : "", node->os_index,
                              node->n_threads, node->n_threads == 1 ? "" : "s",
                              not_bound("threads", atomic_load(&node->thread_result), threads, sizeof(threads)),
                              not_bound("memory", atomic_load(&node->memory_result), memory, sizeof(memory)), local);
    }
    if (n < text_size)
        snprintf(text + n, text_size - n, ")");
    return text;
}
