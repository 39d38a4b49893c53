/*
 * test_select.c - old keys by the table of the cuda back end on the emulated device: what `quantize` puts into a key cache, byte for
 * byte what the CPU does, and what `select` makes of it, to the bit what selection_run() makes with the plain kernels, in the order
 * of lanes. Every codec, both row codecs, every selector, several sessions and policies a call.
 */
#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "gpu-worker/backend/backend.h"
#include "gpu-worker/policy/exact_set.h"
#include "gpu-worker/policy/selection.h"
#include "tests/backend/cuda-on-cpu/device.h"
#include "tests/backend/cuda-on-cpu/emulation_control.h"
#include "tests/backend/cuda-on-cpu/keys.h"

#define N_LAYERS    2u
#define N_KV        2u
#define MOST_GROUP  8u
#define MOST_BLOCKS 150u
#define N_SESSIONS  3u
#define N_EXACT     (LAYOUT_N_SINKS + 64u + 23u) /* sinks, a block and part of one */
#define SCALE       0.3f

#ifdef HCATTN_ON_DEVICE /* as large as it is */
#define LIMIT_DEVICE(n_bytes) ((void)(n_bytes))
#else
#define LIMIT_DEVICE(n_bytes) emulation_set_device_bytes(n_bytes)
#endif

static const struct kernels *plain;

/* What a session of the worker has, twice: on the device and for the CPU. */
struct session {
    struct policy policy;
    uint32_t n_blocks;
    struct key_cache *there, *here;
    bool absent[N_LAYERS * N_KV];
};

static struct world {
    struct backend *backend;
    const struct keys_case *keys;
    uint32_t group;
    enum kernels_rows codec;
    struct key_head heads[N_LAYERS * N_KV];
    struct key_quantizer quantizer;
    uint64_t n_quantizers;
    struct session sessions[N_SESSIONS];
} world;

/* ---- caches ---- */

static void *alloc_there(void *context, size_t n_bytes)
{
    (void)context;
    return backend_cuda.alloc(world.backend, n_bytes);
}
static void free_there(void *context, void *memory, size_t n_bytes)
{
    (void)context, (void)n_bytes;
    backend_cuda.free(world.backend, memory);
}
static void quantize_there(void *context, const struct key_quantizer *quantizer, const struct key_cache_tile *tiles,
                           uint32_t n_tiles)
{
    (void)context;
    backend_cuda.device->quantize(world.backend, quantizer, world.codec, tiles, n_tiles);
}
static void *alloc_here(void *context, size_t n_bytes)
{
    (void)context;
    return keys_memory(n_bytes);
}
static void free_here(void *context, void *memory, size_t n_bytes)
{
    (void)context, (void)n_bytes;
    free(memory);
}

static float numbers[64 * KERNELS_MAX_HEAD_DIM];
static uint8_t rows[N_KV][64 * 4 * KERNELS_MAX_HEAD_DIM];
static uint32_t kind_of_block;

/* 64 rows, each with K and V alike; other ones whenever it is called. */
static void fill_rows(uint8_t *to, uint32_t kind)
{
    const uint32_t d = world.keys->head_dim;
    keys_fill(numbers, 64, d, kind);
    for (uint32_t t = 0; t < 64; t++)
        plain->encode_row(numbers + (size_t)t * d, numbers + (size_t)t * d, d, world.codec,
                          to + t * kernels_row_bytes(d, world.codec));
}

/* The rows are read before the cache's call asks for the next: two heads' are there at the same time. */
static const void *rows_of(void *context, uint32_t layer, uint32_t kv_head)
{
    (void)context, (void)layer;
    return rows[kv_head];
}

static struct row_shape shape_of(uint32_t n_layers)
{
    return (struct row_shape){.n_layers = n_layers,
                              .n_kv_heads = N_KV,
                              .head_dim = world.keys->head_dim,
                              .codec = (enum row_codec)world.codec};
}

static void new_caches(struct session *session, uint32_t n_layers, const bool *absent)
{
    const struct row_shape shape = shape_of(n_layers);
    const struct key_cache_memory there = {.alloc = alloc_there, .free = free_there, .quantize = quantize_there},
                                  here = {.alloc = alloc_here, .free = free_here};
    assert_int_equal(key_cache_new(&world.quantizer, &shape, absent, &there, &session->there), 0);
    assert_int_equal(key_cache_new(&world.quantizer, &shape, absent, &here, &session->here), 0);
}

