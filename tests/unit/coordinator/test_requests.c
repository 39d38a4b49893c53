/* The table of requests, its legal moves, and admission by context length. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "coordinator/requests.h"

static struct requests *requests;
static int n_freed;

static int setup(void **state)
{
    (void)state;
    n_freed = 0;
    return requests_new(3, &requests);
}

static int teardown(void **state)
{
    (void)state;
    requests = requests_free(requests);
    return 0;
}

static void free_message(void *message)
{
    n_freed++;
    free(message);
}

static int add(uint8_t client, uint64_t id, struct request **ret)
{
    struct request given = {.client = {1, {client}}, .id = id, .message = malloc(8), .message_free = free_message};
    int result = requests_add(requests, &given, ret);
    if (result != 0)
        free(given.message);
    return result;
}

static void a_client_and_its_id_are_unique(void **state)
{
    (void)state;
    struct request *one, *two, *three, *none = NULL;
    assert_int_equal(add(1, 7, &one), 0);
    assert_int_equal(add(1, 7, &none), -EEXIST);
    assert_int_equal(add(2, 7, &two), 0); /* another client may choose the same id */
    assert_int_equal(add(1, 8, &three), 0);
    assert_int_equal(add(1, 9, &none), -ENOSPC);
    assert_null(none);
    struct client_route client = {1, {2}};
    assert_ptr_equal(requests_find(requests, &client, 7), two);
    assert_null(requests_find(requests, &client, 8));
    two->worker = 5;
    two->work = 6;
    assert_ptr_equal(requests_find_work(requests, 5, 6), two);
    assert_null(requests_find_work(requests, 4, 6));
    assert_null(requests_find_work(requests, 0, 0)); /* not at a worker is no place */
    assert_int_equal(requests_count_at(requests, 5), 1);
    requests_remove(requests, two);
    assert_int_equal(n_freed, 1);
    assert_int_equal(requests_count(requests), 2);
    uint32_t cursor = 0;
    assert_ptr_equal(requests_next(requests, &cursor), one);
    assert_ptr_equal(requests_next(requests, &cursor), three);
    assert_null(requests_next(requests, &cursor));
    requests = requests_free(requests);
    assert_int_equal(n_freed, 3);
}

static void every_move_is_in_the_table(void **state)
{
    (void)state;
    enum { N = REQUEST_DONE + 1 };
    static const uint16_t legal[N] = {
        [REQUEST_ENTERED] = 1 << REQUEST_PREPARING | 1 << REQUEST_RESERVING | 1 << REQUEST_QUEUED | 1 << REQUEST_DONE,
        [REQUEST_PREPARING] = 1 << REQUEST_RESERVING | 1 << REQUEST_DONE,
        [REQUEST_RESERVING] = 1 << REQUEST_QUEUED | 1 << REQUEST_WAITING | 1 << REQUEST_DONE,
        [REQUEST_WAITING] = 1 << REQUEST_RESERVING | 1 << REQUEST_DONE,
        [REQUEST_QUEUED] = 1 << REQUEST_RUNNING | 1 << REQUEST_DONE,
        [REQUEST_RUNNING] = 1 << REQUEST_QUEUED | 1 << REQUEST_CANCELLING | 1 << REQUEST_DONE,
        [REQUEST_CANCELLING] = 1 << REQUEST_QUEUED | 1 << REQUEST_DONE,
    };
    for (int from = 0; from < N; from++)
        for (int to = 0; to <= N; to++) {
            struct request request = {.state = (enum request_state)from};
            int expected = to < N && legal[from] >> to & 1 ? 0 : -EPROTO;
            assert_int_equal(requests_move(&request, (enum request_state)to, 9), expected);
            assert_int_equal(request.state, expected == 0 ? to : from);
            assert_int_equal(request.waiting_us, expected == 0 ? 9 : 0);
        }
}

static void admission_is_exact_at_the_edge(void **state)
{
    (void)state;
    uint32_t max_tokens = 10;
    assert_int_equal(requests_admit(100, 20, 70, true, false, &max_tokens), ADMISSION_OK);
    assert_int_equal(requests_admit(100, 20, 71, true, false, &max_tokens), ADMISSION_TOO_LONG);
    assert_int_equal(max_tokens, 10);
    assert_int_equal(requests_admit(100, 20, 71, true, true, &max_tokens), ADMISSION_OK);
    assert_int_equal(max_tokens, 9); /* the default is made to fit */
    max_tokens = 10;
    assert_int_equal(requests_admit(100, 20, 80, true, true, &max_tokens), ADMISSION_INPUT_TOO_LONG);
    assert_int_equal(requests_admit(100, 20, 80, false, false, &max_tokens), ADMISSION_OK);
    assert_int_equal(requests_admit(100, 20, 81, false, false, &max_tokens), ADMISSION_INPUT_TOO_LONG);
    assert_int_equal(requests_admit(100, 101, 0, false, false, &max_tokens), ADMISSION_INPUT_TOO_LONG);
    assert_int_equal(requests_admit(100, 1, UINT64_MAX, true, false, &max_tokens), ADMISSION_INPUT_TOO_LONG);
    max_tokens = UINT32_MAX;
    assert_int_equal(requests_admit(100, 0, 1, true, false, &max_tokens), ADMISSION_TOO_LONG);
}

static void blocks_for_tokens(void **state)
{
    (void)state;
    assert_int_equal(requests_blocks_for(0), 0);
    assert_int_equal(requests_blocks_for(1), 1);
    assert_int_equal(requests_blocks_for(64), 1);
    assert_int_equal(requests_blocks_for(65), 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(a_client_and_its_id_are_unique, setup, teardown),
        cmocka_unit_test(every_move_is_in_the_table),
        cmocka_unit_test(admission_is_exact_at_the_edge),
        cmocka_unit_test(blocks_for_tokens),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
