/* Byte-level BPE: merges, special tokens, what users may not inject, ends of generation, limits. */
#include "tests/unit/model/tiny_tokenizer.h"

#include <pthread.h>
#include <time.h>

static void merges_join_in_their_order(void **state)
{
    struct tiny_tokenizer tiny = tiny_tokenizer("");
    (void)state;
    tiny_tokenizer_check(&tiny, "", 0, "");
    tiny_tokenizer_check(&tiny, "the world", 0, "t|he| world");
    tiny_tokenizer_check(&tiny, " the  there", 0, " the| | the|re");
    tiny_tokenizer_check(&tiny, "12 100", 0, "1|2| |1|0|0"); /* smollm: digits stand alone */
    tiny_tokenizer_check(&tiny, "heheer", 0, "he|he|er");
    tiny_tokenizer_check(&tiny, "x\xc3\xa9", 0, "x|\xc3|\xa9");
    tiny_tokenizer_free(&tiny);
    tiny = tiny_tokenizer("--pre gpt-2");
    tiny_tokenizer_check(&tiny, "12 100", 0, "12| |1|00");
    tiny_tokenizer_free(&tiny);
}

static void special_tokens_come_only_where_asked(void **state)
{
    struct tiny_tokenizer tiny = tiny_tokenizer("--user-token ZZ --user-token ZZTOP");
    (void)state;
    tiny_tokenizer_check(&tiny, "a<|im_end|>b", 0, "a|<|||i|m|_|en|d|||>|b");
    tiny_tokenizer_check(&tiny, "a<|im_end|>b", TOKENIZER_PARSE_SPECIAL, "a|<|im_end|>|b");
    tiny_tokenizer_check(&tiny, "<|im_start|><|im_end|", TOKENIZER_PARSE_SPECIAL, "<|im_start|>|<|||i|m|_|en|d||");
    tiny_tokenizer_check(&tiny, "aZZTOPZZ", 0, "a|ZZTOP|ZZ"); /* user-defined ones always; the longest first */
    tiny_tokenizer_check(&tiny, "ZZZTOP", 0, "Z|ZZTOP");
    tiny_tokenizer_check(&tiny, "the", TOKENIZER_ADD_BOS, "t|he"); /* this file asks for no BOS */
    tiny_tokenizer_free(&tiny);

    tiny = tiny_tokenizer("--set tokenizer.ggml.add_bos_token=bool:true");
    assert_true(tokenizer_adds_bos(tiny.tokenizer));
    tiny_tokenizer_check(&tiny, "the", TOKENIZER_ADD_BOS, "<|im_start|>|t|he");
    tiny_tokenizer_check(&tiny, "the", 0, "t|he");
    tiny_tokenizer_check(&tiny, "", TOKENIZER_ADD_BOS, "<|im_start|>");
    tiny_tokenizer_free(&tiny);
}

static void llama_bpe_adds_bos_and_takes_whole_words(void **state)
{
    struct tiny_tokenizer tiny = tiny_tokenizer("--pre llama-bpe --chat llama-3 --word zebra");
    (void)state;
    assert_true(tokenizer_adds_bos(tiny.tokenizer));
    tiny_tokenizer_check(&tiny, "12", TOKENIZER_ADD_BOS, "<|begin_of_text|>|12");
    tiny_tokenizer_check(&tiny, "zebra zebra", 0, "zebra| |z|e|b|r|a"); /* no merge leads to it */
    tiny_tokenizer_free(&tiny);
    tiny = tiny_tokenizer("--pre gpt-2 --word zebra");
    tiny_tokenizer_check(&tiny, "zebra", 0, "z|e|b|r|a");
    tiny_tokenizer_free(&tiny);
    tiny = tiny_tokenizer("--pre llama-bpe --chat llama-3 --set tokenizer.ggml.add_bos_token=bool:false");
    assert_false(tokenizer_adds_bos(tiny.tokenizer));
    tiny_tokenizer_free(&tiny);
}

