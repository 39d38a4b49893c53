/* test_policy.c - policies by name: terms, codec and mode belong together. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "gpu-worker/policy/policy.h"

static struct quantizers *quantizers; /* of a model from which nothing was learnt */

static int set_up(void **state)
{
    static const struct row_shape shape = {.n_layers = 2, .n_kv_heads = 1, .head_dim = 64, .codec = ROW_CODEC_F16};
    static const uint8_t hash[16];
    (void)state;
    return quantizers_new(&shape, hash, NULL, &quantizers);
}

static int tear_down(void **state)
{
    (void)state;
    quantizers_free(quantizers);
    return 0;
}

static void full_looks_at_no_keys(void **state)
{
    (void)state;
    struct policy policy;
    char sentence[256];
    assert_int_equal(policy_find(quantizers, "full", &policy, sentence, sizeof sentence), 0);
    assert_int_equal(policy.terms.selector, POLICY_SELECTOR_FULL);
    assert_null(policy.quantizer);
    assert_int_equal(policy.mode, AGGREGATE_RESCORE);
    assert_false(policy.terms.tail);
}

static void every_codec_that_learns_nothing_is_there(void **state)
{
    (void)state;
    static const char *const names[] = {"f16", "rot4", "rot3", "rot2"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        char name[64], sentence[256] = "";
        struct policy policy;
        snprintf(name, sizeof name, "%s,mass=0.9,weights,notail", names[i]);
        assert_int_equal(policy_find(quantizers, name, &policy, sentence, sizeof sentence), 0);
        assert_string_equal(policy.quantizer->codec->name, names[i]);
        assert_int_equal(policy.terms.selector, POLICY_SELECTOR_MASS);
        assert_int_equal(policy.mode, AGGREGATE_WEIGHTS);
        assert_false(policy.terms.tail);
    }
}

static void what_has_to_be_learnt_is_asked_for(void **state)
{
    (void)state;
    static const char *const names[] = {"pair2,deviation=0.02", "pq2/256,mass=0.9,weights,notail"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        struct policy policy;
        char sentence[256] = "";
        assert_int_equal(policy_find(quantizers, names[i], &policy, sentence, sizeof sentence), -ENOENT);
        assert_true(strlen(sentence) > 0);
    }
}

static void every_preset_is_found(void **state)
{
    (void)state;
    const char *meaning, *name;
    uint32_t n = 0;
    for (; (name = policy_preset(n, &meaning)) != NULL; n++) {
        struct policy policy;
        char sentence[256];
        int error = policy_find(quantizers, name, &policy, sentence, sizeof sentence);
        if (error == -ENOENT)
            continue; /* nothing was learnt from this model */
        assert_int_equal(error, 0);
        assert_int_equal(policy.quantizer == NULL, policy.terms.selector == POLICY_SELECTOR_FULL);
    }
    assert_true(n >= 3);
}

static void an_unknown_name_is_refused_with_a_sentence(void **state)
{
    (void)state;
    struct policy policy, before;
    memset(&policy, 0x5a, sizeof policy);
    before = policy;
    char sentence[256] = "";
    assert_int_equal(policy_find(quantizers, "rot9,mass=0.5", &policy, sentence, sizeof sentence), -EINVAL);
    assert_non_null(strstr(sentence, "rot9"));
    assert_memory_equal(&policy, &before, sizeof policy);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(full_looks_at_no_keys),
        cmocka_unit_test(every_codec_that_learns_nothing_is_there),
        cmocka_unit_test(what_has_to_be_learnt_is_asked_for),
        cmocka_unit_test(every_preset_is_found),
        cmocka_unit_test(an_unknown_name_is_refused_with_a_sentence),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
