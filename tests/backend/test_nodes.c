/* test_nodes.c - weights split by node: who gets what on machines of all kinds, and that no bit of a product changes. */
#include <errno.h>
#include <limits.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/pool.h"
#include "gpu-worker/backend/cpu/cpu_internal.h"
#include "tests/backend/fixture.h"

#define MAX_TOKENS 520u
#define MAX_ROWS   130u
#define COLUMNS    256u

/* Node 0: cpus 0-3; node 1: cpus 4-5 and no memory; node 2: cpus 6-13; node 1 is nearer to 2 than to 0. */
static const char with_a_memory_less_node[] =
    "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<!DOCTYPE topology SYSTEM \"hwloc2.dtd\">\n<topology version=\"2.0\">"
    "<object type=\"Machine\" os_index=\"0\" gp_index=\"1\" cpuset=\"0x3fff\" complete_cpuset=\"0x3fff\" "
    "nodeset=\"0x7\" "
    "complete_nodeset=\"0x7\" allowed_cpuset=\"0x3fff\" allowed_nodeset=\"0x7\">%s</object>"
    "<distances2 type=\"NUMANode\" nbobjs=\"3\" kind=\"5\" name=\"NUMALatency\" indexing=\"os\"><indexes "
    "length=\"5\">0 1 2"
    "</indexes><u64values length=\"26\">10 21 21 21 10 12 21 12 10</u64values></distances2></topology>\n";

static struct topology *load(const char *source, const char *cpus)
{
    struct topology *topology = NULL;
    assert_int_equal(topology_load_from(source, cpus, &topology), 0);
    return topology;
}

static struct topology *load_memory_less(const char *cpus)
{
    static const struct {
        unsigned first, n;
        const char *bytes;
    } nodes[] = {{0, 4, "4294967296"}, {4, 2, "0"}, {6, 8, "4294967296"}};
    char *packages = NULL, *xml = NULL;
    size_t size;
    unsigned id = 1;
    FILE *out = open_memstream(&packages, &size);
    assert_non_null(out);
    for (unsigned i = 0; i < 3; i++) {
        char sets[160];
        snprintf(sets, sizeof(sets),
                 "nodeset=\"0x%x\" complete_nodeset=\"0x%x\" cpuset=\"0x%x\" complete_cpuset=\"0x%x\"", 1u << i,
                 1u << i, ((1u << nodes[i].n) - 1) << nodes[i].first, ((1u << nodes[i].n) - 1) << nodes[i].first);
        fprintf(out, "<object type=\"Package\" os_index=\"%u\" gp_index=\"%u\" %s>", i, ++id, sets);
        fprintf(out, "<object type=\"NUMANode\" os_index=\"%u\" gp_index=\"%u\" local_memory=\"%s\" %s/>", i, ++id,
                nodes[i].bytes, sets);
        for (unsigned cpu = nodes[i].first; cpu < nodes[i].first + nodes[i].n; cpu++)
            fprintf(out,
                    "<object type=\"PU\" os_index=\"%u\" gp_index=\"%u\" cpuset=\"0x%x\" complete_cpuset=\"0x%x\" "
                    "nodeset=\"0x%x\" complete_nodeset=\"0x%x\"/>",
                    cpu, ++id, 1u << cpu, 1u << cpu, 1u << i, 1u << i);
        fprintf(out, "</object>");
    }
    assert_int_equal(fclose(out), 0);
    out = open_memstream(&xml, &size);
    assert_non_null(out);
    fprintf(out, with_a_memory_less_node, packages);
    assert_int_equal(fclose(out), 0);
    struct topology *topology = load(xml, cpus);
    free(xml);
    free(packages);
    return topology;
}

/* Threads of the nodes, "0:4 1:4" by the kernel's numbers, or the error. */
static void assert_plan(const struct topology *topology, uint32_t n_threads, const char *expected)
{
    struct nodes *nodes = NULL;
    char text[128] = "";
    int result = nodes_new(topology, n_threads, &nodes);
    uint32_t at = 0;
    for (uint32_t i = 0; result == 0 && i < nodes->n_nodes; i++) {
        snprintf(text + strlen(text), sizeof(text) - strlen(text), "%s%u:%u", i ? " " : "", nodes->nodes[i].os_index,
                 nodes->nodes[i].n_threads);
        for (uint32_t k = 0; k < nodes->nodes[i].n_threads; k++)
            assert_int_equal(nodes->node_of_thread[at++], i);
    }
    if (result == 0)
        assert_int_equal(at, n_threads);
    else
        snprintf(text, sizeof(text), "%s", strerror(-result));
    assert_string_equal(text, expected);
    assert_null(nodes_free(nodes));
}