static void add_block(struct session *session)
{
    for (uint32_t head = 0; head < N_KV; head++)
        fill_rows(rows[head], kind_of_block % 9 == 8 ? 3 : 0); /* some as a broken model has them */
    kind_of_block++;
    assert_int_equal(key_cache_add(session->there, plain, rows_of, NULL), 0);
    assert_int_equal(key_cache_add(session->here, plain, rows_of, NULL), 0);
    memset(rows, 0x3c, sizeof rows);
}

/* Tiles and sides of one head are those of the CPU. */
static void compare_keys(const struct session *session, uint32_t layer, uint32_t kv_head)
{
    const struct key_cache_place place = key_cache_place(session->there, layer, kv_head);
    const uint8_t *const *chunks = key_cache_chunks(session->there);
    const size_t tile_bytes = world.quantizer.codec->tile_bytes(key_quantizer_head(&world.quantizer, layer, kv_head));
    uint8_t *got = keys_memory(tile_bytes);
    for (uint32_t block = 0; block < key_cache_n_blocks(session->here); block++) {
        const void *tile;
        const float *side;
        float got_side;
        const uint32_t at = block % KEY_CACHE_CHUNK_BLOCKS;
        (void)key_cache_run(session->here, layer, kv_head, block, &tile, &side);
        const uint8_t *chunk = chunks[block / KEY_CACHE_CHUNK_BLOCKS];
        device_read(got, chunk + place.tiles + at * tile_bytes, tile_bytes);
        device_read(&got_side, chunk + place.sides + at * sizeof got_side, sizeof got_side);
        if (memcmp(got, tile, tile_bytes) != 0 || memcmp(&got_side, side, sizeof got_side) != 0)
            fail_msg("block %u of layer %u, head %u in %s, %u dimensions, rows %d", block, layer, kv_head,
                     world.quantizer.codec->name, world.keys->head_dim, world.codec);
    }
    free(got);
}

static void finish(void)
{
    if (backend_cuda.device->finish(world.backend) != 0)
        fail_msg("%s", backend_cuda.device->error(world.backend));
}

/* ---- a quantizer ---- */

static void begin(const struct keys_case *keys, uint32_t group, enum kernels_rows codec, size_t device_bytes)
{
    const struct backend_options options = {.device = BACKEND_DEVICE_BY_WORKER};
    char error[256];
    plain = kernels_get(KERNELS_ISA_PLAIN);
    LIMIT_DEVICE(device_bytes);
    assert_int_equal(backend_cuda.open(&options, &world.backend, error, sizeof error), 0);
    world.keys = keys;
    world.group = group;
    world.codec = codec;
    for (uint32_t i = 0; i < N_LAYERS * N_KV; i++)
        world.heads[i] = keys_head(keys);
    world.quantizer = (struct key_quantizer){.codec = key_codec_find(keys->codec),
                                             .n_layers = N_LAYERS,
                                             .n_kv_heads = N_KV,
                                             .heads = world.heads,
                                             .id = ++world.n_quantizers};
}

static void end(void)
{
    for (uint32_t i = 0; i < N_LAYERS * N_KV; i++)
        keys_head_free(world.keys, world.heads[i]);
    backend_cuda.close(world.backend);
    world.backend = NULL;
    LIMIT_DEVICE((size_t)8 << 30);
}

/* ---- selections ---- */

/* One (session, KV head): what goes in, and what comes out of both. */
struct item {
    const struct session *session;
    float q[MOST_GROUP * KERNELS_MAX_HEAD_DIM];
    float exact[MOST_GROUP * KERNELS_PARTIAL_FLOATS(KERNELS_MAX_HEAD_DIM)];
    float exact_scores[MOST_GROUP * SELECTION_MAX_EXACT];
    uint8_t *rows, *rows_there; /* [3 pieces][64] rows */
    struct backend_piece pieces[3];
    void *there[2]; /* q, exact */
    /* results in the host's memory that the device reaches */
    uint64_t *masks;
    float *masses, *references, *weights;
    uint32_t *n_kept;
};

static struct item items[N_SESSIONS * N_KV];
static struct backend_select asked[N_SESSIONS * N_KV];
static size_t bytes_left; /* not 0: of the device, for a selection to work in */
static uint64_t masks[MOST_BLOCKS];
static float masses[MOST_GROUP * MOST_BLOCKS], weights[MOST_GROUP * MOST_BLOCKS * 64], references[MOST_GROUP];

