/*
 * test_aggregate.c - requests as a worker writes them, served from a segment: answers against a softmax in double, the same
 * bits however the work is spread, and every kind of malformed request refused with the entry that is wrong.
 */
#include "common/pool.h"
#include "tests/unit/value-store/fixture.h"
#include "value-store/request.h"

#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

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

static void begin(struct request *request)
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

static void end(struct request *request)
{
    free(request->bytes);
    free(request->reply);
}

static uint32_t put(struct request *request, const void *bytes, size_t n_bytes)
{
    uint32_t offset = (request->header->n_bytes + 15) / 16 * 16;
    assert_true(offset + n_bytes <= AREA);
    if (n_bytes > 0)
        memcpy(request->bytes + offset, bytes, n_bytes);
    request->header->n_bytes = offset + (uint32_t)n_bytes;
    return offset;
}

static uint32_t room(struct request *request, size_t n_bytes)
{
    uint32_t offset = (request->reply_end + 15) / 16 * 16;
    assert_true(offset + n_bytes <= AREA);
    request->reply_end = offset + (uint32_t)n_bytes;
    return offset;
}

static struct request_result serve(struct request *request, struct blocks *blocks, struct pool *pool)
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

static struct block_handle handle_of(uint32_t number)
{
    return (struct block_handle){.index = N_BLOCKS - 1 - number, .generation = 1 + number % 3};
}

static bool in_lanes(uint32_t number, uint32_t lanes)
{
    return (lanes >> (number % LAYOUT_N_LANES) & 1) != 0;
}

/* A store with those blocks of the session that lie in `lanes`. */
static void fill(struct fixture *fixture, uint32_t lanes)
{
    fixture_open(fixture, &fixture_shape, N_BLOCKS + 1);
    fixture_session(fixture->blocks, FIXTURE_SESSION);
    fixture_session(fixture->blocks, FIXTURE_OTHER);
    fixture_reserve(fixture->blocks, FIXTURE_OTHER, N_BLOCKS, 1, 0);
    assert_int_equal(fixture_append(fixture, fixture->blocks, FIXTURE_OTHER,
                                    (struct block_handle){.index = N_BLOCKS, .generation = 1}, 0, 0, 64, UINT32_MAX),
                     0);
    for (uint32_t number = 0; number < N_BLOCKS; number++) {
        struct block_handle handle = handle_of(number);
        uint32_t n_rows = number == N_BLOCKS - 1 ? LAST_ROWS : 64;
        if (!in_lanes(number, lanes))
            continue;
        fixture_reserve(fixture->blocks, FIXTURE_SESSION, handle.index, handle.generation, number);
        assert_int_equal(
            fixture_append(fixture, fixture->blocks, FIXTURE_SESSION, handle, number, 0, n_rows, UINT32_MAX), 0);
    }
}

static struct fixture whole;

static int set_up(void **state)
{
    (void)state;
    fill(&whole, 0xfff);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    char text[BLOCKS_CHECK_TEXT] = "";
    int result = blocks_check(whole.blocks, text);
    fixture_close(&whole);
    return result;
}

static uint64_t masks[N_BLOCKS];
static float queries[2][MAX_Q][HEAD_DIM]; /* per KV head */

static void choose(uint32_t seed, bool everything)
{
    srand((int)seed < 0 ? 1 : seed);
    for (uint32_t number = 0; number < N_BLOCKS; number++) {
        uint64_t bits = 0;
        for (uint32_t token = 0; token < 64; token++)
            bits |= (uint64_t)(everything || rand() % 5 == 0) << token;
        if (!everything && rand() % 7 == 0)
            bits = 0;
        masks[number] = number == N_BLOCKS - 1 ? bits & ((UINT64_C(1) << LAST_ROWS) - 1) : bits;
    }
    for (uint32_t i = 0; i < 2 * MAX_Q * HEAD_DIM; i++)
        (&queries[0][0][0])[i] = (float)(rand() % 2001 - 1000) * 0.004f;
}

