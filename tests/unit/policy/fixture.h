/*
 * fixture.h - cases for selection_run(): scores of old tokens and of the exact set as a test wants them.
 *
 * The codec under it keeps scores in place of keys, plain f32, so that a test says what is scored; everything else - the key
 * cache, runs of tiles, strides - is what a worker uses.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "gpu-worker/policy/selection.h"

#define FIXTURE_HEAD_DIM  8u /* and the largest group */
#define FIXTURE_MAX_EXACT 132u

enum fixture_scores {
    SCORES_NORMAL,
    SCORES_PEAKED, /* many octaves, different from block to block */
    SCORES_EQUAL,
    SCORES_DOMINANT, /* one token has nearly everything */
    SCORES_TIES,     /* four different scores */
    SCORES_WIDE,     /* most weights underflow, or are denormal if nobody prevents it */
    SCORES_HUGE,     /* up to 1e30 */
    SCORES_HOLES,    /* many NaN and -infinity */
    SCORES_EXACT,    /* the exact set has nearly everything */
    SCORES_LAST,     /* nothing but the last token has a weight */
    SCORES_N
};

struct fixture {
    uint32_t group, n_blocks, n_exact;
    float *scores;       /* [group][n_blocks * 64], sinks included */
    float *exact_scores; /* [group][FIXTURE_MAX_EXACT] */
    float *exact;        /* [group][2 + FIXTURE_HEAD_DIM] */
    float *q;
    struct key_cache *keys;
    /* results, filled with rubbish before every run */
    uint64_t *masks;
    float *masses, *references, *weights;
    void *scratch;
    struct policy policy;
    struct selection_item item;
};

/* Of the codec above; one for all. */
const struct key_quantizer *fixture_quantizer(void);
/* Scores of a kind; the same for the same arguments. */
void fixture_init(struct fixture *fixture, enum fixture_scores kind, uint32_t group, uint32_t n_blocks, uint32_t seed);
/* After a test changed scores: partials and key cache of the exact set and old tokens. */
void fixture_update(struct fixture *fixture);
void fixture_fini(struct fixture *fixture);

/* Runs a selection; weights are asked for, too. */
void fixture_run(struct fixture *fixture, const struct kernels *kernels, enum policy_selector selector, float parameter,
                 bool tail);

/* Tables of this machine, plain first; NULL after the last. */
const struct kernels *const *fixture_tables(void);

/* Random numbers of the tests: 0 <= x < 1, and normal. */
double fixture_random(uint64_t *state);
double fixture_normal(uint64_t *state);
