/*
 * selection.c - scores, softmax and the search for a threshold; the loops are in passes_loops.h. See selection.h.
 *
 * Scratch: [exponentials, first the scores][w][largest w of each block][values of three thresholds][the same of the exact set]
 * [query]. For selector mass the exact set's tokens follow the old ones in w, in blocks of their own.
 *
 * The search: what a threshold leaves unread - mass, deviation or squares - never falls when the threshold rises. For the
 * deviation of a block, D = 2 x sum of (mean - w) over the w below the mean: one more unselected token is at least as large as all
 * that are unselected already, so the mean can only rise, and no term of the sum falls. To the squares about the mean, of n
 * unselected tokens, one more token x adds n / (n + 1) x (x - mean)^2. Hence bisection finds what trying every threshold would. It
 * begins with high thresholds, where most blocks have no token above and their value is known.
 */
#include "gpu-worker/policy/selection.h"

#include <assert.h>
#include <float.h>
#include <math.h>
#include <string.h>

#include "gpu-worker/policy/exact_set.h"
#include "gpu-worker/policy/passes.h"

#define BLOCK            LAYOUT_BLOCK_TOKENS
#define MAX_EXACT_BLOCKS (SELECTION_MAX_EXACT / BLOCK)
#define STEPS            (SELECTION_GRID_PER_OCTAVE * SELECTION_GRID_OCTAVES)
#define FIRST_STEP       31 /* four octaves; the search goes on to 8, 16 and 32 */

static_assert(BLOCK == PASSES_BLOCK_TOKENS, "passes.h counts blocks as layout.h does");
static_assert(SELECTION_MAX_EXACT % BLOCK == 0, "the exact set is padded to blocks");
static_assert(SELECTION_MAX_EXACT >= LAYOUT_N_SINKS + EXACT_SET_WINDOW_BLOCKS * BLOCK, "sinks and window fit");

struct scratch {
    size_t stride;        /* of exponentials; not a power of two, so that heads do not fall into the same cache sets */
    float *exponentials;  /* [group][stride] */
    float *w, *block_max; /* [n_blocks + MAX_EXACT_BLOCKS][BLOCK], [n_blocks + MAX_EXACT_BLOCKS] */
    uint32_t *blocks;     /* [n_blocks + MAX_EXACT_BLOCKS + 3] */
    float *values[3];     /* [n_blocks + MAX_EXACT_BLOCKS], rounded up to PASSES_LANES */
    float *exact_exponentials; /* [group][SELECTION_MAX_EXACT] */
    void *query;
    size_t query_bytes;
};

/* Room for n_bytes at a multiple of 64. */
static void *take(uint8_t *memory, size_t *n_bytes_taken, size_t n_bytes)
{
    void *at = memory == NULL ? NULL : memory + *n_bytes_taken;
    *n_bytes_taken += (n_bytes + 63) / 64 * 64;
    return at;
}

static size_t largest_query_bytes(const struct key_quantizer *quantizer, uint32_t group)
{
    size_t most = 0;
    for (size_t i = 0; i < (size_t)quantizer->n_layers * quantizer->n_kv_heads; i++) {
        size_t n_bytes = quantizer->codec->query_bytes(&quantizer->heads[i], group);
        most = n_bytes > most ? n_bytes : most;
    }
    return most;
}

static size_t divide(uint32_t group, uint32_t n_blocks, size_t query_bytes, void *memory, struct scratch *ret_scratch)
{
    const size_t n_all = (size_t)n_blocks + MAX_EXACT_BLOCKS,
                 n_values = (n_all + PASSES_LANES - 1) / PASSES_LANES * PASSES_LANES;
    size_t n = 0;
    struct scratch s = {.stride = (size_t)n_blocks * BLOCK + PASSES_LANES, .query_bytes = query_bytes};
    s.exponentials = take(memory, &n, group * s.stride * sizeof(float));
    s.w = take(memory, &n, n_all * BLOCK * sizeof(float));
    s.block_max = take(memory, &n, n_all * sizeof(float));
    s.blocks = take(memory, &n, (n_all + 3) * sizeof(uint32_t));
    for (int i = 0; i < 3; i++)
        s.values[i] = take(memory, &n, n_values * sizeof(float));
    s.exact_exponentials = take(memory, &n, (size_t)group * SELECTION_MAX_EXACT * sizeof(float));
    s.query = take(memory, &n, query_bytes);
    *ret_scratch = s;
    return n;
}

