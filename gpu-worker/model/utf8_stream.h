/*
 * utf8_stream.h - bytes of tokens in, whole UTF-8 characters out.
 *
 * Owner      one stream of one generation; embed it, zeroed is empty.
 * Threads    one at a time.
 * Invariant  what was given out is valid UTF-8 at every moment. Bytes that cannot become a character are replaced by
 *            U+FFFD, one for each maximal part of a character (Unicode, section 3.9), as soon as that is certain.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

struct utf8_stream {
    uint8_t pending[4]; /* the beginning of a character whose rest has not come */
    uint8_t n_pending;
};

/* Room that utf8_stream_add() may need for n_bytes more: every byte could become a U+FFFD of 3 bytes. */
#define UTF8_STREAM_ROOM(n_bytes) (3 * ((size_t)(n_bytes) + 4))

/* Writes whole characters to out [UTF8_STREAM_ROOM(n_bytes)], returns how many bytes. */
size_t utf8_stream_add(struct utf8_stream *stream, const char *bytes, size_t n_bytes, char *out);

/* The stream ends: what is pending becomes U+FFFD in out [UTF8_STREAM_ROOM(0)]. The stream is empty afterwards. */
size_t utf8_stream_flush(struct utf8_stream *stream, char *out);
