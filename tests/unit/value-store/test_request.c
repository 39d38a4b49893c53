/*
 * test_request.c - every kind of malformed request is refused with the entry that is wrong; random ones do no harm.
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

#ifdef HCATTN_SANITIZED
#define N_ROUNDS 1500u
#else
#define N_ROUNDS 6000u
#endif

static struct append_entry *append_at(struct request *request, uint32_t index)
{
    return (struct append_entry *)(void *)(request->bytes + request->header->appends_offset) + index;
}

static struct fetch_entry *fetch_at(struct request *request, uint32_t index)
{
    return (struct fetch_entry *)(void *)(request->bytes + request->header->fetches_offset) + index;
}

/* One of everything, all of it right (appends are of what is there already): what each case below breaks. */
static void write_good(struct request *request, enum aggregate_mode mode)
{
    const struct asked asked = {0xfff, 2, mode, true};
    const size_t row_bytes = layout_row_bytes(&requests_whole.shape);
    uint32_t results[2], ids[2];
    requests_begin(request);
    requests_choose(9, false);
    requests_ask(request, &asked, results);
    struct append_entry appends[2];
    struct fetch_entry fetches[2];
    void *rows = fixture_rows(&requests_whole, FIXTURE_SESSION, (N_BLOCKS - 1) * 64, 2, LAYER);
    for (uint32_t i = 0; i < 2; i++)
        ids[i] = fixture_id(FIXTURE_SESSION, (N_BLOCKS - 1) * 64 + i);
    for (uint32_t i = 0; i < 2; i++) {
        appends[i] = (struct append_entry){
            .session = FIXTURE_SESSION,
            .handle = requests_handle(N_BLOCKS - 1),
            .layer = LAYER,
            .n_tokens = 2,
            .flags = APPEND_IDS | APPEND_ROWS,
            .ids_offset = requests_put(request, ids, sizeof(ids)),
            .rows_offset = requests_put(request, rows, 2 * 2 * row_bytes),
        };
        fetches[i] = (struct fetch_entry){
            .session = FIXTURE_SESSION,
            .handle = requests_handle(i),
            .n_tokens = 64,
            .result_offset = requests_room(request, 64 * row_bytes),
        };
    }
    free(rows);
    request->header->fetches_offset = requests_put(request, fetches, sizeof(fetches));
    request->header->n_fetches = 2;
    request->header->appends_offset = requests_put(request, appends, sizeof(appends));
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
    X(NONE, 0, -EINVAL, r->header->n_blocks = 1u << 28)                                                                \
    X(NONE, 0, -EINVAL, r->header->fetches_offset = r->header->n_bytes)                                                \
    X(APPEND, 1, -ESTALE, append_at(r, 1)->session++)                                                                  \
    X(APPEND, 1, -ESTALE, append_at(r, 1)->handle.generation++)                                                        \
    X(APPEND, 1, -ESTALE, append_at(r, 1)->handle.index = UINT32_MAX)                                                  \
    X(APPEND, 1, -EINVAL, append_at(r, 1)->flags = 0)                                                                  \
    X(APPEND, 1, -EINVAL, append_at(r, 1)->flags = 15)                                                                 \
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
    X(APPEND, 0, -EINVAL, append_at(r, 0)->layer = 3)                                                                  \
    X(AGGREGATE, 0, -EINVAL, (r->header->n_appends = 0, r->header->layer = 3))                                         \
    X(AGGREGATE, 0, -EINVAL, (r->header->n_appends = 0, r->header->layer = UINT32_MAX))                                \
    X(AGGREGATE, 0, -EINVAL, ITEM(r)[0].kv_head = 2)                                                                   \
    X(AGGREGATE, 1, -EINVAL, ITEM(r)[1].kv_head = UINT32_MAX)                                                          \
    X(AGGREGATE, 1, -EINVAL, ITEM(r)[1].mode = 3)                                                                      \
    X(AGGREGATE, 1, -EINVAL, ITEM(r)[1].n_queries = 0)                                                                 \
    X(AGGREGATE, 1, -EINVAL, ITEM(r)[1].n_queries = UINT32_MAX)                                                        \
    X(AGGREGATE, 1, -EINVAL, ITEM(r)[1].q_offset += 8)                                                                 \
    X(AGGREGATE, 1, -EINVAL, ITEM(r)[1].q_offset = r->header->n_bytes / 16 * 16)                                       \
    X(AGGREGATE, 1, -EINVAL, ITEM(r)[1].first_block = 1)                                                               \
    X(AGGREGATE, 1, -EINVAL, ITEM(r)[1].first_block = UINT32_MAX)                                                      \
    X(AGGREGATE, 1, -EINVAL, ITEM(r)[1].n_blocks = 0)                                                                  \
    X(AGGREGATE, 1, -EINVAL, ITEM(r)[1].n_blocks = UINT32_MAX)                                                         \
    X(AGGREGATE, 1, -EINVAL, ITEM(r)[1].n_blocks -= 2)                                                                 \
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
    X(AGGREGATE, 0, -ESTALE, BLOCK(r)[4].generation++)                                                                 \
    X(AGGREGATE, 0, -ESTALE, BLOCK(r)[4].generation = 0)                                                               \
    X(AGGREGATE, 0, -ESTALE, BLOCK(r)[4].index = N_BLOCKS + 1)                                                         \
    X(AGGREGATE, 0, -ESTALE, BLOCK(r)[4] = ((struct block_handle){N_BLOCKS, 1}))                                       \
    X(AGGREGATE, 0, -EINVAL, BLOCK(r)[1] = BLOCK(r)[0])                                                                \
    X(AGGREGATE, 0, -EINVAL, BLOCK(r)[1] = requests_handle(1))                                                         \
    X(AGGREGATE, 0, -EINVAL, (BLOCK(r)[0] = requests_handle(12), BLOCK(r)[1] = requests_handle(0)))                    \
    X(AGGREGATE, 0, -EINVAL, (BLOCK(r)[0] = requests_handle(1)))                                                       \
    X(AGGREGATE, 0, -ENODATA, MASKS(r, 0)[last_block(r)] = UINT64_C(1) << LAST_ROWS)                                   \
    X(AGGREGATE, 0, -ENODATA, MASKS(r, 0)[last_block(r)] |= UINT64_C(1) << 63)                                         \
    X(AGGREGATE, 1, -ENODATA, MASSES(r, 1)[last_block(r)] = 1e-30f)                                                    \
    X(AGGREGATE, 1, -ENODATA, MASSES(r, 1)[N_BLOCKS + last_block(r)] = -1)                                             \
    X(AGGREGATE, 1, -EINVAL, ITEM(r)[1].mode = 0)                                                                      \
    X(AGGREGATE, 1, -EINVAL, ITEM(r)[1].n_weights = 1)                                                                 \
    X(AGGREGATE, 1, -EINVAL, ITEM(r)[1].q_offset = 48)                                                                 \
    X(AGGREGATE, 1, -EINVAL, ITEM(r)[1].masks_offset = 0)                                                              \
    X(AGGREGATE, 1, -EINVAL, ITEM(r)[1].masks_offset += 8)                                                             \
    X(AGGREGATE, 1, -EINVAL, ITEM(r)[1].masks_offset = r->header->n_bytes / 16 * 16)                                   \
    X(AGGREGATE, 1, -EINVAL, ITEM(r)[1].masses_offset += 4)                                                            \
    X(AGGREGATE, 1, -EINVAL, ITEM(r)[1].masses_offset = r->header->n_bytes / 16 * 16)                                  \
    X(AGGREGATE, 1, -EINVAL, ITEM(r)[1].masses_offset = 16)                                                            \
    X(AGGREGATE, 1, -EINVAL, ITEM(r)[1].references_offset = 0)                                                         \
    X(AGGREGATE, 1, -EINVAL, ITEM(r)[1].references_offset += 4)                                                        \
    X(AGGREGATE, 1, -EINVAL, ITEM(r)[1].references_offset = UINT32_MAX - 15)                                           \
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
    X(FETCH, 1, -ENODATA, fetch_at(r, 1)->handle = requests_handle(N_BLOCKS - 1))

#define WEIGHTS_CASES                                                                                                  \
    X(AGGREGATE, 1, -EINVAL, ITEM(r)[1].n_weights--)                                                                   \
    X(AGGREGATE, 1, -EINVAL, ITEM(r)[1].n_weights = 0)                                                                 \
    X(AGGREGATE, 1, -EINVAL, ITEM(r)[1].n_weights = UINT32_MAX)                                                        \
    X(AGGREGATE, 1, -EINVAL, ITEM(r)[1].weights_offset = 0)                                                            \
    X(AGGREGATE, 1, -EINVAL, ITEM(r)[1].weights_offset += 4)                                                           \
    X(AGGREGATE, 1, -EINVAL, ITEM(r)[1].weights_offset = UINT32_MAX - 15)                                              \
    X(AGGREGATE, 1, -EINVAL, ITEM(r)[1].references_offset = 0)                                                         \
    X(AGGREGATE, 1, -EINVAL, (ITEM(r)[1].references_offset = 0, ITEM(r)[1].masses_offset = 0))                         \
    X(AGGREGATE, 1, -EINVAL, ITEM(r)[1].mode = AGGREGATE_RESCORE)                                                      \
    X(AGGREGATE, 0, -EINVAL, MASKS(r, 0)[2] ^= 1)                                                                      \
    X(AGGREGATE, 0, -ENODATA, MASKS(r, 0)[last_block(r)] = UINT64_C(1) << LAST_ROWS)                                   \
    X(AGGREGATE, 0, -ENODATA, MASSES(r, 0)[last_block(r)] = NAN)

static uint32_t last_block(struct request *r)
{
    for (uint32_t i = 0;; i++) {
        if (BLOCK(r)[i].index == requests_handle(N_BLOCKS - 1).index)
            return i;
    }
}

static void malformed_requests_are_refused(void **state)
{
    (void)state;
    struct request request, *r = &request;
    struct request_result result;
    uint8_t *before = malloc(requests_whole.plan.n_bytes);
    assert_non_null(before);
    memcpy(before, requests_whole.segment, requests_whole.plan.n_bytes);
#define GOOD(mode)                                                                                                     \
    write_good(r, mode);                                                                                               \
    assert_int_equal(requests_serve(r, requests_whole.blocks, NULL).status, 0);                                        \
    requests_end(r);
#define CASE(mode, kind, index, wanted, change)                                                                        \
    write_good(r, mode);                                                                                               \
    change;                                                                                                            \
    result = requests_serve(r, requests_whole.blocks, NULL);                                                           \
    if (result.status != (wanted) || result.entry != REPLY_ENTRY(REPLY_ENTRY_##kind, index))                           \
        fail_msg("%s: status %d, entry %x", #change, result.status, result.entry);                                     \
    assert_int_equal(result.n_bytes, sizeof(struct reply_header));                                                     \
    requests_end(r);
    GOOD(AGGREGATE_RESCORE)
    GOOD(AGGREGATE_WEIGHTS)
#define X(kind, index, wanted, change) CASE(AGGREGATE_RESCORE, kind, index, wanted, change)
    CASES
#undef X
#define X(kind, index, wanted, change) CASE(AGGREGATE_WEIGHTS, kind, index, wanted, change)
    WEIGHTS_CASES
#undef X
    assert_memory_equal(before, requests_whole.segment, requests_whole.plan.n_bytes);
    free(before);
}

/* What the descriptor says of the size must be what the request says, and lie in the slot. */
static void sizes_are_checked(void **state)
{
    (void)state;
    struct request request;
    struct request_result result;
    struct aggregate *aggregate;
    write_good(&request, AGGREGATE_RESCORE);
    assert_int_equal(aggregate_new(requests_whole.kernels, NULL, NULL, &aggregate), 0);
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
        request_serve(requests_whole.blocks, aggregate, &slot, &result);
        assert_int_equal(result.status, -EINVAL);
        assert_int_equal(result.entry, 0);
    }
    aggregate_free(aggregate);
    requests_end(&request);
}

/* Random changes: any answer is right as long as nothing outside the areas is touched (sanitizers) and blocks stay sound. */
static void random_changes_do_no_harm(void **state)
{
    (void)state;
    uint32_t n_refused = 0, n_rounds = N_ROUNDS;
    for (uint32_t round = 0; round < n_rounds; round++) {
        struct request request;
        char text[BLOCKS_CHECK_TEXT];
        write_good(&request, round % 2 ? AGGREGATE_RESCORE : AGGREGATE_WEIGHTS);
        srand(round);
        for (int change = rand() % 3; change >= 0; change--) {
            uint32_t words = request.header->n_bytes / 4;
            uint32_t value = rand() % 2 ? (uint32_t)rand() * 3 : (uint32_t)rand() % 70;
            words = words > AREA / 4 ? AREA / 4 : words;
            memcpy(request.bytes + 4 * ((uint32_t)rand() % words), &value, sizeof(value));
        }
        n_refused += requests_serve(&request, requests_whole.blocks, NULL).status != 0;
        assert_int_equal(blocks_check(requests_whole.blocks, text), 0);
        requests_end(&request);
    }
    assert_true(n_refused > n_rounds / 10 && n_refused < n_rounds);
}

/* More than are checked together, more than one thread copies alone: all rows where they belong. */
static void many_rows_are_copied_by_all_threads(void **state)
{
    (void)state;
    enum { N_FETCHES = 320, N_TOKENS = 10 };
    const size_t row_bytes = layout_row_bytes(&requests_whole.shape);
    struct fetch_entry *fetches = calloc(N_FETCHES, sizeof(*fetches));
    struct request request;
    struct pool *pool;
    uint8_t row[FIXTURE_ROW];
    assert_non_null(fetches);
    assert_int_equal(pool_new(3, NULL, NULL, &pool), 0);
    requests_begin(&request);
    for (uint32_t i = 0; i < N_FETCHES; i++)
        fetches[i] = (struct fetch_entry){.session = FIXTURE_SESSION,
                                          .handle = requests_handle(i % (N_BLOCKS - 1)),
                                          .layer = i % 3,
                                          .kv_head = i / 3 % 2,
                                          .first_token = i % 55,
                                          .n_tokens = N_TOKENS,
                                          .result_offset = requests_room(&request, N_TOKENS * row_bytes)};
    request.header->fetches_offset = requests_put(&request, fetches, N_FETCHES * sizeof(*fetches));
    request.header->n_fetches = N_FETCHES;
    struct request_result result = requests_serve(&request, requests_whole.blocks, pool);
    assert_int_equal(result.status, 0);
    assert_int_equal(result.n_rows_read, N_FETCHES * N_TOKENS);
    assert_int_equal(result.n_bytes, fetches[N_FETCHES - 1].result_offset + N_TOKENS * row_bytes);
    for (uint32_t i = 0; i < N_FETCHES; i++)
        for (uint32_t k = 0; k < N_TOKENS; k++) {
            fixture_row(&requests_whole, FIXTURE_SESSION, i % (N_BLOCKS - 1) * 64 + fetches[i].first_token + k,
                        fetches[i].layer, fetches[i].kv_head, row);
            assert_memory_equal(request.reply + fetches[i].result_offset + k * row_bytes, row, row_bytes);
        }
    free(fetches);
    requests_end(&request);
    pool_free(pool);
}

int main(void)
{
    kernels_thread_setup();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(malformed_requests_are_refused, requests_set_up_f16, requests_tear_down),
        cmocka_unit_test_setup_teardown(sizes_are_checked, requests_set_up_f16, requests_tear_down),
        cmocka_unit_test_setup_teardown(many_rows_are_copied_by_all_threads, requests_set_up_f16, requests_tear_down),
        cmocka_unit_test_setup_teardown(random_changes_do_no_harm, requests_set_up_f16, requests_tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
