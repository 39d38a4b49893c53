/*
 * utf8.h - is it UTF-8 (RFC 3629: no overlong forms, no surrogates, nothing above U+10FFFF)?
 *
 * Threads: any. NUL bytes are characters like others.
 */
#pragma once

#include <stddef.h>

/* 0, or -EILSEQ with the offset of the first bad or incomplete character in *ret_offset (may be NULL; untouched on 0). */
int utf8_check(const void *bytes, size_t n_bytes, size_t *ret_offset);

/* Length of the longest prefix that does not end inside a character that could still be completed: what a stream may
 * emit now. At most 3 bytes less than n_bytes; bad bytes are not judged here and count as complete. */
size_t utf8_complete_bytes(const void *bytes, size_t n_bytes);