size_t selection_scratch_bytes(const struct key_quantizer *quantizer, uint32_t group, uint32_t n_blocks)
{
    struct scratch scratch;
    return divide(group, n_blocks, largest_query_bytes(quantizer, group), NULL, &scratch);
}

/* All tables give the same bits, so one for another machine (as tests have) may be served by what this machine has. */
static const struct passes *passes_for(const struct kernels *kernels)
{
#if defined(__x86_64__)
    if (kernels->isa == KERNELS_ISA_AVX512 && kernels_get(KERNELS_ISA_AVX512) != NULL)
        return &passes_avx512;
    if (kernels->isa != KERNELS_ISA_PLAIN && kernels_get(KERNELS_ISA_AVX2) != NULL)
        return &passes_avx2;
#endif
    (void)kernels;
    return &passes_plain;
}

static void select_full(struct selection_item *item)
{
    item->n_kept = 0;
    for (uint32_t block = 0; block < item->n_blocks; block++) {
        item->masks[block] = exact_set_old_mask(block);
        item->n_kept += (uint32_t)__builtin_popcountll(item->masks[block]);
    }
}

static const struct key_head *head_of(const struct selection_item *item)
{
    return key_quantizer_head(key_cache_quantizer(item->keys), item->layer, item->kv_head);
}

/* Scores of all old blocks, -infinity for the sinks; largest [group]. */
static void score(const struct kernels *kernels, const struct passes *passes, const struct selection_item *item,
                  struct scratch *scratch, float *largest)
{
    const struct key_codec *codec = key_cache_quantizer(item->keys)->codec;
    const struct key_head *keys = head_of(item);
    codec->prepare(kernels, keys, item->q, item->group, item->scale, scratch->query);
    for (uint32_t head = 0; head < item->group; head++)
        largest[head] = -INFINITY;
    for (uint32_t first = 0, n; first < item->n_blocks; first += n) {
        const void *tiles;
        const float *sides;
        n = key_cache_run(item->keys, item->layer, item->kv_head, first, &tiles, &sides);
        n = n < item->n_blocks - first ? n : item->n_blocks - first;
        float *scores = scratch->exponentials + (size_t)first * BLOCK;
        codec->score(kernels, keys, scratch->query, item->group, tiles, sides, n, scores, scratch->stride);
        for (uint32_t head = 0; head < item->group; head++) {
            float *of_head = scores + head * scratch->stride;
            for (uint32_t token = 0; first == 0 && token < BLOCK; token++)
                if ((exact_set_old_mask(0) >> token & 1) == 0)
                    of_head[token] = -INFINITY;
            largest[head] = fmaxf(largest[head], passes->largest(of_head, n));
        }
    }
}

/* Scores so large that they are infinite weigh as the largest number there is. */
static void limit(float *scores, size_t n)
{
    for (size_t i = 0; i < n; i++)
        scores[i] = scores[i] > FLT_MAX ? FLT_MAX : scores[i];
}

/* Scores to exponentials; the exact set's, too, for selector mass. Sets the references. factors [group]: 1 / (Z_h divisor). */
static void softmax(const struct passes *passes, const struct selection_item *item, uint32_t n_exact_blocks,
                    float divisor, struct scratch *scratch, float *largest, float *factors)
{
    const size_t n = (size_t)item->n_blocks * BLOCK, n_exact = (size_t)n_exact_blocks * BLOCK;
    for (uint32_t head = 0; head < item->group; head++) {
        const float *partial = item->exact + (size_t)head * KERNELS_PARTIAL_FLOATS(item->head_dim);
        float *old = scratch->exponentials + head * scratch->stride;
        float *exact = scratch->exact_exponentials + (size_t)head * SELECTION_MAX_EXACT;
        float reference = fminf(fmaxf(largest[head], partial[0]), FLT_MAX);
        for (uint32_t i = 0; i < n_exact; i++)
            exact[i] =
                i < item->n_exact ? fminf(item->exact_scores[head * item->exact_stride + i], reference) : -INFINITY;
        if (largest[head] > FLT_MAX)
            limit(old, n);
        float total = 0;
        if (reference > -INFINITY) {
            total = passes->exponentials(old, item->n_blocks, reference);
            passes->exponentials(exact, n_exact_blocks, reference);
            float of_exact = partial[1] * expf(fminf(partial[0], FLT_MAX) - reference);
            total += of_exact > 0 ? of_exact : 0; /* an empty partial gives NaN */
        } else {                                  /* no token of this head has a weight */
            memset(old, 0, n * sizeof(float));
            memset(exact, 0, n_exact * sizeof(float));
        }
        factors[head] = total > 0 ? 1.0f / (total * divisor) : 0;
        if (item->references != NULL)
            item->references[head] = reference;
    }
}

