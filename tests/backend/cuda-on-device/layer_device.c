/* layer_device.c - see layer_device.h. */
#include "tests/backend/cuda-on-device/layer_device.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "gpu-worker/backend/backend.h"
#include "gpu-worker/keys/key_cache.h"
#include "gpu-worker/policy/exact_set.h"

#define N_PIECES (1u + EXACT_SET_WINDOW_BLOCKS) /* sinks and window */

static_assert(BACKEND_N_LANES == LAYOUT_N_LANES, "a session's lanes");

/* The exact set of every KV head: its rows are some of the distinct blocks, its sinks those of block 0. */
static const uint64_t piece_masks[N_PIECES] = {((uint64_t)1 << LAYOUT_N_SINKS) - 1, ~(uint64_t)0, 0xffffffff};

struct layer_device {
    const struct layer_rows *rows;
    const struct backend_ops *ops;
    struct backend *backend;
    struct key_cache *keys;
    size_t chunk_bytes;
    uint32_t most_blocks;
    /* device */
    uint8_t *window;        /* [KV head][N_PIECES] blocks */
    float *q, *exact, *out; /* [n_queries][head][dim], [head][LAYER_WIDTH], [head][dim] */
    /* host, that the device reaches */
    uint64_t *masks;              /* [KV head][n_blocks] */
    float *masses, *references;   /* [head][n_blocks], [head] */
    uint32_t *n_kept;             /* [KV head] */
    float *partials;              /* [lane][head][LAYER_WIDTH] */
    float *host_exact, *host_out; /* as exact and out */
};

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* ---- the key cache's memory ---- */

static void *keys_alloc(void *context, size_t n_bytes)
{
    struct layer_device *device = context;
    device->chunk_bytes = n_bytes;
    return device->ops->alloc(device->backend, n_bytes);
}

static void keys_free(void *context, void *memory, size_t n_bytes)
{
    (void)n_bytes;
    const struct layer_device *device = context;
    device->ops->free(device->backend, memory);
}

void layer_device_put(struct layer_device *device, uint32_t block)
{
    const struct key_quantizer *quantizer = key_cache_quantizer(device->keys);
    struct key_cache_tile tiles[LAYER_N_KV_HEADS];
    uint8_t *chunk = (uint8_t *)(uintptr_t)key_cache_chunks(device->keys)[block / KEY_CACHE_CHUNK_BLOCKS];
    for (uint32_t head = 0; head < LAYER_N_KV_HEADS; head++) {
        const struct key_cache_place place = key_cache_place(device->keys, 0, head);
        const struct key_head *of = key_quantizer_head(quantizer, 0, head);
        const size_t in_chunk = block % KEY_CACHE_CHUNK_BLOCKS;
        tiles[head] =
            (struct key_cache_tile){.head = of,
                                    .rows = layer_rows_of(device->rows, block, head),
                                    .tile = chunk + place.tiles + in_chunk * quantizer->codec->tile_bytes(of),
                                    .side = (float *)(void *)(chunk + place.sides + in_chunk * sizeof(float))};
    }
    device->ops->device->quantize(device->backend, quantizer, KERNELS_ROWS_F16, tiles, LAYER_N_KV_HEADS);
}

/* Chunks behind the distinct blocks' are copies of theirs. */
static void copy_chunks(struct layer_device *device, uint32_t first, uint32_t end)
{
    const uint32_t n_distinct = device->rows->size.n_distinct / KEY_CACHE_CHUNK_BLOCKS;
    uint8_t *const *chunks = (uint8_t *const *)(uintptr_t)key_cache_chunks(device->keys);
    for (uint32_t i = first; i < end; i++) {
        const struct backend_copy copy = {chunks[i], chunks[i % n_distinct], device->chunk_bytes};
        device->ops->copy(device->backend, &copy, 1);
    }
}

/* Memory of the results, for n_blocks. */
static bool make_room(struct layer_device *device, uint32_t n_blocks)
{
    const struct backend_device_ops *ops = device->ops->device;
    ops->host_free(device->backend, device->masks);
    ops->host_free(device->backend, device->masses);
    device->masks = ops->host_alloc(device->backend, LAYER_N_KV_HEADS * (size_t)n_blocks * sizeof *device->masks);
    device->masses = ops->host_alloc(device->backend, LAYER_N_HEADS * (size_t)n_blocks * sizeof *device->masses);
    return device->masks && device->masses;
}

int layer_device_extend(struct layer_device *device, uint32_t n_blocks)
{
    const uint32_t before = key_cache_n_blocks(device->keys), n_distinct = device->rows->size.n_distinct;
    int r = key_cache_extend(device->keys, n_blocks);
    if (r == 0 && !make_room(device, n_blocks))
        r = -ENOMEM;
    if (r < 0)
        return r;
    for (uint32_t block = before; block < n_distinct; block++)
        layer_device_put(device, block);
    copy_chunks(device, (before > n_distinct ? before : n_distinct) / KEY_CACHE_CHUNK_BLOCKS,
                n_blocks / KEY_CACHE_CHUNK_BLOCKS);
    return device->ops->device->finish(device->backend);
}

