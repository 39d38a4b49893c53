/* test_policy.c - the grammar of policies: every form it has, and that everything else is refused with its word. */
#include "proto/policy.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define SENTENCE 256

static void expect(const char *name, struct policy_terms wanted)
{
    char sentence[SENTENCE] = "";
    struct policy_terms terms;
    memset(&terms, 0xee, sizeof(terms));
    int result = policy_parse(name, &terms, sentence, sizeof(sentence));
    if (result != 0)
        fail_msg("%s: %s", name, sentence);
    if (terms.codec != wanted.codec || terms.selector != wanted.selector || terms.weights != wanted.weights ||
        terms.tail != wanted.tail || terms.parameter != wanted.parameter)
        fail_msg("%s: codec %d, selector %d, parameter %g, weights %d, tail %d", name, (int)terms.codec,
                 (int)terms.selector, (double)terms.parameter, terms.weights, terms.tail);
}

static void every_form_is_understood(void **state)
{
    (void)state;
    static const char *const codecs[] = {"f16", "rot4", "rot3", "rot2"};
    static const enum policy_codec codec_values[] = {POLICY_CODEC_F16, POLICY_CODEC_ROT4, POLICY_CODEC_ROT3,
                                                     POLICY_CODEC_ROT2};
    static const char *const selectors[] = {"mass", "deviation"};
    static const enum policy_selector selector_values[] = {POLICY_SELECTOR_MASS, POLICY_SELECTOR_DEVIATION};
    static const struct {
        const char *text;
        bool weights, tail;
    } endings[] = {{"", false, true},
                   {",weights", true, true},
                   {",notail", false, false},
                   {",weights,notail", true, false},
                   {",notail,weights", true, false}};
    for (size_t codec = 0; codec < 4; codec++) {
        for (size_t selector = 0; selector < 2; selector++) {
            for (size_t ending = 0; ending < 5; ending++) {
                char name[64];
                snprintf(name, sizeof(name), "%s,%s=0.25%s", codecs[codec], selectors[selector], endings[ending].text);
                expect(name, (struct policy_terms){.codec = codec_values[codec],
                                                   .selector = selector_values[selector],
                                                   .parameter = 0.25f,
                                                   .weights = endings[ending].weights,
                                                   .tail = endings[ending].tail});
            }
        }
    }
}

static void numbers_are_read_exactly(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        float value;
    } good[] = {
        {"rot2,mass=0", 0.0f},
        {"rot2,mass=1", 1.0f},
        {"rot2,mass=0.9", 0.9f},
        {"rot2,mass=.5", 0.5f},
        {"rot2,mass=1.0", 1.0f},
        {"rot2,mass=00.5", 0.5f},
        {"rot2,mass=1.0000000000", 1},
        {"rot2,mass=0.123456789", 0.123456789f},
        {"rot2,mass=0.0000000001", 1e-10f},
    };
    for (size_t i = 0; i < sizeof(good) / sizeof(good[0]); i++)
        expect(good[i].name,
               (struct policy_terms){POLICY_CODEC_ROT2, POLICY_SELECTOR_MASS, good[i].value, false, true});
    expect("rot2,deviation=2", (struct policy_terms){POLICY_CODEC_ROT2, POLICY_SELECTOR_DEVIATION, 2, false, true});
    expect("rot2,deviation=1.99",
           (struct policy_terms){POLICY_CODEC_ROT2, POLICY_SELECTOR_DEVIATION, 1.99f, false, true});
}

static void full_reads_everything(void **state)
{
    (void)state;
    expect("full", (struct policy_terms){.codec = POLICY_CODEC_NONE, .selector = POLICY_SELECTOR_FULL, .tail = false});
}

/* Presets say what they mean in the grammar itself. */
static void presets_are_short_for_forms(void **state)
{
    (void)state;
    expect("default", (struct policy_terms){POLICY_CODEC_ROT2, POLICY_SELECTOR_DEVIATION, 0.02f, false, true});
    expect("quality", (struct policy_terms){POLICY_CODEC_ROT4, POLICY_SELECTOR_DEVIATION, 0.01f, false, true});
    uint32_t n = 0;
    const char *name, *meaning;
    while ((name = policy_preset(n, &meaning)) != NULL) {
        char sentence[SENTENCE];
        struct policy_terms of_name, of_meaning;
        assert_true(name[0] && meaning && meaning[0]);
        assert_int_equal(policy_parse(name, &of_name, sentence, sizeof(sentence)), 0);
        if (strcmp(name, "full") != 0) {
            assert_int_equal(policy_parse(meaning, &of_meaning, sentence, sizeof(sentence)), 0);
            assert_true(of_name.codec == of_meaning.codec && of_name.selector == of_meaning.selector &&
                        of_name.parameter == of_meaning.parameter && of_name.tail == of_meaning.tail);
        }
        n++;
    }
    assert_int_equal(n, 3);
    assert_null(policy_preset(UINT32_MAX, &meaning));
}

