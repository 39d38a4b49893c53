/* test_tasks.c - the tasks of `hcattn eval --tasks`: what their prompts hold, their lengths, determinism, scores. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "client/tasks/task.h"
#include "client/tasks/task_text.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct task_sample make(const char *name, uint64_t seed, size_t size)
{
    struct task_sample sample;
    const struct task *task = task_find(name);
    assert_non_null(task);
    assert_int_equal(task_make(task, seed, task->n_min + size, &sample), 0);
    return sample;
}

static size_t count_of(const char *text, const char *part)
{
    size_t n = 0;
    for (const char *at = text; (at = strstr(at, part)) != NULL; at += strlen(part))
        n++;
    return n;
}

/* The last section of the text that begins so. */
static const char *last(const char *text, const char *part)
{
    const char *found = NULL;
    for (const char *at = text; (at = strstr(at, part)) != NULL; at++)
        found = at;
    assert_non_null(found);
    return found;
}

/* Every task: answers are in the text but not in the line that asks; nothing but ASCII; sizes make lengths. */
static void test_all(void **state)
{
    (void)state;
    for (size_t i = 0; task_at(i); i++)
        for (uint64_t seed = 0; seed < 20; seed++) {
            const char *name = task_at(i)->name;
            struct task_sample a = make(name, seed, 40 + seed), b = make(name, seed, 40 + seed),
                               other = make(name, seed + 1, 40 + seed), longer = make(name, seed, 200);
            assert_string_equal(a.prompt, b.prompt);
            assert_string_not_equal(a.prompt, other.prompt);
            assert_true(strlen(longer.prompt) > strlen(a.prompt) + 100);
            assert_true(a.n_answers > 0 && a.n_answers == b.n_answers);
            for (const char *c = a.prompt; *c; c++)
                assert_true((*c == '\n' && c[-1] != ' ') || (*c >= ' ' && *c <= '~'));
            assert_true(a.prompt[strlen(a.prompt) - 1] != ' '); /* a token of its own for most tokenizers */
            for (size_t k = 0; k < a.n_answers; k++) {
                assert_string_equal(a.answers[k], b.answers[k]);
                assert_non_null(strstr(a.prompt, a.answers[k]));
                assert_null(strstr(last(a.prompt, "\n"), a.answers[k]));
            }
            task_sample_fini(&a);
            task_sample_fini(&b);
            task_sample_fini(&other);
            task_sample_fini(&longer);
        }
    assert_int_equal(task_find("vt") == NULL, 0);
    assert_null(task_find("qa"));
    assert_null(task_find(""));
}

static void test_smallest(void **state)
{
    (void)state;
    for (size_t i = 0; task_at(i); i++) {
        struct task_sample sample = make(task_at(i)->name, 3, 0);
        assert_non_null(strstr(sample.prompt, sample.answers[0]));
        task_sample_fini(&sample);
        task_sample_fini(&sample);
    }
}

/* What is asked for stands beside its key, once. */
static void test_needles(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        const char *before, *after;        /* around the key in the last line */
        const char *begin, *between, *end; /* around key and value in the text */
    } cases[] = {{"niah_single", "number for ", " is", "The secret number for ", " is ", "."},
                 {"niah_multivalue", "numbers for ", " are", "One of the secret numbers for ", " is ", "."},
                 {"niah_multikey_2", "number for ", " is", "\nThe secret number for ", " is ", ".\n"},
                 {"niah_multikey_3", "\n", ":", "\n", ": ", "\n"},
                 {"kv", "\n", ":", "\n", ": ", "\n"}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        for (uint64_t seed = 0; seed < 20; seed++) {
            struct task_sample sample = make(cases[i].name, seed, 700);
            char key[128], needle[512];
            const char *line = last(sample.prompt, "\n"), *from = last(line, cases[i].before) + strlen(cases[i].before);
            snprintf(key, sizeof(key), "%.*s", (int)(last(from, cases[i].after) - from), from);
            assert_true(strlen(key) > 1);
            assert_int_equal(sample.n_answers, strcmp(cases[i].name, "niah_multivalue") == 0 ? 4 : 1);
            for (size_t k = 0; k < sample.n_answers; k++) {
                snprintf(needle, sizeof(needle), "%s%s%s%s%s", cases[i].begin, key, cases[i].between, sample.answers[k],
                         cases[i].end);
                assert_int_equal(count_of(sample.prompt, needle), 1);
                if (strcmp(cases[i].name, "kv") != 0) /* its numbers are short: two keys may have the same */
                    assert_int_equal(count_of(sample.prompt, sample.answers[k]), 1);
            }
            task_sample_fini(&sample);
        }
}

