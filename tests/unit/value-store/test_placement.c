/* test_placement.c - a store's node, budget and the proof of where its pages lie. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/clock.h"
#include "value-store/store.h"

#define MIB ((uint64_t)1 << 20)

static const struct row_shape shape = {.n_layers = 2, .n_kv_heads = 2, .head_dim = 16, .codec = ROW_CODEC_F16};

static uint64_t read_now(const _Atomic uint64_t *value)
{
    return atomic_load_explicit(value, memory_order_relaxed);
}

/* All pages are told of although nobody has touched them; a segment that is gone is told of no more. */
static void pages_of_a_segment_are_found(void **state)
{
    (void)state;
    struct topology *topology = NULL;
    struct segment_mapping mapping = {0};
    struct progress progress = {0};
    struct placement *placement = NULL;
    int fd = -1;
    assert_int_equal(topology_load(&topology), 0);
    assert_int_equal(segment_create("test", 70 * MIB + 4096, &fd), 0); /* more than one piece, and not whole ones */
    assert_int_equal(segment_map(fd, 0, true, &mapping), 0);
    assert_int_equal(placement_start(topology, 0, &mapping, &progress, &placement), 0);
    uint64_t deadline = clock_deadline_us(UINT64_C(20000000));
    while (read_now(&progress.bytes_resident) == 0 && clock_remaining_us(deadline) > 0)
        clock_sleep_us(1000);
    assert_int_equal(read_now(&progress.bytes_resident), mapping.n_bytes);
    assert_true(read_now(&progress.bytes_local) <= mapping.n_bytes);
    if (topology_n_nodes(topology) == 1)
        assert_int_equal(read_now(&progress.bytes_local), mapping.n_bytes);
    assert_null(placement_stop(placement));
    assert_int_equal(read_now(&progress.bytes_resident) + read_now(&progress.bytes_local), 0);
    for (int i = 0; i < 20; i++) { /* stopped at any moment */
        assert_int_equal(placement_start(topology, 0, &mapping, &progress, &placement), 0);
        placement_stop(placement);
    }
    assert_null(placement_stop(NULL));
    segment_unmap(&mapping);
    close(fd);
    topology_free(topology);
}

static struct store_config config_of(uint64_t memory_bytes)
{
    return (struct store_config){.incarnation = 1, .memory_bytes = memory_bytes, .n_threads = 1};
}

static int open_store(const struct store_config *config, struct store **ret_store, const char *expected)
{
    char sentence[STORE_SENTENCE] = "";
    int result = store_open(config, ret_store, sentence);
    if (expected && !strstr(sentence, expected))
        fail_msg("%d: '%s'", result, sentence);
    return result;
}

static void a_store_has_a_node(void **state)
{
    (void)state;
    struct store *store = NULL;
    struct store_config config = config_of(8 * MIB);
    config.has_node = true;
    config.node = 7; /* the kernel's number, of a machine with nodes 0 and 1 */
    setenv("HWLOC_SYNTHETIC", "pack:2 [numa(memory=1GB)] core:1 pu:1", 1);
    assert_int_equal(open_store(&config, &store, "there is no node 7 with memory: nodes are 0, 1"), -ENOENT);
    assert_null(store);
    config.node = 1;
    config.strict_numa = true; /* what cannot be bound to is refused */
    assert_int_equal(open_store(&config, &store, "--strict-numa: memory cannot be bound to node 1"), -EPERM);
    config.strict_numa = false;
    assert_int_equal(open_store(&config, &store, NULL), 0);
    assert_int_equal(store_home_node(store), 1);
    assert_int_equal(store_node_cores(store), 1);
    assert_int_equal(store_numa_node(store), -1);
    store = store_close(store);
    config = config_of(8 * MIB);
    for (uint32_t i = 0; i < 4; i++) {
        config.index = i;
        assert_int_equal(open_store(&config, &store, NULL), 0);
        assert_int_equal(store_home_node(store), i % 2);
        store = store_close(store);
    }
    unsetenv("HWLOC_SYNTHETIC");
}

static void a_percentage_is_of_the_node(void **state)
{
    (void)state;
    struct store *store = NULL;
    struct store_config config = config_of(0);
    char sentence[STORE_SENTENCE] = "";
    setenv("HWLOC_SYNTHETIC", "numa:1(memory=40MB) pu:1", 1);
    config.memory_percent = 50;
    assert_int_equal(open_store(&config, &store, NULL), 0);
    assert_int_equal(store->config.memory_bytes, 18 * MIB); /* 20 MB, in whole 2 MiB */
    assert_int_equal(store_format(store, &shape, sentence), 0);
    assert_in_range(store->mapping.n_bytes, 17 * MIB, 18 * MIB);
    store = store_close(store);
    config.memory_percent = 1;
    assert_int_equal(open_store(&config, &store, "--memory 1%: that is nothing on node 0"), -ENOSPC);
    unsetenv("HWLOC_SYNTHETIC");
}

/* What is there already is let go of before a new segment is made; one that cannot be had leaves none. */
static void a_segment_that_is_too_large(void **state)
{
    (void)state;
    struct store *store = NULL;
    struct store_config config = config_of((uint64_t)100 << 40);
    char sentence[STORE_SENTENCE] = "";
    assert_int_equal(open_store(&config, &store, NULL), 0);
    assert_int_equal(store_format(store, &shape, sentence), -ENOMEM);
    assert_non_null(strstr(sentence, "MiB"));
    assert_null(store->blocks);
    assert_int_equal(store->segment_fd, -1);
    store->config.memory_bytes = 8 * MIB;
    store->config.huge_pages = STORE_HUGE_REQUIRE;
    int result = store_format(store, &shape, sentence);
    if (result == 0)
        assert_true(store->huge_bytes >= store->mapping.n_bytes / SEGMENT_ALIGNMENT * SEGMENT_ALIGNMENT);
    else
        assert_non_null(strstr(sentence, "--huge-pages require"));
    store->config.huge_pages = STORE_HUGE_OFF;
    assert_int_equal(store_format(store, &shape, sentence), 0);
    assert_int_equal(store->huge_bytes, 0);
    store_close(store);
}

static void formatting_is_given_up(void **state)
{
    (void)state;
    struct store *store = NULL;
    struct store_config config = config_of(8 * MIB);
    char sentence[STORE_SENTENCE] = "", byte = 0;
    int fds[2];
    assert_int_equal(pipe(fds), 0);
    assert_int_equal(open_store(&config, &store, NULL), 0);
    store->stop_fd = fds[0];
    assert_int_equal(store_format(store, &shape, sentence), 0); /* nobody stops it */
    assert_int_equal(write(fds[1], &byte, 1), 1);
    for (uint32_t huge = 0; huge < 3; huge++) {
        static const enum store_huge all[] = {STORE_HUGE_TRY, STORE_HUGE_REQUIRE, STORE_HUGE_OFF};
        store->config.huge_pages = all[huge];
        assert_int_equal(store_format(store, &shape, sentence), -ECANCELED);
        assert_string_equal(sentence, "the store is told to stop");
        assert_null(store->blocks);
        assert_int_equal(store->segment_fd, -1);
    }
    store_close(store);
    close(fds[0]);
    close(fds[1]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pages_of_a_segment_are_found), cmocka_unit_test(a_store_has_a_node),
        cmocka_unit_test(a_percentage_is_of_the_node),  cmocka_unit_test(a_segment_that_is_too_large),
        cmocka_unit_test(formatting_is_given_up),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
