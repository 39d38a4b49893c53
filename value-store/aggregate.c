/* aggregate.c - check items and blocks, make one task per (item, lane), run the tasks. */
#include "value-store/aggregate.h"
#include "kernels/lane.h"
#include "value-store/shared_copy.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>

/* A block of the request's table; items share them, and a block belongs to one session, so it is looked up once. */
struct entry {
    struct block_handle handle;
    uint64_t session; /* of the block; 0: not looked up yet */
    const uint8_t *block;
    uint32_t number;
    uint32_t lane;
    uint64_t there; /* bit per row of the call's layer */
};

struct task {
    uint32_t item;
    uint32_t first; /* of the item's blocks */
    uint32_t n_blocks;
    uint32_t rank; /* of the lane among the item's */
    uint32_t first_weight;
    uint32_t n_weights; /* selected rows of the lane */
};

/* What lane_attend() is told of the blocks of a lane; one for each thread. */
struct scratch {
    const void **rows;
    const float **v_sums;
    uint64_t *masks;
    size_t size; /* blocks there is room for */
};

struct aggregate {
    const struct kernels *kernels;
    struct pool *pool;
    _Atomic uint64_t *progress;
    const struct aggregate_call *call; /* while it runs */
    struct aggregate_item *items;
    struct entry *entries;
    struct task *tasks;
    size_t items_size, entries_size, tasks_size; /* how many there is room for */
    size_t n_tasks;
    uint32_t largest_lane; /* blocks */
    uint32_t n_scratches;
    struct scratch scratches[];
};

/* Of blocks without sums: whatever a mass becomes after it was checked, nothing of another session can be seen by it. */
static const float no_sums[KERNELS_MAX_HEAD_DIM];

int aggregate_new(const struct kernels *kernels, struct pool *pool, _Atomic uint64_t *progress,
                  struct aggregate **ret_aggregate)
{
    uint32_t n_threads = pool_n_threads(pool);
    struct aggregate *aggregate = calloc(1, sizeof(*aggregate) + n_threads * sizeof(aggregate->scratches[0]));
    if (!aggregate)
        return -ENOMEM;
    aggregate->kernels = kernels;
    aggregate->pool = pool;
    aggregate->progress = progress;
    aggregate->n_scratches = n_threads;
    *ret_aggregate = aggregate;
    return 0;
}

struct aggregate *aggregate_free(struct aggregate *aggregate)
{
    if (!aggregate)
        return NULL;
    for (uint32_t i = 0; i < aggregate->n_scratches; i++)
        free(aggregate->scratches[i].rows);
    free(aggregate->items);
    free(aggregate->entries);
    free(aggregate->tasks);
    free(aggregate);
    return NULL;
}

/* Room for n elements; grows by half so that a session that grows by a block a step does not copy each time. NULL: out of
 * memory, and the array is as before. */
static void *make_room(void *array, size_t *size, size_t n, size_t element_bytes)
{
    if (array && n <= *size)
        return array;
    size_t wanted = n + n / 2 + 16;
    void *grown = reallocarray(array, wanted, element_bytes);
    if (grown)
        *size = wanted;
    return grown;
}

/* Room for the largest lane in every thread's scratch; the three arrays are one allocation. */
static int make_scratches(struct aggregate *aggregate)
{
    size_t n = aggregate->largest_lane;
    for (uint32_t i = 0; i < aggregate->n_scratches; i++) {
        struct scratch *scratch = &aggregate->scratches[i];
        if (scratch->rows && n <= scratch->size)
            continue;
        size_t wanted = n + n / 2 + 16;
        uint8_t *bytes = malloc(wanted * (sizeof(void *) + sizeof(float *) + sizeof(uint64_t)));
        if (!bytes)
            return -ENOMEM;
        free(scratch->rows);
        scratch->rows = (const void **)(void *)bytes;
        scratch->v_sums = (const float **)(void *)(bytes + wanted * sizeof(void *));
        scratch->masks = (uint64_t *)(void *)(bytes + wanted * (sizeof(void *) + sizeof(float *)));
        scratch->size = wanted;
    }
    return 0;
}

