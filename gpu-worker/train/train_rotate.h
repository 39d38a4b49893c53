/*
 * train_rotate.h - moments of queries and keys for all positions of a context, from those of the positions that were looked at.
 *
 * What was computed at position p would have been the same vector, turned by the rotary embedding's angles of an offset, had the
 * text begun later. So what is known of the first few thousand positions says what all later ones will be: every pair of
 * dimensions turned by offset x its frequency. Without this, axes that queries use only far behind the text that was read are
 * taken for axes that nobody asks for.
 *
 * Pure functions. Threads: any.
 */
#pragma once

#include <stdint.h>

#include "gpu-worker/backend/backend.h"

/* For the number-th sample: all offsets below n_offsets in turn, neighbours far from each other. */
uint32_t train_rotate_offset(uint64_t number, uint32_t n_offsets);
/* n_pairs pairs of a vector, the first of them at x, turned by one offset. */
void train_rotate(const struct backend_rope *rope, uint32_t offset, uint32_t first_pair, uint32_t n_pairs, float *x);
/* mean [head_dim] and square [head_dim][head_dim] = E[x y^T], averaged over offsets 0 .. n_offsets - 1 (n_offsets >= 1). */
void train_rotate_mean(const struct backend_rope *rope, uint32_t n_offsets, uint32_t head_dim, double *mean);
void train_rotate_square(const struct backend_rope *rope, uint32_t n_offsets, uint32_t head_dim, double *square);
