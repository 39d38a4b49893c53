/* Whole characters only, whatever the cuts; bytes that cannot become a character are replaced. */
#include "tests/unit/model/tiny.h"

#include "common/utf8.h"
#include "gpu-worker/model/utf8_stream.h"

/* Feeds `bytes` in chunks of `chunk`; what is out must be valid UTF-8 after every step. */
static void check(const char *bytes, size_t n_bytes, size_t chunk, const char *expected)
{
    struct utf8_stream stream = {0};
    char out[512];
    size_t n = 0;
    for (size_t i = 0; i < n_bytes; i += chunk) {
        size_t n_next = chunk < n_bytes - i ? chunk : n_bytes - i, n_written;
        n_written = utf8_stream_add(&stream, bytes + i, n_next, out + n);
        assert_true(n_written <= UTF8_STREAM_ROOM(n_next));
        n += n_written;
        assert_int_equal(utf8_check(out, n, NULL), 0);
    }
    n += utf8_stream_flush(&stream, out + n);
    out[n] = 0;
    assert_string_equal(out, expected);
    assert_int_equal(utf8_stream_flush(&stream, out), 0);
}

#define BAD "\xef\xbf\xbd"

static void characters_come_out_whole(void **state)
{
    static const char text[] = "a\xc3\xa9\xe6\xbc\xa2\xf0\x9f\x98\x80z\xf4\x8f\xbf\xbf\xed\x9f\xbf\xee\x80\x80";
    (void)state;
    for (size_t chunk = 1; chunk <= sizeof text; chunk++)
        check(text, sizeof text - 1, chunk, text);
}

static void nothing_comes_out_before_a_character_is_complete(void **state)
{
    struct utf8_stream stream = {0};
    char out[UTF8_STREAM_ROOM(1)];
    (void)state;
    assert_int_equal(utf8_stream_add(&stream, "\xf0", 1, out), 0);
    assert_int_equal(utf8_stream_add(&stream, "\x9f", 1, out), 0);
    assert_int_equal(utf8_stream_add(&stream, "\x98", 1, out), 0);
    assert_int_equal(utf8_stream_add(&stream, "\x80", 1, out), 4);
    assert_memory_equal(out, "\xf0\x9f\x98\x80", 4);
}

static void bad_bytes_are_replaced(void **state)
{
    static const struct {
        const char *bytes, *expected;
    } cases[] = {
        {"\x80", BAD},
        {"a\xff"
         "b",
         "a" BAD "b"},
        {"\xc0\xaf", BAD BAD},                 /* overlong */
        {"\xe0\x80\x80", BAD BAD BAD},         /* overlong */
        {"\xed\xa0\x80", BAD BAD BAD},         /* surrogate */
        {"\xf4\x90\x80\x80", BAD BAD BAD BAD}, /* beyond U+10FFFF */
        {"\xe6\xbc"
         "x",
         BAD "x"}, /* one for the part that was a beginning */
        {"\xf0\x9f\x98\xe6\xbc\xa2", BAD "\xe6\xbc\xa2"},
        {"\xe6\xbc", BAD}, /* at the end */
        {"\xf0", BAD},
        {"\xc3\xc3\xa9", BAD "\xc3\xa9"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        for (size_t chunk = 1; chunk <= 6; chunk++)
            check(cases[i].bytes, strlen(cases[i].bytes), chunk, cases[i].expected);
}

static void any_bytes_give_valid_text(void **state)
{
    uint64_t random = 5;
    (void)state;
    for (int round = 0; round < 2000; round++) {
        struct utf8_stream stream = {0};
        char bytes[16], out[UTF8_STREAM_ROOM(16) + UTF8_STREAM_ROOM(0)];
        size_t n = tiny_random(&random) % (sizeof bytes + 1), n_out;
        for (size_t i = 0; i < n; i++)
            bytes[i] = (char)(tiny_random(&random) % 3 ? 0x80 | tiny_random(&random) : tiny_random(&random));
        n_out = utf8_stream_add(&stream, bytes, n, out);
        n_out += utf8_stream_flush(&stream, out + n_out);
        assert_int_equal(utf8_check(out, n_out, NULL), 0);
        if (utf8_check(bytes, n, NULL) == 0) {
            assert_int_equal(n_out, n);
            assert_memory_equal(out, bytes, n);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(characters_come_out_whole),
        cmocka_unit_test(nothing_comes_out_before_a_character_is_complete),
        cmocka_unit_test(bad_bytes_are_replaced),
        cmocka_unit_test(any_bytes_give_valid_text),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
