/*
 * tokenizer.c - a file's vocabulary, and the way back from ids to text.
 *
 * Owner      the worker.
 * Threads    immutable after tokenizer_new().
 * Invariant  texts and pieces have n_vocab entries, whatever the file says about single tokens.
 */
#include "gpu-worker/model/tokenizer_private.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpu-worker/model/utf8_stream.h"

int tokenizer_fail(char *error, size_t error_size, int code, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    if (error_size)
        vsnprintf(error, error_size, format, arguments);
    va_end(arguments);
    return code;
}

/* An optional id; what lies outside the vocabulary counts as absent, as in llama.cpp. */
static void read_id(const struct tokenizer *tokenizer, const char *key, uint32_t *id)
{
    uint32_t value;
    if (gguf_get_u32(tokenizer->gguf, key, &value) == 0)
        *id = value;
    if (*id >= tokenizer->n_vocab)
        *id = TOKENIZER_NO_TOKEN;
}

static int read_kinds(struct tokenizer *tokenizer, char *error, size_t error_size)
{
    int32_t *kinds = NULL;
    size_t n = 0;
    int r = gguf_get_i32s(tokenizer->gguf, "tokenizer.ggml.token_type", &kinds, &n);
    if (r == -ENOENT) {
        memset(tokenizer->kinds, TOKENIZER_NORMAL, tokenizer->n_vocab);
        return 0;
    }
    if (r == -ENOMEM)
        return r;
    if (r == 0 && n != tokenizer->n_vocab)
        r = -EINVAL;
    for (size_t i = 0; r == 0 && i < n; i++) {
        if (kinds[i] < TOKENIZER_NORMAL || kinds[i] > TOKENIZER_BYTE)
            r = kinds[i] == 0 ? 0 : -EINVAL;
        tokenizer->kinds[i] = kinds[i] == 0 ? TOKENIZER_UNUSED : (uint8_t)kinds[i];
    }
    free(kinds);
    return r ? tokenizer_fail(error, error_size, -EINVAL,
                              "tokenizer.ggml.token_type does not give every token its kind")
             : 0;
}

static int read_vocabulary(struct tokenizer *tokenizer, char *error, size_t error_size)
{
    const struct gguf *gguf = tokenizer->gguf;
    struct gguf_string kind;
    size_t n;
    if (gguf_get_string(gguf, "tokenizer.ggml.model", &kind))
        return tokenizer_fail(error, error_size, -EINVAL, "the file has no tokenizer (tokenizer.ggml.model)");
    tokenizer->is_spm = kind.n_bytes == 5 && memcmp(kind.data, "llama", 5) == 0;
    if (!tokenizer->is_spm && !(kind.n_bytes == 4 && memcmp(kind.data, "gpt2", 4) == 0)) {
        char name[64];
        return tokenizer_fail(error, error_size, -ENOTSUP, "tokenizer \"%s\" is not supported, only gpt2 and llama",
                              gguf_printable(kind, name, sizeof name));
    }
    int r = gguf_get_strings(gguf, "tokenizer.ggml.tokens", &tokenizer->texts, &n);
    if (r == -ENOMEM)
        return r;
    if (r || n == 0 || n > INT32_MAX)
        return tokenizer_fail(error, error_size, -EINVAL, "the tokenizer has no tokens (tokenizer.ggml.tokens)");
    tokenizer->n_vocab = (uint32_t)n;
    tokenizer->kinds = calloc(n, sizeof *tokenizer->kinds);
    tokenizer->ends = calloc(n, sizeof *tokenizer->ends);
    tokenizer->piece_starts = calloc(n + 1, sizeof *tokenizer->piece_starts);
    if (!tokenizer->kinds || !tokenizer->ends || !tokenizer->piece_starts)
        return -ENOMEM;
    for (size_t i = 0; i < 256; i++)
        tokenizer->byte_ids[i] = TOKENIZER_NO_TOKEN;
    /* Defaults of files that do not say: Llama's and GPT-2's. */
    tokenizer->bos = tokenizer->is_spm ? 1 : 11;
    tokenizer->eos = tokenizer->is_spm ? 2 : 11;
    read_id(tokenizer, "tokenizer.ggml.bos_token_id", &tokenizer->bos);
    read_id(tokenizer, "tokenizer.ggml.eos_token_id", &tokenizer->eos);
    return read_kinds(tokenizer, error, error_size);
}

