/*
 * methods_evict.c - baselines that keep some old tokens on the device, in f16, and let the others go for good.
 *
 *     streaming            StreamingLLM (2309.17453): sinks and window alone
 *     h2o=R                H2O (2306.14048): heavy hitters, the tokens with the largest accumulated attention; R of the old ones.
 *                          The prompt's rows are sampled, one in 8 and each counted 8 times; those of the tail all count. When a
 *                          block of the tail becomes old, it is added, and what has accumulated least goes.
 *     snapkv=R             SnapKV (2404.14469): R of the prompt's old tokens, by the attention of its last 32 queries, the largest
 *                          of each token and its 3 neighbours on either side; tokens behind the prompt all stay
 *     fastgen-permanent=T  FastGen as published (2310.01801): what a head's class does not hold is dropped
 *
 * Accumulated attention is a KV head's: the mean over its query heads.
 *
 * Owner      methods_private.h. Threads: any for choose(), and for rows of different heads.
 */
#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "common/pool.h"
#include "gpu-worker/eval/methods_private.h"
#include "gpu-worker/fastgen/fastgen_weights.h"

#define BLOCK LAYOUT_BLOCK_TOKENS
enum { H2O_EVERY = 8, SNAPKV_QUERIES = 32, SNAPKV_NEIGHBOURS = 3 };

static size_t head_index(const struct methods_baseline *baseline, uint32_t layer, uint32_t kv_head)
{
    return (size_t)layer * baseline->shape.n_kv_heads + kv_head;
}

static uint64_t *masks_of(const struct methods_baseline *baseline, uint32_t layer, uint32_t kv_head)
{
    return baseline->masks + head_index(baseline, layer, kv_head) * baseline->n_blocks;
}

/* ---- rows of the prompt ---- */

struct watch {
    struct methods_baseline *baseline;
    const struct pass_layer *layer;
    const uint32_t *positions;
    uint32_t n_positions;
    uint8_t *memory; /* of each thread: scratch, then weights */
    size_t scratch_bytes, thread_bytes, stride;
    void (*add)(const struct watch *watch, uint32_t kv_head, uint32_t position, const float *weights);
    float *sums; /* for add() */
    _Atomic int error;
};

struct watched_head {
    const uint8_t *rows;
    size_t block_bytes;
};

static const void *watched_block(void *context, uint32_t block)
{
    const struct watched_head *head = context;
    return head->rows + block * head->block_bytes;
}

static void watch_head(void *context, uint32_t kv_head, uint32_t thread)
{
    struct watch *watch = context;
    const struct methods_baseline *baseline = watch->baseline;
    const struct pass_layer *layer = watch->layer;
    const size_t n_blocks = (layer->n_tokens + BLOCK - 1) / BLOCK;
    struct watched_head head = {.block_bytes = BLOCK * baseline->row_bytes};
    head.rows = layer->rows + kv_head * n_blocks * head.block_bytes;
    uint8_t *scratch = watch->memory + thread * watch->thread_bytes;
    float *weights = (float *)(void *)(scratch + watch->scratch_bytes);
    for (uint32_t first = 0, n; first < watch->n_positions; first += n) {
        const float *q[FASTGEN_WEIGHTS_POSITIONS];
        n = watch->n_positions - first;
        n = n < FASTGEN_WEIGHTS_POSITIONS ? n : FASTGEN_WEIGHTS_POSITIONS;
        for (uint32_t i = 0; i < n; i++)
            q[i] = layer->q +
                   ((size_t)watch->positions[first + i] * baseline->n_heads + (size_t)kv_head * baseline->group) *
                       baseline->shape.head_dim;
        const struct fastgen_rows rows = {
            .kernels = baseline->tools.kernels,
            .head_dim = baseline->shape.head_dim,
            .group = baseline->group,
            .codec = (enum kernels_rows)baseline->shape.codec,
            .scale = pass_scale(layer->pass),
            .n_positions = n,
            .positions = watch->positions + first,
            .q = q,
            .block = watched_block,
            .context = &head,
        };
        int error = fastgen_weights(&rows, scratch, weights, watch->stride, NULL);
        if (error != 0) {
            watch->error = error;
            return;
        }
        for (uint32_t i = 0; i < n; i++)
            watch->add(watch, kv_head, watch->positions[first + i], weights + i * watch->stride);
    }
}