double layer_device_key_bytes(const struct layer_device *device)
{
    return (double)key_cache_bytes(device->keys);
}

/* ---- life ---- */

struct layer_device *layer_device_free(struct layer_device *device)
{
    if (!device)
        return NULL;
    if (device->backend) {
        void *on_device[] = {device->window, device->q, device->exact, device->out};
        void *on_host[] = {device->masks,    device->masses,     device->references, device->n_kept,
                           device->partials, device->host_exact, device->host_out};
        key_cache_free(device->keys);
        for (size_t i = 0; i < sizeof on_device / sizeof *on_device; i++)
            device->ops->free(device->backend, on_device[i]);
        for (size_t i = 0; i < sizeof on_host / sizeof *on_host; i++)
            device->ops->device->host_free(device->backend, on_host[i]);
    }
    if (device->ops)
        device->ops->close(device->backend);
    free(device);
    return NULL;
}

static bool make_fixed(struct layer_device *device)
{
    const struct backend_ops *ops = device->ops;
    struct backend *backend = device->backend;
    const size_t q_bytes = (size_t)device->rows->size.n_queries * LAYER_N_HEADS * LAYER_DIM * sizeof(float),
                 exact_bytes = LAYER_N_HEADS * LAYER_WIDTH * sizeof(float),
                 out_bytes = LAYER_N_HEADS * LAYER_DIM * sizeof(float);
    device->window = ops->alloc(backend, LAYER_N_KV_HEADS * N_PIECES * LAYER_HEAD_BYTES);
    device->q = ops->alloc(backend, q_bytes);
    device->exact = ops->alloc(backend, exact_bytes);
    device->out = ops->alloc(backend, out_bytes);
    device->references = ops->device->host_alloc(backend, LAYER_N_HEADS * sizeof(float));
    device->n_kept = ops->device->host_alloc(backend, LAYER_N_KV_HEADS * sizeof(uint32_t));
    device->partials = ops->device->host_alloc(backend, LAYOUT_N_LANES * exact_bytes);
    device->host_exact = ops->device->host_alloc(backend, exact_bytes);
    device->host_out = ops->device->host_alloc(backend, out_bytes);
    if (!device->window || !device->q || !device->exact || !device->out || !device->references || !device->n_kept ||
        !device->partials || !device->host_exact || !device->host_out)
        return false;
    for (uint32_t head = 0; head < LAYER_N_KV_HEADS; head++)
        for (uint32_t p = 0; p < N_PIECES; p++)
            ops->device->to_device(backend, device->window + (head * N_PIECES + p) * LAYER_HEAD_BYTES,
                                   layer_rows_of(device->rows, p, head), LAYER_HEAD_BYTES);
    ops->device->to_device(backend, device->q, device->rows->q, q_bytes);
    return true;
}

int layer_device_new(const struct layer_rows *rows, const struct policy *policy, struct layer_device **ret_device,
                     char *sentence, size_t sentence_size)
{
    const struct row_shape shape = {1, LAYER_N_KV_HEADS, LAYER_DIM, ROW_CODEC_F16};
    const struct backend_options options = {.device = BACKEND_DEVICE_BY_WORKER};
    struct layer_device *device = calloc(1, sizeof *device);
    if (!device)
        return -ENOMEM;
    device->rows = rows;
    device->ops = &backend_cuda;
    int r = device->ops->open(&options, &device->backend, sentence, sentence_size);
    if (r < 0) {
        layer_device_free(device);
        return r;
    }
    const struct key_cache_memory memory = {.alloc = keys_alloc, .free = keys_free, .context = device};
    r = key_cache_new(policy->quantizer, &shape, NULL, &memory, &device->keys);
    if (r == 0 && !make_fixed(device))
        r = -ENOMEM;
    if (r == 0)
        r = device->ops->device->finish(device->backend);
    if (r < 0) {
        snprintf(sentence, sentence_size, "%s %s", strerror(-r), device->ops->device->error(device->backend));
        layer_device_free(device);
        return r;
    }
    *ret_device = device;
    return 0;
}

const char *layer_device_describe(const struct layer_device *device)
{
    return device->ops->describe(device->backend);
}

const char *layer_device_error(const struct layer_device *device)
{
    return device->ops->device->error(device->backend);
}

/* ---- a step ---- */

