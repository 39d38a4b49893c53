/* backend_cpu.c - the cpu back end: opening, memory, weights; its operations are in cpu_*.c. */
#include "gpu-worker/backend/cpu/cpu_internal.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/pool.h"
#include "gpu-worker/backend/memory.h"
#include "gpu-worker/model/dequantize.h"

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
        free(backend);
    }
    return NULL;
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
    if (!backend || !backend->rope.angles) {
        snprintf(error, error_size, "no memory for the cpu back end");
        cpu_close(backend);
        return -ENOMEM;
    }
    backend->n_bytes = memory_bytes(backend->rope.angles);
    backend->kernels = kernels;
    backend->ops = ops_of(kernels->isa);
    backend->pool = options->pool;
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

/* Room for a chunk of quantized inputs of this many blocks. */
static int grow_activations(struct backend *backend, uint32_t n_blocks)
{
    if (n_blocks <= backend->activation_blocks)
        return 0;
    struct cpu_activation *room = memory_alloc((size_t)CPU_CHUNK_TOKENS * n_blocks * sizeof *backend->activations);
    if (!room)
        return -ENOMEM;
    backend->n_bytes += memory_bytes(room) - memory_bytes(backend->activations);
    memory_free(backend->activations);
    backend->activations = room;
    backend->activation_blocks = n_blocks;
    return 0;
}

static void fill_tile(void *context, uint32_t item, uint32_t thread)
{
    (void)thread;
    struct weight *weight = context;
    cpu_packed_fill(&weight->packed, &weight->tensor, item);
}

static int take_vector(struct backend *backend, struct weight *weight)
{
    const struct tensor *tensor = &weight->tensor;
    weight->vector = memory_alloc_in(&backend->arena, (size_t)tensor->n_columns * sizeof(float));
    if (!weight->vector)
        return -ENOMEM;
    weight->float_type = TENSOR_F32;
    weight->float_data = weight->vector;
    return dequantize_row(tensor->type, tensor->data, tensor->n_columns, weight->vector);
}

static int take_matrix(struct backend *backend, struct weight *weight)
{
    const struct tensor *tensor = &weight->tensor;
    if (tensor->type == TENSOR_F32 || tensor->type == TENSOR_F16 || tensor->type == TENSOR_BF16) {
        weight->float_type = tensor->type;
        weight->float_data = tensor->data;
        return 0;
    }
    int error = cpu_packed_init(&weight->packed, tensor, backend->ops->tile_rows, &backend->arena);
    if (error)
        return error;
    error = grow_activations(backend, weight->packed.n_blocks);
    if (!error)
        pool_run(backend->pool, weight->packed.n_tiles, fill_tile, weight);
    return error;
}

static size_t cpu_weight_bytes(const struct weight *weight)
{
    size_t n_bytes = sizeof *weight + memory_bytes(weight->vector) + memory_bytes(weight->packed.data);
    if (weight->float_data && !weight->vector) /* in the mapped file */
        n_bytes += tensor_row_bytes(weight->tensor.type, weight->tensor.n_columns) * weight->tensor.n_rows;
    return n_bytes;
}

static void destroy(struct weight *weight)
{
    cpu_packed_fini(&weight->packed);
    memory_free(weight->vector);
    free(weight);
}

static struct weight *cpu_weight_free(struct backend *backend, struct weight *weight)
{
    if (weight) {
        backend->n_bytes -= cpu_weight_bytes(weight);
        destroy(weight);
    }
    return NULL;
}

static int cpu_weight_new(struct backend *backend, const struct tensor *tensor, struct weight **ret_weight)
{
    if (tensor->n_rows == 0 || tensor_row_bytes(tensor->type, tensor->n_columns) == 0)
        return -ENOTSUP;
    struct weight *weight = calloc(1, sizeof *weight);
    if (!weight)
        return -ENOMEM;
    weight->tensor = *tensor;
    int error = tensor->n_rows == 1 ? take_vector(backend, weight) : take_matrix(backend, weight);
    if (error) {
        destroy(weight);
        return error;
    }
    backend->n_bytes += cpu_weight_bytes(weight);
    *ret_weight = weight;
    return 0;
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
    .embed = cpu_rows_embed,
    .rms_norm = cpu_rows_rms_norm,
    .matmul = cpu_matmul,
    .rope = cpu_rows_rope,
    .swiglu = cpu_rows_swiglu,
    .add = cpu_rows_add,
    .encode_rows = cpu_rows_encode,
    .attend = cpu_attend,
};
