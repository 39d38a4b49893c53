/*
 * test_aggregate.c - sums over selected rows against a softmax in double, and the same bits however the work is spread.
 */
#include "tests/unit/value-store/requests.h"

#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static const float *result_of(const struct request *request, uint32_t offset, uint32_t lane_rank, uint32_t n_queries,
                              uint32_t query)
{
    const float *results = (const float *)(const void *)(request->reply + offset);
    return results + ((size_t)lane_rank * n_queries + query) * N_PARTIAL;
}

/* ---- against double precision, without tricks ---- */

struct sum {
    double largest, weight, out[HEAD_DIM];
};

static void add(struct sum *sum, double score, double weight, const double *value)
{
    if (score > sum->largest) {
        double factor = exp(sum->largest - score);
        sum->weight *= factor;
        for (uint32_t i = 0; i < HEAD_DIM; i++)
            sum->out[i] *= factor;
        sum->largest = score;
    }
    double factor = weight * exp(score - sum->largest);
    sum->weight += factor;
    for (uint32_t i = 0; i < HEAD_DIM; i++)
        sum->out[i] += factor * value[i];
}

static void read_token(uint32_t head, uint32_t number, uint32_t token, double *ret_k, double *ret_v)
{
    uint8_t row[FIXTURE_ROW];
    float kv[2 * HEAD_DIM];
    fixture_row(&requests_whole, FIXTURE_SESSION, number * 64 + token, LAYER, head, row);
    fixture_decode(&requests_whole.shape, row, kv);
    for (uint32_t i = 0; i < HEAD_DIM; i++) {
        ret_k[i] = (double)kv[i];
        ret_v[i] = (double)kv[HEAD_DIM + i];
    }
}

static void mean_value(uint32_t head, uint32_t number, double *ret_mean)
{
    double k[HEAD_DIM], v[HEAD_DIM];
    memset(ret_mean, 0, HEAD_DIM * sizeof(double));
    for (uint32_t token = 0; token < 64; token++) {
        read_token(head, number, token, k, v);
        for (uint32_t i = 0; i < HEAD_DIM; i++)
            ret_mean[i] += v[i] / 64;
    }
}

/* What a lane's partial stands for: sum of weights and weighted values, relative to its largest score. */
static struct sum expected(const struct asked *asked, uint32_t head, uint32_t query, uint32_t lane)
{
    struct sum sum = {.largest = -INFINITY};
    double k[HEAD_DIM], v[HEAD_DIM];
    double reference = (double)requests_references[head][query];
    for (uint32_t number = lane; number < N_BLOCKS; number += LAYOUT_N_LANES) {
        for (uint32_t token = 0; token < 64; token++) {
            if (!(requests_masks[head][number] >> token & 1))
                continue;
            read_token(head, number, token, k, v);
            double score = 0;
            for (uint32_t i = 0; i < HEAD_DIM; i++)
                score += (double)requests_queries[head][query][i] * k[i] * (double)0.15f;
            if (asked->mode == AGGREGATE_RESCORE)
                add(&sum, score, 1, v);
            else
                add(&sum, reference, (double)requests_weight(head, query, number, token), v);
        }
        double mass = (double)requests_masses[head][query][number];
        if (asked->tail && mass != 0) {
            mean_value(head, number, v);
            add(&sum, reference, mass, v);
        }
    }
    return sum;
}

static void expect_partial(const struct asked *asked, const float *partial, uint32_t head, uint32_t query,
                           uint32_t lane)
{
    struct sum sum = expected(asked, head, query, lane);
    if (sum.weight == 0) {
        assert_true(partial[0] == -INFINITY && partial[1] == 0.0f && partial[2] == 0.0f);
        return;
    }
    double factor = exp((double)partial[0] - sum.largest); /* any maximum will do */
    assert_true(factor > 1e-6 && factor < 1e6);
    if (!(fabs((double)partial[1] * factor - sum.weight) < 2e-4 * sum.weight))
        fail_msg("head %u, query %u, lane %u: weight %g, expected %g", head, query, lane, (double)partial[1] * factor,
                 sum.weight);
    for (uint32_t i = 0; i < HEAD_DIM; i++)
        assert_true(fabs((double)partial[2 + i] * factor - sum.out[i]) < 2e-4 * sum.weight);
}

