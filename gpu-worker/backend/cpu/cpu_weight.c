/*
 * cpu_weight.c - matrices and vectors as the cpu back end keeps them: packed or as they are in the file, whole or split by node.
 *
 * Split, a node's part is allocated, touched and filled by threads of that node: where memory may not be bound, the first
 * touch decides where a page lies. Float matrices are copied then, which the mapped file would not need, since a file's pages
 * lie where they were read. Vectors and the rows that embed() reads are not split: they are small, or few at a time.
 */
#include "gpu-worker/backend/cpu/cpu_internal.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "common/pool.h"
#include "gpu-worker/model/dequantize.h"

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

/* The rows of a part as a tensor of its own. */
static struct tensor rows_of(const struct weight *weight, const struct cpu_part *part)
{
    struct tensor tensor = weight->tensor;
    const size_t row_bytes = tensor_row_bytes(tensor.type, tensor.n_columns);
    tensor.data = (const char *)tensor.data + part->first_row * row_bytes;
    tensor.n_rows = part->n_rows;
    tensor.n_bytes = part->n_rows * row_bytes;
    return tensor;
}

/* One call of the pool for all parts: its items are a part, or a tile of a part. */
struct taking {
    struct backend *backend;
    struct weight *weight;
    int errors[TOPOLOGY_MAX_NODES];
    uint32_t first_tile[TOPOLOGY_MAX_NODES + 1];
};

static struct memory_arena *arena_of(struct backend *backend, uint32_t part)
{
    return backend->nodes ? &backend->node_memories[part].arena : &backend->arena;
}

static void take_part(void *context, uint32_t item, uint32_t thread)
{
    (void)thread;
    struct taking *taking = context;
    struct weight *weight = taking->weight;
    struct cpu_part *part = &weight->parts[item];
    if (part->n_rows == 0)
        return;
    const struct tensor tensor = rows_of(weight, part);
    struct memory_arena *arena = arena_of(taking->backend, item);
    if (weight->is_packed) {
        taking->errors[item] = cpu_packed_init(&part->packed, &tensor, taking->backend->ops->tile_rows, arena);
        return;
    }
    part->copy = memory_alloc_in(arena, tensor.n_bytes);
    if (part->copy)
        memcpy(part->copy, tensor.data, tensor.n_bytes);
    else
        taking->errors[item] = -ENOMEM;
    part->rows = part->copy;
}

static void fill_tile(void *context, uint32_t item, uint32_t thread)
{
    (void)thread;
    const struct taking *taking = context;
    uint32_t p = 0;
    while (item >= taking->first_tile[p + 1])
        p++;
    struct cpu_part *part = &taking->weight->parts[p];
    const struct tensor tensor = rows_of(taking->weight, part);
    cpu_packed_fill(&part->packed, &tensor, item - taking->first_tile[p]);
}

static void split_rows(const struct backend *backend, struct weight *weight)
{
    const uint32_t unit = weight->is_packed ? backend->ops->tile_rows : CPU_FLOAT_UNIT;
    uint32_t first[TOPOLOGY_MAX_NODES + 1];
    nodes_split(backend->nodes, (weight->tensor.n_rows + unit - 1) / unit, first);
    for (uint32_t i = 0; i < weight->n_parts; i++) {
        const uint64_t end = (uint64_t)first[i + 1] * unit;
        weight->parts[i].first_row = first[i] * unit;
        if (first[i + 1] > first[i])
            weight->parts[i].n_rows =
                (uint32_t)(end < weight->tensor.n_rows ? end : weight->tensor.n_rows) - weight->parts[i].first_row;
    }
}

static int take_matrix(struct backend *backend, struct weight *weight)
{
    struct taking taking = {.backend = backend, .weight = weight};
    uint32_t n_items[TOPOLOGY_MAX_NODES];
    if (backend->nodes)
        split_rows(backend, weight);
    else
        weight->parts[0].n_rows = weight->tensor.n_rows;
    for (uint32_t i = 0; i < weight->n_parts; i++)
        n_items[i] = 1;
    if (!weight->is_packed && !backend->nodes) {
        weight->parts[0].rows = weight->tensor.data;
        return 0;
    }
    pool_run_grouped(backend->nodes ? backend->pool : NULL, n_items, take_part, &taking);
    for (uint32_t i = 0; i < weight->n_parts; i++)
        if (taking.errors[i])
            return taking.errors[i];
    if (!weight->is_packed)
        return 0;
    for (uint32_t i = 0; i < weight->n_parts; i++) {
        n_items[i] = weight->parts[i].packed.n_tiles;
        taking.first_tile[i + 1] = taking.first_tile[i] + n_items[i];
    }
    int error = grow_activations(backend, weight->tensor.n_columns / CPU_BLOCK);
    if (!error)
        pool_run_grouped(backend->pool, n_items, fill_tile, &taking);
    return error;
}