static int read_all(struct tokenizer *tokenizer, char *error, size_t error_size)
{
    int r = read_vocabulary(tokenizer, error, error_size);
    if (r == 0)
        r = tokenizer_special_read(tokenizer);
    if (r == 0)
        r = tokenizer->is_spm ? tokenizer_spm_read(tokenizer, error, error_size)
                              : tokenizer_bpe_read(tokenizer, error, error_size);
    if (r)
        return r;
    gguf_get_bool(tokenizer->gguf, "tokenizer.ggml.add_bos_token", &tokenizer->adds_bos);
    if (tokenizer->is_spm)
        gguf_get_bool(tokenizer->gguf, "tokenizer.ggml.add_space_prefix", &tokenizer->adds_space_prefix);
    if (tokenizer->adds_bos && tokenizer->bos == TOKENIZER_NO_TOKEN)
        return tokenizer_fail(error, error_size, -EINVAL, "the tokenizer wants a BOS token but names none");
    return 0;
}

int tokenizer_new(const struct gguf *gguf, struct tokenizer **ret_tokenizer, char *error, size_t error_size)
{
    struct tokenizer *tokenizer = calloc(1, sizeof *tokenizer);
    int r = -ENOMEM;
    if (tokenizer) {
        tokenizer->gguf = gguf;
        r = read_all(tokenizer, error, error_size);
    }
    if (r == -ENOMEM)
        tokenizer_fail(error, error_size, r, "no memory for the tokenizer");
    if (r) {
        tokenizer_free(tokenizer);
        return r;
    }
    *ret_tokenizer = tokenizer;
    return 0;
}

struct tokenizer *tokenizer_free(struct tokenizer *tokenizer)
{
    if (!tokenizer)
        return NULL;
    free(tokenizer->texts);
    free(tokenizer->kinds);
    free(tokenizer->ends);
    free(tokenizer->pieces);
    free(tokenizer->piece_starts);
    string_map_free(tokenizer->words);
    free(tokenizer->specials);
    pretokenizer_free(tokenizer->pretokenizer);
    free(tokenizer->merges);
    free(tokenizer->priorities);
    free(tokenizer);
    return NULL;
}

uint32_t tokenizer_n_vocab(const struct tokenizer *tokenizer)
{
    return tokenizer->n_vocab;
}

uint32_t tokenizer_bos(const struct tokenizer *tokenizer)
{
    return tokenizer->bos;
}

uint32_t tokenizer_eos(const struct tokenizer *tokenizer)
{
    return tokenizer->eos;
}

bool tokenizer_adds_bos(const struct tokenizer *tokenizer)
{
    return tokenizer->adds_bos;
}

bool tokenizer_is_end(const struct tokenizer *tokenizer, uint32_t id)
{
    return id < tokenizer->n_vocab && tokenizer->ends[id];
}

bool tokenizer_is_special(const struct tokenizer *tokenizer, uint32_t id)
{
    return id < tokenizer->n_vocab &&
           (tokenizer->kinds[id] == TOKENIZER_CONTROL || tokenizer->kinds[id] == TOKENIZER_UNKNOWN);
}

int tokenizer_piece(const struct tokenizer *tokenizer, uint32_t id, unsigned flags, const char **ret_bytes,
                    size_t *ret_n_bytes)
{
    if (id >= tokenizer->n_vocab)
        return -EINVAL;
    bool is_hidden = tokenizer_is_special(tokenizer, id) && !(flags & TOKENIZER_SHOW_SPECIAL);
    *ret_bytes = tokenizer->pieces + tokenizer->piece_starts[id];
    *ret_n_bytes = is_hidden ? 0 : tokenizer->piece_starts[id + 1] - tokenizer->piece_starts[id];
    return 0;
}

int tokenizer_decode(const struct tokenizer *tokenizer, const uint32_t *ids, size_t n_ids, unsigned flags,
                     char **ret_text, size_t *ret_n_bytes)
{
    struct utf8_stream stream = {0};
    bool drop_space = tokenizer->adds_space_prefix && !(flags & TOKENIZER_CONTINUED);
    size_t n_room = UTF8_STREAM_ROOM(0) + 1, n = 0, n_piece;
    const char *piece;
    for (size_t i = 0; i < n_ids; i++) {
        if (tokenizer_piece(tokenizer, ids[i], flags, &piece, &n_piece))
            return -EINVAL;
        n_room += UTF8_STREAM_ROOM(n_piece);
    }
    char *text = malloc(n_room);
    if (!text)
        return -ENOMEM;
    for (size_t i = 0; i < n_ids; i++) {
        tokenizer_piece(tokenizer, ids[i], flags, &piece, &n_piece);
        if (drop_space && n_piece > 0 && !tokenizer_is_special(tokenizer, ids[i])) {
            drop_space = false;
            if (piece[0] == ' ') {
                piece++;
                n_piece--;
            }
        }
        n += utf8_stream_add(&stream, piece, n_piece, text + n);
    }
    n += utf8_stream_flush(&stream, text + n);
    text[n] = 0;
    *ret_text = text;
    *ret_n_bytes = n;
    return 0;
}
