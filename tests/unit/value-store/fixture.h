/*
 * fixture.h - a small segment in plain memory, and tokens whose ids and rows anybody can compute again.
 *
 * Token t of session s has one id and, for every layer and KV head, one row; they depend on nothing else.
 */
#pragma once

#include "value-store/blocks.h"

#define FIXTURE_SESSION 0x5e5510001u
#define FIXTURE_OTHER   0x5e5510002u
#define FIXTURE_STORE   3u
#define FIXTURE_ROW     (4u * KERNELS_MAX_HEAD_DIM) /* the largest row */

struct fixture {
    struct row_shape shape;
    struct blocks_plan plan;
    uint8_t *segment;
    struct blocks *blocks;
    const struct kernels *kernels;
};

extern const struct row_shape fixture_shape; /* 3 layers, 2 KV heads, head_dim 8 */

void fixture_open(struct fixture *fixture, const struct row_shape *shape, uint32_t n_blocks);
void fixture_close(struct fixture *fixture);
struct blocks_owner fixture_owner(const struct fixture *fixture, uint64_t incarnation);

uint32_t fixture_id(uint64_t session, uint32_t position);
void fixture_row(const struct fixture *fixture, uint64_t session, uint32_t position, uint32_t layer, uint32_t kv_head,
                 void *row); /* layout_row_bytes, as the shape's codec has it */
/* What a row says: [K|V] as f32, decoded here by what layout.h says of codecs. */
void fixture_decode(const struct row_shape *shape, const void *row, float *kv);
/* Rows of n tokens as an append carries them; malloc'd. */
void *fixture_rows(const struct fixture *fixture, uint64_t session, uint32_t position, uint32_t n_tokens,
                   uint32_t layer);

void fixture_session(struct blocks *blocks, uint64_t session);
struct blocks_reservation fixture_reservation(uint32_t index, uint32_t generation, uint32_t number);
void fixture_reserve(struct blocks *blocks, uint64_t session, uint32_t index, uint32_t generation, uint32_t number);

/* Appends tokens [first, first + n) of a block's 64, ids with layer 0, all layers when layer is UINT32_MAX. */
int fixture_append(const struct fixture *fixture, struct blocks *blocks, uint64_t session, struct block_handle handle,
                   uint32_t number, uint32_t first, uint32_t n, uint32_t layer);

/* Does what is there agree with what the tokens are: ids, rows, sums of full layers, checksum of a sealed block? */
bool fixture_block_is_right(const struct fixture *fixture, const struct blocks *blocks, uint64_t session,
                            struct block_handle handle);
/* The same of a block that was copied from a session `tokens_of`. */
bool fixture_copy_is_right(const struct fixture *fixture, const struct blocks *blocks, uint64_t session,
                           struct block_handle handle, uint64_t tokens_of);
