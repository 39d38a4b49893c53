/*
 * tokenizer_spm.c - SentencePiece with byte fallback, as Llama 2 uses it: characters join by the best score.
 *
 * Threads    see tokenizer.h.
 * Source     Kudo and Richardson 2018; spaces are written as U+2581, and a text begins with one.
 * Invariant  words holds the tokens text may become, by their spelling. Control and byte tokens are not among them:
 *            "<s>" or "<0x0A>" typed by a user stays text.
 */
#include "gpu-worker/model/tokenizer_private.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define SPACE "\xe2\x96\x81" /* U+2581 */
enum { SPACE_BYTES = sizeof SPACE - 1 };

/* "<0x0A>" -> 10; -1: not such a spelling. */
static int byte_of(const struct gguf_string *text)
{
    int value = 0;
    if (text->n_bytes != 6 || memcmp(text->data, "<0x", 3) != 0 || text->data[5] != '>')
        return -1;
    for (int i = 3; i < 5; i++) {
        char digit = text->data[i];
        if (digit >= '0' && digit <= '9')
            value = value * 16 + digit - '0';
        else if (digit >= 'A' && digit <= 'F')
            value = value * 16 + digit - 'A' + 10;
        else
            return -1;
    }
    return value;
}

/* Spelling to bytes, never longer: U+2581 becomes a space. */
static size_t unspell(const struct gguf_string *text, char *out)
{
    size_t n = 0;
    for (size_t i = 0; i < text->n_bytes;) {
        if (text->n_bytes - i >= SPACE_BYTES && memcmp(text->data + i, SPACE, SPACE_BYTES) == 0) {
            out[n++] = ' ';
            i += SPACE_BYTES;
        } else {
            out[n++] = text->data[i++];
        }
    }
    return n;
}

static int make_pieces(struct tokenizer *tokenizer)
{
    size_t n_bytes = 0, at = 0;
    for (uint32_t id = 0; id < tokenizer->n_vocab; id++)
        n_bytes += tokenizer->texts[id].n_bytes;
    tokenizer->pieces = malloc(n_bytes + 1);
    tokenizer->words = string_map_new(tokenizer->n_vocab);
    if (!tokenizer->pieces || !tokenizer->words)
        return -ENOMEM;
    for (uint32_t id = 0; id < tokenizer->n_vocab; id++) {
        const struct gguf_string *text = &tokenizer->texts[id];
        uint8_t kind = tokenizer->kinds[id];
        int byte = byte_of(text);
        tokenizer->piece_starts[id] = at;
        if (byte >= 0 && kind != TOKENIZER_CONTROL && kind != TOKENIZER_UNKNOWN) {
            tokenizer->kinds[id] = TOKENIZER_BYTE;
            tokenizer->byte_ids[byte] = id;
            tokenizer->pieces[at++] = (char)byte;
        } else if (kind == TOKENIZER_NORMAL) {
            at += unspell(text, tokenizer->pieces + at);
        } else if (kind != TOKENIZER_UNUSED) {
            memcpy(tokenizer->pieces + at, text->data, text->n_bytes);
            at += text->n_bytes;
        }
    }
    tokenizer->piece_starts[tokenizer->n_vocab] = at;

    for (uint32_t id = tokenizer->n_vocab; id-- > 0;) {
        const struct gguf_string *text = &tokenizer->texts[id];
        uint8_t kind = tokenizer->kinds[id];
        if ((kind != TOKENIZER_NORMAL && kind != TOKENIZER_USER_DEFINED) || text->n_bytes == 0)
            continue;
        string_map_add(tokenizer->words, text->data, text->n_bytes, id);
        if (text->n_bytes > tokenizer->longest_word)
            tokenizer->longest_word = text->n_bytes;
    }
    return 0;
}

/* Scores as numbers whose unsigned order is the reverse: the best score is the lowest priority. */
static uint32_t priority_of(float score)
{
    uint32_t bits;
    score += 0.0f; /* -0 and +0 are one score */
    memcpy(&bits, &score, sizeof bits);
    return bits & 0x80000000u ? bits : ~bits & 0x7fffffffu;
}

