/*
 * exact_set.h - which tokens a position attends to exactly on the device, and which are old.
 *
 * A session has a number of exact tokens, fixed when it opens. For a query at position p in block b = p / 64:
 *     p < exact tokens   everything is in the exact set; nothing is old
 *     otherwise          the window is block b up to p and the block before it; the sinks are the first 4 tokens; all others
 *                        are old. So a block is old, and its keys are quantized, once a position two blocks later is
 *                        computed - it has been sealed by then.
 *
 * Pure functions; StreamingLLM (sinks), RetroInfer (sinks and window beside an estimated zone).
 */
#pragma once

#include <stdint.h>

#include "proto/layout.h"

enum { EXACT_SET_WINDOW_BLOCKS = 2 };

/* Blocks [0, n) hold old tokens for a query at `position`. */
static inline uint32_t exact_set_n_old_blocks(uint32_t position, uint32_t exact_tokens)
{
    uint32_t block = position / LAYOUT_BLOCK_TOKENS;
    return position < exact_tokens || block < EXACT_SET_WINDOW_BLOCKS ? 0 : block - (EXACT_SET_WINDOW_BLOCKS - 1);
}

/* Old tokens of an old block: all but the sinks. */
static inline uint64_t exact_set_old_mask(uint32_t block)
{
    return block == 0 ? ~(uint64_t)0 << LAYOUT_N_SINKS : ~(uint64_t)0;
}

/* Old tokens for a query at `position`, all blocks together. */
static inline uint32_t exact_set_n_old_tokens(uint32_t position, uint32_t exact_tokens)
{
    uint32_t n_blocks = exact_set_n_old_blocks(position, exact_tokens);
    return n_blocks == 0 ? 0 : n_blocks * LAYOUT_BLOCK_TOKENS - LAYOUT_N_SINKS;
}

/* Blocks that the window must have room for, from the next decode step (at `position`) until the session has n_tokens. */
static inline uint32_t exact_set_window_blocks(uint32_t position, uint32_t n_tokens, uint32_t exact_tokens)
{
    uint32_t last = n_tokens < exact_tokens ? n_tokens : exact_tokens;
    uint32_t n = (last + LAYOUT_BLOCK_TOKENS - 1) / LAYOUT_BLOCK_TOKENS;
    return position < exact_tokens && n > EXACT_SET_WINDOW_BLOCKS ? n : EXACT_SET_WINDOW_BLOCKS;
}
