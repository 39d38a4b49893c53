/*
 * timings_keys.c - see timings.h: old keys of a layer: scores from 128k to 4M tokens, the selection out of them, tiles from sealed
 * blocks. Shapes of Llama-3-8B: 8 KV heads of 128 dimensions, 4 query heads each.
 */
#include <stdio.h>
#include <stdlib.h>

#include "gpu-worker/backend/cuda/cuda_keys.h"
#include "gpu-worker/backend/cuda/cuda_selection.h"
#include "tests/backend/cuda-on-device/timings.h"

#define TILE        64u /* keys */
#define N_HEADS     8u
#define HEAD_DIM    128u
#define GROUP       4u
#define MOST_COPIES 16u /* of all tiles, one after the other, so that short contexts do not stay in the cache */
#define MASS        0.95f
#define MOST_SEALED 512u /* blocks that become tiles in one call */
#define TINY_SEALED 2u

enum codec { F16, ROT, PAIR, PQ };

struct scan {
    const char *name;
    enum codec codec;
    uint32_t bits; /* pq: of a sub-space's index; 0: klt1, of N_KLT1_GROUPS */
    uint32_t n_tiles, n_copies;
    uint32_t n_groups;         /* pair */
    struct cuda_key_run *runs; /* [n_copies][N_HEADS] */
    const uint8_t **chunks;    /* [n_copies][N_HEADS][n_chunks]: where a head's tiles are, 16 by 16 */
    float *scores;
    uint32_t *largest; /* [N_HEADS][GROUP] */
};

static const struct scan scans[] = {
    {.name = "f16", .codec = F16},
    {.name = "rot4", .codec = ROT, .bits = 4},
    {.name = "rot3", .codec = ROT, .bits = 3},
    {.name = "rot2", .codec = ROT, .bits = 2},
    {.name = "pair3", .codec = PAIR, .bits = 3},
    {.name = "pair2", .codec = PAIR, .bits = 2},
    {.name = "pair1", .codec = PAIR, .bits = 1},
    {.name = "klt1", .codec = PAIR},
    {.name = "pq", .codec = PQ, .bits = 10},
};
#define PQ_DIMS       4u
#define N_KLT1_GROUPS 35u /* of a tile of 10 bytes a dimension, as heads have in the mean */

static size_t tile_bytes_of(const struct scan *scan)
{
    switch (scan->codec) {
    case F16:
        return TILE * HEAD_DIM * sizeof(uint16_t);
    case ROT:
        return rot_tile_bytes(scan->bits, HEAD_DIM);
    case PAIR:
        return pair_tile_bytes(&(struct pair_layout){HEAD_DIM, scan->n_groups, scan->bits == 0});
    default:
        return HEAD_DIM / PQ_DIMS * pq_space_bytes(1u << scan->bits);
    }
}

static cudaError_t launch_score(struct timings *timings, void *context, uint32_t i)
{
    const struct scan *scan = context;
    const struct cuda_key_run *runs = scan->runs + i % scan->n_copies * N_HEADS;
    const size_t stride = (size_t)scan->n_tiles * TILE;
    switch (scan->codec) {
    case F16:
        return cuda_score_f16(&timings->queue, HEAD_DIM, GROUP, runs, N_HEADS, scan->n_tiles, stride);
    case ROT:
        return cuda_score_rot(&timings->queue, scan->bits, HEAD_DIM, GROUP, runs, N_HEADS, scan->n_tiles, stride);
    case PAIR:
        return cuda_score_pair(&timings->queue, scan->bits == 0, HEAD_DIM, scan->n_groups, GROUP, runs, N_HEADS,
                               scan->n_tiles, stride);
    default:
        return cuda_score_pq(&timings->queue, PQ_DIMS, 1u << scan->bits, HEAD_DIM, GROUP, runs, N_HEADS, scan->n_tiles,
                             stride);
    }
}

static uint32_t n_chunks_of(const struct scan *scan)
{
    return (scan->n_tiles + CUDA_KEY_CHUNK_TILES - 1) / CUDA_KEY_CHUNK_TILES;
}