static void ask_and_compare(const struct asked *asked, const uint32_t *queries, uint32_t n_queries)
{
    struct request request;
    uint32_t results[2];
    uint64_t n_rows = 0;
    requests_begin(&request);
    requests_ask(&request, asked, results);
    struct request_result result = requests_serve(&request, requests_whole.blocks, NULL);
    assert_int_equal(result.status, 0);
    assert_int_equal(result.n_bytes, request.reply_end);
    for (uint32_t i = 0; i < 2 * N_BLOCKS; i++)
        n_rows += (uint64_t)__builtin_popcountll((&requests_masks[0][0])[i]);
    assert_int_equal(result.n_rows_read, n_rows);
    for (uint32_t head = 0; head < 2; head++) {
        for (uint32_t lane = 0; lane < LAYOUT_N_LANES; lane++) {
            for (uint32_t i = 0; i < n_queries; i++)
                expect_partial(asked, result_of(&request, results[head], lane, asked->n_queries, queries[i]), head,
                               queries[i], lane);
        }
    }
    requests_end(&request);
}

static void partials_are_sums(void **state)
{
    (void)state;
    static const struct asked rounds[] = {
        {0xfff, 1, AGGREGATE_RESCORE, false},    {0xfff, 3, AGGREGATE_RESCORE, true},
        {0xfff, 32, AGGREGATE_RESCORE, false},   {0xfff, 33, AGGREGATE_RESCORE, true},
        {0xfff, MAX_Q, AGGREGATE_RESCORE, true}, {0xfff, 1, AGGREGATE_WEIGHTS, false},
        {0xfff, 3, AGGREGATE_WEIGHTS, true},     {0xfff, 7, AGGREGATE_WEIGHTS, true},
    };
    for (uint32_t round = 0; round < sizeof(rounds) / sizeof(rounds[0]); round++) {
        const uint32_t queries[] = {0, rounds[round].n_queries / 2, rounds[round].n_queries - 1};
        requests_choose(round + 1, round == 4 || round == 6);
        ask_and_compare(&rounds[round], queries, 3);
    }
}

/* Lanes with nothing selected, with no mass, with neither; a mode of which nothing is selected at all. */
static void empty_lanes_are_empty(void **state)
{
    (void)state;
    static const struct asked rounds[] = {
        {0xfff, 2, AGGREGATE_RESCORE, true},
        {0xfff, 2, AGGREGATE_RESCORE, false},
        {0xfff, 2, AGGREGATE_WEIGHTS, true},
        {0xfff, 2, AGGREGATE_WEIGHTS, false},
    };
    const uint32_t queries[] = {0, 1};
    for (uint32_t round = 0; round < 8; round++) {
        requests_choose(round + 100, false);
        for (uint32_t head = 0; head < 2; head++) {
            for (uint32_t number = 0; number < N_BLOCKS; number++) {
                uint32_t lane = number % LAYOUT_N_LANES;
                if (lane % 2 == 0 || round >= 4)
                    requests_masks[head][number] = 0;
                if (lane % 3 == 0)
                    requests_masses[head][0][number] = requests_masses[head][1][number] = 0;
            }
        }
        ask_and_compare(&rounds[round % 4], queries, 2);
    }
}

/* ---- the same bits ---- */

static const struct asked kinds[] = {
    {0xfff, 35, AGGREGATE_RESCORE, true},
    {0xfff, 5, AGGREGATE_WEIGHTS, true},
    {0xfff, 35, AGGREGATE_RESCORE, false},
};

