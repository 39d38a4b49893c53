/*
 * tokenizer_bpe.c - byte-level byte pair encoding: every byte is a symbol, merges join symbols in the file's order.
 *
 * Threads    see tokenizer.h.
 * Source     Sennrich et al. 2016; byte-level alphabet of GPT-2 (Radford et al. 2019): vocabularies spell a byte as one
 *            printable character.
 * Invariant  words holds normal tokens by their bytes; a merge counts only if both halves and the whole are such tokens.
 */
#include "gpu-worker/model/tokenizer_private.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* Highest character of the byte alphabet: 68 bytes are not printable Latin-1 and follow from 256 on. */
enum { ALPHABET_SIZE = 256 + 68 };

/* alphabet[character] = byte, -1: not a letter of the alphabet. */
static void make_alphabet(int16_t alphabet[ALPHABET_SIZE])
{
    unsigned next = 256;
    for (unsigned i = 0; i < ALPHABET_SIZE; i++)
        alphabet[i] = -1;
    for (unsigned byte = 0; byte < 256; byte++) {
        bool is_printable = (byte >= 33 && byte <= 126) || (byte >= 161 && byte != 173);
        alphabet[is_printable ? byte : next++] = (int16_t)byte;
    }
}

/* Spelling to bytes, never longer. Returns how many; SIZE_MAX: not spelled in the byte alphabet. */
static size_t unspell(const int16_t alphabet[ALPHABET_SIZE], const char *text, size_t n_bytes, char *out)
{
    size_t n = 0;
    for (size_t i = 0; i < n_bytes;) {
        unsigned character = (unsigned char)text[i++];
        if (character >= 0x80) {
            /* The alphabet ends below U+0800: two bytes are enough. */
            if (character < 0xc2 || character > 0xdf || i == n_bytes || ((unsigned char)text[i] & 0xc0) != 0x80)
                return SIZE_MAX;
            character = (character & 31) << 6 | ((unsigned char)text[i++] & 63);
        }
        if (character >= ALPHABET_SIZE || alphabet[character] < 0)
            return SIZE_MAX;
        out[n++] = (char)alphabet[character];
    }
    return n;
}

static int make_pieces(struct tokenizer *tokenizer, const int16_t alphabet[ALPHABET_SIZE])
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
        size_t n = SIZE_MAX;
        tokenizer->piece_starts[id] = at;
        if (kind == TOKENIZER_NORMAL || kind == TOKENIZER_BYTE)
            n = unspell(alphabet, text->data, text->n_bytes, tokenizer->pieces + at);
        if (n == SIZE_MAX) {
            n = kind == TOKENIZER_UNUSED ? 0 : text->n_bytes;
            memcpy(tokenizer->pieces + at, text->data, n);
            if (kind == TOKENIZER_NORMAL)
                tokenizer->kinds[id] = TOKENIZER_UNUSED; /* readable, but no text leads to it */
        }
        at += n;
    }
    tokenizer->piece_starts[tokenizer->n_vocab] = at;

    for (uint32_t id = tokenizer->n_vocab; id-- > 0;) {
        const char *piece = tokenizer->pieces + tokenizer->piece_starts[id];
        size_t n = tokenizer->piece_starts[id + 1] - tokenizer->piece_starts[id];
        if (tokenizer->kinds[id] != TOKENIZER_NORMAL || n == 0)
            continue;
        if (string_map_add(tokenizer->words, piece, n, id) == 0 && n == 1)
            tokenizer->byte_ids[(unsigned char)piece[0]] = id;
        if (n > tokenizer->longest_word)
            tokenizer->longest_word = n;
    }
    return 0;
}

static size_t merge_slot(const struct tokenizer *tokenizer, uint64_t pair)
{
    uint64_t hash = pair * 0x9e3779b97f4a7c15u;
    size_t i = (size_t)(hash ^ hash >> 32) & tokenizer->merges_mask;
    while (tokenizer->merges[i].pair != UINT64_MAX && tokenizer->merges[i].pair != pair)
        i = (i + 1) & tokenizer->merges_mask;
    return i;
}

/* "left right" as the file spells it. false: not a merge of tokens we know. */
static bool read_merge(const struct tokenizer *tokenizer, const int16_t alphabet[ALPHABET_SIZE],
                       struct gguf_string text, char *buffer, uint64_t *ret_pair, uint32_t *ret_id)
{
    uint32_t left, right;
    if (text.n_bytes < 3)
        return false;
    const char *space = memchr(text.data + 1, ' ', text.n_bytes - 1);
    if (!space)
        return false;
    size_t n_spelled = (size_t)(space - text.data);
    size_t n_left = unspell(alphabet, text.data, n_spelled, buffer);
    if (n_left == SIZE_MAX)
        return false;
    size_t n_right = unspell(alphabet, space + 1, text.n_bytes - n_spelled - 1, buffer + n_left);
    if (n_right == SIZE_MAX || !string_map_find(tokenizer->words, buffer, n_left, &left) ||
        !string_map_find(tokenizer->words, buffer + n_left, n_right, &right) ||
        !string_map_find(tokenizer->words, buffer, n_left + n_right, ret_id))
        return false;
    *ret_pair = (uint64_t)left << 32 | right;
    return true;
}