/* Exact attention, and which old tokens are read. */
static void ask(struct layer_device *device, const struct policy *policy, uint32_t n_blocks, uint32_t query)
{
    struct backend_piece pieces[LAYER_N_KV_HEADS][N_PIECES];
    struct backend_attend exact[LAYER_N_KV_HEADS];
    struct backend_select items[LAYER_N_KV_HEADS];
    for (uint32_t head = 0; head < LAYER_N_KV_HEADS; head++) {
        const uint32_t first = head * LAYER_GROUP;
        float *q = device->q + ((size_t)query * LAYER_N_HEADS + first) * LAYER_DIM;
        for (uint32_t p = 0; p < N_PIECES; p++)
            pieces[head][p] =
                (struct backend_piece){device->window + (head * N_PIECES + p) * LAYER_HEAD_BYTES, piece_masks[p]};
        exact[head] = (struct backend_attend){.q = q,
                                              .partials = device->exact + first * LAYER_WIDTH,
                                              .pieces = pieces[head],
                                              .n_pieces = N_PIECES,
                                              .n_queries = LAYER_GROUP,
                                              .group = LAYER_GROUP,
                                              .causal_piece = N_PIECES,
                                              .is_first = true};
        items[head] = (struct backend_select){.policy = policy,
                                              .q = q,
                                              .exact = device->exact + first * LAYER_WIDTH,
                                              .pieces = pieces[head],
                                              .n_pieces = N_PIECES,
                                              .keys = device->keys,
                                              .kv_head = head,
                                              .n_blocks = n_blocks,
                                              .masks = device->masks + (size_t)head * n_blocks,
                                              .masses = device->masses + (size_t)first * n_blocks,
                                              .references = device->references + first,
                                              .n_kept = device->n_kept + head};
    }
    const struct backend_device_ops *ops = device->ops->device;
    ops->part(device->backend, 1);
    device->ops->attend(device->backend, exact, LAYER_N_KV_HEADS, LAYER_DIM, KERNELS_ROWS_F16, layer_scale());
    ops->to_host(device->backend, device->host_exact, device->exact, LAYER_N_HEADS * LAYER_WIDTH * sizeof(float));
    ops->select(device->backend, items, LAYER_N_KV_HEADS, LAYER_GROUP, LAYER_DIM, KERNELS_ROWS_F16, layer_scale());
}

static void merge(struct layer_device *device)
{
    struct backend_merge items[LAYER_N_KV_HEADS] = {0};
    for (uint32_t head = 0; head < LAYER_N_KV_HEADS; head++) {
        const uint32_t first = head * LAYER_GROUP;
        items[head].partials = device->exact + first * LAYER_WIDTH;
        items[head].out = device->out + first * LAYER_DIM;
        for (uint32_t lane = 0; lane < LAYOUT_N_LANES; lane++)
            items[head].from[lane] = device->partials + ((size_t)lane * LAYER_N_HEADS + first) * LAYER_WIDTH;
    }
    const struct backend_device_ops *ops = device->ops->device;
    ops->part(device->backend, 2);
    ops->merge(device->backend, items, LAYER_N_KV_HEADS, LAYER_GROUP, LAYER_DIM);
    ops->to_host(device->backend, device->host_out, device->out, LAYER_N_HEADS * LAYER_DIM * sizeof(float));
}

int layer_device_step(struct layer_device *device, const struct policy *policy, const struct layer_gather *gather,
                      uint32_t query, float *out, struct layer_times *ret_times)
{
    const double began = now();
    ask(device, policy, gather->n_blocks, query);
    const double asked = now();
    int r = device->ops->device->finish(device->backend);
    if (r < 0)
        return r;
    const double selected = now();
    const struct layer_selection selection = {.q = layer_q_of(device->rows, query, 0),
                                              .masks = device->masks,
                                              .masses = policy->terms.tail ? device->masses : NULL,
                                              .references = device->references,
                                              .partials = device->partials};
    layer_gather_run(gather, &selection);
    const double gathered = now();
    merge(device);
    r = device->ops->device->finish(device->backend);
    if (r < 0)
        return r;
    *ret_times = (struct layer_times){.asked = asked - began,
                                      .waited = selected - asked,
                                      .gathered = gathered - selected,
                                      .merged = now() - gathered,
                                      .n_bytes = layer_gather_bytes(gather, &selection)};
    for (uint32_t head = 0; head < LAYER_N_KV_HEADS; head++)
        ret_times->n_kept += device->n_kept[head];
    memcpy(out, device->host_out, LAYER_N_HEADS * LAYER_DIM * sizeof(float));
    return 0;
}

void layer_device_full(struct layer_device *device, const struct layer_gather *gather, uint32_t query, float *out,
                       struct layer_times *ret_times)
{
    const struct layer_selection selection = {
        .q = layer_q_of(device->rows, query, 0), .masks = device->masks, .partials = device->partials};
    const uint32_t n_blocks = gather->n_blocks;
    for (uint32_t head = 0; head < LAYER_N_KV_HEADS; head++)
        for (uint32_t block = 0; block < n_blocks; block++) /* block 0 is the first of its lane */
            device->masks[(size_t)head * n_blocks + block] = exact_set_old_mask(block);
    const double began = now();
    layer_gather_run(gather, &selection);
    *ret_times = (struct layer_times){.gathered = now() - began, .n_bytes = layer_gather_bytes(gather, &selection)};
    for (uint32_t head = 0; head < LAYER_N_HEADS; head++) {
        float *partial = device->host_exact + head * LAYER_WIDTH;
        for (uint32_t lane = 0; lane < LAYOUT_N_LANES; lane++)
            device->rows->kernels->partial_merge(
                partial, device->partials + ((size_t)lane * LAYER_N_HEADS + head) * LAYER_WIDTH, LAYER_DIM);
        device->rows->kernels->partial_finish(partial, LAYER_DIM, out + head * LAYER_DIM);
    }
}
