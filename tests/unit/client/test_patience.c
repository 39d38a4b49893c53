/* test_patience.c - what counts as coming nearer to being ready. */
#include "client/command/patience.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>

#include <cmocka.h>

static bool show(struct patience *patience, const char *program, uint32_t index, const char *phase)
{
    struct hcattn_process_stats process = {.program = program, .index = index, .phase = phase};
    struct hcattn_stats stats = {.processes = &process, .n_processes = 1};
    return patience_moved(patience, &stats);
}

static void percentages_are_read(void **state)
{
    (void)state;
    static const char *const without[] = {"",
                                          "idle",
                                          "step",
                                          "42 %",
                                          "loading 42",
                                          "loading 42 %!",
                                          "at %",
                                          "%",
                                          "loading 101 %",
                                          "a 99999999999999999999 %",
                                          "importing, 12 MiB so far"};
    uint32_t percent = 7;
    size_t length = 7;
    for (size_t i = 0; i < sizeof(without) / sizeof(without[0]); i++)
        assert_false(patience_percent(without[i], &percent, &length));
    assert_true(percent == 7 && length == 7);
    assert_true(patience_percent("loading weights 42 %", &percent, &length));
    assert_true(percent == 42 && length == 16);
    assert_true(patience_percent("formatting 100 %", &percent, &length));
    assert_int_equal(percent, 100);
}

static void only_growth_moves(void **state)
{
    (void)state;
    static struct patience patience;
    assert_false(show(&patience, "hc-value-store", 0, NULL));
    assert_false(show(&patience, "hc-value-store", 0, "formatting"));
    assert_true(show(&patience, "hc-value-store", 0, "formatting 10 %"));
    assert_false(show(&patience, "hc-value-store", 0, "formatting 10 %"));
    assert_true(show(&patience, "hc-value-store", 0, "formatting 11 %"));
    assert_true(show(&patience, "hc-value-store", 1, "formatting 3 %"));
    assert_true(show(&patience, "hc-gpu-worker", 0, "loading weights 5 %"));
    assert_true(show(&patience, "hc-value-store", 0, "making huge pages 1 %"));
    /* One that begins again, and again. */
    for (uint32_t life = 0; life < 3; life++) {
        assert_false(show(&patience, "hc-value-store", 0, "formatting 4 %"));
        assert_false(show(&patience, "hc-value-store", 0, "formatting 11 %"));
    }
    assert_true(show(&patience, "hc-value-store", 0, "formatting 12 %"));
}

/* However many phases there are: all that can move is bounded. */
static void what_moves_is_bounded(void **state)
{
    (void)state;
    static struct patience patience;
    char phase[32];
    uint32_t n_moved = 0;
    for (uint32_t i = 0; i < 2 * PATIENCE_MAX; i++) {
        snprintf(phase, sizeof(phase), "phase%c%c 50 %%", 'a' + (int)(i % 26), 'a' + (int)(i / 26));
        n_moved += show(&patience, "hc-value-store", 0, phase);
    }
    assert_int_equal(n_moved, PATIENCE_MAX);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(percentages_are_read),
        cmocka_unit_test(only_growth_moves),
        cmocka_unit_test(what_moves_is_bounded),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