static const char *const bad[] = {
    "",
    ",",
    ",,",
    " ",
    "Full",
    "full ",
    " full",
    "full,notail",
    "full,weights",
    "default,notail",
    "quality,",
    "defaul",
    "default2",
    "rot2",
    "rot2,",
    "rot2,,",
    "rot5,mass=0.5",
    "rot,mass=0.5",
    "rot22,mass=0.5",
    "ROT2,mass=0.5",
    ",mass=0.5",
    "mass=0.5",
    "mass=0.5,rot2",
    "rot2 ,mass=0.5",
    "rot2, mass=0.5",
    "rot2,mass",
    "rot2,mass=",
    "rot2,mass=,notail",
    "rot2,mas=0.5",
    "rot2,masses=0.5",
    "rot2,mass==0.5",
    "rot2,mass0.5",
    "rot2,full",
    "rot2,full=1",
    "rot2,deviation",
    "rot2,deviation=",
    "rot2,mass=.",
    "rot2,mass=0.",
    "rot2,mass=1.",
    "rot2,mass=0..5",
    "rot2,mass=0.5.5",
    "rot2,mass=0,5",
    "rot2,mass=1e-1",
    "rot2,mass=0x1",
    "rot2,mass=nan",
    "rot2,mass=inf",
    "rot2,mass=+0.5",
    "rot2,mass=-0.5",
    "rot2,mass= 0.5",
    "rot2,mass=0.5 ",
    "rot2,mass=0.5%",
    "rot2,mass=1.01",
    "rot2,mass=1.0000000001",
    "rot2,mass=2",
    "rot2,mass=999999999999",
    "rot2,mass=0.00000000001", /* more figures than are read */
    "rot2,mass=99999999999999999999999999999999999999",
    "rot2,deviation=2.01",
    "rot2,deviation=3",
    "rot2,mass=0.5,",
    "rot2,mass=0.5,,notail",
    "rot2,mass=0.5,notail,",
    "rot2,mass=0.5,notail,notail",
    "rot2,mass=0.5,weights,weights",
    "rot2,mass=0.5,weights,notail,weights",
    "rot2,mass=0.5,tail",
    "rot2,mass=0.5,Weights",
    "rot2,mass=0.5,weight",
    "rot2,mass=0.5,deviation=0.5",
    "rot2,mass=0.5,rot4",
    "rot2;mass=0.5",
    "rot2,mass=0.5\n",
    "rot2,mass=0\xc2\xb7"
    "5",
    "\xff\xfe\xfd",
};

static void anything_else_is_refused(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        char sentence[SENTENCE] = "";
        struct policy_terms terms, untouched;
        memset(&untouched, 0xee, sizeof(untouched));
        terms = untouched;
        if (policy_parse(bad[i], &terms, sentence, sizeof(sentence)) != -EINVAL)
            fail_msg("\"%s\" is taken", bad[i]);
        assert_memory_equal(&terms, &untouched, sizeof(terms));
        if (!strstr(sentence, "rot2,mass=0..1") && !strstr(sentence, "deviation=0..2"))
            fail_msg("\"%s\": the sentence does not say what there is: %s", bad[i], sentence);
    }
}

/* The sentence names the word that is wrong. */
static void the_word_is_named(void **state)
{
    (void)state;
    static const char *const cases[][2] = {
        {"rot7,mass=0.5", "\"rot7\""},
        {"rot2,mass=7", "\"mass=7\""},
        {"rot2,mass=0.5,tails", "\"tails\""},
        {"rot2", "\"\""},
        {"", "\"\""},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char sentence[SENTENCE];
        struct policy_terms terms;
        assert_int_equal(policy_parse(cases[i][0], &terms, sentence, sizeof(sentence)), -EINVAL);
        if (!strstr(sentence, cases[i][1]))
            fail_msg("%s: %s", cases[i][0], sentence);
    }
}

/* Names of any length are read to their end and no further; sentences fit whatever room there is. */
static void long_names_and_small_rooms(void **state)
{
    (void)state;
    const size_t length = 100000;
    char *name = malloc(length + 1), room[64];
    struct policy_terms terms;
    assert_non_null(name);
    for (int kind = 0; kind < 3; kind++) {
        memset(name, kind == 1 ? ',' : 'r', length);
        name[length] = 0;
        if (kind == 2)
            memcpy(name, "rot2,mass=", 10), memset(name + 10, '0', length - 10);
        for (size_t size = 1; size <= sizeof(room); size++) {
            memset(room, 0x55, sizeof(room));
            assert_int_equal(policy_parse(name, &terms, room, size), -EINVAL);
            assert_non_null(memchr(room, 0, size));
            for (size_t i = size; i < sizeof(room); i++)
                assert_int_equal(room[i], 0x55);
        }
    }
    free(name);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_form_is_understood),   cmocka_unit_test(numbers_are_read_exactly),
        cmocka_unit_test(full_reads_everything),      cmocka_unit_test(presets_are_short_for_forms),
        cmocka_unit_test(anything_else_is_refused),   cmocka_unit_test(the_word_is_named),
        cmocka_unit_test(long_names_and_small_rooms),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
