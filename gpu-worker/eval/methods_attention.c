/*
 * methods_attention.c - the attention that all baselines share: a tile of positions of one KV head over the blocks that any of
 * them reads, in f32.
 *
 * Scores and outputs are both products of small matrices (keys lie with tokens side by side, values with dimensions), computed
 * in four lanes that every processor has; sums are in the order of dimensions and of tokens, so bits do not depend on threads.
 * Softmax is that of a selection (policy/passes.h).
 *
 * Owner      methods_private.h. Threads: items of the pool, each with its own struct methods_thread.
 */
#include <assert.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/pool.h"
#include "gpu-worker/eval/methods_private.h"
#include "gpu-worker/fastgen/fastgen_weights.h"
#include "gpu-worker/policy/passes.h"

#define BLOCK LAYOUT_BLOCK_TOKENS
static_assert(PASSES_BLOCK_TOKENS == BLOCK, "passes go over whole blocks");

struct run {
    struct methods_baseline *baseline;
    const struct pass_tail_layer *layer;
    uint32_t own;          /* tiles: the block at hand */
    uint32_t first, end;   /* rows: blocks to be decoded */
    uint32_t n_old_blocks; /* of all blocks: those that are old now */
};

static const struct passes *passes_for(const struct kernels *kernels)
{
#if defined(__x86_64__)
    if (kernels->isa == KERNELS_ISA_AVX512)
        return &passes_avx512;
    if (kernels->isa == KERNELS_ISA_AVX2)
        return &passes_avx2;
#else
    (void)kernels;
#endif
    return &passes_plain;
}

/* ---- products ---- */

typedef float lanes __attribute__((vector_size(16)));
enum { N_LANES = 4, N_VECTORS = 4, N_COLUMNS = N_LANES * N_VECTORS };

static inline lanes load(const float *from)
{
    lanes v;
    memcpy(&v, from, sizeof v);
    return v;
}

static inline void store(float *to, lanes v)
{
    memcpy(to, &v, sizeof v);
}

/* c += a b, a of two rows, b and c of 16 columns. */
static inline void multiply_tile(const float *a, size_t a_stride, const float *b, size_t b_stride, uint32_t n, float *c,
                                 size_t c_stride)
{
    lanes upper[N_VECTORS], lower[N_VECTORS];
    for (uint32_t v = 0; v < N_VECTORS; v++) {
        upper[v] = load(c + N_LANES * v);
        lower[v] = load(c + c_stride + N_LANES * v);
    }
    for (uint32_t i = 0; i < n; i++) {
        const float of_upper = a[i], of_lower = a[a_stride + i];
        for (uint32_t v = 0; v < N_VECTORS; v++) {
            const lanes column = load(b + i * b_stride + N_LANES * v);
            upper[v] += column * of_upper;
            lower[v] += column * of_lower;
        }
    }
    for (uint32_t v = 0; v < N_VECTORS; v++) {
        store(c + N_LANES * v, upper[v]);
        store(c + c_stride + N_LANES * v, lower[v]);
    }
}

/* c [n_rows][n_columns] += a [n_rows][n] b [n][n_columns]; n_rows is even. */
static void multiply(const float *a, size_t a_stride, const float *b, size_t b_stride, uint32_t n_rows, uint32_t n,
                     uint32_t n_columns, float *c, size_t c_stride)
{
    const uint32_t n_whole = n_columns / N_COLUMNS * N_COLUMNS;
    for (uint32_t row = 0; row < n_rows; row += 2)
        for (uint32_t column = 0; column < n_whole; column += N_COLUMNS)
            multiply_tile(a + row * a_stride, a_stride, b + column, b_stride, n, c + row * c_stride + column, c_stride);
    for (uint32_t row = 0; row < n_rows && n_whole < n_columns; row++)
        for (uint32_t i = 0; i < n; i++)
            for (uint32_t column = n_whole; column < n_columns; column++)
                c[row * c_stride + column] += a[row * a_stride + i] * b[i * b_stride + column];
}

/* ---- rows ---- */