static void parts_meet_without_spelling_tokens_together(void **state)
{
    struct tiny_tokenizer tiny = tiny_tokenizer("");
    const struct tokenizer_part parts[] = {
        {"<|im_end|>t", 11, true}, {"he<|im_", 7, false}, {"end|><|im_end|>", 15, true}, {"", 0, true},
        {NULL, 0, false},
    };
    uint32_t *ids = NULL;
    size_t n_ids = 0;
    (void)state;
    assert_int_equal(tokenizer_encode_parts(tiny.tokenizer, parts, 5, 0, &ids, &n_ids), 0);
    char *shown = tiny_tokenizer_show(tiny.tokenizer, ids, n_ids);
    assert_string_equal(shown, "<|im_end|>|t|he|<|||i|m|_|en|d|||>|<|im_end|>");
    free(shown);
    free(ids);
    const struct tokenizer_part halves[] = {{"\xc3", 1, true}, {"\xa9", 1, true}};
    assert_int_equal(tokenizer_encode_parts(tiny.tokenizer, halves, 2, 0, &ids, &n_ids), -EILSEQ);
    assert_int_equal(tokenizer_encode_parts(tiny.tokenizer, NULL, 0, 0, &ids, &n_ids), 0);
    assert_int_equal(n_ids, 0);
    free(ids);
    tiny_tokenizer_free(&tiny);
}

static void text_that_is_not_utf8_is_refused(void **state)
{
    static const char *const texts[] = {"\xff", "a\xc3", "\xed\xa0\x80", "\xc0\xaf", "\xf4\x90\x80\x80"};
    struct tiny_tokenizer tiny = tiny_tokenizer("");
    uint32_t *ids = NULL;
    size_t n_ids = 77;
    (void)state;
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++)
        assert_int_equal(tokenizer_encode(tiny.tokenizer, texts[i], strlen(texts[i]), 0, &ids, &n_ids), -EILSEQ);
    assert_null(ids);
    assert_int_equal(n_ids, 77);
    assert_int_equal(tokenizer_encode(tiny.tokenizer, "", (size_t)TOKENIZER_MAX_TEXT_BYTES + 1, 0, &ids, &n_ids),
                     -E2BIG);
    tiny_tokenizer_free(&tiny);
}

static void every_text_comes_back(void **state)
{
    struct tiny_tokenizer tiny = tiny_tokenizer("--user-token '  '");
    uint64_t random = 3;
    char text[4096];
    (void)state;
    tiny_tokenizer_round_trip(&tiny, "a\0b\0", 4, 0);
    for (int i = 0; i < 500; i++)
        tiny_tokenizer_round_trip(&tiny, text, tiny_random_text(&random, tiny_random(&random) % 60, text),
                                  i % 2 ? 2 : 0);
    tiny_tokenizer_free(&tiny);
}

