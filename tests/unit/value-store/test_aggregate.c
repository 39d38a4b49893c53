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

/* The softmax of one query over the selected tokens of one lane, in double and without tricks. */
static void expect_partial(const float *partial, uint32_t head, uint32_t query, uint32_t lane)
{
    double scores[N_BLOCKS * 64], values[N_BLOCKS * 64][HEAD_DIM], max = -INFINITY;
    uint32_t n = 0;
    for (uint32_t number = lane; number < N_BLOCKS; number += LAYOUT_N_LANES) {
        for (uint32_t token = 0; token < 64; token++) {
            uint16_t row[2 * HEAD_DIM];
            float kv[2 * HEAD_DIM];
            if (!(requests_masks[number] >> token & 1))
                continue;
            fixture_row(&requests_whole, FIXTURE_SESSION, number * 64 + token, LAYER, head, row);
            requests_whole.kernels->f16_decode(row, 2 * HEAD_DIM, kv);
            scores[n] = 0;
            for (uint32_t i = 0; i < HEAD_DIM; i++) {
                scores[n] += (double)requests_queries[head][query][i] * (double)kv[i];
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
        requests_begin(&request);
        requests_choose(round + 1, round == 4);
        requests_ask(&request, 0xfff, query_counts[round], results);
        struct request_result result = requests_serve(&request, requests_whole.blocks, NULL);
        assert_int_equal(result.status, 0);
        assert_int_equal(result.n_bytes, request.reply_end);
        for (uint32_t number = 0; number < N_BLOCKS; number++)
            n_rows += 2 * (uint64_t)__builtin_popcountll(requests_masks[number]);
        assert_int_equal(result.n_rows_read, n_rows);
        for (uint32_t head = 0; head < 2; head++) {
            for (uint32_t lane = 0; lane < LAYOUT_N_LANES; lane++) {
                for (uint32_t query = 0; query < query_counts[round]; query++)
                    expect_partial(result_of(&request, results[head], lane, query_counts[round], query), head, query,
                                   lane);
            }
        }
        requests_end(&request);
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
    requests_choose(42, false);
    requests_begin(&request);
    requests_ask(&request, 0xfff, n_queries, results);
    assert_int_equal(requests_serve(&request, requests_whole.blocks, NULL).status, 0);

    for (size_t split = 0; split < sizeof(splits) / sizeof(splits[0]); split++) {
        for (size_t store = 0; store < 3 && splits[split][store]; store++) {
            struct fixture fixture;
            uint32_t lanes = splits[split][store];
            requests_fill(&fixture, lanes);
            requests_begin(&part);
            requests_ask(&part, lanes, n_queries, part_results);
            assert_int_equal(requests_serve(&part, fixture.blocks, pool).status, 0);
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
            requests_end(&part);
            fixture_close(&fixture);
        }
    }

    requests_begin(&part);
    requests_ask(&part, 0xfff, 1, part_results);
    assert_int_equal(requests_serve(&part, requests_whole.blocks, pool).status, 0);
    for (uint32_t lane = 0; lane < LAYOUT_N_LANES; lane++)
        assert_memory_equal(result_of(&request, results[1], lane, n_queries, 0),
                            result_of(&part, part_results[1], lane, 1, 0), N_PARTIAL * sizeof(float));
    requests_end(&part);
    requests_end(&request);
    pool_free(pool);
}

/* Appends, an aggregate over what was just appended, and a fetch of it, in one request. */
static void a_request_sees_its_own_appends(void **state)
{
    (void)state;
    struct request request;
    requests_begin(&request);
    requests_choose(3, true);
    uint32_t ids[64];
    uint32_t n_new = 64 - LAST_ROWS;
    for (uint32_t i = 0; i < n_new; i++)
        ids[i] = fixture_id(FIXTURE_SESSION, (N_BLOCKS - 1) * 64 + LAST_ROWS + i);
    uint16_t *rows = fixture_rows(&requests_whole, FIXTURE_SESSION, (N_BLOCKS - 1) * 64 + LAST_ROWS, n_new, LAYER);
    struct append_entry append = {
        .session = FIXTURE_SESSION,
        .handle = requests_handle(N_BLOCKS - 1),
        .first_token = LAST_ROWS,
        .n_tokens = n_new,
        .flags = APPEND_IDS | APPEND_ROWS,
        .ids_offset = requests_put(&request, ids, n_new * sizeof(uint32_t)),
        .rows_offset = requests_put(&request, rows, n_new * 2 * 2 * HEAD_DIM * 2),
    };
    free(rows);
    request.header->appends_offset = requests_put(&request, &append, sizeof(append));
    request.header->n_appends = 1;
    uint32_t results[2];
    requests_masks[N_BLOCKS - 1] = UINT64_MAX;
    requests_ask(&request, 0xfff, 2, results);
    struct fetch_entry fetches[2] = {
        {.session = FIXTURE_SESSION,
         .handle = requests_handle(N_BLOCKS - 1),
         .layer = LAYER,
         .kv_head = 1,
         .first_token = 30,
         .n_tokens = 34,
         .result_offset = requests_room(&request, 34 * 4 * HEAD_DIM)},
        {.session = FIXTURE_OTHER, /* another session and layer in the same request */
         .handle = {.index = N_BLOCKS, .generation = 1},
         .layer = 2,
         .kv_head = 0,
         .first_token = 63,
         .n_tokens = 1,
         .result_offset = requests_room(&request, 4 * HEAD_DIM)},
    };
    request.header->fetches_offset = requests_put(&request, fetches, sizeof(fetches));
    request.header->n_fetches = 2;
    struct request_result result = requests_serve(&request, requests_whole.blocks, NULL);
    assert_int_equal(result.status, 0);
    assert_int_equal(result.n_bytes, request.reply_end);
    for (uint32_t lane = 0; lane < LAYOUT_N_LANES; lane++)
        expect_partial(result_of(&request, results[0], lane, 2, 1), 0, 1, lane);
    for (uint32_t i = 0; i < 34; i++) {
        uint16_t row[2 * HEAD_DIM];
        fixture_row(&requests_whole, FIXTURE_SESSION, (N_BLOCKS - 1) * 64 + 30 + i, LAYER, 1, row);
        assert_memory_equal(request.reply + fetches[0].result_offset + i * sizeof(row), row, sizeof(row));
    }
    uint16_t row[2 * HEAD_DIM];
    fixture_row(&requests_whole, FIXTURE_OTHER, 63, 2, 0, row);
    assert_memory_equal(request.reply + fetches[1].result_offset, row, sizeof(row));
    requests_end(&request);
}

int main(void)
{
    kernels_thread_setup();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(partials_are_softmax_sums, requests_set_up, requests_tear_down),
        cmocka_unit_test_setup_teardown(spreading_does_not_change_a_bit, requests_set_up, requests_tear_down),
        cmocka_unit_test_setup_teardown(a_request_sees_its_own_appends, requests_set_up, requests_tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
