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
void requests_fill(struct fixture *fixture, enum row_codec codec, uint32_t lanes)
{
    const struct row_shape shape = {.n_layers = 3, .n_kv_heads = 2, .head_dim = HEAD_DIM, .codec = codec};
    fixture_open(fixture, &shape, N_BLOCKS + 1);
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

int requests_set_up_f16(void **state)
{
    (void)state;
    requests_fill(&requests_whole, ROW_CODEC_F16, 0xfff);
    return 0;
}

int requests_set_up_q8_0(void **state)
{
    (void)state;
    requests_fill(&requests_whole, ROW_CODEC_Q8_0, 0xfff);
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

uint64_t requests_masks[2][N_BLOCKS];
float requests_queries[2][MAX_Q][HEAD_DIM];
float requests_masses[2][MAX_Q][N_BLOCKS];
float requests_references[2][MAX_Q];

static float random_number(float least, float most)
{
    return least + (most - least) * (float)(rand() % 2001) / 2000;
}

static uint64_t random_mask(bool everything)
{
    uint64_t bits = 0;
    int share = rand() % 3 == 0 ? 2 : 6; /* blocks with many rows and with few are attended to in different ways */
    for (uint32_t token = 0; token < 64; token++)
        bits |= (uint64_t)(everything || rand() % share == 0) << token;
    return !everything && rand() % 7 == 0 ? 0 : bits;
}

void requests_choose(uint32_t seed, bool everything)
{
    srand(seed);
    for (uint32_t head = 0; head < 2; head++) {
        for (uint32_t number = 0; number < N_BLOCKS; number++)
            requests_masks[head][number] = random_mask(everything);
        requests_masks[head][N_BLOCKS - 1] &= (UINT64_C(1) << LAST_ROWS) - 1;
        for (uint32_t query = 0; query < MAX_Q; query++) {
            for (uint32_t i = 0; i < HEAD_DIM; i++)
                requests_queries[head][query][i] = random_number(-2, 2);
            for (uint32_t number = 0; number < N_BLOCKS; number++)
                requests_masses[head][query][number] = rand() % 5 == 0 ? 0 : random_number(0, 3);
            requests_masses[head][query][N_BLOCKS - 1] = 0;
            requests_references[head][query] = random_number(-3, 3);
        }
    }
}

float requests_weight(uint32_t head, uint32_t query, uint32_t number, uint32_t token)
{
    return (float)((head * 7919 + query * 104729 + number * 1299709 + token * 15485863) % 1013) / 500;
}

static uint32_t put_masses(struct request *request, uint32_t head, uint32_t n_queries, const uint32_t *numbers,
                           uint32_t n_blocks)
{
    uint32_t offset = requests_put(request, NULL, 0);
    for (uint32_t query = 0; query < n_queries; query++) {
        for (uint32_t i = 0; i < n_blocks; i++) {
            memcpy(request->bytes + request->header->n_bytes, &requests_masses[head][query][numbers[i]], sizeof(float));
            request->header->n_bytes += (uint32_t)sizeof(float);
        }
    }
    return offset;
}

static uint32_t put_weights(struct request *request, uint32_t head, uint32_t n_queries, const uint32_t *numbers,
                            uint32_t n_blocks)
{
    uint32_t offset = requests_put(request, NULL, 0);
    for (uint32_t query = 0; query < n_queries; query++) {
        for (uint32_t i = 0; i < n_blocks; i++) {
            for (uint32_t token = 0; token < 64; token++) {
                float weight = requests_weight(head, query, numbers[i], token);
                if (!(requests_masks[head][numbers[i]] >> token & 1))
                    continue;
                memcpy(request->bytes + request->header->n_bytes, &weight, sizeof(weight));
                request->header->n_bytes += (uint32_t)sizeof(weight);
            }
        }
    }
    assert_true(request->header->n_bytes <= AREA);
    return offset;
}

/* Two items (KV heads) sharing the blocks of `lanes`. Returns where their results are to lie. */
void requests_ask(struct request *request, const struct asked *asked, uint32_t ret_results[2])
{
    struct aggregate_item items[2];
    struct block_handle handles[N_BLOCKS];
    uint32_t numbers[N_BLOCKS], n_blocks = 0, touched = 0, n_queries = asked->n_queries;
    for (uint32_t lane = 0; lane < LAYOUT_N_LANES; lane++) {
        for (uint32_t number = lane; number < N_BLOCKS && in_lanes(lane, asked->lanes); number += LAYOUT_N_LANES) {
            numbers[n_blocks] = number;
            handles[n_blocks++] = requests_handle(number);
            touched |= 1u << lane;
        }
    }
    for (uint32_t head = 0; head < 2; head++) {
        uint64_t masks[N_BLOCKS];
        uint32_t n_selected = 0;
        for (uint32_t i = 0; i < n_blocks; i++) {
            masks[i] = requests_masks[head][numbers[i]];
            n_selected += (uint32_t)__builtin_popcountll(masks[i]);
        }
        ret_results[head] =
            requests_room(request, (size_t)__builtin_popcount(touched) * n_queries * N_PARTIAL * sizeof(float));
        items[head] = (struct aggregate_item){
            .session = FIXTURE_SESSION,
            .kv_head = head,
            .mode = asked->mode,
            .n_queries = n_queries,
            .n_blocks = n_blocks,
            .lanes = touched,
            .masks_offset = requests_put(request, masks, n_blocks * sizeof(masks[0])),
            .scale = 0.15f,
            .result_offset = ret_results[head],
        };
        if (asked->mode == AGGREGATE_RESCORE) {
            items[head].q_offset =
                requests_put(request, requests_queries[head], n_queries * sizeof(requests_queries[0][0]));
        } else {
            items[head].weights_offset = put_weights(request, head, n_queries, numbers, n_blocks);
            items[head].n_weights = n_selected;
        }
        if (asked->tail)
            items[head].masses_offset = put_masses(request, head, n_queries, numbers, n_blocks);
        if (asked->tail || asked->mode == AGGREGATE_WEIGHTS)
            items[head].references_offset = requests_put(request, requests_references[head], n_queries * sizeof(float));
    }
    request->header->blocks_offset = requests_put(request, handles, n_blocks * sizeof(handles[0]));
    request->header->n_blocks = n_blocks;
    request->header->items_offset = requests_put(request, items, sizeof(items));
    request->header->n_items = 2;
}
