/*
 * cuda_selection.h - which old tokens a decode step reads exactly, from their scores: selection.h (gpu-worker/policy) on the
 * device. C linkage; cuda_ops.h says what holds for all operations.
 *
 * Masks, masses, references, weights and n_kept have the bits of selection_run() for the same scores, but where the exponential of
 * an exact partial rounds otherwise than the C library's (one step of a float, in some of a thousand): a threshold may then fall
 * differently. The search asks at other steps of the grid than selection_run(): the same threshold is found where what is unread
 * never falls when the threshold rises, which for mass holds for every rounding, for deviation and l2 but for roundings at
 * the bound itself.
 */
#pragma once

#include <stdbool.h>

#include "gpu-worker/backend/cuda/cuda_ops.h"
#include "proto/policy.h"

#ifdef __cplusplus
extern "C" {
#endif

#define CUDA_SELECTION_MAX_GROUP 64u  /* KEY_CODEC_MAX_QUERIES */
#define CUDA_SELECTION_MAX_EXACT 256u /* SELECTION_MAX_EXACT */

/*
 * One (session, KV head); an array in device memory, its pointers device memory; results may be pinned memory of the host, which
 * is written in pieces of up to 256 bytes and never read.
 */
struct cuda_selection_item {
    float *scores;      /* [group][stride]; in: of n_blocks old blocks; out: exponentials */
    void *state;        /* cuda_selection_state_bytes(): zeros, but for the largest scores: cuda_selection_largest() */
    const float *exact; /* [group][2 + head_dim]: partials of the exact set */
    const float *exact_scores; /* mass: [group][exact_stride], the first n_exact of each */
    void *work;                /* cuda_selection_work_bytes(), 256-byte aligned */
    uint32_t n_blocks;         /* 1 .. most_blocks */
    uint32_t n_exact;          /* <= CUDA_SELECTION_MAX_EXACT; 0 but for mass */
    float parameter;
    /* out */
    uint32_t *n_kept;
    uint64_t *masks;   /* [n_blocks]; this and what follows in the order of lanes */
    float *masses;     /* [group][n_blocks]; NULL: no tail */
    float *references; /* [group]; NULL: not asked for */
    float *weights;    /* [group][weights_stride]: exponentials of the selected; NULL: not asked for */
    size_t weights_stride;
};

/* What is the same for all items. */
struct cuda_selection {
    enum policy_selector selector; /* mass, deviation or l2 */
    uint32_t group, head_dim, most_blocks;
    uint32_t n_lanes; /* block b is of lane b % n_lanes; the blocks of a lane are together, lane after lane */
    bool weights;     /* an item asks for weights */
    size_t stride, exact_stride;
};

/* An item's state before a run is zeros, and [group] largest scores in it, as `largest` of struct cuda_key_run. */
size_t cuda_selection_state_bytes(uint32_t group);
uint32_t *cuda_selection_largest(void *state);

size_t cuda_selection_work_bytes(const struct cuda_selection *selection);
/* Where in it the weights w [n_blocks][64] of step 2 are, f32 (those of sinks say nothing). */
size_t cuda_selection_weights_offset(const struct cuda_selection *selection);

/* Six launches, seven with weights; nothing that the host has to see in between. n_items <= 65535. */
cudaError_t cuda_selection_run(const struct cuda_queue *queue, const struct cuda_selection *selection,
                               const struct cuda_selection_item *items, uint32_t n_items);

/* Its parts, in this order: exponentials, weights and their largest; the threshold; masks and what they say. */
cudaError_t cuda_selection_weigh(const struct cuda_queue *queue, const struct cuda_selection *selection,
                                 const struct cuda_selection_item *items, uint32_t n_items);
cudaError_t cuda_selection_search(const struct cuda_queue *queue, const struct cuda_selection *selection,
                                  const struct cuda_selection_item *items, uint32_t n_items);
cudaError_t cuda_selection_finish(const struct cuda_queue *queue, const struct cuda_selection *selection,
                                  const struct cuda_selection_item *items, uint32_t n_items);

#ifdef __cplusplus
}
#endif