static void pieces_and_decoding_hide_special_tokens(void **state)
{
    struct tiny_tokenizer tiny = tiny_tokenizer("");
    uint32_t *ids = NULL;
    size_t n_ids, n;
    const char *piece;
    char *text = NULL;
    (void)state;
    assert_int_equal(tokenizer_encode(tiny.tokenizer, " the<|im_end|>\xc3\xa9", 16, 2, &ids, &n_ids), 0);
    assert_int_equal(n_ids, 4);
    assert_int_equal(tokenizer_decode(tiny.tokenizer, ids, n_ids, 0, &text, &n), 0);
    assert_string_equal(text, " the\xc3\xa9");
    free(text);
    assert_int_equal(tokenizer_decode(tiny.tokenizer, ids, n_ids, TOKENIZER_SHOW_SPECIAL, &text, &n), 0);
    assert_string_equal(text, " the<|im_end|>\xc3\xa9");
    free(text);
    assert_int_equal(tokenizer_decode(tiny.tokenizer, ids, 3, 0, &text, &n), 0); /* half a character */
    assert_string_equal(text, " the\xef\xbf\xbd");
    free(text);
    assert_int_equal(tokenizer_piece(tiny.tokenizer, ids[1], 0, &piece, &n), 0);
    assert_int_equal(n, 0);
    assert_int_equal(tokenizer_piece(tiny.tokenizer, ids[2], 0, &piece, &n), 0);
    assert_int_equal(n, 1);
    assert_memory_equal(piece, "\xc3", 1);
    assert_true(tokenizer_is_special(tiny.tokenizer, ids[1]) && !tokenizer_is_special(tiny.tokenizer, ids[0]));
    uint32_t too_large = tokenizer_n_vocab(tiny.tokenizer);
    assert_int_equal(tokenizer_piece(tiny.tokenizer, too_large, 0, &piece, &n), -EINVAL);
    assert_int_equal(tokenizer_decode(tiny.tokenizer, &too_large, 1, 0, &text, &n), -EINVAL);
    assert_false(tokenizer_is_end(tiny.tokenizer, too_large) || tokenizer_is_special(tiny.tokenizer, UINT32_MAX));
    free(ids);
    tiny_tokenizer_free(&tiny);
}

static uint32_t one_id(const struct tiny_tokenizer *tiny, const char *text)
{
    uint32_t *ids = NULL, id;
    size_t n_ids;
    assert_int_equal(tokenizer_encode(tiny->tokenizer, text, strlen(text), 2, &ids, &n_ids), 0);
    assert_int_equal(n_ids, 1);
    id = ids[0];
    free(ids);
    return id;
}

static void ends_are_known_by_key_and_by_spelling(void **state)
{
    struct tiny_tokenizer tiny = tiny_tokenizer("--chat chatml");
    (void)state;
    assert_int_equal(tokenizer_eos(tiny.tokenizer), one_id(&tiny, "<|im_end|>"));
    assert_int_equal(tokenizer_bos(tiny.tokenizer), one_id(&tiny, "<|im_start|>"));
    assert_true(tokenizer_is_end(tiny.tokenizer, one_id(&tiny, "<|im_end|>")));
    assert_true(tokenizer_is_end(tiny.tokenizer, one_id(&tiny, "<|endoftext|>")));
    assert_false(tokenizer_is_end(tiny.tokenizer, one_id(&tiny, "<|im_start|>")));
    assert_false(tokenizer_is_end(tiny.tokenizer, one_id(&tiny, "a")));
    tiny_tokenizer_free(&tiny);

    tiny = tiny_tokenizer("--chat llama-3 --user-token '<|eom_id|>'"); /* marked as text by the file, still an end */
    assert_true(tokenizer_is_end(tiny.tokenizer, one_id(&tiny, "<|eot_id|>")));
    assert_true(tokenizer_is_end(tiny.tokenizer, one_id(&tiny, "<|end_of_text|>")));
    assert_true(tokenizer_is_end(tiny.tokenizer, one_id(&tiny, "<|eom_id|>")));
    assert_true(tokenizer_is_special(tiny.tokenizer, one_id(&tiny, "<|eom_id|>")));
    tiny_tokenizer_free(&tiny);

    tiny = tiny_tokenizer("--set tokenizer.ggml.eot_token_id=u32:65 --set tokenizer.ggml.eos_token_id=u32:999999");
    assert_true(tokenizer_is_end(tiny.tokenizer, 65));
    assert_int_equal(tokenizer_eos(tiny.tokenizer), TOKENIZER_NO_TOKEN); /* outside the vocabulary */
    tiny_tokenizer_free(&tiny);
}

