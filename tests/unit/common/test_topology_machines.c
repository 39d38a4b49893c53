/* test_topology_machines.c - machines that are not this one: nodes without memory, without cpus, with interleaved, offline,
 * forbidden cpus; and what /proc/self/numa_maps says of pages. */
#include "common/topology.h"
#include "tests/unit/common/helpers.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define GIB         ((uint64_t)1 << 30)
#define MAX_INDICES 8u

/* A node for make_xml(). Without cpus of its own it hangs beside the node before it, as hwloc shows such nodes. */
struct node {
    unsigned number;
    uint64_t memory_bytes;
    unsigned cpus;    /* a bit each */
    unsigned offline; /* more cpus, which are there and off */
    unsigned threads; /* per core; 0: cores are not told */
};

static void sets(FILE *out, unsigned cpus, unsigned all_cpus, unsigned nodes)
{
    fprintf(out, " cpuset=\"0x%x\" complete_cpuset=\"0x%x\" nodeset=\"0x%x\" complete_nodeset=\"0x%x\"", cpus, all_cpus,
            nodes, nodes);
}

static void cpus(FILE *out, const struct node *node, unsigned nodes, unsigned *id)
{
    unsigned in_core = 0, n = 0;
    for (unsigned cpu = 0; cpu < 32; cpu++) {
        if (!(node->cpus & 1u << cpu))
            continue;
        if (node->threads && n == 0) { /* a core of this and the next cpus */
            in_core = 0;
            for (unsigned next = cpu, k = 0; k < node->threads && next < 32; next++)
                if (node->cpus & 1u << next) {
                    in_core |= 1u << next;
                    k++;
                }
            fprintf(out, "<object type=\"Core\" os_index=\"%u\" gp_index=\"%u\"", cpu, ++*id);
            sets(out, in_core, in_core, nodes);
            fprintf(out, ">");
        }
        fprintf(out, "<object type=\"PU\" os_index=\"%u\" gp_index=\"%u\"", cpu, ++*id);
        sets(out, 1u << cpu, 1u << cpu, nodes);
        fprintf(out, "/>");
        if (node->threads && ++n == node->threads) {
            fprintf(out, "</object>");
            n = 0;
        }
    }
}

/* hwloc's XML of a machine; `allowed`: what a cpuset leaves of it. */
static char *make_xml(const struct node *nodes, size_t n_nodes, unsigned allowed)
{
    char *text = NULL;
    size_t size = 0;
    unsigned online = 0, all = 0, numbers = 0, id = 1;
    FILE *out = open_memstream(&text, &size);
    assert_non_null(out);
    for (size_t i = 0; i < n_nodes; i++) {
        online |= nodes[i].cpus;
        all |= nodes[i].cpus | nodes[i].offline;
        numbers |= 1u << nodes[i].number;
    }
    fprintf(out, "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<!DOCTYPE topology SYSTEM \"hwloc2.dtd\">\n"
                 "<topology version=\"2.0\"><object type=\"Machine\" os_index=\"0\" gp_index=\"1\"");
    sets(out, online, all, numbers);
    fprintf(out, " allowed_cpuset=\"0x%x\" allowed_nodeset=\"0x%x\">", allowed, numbers);
    for (size_t i = 0; i < n_nodes; i++) {
        unsigned beside = nodes[i].cpus, here = 1u << nodes[i].number;
        if (beside == 0)
            continue; /* written with the one before */
        for (size_t k = i + 1; k < n_nodes && nodes[k].cpus == 0; k++)
            here |= 1u << nodes[k].number;
        fprintf(out, "<object type=\"Package\" os_index=\"%zu\" gp_index=\"%u\"", i, ++id);
        sets(out, beside, beside | nodes[i].offline, here);
        fprintf(out, ">");
        for (size_t k = i; k == i || (k < n_nodes && nodes[k].cpus == 0); k++) {
            fprintf(out, "<object type=\"NUMANode\" os_index=\"%u\" gp_index=\"%u\" local_memory=\"%" PRIu64 "\"",
                    nodes[k].number, ++id, nodes[k].memory_bytes);
            sets(out, beside, beside | nodes[i].offline, 1u << nodes[k].number);
            fprintf(out, "/>");
        }
        cpus(out, &nodes[i], here, &id);
        fprintf(out, "</object>");
    }
    fprintf(out, "</object></topology>\n");
    assert_int_equal(fclose(out), 0);
    return text;
}