/* The exact set's partials and, in its order, its scores: as step_select.c computes them. */
static void fill_exact(struct item *item)
{
    static const uint64_t wanted[3] = {(1u << LAYOUT_N_SINKS) - 1, ~UINT64_C(0), (UINT64_C(1) << 23) - 1};
    const uint32_t d = world.keys->head_dim, group = world.group;
    const size_t row_bytes = kernels_row_bytes(d, world.codec), piece_bytes = 64 * row_bytes;
    uint32_t n = 0;
    item->rows = keys_memory(3 * piece_bytes);
    backend_make_empty(item->exact, group, d);
    for (uint32_t p = 0; p < 3; p++) {
        uint64_t of_queries[MOST_GROUP];
        fill_rows(item->rows + p * piece_bytes, 0);
        for (uint32_t k = 0; k < group; k++)
            of_queries[k] = wanted[p];
        plain->attend_block(item->q, group, d, world.codec, item->rows + p * piece_bytes, of_queries, SCALE,
                            item->exact);
        for (uint32_t t = 0; t < 64; t++) {
            if ((wanted[p] >> t & 1) == 0)
                continue;
            plain->decode_keys(item->rows + p * piece_bytes + t * row_bytes, 1, d, world.codec, numbers);
            for (uint32_t k = 0; k < group; k++) {
                float sum = 0;
                for (uint32_t i = 0; i < d; i++)
                    sum += item->q[k * d + i] * numbers[i];
                item->exact_scores[k * SELECTION_MAX_EXACT + n] = sum * SCALE;
            }
            n++;
        }
    }
    assert_int_equal(n, N_EXACT);
    item->rows_there = device_new(item->rows, 3 * piece_bytes);
    for (uint32_t p = 0; p < 3; p++)
        item->pieces[p] = (struct backend_piece){.rows = item->rows_there + p * piece_bytes, .mask = wanted[p]};
}

static void *host(size_t n_bytes)
{
    void *memory = backend_cuda.device->host_alloc(world.backend, n_bytes);
    assert_non_null(memory);
    memset(memory, 0x5a, n_bytes);
    return memory;
}

static void fill_item(struct item *item, const struct session *session, uint32_t layer, uint32_t kv_head,
                      struct backend_select *ret_asked)
{
    const uint32_t d = world.keys->head_dim, group = world.group, n = session->n_blocks;
    item->session = session;
    keys_fill(item->q, group, d, 0);
    for (uint32_t i = 0; i < group * d; i++) /* not one key has it all */
        item->q[i] *= 0.2f / sqrtf((float)d);
    fill_exact(item);
    item->there[0] = device_new(item->q, (size_t)group * d * sizeof(float));
    item->there[1] = device_new(item->exact, (size_t)group * KERNELS_PARTIAL_FLOATS(d) * sizeof(float));
    item->masks = host(n * sizeof(uint64_t));
    item->masses = host(group * n * sizeof(float));
    item->references = host(group * sizeof(float));
    item->weights = host((size_t)group * n * 64 * sizeof(float));
    item->n_kept = host(sizeof(uint32_t));
    *ret_asked = (struct backend_select){
        .policy = &session->policy,
        .q = item->there[0],
        .exact = item->there[1],
        .pieces = item->pieces,
        .n_pieces = 3,
        .keys = session->there,
        .layer = layer,
        .kv_head = kv_head,
        .n_blocks = n,
        .masks = item->masks,
        .masses = item->masses,
        .references = item->references,
        .weights = session->policy.terms.weights ? item->weights : NULL,
        .weights_stride = (size_t)n * 64,
        .n_kept = item->n_kept,
    };
}

static void free_item(struct item *item)
{
    void *memory[] = {item->masks, item->masses, item->references, item->weights, item->n_kept};
    for (uint32_t i = 0; i < 5; i++)
        backend_cuda.device->host_free(world.backend, memory[i]);
    device_free(item->there[0]);
    device_free(item->there[1]);
    device_free(item->rows_there);
    free(item->rows);
}

