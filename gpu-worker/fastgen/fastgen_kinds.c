/*
 * fastgen_kinds.c - special, punctuation or word, id by id.
 *
 * Nearly every piece is decided by its ASCII bytes; a regular expression with Unicode's classes sees only the others.
 */
#define PCRE2_CODE_UNIT_WIDTH 8
#include "gpu-worker/fastgen/fastgen_kinds.h"

#include <errno.h>
#include <pcre2.h>
#include <stdlib.h>

#include "common/utf8.h"

/* White space is spelled out: PCRE2's \s takes U+180E too. */
#define PATTERN                                                                                                        \
    "[\\p{P}!-/:-@\\[-`{-~\\x{9}-\\x{d}\\x{20}\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}"   \
    "\\x{205f}\\x{3000}]+"

enum ascii { ASCII_MARK, ASCII_OTHER, ASCII_WIDE };

static enum ascii ascii_of(unsigned char byte)
{
    if (byte >= 0x80)
        return ASCII_WIDE;
    if (byte == ' ' || (byte >= '\t' && byte <= '\r'))
        return ASCII_MARK;
    bool is_word = (byte >= '0' && byte <= '9') || (byte >= 'A' && byte <= 'Z') || (byte >= 'a' && byte <= 'z');
    return byte > ' ' && byte < 0x7f && !is_word ? ASCII_MARK : ASCII_OTHER;
}

struct matcher {
    pcre2_code *code;
    pcre2_match_data *match;
};

static bool is_punctuation(const struct matcher *matcher, const char *piece, size_t n_bytes)
{
    bool is_wide = false;
    for (size_t i = 0; i < n_bytes; i++) {
        enum ascii ascii = ascii_of((unsigned char)piece[i]);
        if (ascii == ASCII_OTHER)
            return false;
        is_wide |= ascii == ASCII_WIDE;
    }
    if (!is_wide)
        return n_bytes > 0;
    return utf8_check(piece, n_bytes, NULL) == 0 &&
           pcre2_match(matcher->code, (PCRE2_SPTR)piece, n_bytes, 0, PCRE2_NO_UTF_CHECK, matcher->match, NULL) > 0;
}

int fastgen_kinds(const struct tokenizer *tokenizer, uint8_t **ret_kinds)
{
    int code, r = -ENOMEM;
    PCRE2_SIZE offset;
    uint32_t n_vocab = tokenizer_n_vocab(tokenizer);
    uint8_t *kinds = calloc(n_vocab > 0 ? n_vocab : 1, 1);
    struct matcher matcher = {.code = pcre2_compile((PCRE2_SPTR)PATTERN, PCRE2_ZERO_TERMINATED,
                                                    PCRE2_UTF | PCRE2_UCP | PCRE2_ANCHORED | PCRE2_ENDANCHORED, &code,
                                                    &offset, NULL)};
    if (matcher.code != NULL) /* the pattern is ours and compiles: NULL is for want of memory */
        matcher.match = pcre2_match_data_create_from_pattern(matcher.code, NULL);
    if (kinds == NULL || matcher.match == NULL)
        goto end;
    for (uint32_t id = 0; id < n_vocab; id++) {
        const char *piece;
        size_t n_bytes;
        if (tokenizer_is_special(tokenizer, id))
            kinds[id] = FASTGEN_KIND_SPECIAL;
        else if (tokenizer_piece(tokenizer, id, 0, &piece, &n_bytes) == 0 && is_punctuation(&matcher, piece, n_bytes))
            kinds[id] = FASTGEN_KIND_PUNCTUATION;
    }
    *ret_kinds = kinds;
    kinds = NULL;
    r = 0;
end:
    pcre2_match_data_free(matcher.match);
    pcre2_code_free(matcher.code);
    free(kinds);
    return r;
}
