/* What may travel on the data plane, what is returned and what is dropped. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "coordinator/router.h"

enum { WORKER = 100, WORKER_2 = 101, STORE = 200, STORE_2 = 201, NOBODY = 300 };

static struct router *router;

static int setup(void **state)
{
    (void)state;
    int result = router_new(&router);
    result |= router_add(router, WORKER, ROUTER_WORKER);
    result |= router_add(router, WORKER_2, ROUTER_WORKER);
    result |= router_add(router, STORE, ROUTER_STORE);
    result |= router_add(router, STORE_2, ROUTER_STORE);
    return result;
}

static int teardown(void **state)
{
    (void)state;
    router = router_free(router);
    return 0;
}

static struct descriptor make(enum descriptor_kind kind, uint64_t from, uint64_t to)
{
    return (struct descriptor){.magic = DESCRIPTOR_MAGIC,
                               .version = DESCRIPTOR_VERSION,
                               .kind = (uint16_t)kind,
                               .to = to,
                               .from = from,
                               .request = 77,
                               .worker = 5,
                               .slot = 3,
                               .n_bytes = 4096,
                               .remaining_us = 500000};
}

static enum router_verdict judge(const struct descriptor *descriptor, uint64_t sender)
{
    struct descriptor out;
    return router_judge(router, sender, descriptor, sizeof(*descriptor), &out);
}

static void requests_go_to_stores_and_replies_to_workers(void **state)
{
    (void)state;
    struct descriptor request = make(DESCRIPTOR_REQUEST, WORKER, STORE), out;
    assert_int_equal(router_judge(router, WORKER, &request, sizeof(request), &out), ROUTER_FORWARD);
    assert_memory_equal(&out, &request, sizeof(out));
    struct descriptor reply = make(DESCRIPTOR_REPLY, STORE, WORKER);
    assert_int_equal(judge(&reply, STORE), ROUTER_FORWARD);
    /* each side says only what is its to say */
    struct descriptor wrong = make(DESCRIPTOR_REPLY, WORKER, STORE);
    assert_int_equal(judge(&wrong, WORKER), ROUTER_DROP_GARBAGE);
    wrong = make(DESCRIPTOR_REQUEST, STORE, WORKER);
    assert_int_equal(judge(&wrong, STORE), ROUTER_DROP_GARBAGE);
    wrong = make(DESCRIPTOR_REQUEST, WORKER, WORKER_2);
    assert_int_equal(judge(&wrong, WORKER), ROUTER_DROP_GARBAGE);
    wrong = make(DESCRIPTOR_REPLY, STORE, STORE_2);
    assert_int_equal(judge(&wrong, STORE), ROUTER_DROP_GARBAGE);
}

static void nobody_speaks_for_another(void **state)
{
    (void)state;
    struct descriptor request = make(DESCRIPTOR_REQUEST, WORKER, STORE);
    assert_int_equal(judge(&request, WORKER_2), ROUTER_DROP_GARBAGE);
    assert_int_equal(judge(&request, NOBODY), ROUTER_DROP_STRANGER);
    router_remove(router, WORKER);
    assert_int_equal(judge(&request, WORKER), ROUTER_DROP_STRANGER);
}

static void garbage_is_dropped(void **state)
{
    (void)state;
    struct descriptor request = make(DESCRIPTOR_REQUEST, WORKER, STORE), out;
    for (size_t n = 0; n < sizeof(request); n++)
        assert_int_equal(router_judge(router, WORKER, &request, n, &out), ROUTER_DROP_GARBAGE);
    struct descriptor bad = request;
    bad.magic++;
    assert_int_equal(judge(&bad, WORKER), ROUTER_DROP_GARBAGE);
    bad = request;
    bad.version++;
    assert_int_equal(judge(&bad, WORKER), ROUTER_DROP_GARBAGE);
    bad = request;
    bad.kind = 9;
    assert_int_equal(judge(&bad, WORKER), ROUTER_DROP_GARBAGE);
}