static void decode_values(const struct methods_baseline *baseline, const uint8_t *rows, float *values)
{
    const struct kernels *kernels = baseline->tools.kernels;
    const uint32_t d = baseline->shape.head_dim, n_groups = (d + LAYOUT_Q8_GROUP - 1) / LAYOUT_Q8_GROUP;
    for (uint32_t j = 0; j < BLOCK; j++, rows += baseline->row_bytes, values += d) {
        uint16_t halves[KERNELS_MAX_HEAD_DIM];
        if (baseline->shape.codec == ROW_CODEC_F16) {
            memcpy(halves, rows + d * sizeof(uint16_t), d * sizeof(uint16_t));
            kernels->f16_decode(halves, d, values);
            continue;
        }
        float scales[KERNELS_MAX_HEAD_DIM / LAYOUT_Q8_GROUP];
        memcpy(halves, rows + 2 * d + n_groups * sizeof(uint16_t), n_groups * sizeof(uint16_t));
        kernels->f16_decode(halves, n_groups, scales);
        for (uint32_t i = 0; i < d; i++)
            values[i] = (float)(int8_t)rows[d + i] * scales[i / LAYOUT_Q8_GROUP];
    }
}

static void put_block(void *context, uint32_t item, uint32_t thread_index)
{
    const struct run *run = context;
    const struct methods_baseline *baseline = run->baseline;
    const uint32_t n = run->end - run->first, kv_head = item / n, block = run->first + item % n;
    const uint32_t d = baseline->shape.head_dim;
    const size_t at = ((size_t)kv_head * baseline->n_blocks + block) * BLOCK * d;
    float *keys = baseline->tail.threads[thread_index].keys;
    const uint8_t *rows = pass_tail_block(run->layer, kv_head, block);
    baseline->tools.kernels->decode_keys(rows, BLOCK, d, (enum kernels_rows)baseline->shape.codec, keys);
    decode_values(baseline, rows, baseline->tail.values + at);
    if (block < run->n_old_blocks && baseline->kind->round != NULL)
        baseline->kind->round(baseline, block == 0 ? LAYOUT_N_SINKS : 0, keys, baseline->tail.values + at);
    for (uint32_t j = 0; j < BLOCK; j++)
        for (uint32_t i = 0; i < d; i++)
            baseline->tail.keys[at + (size_t)i * BLOCK + j] = keys[(size_t)j * d + i];
}

static void put_blocks(struct run *run, uint32_t first, uint32_t end)
{
    run->first = first;
    run->end = end;
    if (first < end)
        pool_run(run->baseline->tools.pool, (end - first) * run->baseline->shape.n_kv_heads, put_block, run);
}

/* ---- tiles ---- */

/* What position first + i reads; returns how many of it are old. */
static uint32_t choose(const struct run *run, uint32_t kv_head, uint32_t i, struct methods_thread *thread,
                       uint64_t *masks)
{
    const struct methods_baseline *baseline = run->baseline;
    const uint32_t d = baseline->shape.head_dim, position = run->layer->first + i;
    const struct methods_choice choice = {
        .layer = run->layer->layer,
        .kv_head = kv_head,
        .position = position,
        .n_blocks = exact_set_n_old_blocks(position, 0),
        .ids = pass_ids(run->layer->pass),
        .q = run->layer->q + ((size_t)i * baseline->n_heads + (size_t)kv_head * baseline->group) * d,
        .scratch = thread->scratch,
        .masks = masks,
    };
    uint32_t n = 0;
    if (choice.n_blocks > 0) {
        baseline->kind->choose(baseline, &choice);
        for (uint32_t block = 0; block < choice.n_blocks; block++)
            n += (uint32_t)__builtin_popcountll(masks[block]);
        masks[0] |= ~exact_set_old_mask(0);
    }
    for (uint32_t block = choice.n_blocks; block <= run->own; block++)
        masks[block] = ~(uint64_t)0;
    masks[run->own] >>= BLOCK - 1 - position % BLOCK;
    return n;
}

/* thread->used; returns how many blocks anybody reads. */
static uint32_t find_used(const struct run *run, struct methods_thread *thread)
{
    uint32_t n = 0;
    for (uint32_t block = 0; block <= run->own; block++) {
        uint64_t any = 0;
        for (uint32_t i = 0; i < METHODS_TILE; i++)
            any |= thread->masks[(size_t)i * run->baseline->n_blocks + block];
        if (any != 0)
            thread->used[n++] = block;
    }
    return n;
}

static void score(const struct methods_baseline *baseline, uint32_t kv_head, uint32_t n_used, size_t stride,
                  struct methods_thread *thread)
{
    const uint32_t d = baseline->shape.head_dim, n_queries = METHODS_TILE * baseline->group;
    for (uint32_t row = 0; row < n_queries; row++)
        memset(thread->scores + row * stride, 0, stride * sizeof(float));
    for (uint32_t u = 0; u < n_used; u++) {
        const float *keys = baseline->tail.keys + ((size_t)kv_head * baseline->n_blocks + thread->used[u]) * BLOCK * d;
        multiply(thread->q, d, keys, BLOCK, n_queries, d, BLOCK, thread->scores + u * BLOCK, stride);
    }
    for (uint32_t row = 0; row < n_queries; row++) {
        const uint64_t *masks = thread->masks + (size_t)(row / baseline->group) * baseline->n_blocks;
        float *scores = thread->scores + row * stride;
        for (uint32_t u = 0; u < n_used; u++)
            for (uint64_t rest = ~masks[thread->used[u]]; rest != 0; rest &= rest - 1)
                scores[u * BLOCK + (uint32_t)__builtin_ctzll(rest)] = -INFINITY;
    }
}