static void threads_in_proportion_to_cpus(void **state)
{
    (void)state;
    struct topology *topology = load("pack:2 [numa(memory=4GB)] core:4 pu:2", NULL);
    assert_plan(topology, 16, "0:8 1:8");
    assert_plan(topology, 5, "0:3 1:2");
    assert_plan(topology, 2, "0:1 1:1");
    assert_plan(topology, 1, strerror(ERANGE));
    assert_plan(topology, 40, "0:20 1:20");
    topology_free(topology);
    topology = load("pack:2 [numa(memory=4GB)] core:8 pu:1", "0-5,8-9"); /* a cpuset: six cpus here, two there */
    assert_plan(topology, 8, "0:6 1:2");
    assert_plan(topology, 4, "0:3 1:1");
    assert_plan(topology, 2, "0:1 1:1");
    topology_free(topology);
    topology = load("pack:4 [numa(memory=4GB)] core:8 pu:1", "0,8-15,24-31");
    assert_plan(topology, 17, "0:1 1:8 3:8");
    assert_plan(topology, 3, "0:1 1:1 3:1");
    topology_free(topology);
}

static void one_node_is_not_split(void **state)
{
    (void)state;
    struct topology *topology = load("pack:2 [numa(memory=4GB)] core:4 pu:2", "8-15");
    assert_plan(topology, 8, strerror(ENODATA));
    topology_free(topology);
    topology = load("numa:1(memory=4GB) core:2 pu:1", NULL);
    assert_plan(topology, 2, strerror(ENODATA));
    topology_free(topology);
    assert_int_equal(topology_load(&topology), 0); /* this machine: whatever it has */
    struct nodes *nodes = NULL;
    assert_true(nodes_new(topology, 0, &nodes) < 0);
    assert_null(nodes);
    topology_free(topology);
}

static void cpus_of_a_node_without_memory_help_their_neighbour(void **state)
{
    (void)state;
    struct topology *topology = load_memory_less(NULL);
    struct nodes *nodes = NULL;
    assert_plan(topology, 14, "0:4 2:10");
    assert_plan(topology, 2, "0:1 2:1");
    assert_int_equal(nodes_new(topology, 14, &nodes), 0);
    uint32_t n_there = 0;
    for (uint32_t i = 0; i < 14; i++) { /* they run on node 1, and read node 2 */
        n_there += nodes->place_of_thread[i] == 1;
        assert_true(nodes->place_of_thread[i] != 1 || nodes->node_of_thread[i] == 1);
    }
    assert_int_equal(n_there, 2);
    nodes_free(nodes);
    topology_free(topology);
    topology = load_memory_less("0-5"); /* node 2 has no cpus of ours: node 0 is what is left */
    assert_plan(topology, 6, strerror(ENODATA));
    topology_free(topology);
}

static void rows_in_proportion_to_threads(void **state)
{
    (void)state;
    struct topology *topology = load("pack:3 [numa(memory=4GB)] core:4 pu:1", "0-3,4-5,8");
    struct nodes *nodes = NULL;
    uint32_t first[4];
    assert_int_equal(nodes_new(topology, 7, &nodes), 0); /* 4, 2 and 1 threads */
    nodes_split(nodes, 700, first);
    assert_memory_equal(first, ((const uint32_t[]){0, 400, 600, 700}), sizeof(first));
    for (uint32_t n = 0; n < 300; n++) { /* all units, in order, none off by more than one */
        nodes_split(nodes, n, first);
        assert_int_equal(first[0], 0);
        assert_int_equal(first[3], n);
        for (uint32_t i = 0; i < 3; i++) {
            assert_true(first[i] <= first[i + 1]);
            const double fair = n * (double)nodes->nodes[i].n_threads / 7;
            assert_true((double)(first[i + 1] - first[i]) <= fair + 1 && (double)(first[i + 1] - first[i]) >= fair - 1);
        }
    }
    nodes_split(nodes, UINT32_MAX, first);
    assert_int_equal(first[3], UINT32_MAX);
    assert_in_range(first[1], 2454267024u, 2454267028u);
    nodes_free(nodes);
    topology_free(topology);
}