/* Hands the weights of these positions to watch->add, by head in their order. */
static int run_watch(struct watch *watch)
{
    const struct methods_baseline *baseline = watch->baseline;
    if (watch->n_positions == 0)
        return 0;
    const uint32_t last = watch->positions[watch->n_positions - 1];
    watch->stride = fastgen_weights_stride(last);
    watch->scratch_bytes =
        fastgen_weights_scratch_bytes(FASTGEN_WEIGHTS_POSITIONS, last, baseline->group, baseline->shape.head_dim);
    watch->scratch_bytes = (watch->scratch_bytes + 63) / 64 * 64;
    watch->thread_bytes = watch->scratch_bytes + FASTGEN_WEIGHTS_POSITIONS * watch->stride * sizeof(float);
    watch->memory = aligned_alloc(64, watch->thread_bytes * pool_n_threads(baseline->tools.pool));
    if (watch->memory == NULL)
        return -ENOMEM;
    pool_run(baseline->tools.pool, baseline->shape.n_kv_heads, watch_head, watch);
    free(watch->memory);
    return watch->error;
}

/* ---- what stays ---- */

/* Of the tokens of masks, the n with the largest sums stay; of equal ones the earlier. scratch [64 x n_blocks]. */
static void keep_largest(uint64_t *masks, uint32_t n_blocks, const float *sums, uint32_t n, float *scratch)
{
    uint32_t n_candidates = 0, n_equal = n;
    for (uint32_t block = 0; block < n_blocks; block++)
        for (uint64_t rest = masks[block]; rest != 0; rest &= rest - 1)
            scratch[n_candidates++] = sums[block * BLOCK + (uint32_t)__builtin_ctzll(rest)];
    if (n >= n_candidates)
        return;
    if (n == 0) {
        memset(masks, 0, n_blocks * sizeof *masks);
        return;
    }
    const float limit = methods_looks_nth_largest(scratch, n_candidates, n);
    for (uint32_t i = 0; i < n_candidates; i++)
        n_equal -= scratch[i] > limit;
    for (uint32_t block = 0; block < n_blocks; block++)
        for (uint64_t rest = masks[block]; rest != 0; rest &= rest - 1) {
            const float sum = sums[block * BLOCK + (uint32_t)__builtin_ctzll(rest)];
            const bool is_above = sum > limit;
            if (!is_above && (sum < limit || n_equal == 0))
                masks[block] &= ~(rest & -rest);
            else
                n_equal -= !is_above;
        }
}

static uint32_t share_of(const struct methods_baseline *baseline, uint32_t n_tokens)
{
    return (uint32_t)(baseline->number * n_tokens + 0.5);
}

static int masks_init(struct methods_baseline *baseline)
{
    const size_t n_heads = (size_t)baseline->shape.n_layers * baseline->shape.n_kv_heads;
    if (baseline->masks == NULL)
        baseline->masks = calloc(n_heads * baseline->n_blocks, sizeof *baseline->masks);
    return baseline->masks == NULL ? -ENOMEM : 0;
}

static void choose_kept(const struct methods_baseline *baseline, const struct methods_choice *choice)
{
    memcpy(choice->masks, masks_of(baseline, choice->layer, choice->kv_head), choice->n_blocks * sizeof(uint64_t));
}

/* What is kept is K and V in f16. */
static double kept_bytes(const struct methods_baseline *baseline, const struct method *method)
{
    double n_kept = 0;
    for (size_t i = 0; i < (size_t)baseline->shape.n_layers * baseline->shape.n_kv_heads; i++)
        n_kept += (double)method->n_kept[i];
    return method->n_old == 0 ? 0 : n_kept / (double)method->n_old * baseline->shape.head_dim * 2 * 2;
}

/* ---- StreamingLLM ---- */

static void choose_none(const struct methods_baseline *baseline, const struct methods_choice *choice)
{
    (void)baseline;
    memset(choice->masks, 0, choice->n_blocks * sizeof(uint64_t));
}

/* ---- H2O ---- */

static float *sums_of(const struct methods_baseline *baseline, uint32_t layer, uint32_t kv_head)
{
    return baseline->sums + head_index(baseline, layer, kv_head) * baseline->n_blocks * BLOCK;
}

