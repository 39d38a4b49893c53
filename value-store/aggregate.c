/* aggregate.c - check items and runs, make one task per (item, lane), run the tasks. */
#include "value-store/aggregate.h"
#include "value-store/shared_copy.h"

#include <assert.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>

#define QUERIES_AT_ONCE 32u /* masks of one kernel call, on the stack */

/* A run of the request and the block it was found to name; items share runs. */
struct run {
    struct block_handle handle;
    uint64_t mask;
    uint64_t session; /* of the block; 0: not looked up yet */
    struct blocks_view view;
};

struct task {
    uint32_t item;
    uint32_t first_run;
    uint32_t n_runs;
    float *partials;
};

struct aggregate {
    const struct kernels *kernels;
    struct pool *pool;
    _Atomic uint64_t *progress;
    const struct aggregate_call *call; /* while it runs */
    struct aggregate_item *items;
    struct run *runs;
    struct task *tasks;
    size_t items_size, runs_size, tasks_size; /* how many there is room for */
    size_t n_tasks;
};

int aggregate_new(const struct kernels *kernels, struct pool *pool, _Atomic uint64_t *progress,
                  struct aggregate **ret_aggregate)
{
    struct aggregate *aggregate = calloc(1, sizeof(*aggregate));
    if (!aggregate)
        return -ENOMEM;
    aggregate->kernels = kernels;
    aggregate->pool = pool;
    aggregate->progress = progress;
    *ret_aggregate = aggregate;
    return 0;
}