static cudaError_t upload_chunks(const struct timings *timings, struct scan *scan, size_t head_bytes)
{
    const size_t n_chunks = n_chunks_of(scan), n = scan->n_copies * N_HEADS * n_chunks;
    const uint8_t **chunks = malloc(n * sizeof *chunks);
    if (!chunks)
        return cudaErrorMemoryAllocation;
    for (size_t i = 0; i < n; i++)
        chunks[i] = (const uint8_t *)timings_copy(timings, N_HEADS * head_bytes, (uint32_t)(i / n_chunks / N_HEADS)) +
                    i / n_chunks % N_HEADS * head_bytes + i % n_chunks * CUDA_KEY_CHUNK_TILES * tile_bytes_of(scan);
    const cudaError_t error = cudaMemcpy(scan->chunks, chunks, n * sizeof *chunks, cudaMemcpyHostToDevice);
    free(chunks);
    return error;
}

/* Runs over copies of all heads' tiles; queries, sides (the tiles' beginning) and centroids are somewhere in the pool, too. */
static cudaError_t upload_runs(const struct timings *timings, struct scan *scan, size_t head_bytes)
{
    struct cuda_key_run runs[MOST_COPIES * N_HEADS];
    const cudaError_t error = upload_chunks(timings, scan, head_bytes);
    if (error != cudaSuccess)
        return error;
    for (uint32_t copy = 0; copy < scan->n_copies; copy++) {
        for (uint32_t head = 0; head < N_HEADS; head++)
            runs[copy * N_HEADS + head] =
                (struct cuda_key_run){.query = timings->pool + (size_t)head * 65536,
                                      .chunks = scan->chunks + ((size_t)copy * N_HEADS + head) * n_chunks_of(scan),
                                      .largest = scan->largest + (size_t)head * GROUP,
                                      .scores = scan->scores + (size_t)head * GROUP * scan->n_tiles * TILE,
                                      .centroids = (const uint16_t *)(const void *)timings->pool,
                                      .n_tiles = scan->n_tiles,
                                      .n_groups = scan->n_groups};
    }
    return cudaMemcpy(scan->runs, runs, sizeof *runs * N_HEADS * scan->n_copies, cudaMemcpyHostToDevice);
}

static void score(struct timings *timings, struct scan *scan, uint32_t n_tokens)
{
    scan->n_tiles = n_tokens / TILE;
    if (scan->codec == PAIR)
        scan->n_groups = scan->bits == 0 ? N_KLT1_GROUPS : codec_pair_table_groups(HEAD_DIM, scan->bits);
    const size_t head_bytes = scan->n_tiles * tile_bytes_of(scan), all_bytes = N_HEADS * head_bytes;
    const size_t n_scores = (size_t)N_HEADS * GROUP * n_tokens;
    struct timing timing = {.kernel = "score",
                            .type = scan->name,
                            .bytes = (double)all_bytes + sizeof(float) * (double)n_scores,
                            .operations = 2.0 * HEAD_DIM * (double)n_scores};
    snprintf(timing.shape, sizeof timing.shape, "Llama-3-8B layer of %u", n_tokens);
    if (all_bytes > timings->pool_bytes || n_tokens / TILE * sizeof(float) > timings->pool_bytes) {
        timings_skip(&timing, "memory");
        return;
    }
    const size_t n_copies = timings->pool_bytes / (all_bytes + 255);
    scan->n_copies = n_copies > MOST_COPIES ? MOST_COPIES : n_copies > 1 ? (uint32_t)n_copies : 1;
    scan->scores = timings_new(&timing, n_scores * sizeof *scan->scores);
    scan->largest = scan->scores ? timings_new(&timing, sizeof *scan->largest * N_HEADS * GROUP) : NULL;
    scan->chunks = scan->largest
                       ? timings_new(&timing, sizeof *scan->chunks * scan->n_copies * N_HEADS * n_chunks_of(scan))
                       : NULL;
    scan->runs = scan->chunks ? timings_new(&timing, sizeof *scan->runs * N_HEADS * MOST_COPIES) : NULL;
    if (scan->runs && upload_runs(timings, scan, head_bytes))
        timings_skip(&timing, "memory");
    else if (scan->runs)
        timings_case(timings, &timing, launch_score, scan);
    (void)cudaFree(scan->scores);
    (void)cudaFree(scan->largest);
    (void)cudaFree(scan->chunks);
    (void)cudaFree(scan->runs);
}