static void add_h2o(const struct watch *watch, uint32_t kv_head, uint32_t position, const float *weights)
{
    float *sums = sums_of(watch->baseline, watch->layer->layer, kv_head);
    for (uint32_t j = 0; j <= position; j++)
        sums[j] += H2O_EVERY * weights[j];
}

static int observe_h2o(struct methods_baseline *baseline, const struct pass_layer *layer, uint32_t n_prompt)
{
    struct watch watch = {.baseline = baseline, .layer = layer, .n_positions = n_prompt / H2O_EVERY, .add = add_h2o};
    const size_t n_heads = (size_t)baseline->shape.n_layers * baseline->shape.n_kv_heads;
    if (baseline->sums == NULL)
        baseline->sums = calloc(n_heads * baseline->n_blocks * BLOCK, sizeof *baseline->sums);
    uint32_t *positions = malloc((watch.n_positions + 1) * sizeof *positions);
    int error = baseline->sums == NULL || positions == NULL ? -ENOMEM : masks_init(baseline);
    for (uint32_t i = 0; error == 0 && i < watch.n_positions; i++)
        positions[i] = (i + 1) * H2O_EVERY - 1;
    watch.positions = positions;
    if (error == 0)
        error = run_watch(&watch);
    free(positions);
    return error;
}

static void turn_h2o(struct methods_baseline *baseline, const struct pass_tail_layer *layer, uint32_t own)
{
    const uint32_t n_blocks = exact_set_n_old_blocks(own * BLOCK, 0), n_tokens = baseline->n_blocks * BLOCK;
    const bool is_first = own * BLOCK == layer->first;
    for (uint32_t kv_head = 0; kv_head < baseline->shape.n_kv_heads; kv_head++) {
        float *sums = sums_of(baseline, layer->layer, kv_head);
        uint64_t *masks = masks_of(baseline, layer->layer, kv_head);
        for (uint32_t tile = 0; tile < METHODS_TILES && !is_first; tile++) {
            const float *gained = baseline->tail.gained + ((size_t)kv_head * METHODS_TILES + tile) * n_tokens;
            for (uint32_t j = 0; j < n_tokens; j++)
                sums[j] += gained[j];
        }
        for (uint32_t block = is_first || n_blocks == 0 ? 0 : n_blocks - 1; block < n_blocks; block++)
            masks[block] = exact_set_old_mask(block);
        keep_largest(masks, n_blocks, sums, share_of(baseline, exact_set_n_old_tokens(own * BLOCK, 0)),
                     baseline->tail.threads[0].scratch);
    }
}

/* ---- SnapKV ---- */

static void add_snapkv(const struct watch *watch, uint32_t kv_head, uint32_t position, const float *weights)
{
    float *sums = watch->sums + (size_t)kv_head * watch->baseline->n_blocks * BLOCK;
    for (uint32_t j = 0; j <= position; j++)
        sums[j] += weights[j];
}

/* The largest of [0, n) around each of the first n_tokens. */
static void pool_neighbours(const float *sums, uint32_t n, uint32_t n_tokens, float *pooled)
{
    for (uint32_t token = 0; token < n_tokens; token++) {
        pooled[token] = sums[token];
        for (uint32_t j = token < SNAPKV_NEIGHBOURS ? 0 : token - SNAPKV_NEIGHBOURS;
             j <= token + SNAPKV_NEIGHBOURS && j < n; j++)
            pooled[token] = sums[j] > pooled[token] ? sums[j] : pooled[token];
    }
}

static void choose_prompt(const struct watch *watch, uint32_t n_prompt, float *pooled, float *scratch)
{
    const struct methods_baseline *baseline = watch->baseline;
    const uint32_t n_blocks = exact_set_n_old_blocks(n_prompt, 0);
    const uint32_t n = share_of(baseline, exact_set_n_old_tokens(n_prompt, 0));
    for (uint32_t kv_head = 0; kv_head < baseline->shape.n_kv_heads; kv_head++) {
        uint64_t *masks = masks_of(baseline, watch->layer->layer, kv_head);
        pool_neighbours(watch->sums + (size_t)kv_head * baseline->n_blocks * BLOCK, n_prompt - SNAPKV_QUERIES,
                        n_blocks * BLOCK, pooled);
        for (uint32_t block = 0; block < baseline->n_blocks; block++)
            masks[block] = exact_set_old_mask(block);
        keep_largest(masks, n_blocks, pooled, n, scratch);
    }
}

