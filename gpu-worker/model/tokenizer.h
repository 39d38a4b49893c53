/*
 * tokenizer.h - text to token ids and back, as the model file's vocabulary asks.
 *
 * Owner      the worker. Points into the GGUF mapping, which must stay open as long.
 * Threads    immutable after tokenizer_new(); every call from any thread.
 * Invariant  special tokens (control tokens such as <|im_end|>) come out of text only where the caller says so;
 *            otherwise their spelling is text like any other. Ids are always < n_vocab.
 * Kinds      byte-level BPE (tokenizer.ggml.model "gpt2") with the pre-tokenizers of pretokenizer.h, and SentencePiece
 *            ("llama": scores, byte fallback). Others are refused by name.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "gpu-worker/model/gguf.h"

struct tokenizer;

enum tokenizer_flags {
    TOKENIZER_ADD_BOS = 1,       /* encode: the BOS token first, if the file asks for one */
    TOKENIZER_PARSE_SPECIAL = 2, /* encode: special tokens spelled in the text become themselves */
    TOKENIZER_SHOW_SPECIAL = 4,  /* piece, decode: special tokens by their spelling; otherwise they give nothing */
    TOKENIZER_CONTINUED = 8,     /* decode: the ids go on from others, so a leading space is kept */
};

enum { TOKENIZER_NO_TOKEN = UINT32_MAX, TOKENIZER_MAX_TEXT_BYTES = 1 << 28 };

/* On failure `error` holds one line. -EINVAL: damaged; -ENOTSUP: a kind of tokenizer that is not ours; -ENOMEM. */
int tokenizer_new(const struct gguf *gguf, struct tokenizer **ret_tokenizer, char *error, size_t error_size);
struct tokenizer *tokenizer_free(struct tokenizer *tokenizer); /* accepts NULL, returns NULL */

uint32_t tokenizer_n_vocab(const struct tokenizer *tokenizer);
uint32_t tokenizer_bos(const struct tokenizer *tokenizer); /* TOKENIZER_NO_TOKEN: none */
uint32_t tokenizer_eos(const struct tokenizer *tokenizer); /* TOKENIZER_NO_TOKEN: none */
bool tokenizer_adds_bos(const struct tokenizer *tokenizer);

/* Whether the token ends a generation: end of sequence, of turn, of message, of a file to fill in. false: id too large. */
bool tokenizer_is_end(const struct tokenizer *tokenizer, uint32_t id);

/* Whether the token is a control token, one that never comes from plain text. false: id too large. */
bool tokenizer_is_special(const struct tokenizer *tokenizer, uint32_t id);

/*
 * Ids of a text of any bytes that are valid UTF-8, U+0000 included. The caller frees *ret_ids (not NULL even if empty).
 * -EILSEQ: not UTF-8; -E2BIG: more than TOKENIZER_MAX_TEXT_BYTES; -ENOMEM.
 */
int tokenizer_encode(const struct tokenizer *tokenizer, const char *text, size_t n_bytes, unsigned flags,
                     uint32_t **ret_ids, size_t *ret_n_ids);

/* One piece of a text that comes from several hands: a template's words and a user's. */
struct tokenizer_part {
    const char *text;
    size_t n_bytes;
    bool parse_special; /* special tokens may be spelled inside this part (not across its ends) */
};

/* As tokenizer_encode() of all parts joined; only TOKENIZER_ADD_BOS counts in flags. Every part alone must be UTF-8. */
int tokenizer_encode_parts(const struct tokenizer *tokenizer, const struct tokenizer_part *parts, size_t n_parts,
                           unsigned flags, uint32_t **ret_ids, size_t *ret_n_ids);

/*
 * Bytes of one token, not necessarily whole characters (utf8_stream.h joins them). They belong to the tokenizer.
 * A SentencePiece word brings its leading space. -EINVAL: no such id.
 */
int tokenizer_piece(const struct tokenizer *tokenizer, uint32_t id, unsigned flags, const char **ret_bytes,
                    size_t *ret_n_bytes);

/*
 * Text of some ids: valid UTF-8 (what is not becomes U+FFFD), terminated; the caller frees it. The space that encoding
 * puts before a SentencePiece text is taken off again unless TOKENIZER_CONTINUED. -EINVAL: an id that does not exist.
 */
int tokenizer_decode(const struct tokenizer *tokenizer, const uint32_t *ids, size_t n_ids, unsigned flags,
                     char **ret_text, size_t *ret_n_bytes);
