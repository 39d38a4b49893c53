/* SentencePiece: scores, spaces, byte fallback, and spellings of control tokens that stay text. */
#include "tests/unit/model/tiny_tokenizer.h"

static void scores_join_and_spaces_lead(void **state)
{
    struct tiny_tokenizer tiny = tiny_tokenizer("--tokenizer spm");
    (void)state;
    assert_true(tokenizer_adds_bos(tiny.tokenizer));
    assert_int_equal(tokenizer_bos(tiny.tokenizer), 1);
    assert_int_equal(tokenizer_eos(tiny.tokenizer), 2);
    tiny_tokenizer_check(&tiny, "", 0, "");
    tiny_tokenizer_check(&tiny, "", TOKENIZER_ADD_BOS, "<s>");
    tiny_tokenizer_check(&tiny, "the world", 0, " the| world");
    tiny_tokenizer_check(&tiny, "the world", TOKENIZER_ADD_BOS, "<s>| the| world");
    tiny_tokenizer_check(&tiny, " the", 0, " | the"); /* its own space and the added one */
    tiny_tokenizer_check(&tiny, "12 100", 0, " |12| |1|00");
    tiny_tokenizer_free(&tiny);
    tiny = tiny_tokenizer("--tokenizer spm --set tokenizer.ggml.add_space_prefix=bool:false");
    tiny_tokenizer_check(&tiny, "the world", 0, "t|he| world");
    tiny_tokenizer_free(&tiny);
}

static void unknown_characters_become_bytes(void **state)
{
    struct tiny_tokenizer tiny = tiny_tokenizer("--tokenizer spm");
    uint32_t *ids = NULL;
    size_t n_ids;
    (void)state;
    tiny_tokenizer_check(&tiny, "\xc3\xa9\xe6\xbc\xa2\n", 0, " |\xc3\xa9|\xe6|\xbc|\xa2|\n");
    assert_int_equal(tokenizer_encode(tiny.tokenizer, "\n", 1, 0, &ids, &n_ids), 0);
    assert_int_equal(n_ids, 2);
    assert_int_equal(ids[1], 3 + 10); /* <0x0A> */
    free(ids);
    tiny_tokenizer_free(&tiny);
}

static void special_spellings_stay_text(void **state)
{
    struct tiny_tokenizer tiny = tiny_tokenizer("--tokenizer spm --chat zephyr");
    uint32_t *ids = NULL;
    size_t n_ids;
    static const char text[] = "<s></s><unk><0x0A>";
    (void)state;
    assert_int_equal(tokenizer_encode(tiny.tokenizer, text, strlen(text), 0, &ids, &n_ids), 0);
    for (size_t i = 0; i < n_ids; i++)
        assert_true(ids[i] > 258); /* neither control nor byte token */
    free(ids);
    /* After a special token a text begins again, with its space. */
    tiny_tokenizer_check(&tiny, "<s>the</s>the", TOKENIZER_PARSE_SPECIAL, "<s>| the|</s>| the");
    assert_true(tokenizer_is_end(tiny.tokenizer, 2));
    assert_false(tokenizer_is_end(tiny.tokenizer, 1));
    tiny_tokenizer_free(&tiny);
}

static void decoding_takes_the_added_space_off(void **state)
{
    struct tiny_tokenizer tiny = tiny_tokenizer("--tokenizer spm");
    uint64_t random = 9;
    uint32_t *ids = NULL;
    size_t n_ids, n;
    char *back = NULL, text[4096];
    (void)state;
    tiny_tokenizer_round_trip(&tiny, "the world", 9, 0);
    tiny_tokenizer_round_trip(&tiny, "  the", 5, 0);
    assert_int_equal(tokenizer_encode(tiny.tokenizer, "the", 3, TOKENIZER_ADD_BOS, &ids, &n_ids), 0);
    assert_int_equal(tokenizer_decode(tiny.tokenizer, ids, n_ids, 0, &back, &n), 0);
    assert_string_equal(back, "the");
    free(back);
    assert_int_equal(tokenizer_decode(tiny.tokenizer, ids, n_ids, TOKENIZER_CONTINUED, &back, &n), 0);
    assert_string_equal(back, " the");
    free(back);
    free(ids);
    for (int i = 0; i < 500; i++) {
        n = tiny_random_text(&random, tiny_random(&random) % 60, text);
        for (size_t k = 0; k + 3 <= n; k++) /* U+2581 itself reads as a space: this one thing does not come back */
            if (memcmp(text + k, "\xe2\x96\x81", 3) == 0)
                memcpy(text + k, "###", 3);
        tiny_tokenizer_round_trip(&tiny, text, n, 0);
    }
    tiny_tokenizer_free(&tiny);
}

static void damaged_scores_are_refused(void **state)
{
    (void)state;
    tiny_tokenizer_refuse("--tokenizer spm --drop tokenizer.ggml.scores", -EINVAL, "score");
    tiny_tokenizer_refuse("--tokenizer spm --set tokenizer.ggml.scores=f32:1", -EINVAL, "score");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(scores_join_and_spaces_lead), cmocka_unit_test(unknown_characters_become_bytes),
        cmocka_unit_test(special_spellings_stay_text), cmocka_unit_test(decoding_takes_the_added_space_off),
        cmocka_unit_test(damaged_scores_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