static uint32_t select_here(const struct item *item, const struct backend_select *of)
{
    const uint32_t n = of->n_blocks;
    void *scratch = keys_memory(selection_scratch_bytes(&world.quantizer, world.group, n));
    struct selection_item one = {
        .policy = of->policy,
        .q = item->q,
        .group = world.group,
        .head_dim = world.keys->head_dim,
        .scale = SCALE,
        .exact = item->exact,
        .exact_scores = item->exact_scores,
        .exact_stride = SELECTION_MAX_EXACT,
        .n_exact = of->policy->terms.selector == POLICY_SELECTOR_MASS ? N_EXACT : 0,
        .keys = item->session->here,
        .layer = of->layer,
        .kv_head = of->kv_head,
        .n_blocks = n,
        .masks = masks,
        .masses = masses,
        .references = references,
        .weights = of->policy->terms.weights ? weights : NULL,
        .weights_stride = (size_t)n * 64,
    };
    selection_run(plain, &one, scratch);
    free(scratch);
    return one.n_kept;
}

static void compare(const char *what, const struct backend_select *of, uint32_t block, double got, double expected)
{
    if (got != expected) /* 0 and -0 are alike */
        fail_msg("%s of block %u of %u: %.9g, not %.9g (%s, %u dimensions, group %u, rows %d, selector %d)", what,
                 block, of->n_blocks, got, expected, world.quantizer.codec->name, world.keys->head_dim, world.group,
                 world.codec, of->policy->terms.selector);
}

/* As put_in_lanes() of step_select.c. */
static void check_item(const struct item *item, const struct backend_select *of)
{
    const uint32_t n = of->n_blocks, n_kept = select_here(item, of);
    uint32_t at = 0, first[MOST_BLOCKS], n_before = 0;
    size_t n_weights = 0;
    for (uint32_t block = 0; block < n; block++) {
        first[block] = n_before;
        n_before += (uint32_t)__builtin_popcountll(masks[block]);
    }
    for (uint32_t lane = 0; lane < LAYOUT_N_LANES; lane++)
        for (uint32_t block = lane; block < n; block += LAYOUT_N_LANES, at++) {
            if (item->masks[at] != masks[block])
                fail_msg("mask of block %u of %u: %016llx, not %016llx (%s, %u dimensions, group %u, rows %d, selector "
                         "%d, %u kept, not %u)",
                         block, n, (unsigned long long)item->masks[at], (unsigned long long)masks[block],
                         world.quantizer.codec->name, world.keys->head_dim, world.group, world.codec,
                         of->policy->terms.selector, *item->n_kept, n_kept);
            for (uint32_t k = 0; k < world.group && of->policy->terms.tail; k++)
                compare("mass", of, block, (double)item->masses[k * n + at], (double)masses[k * n + block]);
            const uint32_t n_own = (uint32_t)__builtin_popcountll(masks[block]);
            for (uint32_t k = 0; k < world.group && of->policy->terms.weights; k++)
                for (uint32_t i = 0; i < n_own; i++)
                    compare("weight", of, block, (double)item->weights[k * of->weights_stride + n_weights + i],
                            (double)weights[k * of->weights_stride + first[block] + i]);
            n_weights += n_own;
        }
    assert_int_equal(*item->n_kept, n_kept);
    for (uint32_t k = 0; k < world.group; k++)
        compare("reference", of, k, (double)item->references[k], (double)references[k]);
}

static const struct policy_terms terms[] = {
    {.selector = POLICY_SELECTOR_DEVIATION, .parameter = 0.02f, .tail = true},
    {.selector = POLICY_SELECTOR_MASS, .parameter = 0.9f, .tail = true},
    {.selector = POLICY_SELECTOR_MASS, .parameter = 0.5f, .weights = true},
    {.selector = POLICY_SELECTOR_L2, .parameter = 0.003f, .tail = true},
    {.selector = POLICY_SELECTOR_L2, .parameter = 0.01f, .tail = true, .weights = true},
    {.selector = POLICY_SELECTOR_DEVIATION, .parameter = 0.3f},
    {.selector = POLICY_SELECTOR_MASS, .parameter = 0.99f, .tail = true, .weights = true},
};
#define N_TERMS (sizeof terms / sizeof *terms)

