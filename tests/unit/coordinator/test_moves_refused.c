/* The real coordinator with fakes around it: stores that refuse what a move asks of them. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/unit/coordinator/fakes.h"

static struct fakes fakes;
static struct fake_store *const to = &fakes.stores[1];

/* Session 5 lives in store 0, which is drained into store 1. */
static int setup(void **state)
{
    (void)state;
    fakes_start(&fakes, 1, NULL);
    fakes_all_ready(&fakes);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    fakes_finish(&fakes);
    return 0;
}

/* It stays, nothing is left over there, and it is tried again. */
static void refuse(int32_t *status, int32_t value, const char *words)
{
    *status = value;
    uint64_t drain = fake_flow_drain(&fakes, 0);
    fake_client_drain_waits(&fakes, drain, words);
    FAKES_WAIT(&fakes, fake_store_held(to, 5) == 0);
    uint64_t work, id = fake_flow_start(&fakes, 5, 10, &work);
    fake_flow_finish(&fakes, id, work, 200);
    (void)fake_client_drained(&fakes, fake_client_drain_store(&fakes, 0, true)); /* a rest, to look around */
    fake_client_drain_error(&fakes, drain, ERROR_CODE(CONFLICT), "takes sessions again");
    fake_flow_check(&fakes, 200);
    assert_int_equal(fake_checks_lanes_in(&fakes, 5, 0), 0xfff);
    drain = fake_flow_drain(&fakes, 0);
    fake_client_drain_waits(&fakes, drain, words);
    *status = 0;
    assert_int_equal(fake_client_drained(&fakes, drain), 1);
    fake_flow_check(&fakes, 200);
    assert_int_equal(fake_checks_lanes_in(&fakes, 5, 1), 0xfff);
}

static void a_store_that_takes_no_record(void **state)
{
    (void)state;
    fake_flow_make(&fakes, 5, 200);
    fake_flow_join(&fakes, 1);
    refuse(&to->open_status, -ENOSPC, "No space left");
}

static void a_store_that_reserves_nothing(void **state)
{
    (void)state;
    fake_flow_make(&fakes, 5, 200);
    fake_flow_join(&fakes, 1);
    refuse(&to->reserve_status, -EINVAL, "Invalid argument");
}

static void a_store_that_imports_nothing(void **state)
{
    (void)state;
    fake_flow_make(&fakes, 5, 200);
    fake_flow_join(&fakes, 1);
    refuse(&to->import_status, -EPROTO, "Protocol error");
}

static void refused_after_it_was_parked(void **state)
{
    (void)state;
    uint64_t work, id = fake_flow_running(&fakes, 40, &work); /* nothing is sealed yet: all of it is the rest */
    to->import_status = -EIO;
    uint64_t drain = fake_flow_drain(&fakes, 0);
    fake_flow_stop(&fakes, work);
    work = fake_flow_take_run(&fakes); /* where it was */
    assert_int_equal(fake_checks_lanes_in(&fakes, 5, 0), 0xfff);
    FAKES_WAIT(&fakes, to->n_imports > 0);
    to->import_status = 0;
    fake_flow_stop(&fakes, work); /* again */
    work = fake_flow_take_run(&fakes);
    assert_int_equal(fake_client_drained(&fakes, drain), 1);
    fake_flow_check(&fakes, 40);
    fake_flow_finish(&fakes, id, work, 40);
}

/* What other stores may know by now cannot be taken back. */
static void a_commit_that_is_refused_ends_the_session(void **state)
{
    (void)state;
    uint64_t work, id = fake_flow_running(&fakes, 200, &work);
    fake_flow_make(&fakes, 6, 100);
    to->commit_status = -EIO;
    uint64_t drain = fake_flow_drain(&fakes, 0);
    fake_flow_stop(&fakes, work);
    fake_client_expect_error(&fakes, id, ERROR_CODE(INTERNAL));
    to->commit_status = 0;
    (void)fake_client_drained(&fakes, drain);
    fake_checks_gone(&fakes, 5);
    fake_checks_session(&fakes, 6, 100);
    fake_checks_tidy(&fakes);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        TEST(a_store_that_takes_no_record),
        TEST(a_store_that_reserves_nothing),
        TEST(a_store_that_imports_nothing),
        TEST(refused_after_it_was_parked),
        TEST(a_commit_that_is_refused_ends_the_session),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