static void a_request_for_nobody_comes_back(void **state)
{
    (void)state;
    struct descriptor request = make(DESCRIPTOR_REQUEST, WORKER, NOBODY);
    assert_int_equal(judge(&request, WORKER), ROUTER_RETURN);
    struct descriptor reply = router_returned(&request, -EHOSTUNREACH), checked;
    assert_int_equal(descriptor_check(&reply, sizeof(reply), &checked), 0);
    assert_int_equal(reply.kind, DESCRIPTOR_REPLY);
    assert_int_equal(reply.to, WORKER);
    assert_int_equal(reply.from, NOBODY);
    assert_int_equal(reply.request, 77);
    assert_int_equal(reply.slot, 3);
    assert_int_equal(reply.status, -EHOSTUNREACH);
    assert_int_equal(reply.remaining_us, 0);
    struct descriptor late = make(DESCRIPTOR_REPLY, STORE, NOBODY);
    assert_int_equal(judge(&late, STORE), ROUTER_DROP_LATE);
}

static void routes_are_bounded_and_unique(void **state)
{
    (void)state;
    assert_int_equal(router_add(router, WORKER, ROUTER_STORE), -EEXIST);
    assert_int_equal(router_add(router, 0, ROUTER_STORE), -EINVAL);
    for (uint64_t i = 4; i < ROUTER_MAX_ROUTES; i++)
        assert_int_equal(router_add(router, 1000 + i, ROUTER_STORE), 0);
    assert_int_equal(router_add(router, 999, ROUTER_STORE), -ENOSPC);
    router_remove(router, 1004);
    assert_int_equal(router_add(router, 999, ROUTER_STORE), 0);
}

static void held_ones_expire_with_the_senders_patience(void **state)
{
    (void)state;
    struct descriptor request = make(DESCRIPTOR_REQUEST, WORKER, STORE), out;
    uint64_t expires_us;
    bool expired;
    assert_false(router_take_held(router, 1000, &out, &expired, &expires_us));
    assert_int_equal(router_hold(router, &request, 1000), 0);
    assert_int_equal(router_n_held(router), 1);
    assert_true(router_take_held(router, 1000 + 499999, &out, &expired, &expires_us));
    assert_false(expired);
    assert_int_equal(expires_us, 501000);
    router_put_back(router, &out, expires_us);
    assert_true(router_take_held(router, 501000, &out, &expired, &expires_us));
    assert_true(expired);
    assert_int_equal(out.request, 77);
    /* a patient sender does not wait for longer than the router does, nor for a target that is gone */
    request.remaining_us = UINT32_MAX;
    assert_int_equal(router_hold(router, &request, 0), 0);
    assert_true(router_take_held(router, 5, &out, &expired, &expires_us));
    assert_int_equal(expires_us, ROUTER_HOLD_US);
    router_put_back(router, &out, expires_us);
    router_remove(router, STORE);
    assert_true(router_take_held(router, 5, &out, &expired, &expires_us));
    assert_true(expired);
}

static void held_ones_are_bounded_and_in_order(void **state)
{
    (void)state;
    struct descriptor request = make(DESCRIPTOR_REQUEST, WORKER, STORE), out;
    uint64_t expires_us;
    bool expired;
    for (int round = 0; round < 3; round++) {
        for (uint64_t i = 0; i < ROUTER_MAX_HELD; i++) {
            request.request = i;
            assert_int_equal(router_hold(router, &request, 0), 0);
        }
        assert_int_equal(router_hold(router, &request, 0), -ENOSPC);
        for (uint64_t i = 0; i < ROUTER_MAX_HELD; i++) {
            assert_true(router_take_held(router, 0, &out, &expired, &expires_us));
            assert_int_equal(out.request, i);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(requests_go_to_stores_and_replies_to_workers, setup, teardown),
        cmocka_unit_test_setup_teardown(nobody_speaks_for_another, setup, teardown),
        cmocka_unit_test_setup_teardown(garbage_is_dropped, setup, teardown),
        cmocka_unit_test_setup_teardown(a_request_for_nobody_comes_back, setup, teardown),
        cmocka_unit_test_setup_teardown(routes_are_bounded_and_unique, setup, teardown),
        cmocka_unit_test_setup_teardown(held_ones_expire_with_the_senders_patience, setup, teardown),
        cmocka_unit_test_setup_teardown(held_ones_are_bounded_and_in_order, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