/* One store or several that share the lanes in any way, one thread or four, queries together or alone: the same bits. */
static void spreading_does_not_change_a_bit(void **state)
{
    (void)state;
    static const uint32_t splits[][3] = {
        {0x555, 0xaaa, 0}, {0xaaa, 0x555, 0}, {0x00f, 0x0f0, 0xf00}, {0x800, 0x7fe, 1}};
    const enum row_codec codec = (enum row_codec)requests_whole.shape.codec;
    struct pool *pool;
    struct request request, part;
    uint32_t results[2], part_results[2];
    assert_int_equal(pool_new(4, NULL, NULL, &pool), 0);
    for (size_t kind = 0; kind < sizeof(kinds) / sizeof(kinds[0]); kind++) {
        struct asked asked = kinds[kind];
        requests_choose(42 + (uint32_t)kind, false);
        requests_begin(&request);
        requests_ask(&request, &asked, results);
        assert_int_equal(requests_serve(&request, requests_whole.blocks, NULL).status, 0);

        for (size_t split = 0; split < sizeof(splits) / sizeof(splits[0]); split++) {
            for (size_t store = 0; store < 3 && splits[split][store]; store++) {
                struct fixture fixture;
                asked.lanes = splits[split][store];
                requests_fill(&fixture, codec, asked.lanes);
                requests_begin(&part);
                requests_ask(&part, &asked, part_results);
                assert_int_equal(requests_serve(&part, fixture.blocks, pool).status, 0);
                for (uint32_t head = 0; head < 2; head++) {
                    uint32_t rank = 0;
                    for (uint32_t lane = 0; lane < LAYOUT_N_LANES; lane++) {
                        if (!(asked.lanes >> lane & 1))
                            continue;
                        assert_memory_equal(result_of(&request, results[head], lane, asked.n_queries, 0),
                                            result_of(&part, part_results[head], rank++, asked.n_queries, 0),
                                            asked.n_queries * N_PARTIAL * sizeof(float));
                    }
                }
                requests_end(&part);
                fixture_close(&fixture);
            }
        }

        asked = (struct asked){0xfff, 1, asked.mode, asked.tail};
        requests_begin(&part);
        requests_ask(&part, &asked, part_results);
        assert_int_equal(requests_serve(&part, requests_whole.blocks, pool).status, 0);
        for (uint32_t lane = 0; lane < LAYOUT_N_LANES; lane++)
            assert_memory_equal(result_of(&request, results[1], lane, kinds[kind].n_queries, 0),
                                result_of(&part, part_results[1], lane, 1, 0), N_PARTIAL * sizeof(float));
        requests_end(&part);
        requests_end(&request);
    }
    pool_free(pool);
}

/* Items of two sessions in one request, and of one session with different parts of the table. */
static void sessions_do_not_mix(void **state)
{
    (void)state;
    const struct asked asked = {0xfff, 2, AGGREGATE_RESCORE, true};
    struct request request, alone;
    uint32_t results[2];
    requests_choose(11, false);
    requests_begin(&alone);
    requests_ask(&alone, &asked, results);
    assert_int_equal(requests_serve(&alone, requests_whole.blocks, NULL).status, 0);

    requests_begin(&request);
    requests_ask(&request, &asked, results);
    struct aggregate_item items[4] = {ITEM(&request)[0], {0}, ITEM(&request)[1], ITEM(&request)[1]};
    struct block_handle handles[N_BLOCKS + 1];
    memcpy(handles, BLOCK(&request), sizeof(handles[0]) * N_BLOCKS);
    handles[N_BLOCKS] = (struct block_handle){.index = N_BLOCKS, .generation = 1};
    const uint64_t other_mask = 0x123456789abcdef0u;
    items[1] = (struct aggregate_item){
        .session = FIXTURE_OTHER,
        .mode = AGGREGATE_RESCORE,
        .n_queries = 2,
        .q_offset = items[0].q_offset,
        .first_block = N_BLOCKS,
        .n_blocks = 1,
        .lanes = 1,
        .masks_offset = requests_put(&request, &other_mask, sizeof(other_mask)),
        .scale = 0.15f,
        .result_offset = requests_room(&request, 2 * N_PARTIAL * sizeof(float)),
    };
    /* Lane 1 alone: numbers 1, 13, 25 lie behind those of lane 0. */
    items[3].first_block = 3;
    items[3].n_blocks = 3;
    items[3].lanes = 2;
    items[3].masks_offset = requests_put(&request, &MASKS(&request, 1)[3], 3 * sizeof(uint64_t));
    items[3].masses_offset = 0;
    items[3].result_offset = requests_room(&request, 2 * N_PARTIAL * sizeof(float));
    request.header->blocks_offset = requests_put(&request, handles, sizeof(handles));
    request.header->n_blocks = N_BLOCKS + 1;
    request.header->items_offset = requests_put(&request, items, sizeof(items));
    request.header->n_items = 4;
    assert_int_equal(requests_serve(&request, requests_whole.blocks, NULL).status, 0);
    for (uint32_t head = 0; head < 2; head++)
        assert_memory_equal(result_of(&request, results[head], 0, 2, 0), result_of(&alone, results[head], 0, 2, 0),
                            LAYOUT_N_LANES * 2 * N_PARTIAL * sizeof(float));
    const struct asked no_tail = {0xfff, 2, AGGREGATE_RESCORE, false};
    for (uint32_t query = 0; query < 2; query++)
        expect_partial(&no_tail, result_of(&request, items[3].result_offset, 0, 2, query), 1, query, 1);
    struct sum sum = {.largest = -INFINITY};
    for (uint32_t token = 0; token < 64; token++) {
        uint8_t row[FIXTURE_ROW];
        float kv[2 * HEAD_DIM];
        double v[HEAD_DIM], score = 0;
        if (!(other_mask >> token & 1))
            continue;
        fixture_row(&requests_whole, FIXTURE_OTHER, token, LAYER, 0, row);
        fixture_decode(&requests_whole.shape, row, kv);
        for (uint32_t i = 0; i < HEAD_DIM; i++) {
            score += (double)requests_queries[0][1][i] * (double)kv[i] * (double)0.15f;
            v[i] = (double)kv[HEAD_DIM + i];
        }
        add(&sum, score, 1, v);
    }
    const float *partial = result_of(&request, items[1].result_offset, 0, 2, 1);
    double factor = exp((double)partial[0] - sum.largest);
    assert_true(fabs((double)partial[1] * factor - sum.weight) < 2e-4 * sum.weight);
    assert_true(fabs((double)partial[5] * factor - sum.out[3]) < 2e-4 * sum.weight);
    requests_end(&request);
    requests_end(&alone);
}