/* Of step -1 (just above every old weight) to STEPS, then of all tokens with a weight. Normal numbers, so that no mode flushes them. */
static float threshold_of(float top, int step)
{
    static_assert(SELECTION_GRID_PER_OCTAVE == 8, "one fraction for each step of an octave");
    static const float fractions[SELECTION_GRID_PER_OCTAVE] = {1.0f,         0.917004043f, 0.840896415f, 0.771105413f,
                                                               0.707106781f, 0.648419777f, 0.594603558f, 0.545253866f};
    if (step < 0)
        return nextafterf(top, INFINITY);
    if (step > (int)STEPS)
        return FLT_MIN;
    float octave = ldexpf(1.0f, -(step / (int)SELECTION_GRID_PER_OCTAVE));
    return fmaxf(top * fractions[step % (int)SELECTION_GRID_PER_OCTAVE] * octave, FLT_MIN);
}

/* log2 of a number that is not negative, linear inside an octave. */
static float log2_roughly(float value)
{
    uint32_t word;
    memcpy(&word, &value, sizeof word);
    return (float)word * 0x1p-23f;
}

/* The end of the bracket that a search holds: what is unread at that step. */
struct end {
    int step;
    float unread;
    float *values;
};

/* Where the unread is expected to fall below the bound, as a straight line in logarithms; inside the bracket. */
static int interpolate(const struct end *failed, const struct end *enough, float bound)
{
    float fall = log2_roughly(failed->unread) - log2_roughly(enough->unread);
    float part = fall > 0 ? (log2_roughly(failed->unread) - log2_roughly(bound)) / fall : 0;
    int step = failed->step + (int)ceilf(fminf(fmaxf(part, 0), 1) * (float)(enough->step - failed->step));
    if (step <= failed->step)
        return failed->step + 1;
    return step >= enough->step ? enough->step - 1 : step;
}

/* The highest threshold of the grid that satisfies the selector. */
static float find_threshold(const struct passes *passes, const struct selection_item *item, uint32_t n_exact_blocks,
                            struct scratch *scratch, float top)
{
    const bool by_mass = item->policy->terms.selector == POLICY_SELECTOR_MASS,
               by_squares = item->policy->terms.selector == POLICY_SELECTOR_L2;
    float (*try)(const struct passes_trial *trial, float *values) = by_mass      ? passes->mass
                                                                    : by_squares ? passes->squares
                                                                                 : passes->deviation;
    struct passes_trial trial = {.w = scratch->w,
                                 .block_max = scratch->block_max,
                                 .n_blocks = item->n_blocks + n_exact_blocks,
                                 .blocks = scratch->blocks};
    struct end failed = {-1, 0, scratch->values[0]}, enough = {(int)STEPS + 1, 0, scratch->values[1]};
    struct end tried = {0, 0, scratch->values[2]};
    for (int i = 0; i < 3; i++)
        for (uint32_t block = trial.n_blocks; block % PASSES_LANES != 0; block++)
            scratch->values[i][block] = 0;

    float all = 0, bound = item->policy->terms.parameter;
    if (by_squares) { /* may be infinite: more than there can be */
        bound *= PASSES_BEFORE_SQUARE;
        bound *= bound;
    }
    if (by_mass) {
        trial.threshold = threshold_of(top, enough.step);
        all = try(&trial, enough.values);
        bound *= all;
    } else { /* nothing that weighs is left unread */
        memset(enough.values, 0, trial.n_blocks * sizeof(float));
    }
    trial.threshold = threshold_of(top, failed.step);
    float reached = try(&trial, failed.values);
    if (by_mass ? reached >= bound : reached <= bound)
        return trial.threshold;
    failed.unread = by_mass ? all - reached : reached;

