/*
 * cpu_packed.h - quantized matrices as the integer kernels read them.
 *
 * Owner      the weight that holds it. Threads: read-only once packed.
 *
 * Layout     tiles of `tile_rows` output rows; a tile is n_blocks blocks of 32 columns; a block is
 *                scales [tile_rows] f16 or f32 (U6: two vectors, one for each 16 columns)
 *                minima [tile_rows] f16 or f32, where the format has them
 *                quants: for each group of 4 columns, 4 bytes of every row, so that one vector register holds the group
 *                        of all rows and integer dots need no horizontal sums. The bytes are columns 0, 2, 1, 3 of the
 *                        group: read as two 16-bit words, their lower bytes are two neighbours, and so are the upper
 *                        ones. U4: the low nibbles of byte group g are columns 4g.., the high ones columns 16 + 4g...
 *            A weight is scale * q + minimum; without stored minima, the minimum is -offset * scale.
 *            Rows that pad the last tile are zero.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "gpu-worker/backend/memory.h"
#include "gpu-worker/model/tensor.h"

enum cpu_packing {
    CPU_U4,     /* Q4_0: q 0..15, f16 scale, offset 8 */
    CPU_U4_MIN, /* Q4_1: f16 scale and minimum */
    CPU_U4_K,   /* Q4_K: f32 scale and minimum */
    CPU_U5,     /* Q5_0: q 0..31 in bytes, f16 scale, offset 16 */
    CPU_U5_MIN, /* Q5_1 */
    CPU_U5_K,   /* Q5_K */
    CPU_S8,     /* Q8_0: q -128..127, f16 scale, minimum 0 */
    CPU_U6,     /* Q6_K: q 0..63 in bytes, f32 scale per 16 columns, offset 32 */
    CPU_N_PACKINGS,
};

struct cpu_packed {
    enum cpu_packing packing;
    uint32_t n_rows;
    uint32_t n_tiles;
    uint32_t n_blocks; /* of 32 columns */
    uint32_t tile_rows;
    size_t block_bytes;
    size_t tile_bytes;
    size_t n_bytes;
    uint8_t *data; /* 64-byte aligned, owned, from memory.h */
};

/* Where the byte of a column lies in its group of 4. */
static inline size_t cpu_packed_position(size_t column)
{
    return (column & 1) << 1 | (column >> 1 & 1);
}

/* Bytes before the quants of a block for one row, and bytes of its quants. */
static inline size_t cpu_packed_scale_bytes(enum cpu_packing packing)
{
    static const uint8_t bytes[CPU_N_PACKINGS] = {2, 4, 8, 2, 4, 8, 2, 8};
    return bytes[packing];
}

static inline size_t cpu_packed_quant_bytes(enum cpu_packing packing)
{
    return packing <= CPU_U4_K ? 16 : 32;
}

/* -ENOTSUP: not a quantized type or not whole blocks; -ENOMEM. The data is allocated but not filled yet. */
int cpu_packed_init(struct cpu_packed *packed, const struct tensor *tensor, uint32_t tile_rows,
                    struct memory_arena *arena);
void cpu_packed_fini(struct cpu_packed *packed);

/* Fills one tile; tiles are independent of each other. */
void cpu_packed_fill(struct cpu_packed *packed, const struct tensor *tensor, uint32_t tile);