struct choice {
    struct cuda_selection selection;
    void *states; /* of all items */
    struct cuda_selection_item *items;
};

static cudaError_t launch_selection(struct timings *timings, void *context, uint32_t i)
{
    (void)i; /* it works in place: what was scores is exponentials from the second launch on, and as large */
    const struct choice *choice = context;
    const cudaError_t error =
        cudaMemsetAsync(choice->states, 0, N_HEADS * cuda_selection_state_bytes(GROUP), timings->queue.stream);
    return error != cudaSuccess ? error
                                : cuda_selection_run(&timings->queue, &choice->selection, choice->items, N_HEADS);
}

/* All of one item's memory lies in one piece a kind. */
struct choice_memory {
    unsigned char *work;
    float *scores, *exact, *exact_scores, *masses;
    uint64_t *masks;
    uint32_t *n_kept;
};

static cudaError_t upload_items(const struct choice *choice, const struct choice_memory *m)
{
    const struct cuda_selection *s = &choice->selection;
    const size_t work_bytes = (cuda_selection_work_bytes(s) + 255) & ~(size_t)255, n = s->most_blocks;
    struct cuda_selection_item items[N_HEADS];
    for (uint32_t head = 0; head < N_HEADS; head++)
        items[head] = (struct cuda_selection_item){
            .scores = m->scores + head * GROUP * s->stride,
            .state = (unsigned char *)choice->states + head * cuda_selection_state_bytes(GROUP),
            .exact = m->exact + (size_t)head * GROUP * KERNELS_PARTIAL_FLOATS(HEAD_DIM),
            .exact_scores = m->exact_scores + head * GROUP * s->exact_stride,
            .work = m->work + head * work_bytes,
            .n_blocks = s->most_blocks,
            .n_exact = TILE,
            .parameter = MASS,
            .n_kept = m->n_kept + head,
            .masks = m->masks + head * n,
            .masses = m->masses + head * GROUP * n};
    return cudaMemcpy(choice->items, items, sizeof items, cudaMemcpyHostToDevice);
}

static void select_tokens(struct timings *timings, uint32_t n_tokens)
{
    const uint32_t n_blocks = n_tokens / TILE;
    struct choice choice = {.selection = {.selector = POLICY_SELECTOR_MASS,
                                          .group = GROUP,
                                          .head_dim = HEAD_DIM,
                                          .most_blocks = n_blocks,
                                          .n_lanes = 12,
                                          .stride = n_tokens,
                                          .exact_stride = TILE}};
    const size_t work_bytes = (cuda_selection_work_bytes(&choice.selection) + 255) & ~(size_t)255;
    /* scores read and written, exponentials read once and a weight written; weights read four times by what follows, exponentials
     * once */
    struct timing timing = {
        .kernel = "selection", .type = "mass", .bytes = (double)N_HEADS * n_tokens * (16.0 * GROUP + 20.0)};
    snprintf(timing.shape, sizeof timing.shape, "Llama-3-8B layer of %u", n_tokens);
    struct choice_memory m = {.scores = timings_new(&timing, (size_t)N_HEADS * GROUP * n_tokens * sizeof *m.scores)};
    const size_t n_exact = (size_t)N_HEADS * GROUP * KERNELS_PARTIAL_FLOATS(HEAD_DIM);
    m.work = m.scores ? timings_new(&timing, N_HEADS * work_bytes) : NULL;
    m.exact = m.work ? timings_new(&timing, n_exact * sizeof *m.exact) : NULL;
    m.exact_scores = m.exact ? timings_new(&timing, (size_t)N_HEADS * GROUP * TILE * sizeof *m.exact_scores) : NULL;
    m.masses = m.exact_scores ? timings_new(&timing, (size_t)N_HEADS * GROUP * n_blocks * sizeof *m.masses) : NULL;
    m.masks = m.masses ? timings_new(&timing, (size_t)N_HEADS * n_blocks * sizeof *m.masks) : NULL;
    m.n_kept = m.masks ? timings_new(&timing, N_HEADS * sizeof *m.n_kept) : NULL;
    choice.states = m.n_kept ? timings_new(&timing, N_HEADS * cuda_selection_state_bytes(GROUP)) : NULL;
    choice.items = choice.states ? timings_new(&timing, N_HEADS * sizeof *choice.items) : NULL;
    if (choice.items && upload_items(&choice, &m))
        timings_skip(&timing, "memory");
    else if (choice.items)
        timings_case(timings, &timing, launch_selection, &choice);
    void *all[] = {m.scores, m.work, m.exact, m.exact_scores, m.masses, m.masks, m.n_kept, choice.states, choice.items};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        (void)cudaFree(all[i]);
}

