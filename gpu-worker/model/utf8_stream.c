/*
 * utf8_stream.c - a character is collected byte by byte and let go when it is complete.
 *
 * Source     The Unicode Standard, table 3-7 (well-formed byte sequences).
 */
#include "gpu-worker/model/utf8_stream.h"

#include <stdbool.h>
#include <string.h>

/* Length of the character that starts with this byte; 0: no character does. */
static unsigned sequence_length(uint8_t first)
{
    if (first < 0x80)
        return 1;
    if (first < 0xc2)
        return 0; /* continuation bytes, and overlong forms of ASCII */
    if (first < 0xe0)
        return 2;
    if (first < 0xf0)
        return 3;
    return first < 0xf5 ? 4 : 0;
}

/* Whether `byte` may be byte number `index` (1..3) of a character that starts with `first`. */
static bool continues(uint8_t first, unsigned index, uint8_t byte)
{
    uint8_t low = 0x80, high = 0xbf;
    if (index == 1) {
        if (first == 0xe0)
            low = 0xa0; /* overlong */
        else if (first == 0xed)
            high = 0x9f; /* surrogates */
        else if (first == 0xf0)
            low = 0x90; /* overlong */
        else if (first == 0xf4)
            high = 0x8f; /* beyond U+10FFFF */
    }
    return byte >= low && byte <= high;
}

static char *put_replacement(char *out)
{
    memcpy(out, "\xef\xbf\xbd", 3);
    return out + 3;
}

size_t utf8_stream_add(struct utf8_stream *stream, const char *bytes, size_t n_bytes, char *out)
{
    char *at = out;
    for (size_t i = 0; i < n_bytes; i++) {
        uint8_t byte = (uint8_t)bytes[i];
        if (stream->n_pending && !continues(stream->pending[0], stream->n_pending, byte)) {
            at = put_replacement(at);
            stream->n_pending = 0;
        }
        if (stream->n_pending == 0 && sequence_length(byte) == 0) {
            at = put_replacement(at);
            continue;
        }
        stream->pending[stream->n_pending++] = byte;
        if (stream->n_pending == sequence_length(stream->pending[0])) {
            memcpy(at, stream->pending, stream->n_pending);
            at += stream->n_pending;
            stream->n_pending = 0;
        }
    }
    return (size_t)(at - out);
}

size_t utf8_stream_flush(struct utf8_stream *stream, char *out)
{
    if (stream->n_pending == 0)
        return 0;
    stream->n_pending = 0;
    return (size_t)(put_replacement(out) - out);
}