/* Needles are anywhere in the text, not at one place. */
static void test_depths(void **state)
{
    (void)state;
    size_t n_early = 0, n_late = 0;
    for (uint64_t seed = 0; seed < 40; seed++) {
        struct task_sample sample = make("niah_single", seed, 200);
        size_t depth = (size_t)(strstr(sample.prompt, sample.answers[0]) - sample.prompt), n = strlen(sample.prompt);
        n_early += depth < n / 4;
        n_late += depth > n - n / 4;
        task_sample_fini(&sample);
    }
    assert_true(n_early >= 3 && n_late >= 3);
}

static void test_chain(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 20; seed++) {
        struct task_sample sample = make("vt", seed, 30);
        char first[8], hop[64];
        const char *question = last(sample.prompt, "The five variables are VAR "), *at = sample.prompt;
        snprintf(first, sizeof(first), "%.3s", question + strlen("The five variables are VAR "));
        assert_int_equal(sample.n_answers, 4);
        for (size_t k = 0; k < sample.n_answers; k++) {
            snprintf(hop, sizeof(hop), "VAR %s = VAR %s.", sample.answers[k], k ? sample.answers[k - 1] : first);
            assert_int_equal(count_of(sample.prompt, hop), 1);
            assert_true(strstr(sample.prompt, hop) > at); /* a variable is assigned before it is used */
            at = strstr(sample.prompt, hop);
        }
        task_sample_fini(&sample);
    }
}

/* Words of the list behind the last `heading`, up to a line's end: is each answer there more often than all others? */
static void check_counts(const struct task_sample *sample, const char *heading, double times)
{
    char list[1 << 16];
    const char *from = last(sample->prompt, heading) + strlen(heading);
    snprintf(list, sizeof(list), "%.*s", (int)strcspn(from, "\n"), from);
    size_t least = SIZE_MAX, most = 0;
    char *saved = NULL, *words = strdup(list);
    char padded[(1 << 16) + 4], padded_word[64];
    snprintf(padded, sizeof(padded), " %s ", list);
    for (char *c = padded; *c; c++) /* neighbours of the same word are counted both */
        if (*c == ' ')
            *c = '|';
    for (char *word = strtok_r(words, " ", &saved); word; word = strtok_r(NULL, " ", &saved)) {
        bool expected = false;
        size_t n = 0;
        snprintf(padded_word, sizeof(padded_word), "|%s|", word);
        for (const char *at = padded; (at = strstr(at, padded_word)) != NULL; at++)
            n++;
        for (size_t k = 0; k < sample->n_answers; k++)
            expected |= strcmp(sample->answers[k], word) == 0;
        if (expected)
            least = n < least ? n : least;
        else
            most = n > most ? n : most;
    }
    free(words);
    assert_true(least != SIZE_MAX && most > 0);
    assert_true((double)least >= times * (double)most);
}

static void test_frequencies(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 5; seed++) {
        static const size_t sizes[] = {10, 100, 500, 1200};
        for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
            struct task_sample common = make("cwe", seed, sizes[i]), frequent = make("fwe", seed, sizes[i]);
            assert_int_equal(common.n_answers, 10);
            assert_int_equal(frequent.n_answers, 3);
            check_counts(&common, "Words: ", 3);
            check_counts(&frequent, "Text: ", 1.0001);
            task_sample_fini(&common);
            task_sample_fini(&frequent);
        }
    }
}

static void test_quotation(void **state)
{
    (void)state;
    struct task_sample sample = make("copy", 5, 30);
    char quotation[512] = "", begun[128];
    size_t n = 0;
    snprintf(begun, sizeof(begun), "%s", last(sample.prompt, "\""));
    n = (size_t)snprintf(quotation, sizeof(quotation), "%s", begun);
    for (size_t k = 0; k < sample.n_answers; k++)
        n += (size_t)snprintf(quotation + n, sizeof(quotation) - n, " %s", sample.answers[k]);
    assert_int_equal(count_of(sample.prompt, quotation), 1);
    task_sample_fini(&sample);
}