static struct topology *load_xml(const struct node *nodes, size_t n_nodes, unsigned allowed, const char *cpu_list)
{
    char *xml = make_xml(nodes, n_nodes, allowed);
    struct topology *topology = NULL;
    int result = topology_load_from(xml, cpu_list, &topology);
    if (result < 0)
        fail_msg("%s: %s", strerror(-result), xml);
    free(xml);
    return topology;
}

static struct topology *load(const char *source, const char *cpu_list)
{
    struct topology *topology = NULL;
    assert_int_equal(topology_load_from(source, cpu_list, &topology), 0);
    return topology;
}

static void assert_node(const struct topology *topology, uint32_t index, uint32_t os_index, uint32_t n_cpus,
                        uint32_t n_cores, uint64_t memory_bytes)
{
    struct topology_node node;
    assert_int_equal(topology_node(topology, index, &node), 0);
    assert_int_equal(node.os_index, os_index);
    assert_int_equal(node.n_cpus, n_cpus);
    assert_int_equal(node.n_cores, n_cores);
    assert_int_equal(node.memory_bytes, memory_bytes);
}

/* `expected` are the kernel's numbers, "0 2". */
static void assert_stores(const struct topology *topology, const char *expected)
{
    uint32_t indices[MAX_INDICES];
    char text[64] = "";
    uint32_t n = topology_store_nodes(topology, indices, MAX_INDICES);
    assert_in_range(n, 1, MAX_INDICES);
    for (uint32_t i = 0; i < n; i++) {
        struct topology_node node;
        assert_int_equal(topology_node(topology, indices[i], &node), 0);
        snprintf(text + strlen(text), sizeof(text) - strlen(text), "%s%u", i ? " " : "", node.os_index);
    }
    assert_string_equal(text, expected);
    uint32_t untouched = 77;
    assert_int_equal(topology_store_nodes(topology, &untouched, 0), n);
    assert_int_equal(untouched, 77);
}

static void two_sockets_with_threads(void **state)
{
    (void)state;
    struct topology *topology = load("pack:2 [numa(memory=4GB)] core:4 pu:2", NULL);
    char text[64];
    assert_int_equal(topology_n_nodes(topology), 2);
    assert_int_equal(topology_n_allowed_cpus(topology), 16);
    assert_node(topology, 0, 0, 8, 4, UINT64_C(4000000000));
    assert_node(topology, 1, 1, 8, 4, UINT64_C(4000000000));
    assert_stores(topology, "0 1");
    assert_string_equal(topology_list(topology, text, sizeof(text)), "0, 1");
    assert_int_equal(topology_bind_thread(topology, 0), -ENOSYS); /* it is another machine */
    assert_int_equal(topology_bind_memory(topology, 0, NULL, 4096), -ENOSYS);
    topology_free(topology);
}

/* Cpu 0 on node 0, cpu 1 on node 1, ...; a process that may use some of them, also half a core. */
static void interleaved_cpus_and_affinity(void **state)
{
    (void)state;
    static const struct node nodes[] = {{0, 2 * GIB, 0x55, 0, 2}, {1, 3 * GIB, 0xaa, 0, 2}};
    struct topology *topology = load_xml(nodes, 2, 0xff, NULL);
    assert_node(topology, 0, 0, 4, 2, 2 * GIB);
    assert_node(topology, 1, 1, 4, 2, 3 * GIB);
    topology_free(topology);
    topology = load_xml(nodes, 2, 0xff, "0,2,4,7");
    assert_int_equal(topology_n_allowed_cpus(topology), 4);
    assert_node(topology, 0, 0, 3, 2, 2 * GIB);
    assert_node(topology, 1, 1, 1, 1, 3 * GIB);
    assert_stores(topology, "0 1");
    topology_free(topology);
    topology = load_xml(nodes, 2, 0xff, "1,3");
    assert_node(topology, 0, 0, 0, 0, 2 * GIB);
    assert_node(topology, 1, 1, 2, 1, 3 * GIB);
    assert_stores(topology, "1");
    topology_free(topology);
}

