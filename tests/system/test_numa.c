/*
 * test_numa.c - stores and nodes as `hcattn up` and `hcattn status` have them: one store a node, memory by size and share,
 * where pages lie, and containers that may not bind. Machines with several nodes are hwloc's make-believe here (nothing can be
 * bound to them); tests/numa has real ones.
 */
#include "tests/system/programs.h"
#include "tests/system/service.h"

#include <errno.h>
#include <jansson.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/topology.h"

#define MIB            ((uint64_t)1 << 20)
#define TWO_NODES      "HWLOC_SYNTHETIC=pack:2 [numa(memory=4GB)] core:1 pu:1"
#define WAIT_US        (UINT64_C(30000000) * PATIENCE)
#define NODES_OF_TESTS 4u

/* `nodes` of `hcattn status --json`; to be released. */
static json_t *nodes_of(const struct service *service)
{
    struct program program = {.runtime_dir = service->directory};
    struct outcome outcome = programs_run(&program, ARGUMENTS("status", "--json"));
    programs_assert_done(&outcome);
    json_t *report = json_loads(outcome.out, 0, NULL);
    assert_non_null(report);
    json_t *nodes = json_incref(json_object_get(report, "nodes"));
    assert_true(json_is_array(nodes));
    json_decref(report);
    programs_free(&outcome);
    return nodes;
}

static uint64_t number(const json_t *nodes, size_t index, const char *name)
{
    const json_t *value = json_object_get(json_array_get(nodes, index), name);
    if (!json_is_integer(value))
        fail_msg("node %zu has no number '%s'", index, name);
    return (uint64_t)json_integer_value(value);
}

/* The nodes, once the stores have told where their pages lie. */
static json_t *nodes_with_pages(const struct service *service)
{
    uint64_t deadline = clock_deadline_us(WAIT_US);
    for (;;) {
        json_t *nodes = nodes_of(service);
        bool all = json_array_size(nodes) > 0;
        for (size_t i = 0; i < json_array_size(nodes); i++)
            all = all && number(nodes, i, "bytes_resident") >= number(nodes, i, "bytes_reserved");
        if (all)
            return nodes;
        json_decref(nodes);
        if (clock_remaining_us(deadline) == 0)
            fail_msg("no store has told of its pages");
        clock_sleep_us(100000);
    }
}

static uint64_t fastest(const json_t *nodes)
{
    uint64_t most = 0;
    for (size_t i = 0; i < json_array_size(nodes); i++)
        most = number(nodes, i, "bytes_per_s") > most ? number(nodes, i, "bytes_per_s") : most;
    return most;
}

static void wait_for_log(const struct service *service, const char *text)
{
    char path[96];
    uint64_t deadline = clock_deadline_us(WAIT_US);
    snprintf(path, sizeof(path), "%s/log", service->directory);
    while (access(path, F_OK) < 0 || !service_log_contains(service, text)) {
        if (clock_remaining_us(deadline) == 0) {
            service_show_log(service);
            fail_msg("the log does not have: %s", text);
        }
        clock_sleep_us(50000);
    }
}

/* ---- this machine ---- */

static void pages_lie_where_they_should(void **state)
{
    (void)state;
    struct service service;
    struct answer answer = {0};
    struct topology *topology = NULL;
    uint32_t indices[NODES_OF_TESTS], n = 0;
    assert_int_equal(topology_load(&topology), 0);
    n = topology_store_nodes(topology, indices, NODES_OF_TESTS);
    topology_free(topology);
    service_start(
        &service,
        ARGUMENTS("--model", service_tiny_model(""), "--memory", "64MiB", "--policy", "full", "--exact-tokens", "0"),
        NULL);
    json_t *nodes = nodes_with_pages(&service);
    assert_int_equal(json_array_size(nodes), n); /* one store each */
    for (size_t i = 0; i < json_array_size(nodes); i++) {
        assert_int_equal(number(nodes, i, "stores"), 1);
        assert_true(number(nodes, i, "cores") >= 1);
        assert_in_range(number(nodes, i, "bytes_reserved"), 60 * MIB, 64 * MIB);
        assert_int_equal(number(nodes, i, "bytes_free"), number(nodes, i, "bytes_reserved"));
        if (number(nodes, i, "bound"))
            assert_int_equal(number(nodes, i, "bytes_local"), number(nodes, i, "bytes_resident"));
    }
    json_decref(nodes);
    uint64_t deadline = clock_deadline_us(WAIT_US), rate = 0;
    while (rate == 0 && clock_remaining_us(deadline) > 0) {
        service_generate_text(service.client,
                              "one two three four five six seven eight nine ten one two three four "
                              "five six seven eight nine ten one two three four five six seven",
                              300, 0, &answer);
        service_answer_free(&answer);
        nodes = nodes_of(&service);
        rate = fastest(nodes);
        json_decref(nodes);
    }
    assert_true(rate > 0);
    struct program program = {.runtime_dir = service.directory};
    struct outcome outcome = programs_run(&program, ARGUMENTS("status"));
    programs_assert_done(&outcome);
    assert_non_null(strstr(outcome.out, "RESERVED"));
    assert_non_null(strstr(outcome.out, " %"));
    programs_free(&outcome);
    service_stop(&service);
}

