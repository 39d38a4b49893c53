/* requests.c - see requests.h. */
#include "tests/unit/value-store/requests.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

void requests_begin(struct request *request)
{
    request->bytes = aligned_alloc(4096, AREA);
    request->reply = aligned_alloc(4096, AREA);
    assert_true(request->bytes && request->reply);
    memset(request->bytes, 0, AREA);
    memset(request->reply, 0xee, AREA);
    request->header = (struct request_header *)(void *)request->bytes;
    *request->header = (struct request_header){
        .magic = REQUEST_MAGIC, .n_bytes = sizeof(struct request_header), .request = REQUEST_ID, .layer = LAYER};
    request->reply_end = sizeof(struct reply_header);
}

void requests_end(struct request *request)
{
    free(request->bytes);
    free(request->reply);
}

uint32_t requests_put(struct request *request, const void *bytes, size_t n_bytes)
{
    uint32_t offset = (request->header->n_bytes + 15) / 16 * 16;
    assert_true(offset + n_bytes <= AREA);
    if (n_bytes > 0)
        memcpy(request->bytes + offset, bytes, n_bytes);
    request->header->n_bytes = offset + (uint32_t)n_bytes;
    return offset;
}

uint32_t requests_room(struct request *request, size_t n_bytes)
{
    uint32_t offset = (request->reply_end + 15) / 16 * 16;
    assert_true(offset + n_bytes <= AREA);
    request->reply_end = offset + (uint32_t)n_bytes;
    return offset;
}

struct request_result requests_serve(struct request *request, struct blocks *blocks, struct pool *pool)
{
    struct aggregate *aggregate;
    struct request_result result;
    _Atomic uint64_t progress = 0;
    const struct request_slot slot = {
        .request = REQUEST_ID,
        .n_bytes = request->header->n_bytes,
        .request_area = request->bytes,
        .request_bytes = AREA,
        .reply_area = request->reply,
        .reply_bytes = AREA,
    };
    assert_int_equal(aggregate_new(kernels_get(KERNELS_ISA_AUTO), pool, &progress, &aggregate), 0);
    request_serve(blocks, aggregate, &slot, &result);
    aggregate_free(aggregate);
    const struct reply_header *reply = (const struct reply_header *)(void *)request->reply;
    assert_int_equal(reply->magic, REPLY_MAGIC);
    assert_int_equal(reply->status, result.status);
    assert_int_equal(reply->entry, result.entry);
    assert_int_equal(reply->n_bytes, result.n_bytes);
    assert_true(atomic_load(&reply->answered) == slot.request);
    return result;
}

/* ---- a session of 30 blocks, number n in block index N_BLOCKS - 1 - n, so that order in memory means nothing ---- */

struct block_handle requests_handle(uint32_t number)
{
    return (struct block_handle){.index = N_BLOCKS - 1 - number, .generation = 1 + number % 3};
}

static bool in_lanes(uint32_t number, uint32_t lanes)
{
    return (lanes >> (number % LAYOUT_N_LANES) & 1) != 0;
}

/* A store with those blocks of the session that lie in `lanes`. */
void requests_fill(struct fixture *fixture, uint32_t lanes)
{
    fixture_open(fixture, &fixture_shape, N_BLOCKS + 1);
    fixture_session(fixture->blocks, FIXTURE_SESSION);
    fixture_session(fixture->blocks, FIXTURE_OTHER);
    fixture_reserve(fixture->blocks, FIXTURE_OTHER, N_BLOCKS, 1, 0);
    assert_int_equal(fixture_append(fixture, fixture->blocks, FIXTURE_OTHER,
                                    (struct block_handle){.index = N_BLOCKS, .generation = 1}, 0, 0, 64, UINT32_MAX),
                     0);
    for (uint32_t number = 0; number < N_BLOCKS; number++) {
        struct block_handle handle = requests_handle(number);
        uint32_t n_rows = number == N_BLOCKS - 1 ? LAST_ROWS : 64;
        if (!in_lanes(number, lanes))
            continue;
        fixture_reserve(fixture->blocks, FIXTURE_SESSION, handle.index, handle.generation, number);
        assert_int_equal(
            fixture_append(fixture, fixture->blocks, FIXTURE_SESSION, handle, number, 0, n_rows, UINT32_MAX), 0);
    }
}

struct fixture requests_whole;

int requests_set_up(void **state)
{
    (void)state;
    requests_fill(&requests_whole, 0xfff);
    return 0;
}

int requests_tear_down(void **state)
{
    (void)state;
    char text[BLOCKS_CHECK_TEXT] = "";
    int result = blocks_check(requests_whole.blocks, text);
    fixture_close(&requests_whole);
    return result;
}

uint64_t requests_masks[N_BLOCKS];
float requests_queries[2][MAX_Q][HEAD_DIM]; /* per KV head */

void requests_choose(uint32_t seed, bool everything)
{
    srand((int)seed < 0 ? 1 : seed);
    for (uint32_t number = 0; number < N_BLOCKS; number++) {
        uint64_t bits = 0;
        for (uint32_t token = 0; token < 64; token++)
            bits |= (uint64_t)(everything || rand() % 5 == 0) << token;
        if (!everything && rand() % 7 == 0)
            bits = 0;
        requests_masks[number] = number == N_BLOCKS - 1 ? bits & ((UINT64_C(1) << LAST_ROWS) - 1) : bits;
    }
    for (uint32_t i = 0; i < 2 * MAX_Q * HEAD_DIM; i++)
        (&requests_queries[0][0][0])[i] = (float)(rand() % 2001 - 1000) * 0.004f;
}

/* Two items (KV heads) sharing the runs of `lanes`. Returns where their results are to lie. */
void requests_ask(struct request *request, uint32_t lanes, uint32_t n_queries, uint32_t ret_results[2])
{
    struct aggregate_item items[2];
    struct mask_run runs[N_BLOCKS];
    uint32_t n_runs = 0, touched = 0;
    for (uint32_t lane = 0; lane < LAYOUT_N_LANES; lane++) {
        for (uint32_t number = lane; number < N_BLOCKS && in_lanes(lane, lanes); number += LAYOUT_N_LANES) {
            runs[n_runs++] = (struct mask_run){.handle = requests_handle(number), .mask = requests_masks[number]};
            touched |= 1u << lane;
        }
    }
    for (uint32_t head = 0; head < 2; head++) {
        uint32_t q_offset = requests_put(request, requests_queries[head], n_queries * HEAD_DIM * sizeof(float));
        ret_results[head] =
            requests_room(request, (size_t)__builtin_popcount(touched) * n_queries * N_PARTIAL * sizeof(float));
        items[head] = (struct aggregate_item){
            .session = FIXTURE_SESSION,
            .kv_head = head,
            .mode = AGGREGATE_RESCORE,
            .n_queries = n_queries,
            .q_offset = q_offset,
            .first_run = 0,
            .n_runs = n_runs,
            .lanes = touched,
            .scale = 0.35f,
            .result_offset = ret_results[head],
        };
    }
    request->header->runs_offset = requests_put(request, runs, n_runs * sizeof(runs[0]));
    request->header->n_runs = n_runs;
    request->header->items_offset = requests_put(request, items, sizeof(items));
    request->header->n_items = 2;
}
