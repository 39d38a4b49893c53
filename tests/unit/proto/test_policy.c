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
        terms.tail != wanted.tail || terms.parameter != wanted.parameter || terms.n_dims != wanted.n_dims ||
        terms.n_centroids != wanted.n_centroids || terms.fastgen != wanted.fastgen)
        fail_msg(
            "%s: codec %d, %u dimensions, %u centroids, selector %d, parameter %g, weights %d, tail %d, fastgen %g",
            name, (int)terms.codec, terms.n_dims, terms.n_centroids, (int)terms.selector, (double)terms.parameter,
            terms.weights, terms.tail, (double)terms.fastgen);
}

#define TERMS(codec_, selector_, parameter_, ...)                                                                      \
    ((struct policy_terms){.codec = POLICY_CODEC_##codec_,                                                             \
                           .selector = POLICY_SELECTOR_##selector_,                                                    \
                           .parameter = (parameter_),                                                                  \
                           .tail = true,                                                                               \
                           __VA_ARGS__})

static void every_form_is_understood(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        enum policy_codec codec;
        uint32_t n_dims, n_centroids;
    } codecs[] = {{"f16", POLICY_CODEC_F16, 0, 0},        {"rot4", POLICY_CODEC_ROT4, 0, 0},
                  {"rot3", POLICY_CODEC_ROT3, 0, 0},      {"rot2", POLICY_CODEC_ROT2, 0, 0},
                  {"pair3", POLICY_CODEC_PAIR3, 0, 0},    {"pair2", POLICY_CODEC_PAIR2, 0, 0},
                  {"pair1", POLICY_CODEC_PAIR1, 0, 0},    {"klt2", POLICY_CODEC_KLT2, 0, 0},
                  {"klt1", POLICY_CODEC_KLT1, 0, 0},      {"klt0", POLICY_CODEC_KLT0, 0, 0},
                  {"pq2", POLICY_CODEC_PQ, 2, 4096},      {"pq4", POLICY_CODEC_PQ, 4, 4096},
                  {"pq8", POLICY_CODEC_PQ, 8, 4096},      {"pq2/256", POLICY_CODEC_PQ, 2, 256},
                  {"pq4/512", POLICY_CODEC_PQ, 4, 512},   {"pq8/1024", POLICY_CODEC_PQ, 8, 1024},
                  {"pq2/2048", POLICY_CODEC_PQ, 2, 2048}, {"pq4/4096", POLICY_CODEC_PQ, 4, 4096}};
    static const char *const selectors[] = {"mass", "deviation", "l2"};
    static const enum policy_selector selector_values[] = {POLICY_SELECTOR_MASS, POLICY_SELECTOR_DEVIATION,
                                                           POLICY_SELECTOR_L2};
    static const struct {
        const char *text;
        bool weights, tail;
        float fastgen;
    } endings[] = {{"", false, true, 0},
                   {",weights", true, true, 0},
                   {",notail", false, false, 0},
                   {",weights,notail", true, false, 0},
                   {",notail,weights", true, false, 0},
                   {",fastgen=0.98", false, true, 0.98f},
                   {",weights,notail,fastgen=1", true, false, 1},
                   {",fastgen=.5,weights", true, true, 0.5f}};
    for (size_t codec = 0; codec < sizeof(codecs) / sizeof(codecs[0]); codec++) {
        for (size_t selector = 0; selector < sizeof(selectors) / sizeof(selectors[0]); selector++) {
            for (size_t ending = 0; ending < sizeof(endings) / sizeof(endings[0]); ending++) {
                char name[64];
                snprintf(name, sizeof(name), "%s,%s=0.25%s", codecs[codec].name, selectors[selector],
                         endings[ending].text);
                expect(name, (struct policy_terms){.codec = codecs[codec].codec,
                                                   .n_dims = codecs[codec].n_dims,
                                                   .n_centroids = codecs[codec].n_centroids,
                                                   .selector = selector_values[selector],
                                                   .parameter = 0.25f,
                                                   .weights = endings[ending].weights,
                                                   .tail = endings[ending].tail,
                                                   .fastgen = endings[ending].fastgen});
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
        expect(good[i].name, TERMS(ROT2, MASS, good[i].value));
    expect("rot2,deviation=2", TERMS(ROT2, DEVIATION, 2));
    expect("rot2,deviation=1.99", TERMS(ROT2, DEVIATION, 1.99f));
    expect("rot2,l2=0.00085", TERMS(ROT2, L2, 0.00085f));
    expect("rot2,l2=2", TERMS(ROT2, L2, 2));
    expect("rot2,mass=1,fastgen=0.0000000001", TERMS(ROT2, MASS, 1, .fastgen = 1e-10f));
    expect("rot2,mass=1,fastgen=1.000", TERMS(ROT2, MASS, 1, .fastgen = 1));
    expect("rot2,mass=1,fastgen=0.995", TERMS(ROT2, MASS, 1, .fastgen = 0.995f));
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
    expect("default", TERMS(KLT1, L2, 0.0006f));
    expect("quality", TERMS(ROT4, DEVIATION, 0.01f));
    uint32_t n = 0;
    const char *name, *meaning;
    while ((name = policy_preset(n, &meaning)) != NULL) {
        char sentence[SENTENCE], longer[64];
        struct policy_terms of_meaning;
        assert_true(name[0] && strlen(name) < 64 && meaning && meaning[0] && strlen(meaning) < 64);
        if (strcmp(name, "full") != 0) {
            assert_int_equal(policy_parse(meaning, &of_meaning, sentence, sizeof(sentence)), 0);
            expect(name, of_meaning);
            snprintf(longer, sizeof(longer), "%s,fastgen=0.95", name); /* also instead of the preset's own */
            of_meaning.fastgen = 0.95f;
            expect(longer, of_meaning);
        }
        n++;
    }
    assert_int_equal(n, 7);
    assert_null(policy_preset(UINT32_MAX, &meaning));
}

/* HCAttention as published: tau 0.9, approximate weights, nothing instead of what is not read. */
static void presets_of_the_papers(void **state)
{
    (void)state;
    struct policy_terms terms = {.codec = POLICY_CODEC_PQ,
                                 .n_dims = 2,
                                 .n_centroids = 4096,
                                 .selector = POLICY_SELECTOR_MASS,
                                 .parameter = 0.9f,
                                 .weights = true};
    expect("hcattention-25", terms);
    terms.n_dims = 4;
    expect("hcattention-12.5", terms);
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
    "full,fastgen=0.9",
    "full,",
    "default,weights",
    "default,fastgen",
    "default,fastgen=",
    "default,fastgen=0",
    "default,fastgen=0.0000000000",
    "default,fastgen=1.0000001",
    "default,fastgen=0.9,",
    "default,fastgen=0.9,fastgen=0.9",
    "default,fastgen=0.9,weights",
    "fastgen=0.9,default",
    "rot2,fastgen=0.9",
    "rot2,fastgen=0.9,mass=0.5",
    "rot2,mass=0.5,fastgen",
    "rot2,mass=0.5,fastgen=0.9.",
    "rot2,mass=0.5,fastgen=-0.9",
    "rot2,mass=0.5,fastgen=0.9,fastgen=0.9",
    "hcattention-12,fastgen=0.9",
    "hcattention",
    "pair,mass=0.5",
    "pair4,mass=0.5",
    "pair0,mass=0.5",
    "pq,mass=0.5",
    "pq/256,mass=0.5",
    "pq1,mass=0.5",
    "pq3,mass=0.5",
    "pq16,mass=0.5",
    "pq2/,mass=0.5",
    "pq2/0,mass=0.5",
    "pq2/128,mass=0.5",
    "pq2/257,mass=0.5",
    "pq2/0256,mass=0.5",
    "pq2/8192,mass=0.5",
    "pq2/4096x,mass=0.5",
    "pq2/25x,mass=0.5",
    "pq2/4096/4096,mass=0.5",
    "pq2/4294967552,mass=0.5", /* 256 modulo 2^32 */
    "pq2.256,mass=0.5",
    "pq2,",
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
        if (strncmp(sentence, "policy \"", 8) != 0 || strpbrk(sentence, "\n\r\t"))
            fail_msg("\"%s\": no sentence: %s", bad[i], sentence);
    }
}

/* The sentence names the word that is wrong, and says what there is instead. */
static void sentences_say_what_is_wrong(void **state)
{
    (void)state;
    static const char *const forms =
        "hcattention-12.5, full, or f16|rot4|rot3|rot2|pair3|pair2|pair1|klt2|klt1|klt0|pqD/C,";
    static const char *const selectors = "there is: deviation=0..2|mass=0..1|l2=0..2";
    static const char *const pq = "D = 2, 4 or 8 dimensions and C = 256..4096 centroids, a power of two";
    static const char *const options = "behind the selector there is: weights, notail, fastgen=0..1";
    static const char *const recovery = "the recovery is a number above 0, at most 1";
    const char *const cases[][3] = {
        {"", "\"\"", forms},
        {"rot7,mass=0.5", "\"rot7\"", forms},
        {"rot2", "behind \"rot2\"", selectors},
        {"pair1", "behind \"pair1\"", selectors},
        {"rot2,half=1", "\"half=1\"", selectors},
        {"rot2,mass=7", "\"mass=7\"", "0..1"},
        {"rot2,mass=0.00000000001", "\"mass=0.00000000001\"", "at most 12 characters"},
        {"rot2,l2=2.1", "\"l2=2.1\"", "0..2"},
        {"rot2,l2", "\"l2\"", selectors},
        {"rot2,deviation=7", "\"deviation=7\"", "0..2"},
        {"pq3,mass=0.5", "\"pq3\"", pq},
        {"pq2/100,mass=0.5", "\"pq2/100\"", pq},
        {"rot2,mass=0.5,tails", "\"tails\"", options},
        {"rot2,mass=0.5,notail,notail", "\"notail\"", "twice"},
        {"rot2,mass=0.5,fastgen=0.5,fastgen=0.5", "\"fastgen=0.5\"", "twice"},
        {"rot2,mass=0.5,fastgen=0", "\"fastgen=0\"", recovery},
        {"small,fastgen=1.5", "\"fastgen=1.5\"", recovery},
        {"small,notail", "\"notail\"", "behind a preset there is only fastgen=0..1"},
        {"small,fastgen=0.5,notail", "\"notail\"", "nothing can be said behind fastgen of a preset"},
        {"full,fastgen=0.9", "full,fastgen=0.9", "nothing can be said behind it"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char sentence[SENTENCE];
        struct policy_terms terms;
        assert_int_equal(policy_parse(cases[i][0], &terms, sentence, sizeof(sentence)), -EINVAL);
        if (!strstr(sentence, cases[i][1]) || !strstr(sentence, cases[i][2]))
            fail_msg("%s: %s", cases[i][0], sentence);
    }
}

/* A name fits into a session's record. */
static void names_have_a_longest(void **state)
{
    (void)state;
    char sentence[SENTENCE];
    struct policy_terms terms;
    const char *longest = "pq2/4096,deviation=0.1234567890,weights,notail,fastgen=0.9999999";
    char name[64] = "";
    memcpy(name, longest, 63); /* without its last digit */
    assert_int_equal(strlen(name), 63);
    assert_int_equal(policy_parse(name, &terms, sentence, sizeof(sentence)), 0);
    assert_int_equal(policy_parse(longest, &terms, sentence, sizeof(sentence)), -EINVAL);
    assert_non_null(strstr(sentence, "64 bytes; at most 63"));
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
        cmocka_unit_test(anything_else_is_refused),   cmocka_unit_test(sentences_say_what_is_wrong),
        cmocka_unit_test(presets_of_the_papers),      cmocka_unit_test(names_have_a_longest),
        cmocka_unit_test(long_names_and_small_rooms),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