static void what_was_achieved_is_said(void **state)
{
    (void)state;
    struct topology *topology = load("pack:2 [numa(memory=4GB)] core:4 pu:1", "0-5");
    struct nodes *nodes = NULL;
    char text[400];
    struct nodes_pages pages[2] = {{.bytes = 65011712, .bytes_on_node = 65011712},
                                   {.bytes = 33554432, .bytes_on_node = 33500000}};
    assert_int_equal(nodes_new(topology, 6, &nodes), 0);
    assert_string_equal(nodes_describe(nodes, pages, text, sizeof(text)),
                        "weights split over 2 nodes (node 0: 4 threads, 62.0 MiB, 100 % local; node 1: 2 threads, 32.0 "
                        "MiB, 99 % local)");
    assert_int_equal(nodes_percent_local(nodes, pages), 99);
    assert_int_equal(nodes_memory_refused(nodes), 0);
    assert_int_equal(nodes_threads_refused(nodes), 0);
    nodes_bind_thread(nodes, 5);                          /* another machine: it cannot be done */
    atomic_store(&nodes->nodes[1].memory_result, -EPERM); /* as a container's filter has it */
    pages[0].error = -EIO;
    assert_string_equal(
        nodes_describe(nodes, pages, text, sizeof(text)),
        "weights split over 2 nodes (node 0: 4 threads, pages not known; node 1: 2 threads, threads not "
        "bound (Function not implemented), memory not bound (Operation not permitted), 32.0 MiB, 99 % "
        "local)");
    assert_int_equal(nodes_percent_local(nodes, pages), -1);
    assert_int_equal(nodes_memory_refused(nodes), -EPERM);
    assert_int_equal(nodes_threads_refused(nodes), -ENOSYS);
    for (size_t size = 1; size < sizeof(text); size += 37) {
        memset(text, 'x', sizeof(text));
        nodes_describe(nodes, pages, text, size);
        assert_true(strlen(text) < size);
        assert_int_equal(text[size], 'x');
    }
    nodes_free(nodes);
    topology_free(topology);
}

/* ---- products ---- */

static _Thread_local uint32_t my_thread; /* of the pool */

static void set_up(void *context, uint32_t thread)
{
    (void)context;
    kernels_thread_setup();
    my_thread = thread;
}

struct split {
    struct topology *topology;
    struct nodes *nodes;
    struct pool *pool;
    struct backend *backend;
};

static void split_open(struct split *split, const char *cpus, enum kernels_isa isa)
{
    char error[128] = "";
    split->topology = load("pack:3 [numa(memory=4GB)] core:4 pu:1", cpus);
    assert_int_equal(nodes_new(split->topology, topology_n_allowed_cpus(split->topology), &split->nodes), 0);
    assert_int_equal(pool_new_grouped(split->nodes->n_threads, split->nodes->node_of_thread, split->nodes->n_nodes,
                                      set_up, NULL, &split->pool),
                     0);
    struct backend_options options = {.isa = isa, .pool = split->pool, .nodes = split->nodes};
    if (backend_cpu.open(&options, &split->backend, error, sizeof(error)) != 0)
        fail_msg("%s", error);
}

static void split_close(struct split *split)
{
    backend_cpu.close(split->backend);
    pool_free(split->pool);
    nodes_free(split->nodes);
    topology_free(split->topology);
}

/* 1 + 1, 1 + 3 and 2 + 1 + 1 threads. */
#ifdef HCATTN_SANITIZED
static const char *const machines[] = {"0,4", "0-1,4,8"};
#else
static const char *const machines[] = {"0,4", "0,4-6", "0-1,4,8"};
#endif
#define N_MACHINES (sizeof(machines) / sizeof(machines[0]))

