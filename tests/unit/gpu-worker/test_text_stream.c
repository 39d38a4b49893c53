/* test_text_stream.c - text of generated tokens. */
#include "tests/unit/gpu-worker/tokenizer_fixture.h"

#include <stdbool.h>
#include <string.h>

#include "gpu-worker/text_stream.h"

/* Feeds the tokens of `text`, collects what comes out; returns whether a stop string ended it. */
static bool feed(const struct tokenizer *tokenizer, const char *text, const char *const *stop, uint32_t n_stop,
                 char *out, char *last_piece)
{
    struct text_stream *stream;
    uint32_t *ids;
    size_t n_ids;
    bool stopped = false;
    assert_int_equal(tokenizer_encode(tokenizer, text, strlen(text), 0, &ids, &n_ids), 0);
    assert_int_equal(text_stream_new(tokenizer, stop, n_stop, &stream), 0);
    out[0] = '\0';
    for (size_t i = 0; i < n_ids && !stopped; i++) {
        char *piece;
        assert_int_equal(text_stream_feed(stream, ids[i], &piece, &stopped), 0);
        strcat(out, piece);
        strcpy(last_piece, piece);
        free(piece);
    }
    if (!stopped) {
        char *piece;
        assert_int_equal(text_stream_flush(stream, &piece), 0);
        strcat(out, piece);
        free(piece);
    }
    text_stream_free(stream);
    free(ids);
    return stopped;
}

static void text_comes_out_whole(void **state)
{
    struct tokenizer_fixture *fixture = *state;
    char out[256], last[256];
    assert_false(feed(fixture->tokenizer, "a\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80!", NULL, 0, out, last));
    assert_string_equal(out, "a\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80!");
}

static void a_stop_string_ends_the_text_before_it(void **state)
{
    struct tokenizer_fixture *fixture = *state;
    char out[256], last[256];
    const char *stop[] = {"\n\nQ:", "END"};
    assert_true(feed(fixture->tokenizer, "so it is\n\nQ: and", stop, 2, out, last));
    assert_string_equal(out, "so it is");
    assert_true(feed(fixture->tokenizer, "xEENDy", stop, 2, out, last));
    assert_string_equal(out, "xE");
    assert_false(feed(fixture->tokenizer, "EN and E\n\nQ", stop, 2, out, last)); /* never complete: nothing is lost */
    assert_string_equal(out, "EN and E\n\nQ");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(text_comes_out_whole),
        cmocka_unit_test(a_stop_string_ends_the_text_before_it),
    };
    return cmocka_run_group_tests(tests, tokenizer_fixture_set_up, tokenizer_fixture_tear_down);
}