static int take_vector(struct backend *backend, struct weight *weight)
{
    const struct tensor *tensor = &weight->tensor;
    weight->vector = memory_alloc_in(&backend->arena, (size_t)tensor->n_columns * sizeof(float));
    if (!weight->vector)
        return -ENOMEM;
    weight->float_type = TENSOR_F32;
    weight->parts[0].n_rows = 1;
    weight->parts[0].rows = weight->vector;
    return dequantize_row(tensor->type, tensor->data, tensor->n_columns, weight->vector);
}

size_t cpu_weight_bytes(const struct weight *weight)
{
    size_t n_bytes = sizeof *weight + weight->n_parts * sizeof weight->parts[0] + memory_bytes(weight->vector);
    for (uint32_t i = 0; i < weight->n_parts; i++) {
        const struct cpu_part *part = &weight->parts[i];
        n_bytes += memory_bytes(part->packed.data) + memory_bytes(part->copy);
        if (part->rows && !part->copy && !weight->vector) /* in the mapped file */
            n_bytes += tensor_row_bytes(weight->tensor.type, weight->tensor.n_columns) * part->n_rows;
    }
    return n_bytes;
}

static void destroy(struct weight *weight)
{
    for (uint32_t i = 0; i < weight->n_parts; i++) {
        cpu_packed_fini(&weight->parts[i].packed);
        memory_free(weight->parts[i].copy);
    }
    memory_free(weight->vector);
    free(weight);
}

struct weight *cpu_weight_free(struct backend *backend, struct weight *weight)
{
    if (weight) {
        backend->n_bytes -= cpu_weight_bytes(weight);
        destroy(weight);
    }
    return NULL;
}

int cpu_weight_new(struct backend *backend, const struct tensor *tensor, struct weight **ret_weight)
{
    if (tensor->n_rows == 0 || tensor_row_bytes(tensor->type, tensor->n_columns) == 0)
        return -ENOTSUP;
    const uint32_t n_parts = tensor->n_rows == 1 ? 1 : backend->n_nodes;
    struct weight *weight = calloc(1, sizeof *weight + n_parts * sizeof weight->parts[0]);
    if (!weight)
        return -ENOMEM;
    weight->tensor = *tensor;
    weight->n_parts = n_parts;
    weight->float_type = tensor->type;
    weight->is_packed =
        tensor->n_rows > 1 && tensor->type != TENSOR_F32 && tensor->type != TENSOR_F16 && tensor->type != TENSOR_BF16;
    int error = tensor->n_rows == 1 ? take_vector(backend, weight) : take_matrix(backend, weight);
    if (error) {
        destroy(weight);
        return error;
    }
    backend->n_bytes += cpu_weight_bytes(weight);
    *ret_weight = weight;
    return 0;
}

/* ---- where they lie ---- */

struct ranges {
    struct topology_range *list;
    size_t n, capacity;
    bool failed;
};

static void add_range(void *context, const void *address, size_t n_bytes)
{
    struct ranges *ranges = context;
    if (ranges->n == ranges->capacity) {
        const size_t capacity = ranges->capacity ? 2 * ranges->capacity : 64;
        struct topology_range *list = realloc(ranges->list, capacity * sizeof *list);
        if (!list) {
            ranges->failed = true;
            return;
        }
        ranges->list = list;
        ranges->capacity = capacity;
    }
    ranges->list[ranges->n++] = (struct topology_range){(uintptr_t)address, (uintptr_t)address + n_bytes};
}

int cpu_weight_node_bytes(struct backend *backend, uint32_t node, uint64_t *ret_bytes_on_node, uint64_t *ret_bytes)
{
    if (!backend->nodes)
        return -ENODATA;
    assert(node < backend->n_nodes);
    struct ranges ranges = {0};
    memory_home_visit(&backend->node_memories[node].home, add_range, &ranges);
    int error = ranges.failed ? -ENOMEM
                              : topology_resident_ranges(backend->nodes->topology, backend->nodes->nodes[node].index,
                                                         ranges.list, ranges.n, ret_bytes_on_node, ret_bytes);
    free(ranges.list);
    return error;
}
