/* Word boundaries of the four patterns, and that none of them hangs or stops. */
#include "tests/unit/model/tiny.h"

#include "gpu-worker/model/pretokenizer.h"

static struct pretokenizer *make(const char *name)
{
    struct pretokenizer *pretokenizer = NULL;
    assert_int_equal(pretokenizer_new((struct gguf_string){name, strlen(name)}, &pretokenizer), 0);
    return pretokenizer;
}

/* `expected` has | between the words. */
static void split(const char *name, const char *expected)
{
    struct pretokenizer *pretokenizer = make(name);
    struct pretokenizer_scratch *scratch = pretokenizer_scratch_new(pretokenizer);
    char text[256], found[512];
    size_t n = 0, n_found = 0;
    for (const char *at = expected; *at; at++)
        if (*at != '|')
            text[n++] = *at;
    for (size_t at = 0; at < n;) {
        size_t length = pretokenizer_next(pretokenizer, scratch, text, n, at);
        assert_in_range(length, 1, n - at);
        if (at)
            found[n_found++] = '|';
        memcpy(found + n_found, text + at, length);
        n_found += length;
        at += length;
    }
    found[n_found] = 0;
    if (strcmp(found, expected) != 0)
        fail_msg("%s: %s, expected %s", name, found, expected);
    pretokenizer_scratch_free(scratch);
    pretokenizer_free(pretokenizer);
}

static void gpt2_words(void **state)
{
    (void)state;
    split("gpt-2", "Hello|,| world|!| It|'s|  | 1234| dogs|'|S|\n\n");
    split("gpt-2", "a|  | b| |\n|c|   ");
    split("gpt-2", "we|'re| they|'ll|'ve|'d|'m|'t");
    split("gpt-2", "na\xc3\xafve| \xe6\xbc\xa2\xe5\xad\x97| \xd9\xa3\xd9\xa4| \xe2\x85\xa7|!?");
    split("gpt-2", "a|\xc2\xa0|b|\xe3\x80\x80|c|\xe1\xa0\x8e|d"); /* U+00A0, U+3000 are spaces, U+180E is not */
    split("phi-2", "Hi| 42");
}

static void smollm_words(void **state)
{
    (void)state;
    split("smollm", "a| |1|2|3|b");
    split("smollm", "a|  |1| |2|  | x|   ");
    split("smollm", "v|1|.|2|.|3");
    split("smollm", "It|'s| \xc3\xa9t\xc3\xa9|!|\xe2\x85\xa7|\xc2\xb2");
    split("smollm", "\n\n|\n|x|\t|\t|y");
}

static void llama3_words(void **state)
{
    (void)state;
    split("llama-bpe", "Hello|,| world|!\n\n|It|'S| |123|456|7| dogs");
    split("llama-bpe", "(x|)|\ty|  \n  \n|  | z| ");
    split("llama-bpe", "_foo|$bar|...|baz|\xc2\xa0qux");
    split("llama3", "I|'LL|'Ve| '|1|'");
    split("llama-v3", "a|123|456|789|0");
}

static void qwen2_words(void **state)
{
    (void)state;
    split("qwen2", "a| |1|2|3|b|'S| |\xc2\xb2");
    split("qwen2", "  \n\n|x|  ");
}

static void unknown_names_are_refused(void **state)
{
    static const char *const names[] = {"", "default", "smoll", "smollmm", "deepseek-llm"};
    struct pretokenizer *pretokenizer = NULL;
    (void)state;
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        assert_int_equal(pretokenizer_new((struct gguf_string){names[i], strlen(names[i])}, &pretokenizer), -ENOTSUP);
    assert_null(pretokenizer);
    assert_null(pretokenizer_free(NULL));
    assert_null(pretokenizer_scratch_free(NULL));
}

static void llama_bpe_has_its_own_rules(void **state)
{
    struct pretokenizer *llama = make("llama-bpe"), *qwen = make("qwen2");
    (void)state;
    assert_true(pretokenizer_takes_whole_words(llama) && pretokenizer_adds_bos(llama));
    assert_false(pretokenizer_takes_whole_words(qwen) || pretokenizer_adds_bos(qwen));
    pretokenizer_free(llama);
    pretokenizer_free(qwen);
}

/* A megabyte of one character: one word or many, but through in time linear in its length. */
static void long_runs_are_no_trap(void **state)
{
    static const char *const names[] = {"smollm", "gpt-2", "llama-bpe", "qwen2"};
    static const char runs[] = "a1 \n\t!'";
    size_t n = 1 << 20;
    char *text = malloc(n);
    (void)state;
    for (size_t k = 0; k < sizeof names / sizeof names[0]; k++) {
        struct pretokenizer *pretokenizer = make(names[k]);
        struct pretokenizer_scratch *scratch = pretokenizer_scratch_new(pretokenizer);
        for (const char *c = runs; *c; c++) {
            memset(text, *c, n);
            for (size_t at = 0; at < n;)
                at += pretokenizer_next(pretokenizer, scratch, text, n, at);
        }
        pretokenizer_scratch_free(scratch);
        pretokenizer_free(pretokenizer);
    }
    free(text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gpt2_words),
        cmocka_unit_test(smollm_words),
        cmocka_unit_test(llama3_words),
        cmocka_unit_test(qwen2_words),
        cmocka_unit_test(unknown_names_are_refused),
        cmocka_unit_test(llama_bpe_has_its_own_rules),
        cmocka_unit_test(long_runs_are_no_trap),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
