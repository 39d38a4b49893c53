/*
 * cuda_key_select.c - `select` of the table: prepared queries, scores of old keys and of the exact set, the selection.
 *
 * Batches    items that follow each other and have quantizer and selector in common are launched together, as many as have room to
 *            work in: a wave. Grids are of the most blocks of a wave, rounded up to eighths of an octave: they are the same for
 *            many steps.
 * Results    are written by the kernels where they are wanted, in the host's memory.
 */
#include <assert.h>
#include <string.h>

#include "gpu-worker/backend/cuda/cuda_internal.h"
#include "gpu-worker/backend/cuda/cuda_key_ops.h"
#include "gpu-worker/backend/cuda/cuda_key_tables.h"
#include "gpu-worker/backend/cuda/cuda_keys.h"
#include "gpu-worker/backend/cuda/cuda_selection.h"
#include "gpu-worker/keys/key_cache.h"
#include "gpu-worker/policy/policy.h"

static_assert(CUDA_KEY_CHUNK_TILES == KEY_CACHE_CHUNK_BLOCKS, "chunks are a key cache's");
static_assert(CUDA_KEY_SINKS == LAYOUT_N_SINKS, "sinks are those of layout.h");
static_assert(BACKEND_N_LANES == LAYOUT_N_LANES, "lanes are those of layout.h");

#define MOST_WORK_BYTES ((size_t)1 << 30)
enum {
    SHARE = 16,          /* of the device, that scores may take at most */
    MOST_ITEMS = 65535u, /* of a launch */
};

/* What the launches of a wave are told. */
struct select_arguments {
    struct cuda_selection selection;
    const struct cuda_exact_item *exact; /* NULL: not by mass */
    const struct cuda_key_query *queries;
    const struct cuda_key_run *runs;
    const struct cuda_selection_item *items;
    enum policy_codec codec;
    uint32_t n_dims, n_centroids, most_groups;
    uint32_t n_items;
    enum kernels_rows rows;
    float scale;
};
static_assert(sizeof(struct select_arguments) <= CUDA_COMMAND_BYTES, "a command");

struct call {
    struct backend *backend;
    uint32_t group, head_dim;
    enum kernels_rows codec;
    float scale;
};

static uint32_t round_up(uint32_t n_blocks)
{
    const uint32_t octave = 31u - (uint32_t)__builtin_clz(n_blocks), step = octave > 3 ? 1u << (octave - 3) : 1;
    return (n_blocks + step - 1) / step * step;
}

/* ---- launches ---- */

static cudaError_t prepare(const struct cuda_queue *queue, const struct select_arguments *a)
{
    const uint32_t group = a->selection.group, d = a->selection.head_dim;
    switch (a->codec) {
    case POLICY_CODEC_F16:
        return cuda_prepare_f16(queue, d, group, a->scale, a->queries, a->n_items);
    case POLICY_CODEC_ROT4:
    case POLICY_CODEC_ROT3:
    case POLICY_CODEC_ROT2:
        return cuda_prepare_rot(queue, cuda_key_tables_rot_bits(a->codec), d, group, a->scale, a->queries, a->n_items);
    case POLICY_CODEC_PQ:
        return cuda_prepare_pq(queue, d, group, a->scale, a->queries, a->n_items);
    default:
        return cuda_prepare_pair(queue, group, a->scale, a->queries, a->n_items);
    }
}

static cudaError_t score(const struct cuda_queue *queue, const struct select_arguments *a)
{
    const uint32_t group = a->selection.group, d = a->selection.head_dim, n = a->n_items,
                   most = a->selection.most_blocks;
    const size_t stride = a->selection.stride;
    switch (a->codec) {
    case POLICY_CODEC_F16:
        return cuda_score_f16(queue, d, group, a->runs, n, most, stride);
    case POLICY_CODEC_ROT4:
    case POLICY_CODEC_ROT3:
    case POLICY_CODEC_ROT2:
        return cuda_score_rot(queue, cuda_key_tables_rot_bits(a->codec), d, group, a->runs, n, most, stride);
    case POLICY_CODEC_PQ:
        return cuda_score_pq(queue, a->n_dims, a->n_centroids, d, group, a->runs, n, most, stride);
    default:
        return cuda_score_pair(queue, a->codec >= POLICY_CODEC_KLT2, d, a->most_groups, group, a->runs, n, most,
                               stride);
    }
}

static cudaError_t launch(struct backend *backend, const void *arguments)
{
    const struct select_arguments *a = arguments;
    const struct cuda_key_rows rows = {.row_bytes = kernels_row_bytes(a->selection.head_dim, a->rows),
                                       .codec = a->rows,
                                       .scales_at = 2 * a->selection.head_dim};
    cudaError_t error = cudaSuccess;
    if (a->exact != NULL)
        error = cuda_score_exact(&backend->queue, a->exact, a->n_items, a->selection.group, a->selection.head_dim,
                                 &rows, a->scale, a->selection.exact_stride);
    if (error == cudaSuccess)
        error = prepare(&backend->queue, a);
    if (error == cudaSuccess)
        error = score(&backend->queue, a);
    if (error == cudaSuccess)
        error = cuda_selection_run(&backend->queue, &a->selection, a->items, a->n_items);
    return error;
}