/* Scores to weights. */
static void soften(const struct methods_baseline *baseline, uint32_t n_used, size_t stride, float *scores)
{
    const struct passes *passes = passes_for(baseline->tools.kernels);
    for (uint32_t row = 0; row < METHODS_TILE * baseline->group; row++, scores += stride) {
        const float sum = passes->exponentials(scores, n_used, passes->largest(scores, n_used));
        const float factor = sum > 0 ? 1.0f / sum : 0;
        for (size_t j = 0; j < stride; j++)
            scores[j] *= factor;
    }
}

static void accumulate(const struct methods_baseline *baseline, const struct methods_thread *thread, uint32_t n_used,
                       size_t stride, float *gained)
{
    const float factor = 1.0f / (float)baseline->group;
    memset(gained, 0, (size_t)baseline->n_blocks * BLOCK * sizeof(float));
    for (uint32_t row = 0; row < METHODS_TILE * baseline->group; row++)
        for (uint32_t u = 0; u < n_used; u++)
            for (uint32_t j = 0; j < BLOCK; j++)
                gained[thread->used[u] * BLOCK + j] += factor * thread->scores[row * stride + u * BLOCK + j];
}

static void attend_tile(void *context, uint32_t item, uint32_t thread_index)
{
    const struct run *run = context;
    struct methods_baseline *baseline = run->baseline;
    struct methods_tail *tail = &baseline->tail;
    struct methods_thread *thread = &tail->threads[thread_index];
    const struct pass_tail_layer *layer = run->layer;
    const uint32_t d = baseline->shape.head_dim, group = baseline->group, kv_head = item / METHODS_TILES;
    const uint32_t first = run->own * BLOCK + item % METHODS_TILES * METHODS_TILE - layer->first;
    const float scale = pass_scale(layer->pass);
    for (uint32_t i = 0; i < METHODS_TILE; i++) {
        const float *q = layer->q + ((size_t)(first + i) * baseline->n_heads + (size_t)kv_head * group) * d;
        for (uint32_t j = 0; j < group * d; j++)
            thread->q[(size_t)i * group * d + j] = q[j] * scale;
        tail->n_read[(size_t)kv_head * layer->n + first + i] =
            choose(run, kv_head, first + i, thread, thread->masks + (size_t)i * baseline->n_blocks);
    }
    const uint32_t n_used = find_used(run, thread);
    const size_t stride = (size_t)n_used * BLOCK;
    score(baseline, kv_head, n_used, stride, thread);
    soften(baseline, n_used, stride, thread->scores);
    if (baseline->kind->accumulates)
        accumulate(baseline, thread, n_used, stride, tail->gained + (size_t)item * baseline->n_blocks * BLOCK);
    memset(thread->out, 0, (size_t)METHODS_TILE * group * d * sizeof(float));
    for (uint32_t u = 0; u < n_used; u++)
        multiply(thread->scores + u * BLOCK, stride,
                 tail->values + ((size_t)kv_head * baseline->n_blocks + thread->used[u]) * BLOCK * d, d,
                 METHODS_TILE * group, BLOCK, d, thread->out, d);
    for (uint32_t i = 0; i < METHODS_TILE; i++) {
        const float *out = thread->out + (size_t)i * group * d;
        memcpy(layer->out + ((size_t)(first + i) * baseline->n_heads + (size_t)kv_head * group) * d, out,
               (size_t)group * d * sizeof(float));
        if (baseline->looks && (first + i) % METHODS_LOOK_EVERY == METHODS_LOOK_EVERY - 1)
            methods_looks_run(
                baseline, layer, kv_head, first + i, thread->masks + (size_t)i * baseline->n_blocks, out, thread,
                &tail->looked[(size_t)kv_head * (layer->n / METHODS_LOOK_EVERY) + (first + i) / METHODS_LOOK_EVERY]);
    }
}

