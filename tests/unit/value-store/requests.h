/*
 * requests.h - requests as a worker writes them, on a session of 30 blocks that every test finds in a store of its own.
 */
#pragma once

#include "common/pool.h"
#include "tests/unit/value-store/fixture.h"
#include "value-store/request.h"

#define N_BLOCKS      30u /* of the session, the last one half full */
#define LAST_ROWS     37u
#define AREA          (1u << 17)
#define REQUEST_ID    0x1234567890abcdefu
#define MAX_Q         80u
#define HEAD_DIM      8u
#define N_PARTIAL     KERNELS_PARTIAL_FLOATS(HEAD_DIM)
#define LAYER         1u
#define ITEM(request) ((struct aggregate_item *)(void *)((request)->bytes + (request)->header->items_offset))
#define RUN(request)  ((struct mask_run *)(void *)((request)->bytes + (request)->header->runs_offset))

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

/* A store with those blocks of the session that lie in `lanes`. */
void requests_fill(struct fixture *fixture, uint32_t lanes);

extern struct fixture requests_whole; /* all lanes; from set-up to tear-down of a test */
int requests_set_up(void **state);
int requests_tear_down(void **state);

extern uint64_t requests_masks[N_BLOCKS];
extern float requests_queries[2][MAX_Q][HEAD_DIM]; /* per KV head */
void requests_choose(uint32_t seed, bool everything);

/* Two items (KV heads) sharing the runs of `lanes`. Returns where their results are to lie. */
void requests_ask(struct request *request, uint32_t lanes, uint32_t n_queries, uint32_t ret_results[2]);
