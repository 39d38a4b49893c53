/* test_topology_pci.c - the node of a device: machines that hwloc describes, with folders of devices as the kernel has them. */
#include "common/topology.h"
#include "tests/unit/common/helpers.h"

#include <errno.h>
#include <ftw.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#define TWO_NODES "pack:2 [numa(memory=4GB)] core:4 pu:1"
#define ONE_NODE  "pack:1 [numa(memory=4GB)] core:4 pu:1"

static struct topology *load(const char *source, const char *cpus)
{
    struct topology *topology = NULL;
    assert_int_equal(topology_load_from(source, cpus, &topology), 0);
    return topology;
}

/* numa_node NULL: a kernel without NUMA. */
static void add_device(void **state, const char *address, const char *numa_node)
{
    char path[256];
    snprintf(path, sizeof(path), "%s", helpers_path(state, address));
    assert_int_equal(mkdir(path, 0700), 0);
    if (!numa_node)
        return;
    strcat(path, "/numa_node");
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fputs(numa_node, file);
    assert_int_equal(fclose(file), 0);
}

static int remove_one(const char *path, const struct stat *status, int kind, struct FTW *place)
{
    (void)status;
    (void)kind;
    return place->level > 0 ? remove(path) : 0;
}

/* With the folders of devices in it. */
static int remove_devices(void **state)
{
    return nftw(*state, remove_one, 4, FTW_DEPTH | FTW_PHYS) ? -1 : helpers_remove_folder(state);
}

static void assert_at(void **state, const struct topology *topology, const char *address, int result, uint32_t node)
{
    uint32_t index = 77;
    assert_int_equal(topology_node_of_pci_in(topology, *state, address, &index), result);
    assert_int_equal(index, result < 0 ? 77 : node);
}

static void a_device_has_the_node_that_the_kernel_says(void **state)
{
    struct topology *topology = load(TWO_NODES, NULL);
    add_device(state, "0000:65:00.0", "1\n");
    add_device(state, "0001:0a:1f.7", "0\n");
    assert_at(state, topology, "0000:65:00.0", 0, 1);
    assert_at(state, topology, "0001:0a:1f.7", 0, 0);
    assert_at(state, topology, "0001:0A:1F.7", 0, 0); /* as others write it */
    assert_at(state, topology, "0000:66:00.0", -ENODEV, 0);
    topology_free(topology);
}

static void cpus_of_its_node_may_be_forbidden(void **state)
{
    struct topology *topology = load(TWO_NODES, "0-3,6");
    struct topology_node node;
    add_device(state, "0000:65:00.0", "1\n");
    assert_at(state, topology, "0000:65:00.0", 0, 1);
    assert_int_equal(topology_node(topology, 1, &node), 0);
    assert_int_equal(node.n_cpus, 1);
    topology_free(topology);
    topology = load(TWO_NODES, "0-3");
    assert_at(state, topology, "0000:65:00.0", 0, 1);
    assert_int_equal(topology_node(topology, 1, &node), 0);
    assert_int_equal(node.n_cpus, 0);
    topology_free(topology);
}

static void a_node_that_is_not_ours(void **state)
{
    struct topology *topology = load(ONE_NODE, NULL);
    add_device(state, "0000:65:00.0", "1\n");
    add_device(state, "0000:66:00.0", "99999999999\n");
    assert_at(state, topology, "0000:65:00.0", -EACCES, 0);
    assert_at(state, topology, "0000:66:00.0", -EACCES, 0);
    topology_free(topology);
}

static void machines_that_do_not_tell(void **state)
{
    add_device(state, "0000:65:00.0", "-1\n");
    add_device(state, "0000:66:00.0", NULL);
    add_device(state, "0000:67:00.0", "perhaps\n");
    static const char *const addresses[] = {"0000:65:00.0", "0000:66:00.0", "0000:67:00.0"};
    struct topology *one = load(ONE_NODE, NULL), *two = load(TWO_NODES, NULL);
    for (size_t i = 0; i < 3; i++) {
        assert_at(state, one, addresses[i], 0, 0);
        assert_at(state, two, addresses[i], -ENODATA, 0);
    }
    topology_free(one);
    topology_free(two);
}

static void addresses_that_are_none(void **state)
{
    static const char *const addresses[] = {"",        "65:00.0", "0000:65:00", "0000:65:00.0x", "0000:65:00.0/..",
                                            "../../x", "zz"};
    struct topology *topology = load(ONE_NODE, NULL);
    for (size_t i = 0; i < sizeof(addresses) / sizeof(addresses[0]); i++)
        assert_at(state, topology, addresses[i], -EINVAL, 0);
    topology_free(topology);
}

static void this_machine_answers(void **state)
{
    (void)state;
    struct topology *topology;
    uint32_t index = 77;
    assert_int_equal(topology_load(&topology), 0);
    assert_int_equal(topology_node_of_pci(topology, "ffff:ff:1f.7", &index), -ENODEV);
    assert_int_equal(index, 77);
    topology_free(topology);
}

#define WITH_FOLDER(test) cmocka_unit_test_setup_teardown(test, helpers_folder, remove_devices)

int main(void)
{
    const struct CMUnitTest tests[] = {
        WITH_FOLDER(a_device_has_the_node_that_the_kernel_says),
        WITH_FOLDER(cpus_of_its_node_may_be_forbidden),
        WITH_FOLDER(a_node_that_is_not_ours),
        WITH_FOLDER(machines_that_do_not_tell),
        WITH_FOLDER(addresses_that_are_none),
        cmocka_unit_test(this_machine_answers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