/* NaN and infinity in masses, weights, references and queries of one item: the request is served, the other item is right. */
static void strange_numbers_stay_in_their_item(void **state)
{
    (void)state;
    static const float strange[] = {NAN, INFINITY, -INFINITY, 3e38f, -3e38f, 1e-45f, -1};
    for (uint32_t round = 0; round < 2 * 7 * 4; round++) {
        struct asked asked = {0xfff, 3, round % 2 ? AGGREGATE_RESCORE : AGGREGATE_WEIGHTS, true};
        float number = strange[round / 2 % 7];
        struct request request;
        uint32_t results[2];
        requests_choose(round, false);
        requests_begin(&request);
        requests_ask(&request, &asked, results);
        struct aggregate_item *item = &ITEM(&request)[0];
        const uint32_t offsets[] = {item->masses_offset, item->references_offset,
                                    item->q_offset ? item->q_offset : item->masses_offset,
                                    item->weights_offset ? item->weights_offset : item->references_offset};
        memcpy(request.bytes + offsets[round / 14], &number, sizeof(number));
        assert_int_equal(requests_serve(&request, requests_whole.blocks, NULL).status, 0);
        for (uint32_t lane = 0; lane < LAYOUT_N_LANES; lane++)
            expect_partial(&asked, result_of(&request, results[1], lane, 3, round % 3), 1, round % 3, lane);
        requests_end(&request);
    }
}

/* Appends, an aggregate over what was just appended, and a fetch of it, in one request. */
static void a_request_sees_its_own_appends(void **state)
{
    (void)state;
    struct request request;
    requests_begin(&request);
    requests_choose(3, true);
    const struct asked asked = {0xfff, 2, AGGREGATE_RESCORE, true};
    const size_t row_bytes = layout_row_bytes(&requests_whole.shape);
    uint32_t ids[64];
    uint32_t n_new = 64 - LAST_ROWS;
    for (uint32_t i = 0; i < n_new; i++)
        ids[i] = fixture_id(FIXTURE_SESSION, (N_BLOCKS - 1) * 64 + LAST_ROWS + i);
    void *rows = fixture_rows(&requests_whole, FIXTURE_SESSION, (N_BLOCKS - 1) * 64 + LAST_ROWS, n_new, LAYER);
    struct append_entry append = {
        .session = FIXTURE_SESSION,
        .handle = requests_handle(N_BLOCKS - 1),
        .layer = LAYER,
        .first_token = LAST_ROWS,
        .n_tokens = n_new,
        .flags = APPEND_IDS | APPEND_ROWS,
        .ids_offset = requests_put(&request, ids, n_new * sizeof(uint32_t)),
        .rows_offset = requests_put(&request, rows, n_new * 2 * row_bytes),
    };
    free(rows);
    request.header->appends_offset = requests_put(&request, &append, sizeof(append));
    request.header->n_appends = 1;
    uint32_t results[2];
    for (uint32_t head = 0; head < 2; head++) {
        requests_masks[head][N_BLOCKS - 1] = UINT64_MAX;
        requests_masses[head][1][N_BLOCKS - 1] = 0.5f; /* its sums are there with its last row */
    }
    requests_ask(&request, &asked, results);
    struct fetch_entry fetches[2] = {
        {.session = FIXTURE_SESSION,
         .handle = requests_handle(N_BLOCKS - 1),
         .layer = LAYER,
         .kv_head = 1,
         .first_token = 30,
         .n_tokens = 34,
         .result_offset = requests_room(&request, 34 * row_bytes)},
        {.session = FIXTURE_OTHER, /* another session and layer in the same request */
         .handle = {.index = N_BLOCKS, .generation = 1},
         .layer = 2,
         .kv_head = 0,
         .first_token = 63,
         .n_tokens = 1,
         .result_offset = requests_room(&request, row_bytes)},
    };
    request.header->fetches_offset = requests_put(&request, fetches, sizeof(fetches));
    request.header->n_fetches = 2;
    struct request_result result = requests_serve(&request, requests_whole.blocks, NULL);
    assert_int_equal(result.status, 0);
    assert_int_equal(result.n_bytes, request.reply_end);
    for (uint32_t lane = 0; lane < LAYOUT_N_LANES; lane++)
        expect_partial(&asked, result_of(&request, results[0], lane, 2, 1), 0, 1, lane);
    for (uint32_t i = 0; i < 34; i++) {
        uint8_t row[FIXTURE_ROW];
        fixture_row(&requests_whole, FIXTURE_SESSION, (N_BLOCKS - 1) * 64 + 30 + i, LAYER, 1, row);
        assert_memory_equal(request.reply + fetches[0].result_offset + i * row_bytes, row, row_bytes);
    }
    uint8_t row[FIXTURE_ROW];
    fixture_row(&requests_whole, FIXTURE_OTHER, 63, 2, 0, row);
    assert_memory_equal(request.reply + fetches[1].result_offset, row, row_bytes);
    requests_end(&request);
}