    for (int n = 0, next = FIRST_STEP; enough.step - failed.step > 1; next = 2 * next + 1) {
        if (enough.step > (int)STEPS && next < enough.step)
            tried.step = next;
        else if (n++ % 4 == 3) /* a search that always interpolates may creep */
            tried.step = failed.step + (enough.step - failed.step) / 2;
        else
            tried.step = interpolate(&failed, &enough, by_mass ? all - bound : bound);
        trial.threshold = threshold_of(top, tried.step);
        trial.above = failed.values;
        trial.below = enough.values;
        reached = try(&trial, tried.values);
        tried.unread = by_mass ? fmaxf(all - reached, 0) : reached;
        struct end *end = (by_mass ? reached >= bound : reached <= bound) ? &enough : &failed;
        struct end replaced = *end;
        *end = tried;
        tried = replaced;
    }
    return threshold_of(top, enough.step);
}

/* The selected exponentials, in order. */
static void gather_weights(const struct selection_item *item, const struct scratch *scratch)
{
    assert(item->n_kept <= item->weights_stride);
    for (uint32_t head = 0; head < item->group; head++) {
        const float *from = scratch->exponentials + head * scratch->stride;
        float *to = item->weights + head * item->weights_stride;
        for (uint32_t block = 0; block < item->n_blocks; block++, from += BLOCK)
            for (uint64_t rest = item->masks[block]; rest != 0; rest &= rest - 1)
                *to++ = from[__builtin_ctzll(rest)];
    }
}

void selection_run(const struct kernels *kernels, struct selection_item *item, void *scratch_memory)
{
    if (item->policy->terms.selector == POLICY_SELECTOR_FULL) {
        select_full(item);
        return;
    }
    const bool by_mass = item->policy->terms.selector == POLICY_SELECTOR_MASS,
               by_squares = item->policy->terms.selector == POLICY_SELECTOR_L2;
    const size_t query_bytes = key_cache_quantizer(item->keys)->codec->query_bytes(head_of(item), item->group);
    const uint32_t n_exact_blocks = by_mass ? (item->n_exact + BLOCK - 1) / BLOCK : 0;
    assert(item->n_blocks > 0 && item->group > 0 && item->group <= KEY_CODEC_MAX_QUERIES);
    assert(!by_mass || item->n_exact <= SELECTION_MAX_EXACT);

    const struct passes *passes = passes_for(kernels);
    struct scratch scratch;
    float largest[KEY_CODEC_MAX_QUERIES], factors[KEY_CODEC_MAX_QUERIES];
    divide(item->group, item->n_blocks, query_bytes, scratch_memory, &scratch);
    score(kernels, passes, item, &scratch, largest);
    softmax(passes, item, n_exact_blocks, by_squares ? sqrtf((float)item->group) : (float)item->group, &scratch,
            largest, factors);
    float top = (by_squares ? passes->root : passes->average)(
        scratch.exponentials, scratch.stride, factors, item->group, item->n_blocks, scratch.w, scratch.block_max);
    if (n_exact_blocks > 0)
        passes->average(scratch.exact_exponentials, SELECTION_MAX_EXACT, factors, item->group, n_exact_blocks,
                        scratch.w + (size_t)item->n_blocks * BLOCK, scratch.block_max + item->n_blocks);
    if (!by_mass) /* sinks are above every threshold: no part of any sum over the unselected */
        for (uint32_t token = 0; token < BLOCK; token++)
            if ((exact_set_old_mask(0) >> token & 1) == 0)
                scratch.w[token] = INFINITY;
    float threshold = top > 0 ? find_threshold(passes, item, n_exact_blocks, &scratch, top) : FLT_MIN;
    item->n_kept =
        passes->finish(scratch.w, item->n_blocks, threshold, exact_set_old_mask(0), scratch.exponentials,
                       scratch.stride, item->group, item->masks, item->policy->terms.tail ? item->masses : NULL);
    if (item->weights != NULL)
        gather_weights(item, &scratch);
}