/* Sessions of these lengths, one of which keeps no keys of a head, with policies from `first` on; all items in one call. */
static void check_sessions(const uint32_t *n_blocks, size_t first)
{
    const uint32_t layer = (uint32_t)first % N_LAYERS, odd = (uint32_t)first % N_SESSIONS;
    uint32_t n = 0;
    for (uint32_t s = 0; s < N_SESSIONS; s++) {
        struct session *session = &world.sessions[s];
        *session = (struct session){.n_blocks = n_blocks[s]};
        session->policy = (struct policy){.terms = terms[(first + s / 2) % N_TERMS], .quantizer = &world.quantizer};
        session->policy.terms.codec = world.keys->codec;
        for (uint32_t i = 0; i < N_LAYERS * N_KV; i++)
            session->absent[i] = s == odd && i % N_KV == first % 2;
        new_caches(session, N_LAYERS, session->absent);
        for (uint32_t block = 0; block < n_blocks[s] + s % 2; block++) /* a session's cache may hold one more */
            add_block(session);
        for (uint32_t head = 0; head < N_KV; head++)
            if (key_cache_has(session->there, layer, head)) {
                fill_item(&items[n], session, layer, head, &asked[n]);
                n++;
            }
    }
    if (bytes_left > 0) {
        size_t n_free, n_bytes;
        for (int i = 0; i < 2; i++) { /* what is staged, by turns in two places, has its room */
            backend_cuda.device->to_device(world.backend, items[0].there[0], items[0].q, sizeof(float));
            finish();
        }
        assert_int_equal(cudaMemGetInfo(&n_free, &n_bytes), cudaSuccess);
        LIMIT_DEVICE(n_bytes - n_free + bytes_left);
    }
    backend_cuda.device->select(world.backend, asked, n, world.group, world.keys->head_dim, world.codec, SCALE);
    finish();
    LIMIT_DEVICE((size_t)8 << 30);
    for (uint32_t s = 0; s < N_SESSIONS; s++)
        for (uint32_t head = 0; head < N_KV; head++)
            if (key_cache_has(world.sessions[s].there, layer, head))
                compare_keys(&world.sessions[s], layer, head);
    for (uint32_t i = 0; i < n; i++) {
        check_item(&items[i], &asked[i]);
        free_item(&items[i]);
    }
    for (uint32_t s = 0; s < N_SESSIONS; s++) {
        key_cache_free(world.sessions[s].there);
        key_cache_free(world.sessions[s].here);
    }
}

static const struct keys_case cases[] = {
    {POLICY_CODEC_F16, 64, 0, 0},   {POLICY_CODEC_ROT4, 64, 0, 0},  {POLICY_CODEC_ROT3, 48, 0, 0},
    {POLICY_CODEC_ROT2, 128, 0, 0}, {POLICY_CODEC_PAIR3, 64, 0, 0}, {POLICY_CODEC_PAIR2, 20, 0, 0},
    {POLICY_CODEC_PAIR1, 64, 0, 0}, {POLICY_CODEC_KLT2, 20, 0, 0},  {POLICY_CODEC_KLT1, 16, 0, 0},
    {POLICY_CODEC_KLT0, 48, 0, 0},  {POLICY_CODEC_PQ, 20, 2, 512},  {POLICY_CODEC_PQ, 16, 8, 256},
    {POLICY_CODEC_F16, 20, 0, 0},
};
#define N_CASES (sizeof cases / sizeof *cases)

static void selections_are_those_of_the_cpu(void **state)
{
    (void)state;
    static const uint32_t groups[] = {1, 4, 3, 8};
    static const uint32_t n_blocks[][N_SESSIONS] = {{1, 17, 3}, {12, 2, 13}, {5, 33, 24}, {40, 1, 7}};
    for (size_t i = 0; i < N_CASES; i++)
        for (size_t k = 0; k < 2; k++) {
            (void)device_run((int)(i + k) % DEVICE_N_RUNS); /* the order of blocks and threads */
            begin(&cases[i], groups[(i + k) % 4], k == 0 ? KERNELS_ROWS_F16 : KERNELS_ROWS_Q8_0, (size_t)8 << 30);
            check_sessions(n_blocks[(i + 2 * k) % 4], i + 3 * k);
            end();
        }
}

static void every_number_of_blocks(void **state)
{
    (void)state;
    static const struct keys_case keys = {POLICY_CODEC_ROT3, 16, 0, 0};
    begin(&keys, 2, KERNELS_ROWS_F16, (size_t)8 << 30);
    for (uint32_t n = 1; n <= 40; n += N_SESSIONS)
        check_sessions((const uint32_t[N_SESSIONS]){n, n + 1, n + 2}, n);
    end();
}

