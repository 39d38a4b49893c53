/*
 * fastgen_weights.h - attention weights of some positions in full, which attention kernels never write down: what a profile is
 * made of.
 *
 * Threads    any that has called kernels_thread_setup(); each with its own scratch.
 * Invariant  the bits of a position's results depend on its query and its rows alone, not on who else is in the call.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "kernels/kernels.h"

enum { FASTGEN_WEIGHTS_POSITIONS = 8 }; /* in one call: what shares the reading of a block */

/* Some positions of one KV head over its rows. */
struct fastgen_rows {
    const struct kernels *kernels;
    uint32_t head_dim, group; /* group: query heads of the KV head */
    enum kernels_rows codec;
    float scale;          /* multiplies q . k */
    uint32_t n_positions; /* 1 .. FASTGEN_WEIGHTS_POSITIONS */
    const uint32_t *positions;
    const float *const *q; /* [n_positions] of [group][head_dim], after RoPE */
    /* 64 rows [K|V] of the head, as the codec has them, for blocks of tokens up to the last position; NULL: not there any more. */
    const void *(*block)(void *context, uint32_t block);
    void *context;
};

/* Floats of weights for a position: position + 1 in whole blocks. */
static inline size_t fastgen_weights_stride(uint32_t last_position)
{
    return ((size_t)last_position / KERNELS_BLOCK_TOKENS + 1) * KERNELS_BLOCK_TOKENS;
}

/* For calls of up to n_positions positions, none behind last_position. */
size_t fastgen_weights_scratch_bytes(uint32_t n_positions, uint32_t last_position, uint32_t group, uint32_t head_dim);

/*
 * weights [n_positions][stride], stride >= fastgen_weights_stride() of the last position: softmax(scale q . k) over tokens
 * 0 .. position, averaged over the query heads; 0 for the tokens behind it up to the end of its block, and where a score is not a
 * number. out [n_positions] of [group][head_dim]: the attention's output, or NULL. Keys of q8_0 rows are rounded to f16 first.
 * -ESTALE: a block was not there; what was written is worth nothing.
 */
int fastgen_weights(const struct fastgen_rows *rows, void *scratch, float *weights, size_t stride, float *const *out);
