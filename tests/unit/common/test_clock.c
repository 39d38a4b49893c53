/* test_clock.c - the clock runs forward, deadlines saturate and round the safe way; ids are never "none". */
#include "common/clock.h"
#include "common/random.h"
#include "tests/unit/common/helpers.h"

#include <limits.h>

static void runs_forward_and_sleeps_long_enough(void **state)
{
    (void)state;
    uint64_t before = clock_now_us();
    clock_sleep_us(2000);
    assert_true(clock_now_us() >= before + 2000);
}

static void a_deadline_saturates(void **state)
{
    (void)state;
    assert_true(clock_deadline_us(UINT64_MAX) == CLOCK_NEVER);
    assert_true(clock_deadline_us(UINT64_MAX - 1) == CLOCK_NEVER);
    assert_true(clock_remaining_us(CLOCK_NEVER) == CLOCK_NEVER);
    assert_int_equal(clock_remaining_ms(CLOCK_NEVER), -1);
}

static void what_remains_is_rounded_up_and_never_negative(void **state)
{
    (void)state;
    assert_int_equal(clock_remaining_us(0), 0);
    assert_int_equal(clock_remaining_ms(clock_now_us() - 1), 0);
    uint64_t remaining = clock_remaining_us(clock_deadline_us(1000000));
    assert_in_range(remaining, 500000, 1000000);
    assert_int_equal(clock_remaining_ms(clock_now_us() + 3600000000), 3600000);
    assert_int_equal(clock_remaining_ms(CLOCK_NEVER - 1), INT_MAX);
}

static void random_numbers_differ(void **state)
{
    (void)state;
    uint64_t a = random_u64(), b = random_u64();
    assert_true(a != 0 && b != 0 && a != b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(runs_forward_and_sleeps_long_enough),
        cmocka_unit_test(a_deadline_saturates),
        cmocka_unit_test(what_remains_is_rounded_up_and_never_negative),
        cmocka_unit_test(random_numbers_differ),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