/* A prefill's request: new tokens of all layers, entries in any order as long as the ids come first. */
static void a_request_carries_layers(void **state)
{
    (void)state;
    static const uint32_t orders[][3] = {{0, 1, 2}, {2, 0, 1}, {1, 2, 0}};
    for (uint32_t round = 0; round < 3; round++) {
        struct fixture fixture;
        struct request request;
        struct append_entry entries[6];
        uint32_t ids[64];
        struct block_handle handle = {.index = N_BLOCKS, .generation = 9};
        requests_fill(&fixture, (enum row_codec)requests_whole.shape.codec, 1);
        blocks_release(fixture.blocks, FIXTURE_OTHER, 0, 0);
        fixture_session(fixture.blocks, FIXTURE_OTHER);
        fixture_reserve(fixture.blocks, FIXTURE_OTHER, handle.index, handle.generation, 0);
        requests_begin(&request);
        for (uint32_t i = 0; i < 64; i++)
            ids[i] = fixture_id(FIXTURE_OTHER, i);
        for (uint32_t i = 0; i < 6; i++) { /* 40 tokens of each layer, then 24 */
            uint32_t first = i < 3 ? 0 : 40, n = i < 3 ? 40 : 24, layer = orders[round][i % 3];
            void *rows = fixture_rows(&fixture, FIXTURE_OTHER, first, n, layer);
            entries[i] = (struct append_entry){
                .session = FIXTURE_OTHER,
                .handle = handle,
                .layer = layer,
                .first_token = first,
                .n_tokens = n,
                .flags = i % 3 == 0 ? APPEND_IDS | APPEND_ROWS : APPEND_ROWS,
                .ids_offset = requests_put(&request, ids + first, n * sizeof(ids[0])),
                .rows_offset = requests_put(&request, rows, n * 2 * layout_row_bytes(&fixture.shape)),
            };
            free(rows);
        }
        request.header->layer = UINT32_MAX; /* of items: there are none */
        request.header->appends_offset = requests_put(&request, entries, sizeof(entries));
        request.header->n_appends = 6;
        assert_int_equal(requests_serve(&request, fixture.blocks, NULL).status, 0);
        assert_true(fixture_block_is_right(&fixture, fixture.blocks, FIXTURE_OTHER, handle));
        assert_int_equal(blocks_verify(fixture.blocks, handle.index), 0); /* sealed */
        requests_end(&request);
        fixture_close(&fixture);
    }
}

int main(void)
{
    kernels_thread_setup();
#define TEST(name)                                                                                                     \
    {#name " (f16)", name, requests_set_up_f16, requests_tear_down, NULL},                                             \
    {                                                                                                                  \
#name " (q8_0)", name, requests_set_up_q8_0, requests_tear_down, NULL                                          \
    }
    const struct CMUnitTest tests[] = {
        TEST(partials_are_sums),
        TEST(empty_lanes_are_empty),
        TEST(spreading_does_not_change_a_bit),
        TEST(sessions_do_not_mix),
        TEST(strange_numbers_stay_in_their_item),
        TEST(a_request_sees_its_own_appends),
        TEST(a_request_carries_layers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