/* Two items (KV heads) sharing the runs of `lanes`. Returns where their results are to lie. */
static void ask(struct request *request, uint32_t lanes, uint32_t n_queries, uint32_t ret_results[2])
{
    struct aggregate_item items[2];
    struct mask_run runs[N_BLOCKS];
    uint32_t n_runs = 0, touched = 0;
    for (uint32_t lane = 0; lane < LAYOUT_N_LANES; lane++) {
        for (uint32_t number = lane; number < N_BLOCKS && in_lanes(lane, lanes); number += LAYOUT_N_LANES) {
            runs[n_runs++] = (struct mask_run){.handle = handle_of(number), .mask = masks[number]};
            touched |= 1u << lane;
        }
    }
    for (uint32_t head = 0; head < 2; head++) {
        uint32_t q_offset = put(request, queries[head], n_queries * HEAD_DIM * sizeof(float));
        ret_results[head] = room(request, (size_t)__builtin_popcount(touched) * n_queries * N_PARTIAL * sizeof(float));
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
    request->header->runs_offset = put(request, runs, n_runs * sizeof(runs[0]));
    request->header->n_runs = n_runs;
    request->header->items_offset = put(request, items, sizeof(items));
    request->header->n_items = 2;
}

static const float *result_of(const struct request *request, uint32_t offset, uint32_t lane_rank, uint32_t n_queries,
                              uint32_t query)
{
    const float *results = (const float *)(const void *)(request->reply + offset);
    return results + ((size_t)lane_rank * n_queries + query) * N_PARTIAL;
}

/* The softmax of one query over the selected tokens of one lane, in double and without tricks. */
static void expect_partial(const float *partial, uint32_t head, uint32_t query, uint32_t lane)
{
    double scores[N_BLOCKS * 64], values[N_BLOCKS * 64][HEAD_DIM], max = -INFINITY;
    uint32_t n = 0;
    for (uint32_t number = lane; number < N_BLOCKS; number += LAYOUT_N_LANES) {
        for (uint32_t token = 0; token < 64; token++) {
            uint16_t row[2 * HEAD_DIM];
            float kv[2 * HEAD_DIM];
            if (!(masks[number] >> token & 1))
                continue;
            fixture_row(&whole, FIXTURE_SESSION, number * 64 + token, LAYER, head, row);
            whole.kernels->f16_decode(row, 2 * HEAD_DIM, kv);
            scores[n] = 0;
            for (uint32_t i = 0; i < HEAD_DIM; i++) {
                scores[n] += (double)queries[head][query][i] * (double)kv[i];
                values[n][i] = (double)kv[HEAD_DIM + i];
            }
            scores[n] *= (double)0.35f;
            max = scores[n] > max ? scores[n] : max;
            n++;
        }
    }
    if (n == 0) {
        assert_true(partial[0] == -INFINITY && partial[1] == 0.0f && partial[2] == 0.0f);
        return;
    }
    double sum = 0, out[HEAD_DIM] = {0};
    for (uint32_t j = 0; j < n; j++) {
        double weight = exp(scores[j] - max);
        sum += weight;
        for (uint32_t i = 0; i < HEAD_DIM; i++)
            out[i] += weight * values[j][i];
    }
    assert_true(fabs((double)partial[0] - max) < 1e-5);
    assert_true(fabs((double)partial[1] - sum) < 1e-4 * sum);
    for (uint32_t i = 0; i < HEAD_DIM; i++)
        assert_true(fabs((double)partial[2 + i] - out[i]) < 1e-4 * sum);
}

static void partials_are_softmax_sums(void **state)
{
    (void)state;
    static const uint32_t query_counts[] = {1, 3, 32, 33, MAX_Q};
    for (uint32_t round = 0; round < 5; round++) {
        struct request request;
        uint32_t results[2];
        uint64_t n_rows = 0;
        begin(&request);
        choose(round + 1, round == 4);
        ask(&request, 0xfff, query_counts[round], results);
        struct request_result result = serve(&request, whole.blocks, NULL);
        assert_int_equal(result.status, 0);
        assert_int_equal(result.n_bytes, request.reply_end);
        for (uint32_t number = 0; number < N_BLOCKS; number++)
            n_rows += 2 * (uint64_t)__builtin_popcountll(masks[number]);
        assert_int_equal(result.n_rows_read, n_rows);
        for (uint32_t head = 0; head < 2; head++) {
            for (uint32_t lane = 0; lane < LAYOUT_N_LANES; lane++) {
                for (uint32_t query = 0; query < query_counts[round]; query++)
                    expect_partial(result_of(&request, results[head], lane, query_counts[round], query), head, query,
                                   lane);
            }
        }
        end(&request);
    }
}

/* One store or several that share the lanes in any way, one thread or four, queries together or alone: the same bits. */
static void spreading_does_not_change_a_bit(void **state)
{
    (void)state;
    static const uint32_t splits[][3] = {
        {0x555, 0xaaa, 0}, {0xaaa, 0x555, 0}, {0x00f, 0x0f0, 0xf00}, {0x800, 0x7fe, 1}};
    struct pool *pool;
    struct request request, part;
    uint32_t results[2], part_results[2];
    const uint32_t n_queries = 35;
    assert_int_equal(pool_new(4, NULL, NULL, &pool), 0);
    choose(42, false);
    begin(&request);
    ask(&request, 0xfff, n_queries, results);
    assert_int_equal(serve(&request, whole.blocks, NULL).status, 0);

    for (size_t split = 0; split < sizeof(splits) / sizeof(splits[0]); split++) {
        for (size_t store = 0; store < 3 && splits[split][store]; store++) {
            struct fixture fixture;
            uint32_t lanes = splits[split][store];
            fill(&fixture, lanes);
            begin(&part);
            ask(&part, lanes, n_queries, part_results);
            assert_int_equal(serve(&part, fixture.blocks, pool).status, 0);
            for (uint32_t head = 0; head < 2; head++) {
                uint32_t rank = 0;
                for (uint32_t lane = 0; lane < LAYOUT_N_LANES; lane++) {
                    if (!(lanes >> lane & 1))
                        continue;
                    assert_memory_equal(result_of(&request, results[head], lane, n_queries, 0),
                                        result_of(&part, part_results[head], rank++, n_queries, 0),
                                        n_queries * N_PARTIAL * sizeof(float));
                }
            }
            end(&part);
            fixture_close(&fixture);
        }
    }

    begin(&part);
    ask(&part, 0xfff, 1, part_results);
    assert_int_equal(serve(&part, whole.blocks, pool).status, 0);
    for (uint32_t lane = 0; lane < LAYOUT_N_LANES; lane++)
        assert_memory_equal(result_of(&request, results[1], lane, n_queries, 0),
                            result_of(&part, part_results[1], lane, 1, 0), N_PARTIAL * sizeof(float));
    end(&part);
    end(&request);
    pool_free(pool);
}

/* Appends, an aggregate over what was just appended, and a fetch of it, in one request. */
static void a_request_sees_its_own_appends(void **state)
{
    (void)state;
    struct request request;
    begin(&request);
    choose(3, true);
    uint32_t ids[64];
    uint32_t n_new = 64 - LAST_ROWS;
    for (uint32_t i = 0; i < n_new; i++)
        ids[i] = fixture_id(FIXTURE_SESSION, (N_BLOCKS - 1) * 64 + LAST_ROWS + i);
    uint16_t *rows = fixture_rows(&whole, FIXTURE_SESSION, (N_BLOCKS - 1) * 64 + LAST_ROWS, n_new, LAYER);
    struct append_entry append = {
        .session = FIXTURE_SESSION,
        .handle = handle_of(N_BLOCKS - 1),
        .first_token = LAST_ROWS,
        .n_tokens = n_new,
        .flags = APPEND_IDS | APPEND_ROWS,
        .ids_offset = put(&request, ids, n_new * sizeof(uint32_t)),
        .rows_offset = put(&request, rows, n_new * 2 * 2 * HEAD_DIM * 2),
    };
    free(rows);
    request.header->appends_offset = put(&request, &append, sizeof(append));
    request.header->n_appends = 1;
    uint32_t results[2];
    masks[N_BLOCKS - 1] = UINT64_MAX;
    ask(&request, 0xfff, 2, results);
    struct fetch_entry fetches[2] = {
        {.session = FIXTURE_SESSION,
         .handle = handle_of(N_BLOCKS - 1),
         .layer = LAYER,
         .kv_head = 1,
         .first_token = 30,
         .n_tokens = 34,
         .result_offset = room(&request, 34 * 4 * HEAD_DIM)},
        {.session = FIXTURE_OTHER, /* another session and layer in the same request */
         .handle = {.index = N_BLOCKS, .generation = 1},
         .layer = 2,
         .kv_head = 0,
         .first_token = 63,
         .n_tokens = 1,
         .result_offset = room(&request, 4 * HEAD_DIM)},
    };
    request.header->fetches_offset = put(&request, fetches, sizeof(fetches));
    request.header->n_fetches = 2;
    struct request_result result = serve(&request, whole.blocks, NULL);
    assert_int_equal(result.status, 0);
    assert_int_equal(result.n_bytes, request.reply_end);
    for (uint32_t lane = 0; lane < LAYOUT_N_LANES; lane++)
        expect_partial(result_of(&request, results[0], lane, 2, 1), 0, 1, lane);
    for (uint32_t i = 0; i < 34; i++) {
        uint16_t row[2 * HEAD_DIM];
        fixture_row(&whole, FIXTURE_SESSION, (N_BLOCKS - 1) * 64 + 30 + i, LAYER, 1, row);
        assert_memory_equal(request.reply + fetches[0].result_offset + i * sizeof(row), row, sizeof(row));
    }
    uint16_t row[2 * HEAD_DIM];
    fixture_row(&whole, FIXTURE_OTHER, 63, 2, 0, row);
    assert_memory_equal(request.reply + fetches[1].result_offset, row, sizeof(row));
    end(&request);
}

/* ---- malformed requests ---- */

static struct append_entry *append_at(struct request *request, uint32_t index)
{
    return (struct append_entry *)(void *)(request->bytes + request->header->appends_offset) + index;
}

static struct fetch_entry *fetch_at(struct request *request, uint32_t index)
{
    return (struct fetch_entry *)(void *)(request->bytes + request->header->fetches_offset) + index;
}

/* One of everything, all of it right (appends are of what is there already): what each case below breaks. */
static void write_good(struct request *request)
{
    uint32_t results[2], ids[2];
    begin(request);
    choose(9, false);
    masks[3] |= 1;
    ask(request, 0xfff, 2, results);
    struct append_entry appends[2];
    struct fetch_entry fetches[2];
    uint16_t *rows = fixture_rows(&whole, FIXTURE_SESSION, (N_BLOCKS - 1) * 64, 2, LAYER);
    for (uint32_t i = 0; i < 2; i++)
        ids[i] = fixture_id(FIXTURE_SESSION, (N_BLOCKS - 1) * 64 + i);
    for (uint32_t i = 0; i < 2; i++) {
        appends[i] = (struct append_entry){
            .session = FIXTURE_SESSION,
            .handle = handle_of(N_BLOCKS - 1),
            .n_tokens = 2,
            .flags = APPEND_IDS | APPEND_ROWS,
            .ids_offset = put(request, ids, sizeof(ids)),
            .rows_offset = put(request, rows, 2 * 2 * 4 * HEAD_DIM),
        };
        fetches[i] = (struct fetch_entry){
            .session = FIXTURE_SESSION,
            .handle = handle_of(i),
            .n_tokens = 64,
            .result_offset = room(request, 64 * 4 * HEAD_DIM),
        };
    }
    free(rows);
    request->header->fetches_offset = put(request, fetches, sizeof(fetches));
    request->header->n_fetches = 2;
    request->header->appends_offset = put(request, appends, sizeof(appends));
    request->header->n_appends = 2;
}

#define CASES                                                                                                          \
    X(NONE, 0, -EINVAL, r->header->magic++)                                                                            \
    X(NONE, 0, -EINVAL, r->header->request++)                                                                          \
    X(NONE, 0, -EINVAL, r->header->items_offset += 4)                                                                  \
    X(NONE, 0, -EINVAL, r->header->items_offset = 0)                                                                   \
    X(NONE, 0, -EINVAL, r->header->items_offset = UINT32_MAX - 15)                                                     \
    X(NONE, 0, -EINVAL, r->header->n_items = UINT32_MAX)                                                               \
    X(NONE, 0, -EINVAL, r->header->n_appends = 3)                                                                      \
    X(NONE, 0, -EINVAL, r->header->n_runs = 1u << 14)                                                                  \
    X(NONE, 0, -EINVAL, r->header->fetches_offset = r->header->n_bytes)                                                \
    X(APPEND, 1, -ESTALE, append_at(r, 1)->session++)                                                                  \
    X(APPEND, 1, -ESTALE, append_at(r, 1)->handle.generation++)                                                        \
    X(APPEND, 1, -ESTALE, append_at(r, 1)->handle.index = UINT32_MAX)                                                  \
    X(APPEND, 1, -EINVAL, append_at(r, 1)->flags = 0)                                                                  \
    X(APPEND, 1, -EINVAL, append_at(r, 1)->flags = 7)                                                                  \
    X(APPEND, 1, -EINVAL, append_at(r, 1)->n_tokens = 0)                                                               \
    X(APPEND, 1, -EINVAL, append_at(r, 1)->n_tokens = 65)                                                              \
    X(APPEND, 1, -EINVAL, append_at(r, 1)->n_tokens = UINT32_MAX)                                                      \
    X(APPEND, 1, -EINVAL, append_at(r, 1)->first_token = 63)                                                           \
    X(APPEND, 1, -ENODATA, append_at(r, 1)->first_token = 40)                                                          \
    X(APPEND, 1, -EEXIST, append_at(r, 1)->first_token = 1)                                                            \
    X(APPEND, 1, -EINVAL, append_at(r, 1)->ids_offset += 4)                                                            \
    X(APPEND, 1, -EINVAL, append_at(r, 1)->ids_offset = r->header->n_bytes)                                            \
    X(APPEND, 1, -EINVAL, append_at(r, 1)->rows_offset = UINT32_MAX - 15)                                              \
    X(APPEND, 0, -EINVAL, append_at(r, 0)->rows_offset += 2)                                                           \
    X(APPEND, 0, -EINVAL, r->header->layer = 3)                                                                        \
    X(AGGREGATE, 0, -EINVAL, (r->header->n_appends = 0, r->header->layer = 3))                                         \
    X(AGGREGATE, 0, -EINVAL, (r->header->n_appends = 0, r->header->layer = UINT32_MAX))                                \
    X(AGGREGATE, 0, -EINVAL, ITEM(r)[0].kv_head = 2)                                                                   \
    X(AGGREGATE, 1, -EINVAL, ITEM(r)[1].kv_head = UINT32_MAX)                                                          \
    X(AGGREGATE, 1, -EINVAL, ITEM(r)[1].mode = 2)                                                                      \
    X(AGGREGATE, 1, -EINVAL, ITEM(r)[1].n_queries = 0)                                                                 \
    X(AGGREGATE, 1, -EINVAL, ITEM(r)[1].n_queries = UINT32_MAX)                                                        \
    X(AGGREGATE, 1, -EINVAL, ITEM(r)[1].q_offset += 8)                                                                 \
    X(AGGREGATE, 1, -EINVAL, ITEM(r)[1].q_offset = r->header->n_bytes / 16 * 16)                                       \
    X(AGGREGATE, 1, -EINVAL, ITEM(r)[1].first_run = 1)                                                                 \
    X(AGGREGATE, 1, -EINVAL, ITEM(r)[1].first_run = UINT32_MAX)                                                        \
    X(AGGREGATE, 1, -EINVAL, ITEM(r)[1].n_runs = 0)                                                                    \
    X(AGGREGATE, 1, -EINVAL, ITEM(r)[1].n_runs = UINT32_MAX)                                                           \
    X(AGGREGATE, 1, -EINVAL, ITEM(r)[1].n_runs -= 2)                                                                   \
    X(AGGREGATE, 1, -EINVAL, ITEM(r)[1].lanes = 0x7ff)                                                                 \
    X(AGGREGATE, 1, -EINVAL, ITEM(r)[1].lanes = 0x1fff)                                                                \
    X(AGGREGATE, 1, -EINVAL, ITEM(r)[1].lanes = 0)                                                                     \
    X(AGGREGATE, 1, -EINVAL, ITEM(r)[1].scale = NAN)                                                                   \
    X(AGGREGATE, 1, -EINVAL, ITEM(r)[1].scale = INFINITY)                                                              \
    X(AGGREGATE, 1, -EINVAL, ITEM(r)[1].result_offset = 0)                                                             \
    X(AGGREGATE, 1, -EINVAL, ITEM(r)[1].result_offset += 4)                                                            \
    X(AGGREGATE, 1, -EINVAL, ITEM(r)[1].result_offset = AREA - 16)                                                     \
    X(AGGREGATE, 1, -EINVAL, ITEM(r)[1].result_offset = UINT32_MAX - 15)                                               \
    X(AGGREGATE, 1, -ESTALE, ITEM(r)[1].session = FIXTURE_OTHER)                                                       \
    X(AGGREGATE, 1, -ESTALE, ITEM(r)[1].session = 0)                                                                   \
    X(AGGREGATE, 0, -ESTALE, ITEM(r)[0].session++)                                                                     \
    X(AGGREGATE, 0, -ESTALE, RUN(r)[4].handle.generation++)                                                            \
    X(AGGREGATE, 0, -ESTALE, RUN(r)[4].handle.generation = 0)                                                          \
    X(AGGREGATE, 0, -ESTALE, RUN(r)[4].handle.index = N_BLOCKS + 1)                                                    \
    X(AGGREGATE, 0, -ESTALE, RUN(r)[4].handle = ((struct block_handle){N_BLOCKS, 1}))                                  \
    X(AGGREGATE, 0, -EINVAL, RUN(r)[1] = RUN(r)[0])                                                                    \
    X(AGGREGATE, 0, -EINVAL, RUN(r)[1].handle = handle_of(1))                                                          \
    X(AGGREGATE, 0, -EINVAL, (RUN(r)[0].handle = handle_of(12), RUN(r)[1].handle = handle_of(0)))                      \
    X(AGGREGATE, 0, -EINVAL, (RUN(r)[0].handle = handle_of(1)))                                                        \
    X(AGGREGATE, 0, -ENODATA, last_run(r)->mask = UINT64_C(1) << LAST_ROWS)                                            \
    X(AGGREGATE, 0, -ENODATA, last_run(r)->mask |= UINT64_C(1) << 63)                                                  \
    X(FETCH, 1, -EINVAL, fetch_at(r, 1)->layer = 3)                                                                    \
    X(FETCH, 1, -EINVAL, fetch_at(r, 1)->kv_head = 2)                                                                  \
    X(FETCH, 1, -EINVAL, fetch_at(r, 1)->n_tokens = 0)                                                                 \
    X(FETCH, 1, -EINVAL, fetch_at(r, 1)->n_tokens = 65)                                                                \
    X(FETCH, 1, -EINVAL, fetch_at(r, 1)->n_tokens = UINT32_MAX)                                                        \
    X(FETCH, 1, -EINVAL, fetch_at(r, 1)->first_token = 1)                                                              \
    X(FETCH, 1, -EINVAL, fetch_at(r, 1)->first_token = UINT32_MAX)                                                     \
    X(FETCH, 1, -EINVAL, fetch_at(r, 1)->result_offset = 48)                                                           \
    X(FETCH, 1, -EINVAL, fetch_at(r, 1)->result_offset += 2)                                                           \
    X(FETCH, 1, -EINVAL, fetch_at(r, 1)->result_offset = AREA)                                                         \
    X(FETCH, 1, -ESTALE, fetch_at(r, 1)->session = FIXTURE_OTHER)                                                      \
    X(FETCH, 1, -ESTALE, fetch_at(r, 1)->handle.generation++)                                                          \
    X(FETCH, 1, -ENODATA, fetch_at(r, 1)->handle = handle_of(N_BLOCKS - 1))

static struct mask_run *last_run(struct request *r)
{
    for (uint32_t i = 0;; i++) {
        if (RUN(r)[i].handle.index == handle_of(N_BLOCKS - 1).index)
            return &RUN(r)[i];
    }
}

static void malformed_requests_are_refused(void **state)
{
    (void)state;
    struct request request, *r = &request;
    uint8_t *before = malloc(whole.plan.n_bytes);
    assert_non_null(before);
    memcpy(before, whole.segment, whole.plan.n_bytes);
    write_good(r);
    struct request_result result = serve(r, whole.blocks, NULL);
    assert_int_equal(result.status, 0);
    end(r);
#define X(kind, index, wanted, change)                                                                                 \
    write_good(r);                                                                                                     \
    change;                                                                                                            \
    result = serve(r, whole.blocks, NULL);                                                                             \
    if (result.status != (wanted) || result.entry != REPLY_ENTRY(REPLY_ENTRY_##kind, index))                           \
        fail_msg("%s: status %d, entry %x", #change, result.status, result.entry);                                     \
    assert_int_equal(result.n_bytes, sizeof(struct reply_header));                                                     \
    end(r);
    CASES
#undef X
    assert_memory_equal(before, whole.segment, whole.plan.n_bytes);
    free(before);
}

/* What the descriptor says of the size must be what the request says, and lie in the slot. */
static void sizes_are_checked(void **state)
{
    (void)state;
    struct request request;
    struct request_result result;
    struct aggregate *aggregate;
    write_good(&request);
    assert_int_equal(aggregate_new(whole.kernels, NULL, NULL, &aggregate), 0);
    const uint32_t sizes[] = {0, 63, request.header->n_bytes - 1, request.header->n_bytes + 1, AREA + 1, UINT32_MAX};
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        struct request_slot slot = {
            .request = REQUEST_ID,
            .n_bytes = sizes[i],
            .request_area = request.bytes,
            .request_bytes = AREA,
            .reply_area = request.reply,
            .reply_bytes = AREA,
        };
        if (sizes[i] == AREA + 1)
            request.header->n_bytes = AREA + 1;
        request_serve(whole.blocks, aggregate, &slot, &result);
        assert_int_equal(result.status, -EINVAL);
        assert_int_equal(result.entry, 0);
    }
    aggregate_free(aggregate);
    end(&request);
}

/* Random changes: any answer is right as long as nothing outside the areas is touched (sanitizers) and blocks stay sound. */
static void random_changes_do_no_harm(void **state)
{
    (void)state;
    uint32_t n_refused = 0, n_rounds = 3000;
    for (uint32_t round = 0; round < n_rounds; round++) {
        struct request request;
        char text[BLOCKS_CHECK_TEXT];
        write_good(&request);
        srand(round);
        for (int change = rand() % 3; change >= 0; change--) {
            uint32_t words = request.header->n_bytes / 4;
            uint32_t value = rand() % 2 ? (uint32_t)rand() * 3 : (uint32_t)rand() % 70;
            words = words > AREA / 4 ? AREA / 4 : words;
            memcpy(request.bytes + 4 * ((uint32_t)rand() % words), &value, sizeof(value));
        }
        n_refused += serve(&request, whole.blocks, NULL).status != 0;
        assert_int_equal(blocks_check(whole.blocks, text), 0);
        end(&request);
    }
    assert_true(n_refused > n_rounds / 10 && n_refused < n_rounds);
}

int main(void)
{
    kernels_thread_setup();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(partials_are_softmax_sums, set_up, tear_down),
        cmocka_unit_test_setup_teardown(spreading_does_not_change_a_bit, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_request_sees_its_own_appends, set_up, tear_down),
        cmocka_unit_test_setup_teardown(malformed_requests_are_refused, set_up, tear_down),
        cmocka_unit_test_setup_teardown(sizes_are_checked, set_up, tear_down),
        cmocka_unit_test_setup_teardown(random_changes_do_no_harm, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