static int copy_tables(struct aggregate *aggregate, const struct aggregate_call *call)
{
    struct aggregate_item *items = make_room(aggregate->items, &aggregate->items_size, call->n_items, sizeof(*items));
    if (!items)
        return -ENOMEM;
    aggregate->items = items;
    struct entry *entries = make_room(aggregate->entries, &aggregate->entries_size, call->n_blocks, sizeof(*entries));
    if (!entries)
        return -ENOMEM;
    aggregate->entries = entries;
    shared_copy(items, call->request + call->items_offset, call->n_items * sizeof(*items));
    const uint8_t *table = call->request + call->blocks_offset;
    for (uint32_t i = 0; i < call->n_blocks; i++) {
        shared_copy(&entries[i].handle, table + i * sizeof(struct block_handle), sizeof(struct block_handle));
        entries[i].session = 0;
    }
    return 0;
}

/* ---- checks ---- */

static uint64_t partial_bytes(const struct aggregate_call *call, uint32_t n_queries)
{
    return (uint64_t)n_queries * KERNELS_PARTIAL_FLOATS(blocks_shape(call->blocks)->head_dim) * sizeof(float);
}

static bool is_given(const struct aggregate_call *call, uint32_t offset, uint64_t n_bytes)
{
    return shared_range_ok(offset, n_bytes, sizeof(struct request_header), call->request_bytes);
}

static int check_item(const struct aggregate_call *call, const struct aggregate_item *item)
{
    const struct row_shape *shape = blocks_shape(call->blocks);
    bool rescore = item->mode == AGGREGATE_RESCORE;
    if (call->layer >= shape->n_layers || item->kv_head >= shape->n_kv_heads)
        return -EINVAL;
    if ((!rescore && item->mode != AGGREGATE_WEIGHTS) || item->n_queries == 0 || !isfinite(item->scale))
        return -EINVAL;
    if (item->n_blocks == 0 || item->first_block > call->n_blocks ||
        item->n_blocks > call->n_blocks - item->first_block)
        return -EINVAL;
    /* Results first: what fits there bounds n_queries, and with it the products below. */
    uint64_t result_bytes = (uint64_t)__builtin_popcount(item->lanes) * partial_bytes(call, item->n_queries);
    if (item->lanes == 0 ||
        !shared_range_ok(item->result_offset, result_bytes, sizeof(struct reply_header), call->reply_bytes))
        return -EINVAL;
    uint64_t row_of_queries = item->n_queries * sizeof(float);
    if (!is_given(call, item->masks_offset, item->n_blocks * sizeof(uint64_t)))
        return -EINVAL;
    if (rescore ? item->n_weights != 0 || !is_given(call, item->q_offset, row_of_queries * shape->head_dim)
                : item->n_weights > call->request_bytes ||
                      !is_given(call, item->weights_offset, row_of_queries * item->n_weights))
        return -EINVAL;
    if (item->masses_offset != 0 && !is_given(call, item->masses_offset, row_of_queries * item->n_blocks))
        return -EINVAL;
    if ((item->masses_offset != 0 || !rescore) && !is_given(call, item->references_offset, row_of_queries))
        return -EINVAL;
    return 0;
}

static int find_entry(const struct aggregate_call *call, uint64_t session, struct entry *entry)
{
    struct blocks_view view;
    if (session == 0 || blocks_find(call->blocks, session, entry->handle, &view) != 0)
        return -ESTALE;
    uint32_t n_rows = blocks_n_rows(&view, call->layer);
    entry->session = session;
    entry->block = (const uint8_t *)view.header;
    entry->number = view.number;
    entry->lane = view.number % LAYOUT_N_LANES;
    entry->there = n_rows >= LAYOUT_BLOCK_TOKENS ? UINT64_MAX : (UINT64_C(1) << n_rows) - 1;
    return 0;
}