/* ---- lengths ---- */

struct counter {
    unsigned n_calls, fails_at; /* 0: never */
};

/* As a tokenizer might: more for digits than for letters. */
static int count_tokens(void *context, const char *text, size_t *ret_n_tokens)
{
    struct counter *counter = context;
    size_t n = 0;
    if (++counter->n_calls == counter->fails_at)
        return -ENOTCONN;
    for (const char *c = text; *c; c++)
        n += (*c >= '0' && *c <= '9') || *c == '-' || *c == '.' || *c == '\n' ? 4 : 1;
    *ret_n_tokens = n / 4;
    return 0;
}

static void test_lengths(void **state)
{
    (void)state;
    static const size_t lengths[] = {700, 1024, 2048, 4096, 8192};
    for (size_t i = 0; task_at(i); i++)
        for (size_t k = 0; k < sizeof(lengths) / sizeof(lengths[0]); k++) {
            struct counter counter = {.n_calls = 0};
            struct task_sample sample;
            size_t n_tokens = 0, counted = 0;
            assert_int_equal(task_fit(task_at(i), k, lengths[k], count_tokens, &counter, &sample, &n_tokens), 0);
            assert_true(counter.n_calls <= 12);
            assert_true(n_tokens <= lengths[k]);
            assert_true(n_tokens >= lengths[k] - lengths[k] / 20 - 64);
            assert_int_equal(count_tokens(&counter, sample.prompt, &counted), 0);
            assert_int_equal(counted, n_tokens);
            assert_non_null(strstr(sample.prompt, sample.answers[0]));
            task_sample_fini(&sample);
        }
}

static void test_lengths_that_fail(void **state)
{
    (void)state;
    struct counter counter = {.n_calls = 0};
    struct task_sample sample = {.n_answers = 77};
    size_t n_tokens = 77;
    for (size_t i = 0; task_at(i); i++)
        assert_int_equal(task_fit(task_at(i), 0, 10, count_tokens, &counter, &sample, &n_tokens), -E2BIG);
    for (unsigned n = 1; n <= 3; n++) {
        counter = (struct counter){.fails_at = n};
        assert_int_equal(task_fit(task_find("vt"), 0, 2000, count_tokens, &counter, &sample, &n_tokens), -ENOTCONN);
        assert_int_equal(counter.n_calls, n);
    }
    assert_int_equal(sample.n_answers, 77);
    assert_int_equal(n_tokens, 77);
}

/* ---- scores, words ---- */

static void test_scores(void **state)
{
    (void)state;
    struct task_sample sample = {.answers = {"Alpha", "12", "river", "XYZ"}, .n_answers = 4};
    assert_float_equal((float)task_score(&sample, "alpha, 12, the river and xyz."), 1.0f, 1e-6f);
    assert_float_equal((float)task_score(&sample, " 312 XY"), 0.25f, 1e-6f);
    assert_float_equal((float)task_score(&sample, "ALPHA river"), 0.5f, 1e-6f);
    assert_float_equal((float)task_score(&sample, ""), 0.0f, 1e-6f);
    sample.n_answers = 0;
    assert_float_equal((float)task_score(&sample, "alpha"), 0.0f, 1e-6f);
}

static int compare(const void *a, const void *b)
{
    return strcmp(a, b);
}

static void test_keys(void **state)
{
    (void)state;
    enum { N = 2000 };
    static char keys[N][TASK_TEXT_KEY_SIZE];
    assert_true(task_text_n_words() > 400 && task_text_n_words() < N / 2); /* the longest list of common words; pairs */
    for (size_t i = 0; i < N; i++)
        task_text_key(i, keys[i]);
    qsort(keys, N, sizeof(keys[0]), compare);
    for (size_t i = 1; i < N; i++)
        assert_string_not_equal(keys[i - 1], keys[i]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_all),       cmocka_unit_test(test_smallest), cmocka_unit_test(test_needles),
        cmocka_unit_test(test_depths),    cmocka_unit_test(test_chain),    cmocka_unit_test(test_frequencies),
        cmocka_unit_test(test_quotation), cmocka_unit_test(test_lengths),  cmocka_unit_test(test_lengths_that_fail),
        cmocka_unit_test(test_scores),    cmocka_unit_test(test_keys)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
