/* Every string of tests/golden/tokens.json gives llama.cpp's ids, exactly, and comes back from them. */
#include "tests/unit/model/golden.h"

/* What can come back: this vocabulary has no token for these control characters, and encoding drops them. */
static size_t encodable(const char *text, size_t n_bytes, char *out)
{
    size_t n = 0;
    for (size_t i = 0; i < n_bytes; i++)
        if (!memchr("\x04\x06\x13\x14\x16\x1d", text[i], 6))
            out[n++] = text[i];
    return n;
}

static int check(const struct golden *golden, const char *list, unsigned flags)
{
    const json_t *entries = json_object_get(golden->data, list);
    int n_wrong = 0;
    assert_true(json_array_size(entries) > 0);
    for (size_t i = 0; i < json_array_size(entries); i++) {
        const json_t *entry = json_array_get(entries, i), *text = json_object_get(entry, "text");
        uint32_t *ids = NULL;
        size_t n_ids = 0, n_back = 0;
        char name[64], *back = NULL;
        snprintf(name, sizeof name, "%s[%zu]", list, i);
        assert_int_equal(
            tokenizer_encode(golden->tokenizer, json_string_value(text), json_string_length(text), flags, &ids, &n_ids),
            0);
        n_wrong += golden_differs(name, ids, n_ids, json_object_get(entry, "ids"));
        assert_int_equal(tokenizer_decode(golden->tokenizer, ids, n_ids, TOKENIZER_SHOW_SPECIAL, &back, &n_back), 0);
        char *expected = malloc(json_string_length(text) + 1);
        size_t n_expected = encodable(json_string_value(text), json_string_length(text), expected);
        if (n_back != n_expected || memcmp(back, expected, n_back) != 0) {
            print_error("%s: does not come back: \"%s\"\n", name, back);
            n_wrong++;
        }
        free(expected);
        free(back);
        free(ids);
    }
    return n_wrong;
}

static void plain_strings_have_llama_cpp_ids(void **state)
{
    struct golden golden = {0};
    (void)state;
    golden_open(&golden, "tests/golden/tokens.json");
    assert_int_equal(check(&golden, "plain", 0), 0);
    golden_close(&golden);
}

static void special_strings_have_llama_cpp_ids(void **state)
{
    struct golden golden = {0};
    (void)state;
    golden_open(&golden, "tests/golden/tokens.json");
    assert_int_equal(check(&golden, "special", TOKENIZER_PARSE_SPECIAL), 0);
    golden_close(&golden);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(plain_strings_have_llama_cpp_ids),
        cmocka_unit_test(special_strings_have_llama_cpp_ids),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