/* As if scores had a room that is too small for two items; and a session of more blocks than the others. */
static void items_go_in_waves(void **state)
{
    (void)state;
    static const struct keys_case keys = {POLICY_CODEC_ROT2, 16, 0, 0};
    static const uint32_t n_blocks[N_SESSIONS] = {MOST_BLOCKS, 100, 9};
    begin(&keys, 4, KERNELS_ROWS_F16, (size_t)6 << 20);
    check_sessions(n_blocks, 1);
    end();
}

/* More tiles than a piece has. */
static void many_tiles(void **state)
{
    (void)state;
    enum { LAYERS = 150 };
    static const struct keys_case keys = {POLICY_CODEC_ROT4, 16, 0, 0};
    static struct key_head heads[LAYERS * N_KV];
    struct session session = {0};
    begin(&keys, 1, KERNELS_ROWS_Q8_0, (size_t)8 << 30);
    for (uint32_t i = 0; i < LAYERS * N_KV; i++)
        heads[i] = world.heads[0];
    world.quantizer.n_layers = LAYERS;
    world.quantizer.heads = heads;
    new_caches(&session, LAYERS, NULL);
    add_block(&session);
    add_block(&session);
    finish();
    for (uint32_t layer = 0; layer < LAYERS; layer++)
        for (uint32_t head = 0; head < N_KV; head++)
            compare_keys(&session, layer, head);
    key_cache_free(session.there);
    key_cache_free(session.here);
    end();
}

/* Two quantizers of the same place in memory, one after the other: the second one's tables are its own. */
static void a_quantizer_that_replaces_another(void **state)
{
    (void)state;
    static const struct keys_case keys = {POLICY_CODEC_PAIR2, 16, 0, 0}, other = {POLICY_CODEC_PAIR2, 20, 0, 0};
    static const uint32_t n_blocks[N_SESSIONS] = {2, 1, 3};
    begin(&keys, 2, KERNELS_ROWS_F16, (size_t)8 << 30);
    check_sessions(n_blocks, 0);
    const size_t n_bytes = backend_cuda.bytes(world.backend);
    for (uint32_t i = 0; i < N_LAYERS * N_KV; i++) {
        keys_head_free(&keys, world.heads[i]);
        world.heads[i] = keys_head(&other);
    }
    world.keys = &other;
    world.quantizer.id = ++world.n_quantizers;
    check_sessions(n_blocks, 1);
    assert_true(backend_cuda.bytes(world.backend) > n_bytes); /* the first one's are there, too, and counted */
    end();
}

#ifndef HCATTN_ON_DEVICE
/* Room for one item's work when three ask for it: three waves, and the same results. */
static void a_full_device_takes_smaller_waves(void **state)
{
    (void)state;
    static const struct keys_case keys = {POLICY_CODEC_ROT2, 16, 0, 0};
    static const uint32_t n_blocks[N_SESSIONS] = {60, 61, 62};
    bytes_left = 300u << 10; /* an item: 140 KiB */
    begin(&keys, 4, KERNELS_ROWS_F16, (size_t)8 << 30);
    check_sessions(n_blocks, 1);
    end();
    bytes_left = 0;
}

static void no_memory_is_told(void **state)
{
    (void)state;
    static const struct keys_case keys = {POLICY_CODEC_ROT2, 16, 0, 0};
    struct session session = {0};
    begin(&keys, 1, KERNELS_ROWS_F16, (size_t)8 << 30);
    new_caches(&session, N_LAYERS, NULL);
    assert_int_equal(key_cache_reserve(session.there, 1), 0);
    assert_int_equal(key_cache_reserve(session.here, 1), 0);
    LIMIT_DEVICE(0);
    add_block(&session);
    assert_int_equal(backend_cuda.device->finish(world.backend), -ENOMEM);
    LIMIT_DEVICE((size_t)8 << 30);
    key_cache_clear(session.there);
    key_cache_clear(session.here);
    add_block(&session);
    finish();
    compare_keys(&session, 1, 1);
    key_cache_free(session.there);
    key_cache_free(session.here);
    end();
}

#endif

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(selections_are_those_of_the_cpu),
        cmocka_unit_test(every_number_of_blocks),
        cmocka_unit_test(items_go_in_waves),
        cmocka_unit_test(many_tiles),
        cmocka_unit_test(a_quantizer_that_replaces_another),
#ifndef HCATTN_ON_DEVICE
        cmocka_unit_test(a_full_device_takes_smaller_waves),
        cmocka_unit_test(no_memory_is_told),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