void methods_attention_run(struct methods_baseline *baseline, const struct pass_tail_layer *layer)
{
    const uint32_t first = layer->first / BLOCK, end = first + layer->n / BLOCK;
    struct run run = {.baseline = baseline, .layer = layer};
    for (run.own = first; run.own < end; run.own++) {
        const uint32_t n_before = run.n_old_blocks;
        run.n_old_blocks = exact_set_n_old_blocks(run.own * BLOCK, 0);
        if (run.own == first)
            put_blocks(&run, 0, end);
        else if (baseline->kind->round != NULL) /* what has become old is as its format has it from now on */
            put_blocks(&run, n_before, run.n_old_blocks);
        if (baseline->kind->turn != NULL)
            baseline->kind->turn(baseline, layer, run.own);
        pool_run(baseline->tools.pool, METHODS_TILES * baseline->shape.n_kv_heads, attend_tile, &run);
    }
}

/* ---- memory ---- */

static void *aligned(size_t n_bytes)
{
    return aligned_alloc(64, (n_bytes + 63) / 64 * 64);
}

static bool thread_init(const struct methods_baseline *baseline, struct methods_thread *thread)
{
    const size_t group = baseline->group, d = baseline->shape.head_dim, queries = METHODS_TILE * group;
    const size_t n_tokens = (size_t)baseline->n_blocks * BLOCK;
    thread->q = aligned(queries * d * sizeof(float));
    thread->scores = aligned(queries * n_tokens * sizeof(float));
    thread->out = aligned(queries * d * sizeof(float));
    thread->keys = aligned(BLOCK * d * sizeof(float));
    thread->scratch = aligned(2 * n_tokens * sizeof(float));
    thread->masks = aligned((size_t)METHODS_TILE * baseline->n_blocks * sizeof(uint64_t));
    thread->used = aligned(baseline->n_blocks * sizeof(uint32_t));
    thread->weights = aligned(n_tokens * sizeof(float));
    thread->exact = aligned(group * d * sizeof(float));
    if (baseline->looks)
        thread->look_scratch =
            aligned(fastgen_weights_scratch_bytes(1, baseline->n_blocks * BLOCK - 1, baseline->group, (uint32_t)d));
    return thread->q != NULL && thread->scores != NULL && thread->out != NULL && thread->keys != NULL &&
           thread->scratch != NULL && thread->masks != NULL && thread->used != NULL && thread->weights != NULL &&
           thread->exact != NULL && (!baseline->looks || thread->look_scratch != NULL);
}

int methods_attention_init(struct methods_baseline *baseline, uint32_t n)
{
    struct methods_tail *tail = &baseline->tail;
    const size_t n_kv_heads = baseline->shape.n_kv_heads, n_tokens = (size_t)baseline->n_blocks * BLOCK;
    const size_t n_floats = n_kv_heads * n_tokens * baseline->shape.head_dim;
    tail->n_threads = pool_n_threads(baseline->tools.pool);
    tail->threads = calloc(tail->n_threads, sizeof *tail->threads);
    tail->keys = aligned(n_floats * sizeof(float));
    tail->values = aligned(n_floats * sizeof(float));
    tail->n_read = calloc(n_kv_heads * n, sizeof *tail->n_read);
    tail->looked = calloc(n_kv_heads * (n / METHODS_LOOK_EVERY), sizeof *tail->looked);
    if (baseline->kind->accumulates)
        tail->gained = aligned(n_kv_heads * METHODS_TILES * n_tokens * sizeof(float));
    if (tail->threads == NULL || tail->keys == NULL || tail->values == NULL || tail->n_read == NULL ||
        tail->looked == NULL || (baseline->kind->accumulates && tail->gained == NULL))
        return -ENOMEM;
    for (uint32_t i = 0; i < tail->n_threads; i++)
        if (!thread_init(baseline, &tail->threads[i]))
            return -ENOMEM;
    return 0;
}

static void thread_fini(struct methods_thread *thread)
{
    free(thread->q);
    free(thread->scores);
    free(thread->out);
    free(thread->keys);
    free(thread->scratch);
    free(thread->masks);
    free(thread->used);
    free(thread->weights);
    free(thread->exact);
    free(thread->look_scratch);
}

void methods_attention_fini(struct methods_baseline *baseline)
{
    struct methods_tail *tail = &baseline->tail;
    for (uint32_t i = 0; tail->threads != NULL && i < tail->n_threads; i++)
        thread_fini(&tail->threads[i]);
    free(tail->threads);
    free(tail->keys);
    free(tail->values);
    free(tail->n_read);
    free(tail->looked);
    free(tail->gained);
    *tail = (struct methods_tail){0};
}