static uint64_t read_mask(const struct aggregate_call *call, const struct aggregate_item *item, uint32_t i)
{
    uint64_t mask;
    shared_copy(&mask, call->request + item->masks_offset + (size_t)i * sizeof(mask), sizeof(mask));
    return mask;
}

/* Of all queries for the item's i-th block. */
static bool has_mass(const struct aggregate_call *call, const struct aggregate_item *item, uint32_t i)
{
    const uint8_t *masses = call->request + item->masses_offset;
    for (uint32_t query = 0; query < item->n_queries; query++) {
        float mass;
        memcpy(&mass, masses + ((size_t)query * item->n_blocks + i) * sizeof(mass), sizeof(mass));
        if (mass != 0)
            return true;
    }
    return false;
}

/* Appends the tasks of a checked item: its blocks, cut where the lane changes. */
static int add_tasks(struct aggregate *aggregate, const struct aggregate_call *call, uint32_t index, uint64_t *n_rows)
{
    const struct aggregate_item *item = &aggregate->items[index];
    struct task *tasks =
        make_room(aggregate->tasks, &aggregate->tasks_size, aggregate->n_tasks + LAYOUT_N_LANES, sizeof(*tasks));
    if (!tasks)
        return -ENOMEM;
    aggregate->tasks = tasks;
    struct task *task = NULL;
    const struct entry *before = NULL;
    uint32_t lanes = 0, n_lanes = 0;
    uint64_t n_selected = 0;
    for (uint32_t i = 0; i < item->n_blocks; i++) {
        struct entry *entry = &aggregate->entries[item->first_block + i];
        if (entry->session != item->session || item->session == 0) {
            int result = find_entry(call, item->session, entry);
            if (result < 0)
                return result;
        }
        if (!before || entry->lane > before->lane) {
            lanes |= 1u << entry->lane;
            task = &tasks[aggregate->n_tasks++];
            *task = (struct task){.item = index, .first = i, .rank = n_lanes++, .first_weight = (uint32_t)n_selected};
        } else if (entry->lane < before->lane || entry->number <= before->number) {
            return -EINVAL;
        }
        uint64_t mask = read_mask(call, item, i);
        if ((mask & ~entry->there) != 0 ||
            (entry->there != UINT64_MAX && item->masses_offset != 0 && has_mass(call, item, i)))
            return -ENODATA;
        uint32_t n = (uint32_t)__builtin_popcountll(mask);
        n_selected += n;
        task->n_weights += n;
        if (++task->n_blocks > aggregate->largest_lane)
            aggregate->largest_lane = task->n_blocks;
        before = entry;
    }
    if (lanes != item->lanes || (item->mode == AGGREGATE_WEIGHTS && n_selected != item->n_weights))
        return -EINVAL;
    *n_rows += n_selected;
    return 0;
}

/* ---- work ---- */

static const float *floats_at(const struct aggregate_call *call, uint32_t offset)
{
    return (const float *)(const void *)(call->request + offset);
}

/* Pointers and masks of the task's blocks. */
static void gather_lane(const struct aggregate *aggregate, const struct task *task, const struct scratch *scratch)
{
    const struct aggregate_call *call = aggregate->call;
    const struct aggregate_item *item = &aggregate->items[task->item];
    const struct row_shape *shape = blocks_shape(call->blocks);
    const struct entry *entries = &aggregate->entries[item->first_block + task->first];
    uint64_t rows_offset = layout_head_rows_offset(shape, call->layer, item->kv_head);
    uint64_t v_sums_offset =
        layout_head_sums_offset(shape, call->layer, item->kv_head) + shape->head_dim * sizeof(float);
    for (uint32_t i = 0; i < task->n_blocks; i++) {
        const uint8_t *v_sums = entries[i].block + v_sums_offset;
        scratch->rows[i] = entries[i].block + rows_offset;
        scratch->v_sums[i] = entries[i].there == UINT64_MAX ? (const float *)(const void *)v_sums : no_sums;
        scratch->masks[i] = read_mask(call, item, task->first + i) & entries[i].there;
    }
}

