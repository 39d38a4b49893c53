/*
 * requests.h - requests as a worker writes them, on a session of 30 blocks that every test finds in a store of its own.
 */
#pragma once

#include "common/pool.h"
#include "tests/unit/value-store/fixture.h"
#include "value-store/request.h"

#define N_BLOCKS       30u /* of the session, the last one half full */
#define LAST_ROWS      37u
#define AREA           (1u << 19)
#define REQUEST_ID     0x1234567890abcdefu
#define MAX_Q          80u
#define HEAD_DIM       40u /* not a multiple of a q8_0 group */
#define N_PARTIAL      KERNELS_PARTIAL_FLOATS(HEAD_DIM)
#define LAYER          1u
#define ITEM(request)  ((struct aggregate_item *)(void *)((request)->bytes + (request)->header->items_offset))
#define BLOCK(request) ((struct block_handle *)(void *)((request)->bytes + (request)->header->blocks_offset))
#define MASKS(request, item)                                                                                           \
    ((uint64_t *)(void *)((request)->bytes + ITEM(request)[item].masks_offset)) /* [n_blocks] */
#define MASSES(request, item)                                                                                          \
    ((float *)(void *)((request)->bytes + ITEM(request)[item].masses_offset)) /* [n_queries][n_blocks] */

/* A request being written, and the slot it lies in. */
struct request {
    uint8_t *bytes;
    uint8_t *reply;
    struct request_header *header;
    uint32_t reply_end;
};

void requests_begin(struct request *request);
void requests_end(struct request *request);
uint32_t requests_put(struct request *request, const void *bytes, size_t n_bytes); /* offset in the request */
uint32_t requests_room(struct request *request, size_t n_bytes);                   /* offset in the reply */

/* Serves it and checks that the reply header says what the result says. */
struct request_result requests_serve(struct request *request, struct blocks *blocks, struct pool *pool);

/* Number n lies in block N_BLOCKS - 1 - n: order in memory means nothing. */
struct block_handle requests_handle(uint32_t number);

/* A store with those blocks of the session that lie in `lanes`, and block 0 of FIXTURE_OTHER in N_BLOCKS. */
void requests_fill(struct fixture *fixture, enum row_codec codec, uint32_t lanes);

extern struct fixture requests_whole; /* all lanes; from set-up to tear-down of a test */
int requests_set_up_f16(void **state);
int requests_set_up_q8_0(void **state);
int requests_tear_down(void **state);

/* What is asked, per KV head. */
extern uint64_t requests_masks[2][N_BLOCKS];
extern float requests_queries[2][MAX_Q][HEAD_DIM];
extern float requests_masses[2][MAX_Q][N_BLOCKS]; /* none for the last block, which has no sums */
extern float requests_references[2][MAX_Q];
void requests_choose(uint32_t seed, bool everything);
float requests_weight(uint32_t head, uint32_t query, uint32_t number, uint32_t token); /* of a selected row */

struct asked {
    uint32_t lanes;
    uint32_t n_queries;
    enum aggregate_mode mode;
    bool tail;
};

/* Two items (KV heads) sharing the blocks of `lanes`. Returns where their results are to lie. */
void requests_ask(struct request *request, const struct asked *asked, uint32_t ret_results[2]);
