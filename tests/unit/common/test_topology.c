/* test_topology.c - what any machine must answer; binding may be forbidden here, but it must then say so. */
#include "common/topology.h"

#include "common/segment.h"
#include "tests/unit/common/helpers.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static int load(void **state)
{
    struct topology *topology = NULL;
    int result = topology_load(&topology);
    *state = topology;
    return result;
}

static int unload(void **state)
{
    return topology_free(*state) != NULL;
}

static void nodes_share_out_the_allowed_cpus(void **state)
{
    const struct topology *topology = *state;
    cpu_set_t allowed;
    assert_int_equal(sched_getaffinity(0, sizeof(allowed), &allowed), 0);
    assert_int_equal(topology_n_allowed_cpus(topology), CPU_COUNT(&allowed));
    assert_true(topology_n_nodes(topology) >= 1);
    uint32_t n_cpus = 0;
    for (uint32_t i = 0; i < topology_n_nodes(topology); i++) {
        struct topology_node node = {0};
        assert_int_equal(topology_node(topology, i, &node), 0);
        assert_in_range(node.memory_bytes, 1 << 20, (uint64_t)1 << 50);
        assert_in_range(node.free_bytes, 1, node.memory_bytes);
        n_cpus += node.n_cpus;
    }
    assert_int_equal(n_cpus, topology_n_allowed_cpus(topology));
}

static void what_is_not_there_is_refused(void **state)
{
    const struct topology *topology = *state;
    uint32_t none = topology_n_nodes(topology);
    struct topology_node node;
    uint64_t a, b;
    assert_int_equal(topology_node(topology, none, &node), -ENOENT);
    assert_int_equal(topology_bind_thread(topology, none), -ENOENT);
    assert_int_equal(topology_bind_memory(topology, none, NULL, 0), -ENOENT);
    assert_int_equal(topology_prefer_memory(topology, none, NULL, 0), -ENOENT);
    assert_int_equal(topology_near_memory(topology, none, &none), -ENOENT);
    assert_int_equal(topology_resident_bytes(topology, none, NULL, 0, &a, &b), -ENOENT);
    assert_null(topology_free(NULL));
}

struct binding {
    const struct topology *topology;
    int result;
    uint32_t n_cpus, n_released;
};

static void *bind_here(void *argument)
{
    struct binding *binding = argument;
    cpu_set_t mask;
    binding->result = topology_bind_thread(binding->topology, 0);
    if (sched_getaffinity(0, sizeof(mask), &mask) == 0)
        binding->n_cpus = (uint32_t)CPU_COUNT(&mask);
    if (binding->result == 0 && topology_release_thread(binding->topology) == 0 &&
        sched_getaffinity(0, sizeof(mask), &mask) == 0)
        binding->n_released = (uint32_t)CPU_COUNT(&mask);
    return NULL;
}

static void binding_a_thread_leaves_the_others_alone(void **state)
{
    struct binding binding = {.topology = *state};
    struct topology_node node;
    cpu_set_t before, after;
    assert_int_equal(topology_node(*state, 0, &node), 0);
    assert_int_equal(sched_getaffinity(0, sizeof(before), &before), 0);
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, bind_here, &binding), 0);
    pthread_join(thread, NULL);
    if (binding.result == 0) {
        assert_int_equal(binding.n_cpus, node.n_cpus);
        assert_int_equal(binding.n_released, CPU_COUNT(&before));
    } else
        assert_true(binding.result == -EPERM || binding.result == -ENOSYS || binding.result == -ENODATA);
    assert_int_equal(sched_getaffinity(0, sizeof(after), &after), 0);
    assert_true(CPU_EQUAL(&before, &after));
}

struct placed {
    const struct topology *topology;
};

static int bind_segment(void *context, void *address, uint64_t n_bytes)
{
    const struct placed *placed = context;
    return topology_bind_memory(placed->topology, 0, address, n_bytes);
}

static void pages_of_a_bound_segment_lie_on_the_node(void **state)
{
    const uint64_t n_bytes = (uint64_t)6 << 20;
    struct placed placed = {*state};
    const struct segment_terms terms = {.context = &placed, .bind = bind_segment};
    struct segment_mapping mapping = {0};
    int fd = -1, bound = 1;
    assert_int_equal(segment_create_on("test", n_bytes, &terms, &bound, &fd), 0);
    assert_true(bound == 0 || bound == -EPERM || bound == -ENOSYS);
    assert_int_equal(segment_map(fd, n_bytes, true, &mapping), 0);
    memset(mapping.address, 1, n_bytes / 2);
    uint64_t on_node = 1, resident = 2;
    int result = topology_resident_bytes(*state, 0, mapping.address, n_bytes, &on_node, &resident);
    if (result == 0) {
        assert_in_range(resident, n_bytes / 2, n_bytes);
        if (bound == 0)
            assert_int_equal(on_node, resident);
        assert_true(on_node <= resident);
    } else {
        assert_true(result == -ENOSYS || result == -EPERM);
        assert_int_equal(resident, 2);
    }
    segment_unmap(&mapping);
    close(fd);
}

/* Memory that is only asked for there is had, wherever it lies. */
static void pages_of_preferred_memory_are_had(void **state)
{
    const size_t n_bytes = 1 << 20;
    void *memory = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(memory != MAP_FAILED);
    int preferred = topology_prefer_memory(*state, 0, memory, n_bytes);
    assert_true(preferred == 0 || preferred == -EPERM || preferred == -ENOSYS);
    memset(memory, 1, n_bytes);
    uint64_t on_node, resident;
    struct topology_range range = {(uintptr_t)memory, (uintptr_t)memory + n_bytes};
    if (topology_resident_ranges(*state, 0, &range, 1, &on_node, &resident) == 0 && preferred == 0)
        assert_int_equal(resident, n_bytes); /* its policy makes a mapping of its own of it */
    munmap(memory, n_bytes);
}

static void the_outcome_is_told(void **state)
{
    char text[256], expected[256];
    struct topology_node node;
    assert_int_equal(topology_node(*state, 0, &node), 0);
    snprintf(expected, sizeof(expected), "node %u, %u cpu%s, threads bound, memory not bound (Operation not permitted)",
             node.os_index, node.n_cpus, node.n_cpus == 1 ? "" : "s");
    assert_string_equal(topology_describe(*state, 0, 0, -EPERM, text, sizeof(text)), expected);
    assert_non_null(
        strstr(topology_describe(*state, 0, -EALREADY, 0, text, sizeof(text)), "threads not bound, memory bound"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nodes_share_out_the_allowed_cpus),
        cmocka_unit_test(what_is_not_there_is_refused),
        cmocka_unit_test(binding_a_thread_leaves_the_others_alone),
        cmocka_unit_test(pages_of_a_bound_segment_lie_on_the_node),
        cmocka_unit_test(pages_of_preferred_memory_are_had),
        cmocka_unit_test(the_outcome_is_told),
    };
    return cmocka_run_group_tests(tests, load, unload);
}