static void memory_is_a_share(void **state)
{
    (void)state;
    struct service service;
    service_start(&service, ARGUMENTS("--model", service_tiny_model(""), "--memory", "2%", "--stores", "2"),
                  (const char *const[]){"HWLOC_SYNTHETIC=numa:1(memory=4GB) pu:2", NULL});
    json_t *nodes = nodes_with_pages(&service);
    assert_int_equal(json_array_size(nodes), 1);
    assert_int_equal(number(nodes, 0, "stores"), 2);
    assert_in_range(number(nodes, 0, "bytes_reserved"), 64 * MIB, 77 * MIB); /* 2 % of 4 GB, in whole 2 MiB a store */
    json_decref(nodes);
    service_stop(&service);
}

static void more_than_there_is(void **state)
{
    (void)state;
    struct service service;
    service_launch(&service, ARGUMENTS("--model", service_tiny_model(""), "--memory", "100TiB"), NULL);
    wait_for_log(&service, "not formatted: a segment of 10");
    struct hcattn_health health = {.ready = true};
    assert_int_equal(hcattn_health(service.client, 60000, &health, NULL), 0);
    assert_false(health.ready);
    service_stop(&service);
}

static void huge_pages(void **state)
{
    (void)state;
    struct service service;
    service_start(&service, ARGUMENTS("--model", service_tiny_model(""), "--memory", "64MiB", "--huge-pages", "off"),
                  NULL);
    assert_true(service_log_contains(&service, "no huge pages"));
    service_stop(&service);
    /* a segment smaller than one such page cannot have any */
    service_launch(&service,
                   ARGUMENTS("--model", service_tiny_model(""), "--memory", "1MiB", "--huge-pages", "require"), NULL);
    wait_for_log(&service, "--huge-pages require: 0 of 1 MiB are in huge pages; 'sysctl vm.nr_hugepages=");
    service_stop(&service);
}

/* ---- machines of several nodes ---- */

static void one_store_a_node(void **state)
{
    (void)state;
    struct service service;
    service_start(&service, ARGUMENTS("--model", service_tiny_model(""), "--memory", "16MiB"),
                  (const char *const[]){TWO_NODES, NULL});
    json_t *nodes = nodes_with_pages(&service);
    assert_int_equal(json_array_size(nodes), 2);
    for (size_t i = 0; i < 2; i++) {
        assert_int_equal(number(nodes, i, "node"), i);
        assert_int_equal(number(nodes, i, "stores"), 1);
        assert_int_equal(number(nodes, i, "bound"), 0);
        assert_int_equal(number(nodes, i, "cores"), 1);
    }
    assert_true(service_log_contains(&service, "2 cpus are shared by 1 worker and 2 stores"));
    json_decref(nodes);
    service_stop(&service);
    service_start(&service,
                  ARGUMENTS("--model", service_tiny_model(""), "--memory", "16MiB", "--nodes", "1", "--stores", "3"),
                  (const char *const[]){TWO_NODES, NULL});
    nodes = nodes_with_pages(&service);
    assert_int_equal(json_array_size(nodes), 1);
    assert_int_equal(number(nodes, 0, "node"), 1);
    assert_int_equal(number(nodes, 0, "stores"), 3);
    json_decref(nodes);
    service_stop(&service);
}