int tokenizer_spm_read(struct tokenizer *tokenizer, char *error, size_t error_size)
{
    float *scores = NULL;
    size_t n = 0;
    int r = gguf_get_f32s(tokenizer->gguf, "tokenizer.ggml.scores", &scores, &n);
    if (r == -ENOMEM)
        return r;
    if (r || n != tokenizer->n_vocab) {
        free(scores);
        return tokenizer_fail(error, error_size, -EINVAL, "the tokenizer has no score for every token");
    }
    tokenizer->priorities = calloc(n, sizeof *tokenizer->priorities);
    if (!tokenizer->priorities)
        r = -ENOMEM;
    for (size_t i = 0; r == 0 && i < n; i++) {
        if (isnan(scores[i]))
            r = tokenizer_fail(error, error_size, -EINVAL, "the score of token %zu is not a number", i);
        else
            tokenizer->priorities[i] = priority_of(scores[i]);
    }
    free(scores);
    if (r)
        return r;
    tokenizer->adds_bos = true;
    tokenizer->adds_space_prefix = true;
    if (gguf_get_u32(tokenizer->gguf, "tokenizer.ggml.unknown_token_id", &tokenizer->unknown) ||
        tokenizer->unknown >= tokenizer->n_vocab)
        tokenizer->unknown = 0;
    return make_pieces(tokenizer);
}

static bool may_join(const void *context, const char *word, const struct merger_symbol *left,
                     const struct merger_symbol *right, uint32_t *ret_priority, uint32_t *ret_id)
{
    const struct tokenizer *tokenizer = context;
    size_t n_bytes = (size_t)left->n_bytes + right->n_bytes;
    if (n_bytes > tokenizer->longest_word || !string_map_find(tokenizer->words, word + left->start, n_bytes, ret_id))
        return false;
    *ret_priority = tokenizer->priorities[*ret_id];
    return true;
}

static int escape(struct tokenizer_session *session, const char *text, size_t n_bytes, size_t *ret_n_bytes)
{
    size_t n = 0, n_needed = SPACE_BYTES * (n_bytes + 1);
    if (session->escaped_capacity < n_needed) {
        char *larger = realloc(session->escaped, n_needed);
        if (!larger)
            return -ENOMEM;
        session->escaped = larger;
        session->escaped_capacity = n_needed;
    }
    if (session->tokenizer->adds_space_prefix && session->is_after_special) {
        memcpy(session->escaped, SPACE, SPACE_BYTES);
        n = SPACE_BYTES;
    }
    for (size_t i = 0; i < n_bytes; i++) {
        if (text[i] == ' ') {
            memcpy(session->escaped + n, SPACE, SPACE_BYTES);
            n += SPACE_BYTES;
        } else {
            session->escaped[n++] = text[i];
        }
    }
    *ret_n_bytes = n;
    return 0;
}

/* A symbol that is no token: byte by byte. */
static int emit_bytes(struct tokenizer_session *session, const char *bytes, size_t n_bytes)
{
    const struct tokenizer *tokenizer = session->tokenizer;
    for (size_t i = 0; i < n_bytes; i++) {
        uint32_t id = tokenizer->byte_ids[(unsigned char)bytes[i]];
        int r = tokenizer_emit(session, id != TOKENIZER_NO_TOKEN ? id : tokenizer->unknown);
        if (r)
            return r;
    }
    return 0;
}

int tokenizer_spm_encode(struct tokenizer_session *session, const char *text, size_t n_bytes)
{
    const struct tokenizer *tokenizer = session->tokenizer;
    struct merger *merger = &session->merger;
    size_t n = 0;
    int r = escape(session, text, n_bytes, &n);
    if (r)
        return r;
    const char *word = session->escaped;
    merger_clear(merger);
    for (size_t i = 0; i < n;) {
        size_t length = 1;
        uint32_t id = MERGER_NONE;
        while (i + length < n && ((unsigned char)word[i + length] & 0xc0) == 0x80)
            length++;
        string_map_find(tokenizer->words, word + i, length, &id);
        if ((r = merger_add(merger, (uint32_t)length, id)))
            return r;
        i += length;
    }
    if ((r = merger_run(merger, word, may_join, tokenizer)))
        return r;
    for (size_t i = 0; i < merger->n_symbols; i++) {
        const struct merger_symbol *symbol = &merger->symbols[i];
        if (symbol->n_bytes == 0)
            continue;
        r = symbol->id != MERGER_NONE ? tokenizer_emit(session, symbol->id)
                                      : emit_bytes(session, word + symbol->start, symbol->n_bytes);
        if (r)
            return r;
    }
    return 0;
}