static void other_tokenizers_are_refused_by_name(void **state)
{
    (void)state;
    tiny_tokenizer_refuse("--pre deepseek-llm", -ENOTSUP, "pre-tokenizer \"deepseek-llm\"");
    tiny_tokenizer_refuse("--drop tokenizer.ggml.pre", -ENOTSUP, "tokenizer.ggml.pre");
    tiny_tokenizer_refuse("--set tokenizer.ggml.model=str:bert", -ENOTSUP, "\"bert\"");
    tiny_tokenizer_refuse("--tokenizer none", -EINVAL, "no tokenizer");
    tiny_tokenizer_refuse("--drop tokenizer.ggml.tokens", -EINVAL, "no tokens");
    tiny_tokenizer_refuse("--drop tokenizer.ggml.merges", -EINVAL, "merges");
    tiny_tokenizer_refuse("--set tokenizer.ggml.token_type=u32:1", -EINVAL, "token_type");
    tiny_tokenizer_refuse("--set tokenizer.ggml.bos_token_id=u32:99999 --set tokenizer.ggml.add_bos_token=bool:true",
                          -EINVAL, "BOS");
}

static double seconds_since(const struct timespec *start)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)(now.tv_sec - start->tv_sec) + 1e-9 * (double)(now.tv_nsec - start->tv_nsec);
}

/* Quadratic merging would take hours here. */
static void a_megabyte_without_a_space_takes_seconds(void **state)
{
    struct tiny_tokenizer tiny = tiny_tokenizer("");
    size_t n = 1 << 20, n_ids;
    char *text = malloc(n);
    static const char *const patterns[] = {"e", "the", "<", "zq", " ", "\n", "<|im_end|>"};
    (void)state;
    for (size_t k = 0; k < sizeof patterns / sizeof patterns[0]; k++) {
        uint32_t *ids = NULL;
        struct timespec start;
        for (size_t i = 0; i < n; i++)
            text[i] = patterns[k][i % strlen(patterns[k])];
        clock_gettime(CLOCK_MONOTONIC, &start);
        assert_int_equal(tokenizer_encode(tiny.tokenizer, text, n, TOKENIZER_PARSE_SPECIAL, &ids, &n_ids), 0);
        assert_true(seconds_since(&start) < 60);
        free(ids);
    }
    free(text);
    tiny_tokenizer_free(&tiny);
}

static void *encode_often(void *argument)
{
    const struct tiny_tokenizer *tiny = argument;
    static const char text[] = "the world of <|im_end|> is in the text 12";
    for (int i = 0; i < 300; i++) {
        uint32_t *ids = NULL;
        size_t n_ids = 0;
        if (tokenizer_encode(tiny->tokenizer, text, strlen(text), (unsigned)i % 4, &ids, &n_ids) || n_ids < 10)
            return "failed";
        free(ids);
    }
    return NULL;
}

static void threads_share_a_tokenizer(void **state)
{
    struct tiny_tokenizer tiny = tiny_tokenizer("");
    pthread_t threads[4];
    (void)state;
    for (size_t i = 0; i < 4; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, encode_often, &tiny), 0);
    for (size_t i = 0; i < 4; i++) {
        void *result = "not joined";
        assert_int_equal(pthread_join(threads[i], &result), 0);
        assert_null(result);
    }
    tiny_tokenizer_free(&tiny);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(merges_join_in_their_order),
        cmocka_unit_test(special_tokens_come_only_where_asked),
        cmocka_unit_test(llama_bpe_adds_bos_and_takes_whole_words),
        cmocka_unit_test(parts_meet_without_spelling_tokens_together),
        cmocka_unit_test(text_that_is_not_utf8_is_refused),
        cmocka_unit_test(every_text_comes_back),
        cmocka_unit_test(pieces_and_decoding_hide_special_tokens),
        cmocka_unit_test(ends_are_known_by_key_and_by_spelling),
        cmocka_unit_test(other_tokenizers_are_refused_by_name),
        cmocka_unit_test(a_megabyte_without_a_space_takes_seconds),
        cmocka_unit_test(threads_share_a_tokenizer),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