static void no_bit_changes(void **state)
{
    const struct fixture *fixture = *state;
    static const uint32_t rows[] = {1, 2, 3, 9, 40, 65, 130}; /* fewer than threads, than a tile; not whole tiles */
    static const uint32_t tokens[] = {1, 2, 3, 66, MAX_TOKENS};
    static float x[MAX_TOKENS * COLUMNS], y[MAX_TOKENS * MAX_ROWS], expected[MAX_TOKENS * MAX_ROWS];
    float *out = y, *whole = expected;
    fixture_fill(x, sizeof(x) / sizeof(x[0]), 3.0f);
    for (uint32_t i = 1; i < fixture->n_instances; i += 2) { /* one thread on each instruction set */
        const struct fixture_instance *on = &fixture->instances[i];
        for (size_t m = 0; m < N_MACHINES; m++) {
            struct split split;
            split_open(&split, machines[m], (enum kernels_isa)(KERNELS_ISA_PLAIN + i / 2));
            assert_true(strncmp(backend_cpu.describe(split.backend), on->name, strlen("cpu, avx")) == 0);
            for (size_t k = 0; k < FIXTURE_N_TYPES * (sizeof(rows) / sizeof(rows[0])); k++) {
                const uint32_t n_rows = rows[k / FIXTURE_N_TYPES];
                const enum tensor_type type = fixture_types[k % FIXTURE_N_TYPES];
                struct tensor tensor = fixture_tensor(type, n_rows, COLUMNS);
                const size_t n_bytes = backend_cpu.bytes(split.backend);
                struct weight *weight = NULL, *one = NULL;
                assert_int_equal(backend_cpu.weight_new(split.backend, &tensor, &weight), 0);
                assert_int_equal(on->ops->weight_new(on->backend, &tensor, &one), 0);
                assert_int_equal(weight->n_parts, n_rows == 1 ? 1 : split.nodes->n_nodes);
                assert_true(backend_cpu.weight_bytes(weight) >= tensor.n_bytes);
                for (size_t t = 0; t < sizeof(tokens) / sizeof(tokens[0]); t++) {
                    if (tokens[t] == MAX_TOKENS && (n_rows != 65 || (type != TENSOR_Q4_1 && type != TENSOR_F16)))
                        continue;
                    const size_t size = (size_t)tokens[t] * n_rows * sizeof(*y);
                    memset(y, 0xff, size);
                    backend_cpu.matmul(split.backend, (const struct weight *const *)&weight, 1, x, tokens[t], &out);
                    on->ops->matmul(on->backend, (const struct weight *const *)&one, 1, x, tokens[t], &whole);
                    if (memcmp(y, expected, size) != 0)
                        fail_msg("%s %ux%u on %s, cpus %s: %u tokens differ", tensor_type_name((uint32_t)type), n_rows,
                                 COLUMNS, on->name, machines[m], tokens[t]);
                }
                const uint32_t ids[] = {n_rows - 1, 0, n_rows / 2};
                backend_cpu.embed(split.backend, weight, ids, 3, y);
                on->ops->embed(on->backend, one, ids, 3, expected);
                assert_memory_equal(y, expected, 3 * COLUMNS * sizeof(*y));
                on->ops->weight_free(on->backend, one);
                backend_cpu.weight_free(split.backend, weight);
                assert_true(backend_cpu.bytes(split.backend) >= n_bytes); /* activations may have grown, */
                weight = NULL;
                const size_t after = backend_cpu.bytes(split.backend);
                assert_int_equal(backend_cpu.weight_new(split.backend, &tensor, &weight), 0);
                backend_cpu.weight_free(split.backend, weight);
                assert_int_equal(backend_cpu.bytes(split.backend), after); /* and nothing else */
                fixture_tensor_free(&tensor);
            }
            split_close(&split);
        }
    }
}

static void several_matrices_of_one_input(void **state)
{
    const struct fixture *fixture = *state;
    enum { TOKENS = 70, N = 4 };
    static const uint32_t rows[N] = {33, 1, 130, 9};
    static const enum tensor_type types[N] = {TENSOR_Q4_K, TENSOR_Q8_0, TENSOR_F16, TENSOR_Q6_K};
    static float x[TOKENS * COLUMNS], y[N][TOKENS * MAX_ROWS], expected[N][TOKENS * MAX_ROWS];
    const struct fixture_instance *on = &fixture->instances[1];
    struct split split;
    split_open(&split, machines[N_MACHINES - 1], KERNELS_ISA_PLAIN);
    fixture_fill(x, sizeof(x) / sizeof(x[0]), 1.0f);
    struct tensor tensors[N];
    struct weight *weights[N], *whole[N];
    for (int w = 0; w < N; w++) {
        tensors[w] = fixture_tensor(types[w], rows[w], COLUMNS);
        assert_int_equal(backend_cpu.weight_new(split.backend, &tensors[w], &weights[w]), 0);
        assert_int_equal(on->ops->weight_new(on->backend, &tensors[w], &whole[w]), 0);
    }
    backend_cpu.matmul(split.backend, (const struct weight *const *)weights, N, x, TOKENS,
                       (float *const[]){y[0], y[1], y[2], y[3]});
    on->ops->matmul(on->backend, (const struct weight *const *)whole, N, x, TOKENS,
                    (float *const[]){expected[0], expected[1], expected[2], expected[3]});
    for (int w = 0; w < N; w++) {
        assert_memory_equal(y[w], expected[w], (size_t)TOKENS * rows[w] * sizeof(float));
        backend_cpu.weight_free(split.backend, weights[w]);
        on->ops->weight_free(on->backend, whole[w]);
        fixture_tensor_free(&tensors[w]);
    }
    split_close(&split);
}