static void nodes_that_are_not_there(void **state)
{
    (void)state;
    static const struct {
        const char *nodes, *part;
    } cases[] = {
        {"7", "there is no node 7 that may be used; there are 0, 1"},
        {"0,0", "node 0 is named twice"},
        {"", "numbers of nodes with commas between"},
        {"0,", "numbers of nodes with commas between"},
        {"one", "numbers of nodes with commas between"},
        {"-1", "numbers of nodes with commas between"},
        {"99999999999999999999", "there is no node"},
    };
    char directory[] = "/tmp/hcattn-test-XXXXXX", assigned[64];
    assert_non_null(mkdtemp(directory));
    struct program program = {.runtime_dir = directory, .environment = ARGUMENTS(TWO_NODES)};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        snprintf(assigned, sizeof(assigned), "--nodes=%s", cases[i].nodes);
        struct outcome outcome = programs_run(&program, ARGUMENTS("up", "--model", service_tiny_model(""), assigned));
        programs_assert_refused(&outcome, 2, ARGUMENTS("hcattn up: --nodes", cases[i].part));
        programs_free(&outcome);
    }
    program.name = "hc-value-store";
    struct outcome outcome = programs_run(&program, ARGUMENTS("--node", "7"));
    programs_assert_refused(&outcome, 2, ARGUMENTS("there is no node 7 with memory: nodes are 0, 1"));
    programs_free(&outcome);
    assert_int_equal(rmdir(directory), 0);
}

/* ---- no right to bind ---- */

/* As docker's default does without SYS_NICE. Stays until the end of this process, and of all that it starts. */
static void forbid_binding(void)
{
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, arch)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, AUDIT_ARCH_X86_64, 0, 6),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_mbind, 3, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_set_mempolicy, 2, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_get_mempolicy, 1, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_move_pages, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {.len = sizeof(code) / sizeof(code[0]), .filter = code};
    assert_int_equal(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
    assert_int_equal(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program), 0);
}

static void without_the_right_to_bind(void **state)
{
    (void)state;
    struct service service;
    struct answer answer = {0};
    forbid_binding();
    service_start(&service, ARGUMENTS("--model", service_tiny_model(""), "--memory", "64MiB"), NULL);
    assert_true(service_log_contains(&service, "memory is not bound to node"));
    assert_true(service_log_contains(&service, "cap_add: [SYS_NICE]"));
    json_t *nodes = nodes_with_pages(&service);
    assert_int_equal(number(nodes, 0, "bound"), 0);
    assert_true(number(nodes, 0, "bytes_local") * 100 >= number(nodes, 0, "bytes_resident") * 99); /* all the same */
    json_decref(nodes);
    service_generate_text(service.client, "words", 8, 0, &answer);
    service_answer_free(&answer);
    service_stop(&service);
}

static void strict_without_the_right(void **state)
{
    (void)state;
    char directory[] = "/tmp/hcattn-test-XXXXXX";
    assert_non_null(mkdtemp(directory));
    struct program program = {.runtime_dir = directory, .name = "hc-value-store"};
    struct outcome outcome = programs_run(&program, ARGUMENTS("--strict-numa"));
    programs_assert_refused(&outcome, 2, ARGUMENTS("--strict-numa: memory cannot be bound to node", "SYS_NICE"));
    programs_free(&outcome);
    program.name = NULL;
    outcome = programs_run(&program, ARGUMENTS("up", "--model", service_tiny_model(""), "--strict-numa"));
    programs_assert_refused(&outcome, 2,
                            ARGUMENTS("hcattn up: --strict-numa: memory cannot be bound to node", "SYS_NICE"));
    programs_free(&outcome);
    assert_int_equal(rmdir(directory), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pages_lie_where_they_should),
        cmocka_unit_test(memory_is_a_share),
        cmocka_unit_test(more_than_there_is),
        cmocka_unit_test(huge_pages),
        cmocka_unit_test(one_store_a_node),
        cmocka_unit_test(nodes_that_are_not_there),
        cmocka_unit_test(without_the_right_to_bind), /* and what follows */
        cmocka_unit_test(strict_without_the_right),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
