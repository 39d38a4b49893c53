/*
 * tokenizer_private.h - the vocabulary and one encoding call, as the tokenizer_*.c files share them.
 */
#pragma once

#include "gpu-worker/model/merger.h"
#include "gpu-worker/model/pretokenizer.h"
#include "gpu-worker/model/string_map.h"
#include "gpu-worker/model/tokenizer.h"

/* Numbers are GGUF's. */
enum tokenizer_kind {
    TOKENIZER_NORMAL = 1,
    TOKENIZER_UNKNOWN = 2,
    TOKENIZER_CONTROL = 3,
    TOKENIZER_USER_DEFINED = 4,
    TOKENIZER_UNUSED = 5,
    TOKENIZER_BYTE = 6,
};

/* A token that is cut out of the text before anything else: control tokens where allowed, user-defined ones always. */
struct tokenizer_special {
    struct gguf_string text;
    uint32_t id;
    bool is_control;
};

struct tokenizer_merge {
    uint64_t pair; /* left id << 32 | right id; UINT64_MAX: empty */
    uint32_t rank;
    uint32_t id; /* of both joined */
};

struct tokenizer {
    const struct gguf *gguf;
    uint32_t n_vocab;
    uint32_t bos, eos;
    bool is_spm, adds_bos, adds_space_prefix;

    struct gguf_string *texts; /* [n_vocab] as spelled in the file */
    uint8_t *kinds;            /* [n_vocab] */
    bool *ends;                /* [n_vocab] ends a generation */
    char *pieces;              /* bytes of all tokens, one after the other */
    size_t *piece_starts;      /* [n_vocab + 1] */
    size_t longest_word;       /* bytes of the longest key in words */
    struct string_map *words;  /* tokens that text can become: BPE by piece, SentencePiece by spelling */
    uint32_t byte_ids[256];    /* token of one byte; TOKENIZER_NO_TOKEN */

    struct tokenizer_special *specials; /* by first byte, then longest first */
    uint32_t special_starts[257];       /* first byte -> range in specials */

    /* BPE */
    struct pretokenizer *pretokenizer;
    struct tokenizer_merge *merges; /* hash table, at most half full */
    size_t merges_mask;

    /* SentencePiece */
    uint32_t unknown;
    uint32_t *priorities; /* [n_vocab] lower joins earlier */
};

/* One call of encode. */
struct tokenizer_session {
    const struct tokenizer *tokenizer;
    struct merger merger;
    struct pretokenizer_scratch *scratch; /* BPE */
    char *escaped;                        /* SentencePiece: text with its spaces replaced */
    size_t escaped_capacity;
    bool is_after_special; /* SentencePiece: a space goes before the next text */
    uint32_t *ids;
    size_t n_ids, ids_capacity;
};

int tokenizer_emit(struct tokenizer_session *session, uint32_t id); /* -ENOMEM */

__attribute__((format(printf, 4, 5))) int tokenizer_fail(char *error, size_t error_size, int code, const char *format,
                                                         ...);

/* tokenizer_special.c: which tokens are special and which end a generation; before pieces and words are made. */
int tokenizer_special_read(struct tokenizer *tokenizer);

/* Where special tokens lie in a text, in order, not overlapping. The caller frees *ret_matches. -ENOMEM. */
struct tokenizer_match {
    uint32_t start, n_bytes;
    uint32_t id;
};
int tokenizer_special_find(const struct tokenizer *tokenizer, const char *text, const struct tokenizer_part *parts,
                           size_t n_parts, struct tokenizer_match **ret_matches, size_t *ret_n);

/* tokenizer_bpe.c, tokenizer_spm.c: read fills pieces, words and the rest; encode appends the ids of a plain text. */
int tokenizer_bpe_read(struct tokenizer *tokenizer, char *error, size_t error_size);
int tokenizer_bpe_encode(struct tokenizer_session *session, const char *text, size_t n_bytes);
int tokenizer_spm_read(struct tokenizer *tokenizer, char *error, size_t error_size);
int tokenizer_spm_encode(struct tokenizer_session *session, const char *text, size_t n_bytes);