static int make_merges(struct tokenizer *tokenizer, const int16_t alphabet[ALPHABET_SIZE], char *error,
                       size_t error_size)
{
    struct gguf_string *texts = NULL;
    size_t n = 0, longest = 0, n_slots = 16;
    int r = gguf_get_strings(tokenizer->gguf, "tokenizer.ggml.merges", &texts, &n);
    if (r == -ENOMEM)
        return r;
    if (r)
        return tokenizer_fail(error, error_size, -EINVAL,
                              "the tokenizer has no list of merges (tokenizer.ggml.merges)");
    if (n > UINT32_MAX / 2) {
        free(texts);
        return tokenizer_fail(error, error_size, -EINVAL, "the tokenizer has too many merges");
    }
    for (size_t i = 0; i < n; i++)
        longest = texts[i].n_bytes > longest ? texts[i].n_bytes : longest;
    while (n_slots / 2 < n)
        n_slots *= 2;
    char *buffer = malloc(longest + 1);
    tokenizer->merges = malloc(n_slots * sizeof *tokenizer->merges);
    tokenizer->merges_mask = n_slots - 1;
    if (!buffer || !tokenizer->merges) {
        r = -ENOMEM;
        goto out;
    }
    memset(tokenizer->merges, 0xff, n_slots * sizeof *tokenizer->merges);
    for (size_t i = 0; i < n; i++) {
        uint64_t pair;
        uint32_t id;
        if (!read_merge(tokenizer, alphabet, texts[i], buffer, &pair, &id))
            continue;
        struct tokenizer_merge *merge = &tokenizer->merges[merge_slot(tokenizer, pair)];
        if (merge->pair == UINT64_MAX) /* the first of two equal ones counts */
            *merge = (struct tokenizer_merge){pair, (uint32_t)i, id};
    }
out:
    free(buffer);
    free(texts);
    return r;
}

int tokenizer_bpe_read(struct tokenizer *tokenizer, char *error, size_t error_size)
{
    int16_t alphabet[ALPHABET_SIZE];
    struct gguf_string pre;
    if (gguf_get_string(tokenizer->gguf, "tokenizer.ggml.pre", &pre))
        return tokenizer_fail(error, error_size, -ENOTSUP,
                              "the file does not name its pre-tokenizer (tokenizer.ggml.pre); convert the model again");
    int r = pretokenizer_new(pre, &tokenizer->pretokenizer);
    if (r == -ENOTSUP) {
        char name[64];
        return tokenizer_fail(error, error_size, r, "pre-tokenizer \"%s\" is not supported, only %s",
                              gguf_printable(pre, name, sizeof name), pretokenizer_supported());
    }
    if (r)
        return r;
    tokenizer->adds_bos = pretokenizer_adds_bos(tokenizer->pretokenizer);
    make_alphabet(alphabet);
    r = make_pieces(tokenizer, alphabet);
    return r ? r : make_merges(tokenizer, alphabet, error, error_size);
}

static bool may_merge(const void *context, const char *word, const struct merger_symbol *left,
                      const struct merger_symbol *right, uint32_t *ret_priority, uint32_t *ret_id)
{
    const struct tokenizer *tokenizer = context;
    (void)word;
    if (left->id == MERGER_NONE || right->id == MERGER_NONE)
        return false;
    uint64_t pair = (uint64_t)left->id << 32 | right->id;
    const struct tokenizer_merge *merge = &tokenizer->merges[merge_slot(tokenizer, pair)];
    if (merge->pair != pair)
        return false;
    *ret_priority = merge->rank;
    *ret_id = merge->id;
    return true;
}

static int encode_word(struct tokenizer_session *session, const char *word, size_t n_bytes)
{
    const struct tokenizer *tokenizer = session->tokenizer;
    struct merger *merger = &session->merger;
    uint32_t id;
    int r;
    if ((n_bytes == 1 || pretokenizer_takes_whole_words(tokenizer->pretokenizer)) &&
        n_bytes <= tokenizer->longest_word && string_map_find(tokenizer->words, word, n_bytes, &id))
        return tokenizer_emit(session, id);
    merger_clear(merger);
    for (size_t i = 0; i < n_bytes; i++)
        if ((r = merger_add(merger, 1, tokenizer->byte_ids[(unsigned char)word[i]])))
            return r;
    if ((r = merger_run(merger, word, may_merge, tokenizer)))
        return r;
    /* A byte that the vocabulary lacks gives nothing, as in llama.cpp. */
    for (size_t i = 0; i < merger->n_symbols; i++)
        if (merger->symbols[i].n_bytes > 0 && merger->symbols[i].id != MERGER_NONE &&
            (r = tokenizer_emit(session, merger->symbols[i].id)))
            return r;
    return 0;
}

int tokenizer_bpe_encode(struct tokenizer_session *session, const char *text, size_t n_bytes)
{
    const struct pretokenizer *pretokenizer = session->tokenizer->pretokenizer;
    if (!session->scratch && !(session->scratch = pretokenizer_scratch_new(pretokenizer)))
        return -ENOMEM;
    for (size_t at = 0; at < n_bytes;) {
        size_t n = pretokenizer_next(pretokenizer, session->scratch, text, n_bytes, at);
        int r = encode_word(session, text + at, n);
        if (r)
            return r;
        at += n;
    }
    return 0;
}