static struct {
    const struct nodes *nodes;
    const struct weight *weight;
    atomic_uint n_own, n_others;
    _Atomic uint32_t n_rows;
} seen;

static void look(const struct cpu_packed *packed, uint32_t first_tile, uint32_t n_tiles, const struct cpu_activation *x,
                 uint32_t n_tokens, float *y, size_t y_stride)
{
    const struct cpu_part *own = &seen.weight->parts[seen.nodes->node_of_thread[my_thread]];
    atomic_fetch_add(packed == &own->packed ? &seen.n_own : &seen.n_others, 1);
    atomic_fetch_add(&seen.n_rows, n_tiles * packed->tile_rows);
    cpu_plain_kernels.matmul_packed(packed, first_tile, n_tiles, x, n_tokens, y, y_stride);
}

static void a_thread_multiplies_rows_of_its_node(void **state)
{
    (void)state;
    static float x[16 * COLUMNS], y[16 * 4096];
    float *out = y;
    struct split split;
    my_thread = 0;
    split_open(&split, machines[N_MACHINES - 1], KERNELS_ISA_PLAIN);
    struct cpu_kernels spy = *split.backend->ops;
    spy.matmul_packed = look;
    split.backend->ops = &spy;
    struct tensor tensor = fixture_tensor(TENSOR_Q4_1, 4096, COLUMNS);
    struct weight *weight = NULL;
    assert_int_equal(backend_cpu.weight_new(split.backend, &tensor, &weight), 0);
    seen.nodes = split.nodes;
    seen.weight = weight;
    assert_int_equal(weight->parts[0].n_rows, 2048);
    assert_int_equal(weight->parts[1].n_rows, 1024);
    for (uint32_t i = 0; i < 20; i++)
        backend_cpu.matmul(split.backend, (const struct weight *const *)&weight, 1, x, i % 2 ? 16 : 1, &out);
    assert_int_equal(atomic_load(&seen.n_others), 0);
    assert_int_equal(atomic_load(&seen.n_rows), 20 * 4096);
    assert_true(atomic_load(&seen.n_own) >= 20 * 4);
    backend_cpu.weight_free(split.backend, weight);
    fixture_tensor_free(&tensor);
    split_close(&split);
}

/* The n-th allocation of a part fails: an error, nothing kept, and the back end goes on. */
static atomic_int n_until_failure = INT_MAX;

void *__real_memory_alloc_in(struct memory_arena *arena, size_t n_bytes);
void *__wrap_memory_alloc_in(struct memory_arena *arena, size_t n_bytes);

void *__wrap_memory_alloc_in(struct memory_arena *arena, size_t n_bytes)
{
    return atomic_fetch_sub(&n_until_failure, 1) == 0 ? NULL : __real_memory_alloc_in(arena, n_bytes);
}

static void no_memory_for_a_part(void **state)
{
    (void)state;
    static const enum tensor_type types[] = {TENSOR_Q4_K, TENSOR_BF16};
    struct split split;
    split_open(&split, machines[N_MACHINES - 1], KERNELS_ISA_PLAIN);
    for (size_t k = 0; k < 2; k++) {
        struct tensor tensor = fixture_tensor(types[k], 130, COLUMNS);
        struct weight *weight = NULL;
        int n = 0, result = -ENOMEM;
        for (; result == -ENOMEM; n++) {
            const size_t before = backend_cpu.bytes(split.backend);
            atomic_store(&n_until_failure, n);
            result = backend_cpu.weight_new(split.backend, &tensor, &weight);
            assert_true(result == 0 || (result == -ENOMEM && !weight && backend_cpu.bytes(split.backend) == before));
        }
        atomic_store(&n_until_failure, INT_MAX);
        assert_int_equal(result, 0);
        assert_int_equal(n, 3 + 1);
        backend_cpu.weight_free(split.backend, weight);
        fixture_tensor_free(&tensor);
    }
    split_close(&split);
}