static int observe_snapkv(struct methods_baseline *baseline, const struct pass_layer *layer, uint32_t n_prompt)
{
    const size_t n_tokens = (size_t)baseline->n_blocks * BLOCK, n_kv_heads = baseline->shape.n_kv_heads;
    uint32_t positions[SNAPKV_QUERIES];
    for (uint32_t i = 0; i < SNAPKV_QUERIES; i++) /* a prompt is whole blocks */
        positions[i] = n_prompt - SNAPKV_QUERIES + i;
    float *memory = calloc((n_kv_heads + 2) * n_tokens, sizeof *memory); /* sums, pooled, scratch */
    struct watch watch = {
        .baseline = baseline,
        .layer = layer,
        .positions = positions,
        .n_positions = SNAPKV_QUERIES,
        .add = add_snapkv,
        .sums = memory,
    };
    int error = memory == NULL ? -ENOMEM : masks_init(baseline);
    if (error == 0)
        error = run_watch(&watch);
    if (error == 0)
        choose_prompt(&watch, n_prompt, memory + n_kv_heads * n_tokens, memory + (n_kv_heads + 1) * n_tokens);
    free(memory);
    return error;
}

/* ---- FastGen, permanent ---- */

static void add_fastgen(const struct watch *watch, uint32_t kv_head, uint32_t position, const float *weights)
{
    fastgen_profile_add_row(watch->baseline->profile, watch->layer->layer, kv_head, position, weights);
}

static int observe_fastgen(struct methods_baseline *baseline, const struct pass_layer *layer, uint32_t n_prompt)
{
    uint32_t positions[FASTGEN_MAX_ROWS];
    struct watch watch = {.baseline = baseline, .layer = layer, .positions = positions, .add = add_fastgen};
    if (baseline->profile == NULL) {
        int error =
            fastgen_profile_new(baseline->tools.tokenizer, pass_ids(layer->pass), n_prompt, baseline->shape.n_layers,
                                baseline->shape.n_kv_heads, (float)baseline->number, &baseline->profile);
        if (error != 0)
            return error;
    }
    watch.n_positions = fastgen_sample(n_prompt, positions);
    return run_watch(&watch);
}

static int begin_fastgen(struct methods_baseline *baseline)
{
    fastgen_profile_finish(baseline->profile);
    return 0;
}

/* Local tokens never come back either: where they begin does not go back as the position grows. */
static void choose_fastgen(const struct methods_baseline *baseline, const struct methods_choice *choice)
{
    fastgen_profile_masks(baseline->profile, choice->layer, choice->kv_head, choice->ids, choice->position,
                          choice->n_blocks, choice->masks);
    for (uint32_t block = 0; block < choice->n_blocks; block++)
        choice->masks[block] &= exact_set_old_mask(block);
}

const struct methods_kind methods_evict_streaming = {
    .name = "streaming",
    .example = "streaming",
    .meaning = {"StreamingLLM: sinks and window alone"},
    .choose = choose_none,
    .device_bytes = kept_bytes,
};
const struct methods_kind methods_evict_h2o = {
    .name = "h2o",
    .example = "h2o=0.2",
    .number = "the share of old tokens that are kept",
    .meaning = {"H2O: the", "of old tokens that were attended to most stay, the others go for good"},
    .accumulates = true,
    .observe = observe_h2o,
    .turn = turn_h2o,
    .choose = choose_kept,
    .device_bytes = kept_bytes,
};
const struct methods_kind methods_evict_snapkv = {
    .name = "snapkv",
    .example = "snapkv=0.2",
    .number = "the share of the prompt's old tokens that are kept",
    .meaning = {"SnapKV: the", "of the prompt that its last 32 tokens attend to stay, the others go for good"},
    .observe = observe_snapkv,
    .choose = choose_kept,
    .device_bytes = kept_bytes,
};
const struct methods_kind methods_evict_fastgen = {
    .name = "fastgen-permanent",
    .example = "fastgen-permanent=0.98",
    .number = "the recovery",
    .meaning = {"FastGen as published, recovery", "of the mass; what a head's class lacks is dropped"},
    .observe = observe_fastgen,
    .begin = begin_fastgen,
    .choose = choose_fastgen,
    .device_bytes = kept_bytes,
};