struct aggregate *aggregate_free(struct aggregate *aggregate)
{
    if (!aggregate)
        return NULL;
    free(aggregate->items);
    free(aggregate->runs);
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

static int copy_tables(struct aggregate *aggregate, const struct aggregate_call *call)
{
    struct aggregate_item *items = make_room(aggregate->items, &aggregate->items_size, call->n_items, sizeof(*items));
    if (!items)
        return -ENOMEM;
    aggregate->items = items;
    struct run *runs = make_room(aggregate->runs, &aggregate->runs_size, call->n_runs, sizeof(*runs));
    if (!runs)
        return -ENOMEM;
    aggregate->runs = runs;
    shared_copy(items, call->request + call->items_offset, call->n_items * sizeof(*items));
    const uint8_t *table = call->request + call->runs_offset;
    for (uint32_t i = 0; i < call->n_runs; i++) {
        struct mask_run run;
        shared_copy(&run, table + (size_t)i * sizeof(run), sizeof(run));
        runs[i] = (struct run){.handle = run.handle, .mask = run.mask};
    }
    return 0;
}

static uint64_t partial_bytes(const struct aggregate_call *call, uint32_t n_queries)
{
    return (uint64_t)n_queries * KERNELS_PARTIAL_FLOATS(blocks_shape(call->blocks)->head_dim) * sizeof(float);
}

static int check_item(const struct aggregate_call *call, const struct aggregate_item *item)
{
    const struct row_shape *shape = blocks_shape(call->blocks);
    uint64_t q_bytes = (uint64_t)item->n_queries * shape->head_dim * sizeof(float);
    uint64_t result_bytes = (uint64_t)__builtin_popcount(item->lanes) * partial_bytes(call, item->n_queries);
    if (call->layer >= shape->n_layers || item->kv_head >= shape->n_kv_heads || item->mode != AGGREGATE_RESCORE)
        return -EINVAL;
    if (item->n_queries == 0 || !isfinite(item->scale))
        return -EINVAL;
    if (item->n_runs == 0 || item->first_run > call->n_runs || item->n_runs > call->n_runs - item->first_run)
        return -EINVAL;
    if (!shared_range_ok(item->q_offset, q_bytes, 0, call->request_bytes) ||
        !shared_range_ok(item->result_offset, result_bytes, sizeof(struct reply_header), call->reply_bytes))
        return -EINVAL;
    return 0;
}

/* The run's block as one of `session`, with the rows that the mask names. */
static int find_run(const struct aggregate_call *call, uint64_t session, struct run *run)
{
    if (run->session == session)
        return 0;
    int result = blocks_find(call->blocks, session, run->handle, &run->view);
    if (result < 0)
        return result;
    uint32_t n_rows = blocks_n_rows(&run->view, call->layer);
    if (n_rows < LAYOUT_BLOCK_TOKENS && run->mask >> n_rows != 0)
        return -ENODATA;
    run->session = session;
    return 0;
}

/* Appends the tasks of a checked item: its runs, cut where the lane changes. */
static int add_tasks(struct aggregate *aggregate, const struct aggregate_call *call, uint32_t index, uint64_t *n_rows)
{
    const struct aggregate_item *item = &aggregate->items[index];
    uint32_t lanes = 0, lane_before = 0, number_before = 0;
    struct task *tasks =
        make_room(aggregate->tasks, &aggregate->tasks_size, aggregate->n_tasks + LAYOUT_N_LANES, sizeof(*tasks));
    if (!tasks)
        return -ENOMEM;
    aggregate->tasks = tasks;
    uint8_t *partials = call->reply + item->result_offset;
    for (uint32_t i = item->first_run; i < item->first_run + item->n_runs; i++) {
        struct run *run = &aggregate->runs[i];
        int result = item->session == 0 ? -ESTALE : find_run(call, item->session, run);
        if (result < 0)
            return result;
        uint32_t lane = run->view.number % LAYOUT_N_LANES;
        if (lanes == 0 || lane > lane_before) {
            if (!(item->lanes & 1u << lane))
                return -EINVAL;
            tasks[aggregate->n_tasks++] =
                (struct task){.item = index, .first_run = i, .partials = (float *)(void *)partials};
            partials += partial_bytes(call, item->n_queries);
            lanes |= 1u << lane;
        } else if (lane < lane_before || run->view.number <= number_before) {
            return -EINVAL;
        }
        tasks[aggregate->n_tasks - 1].n_runs++;
        lane_before = lane;
        number_before = run->view.number;
        *n_rows += (uint64_t)__builtin_popcountll(run->mask);
    }
    return lanes == item->lanes ? 0 : -EINVAL;
}

static void attend(const struct aggregate *aggregate, const struct run *run, const struct aggregate_item *item,
                   float *partials)
{
    const struct aggregate_call *call = aggregate->call;
    uint32_t head_dim = blocks_shape(call->blocks)->head_dim;
    const uint16_t *rows = blocks_head_rows(call->blocks, &run->view, call->layer, item->kv_head);
    const float *q = (const float *)(const void *)(call->request + item->q_offset);
    uint64_t masks[QUERIES_AT_ONCE];
    for (uint32_t i = 0; i < QUERIES_AT_ONCE; i++)
        masks[i] = run->mask;
    for (uint32_t first = 0; first < item->n_queries; first += QUERIES_AT_ONCE) {
        uint32_t n = item->n_queries - first < QUERIES_AT_ONCE ? item->n_queries - first : QUERIES_AT_ONCE;
        aggregate->kernels->attend_block(q + (size_t)first * head_dim, n, head_dim, rows, masks, item->scale,
                                         partials + (size_t)first * KERNELS_PARTIAL_FLOATS(head_dim));
    }
}

static void run_task(void *context, uint32_t index, uint32_t thread)
{
    const struct aggregate *aggregate = context;
    const struct task *task = &aggregate->tasks[index];
    const struct aggregate_item *item = &aggregate->items[task->item];
    uint32_t n_floats = KERNELS_PARTIAL_FLOATS(blocks_shape(aggregate->call->blocks)->head_dim);
    (void)thread;
    for (uint32_t query = 0; query < item->n_queries; query++) {
        float *partial = task->partials + (size_t)query * n_floats;
        memset(partial, 0, n_floats * sizeof(float));
        partial[0] = -INFINITY;
    }
    for (uint32_t i = 0; i < task->n_runs; i++) {
        const struct run *run = &aggregate->runs[task->first_run + i];
        if (run->mask != 0)
            attend(aggregate, run, item, task->partials);
    }
    if (aggregate->progress)
        atomic_fetch_add_explicit(aggregate->progress, 1, memory_order_relaxed);
}

int aggregate_run(struct aggregate *aggregate, const struct aggregate_call *call, struct aggregate_result *ret_result,
                  uint32_t *ret_item)
{
    struct aggregate_result done = {0};
    int result = copy_tables(aggregate, call);
    aggregate->n_tasks = 0;
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
    if (aggregate->n_tasks > UINT32_MAX) {
        *ret_item = 0;
        return -ENOMEM;
    }
    aggregate->call = call;
    pool_run(aggregate->pool, (uint32_t)aggregate->n_tasks, run_task, aggregate);
    aggregate->call = NULL;
    *ret_result = done;
    return 0;
}