/* ---- memory ---- */

/* What a home's mappings are asked of the system; the machine of this test may have any nodes. */
struct home {
    struct memory_home home;
    struct memory_arena arena;
    uint32_t n_bound;
    size_t n_bound_bytes;
    struct topology_range ranges[16];
    size_t n_ranges;
};

static int resident_bytes(struct topology_range *ranges, size_t n, uint64_t *ret_bytes)
{
    struct topology *topology = load(NULL, NULL);
    uint64_t on_node;
    int result = topology_resident_ranges(topology, 0, ranges, n, &on_node, ret_bytes);
    topology_free(topology);
    return result;
}

static void note_binding(void *context, void *address, size_t n_bytes)
{
    struct home *home = context;
    struct topology_range range = {(uintptr_t)address, (uintptr_t)address + n_bytes};
    uint64_t resident = 0;
    assert_int_equal((uintptr_t)address % MEMORY_HUGE_PAGE_BYTES, 0);
    assert_true(resident_bytes(&range, 1, &resident) < 0 || resident == 0); /* no page of it exists yet */
    home->n_bound++;
    home->n_bound_bytes += n_bytes;
}

static void add_range(void *context, const void *address, size_t n_bytes)
{
    struct home *home = context;
    assert_true(home->n_ranges < sizeof(home->ranges) / sizeof(home->ranges[0]));
    home->ranges[home->n_ranges++] = (struct topology_range){(uintptr_t)address, (uintptr_t)address + n_bytes};
}

/* Two homes, small and large pieces in turn, so that their mappings could become one: each page is counted in its own home. */
static void homes_keep_their_mappings_apart(void **state)
{
    (void)state;
    enum { N = 12 };
    static struct home homes[2];
    char *pieces[2][N];
    size_t n_given[2] = {0};
    for (size_t i = 0; i < N; i++) {
        for (int h = 0; h < 2; h++) {
            const size_t n_bytes = i % 3 == 2 ? 3 * MEMORY_HUGE_PAGE_BYTES + i * 1000 : 300000;
            struct home *home = &homes[h];
            home->home.bind = note_binding;
            home->home.context = home;
            home->arena.home = &home->home;
            pieces[h][i] = memory_alloc_in(&home->arena, n_bytes);
            assert_non_null(pieces[h][i]);
            assert_int_equal((uintptr_t)pieces[h][i] % 64, 0);
            assert_int_equal(pieces[h][i][n_bytes - 1], 0);
            memset(pieces[h][i], (int)i + 1, n_bytes);
            n_given[h] += n_bytes;
            assert_true(memory_bytes(pieces[h][i]) >= n_bytes);
        }
    }
    for (int h = 0; h < 2; h++) {
        struct home *home = &homes[h];
        uint64_t resident = 0;
        assert_int_equal(home->n_bound, N / 3 + 1); /* the small ones share one */
        memory_home_visit(&home->home, add_range, home);
        assert_int_equal(home->n_ranges, home->n_bound);
        if (resident_bytes(home->ranges, home->n_ranges, &resident) == 0) /* -ENOENT: a kernel without NUMA */
            assert_in_range(resident, n_given[h], home->n_bound_bytes);
        for (size_t i = 0; i < N; i++) {
            assert_int_equal(pieces[h][i][5], (int)i + 1);
            memory_free(pieces[h][i]);
        }
        memory_arena_fini(&home->arena);
        assert_null(home->home.chunks);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(threads_in_proportion_to_cpus),
        cmocka_unit_test(one_node_is_not_split),
        cmocka_unit_test(cpus_of_a_node_without_memory_help_their_neighbour),
        cmocka_unit_test(rows_in_proportion_to_threads),
        cmocka_unit_test(what_was_achieved_is_said),
        cmocka_unit_test_setup_teardown(no_bit_changes, fixture_open, fixture_close),
        cmocka_unit_test_setup_teardown(several_matrices_of_one_input, fixture_open, fixture_close),
        cmocka_unit_test(a_thread_multiplies_rows_of_its_node),
        cmocka_unit_test(no_memory_for_a_part),
        cmocka_unit_test(homes_keep_their_mappings_apart),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
