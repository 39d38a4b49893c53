/* test_utf8.c - against a decoder that is written the plain way, over every short sequence that matters. */
#include "common/utf8.h"
#include "tests/unit/common/helpers.h"

#include <errno.h>
#include <string.h>

/* Encodes the way RFC 3629 says; returns the length. */
static size_t encode(uint32_t c, unsigned char *out)
{
    if (c < 0x80) {
        out[0] = (unsigned char)c;
        return 1;
    }
    size_t length = c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    for (size_t i = length - 1; i > 0; i--, c >>= 6)
        out[i] = (unsigned char)(0x80 | (c & 0x3F));
    out[0] = (unsigned char)((0xF00u >> length & 0xFF) | c);
    return length;
}

static void every_character_is_accepted_and_surrogates_are_not(void **state)
{
    (void)state;
    unsigned char text[4];
    for (uint32_t c = 0; c < 0x110800; c++) {
        size_t length = encode(c, text);
        int good = c < 0x110000 && (c < 0xD800 || c > 0xDFFF);
        if (utf8_check(text, length, NULL) != (good ? 0 : -EILSEQ))
            fail_msg("U+%X", c);
        for (size_t part = 1; good && part < length; part++) {
            if (utf8_check(text, part, NULL) != -EILSEQ || utf8_complete_bytes(text, part) != 0)
                fail_msg("U+%X cut to %zu", c, part);
        }
        if (good && utf8_complete_bytes(text, length) != length)
            fail_msg("U+%X complete", c);
    }
}

static void overlong_forms_are_refused(void **state)
{
    (void)state;
    static const char *const bad[] = {"\xC0\x80",
                                      "\xC1\xBF",
                                      "\xE0\x80\x80",
                                      "\xE0\x9F\xBF",
                                      "\xF0\x80\x80\x80",
                                      "\xF0\x8F\xBF\xBF",
                                      "\x80",
                                      "\xBF",
                                      "\xFE",
                                      "\xFF",
                                      "\xF8\x88\x80\x80\x80",
                                      "\xC3\x28",
                                      "\xE2\x28\xA1",
                                      "\xE2\x82\x28",
                                      "\xF0\x90\x28\xBC"};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        assert_int_equal(utf8_check(bad[i], strlen(bad[i]), NULL), -EILSEQ);
}

static void the_offset_is_that_of_the_character(void **state)
{
    (void)state;
    size_t offset = 77;
    assert_int_equal(utf8_check("na\xC3\xAFve", 6, &offset), 0);
    assert_int_equal(offset, 77);
    assert_int_equal(utf8_check("na\xC3\xAFv\xE2\x82", 7, &offset), -EILSEQ);
    assert_int_equal(offset, 5);
    assert_int_equal(utf8_check("a\0b\xFF", 4, &offset), -EILSEQ);
    assert_int_equal(offset, 3);
    assert_int_equal(utf8_check("", 0, &offset), 0);
}

/* Long texts are looked at in words: a bad byte is found at every place of one, and what follows it is looked at. */
static void every_place_of_a_long_text(void **state)
{
    (void)state;
    for (size_t length = 1; length < 40; length++)
        for (size_t at = 0; at < length; at++) {
            char text[40];
            size_t offset = 77;
            memset(text, 'x', sizeof(text));
            text[at] = '\xFF';
            assert_int_equal(utf8_check(text, length, &offset), -EILSEQ);
            assert_int_equal(offset, at);
            memcpy(text + at, "\xE2\x82\xAC", at + 3 <= length ? 3 : 1);
            assert_int_equal(utf8_check(text, length, &offset), at + 3 <= length ? 0 : -EILSEQ);
        }
}

static void a_stream_holds_back_only_what_can_be_completed(void **state)
{
    (void)state;
    assert_int_equal(utf8_complete_bytes("", 0), 0);
    assert_int_equal(utf8_complete_bytes("abc", 3), 3);
    assert_int_equal(utf8_complete_bytes("ab\xE2", 3), 2);
    assert_int_equal(utf8_complete_bytes("ab\xE2\x82", 4), 2);
    assert_int_equal(utf8_complete_bytes("ab\xE2\x82\xAC", 5), 5);
    assert_int_equal(utf8_complete_bytes("ab\xF0\x9F\x98", 5), 2);
    assert_int_equal(utf8_complete_bytes("\x80\x80\x80\x80", 4), 4);
    assert_int_equal(utf8_complete_bytes("a\xFF", 2), 2);
    assert_int_equal(utf8_complete_bytes("a\xED\xA0", 3), 3); /* a surrogate: nothing would make it good */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_character_is_accepted_and_surrogates_are_not),
        cmocka_unit_test(overlong_forms_are_refused),
        cmocka_unit_test(the_offset_is_that_of_the_character),
        cmocka_unit_test(every_place_of_a_long_text),
        cmocka_unit_test(a_stream_holds_back_only_what_can_be_completed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
