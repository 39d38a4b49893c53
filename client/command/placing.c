/* placing.c - see placing.h. */
#include "client/command/placing.h"
#include "common/budget.h"
#include "common/topology.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DEFAULT_PERCENT 50u

static int add_node(const struct topology *topology, unsigned long number, uint32_t *nodes, uint32_t *n_nodes,
                    char sentence[PLACING_TEXT])
{
    char list[PLACING_TEXT / 2];
    struct topology_node node = {0};
    uint32_t index = 0;
    if (number > UINT32_MAX || topology_find(topology, (uint32_t)number, &index) < 0 ||
        topology_node(topology, index, &node) < 0) {
        snprintf(sentence, PLACING_TEXT, "--nodes: there is no node %lu that may be used; there are %s", number,
                 topology_list(topology, list, sizeof(list)));
        return -EINVAL;
    }
    if (node.memory_bytes == 0) {
        snprintf(sentence, PLACING_TEXT, "--nodes: node %lu has no memory", number);
        return -EINVAL;
    }
    for (uint32_t i = 0; i < *n_nodes; i++) {
        if (nodes[i] == index) {
            snprintf(sentence, PLACING_TEXT, "--nodes: node %lu is named twice", number);
            return -EINVAL;
        }
    }
    if (*n_nodes >= PLACING_MAX_STORES) {
        snprintf(sentence, PLACING_TEXT, "--nodes: more than %u nodes", PLACING_MAX_STORES);
        return -EINVAL;
    }
    nodes[(*n_nodes)++] = index;
    return 0;
}

/* "0,2" */
static int read_nodes(const struct topology *topology, const char *text, uint32_t *nodes, uint32_t *ret_n_nodes,
                      char sentence[PLACING_TEXT])
{
    uint32_t n_nodes = 0;
    for (const char *rest = text;; rest++) {
        char *end;
        unsigned long number = strtoul(rest, &end, 10);
        if (*rest < '0' || *rest > '9' || (*end != ',' && *end != '\0')) {
            snprintf(sentence, PLACING_TEXT,
                     "--nodes '%.60s': numbers of nodes with commas between are expected, as 0,2", text);
            return -EINVAL;
        }
        int error = add_node(topology, number, nodes, &n_nodes, sentence);
        if (error)
            return error;
        rest = end;
        if (*rest == '\0')
            break;
    }
    *ret_n_nodes = n_nodes;
    return 0;
}

static uint64_t share_of(const struct topology *topology, uint32_t node, const struct options *options,
                         struct budget_terms terms)
{
    bool is_given = options_given(options, "memory");
    terms.percent = is_given ? options_percent(options, "memory") : DEFAULT_PERCENT;
    uint64_t n_bytes = budget_bytes(topology, node, &terms);
    uint64_t n_free = is_given ? n_bytes : budget_free_bytes(topology, node, &terms);
    return n_free < n_bytes ? n_free : n_bytes;
}

/* Each store would say so itself, in the middle of a log. */
static int check_binding(const struct topology *topology, uint32_t index, uint32_t number, char sentence[PLACING_TEXT])
{
    int error = topology_try_memory(topology, index);
    if (error)
        snprintf(sentence, PLACING_TEXT, "--strict-numa: memory cannot be bound to node %u: %s%s", number,
                 strerror(-error), error == -EPERM ? "; " TOPOLOGY_BINDING_HELP : "");
    return error;
}

static int plan(const struct topology *topology, const struct options *options, struct placing *placing,
                char sentence[PLACING_TEXT])
{
    uint32_t nodes[PLACING_MAX_STORES], n_nodes = 0;
    int error = 0;
    if (options_given(options, "nodes"))
        error = read_nodes(topology, options_string(options, "nodes"), nodes, &n_nodes, sentence);
    else
        n_nodes = topology_store_nodes(topology, nodes, PLACING_MAX_STORES);
    if (error)
        return error;
    n_nodes = n_nodes < PLACING_MAX_STORES ? n_nodes : PLACING_MAX_STORES;
    placing->n_stores = options_given(options, "stores") ? options_u32(options, "stores") : n_nodes;
    placing->n_cpus = topology_n_allowed_cpus(topology);
    for (uint32_t i = 0; i < placing->n_stores; i++) {
        struct topology_node node;
        uint32_t index = nodes[i % n_nodes];
        struct budget_terms terms = {.n_in_group = placing->n_stores,
                                     .n_on_node = (placing->n_stores - i % n_nodes + n_nodes - 1) / n_nodes};
        error = topology_node(topology, index, &node);
        if (error)
            return error;
        placing->stores[i].node = node.os_index;
        if (options_flag(options, "strict-numa"))
            error = check_binding(topology, index, node.os_index, sentence);
        if (error)
            return error;
        if (options_given(options, "memory") && options_percent(options, "memory") == 0)
            continue;
        placing->stores[i].memory_bytes = share_of(topology, index, options, terms);
        if (placing->stores[i].memory_bytes == 0) {
            snprintf(sentence, PLACING_TEXT, "there is no memory for store %u on node %u; --memory says how much", i,
                     node.os_index);
            return -EINVAL;
        }
    }
    return 0;
}

int placing_plan(const struct options *options, struct placing *ret_placing, char sentence[PLACING_TEXT])
{
    struct placing placing = {0};
    struct topology *topology = NULL;
    int error = topology_load(&topology);
    if (error) {
        snprintf(sentence, PLACING_TEXT, "the machine's nodes could not be read: %s", strerror(-error));
        return error;
    }
    error = plan(topology, options, &placing, sentence);
    topology_free(topology);
    if (!error)
        *ret_placing = placing;
    return error;
}

const char *placing_sharing(const struct placing *placing, uint32_t n_workers, char text[PLACING_TEXT])
{
    text[0] = '\0';
    if (placing->n_cpus < TOPOLOGY_CPUS_TO_SPIN)
        snprintf(text, PLACING_TEXT, "%u cpu%s shared by %u worker%s and %u store%s", placing->n_cpus,
                 placing->n_cpus == 1 ? " is" : "s are", n_workers, n_workers == 1 ? "" : "s", placing->n_stores,
                 placing->n_stores == 1 ? "" : "s");
    return text;
}
