/* utf8.c - UTF-8 by the table of RFC 3629, section 4. */
#include "common/utf8.h"

#include <errno.h>
#include <stdint.h>
#include <string.h>

/* Bytes of the character that starts with `first`; 0: nothing starts with it. */
static size_t length_of(uint8_t first)
{
    if (first < 0x80)
        return 1;
    if (first < 0xC2)
        return 0; /* continuation bytes, and two-byte forms of ASCII */
    if (first < 0xE0)
        return 2;
    if (first < 0xF0)
        return 3;
    return first < 0xF5 ? 4 : 0;
}

/* Narrower ranges of the second byte keep out overlong forms, surrogates and what lies above U+10FFFF. */
static int second_is_good(uint8_t first, uint8_t second)
{
    uint8_t lowest = first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : 0x80;
    uint8_t highest = first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : 0xBF;
    return second >= lowest && second <= highest;
}

static int is_ascii(const uint8_t bytes[sizeof(uint64_t)])
{
    uint64_t word;
    memcpy(&word, bytes, sizeof(word));
    return (word & UINT64_C(0x8080808080808080)) == 0;
}

int utf8_check(const void *bytes, size_t n_bytes, size_t *ret_offset)
{
    const uint8_t *b = bytes;
    size_t i = 0;
    while (i < n_bytes) {
        if (n_bytes - i >= sizeof(uint64_t) && is_ascii(b + i)) { /* most of most texts, which may have megabytes */
            i += sizeof(uint64_t);
            continue;
        }
        size_t length = length_of(b[i]);
        int good = length != 0 && length <= n_bytes - i && (length == 1 || second_is_good(b[i], b[i + 1]));
        for (size_t k = 2; good && k < length; k++)
            good = (b[i + k] & 0xC0) == 0x80;
        if (!good) {
            if (ret_offset)
                *ret_offset = i;
            return -EILSEQ;
        }
        i += length;
    }
    return 0;
}

size_t utf8_complete_bytes(const void *bytes, size_t n_bytes)
{
    const uint8_t *b = bytes;
    for (size_t back = 1; back <= 3 && back <= n_bytes; back++) {
        const uint8_t *start = b + n_bytes - back;
        if ((*start & 0xC0) == 0x80)
            continue;
        if (length_of(*start) <= back || (back > 1 && !second_is_good(start[0], start[1])))
            return n_bytes;
        return n_bytes - back;
    }
    return n_bytes;
}