struct sealing {
    uint32_t bits, n_blocks;
    struct cuda_key_block *blocks;
};

static cudaError_t launch_quantize(struct timings *timings, void *context, uint32_t i)
{
    (void)i; /* a call's keys, 16 MB, come from the cache or not: it is arithmetic that takes the time */
    const struct sealing *sealing = context;
    return cuda_quantize_rot(&timings->queue, sealing->bits, HEAD_DIM, sealing->blocks, sealing->n_blocks);
}

static void quantize(struct timings *timings, uint32_t bits)
{
    static const char *const names[] = {[2] = "rot2", [3] = "rot3", [4] = "rot4"};
    const uint32_t n = timings->tiny ? TINY_SEALED : MOST_SEALED;
    const size_t keys_bytes = TILE * HEAD_DIM * sizeof(float), tile_bytes = rot_tile_bytes(bits, HEAD_DIM);
    struct timing timing = {
        .kernel = "quantize", .type = names[bits], .bytes = (double)n * (double)(keys_bytes + tile_bytes)};
    snprintf(timing.shape, sizeof timing.shape, "%u blocks of %u", n, HEAD_DIM);
    struct sealing sealing = {.bits = bits, .n_blocks = n};
    unsigned char *tiles = timings_new(&timing, n * (tile_bytes + sizeof(float)));
    sealing.blocks = tiles ? timings_new(&timing, n * sizeof *sealing.blocks) : NULL;
    struct cuda_key_block blocks[MOST_SEALED];
    for (uint32_t b = 0; b < n && sealing.blocks; b++)
        blocks[b] = (struct cuda_key_block){.keys = timings_copy(timings, keys_bytes, b),
                                            .tile = tiles + b * tile_bytes,
                                            .side = (float *)(void *)(tiles + n * tile_bytes) + b};
    if (sealing.blocks && cudaMemcpy(sealing.blocks, blocks, n * sizeof *blocks, cudaMemcpyHostToDevice))
        timings_skip(&timing, "memory");
    else if (sealing.blocks)
        timings_case(timings, &timing, launch_quantize, &sealing);
    (void)cudaFree(tiles);
    (void)cudaFree(sealing.blocks);
}

void timings_keys(struct timings *timings)
{
    static const uint32_t contexts[] = {131072, 524288, 1048576, 4194304};
    for (uint32_t c = 0; c < (timings->tiny ? 1 : sizeof contexts / sizeof *contexts); c++) {
        const uint32_t n_tokens = timings->tiny ? 192 : contexts[c];
        for (uint32_t s = 0; s < sizeof scans / sizeof *scans; s++) {
            struct scan scan = scans[s];
            score(timings, &scan, n_tokens);
        }
        select_tokens(timings, n_tokens);
    }
    for (uint32_t bits = 2; bits <= 4; bits++)
        quantize(timings, bits);
}
