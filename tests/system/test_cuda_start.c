/* test_cuda_start.c - a worker on the emulated device starts: what it takes, where it says that it is, how much it may use, and
 * what it says where there is no device. The worker alone: it ends when no coordinator answers. */
#include "common/topology.h"
#include "tests/system/programs.h"
#include "tests/system/service.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define WORKER "hc-gpu-worker"
#define START  "tiny: 2 layers" /* begins the start line */

struct folder {
    char path[64];   /* runtime directory */
    char learnt[80]; /* with statistics of the tiny model, gathered on the CPU: it takes the emulated device long */
};

static struct outcome run(const struct folder *folder, const char *setting, const char *const *arguments)
{
    const char *const environment[] = {setting, NULL};
    const struct program program = {
        .name = WORKER, .runtime_dir = folder->path, .environment = setting ? environment : NULL};
    return programs_run(&program, arguments);
}

#define ARGUMENTS_OF(folder, ...)                                                                                      \
    ARGUMENTS("--model", service_tiny_model(""), "--learnt-dir", (folder)->learnt, "--reconnect-timeout", "100ms",     \
              __VA_ARGS__)

static int set_up(void **state)
{
    struct folder *folder = calloc(1, sizeof(*folder));
    strcpy(folder->path, "/tmp/hcattn-test-XXXXXX");
    assert_non_null(mkdtemp(folder->path));
    snprintf(folder->learnt, sizeof(folder->learnt), "%s/learnt", folder->path);
    char command[128];
    snprintf(command, sizeof(command), "mkdir %s", folder->learnt);
    assert_int_equal(system(command), 0);
    struct outcome outcome = run(folder, NULL, ARGUMENTS_OF(folder, "--backend", "cpu"));
    assert_int_equal(outcome.status, 1);
    programs_free(&outcome);
    *state = folder;
    return 0;
}

static int tear_down(void **state)
{
    struct folder *folder = *state;
    char command[128];
    snprintf(command, sizeof(command), "rm -r %s", folder->path);
    int status = system(command);
    free(folder);
    return status;
}

/* The line of what was said that has this text, cut out; NULL: there is none. */
static char *line_with(const struct outcome *outcome, const char *text)
{
    char *at = strstr(outcome->err, text);
    if (!at)
        return NULL;
    char *begin = at, *end = strchr(at, '\n');
    while (begin > outcome->err && begin[-1] != '\n')
        begin--;
    return end ? strndup(begin, (size_t)(end - begin)) : strdup(begin);
}

/* It comes up to where it looks for a coordinator, and one line of what it says has all of these. */
static void says(const struct folder *folder, const char *setting, const char *const *arguments,
                 const char *const *parts)
{
    struct outcome outcome = run(folder, setting, arguments);
    char *line = line_with(&outcome, parts[0]);
    if (outcome.status != 1 || !strstr(outcome.err, "no coordinator in"))
        fail_msg("status %d: %s", outcome.status, outcome.err);
    for (size_t i = 0; parts[i]; i++)
        if (!line || !strstr(line, parts[i]))
            fail_msg("no line with '%s' and '%s': %s", parts[0], parts[i], outcome.err);
    free(line);
    programs_free(&outcome);
}

static void refused(const struct folder *folder, const char *setting, const char *const *arguments,
                    const char *const *parts)
{
    struct outcome outcome = run(folder, setting, arguments);
    programs_assert_refused(&outcome, 2, parts);
    programs_free(&outcome);
}

