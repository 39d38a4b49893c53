/*
 * selection.h - which old tokens a decode step reads exactly, for one query and KV head: scores on the quantized keys,
 * softmax over old tokens and exact set together, threshold, masks, and the masses of what is not selected.
 *
 * 1. s_hj = scale * q_h . k^_j for old tokens; the exact set's partials are given.
 * 2. w_hj = exp(s_hj - M_h) / Z_h with M_h the largest score of query head h over old tokens and exact set, Z_h the sum over
 *    both; w_j = mean of w_hj over the group's query heads; for l2 their root mean square.
 * 3. mass (HCAttention, section on dynamic selection; Twilight's top-p): the smallest set of all tokens, by w, whose mass
 *    reaches p; its old tokens are read (the exact set's are read anyhow).
 *    deviation: the fewest old tokens such that the sum over the unselected old ones of
 *    |w_j - mean w of the unselected of its block| is <= epsilon.
 *    l2: the fewest old tokens such that the square root of the sum over the unselected old ones of
 *    (w_j - mean w of the unselected of its block)^2 is <= epsilon: with values that differ from their block's mean in directions
 *    that have nothing to do with each other, the size of the output's error is in proportion to it.
 *    All choose a threshold on a fixed grid relative to the largest w_j of an old token (GRID_PER_OCTAVE steps an octave) and
 *    select w_j >= threshold: ties are kept, nothing is sorted. Nothing is selected where that satisfies already (deviation and
 *    l2: of all old tokens <= epsilon; mass: the exact tokens above every old one reach p); every old token that weighs
 *    anything where the whole grid does not. A weight below 2^-126 is none, and a deviation of 2^-20 of a block's mean is
 *    rounding.
 * 4. mass_hb = sum of exp(s_hj - M_h) over the unselected old tokens of block b; the reference is M_h.
 *
 * Owner      nobody: works on the caller's memory. Threads: any, with a scratch of its own each.
 * Invariant  a result depends on nothing but its item: bits are equal whatever else is computed, and for equal scores on every
 *            instruction set. Scores of -inf or NaN are never selected and weigh nothing.
 */
#pragma once

#include "gpu-worker/keys/key_cache.h"
#include "gpu-worker/policy/policy.h"

#define SELECTION_GRID_PER_OCTAVE 8u
#define SELECTION_GRID_OCTAVES    40u  /* weights below largest x 2^-40 are not told apart */
#define SELECTION_MAX_EXACT       256u /* tokens of the exact set that selector mass can look at */

struct selection_item {
    const struct policy *policy;
    const float *q;           /* [group][head_dim], not scaled */
    uint32_t group, head_dim; /* group <= KEY_CODEC_MAX_QUERIES */
    float scale;
    const float *exact;        /* [group][2 + head_dim]: partials of the exact set; not empty */
    const float *exact_scores; /* selector mass only: [group][exact_stride], first n_exact of each */
    size_t exact_stride;
    uint32_t n_exact;             /* <= SELECTION_MAX_EXACT */
    const struct key_cache *keys; /* has the head's keys */
    uint32_t layer, kv_head;
    uint32_t n_blocks; /* old blocks; > 0 */
    /* out */
    uint64_t *masks;   /* [n_blocks]; only tokens of exact_set_old_mask() */
    float *masses;     /* [group][n_blocks]; written if the policy has a tail */
    float *references; /* [group]; may be NULL. -INFINITY: nothing of that query head has a weight */
    float *weights;    /* [group][weights_stride]: of the selected, in order of blocks and tokens; NULL: mode rescore */
    size_t weights_stride;
    uint32_t n_kept; /* out: bits of the masks */
};

/* Bytes of a scratch (64-byte aligned) for items of up to n_blocks whose keys are of this quantizer. */
size_t selection_scratch_bytes(const struct key_quantizer *quantizer, uint32_t group, uint32_t n_blocks);
/* The thread has called kernels_thread_setup(). With selector full only masks and n_kept are written, and no scratch is needed. */
void selection_run(const struct kernels *kernels, struct selection_item *item, void *scratch);