/* Masks that were changed after the check must not make weights be read that are not there. */
static void limit_weights(const struct task *task, const struct scratch *scratch)
{
    uint64_t n_selected = 0;
    for (uint32_t i = 0; i < task->n_blocks; i++)
        n_selected += (uint64_t)__builtin_popcountll(scratch->masks[i]);
    if (n_selected != task->n_weights)
        memset(scratch->masks, 0, task->n_blocks * sizeof(uint64_t));
}

static void run_task(void *context, uint32_t index, uint32_t thread)
{
    const struct aggregate *aggregate = context;
    const struct aggregate_call *call = aggregate->call;
    const struct task *task = &aggregate->tasks[index];
    const struct aggregate_item *item = &aggregate->items[task->item];
    const struct scratch *scratch = &aggregate->scratches[thread];
    gather_lane(aggregate, task, scratch);
    struct lane lane = {
        .n_queries = item->n_queries,
        .head_dim = blocks_shape(call->blocks)->head_dim,
        .n_blocks = task->n_blocks,
        .codec = blocks_codec(call->blocks),
        .scale = item->scale,
        .rows = scratch->rows,
        .masks = scratch->masks,
    };
    if (item->mode == AGGREGATE_RESCORE) {
        lane.q = floats_at(call, item->q_offset);
    } else {
        lane.weights = floats_at(call, item->weights_offset) + task->first_weight;
        lane.weights_stride = item->n_weights;
        limit_weights(task, scratch);
    }
    if (item->masses_offset != 0) {
        lane.v_sums = scratch->v_sums;
        lane.masses = floats_at(call, item->masses_offset) + task->first;
        lane.masses_stride = item->n_blocks;
    }
    if (item->masses_offset != 0 || item->mode == AGGREGATE_WEIGHTS)
        lane.references = floats_at(call, item->references_offset);
    uint8_t *partials = call->reply + item->result_offset + task->rank * partial_bytes(call, item->n_queries);
    lane_attend(aggregate->kernels, &lane, (float *)(void *)partials);
    if (aggregate->progress)
        atomic_fetch_add_explicit(aggregate->progress, 1, memory_order_relaxed);
}

struct pool *aggregate_pool(const struct aggregate *aggregate)
{
    return aggregate->pool;
}

int aggregate_run(struct aggregate *aggregate, const struct aggregate_call *call, struct aggregate_result *ret_result,
                  uint32_t *ret_item)
{
    struct aggregate_result done = {0};
    int result = copy_tables(aggregate, call);
    aggregate->n_tasks = 0;
    aggregate->largest_lane = 0;
    for (uint32_t i = 0; i < call->n_items; i++) {
        const struct aggregate_item *item = &aggregate->items[i];
        if (result == 0)
            result = check_item(call, item);
        if (result == 0)
            result = add_tasks(aggregate, call, i, &done.n_rows);
        if (result < 0) {
            *ret_item = i;
            return result;
        }
        uint64_t end =
            item->result_offset + (uint64_t)__builtin_popcount(item->lanes) * partial_bytes(call, item->n_queries);
        if (end > done.reply_bytes)
            done.reply_bytes = end;
    }
    result = make_scratches(aggregate);
    if (result < 0 || aggregate->n_tasks > UINT32_MAX) {
        *ret_item = 0;
        return -ENOMEM;
    }
    aggregate->call = call;
    pool_run(aggregate->pool, (uint32_t)aggregate->n_tasks, run_task, aggregate);
    aggregate->call = NULL;
    *ret_result = done;
    return 0;
}