/* ---- a wave ---- */

static bool asks_for_weights(const struct backend_select *item)
{
    return item->policy->terms.weights && item->weights != NULL;
}

static const struct key_head *head_of(const struct backend_select *item)
{
    return key_quantizer_head(key_cache_quantizer(item->keys), item->layer, item->kv_head);
}

/* Work memory of an item, beside its query: scores, what the selection wants, scores of the exact set. */
struct room {
    size_t scores, work, exact, query; /* bytes of each */
};

static struct room room_of(const struct cuda_selection *selection, size_t query_bytes)
{
    return (struct room){
        .scores = cuda_commands_aligned(selection->group * selection->stride * sizeof(float)),
        .work = cuda_commands_aligned(cuda_selection_work_bytes(selection)),
        .exact = selection->selector == POLICY_SELECTOR_MASS
                     ? cuda_commands_aligned(selection->group * selection->exact_stride * sizeof(float))
                     : 0,
        .query = cuda_commands_aligned(query_bytes),
    };
}

static size_t room_bytes(const struct room *room)
{
    return room->scores + room->work + room->exact + room->query;
}

/* How many of the items make a wave, at least one; what the wave's launches have in common. */
static uint32_t take_wave(const struct call *call, const struct backend_select *items, uint32_t n_items,
                          struct cuda_selection *ret_selection, struct room *ret_room)
{
    const struct key_quantizer *quantizer = key_cache_quantizer(items[0].keys);
    const size_t share = call->backend->capacity / SHARE,
                 most_bytes = share > 0 && share < MOST_WORK_BYTES ? share : MOST_WORK_BYTES;
    struct cuda_selection selection = {.selector = items[0].policy->terms.selector,
                                       .group = call->group,
                                       .head_dim = call->head_dim,
                                       .n_lanes = BACKEND_N_LANES,
                                       .exact_stride = CUDA_SELECTION_MAX_EXACT};
    size_t query_bytes = 0;
    uint32_t n = 0;
    for (; n < n_items && n < MOST_ITEMS; n++) {
        const struct backend_select *item = &items[n];
        if (key_cache_quantizer(item->keys) != quantizer || item->policy->terms.selector != selection.selector)
            break;
        const uint32_t n_blocks = round_up(item->n_blocks);
        const size_t of_query = quantizer->codec->query_bytes(head_of(item), call->group);
        struct cuda_selection with = selection;
        with.most_blocks = n_blocks > with.most_blocks ? n_blocks : with.most_blocks;
        with.stride = (size_t)with.most_blocks * KERNELS_BLOCK_TOKENS;
        with.weights |= asks_for_weights(item);
        query_bytes = of_query > query_bytes ? of_query : query_bytes;
        const struct room room = room_of(&with, query_bytes);
        if (n > 0 && (n + 1) * room_bytes(&room) > most_bytes)
            break;
        selection = with;
        *ret_room = room;
    }
    *ret_selection = selection;
    return n;
}

/* Addresses of a session's chunks, staged once for the items that follow each other; NULL: no memory. */
static const uint8_t *const *stage_chunks(struct backend *backend, const struct backend_select *items, uint32_t i,
                                          const uint8_t *const *before)
{
    if (i > 0 && items[i].keys == items[i - 1].keys && items[i].n_blocks == items[i - 1].n_blocks)
        return before;
    const size_t n = (items[i].n_blocks + KEY_CACHE_CHUNK_BLOCKS - 1) / KEY_CACHE_CHUNK_BLOCKS;
    return cuda_commands_stage_copy(backend, (const void *)key_cache_chunks(items[i].keys), n * sizeof(uint8_t *));
}

/* The exact set's pieces, all items' one after the other. */
static bool stage_exact(const struct call *call, const struct backend_select *items, uint32_t n_items,
                        const struct cuda_exact_item **ret_there, struct cuda_exact_item **ret_items)
{
    void *host_items, *host_pieces;
    size_t n_pieces = 0;
    for (uint32_t i = 0; i < n_items; i++)
        n_pieces += items[i].n_pieces;
    *ret_there = cuda_commands_stage(call->backend, n_items * sizeof **ret_there, &host_items);
    const struct backend_piece *there =
        cuda_commands_stage(call->backend, n_pieces * sizeof(struct backend_piece), &host_pieces);
    if (*ret_there == NULL || there == NULL)
        return false;
    struct backend_piece *pieces = host_pieces;
    *ret_items = host_items;
    for (uint32_t i = 0; i < n_items; i++) {
        uint32_t n_tokens = 0;
        memcpy(pieces, items[i].pieces, items[i].n_pieces * sizeof *pieces);
        for (uint32_t p = 0; p < items[i].n_pieces; p++)
            n_tokens += (uint32_t)__builtin_popcountll(items[i].pieces[p].mask);
        assert(n_tokens <= CUDA_SELECTION_MAX_EXACT);
        (*ret_items)[i] = (struct cuda_exact_item){
            .q = items[i].q, .pieces = there, .n_pieces = items[i].n_pieces, .n_tokens = n_tokens};
        pieces += items[i].n_pieces;
        there += items[i].n_pieces;
    }
    return true;
}

