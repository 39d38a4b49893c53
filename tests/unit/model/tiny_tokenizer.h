/* tiny_tokenizer.h - a tokenizer of a tiny model, and encoding checked in one line. */
#pragma once

#include "tests/unit/model/tiny.h"

#include "gpu-worker/model/gguf.h"
#include "gpu-worker/model/tokenizer.h"

struct tiny_tokenizer {
    struct gguf *gguf;
    struct tokenizer *tokenizer;
};

static inline struct tiny_tokenizer tiny_tokenizer(const char *options)
{
    struct tiny_tokenizer tiny = {0};
    char line[512], error[256] = "";
    snprintf(line, sizeof line, "--layers 1 --embd 32 --ff 32 %s", options);
    struct tiny_file file = tiny_model(line);
    if (gguf_open(file.path, &tiny.gguf, error, sizeof error) ||
        tokenizer_new(tiny.gguf, &tiny.tokenizer, error, sizeof error))
        fail_msg("%s: %s", options, error);
    close(file.fd);
    return tiny;
}

static inline void tiny_tokenizer_free(struct tiny_tokenizer *tiny)
{
    assert_null(tokenizer_free(tiny->tokenizer));
    gguf_close(tiny->gguf);
}

static inline void tiny_tokenizer_refuse(const char *options, int code, const char *words)
{
    struct gguf *gguf = NULL;
    struct tokenizer *tokenizer = NULL;
    char line[512], error[256] = "";
    snprintf(line, sizeof line, "--layers 1 --embd 32 --ff 32 %s", options);
    struct tiny_file file = tiny_model(line);
    assert_int_equal(gguf_open(file.path, &gguf, error, sizeof error), 0);
    int r = tokenizer_new(gguf, &tokenizer, error, sizeof error);
    if (r != code || !strstr(error, words))
        fail_msg("%s: %d \"%s\", expected %d and \"%s\"", options, r, error, code, words);
    tiny_check_message(error);
    assert_null(tokenizer);
    gguf_close(gguf);
    close(file.fd);
}

/* The ids as the spellings of their tokens, joined by |; the caller frees it. */
static inline char *tiny_tokenizer_show(const struct tokenizer *tokenizer, const uint32_t *ids, size_t n_ids)
{
    char *text = NULL;
    size_t n;
    FILE *out = open_memstream(&text, &n);
    for (size_t i = 0; i < n_ids; i++) {
        const char *piece;
        size_t n_piece;
        assert_int_equal(tokenizer_piece(tokenizer, ids[i], TOKENIZER_SHOW_SPECIAL, &piece, &n_piece), 0);
        if (i)
            fputc('|', out);
        fwrite(piece, 1, n_piece, out);
    }
    fclose(out);
    return text;
}

static inline void tiny_tokenizer_check(const struct tiny_tokenizer *tiny, const char *text, unsigned flags,
                                        const char *expected)
{
    uint32_t *ids = NULL;
    size_t n_ids = 0;
    assert_int_equal(tokenizer_encode(tiny->tokenizer, text, strlen(text), flags, &ids, &n_ids), 0);
    char *shown = tiny_tokenizer_show(tiny->tokenizer, ids, n_ids);
    if (strcmp(shown, expected) != 0)
        fail_msg("\"%s\" is %s, expected %s", text, shown, expected);
    free(shown);
    free(ids);
}

/* Text -> ids -> the same text. */
static inline void tiny_tokenizer_round_trip(const struct tiny_tokenizer *tiny, const char *text, size_t n_bytes,
                                             unsigned flags)
{
    uint32_t *ids = NULL;
    size_t n_ids = 0, n_back = 0;
    char *back = NULL;
    assert_int_equal(tokenizer_encode(tiny->tokenizer, text, n_bytes, flags, &ids, &n_ids), 0);
    assert_int_equal(tokenizer_decode(tiny->tokenizer, ids, n_ids, TOKENIZER_SHOW_SPECIAL, &back, &n_back), 0);
    assert_int_equal(n_back, n_bytes);
    assert_memory_equal(back, text, n_bytes);
    free(back);
    free(ids);
}

/* Random valid UTF-8; returns its length, at most 4 n_characters. */
static inline size_t tiny_random_text(uint64_t *random, size_t n_characters, char *out)
{
    static const char *const pool[] = {" ",
                                       "the",
                                       " the",
                                       "a",
                                       "Z",
                                       "7",
                                       "\n",
                                       "\t",
                                       "\xc3\xa9",
                                       "\xe6\xbc\xa2",
                                       "\xf0\x9f\x98\x80",
                                       "<",
                                       "|>",
                                       "\xe2\x96\x81",
                                       "<|im_end|>",
                                       "in",
                                       " w",
                                       "'s",
                                       ".",
                                       "  "};
    size_t n = 0;
    for (size_t i = 0; i < n_characters; i++) {
        const char *piece = pool[tiny_random(random) % (sizeof pool / sizeof pool[0])];
        memcpy(out + n, piece, strlen(piece));
        n += strlen(piece);
    }
    return n;
}