static void what_is_missing_is_said_in_one_line(void **state)
{
    const struct folder *folder = *state;
    static const struct {
        const char *setting, *why;
    } cases[] = {
        {"HCATTN_TEST_CUDA_NO_DEVICE=driver", ""}, /* which of two depends on whether this machine has the driver */
        {"HCATTN_TEST_CUDA_NO_DEVICE=old", "the driver is too old for CUDA 13 (has 12.2; 580 or later is needed)"},
        {"HCATTN_TEST_CUDA_NO_DEVICE=none", ""},
        {"CUDA_VISIBLE_DEVICES=", "CUDA_VISIBLE_DEVICES is set and empty"},
        {"CUDA_VISIBLE_DEVICES=-1", "CUDA_VISIBLE_DEVICES=-1 hides all of this machine's"},
        {"CUDA_VISIBLE_DEVICES=GPU-7", "CUDA_VISIBLE_DEVICES=GPU-7 names none of this machine's"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        refused(folder, cases[i].setting, ARGUMENTS_OF(folder, "--backend", "cuda"),
                ARGUMENTS("error ", "--backend cuda: ", cases[i].why));
    refused(folder, NULL, ARGUMENTS_OF(folder, "--backend", "cuda", "--gpu", "1"),
            ARGUMENTS("--backend cuda: there is no device 1: this process has 1"));
    refused(folder, NULL, ARGUMENTS_OF(folder, "--backend", "gpu"), ARGUMENTS("--backend gpu: there is no such"));
    refused(folder, NULL, ARGUMENTS_OF(folder, "--gpu", "first"), ARGUMENTS("--gpu"));
}

static void auto_takes_what_there_is(void **state)
{
    const struct folder *folder = *state;
    says(folder, NULL, ARGUMENTS_OF(folder, "--index", "3"), ARGUMENTS("back end cuda: a device is there", "info "));
    says(folder, "CUDA_VISIBLE_DEVICES=0", ARGUMENTS_OF(folder, "--gpu", "0"),
         ARGUMENTS(START, "; cuda, emulated on the CPU (device 0 of 1, "));
    says(folder, "HCATTN_TEST_CUDA_NO_DEVICE=none", ARGUMENTS_OF(folder, "--threads", "1"),
         ARGUMENTS("back end cpu: ", "info ", " device"));
    says(folder, "HCATTN_TEST_CUDA_NO_DEVICE=none", ARGUMENTS_OF(folder, "--threads", "1"),
         ARGUMENTS(START, "; cpu, ", "1 thread", "no limit"));
    says(folder, "HCATTN_TEST_CUDA_NO_DEVICE=old", ARGUMENTS_OF(folder, "--backend", "auto"),
         ARGUMENTS("back end cpu: the driver is too old", "warning "));
}

/* The address of some PCI device of this machine; false: there is none. */
static bool some_device(char address[32])
{
    DIR *folder = opendir("/sys/bus/pci/devices");
    bool is_there = false;
    if (!folder)
        return false;
    for (const struct dirent *entry; !is_there && (entry = readdir(folder));)
        if (strchr(entry->d_name, ':')) {
            snprintf(address, 32, "%.31s", entry->d_name);
            is_there = true;
        }
    closedir(folder);
    return is_there;
}

static void the_start_line_says_whether_it_is_near(void **state)
{
    const struct folder *folder = *state;
    char address[32], setting[64], near[64] = "device's node ";
    struct topology *topology;
    struct topology_node node;
    uint32_t index;
    says(folder, NULL, ARGUMENTS_OF(folder, "--backend", "cuda"),
         ARGUMENTS(START, "ffff:ff:1f.7", "compute capability 9.0", "device's node unknown: not bound"));
    if (!some_device(address))
        return;
    assert_int_equal(topology_load(&topology), 0);
    if (topology_node_of_pci(topology, address, &index) == 0 && topology_node(topology, index, &node) == 0)
        snprintf(near, sizeof(near), "near its device: node %u, %u cpu", node.os_index, node.n_cpus);
    topology_free(topology);
    snprintf(setting, sizeof(setting), "HCATTN_TEST_CUDA_PCI=%s", address);
    says(folder, setting, ARGUMENTS_OF(folder, "--backend", "cuda"), ARGUMENTS(START, address, near));
}

static void the_budget_is_what_the_device_has(void **state)
{
    const struct folder *folder = *state;
    const char *setting = "HCATTN_TEST_CUDA_BYTES=83886080"; /* 80 MiB, of which an eighth is left to the driver */
    says(folder, setting, ARGUMENTS_OF(folder, "--backend", "cuda"), ARGUMENTS(START, "limit 70.0 MiB"));
    says(folder, setting, ARGUMENTS_OF(folder, "--device-memory", "60MiB"), ARGUMENTS(START, "limit 60.0 MiB"));
    says(folder, setting, ARGUMENTS_OF(folder, "--device-memory", "1GiB"),
         ARGUMENTS("--device-memory: 1024.0 MiB are more than the 70.0 MiB that the device has", "warning "));
    says(folder, setting, ARGUMENTS_OF(folder, "--device-memory", "1MiB"),
         ARGUMENTS("no session has room on the device", "warning "));
    struct outcome outcome = run(folder, "HCATTN_TEST_CUDA_BYTES=262144", ARGUMENTS_OF(folder, "--backend", "cuda"));
    assert_int_equal(outcome.status, 2);
    assert_non_null(strstr(outcome.err, "weights: they do not fit into the 0.2 MiB that the device has"));
    programs_free(&outcome);
}

/* What `up` says of a worker that cannot have its device; the supervisor does not try again. */
static void a_service_without_its_device_does_not_start(void **state)
{
    const struct folder *folder = *state;
    const char *const environment[] = {"HCATTN_TEST_CUDA_NO_DEVICE=old", NULL};
    const struct program program = {.runtime_dir = folder->path, .environment = environment};
    struct outcome outcome =
        programs_run(&program, ARGUMENTS("up", "--model", service_tiny_model(""), "--memory", "64MiB", "--backend",
                                         "cuda", "--gpu", "0", "--log-level", "error"));
    assert_int_equal(outcome.status, 2);
    assert_non_null(strstr(outcome.err, "--backend cuda: the driver is too old"));
    assert_non_null(strstr(outcome.err, "hcattn up: gpu-worker 0 ended with status 2"));
    programs_free(&outcome);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_missing_is_said_in_one_line),
        cmocka_unit_test(auto_takes_what_there_is),
        cmocka_unit_test(the_start_line_says_whether_it_is_near),
        cmocka_unit_test(the_budget_is_what_the_device_has),
        cmocka_unit_test(a_service_without_its_device_does_not_start),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
