/* report_nodes.c - see report.h. Stores are put together by the node that they are meant for. */
#include "client/command/output.h"
#include "client/command/report.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct node {
    uint32_t number, n_stores, n_bound, n_cores;
    uint64_t bytes_total, bytes_used, bytes_resident, bytes_local, bytes_served, bytes_per_s;
};

/* A store with memory: neither dead nor one that has left. */
static bool is_store(const struct hcattn_process_stats *process)
{
    return strcmp(process->program, "hc-value-store") == 0 && process->state && strcmp(process->state, "dead") != 0 &&
           strcmp(process->state, "drained") != 0;
}

static int by_number(const void *a, const void *b)
{
    const struct node *first = a, *second = b;
    return (first->number > second->number) - (first->number < second->number);
}

/* To free; NULL: no store, or no memory. */
static struct node *gather(const struct hcattn_process_stats *processes, size_t n_processes, size_t *ret_n)
{
    struct node *nodes = calloc(n_processes + 1, sizeof(*nodes));
    size_t n = 0;
    for (size_t i = 0; nodes && i < n_processes; i++) {
        const struct hcattn_process_stats *store = &processes[i];
        if (!is_store(store))
            continue;
        size_t k = 0;
        while (k < n && nodes[k].number != store->home_node)
            k++;
        n = k == n ? n + 1 : n;
        struct node *node = &nodes[k];
        node->number = store->home_node;
        node->n_stores++;
        node->n_bound += store->node == (int32_t)store->home_node ? 1 : 0;
        node->n_cores = store->node_cores > node->n_cores ? store->node_cores : node->n_cores;
        node->bytes_total += store->bytes_total;
        node->bytes_used += store->bytes_used;
        node->bytes_resident += store->bytes_resident;
        node->bytes_local += store->bytes_local;
        node->bytes_served += store->bytes_served;
        node->bytes_per_s += store->bytes_per_s;
    }
    if (nodes)
        qsort(nodes, n, sizeof(*nodes), by_number);
    *ret_n = n;
    return nodes;
}

static double local_percent(const struct node *node)
{
    return 100.0 * (double)node->bytes_local / (double)node->bytes_resident;
}

void report_node_table(const struct hcattn_process_stats *processes, size_t n_processes)
{
    char reserved[REPORT_SIZE_TEXT], used[REPORT_SIZE_TEXT], rest[REPORT_SIZE_TEXT], local[16];
    size_t n = 0;
    struct node *nodes = gather(processes, n_processes, &n);
    if (n > 0)
        output_format("\n%4s %6s %6s %6s %10s %10s %10s %8s %8s\n", "NODE", "STORES", "BOUND", "CORES", "RESERVED",
                      "USED", "FREE", "LOCAL", "GB/S");
    for (size_t i = 0; i < n; i++) {
        const struct node *node = &nodes[i];
        snprintf(local, sizeof(local), "-");
        if (node->bytes_resident)
            snprintf(local, sizeof(local), "%.1f %%", local_percent(node));
        output_format("%4" PRIu32 " %6" PRIu32 " %6" PRIu32 " %6" PRIu32 " %10s %10s %10s %8s %8.3f\n", node->number,
                      node->n_stores, node->n_bound, node->n_cores, report_size(node->bytes_total, reserved),
                      report_size(node->bytes_used, used), report_size(node->bytes_total - node->bytes_used, rest),
                      local, (double)node->bytes_per_s / 1e9);
    }
    free(nodes);
}

json_t *report_node_list(const struct hcattn_process_stats *processes, size_t n_processes)
{
    json_t *list = json_array();
    size_t n = 0;
    struct node *nodes = gather(processes, n_processes, &n);
    for (size_t i = 0; i < n; i++) {
        const struct node *node = &nodes[i];
        json_t *item = json_pack("{s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:I}",                  //
                                 "node", (json_int_t)node->number,                                 //
                                 "stores", (json_int_t)node->n_stores,                             //
                                 "bound", (json_int_t)node->n_bound,                               //
                                 "cores", (json_int_t)node->n_cores,                               //
                                 "bytes_reserved", (json_int_t)node->bytes_total,                  //
                                 "bytes_used", (json_int_t)node->bytes_used,                       //
                                 "bytes_free", (json_int_t)(node->bytes_total - node->bytes_used), //
                                 "bytes_resident", (json_int_t)node->bytes_resident,               //
                                 "bytes_local", (json_int_t)node->bytes_local,                     //
                                 "bytes_served", (json_int_t)node->bytes_served,                   //
                                 "bytes_per_s", (json_int_t)node->bytes_per_s);
        json_array_append_new(list, item);
    }
    free(nodes);
    return list;
}