static void offline_and_forbidden_cpus(void **state)
{
    (void)state;
    static const struct node nodes[] = {{0, GIB, 0x07, 0x08, 0}, {1, GIB, 0x70, 0x80, 0}};
    struct topology *topology = load_xml(nodes, 2, 0x77, NULL);
    assert_int_equal(topology_n_allowed_cpus(topology), 6);
    assert_node(topology, 0, 0, 3, 3, GIB);
    assert_node(topology, 1, 1, 3, 3, GIB);
    topology_free(topology);
    topology = load_xml(nodes, 2, 0x31, NULL); /* a cpuset of three cpus */
    assert_int_equal(topology_n_allowed_cpus(topology), 3);
    assert_node(topology, 0, 0, 1, 1, GIB);
    assert_node(topology, 1, 1, 2, 2, GIB);
    topology_free(topology);
    struct topology *none = NULL;
    char *xml = make_xml(nodes, 2, 0x77);
    assert_int_equal(topology_load_from(xml, "20-23", &none), -EIO);
    free(xml);
    assert_null(none);
}

/* Node 1 has cpus and no memory, node 4 memory and no cpus: neither gets a store, and node 4 has nobody else's cpus. */
static void nodes_with_half_of_it(void **state)
{
    (void)state;
    static const struct node nodes[] = {
        {0, 2 * GIB, 0x03, 0, 0}, {4, 9 * GIB, 0, 0, 0}, {1, 0, 0x0c, 0, 0}, {2, GIB, 0x30, 0, 0}};
    struct topology *topology = load_xml(nodes, 4, 0x3f, NULL);
    char text[64];
    uint32_t index = 9;
    assert_int_equal(topology_n_nodes(topology), 4);
    assert_node(topology, 0, 0, 2, 2, 2 * GIB);
    assert_node(topology, 1, 1, 2, 2, 0);
    assert_node(topology, 2, 2, 2, 2, GIB);
    assert_node(topology, 3, 4, 0, 0, 9 * GIB);
    assert_stores(topology, "0 2");
    assert_string_equal(topology_list(topology, text, sizeof(text)), "0, 1, 2, 4");
    assert_int_equal(topology_find(topology, 3, &index), -ENOENT);
    assert_int_equal(index, 9);
    assert_int_equal(topology_find(topology, 4, &index), 0);
    assert_int_equal(index, 3);
    topology_free(topology);
    /* cpus of node 1 only: no node has both, so those with memory serve */
    topology = load_xml(nodes, 4, 0x3f, "2-3");
    assert_stores(topology, "0 2 4");
    topology_free(topology);
}

/* Threads of a node without memory: the nearest that has memory and cpus, as the machine tells distances or by number. */
static void memory_near_a_node(void **state)
{
    (void)state;
    static const struct node nodes[] = {
        {0, 2 * GIB, 0x03, 0, 0}, {4, 9 * GIB, 0, 0, 0}, {1, 0, 0x0c, 0, 0}, {2, GIB, 0x30, 0, 0}};
    static const char distances[] =
        "<distances2 type=\"NUMANode\" nbobjs=\"4\" kind=\"5\" name=\"NUMALatency\" indexing=\"os\">"
        "<indexes length=\"7\">0 1 2 4</indexes><u64values length=\"47\">10 32 21 17 32 10 16 12 21 16 10 31 17 12 31 "
        "10"
        "</u64values></distances2></topology>";
    uint32_t index = 9;
    struct topology *topology = load_xml(nodes, 4, 0x3f, NULL);
    assert_int_equal(topology_near_memory(topology, 2, &index), 0);
    assert_int_equal(index, 2);
    assert_int_equal(topology_near_memory(topology, 1, &index), 0);
    assert_int_equal(index, 0);
    assert_int_equal(topology_near_memory(topology, 4, &index), -ENOENT);
    topology_free(topology);

    char *xml = make_xml(nodes, 4, 0x3f);
    char *told = malloc(strlen(xml) + sizeof(distances));
    assert_non_null(told);
    sprintf(told, "%.*s%s\n", (int)(strstr(xml, "</topology>") - xml), xml, distances);
    topology = load(told, NULL);
    free(told);
    free(xml);
    assert_int_equal(topology_near_memory(topology, 1, &index),
                     0); /* 12 to node 4, which has no cpus; 16 to 2; 32 to 0 */
    assert_int_equal(index, 2);
    topology_free(topology);

    topology = load_xml(nodes, 4, 0x3f, "2-3");
    index = 9;
    assert_int_equal(topology_near_memory(topology, 1, &index), -ENOENT); /* only node 1 has cpus */
    assert_int_equal(index, 9);
    topology_free(topology);
}

