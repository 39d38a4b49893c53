/* backend_cpu.c - the cpu back end: opening and memory; weights and operations are in cpu_*.c. */
#include "gpu-worker/backend/cpu/cpu_internal.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "common/pool.h"

static const struct cpu_kernels *ops_of(enum kernels_isa isa)
{
#if defined(__x86_64__)
    if (isa == KERNELS_ISA_AVX512)
        return &cpu_avx512_kernels;
    if (isa == KERNELS_ISA_AVX2)
        return &cpu_avx2_kernels;
#endif
    (void)isa;
    return &cpu_plain_kernels;
}

static struct backend *cpu_close(struct backend *backend)
{
    if (backend) {
        memory_free(backend->activations);
        memory_free(backend->rope.angles);
        memory_arena_fini(&backend->arena);
        for (uint32_t i = 0; backend->node_memories && i < backend->n_nodes; i++)
            memory_arena_fini(&backend->node_memories[i].arena);
        free(backend->node_memories);
        free(backend);
    }
    return NULL;
}

static void bind_to_node(void *context, void *address, size_t n_bytes)
{
    const struct cpu_node *node = context;
    nodes_bind_memory(node->backend->nodes, node->index, address, n_bytes);
}

static int open_nodes(struct backend *backend, struct nodes *nodes)
{
    backend->n_nodes = 1;
    assert(pool_n_groups(backend->pool) == (nodes ? nodes->n_nodes : 1));
    if (!nodes)
        return 0;
    backend->node_memories = calloc(nodes->n_nodes, sizeof *backend->node_memories);
    if (!backend->node_memories)
        return -ENOMEM;
    backend->nodes = nodes;
    backend->n_nodes = nodes->n_nodes;
    for (uint32_t i = 0; i < nodes->n_nodes; i++) {
        struct cpu_node *node = &backend->node_memories[i];
        *node = (struct cpu_node){.backend = backend, .index = i, .home = {.bind = bind_to_node, .context = node}};
        node->arena.home = &node->home;
    }
    return 0;
}

static int cpu_open(const struct backend_options *options, struct backend **ret_backend, char *error, size_t error_size)
{
    const struct kernels *kernels = kernels_get(options->isa);
    if (!kernels) {
        snprintf(error, error_size, "this CPU does not have the instruction set that was asked for");
        return -ENOTSUP;
    }
    struct backend *backend = calloc(1, sizeof *backend);
    if (backend)
        backend->rope.angles = memory_alloc((size_t)CPU_ROPE_TOKENS * CPU_ROPE_ANGLES * sizeof *backend->rope.angles);
    if (backend)
        backend->pool = options->pool;
    if (!backend || !backend->rope.angles || open_nodes(backend, options->nodes) < 0) {
        snprintf(error, error_size, "no memory for the cpu back end");
        cpu_close(backend);
        return -ENOMEM;
    }
    backend->n_bytes = memory_bytes(backend->rope.angles);
    backend->kernels = kernels;
    backend->ops = ops_of(kernels->isa);
    uint32_t n_threads = pool_n_threads(options->pool);
    snprintf(backend->description, sizeof backend->description, "cpu, %s, %u thread%s", kernels->name, n_threads,
             n_threads == 1 ? "" : "s");
    *ret_backend = backend;
    return 0;
}

static const char *cpu_describe(const struct backend *backend)
{
    return backend->description;
}

static void *cpu_alloc(struct backend *backend, size_t n_bytes)
{
    void *memory = memory_alloc(n_bytes);
    backend->n_bytes += memory_bytes(memory);
    return memory;
}

static void cpu_free(struct backend *backend, void *memory)
{
    backend->n_bytes -= memory_bytes(memory);
    memory_free(memory);
}

static size_t cpu_bytes(const struct backend *backend)
{
    return backend->n_bytes;
}

const struct backend_ops backend_cpu = {
    .name = "cpu",
    .open = cpu_open,
    .close = cpu_close,
    .describe = cpu_describe,
    .alloc = cpu_alloc,
    .free = cpu_free,
    .bytes = cpu_bytes,
    .weight_new = cpu_weight_new,
    .weight_free = cpu_weight_free,
    .weight_bytes = cpu_weight_bytes,
    .node_bytes = cpu_weight_node_bytes,
    .embed = cpu_rows_embed,
    .rms_norm = cpu_rows_rms_norm,
    .matmul = cpu_matmul,
    .rope = cpu_rows_rope,
    .swiglu = cpu_rows_swiglu,
    .add = cpu_rows_add,
    .copy = backend_copy_in_host,
    .encode_rows = cpu_rows_encode,
    .attend = cpu_attend,
};