static void ask(const struct call *call, const struct cuda_key_codec *codec, const struct backend_select *items,
                uint32_t n_items, const struct cuda_selection *selection, const struct room *room)
{
    struct backend *backend = call->backend;
    const struct key_quantizer *quantizer = key_cache_quantizer(items[0].keys);
    const bool by_mass = selection->selector == POLICY_SELECTOR_MASS;
    struct select_arguments a = {.selection = *selection,
                                 .codec = codec->codec,
                                 .n_dims = codec->n_dims,
                                 .n_centroids = codec->n_centroids,
                                 .most_groups = codec->most_groups,
                                 .n_items = n_items,
                                 .rows = call->codec,
                                 .scale = call->scale};
    const size_t state_bytes = cuda_selection_state_bytes(call->group);
    struct cuda_exact_item *exact = NULL;
    void *host_queries, *host_runs, *host_items, *host_states;
    a.queries = cuda_commands_stage(backend, n_items * sizeof *a.queries, &host_queries);
    a.runs = cuda_commands_stage(backend, n_items * sizeof *a.runs, &host_runs);
    a.items = cuda_commands_stage(backend, n_items * sizeof *a.items, &host_items);
    /* written by the kernels where it was staged: each play brings zeros */
    const uint8_t *states = cuda_commands_stage(backend, n_items * state_bytes, &host_states);
    uint8_t *work = cuda_commands_work(backend, CUDA_WORK_SELECT, n_items * room_bytes(room));
    if (a.queries == NULL || a.runs == NULL || a.items == NULL || states == NULL || work == NULL ||
        (by_mass && !stage_exact(call, items, n_items, &a.exact, &exact)))
        return;
    memset(host_states, 0, n_items * state_bytes);
    const uint8_t *const *chunks = NULL;
    for (uint32_t i = 0; i < n_items; i++, work += room_bytes(room)) {
        const struct backend_select *item = &items[i];
        const struct key_cache_place place = key_cache_place(item->keys, item->layer, item->kv_head);
        const struct key_head *head = head_of(item);
        const void *table = codec->tables == NULL ? NULL : codec->tables[head - quantizer->heads];
        const bool is_pq = codec->codec == POLICY_CODEC_PQ;
        float *scores = (float *)(void *)work, *exact_scores = (float *)(void *)(work + room->scores + room->work);
        void *query = work + room->scores + room->work + room->exact;
        void *state = (void *)(uintptr_t)(states + i * state_bytes);
        chunks = stage_chunks(backend, items, i, chunks);
        if (chunks == NULL)
            return;
        ((struct cuda_key_query *)host_queries)[i] =
            (struct cuda_key_query){.q = item->q, .query = query, .table = is_pq ? NULL : table};
        ((struct cuda_key_run *)host_runs)[i] = (struct cuda_key_run){
            .query = query,
            .chunks = chunks,
            .tiles = place.tiles,
            .sides = place.sides,
            .scores = scores,
            .largest = cuda_selection_largest(state),
            .centroids = is_pq ? table : NULL,
            .n_tiles = item->n_blocks,
            .n_groups = is_pq || table == NULL ? 0 : ((const struct pair_table *)head->table)->layout.n_groups,
        };
        if (by_mass)
            exact[i].scores = exact_scores;
        ((struct cuda_selection_item *)host_items)[i] = (struct cuda_selection_item){
            .scores = scores,
            .state = state,
            .exact = item->exact,
            .exact_scores = exact_scores,
            .work = work + room->scores,
            .n_blocks = item->n_blocks,
            .n_exact = by_mass ? exact[i].n_tokens : 0,
            .parameter = item->policy->terms.parameter,
            .n_kept = item->n_kept,
            .masks = item->masks,
            .masses = item->policy->terms.tail ? item->masses : NULL,
            .references = item->references,
            .weights = asks_for_weights(item) ? item->weights : NULL,
            .weights_stride = item->weights_stride,
        };
    }
    CUDA_COMMAND(backend, "select", launch, a);
}

void cuda_key_select(struct backend *backend, const struct backend_select *items, uint32_t n_items, uint32_t group,
                     uint32_t head_dim, enum kernels_rows codec, float scale)
{
    const struct call call = {backend, group, head_dim, codec, scale};
    cuda_key_tables_begin(backend);
    for (uint32_t first = 0, n; first < n_items; first += n) {
        struct cuda_selection selection;
        struct room room = {0};
        struct cuda_key_codec on_device;
        n = take_wave(&call, items + first, n_items - first, &selection, &room);
        if (!cuda_key_tables_find(backend, key_cache_quantizer(items[first].keys), &on_device))
            return;
        const size_t each = room_bytes(&room), has = cuda_commands_work_bytes(backend, CUDA_WORK_SELECT, n * each);
        if (n * each > has) /* a full device: smaller waves, down to one item */
            n = has < each ? 1 : (uint32_t)(has / each);
        ask(&call, &on_device, items + first, n, &selection, &room);
    }
}