static void a_machine_that_hides_its_memory(void **state)
{
    (void)state;
    static const struct node nodes[] = {{0, 0, 0x03, 0, 0}, {1, 0, 0x0c, 0, 0}};
    struct topology *topology = load_xml(nodes, 2, 0x0f, NULL);
    struct topology_node node;
    assert_int_equal(topology_node(topology, 1, &node), 0);
    assert_true(node.memory_bytes > 0);
    assert_stores(topology, "0 1");
    topology_free(topology);
}

static void sources_that_are_none(void **state)
{
    (void)state;
    static const char *const sources[] = {"", "<", "<topology/>", "pack:", "elephants:2 pu:2"};
    for (size_t i = 0; i < sizeof(sources) / sizeof(sources[0]); i++) {
        struct topology *topology = NULL;
        assert_true(topology_load_from(sources[i], NULL, &topology) < 0);
        assert_null(topology);
    }
    struct topology *topology = NULL;
    assert_int_equal(topology_load_from("pu:2", "many", &topology), -EINVAL);
    assert_null(topology);
}

/* ---- /proc/self/numa_maps ---- */

static int read_maps(const char *text, uint32_t node, uintptr_t first, uintptr_t end, uint64_t *on_node,
                     uint64_t *resident)
{
    FILE *file = fmemopen((void *)(uintptr_t)text, strlen(text), "r");
    assert_non_null(file);
    const struct topology_range range = {first, end};
    int result = topology_resident_read(file, node, &range, 1, on_node, resident);
    fclose(file);
    return result;
}

static void pages_are_counted_by_node(void **state)
{
    (void)state;
    static const char text[] =
        "55d000000000 default file=/usr/bin/x mapped=4 N0=4 kernelpagesize_kB=4\n"
        "7f0000000000 bind:1 file=/memfd:N1=5\\040(deleted) dirty=7 active=0 N0=3 N1=4 kernelpagesize_kB=4\n"
        "7f0000200000 bind:1 file=/memfd:x huge dirty=2 N1=2 N11=1 kernelpagesize_kB=2048\n"
        "7f0000800000 bind:1 file=/memfd:x\n"
        "7f0000a00000 default anon=1 N0=1 kernelpagesize_kB=4\n";
    uint64_t on_node = 1, resident = 2;
    assert_int_equal(read_maps(text, 1, 0x7f0000000000, 0x7f0000a00000, &on_node, &resident), 0);
    assert_int_equal(on_node, 4 * 4096 + 2 * 2097152);
    assert_int_equal(resident, 7 * 4096 + 3 * 2097152);
    assert_int_equal(read_maps(text, 0, 0x7f0000800000, 0x7f0000a00000, &on_node, &resident), 0);
    assert_int_equal(on_node + resident, 0); /* nothing touched yet */
    static const struct topology_range two[] = {{0x7f0000000000, 0x7f0000200000}, {0x7f0000a00000, 0x7f0000a01000}};
    FILE *file = fmemopen((void *)(uintptr_t)text, strlen(text), "r");
    assert_non_null(file);
    assert_int_equal(topology_resident_read(file, 0, two, 2, &on_node, &resident), 0);
    fclose(file);
    assert_int_equal(on_node, (3 + 1) * 4096);
    assert_int_equal(resident, (7 + 1) * 4096); /* not what lies between them */
    assert_int_equal(read_maps(text, 0, 0x7f0000800000, 0x7f0000a00000, &on_node, &resident), 0);
    static const char *const broken[] = {"no number\n", "7f0000000000\n", "7f0000000000 default N0=3\n"};
    on_node = 1;
    for (size_t i = 0; i < sizeof(broken) / sizeof(broken[0]); i++)
        assert_int_equal(read_maps(broken[i], 0, 0, UINTPTR_MAX, &on_node, &resident), -EIO);
    assert_int_equal(on_node, 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(two_sockets_with_threads),        cmocka_unit_test(interleaved_cpus_and_affinity),
        cmocka_unit_test(offline_and_forbidden_cpus),      cmocka_unit_test(nodes_with_half_of_it),
        cmocka_unit_test(a_machine_that_hides_its_memory), cmocka_unit_test(sources_that_are_none),
        cmocka_unit_test(pages_are_counted_by_node),       cmocka_unit_test(memory_near_a_node),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
