/* test_cgroup.c - limits of control groups, version 1 and 2, inside and outside of containers; and budgets. */
#include "common/cgroup.h"
#include "common/budget.h"
#include "tests/unit/common/helpers.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define MIB ((uint64_t)1 << 20)

/* A file "a/b/c" below the test's folder, with the folders it needs. */
static void put(void **state, const char *path, const char *text)
{
    char name[128];
    snprintf(name, sizeof(name), "%s", path);
    for (char *slash = strchr(name, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        mkdir(helpers_path(state, name), 0700);
        *slash = '/';
    }
    FILE *file = fopen(helpers_path(state, name), "we");
    assert_non_null(file);
    fputs(text, file);
    assert_int_equal(fclose(file), 0);
}

static void clean(void **state)
{
    char command[256];
    snprintf(command, sizeof(command), "rm -rf '%s'/*", (const char *)*state);
    assert_int_equal(system(command), 0);
}

static void assert_memory(void **state, uint64_t limit_bytes, uint64_t left_bytes)
{
    struct cgroup_memory memory;
    cgroup_memory_at(helpers_path(state, "groups"), helpers_path(state, "root"), &memory);
    assert_int_equal(memory.limit_bytes, limit_bytes);
    assert_int_equal(memory.left_bytes, left_bytes);
}

static void version_2(void **state)
{
    put(state, "groups", "0::/a/b\n");
    put(state, "root/a/memory.max", "104857600\n"); /* 100 MiB, 70 used, 20 of them files that nobody uses */
    put(state, "root/a/memory.current", "73400320\n");
    put(state, "root/a/memory.stat", "anon 1\ninactive_file 20971520\n");
    put(state, "root/a/b/memory.max", "max\n");
    put(state, "root/a/b/memory.current", "1048576\n");
    assert_memory(state, 100 * MIB, 50 * MIB);
    put(state, "root/a/b/memory.max", "41943040\n");
    assert_memory(state, 40 * MIB, 39 * MIB);
    put(state, "root/a/b/memory.current", "99999999\n"); /* over the limit, which was lowered */
    assert_memory(state, 40 * MIB, 0);
    /* in a container: the path is one of outside, and what is mounted is the group itself */
    put(state, "groups", "0::/system.slice/docker-1234.scope\n");
    put(state, "root/memory.max", "10485760\n");
    put(state, "root/memory.current", "2097152\n");
    assert_memory(state, 10 * MIB, 8 * MIB);
    clean(state);
}

static void version_1(void **state)
{
    put(state, "groups", "12:cpuset:/x\n11:rdma,memory:/docker/12\n1:name=systemd:/memory\n0::/\n");
    put(state, "root/memory/memory.limit_in_bytes", "9223372036854771712\n"); /* its word for none */
    put(state, "root/memory/memory.usage_in_bytes", "999999999\n");
    assert_memory(state, UINT64_MAX, UINT64_MAX);
    put(state, "root/memory/docker/12/memory.limit_in_bytes", "104857600\n");
    put(state, "root/memory/docker/12/memory.usage_in_bytes", "31457280\n");
    put(state, "root/memory/docker/12/memory.stat", "inactive_file 5\ntotal_inactive_file 10485760\n");
    assert_memory(state, 100 * MIB, 80 * MIB);
    clean(state);
}

static void no_groups(void **state)
{
    assert_memory(state, UINT64_MAX, UINT64_MAX);
    static const char *const texts[] = {"", "\n", "0\n", "::\n", "0::\n", "3:cpu:/a\n", "memory"};
    for (size_t i = 0; i < sizeof(texts) / sizeof(texts[0]); i++) {
        put(state, "groups", texts[i]);
        assert_memory(state, UINT64_MAX, UINT64_MAX);
    }
    clean(state);
}

/* Nodes of 100 MB, far below what any machine of these tests is limited to. */
static void a_budget_is_a_share_of_the_node(void **state)
{
    (void)state;
    struct topology *topology = NULL;
    struct budget_terms terms = {.percent = 50, .n_in_group = 1, .n_on_node = 1};
    assert_int_equal(topology_load_from("pack:2 [numa(memory=100MB)] core:2 pu:1", NULL, &topology), 0);
    assert_int_equal(budget_bytes(topology, 0, &terms), 46 * MIB); /* 50 MB, in whole 2 MiB */
    assert_int_equal(budget_free_bytes(topology, 0, &terms), 82 * MIB);
    terms.percent = 100;
    terms.n_on_node = 4;
    assert_int_equal(budget_bytes(topology, 1, &terms), 22 * MIB);
    terms = (struct budget_terms){.percent = 1, .n_in_group = 1, .n_on_node = 1};
    assert_int_equal(budget_bytes(topology, 1, &terms), 0);
    assert_int_equal(budget_bytes(topology, 2, &terms), 0);
    /* a group's share: with so many in it the machine's memory is what is short, if nothing else */
    terms = (struct budget_terms){.percent = 100, .n_in_group = UINT32_MAX, .n_on_node = 1};
    assert_int_equal(budget_free_bytes(topology, 0, &terms), 0);
    topology_free(topology);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(version_2),
        cmocka_unit_test(version_1),
        cmocka_unit_test(no_groups),
        cmocka_unit_test(a_budget_is_a_share_of_the_node),
    };
    return cmocka_run_group_tests(tests, helpers_folder, helpers_remove_folder);
}
