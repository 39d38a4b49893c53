/*
 * tokenizer_special.c - which tokens are special, which of them end a generation, and where they stand in a text.
 *
 * Threads    see tokenizer.h.
 * Source     files mark the kinds of tokens incompletely; the rules by spelling are those of llama.cpp, so that both
 *            stop at the same place and cut the same text.
 */
#include "gpu-worker/model/tokenizer_private.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "common/utf8.h"

/* Spellings that end a generation, whatever kind the file gives them. */
static const char *const end_spellings[] = {
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<eos>",
    "<turn|>",
    "<end_of_utterance>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
};

/* Tokens of fill-in-the-middle that end a generation: one of each row, the key first, else by spelling. */
static const struct {
    const char *key;
    const char *spellings[6];
} end_of_file_tokens[] = {
    {"tokenizer.ggml.fim_pad_token_id", {"<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"}},
    {"tokenizer.ggml.fim_rep_token_id", {"<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"}},
    {"tokenizer.ggml.fim_sep_token_id", {"<|file_sep|>"}},
};

/* Control tokens that end nothing. */
static const char *const control_spellings[] = {
    "<|fim_prefix|>",  "<fim-prefix>",  "<fim_prefix>",    "<｜fim▁begin｜>", "<PRE>",           "▁<PRE>",
    "<|code_prefix|>", "<|prefix|>",    "<|fim_suffix|>",  "<fim-suffix>",    "<fim_suffix>",    "<｜fim▁hole｜>",
    "<SUF>",           "▁<SUF>",        "<|code_suffix|>", "<|suffix|>",      "<|fim_middle|>",  "<fim-middle>",
    "<fim_middle>",    "<｜fim▁end｜>", "<MID>",           "▁<MID>",          "<|code_middle|>", "<|middle|>",
};

static const char *const end_keys[] = {
    "tokenizer.ggml.eos_token_id",
    "tokenizer.ggml.eot_token_id",
    "tokenizer.ggml.eom_token_id",
};

#define LENGTH(array) (sizeof(array) / sizeof(array)[0])

static void mark_control(struct tokenizer *tokenizer, const struct string_map *spellings, const char *spelling,
                         bool is_end)
{
    uint32_t id;
    if (!string_map_find(spellings, spelling, strlen(spelling), &id))
        return;
    tokenizer->kinds[id] = TOKENIZER_CONTROL;
    tokenizer->ends[id] = tokenizer->ends[id] || is_end;
}

static void mark_ends(struct tokenizer *tokenizer, const struct string_map *spellings)
{
    uint32_t id;
    for (size_t i = 0; i < LENGTH(end_spellings); i++)
        mark_control(tokenizer, spellings, end_spellings[i], true);
    for (size_t i = 0; i < LENGTH(control_spellings); i++)
        mark_control(tokenizer, spellings, control_spellings[i], false);
    for (size_t i = 0; i < LENGTH(end_of_file_tokens); i++) {
        if (gguf_get_u32(tokenizer->gguf, end_of_file_tokens[i].key, &id) == 0 && id < tokenizer->n_vocab) {
            tokenizer->ends[id] = true;
            continue;
        }
        for (size_t k = 0; k < LENGTH(end_of_file_tokens[i].spellings) && end_of_file_tokens[i].spellings[k]; k++) {
            const char *spelling = end_of_file_tokens[i].spellings[k];
            if (string_map_find(spellings, spelling, strlen(spelling), &id)) {
                mark_control(tokenizer, spellings, spelling, true);
                break;
            }
        }
    }
    for (size_t i = 0; i < LENGTH(end_keys); i++)
        if (gguf_get_u32(tokenizer->gguf, end_keys[i], &id) == 0 && id < tokenizer->n_vocab)
            tokenizer->ends[id] = true;
    if (tokenizer->eos != TOKENIZER_NO_TOKEN)
        tokenizer->ends[tokenizer->eos] = true;
}

static bool is_cut_out(const struct tokenizer *tokenizer, uint32_t id)
{
    uint8_t kind = tokenizer->kinds[id];
    const struct gguf_string *text = &tokenizer->texts[id];
    return (kind == TOKENIZER_CONTROL || kind == TOKENIZER_UNKNOWN || kind == TOKENIZER_USER_DEFINED) &&
           text->n_bytes > 0 && utf8_check(text->data, text->n_bytes, NULL) == 0;
}

static int compare_specials(const void *a, const void *b)
{
    const struct tokenizer_special *x = a, *y = b;
    unsigned char first_x = (unsigned char)x->text.data[0], first_y = (unsigned char)y->text.data[0];
    if (first_x != first_y)
        return first_x < first_y ? -1 : 1;
    if (x->text.n_bytes != y->text.n_bytes)
        return x->text.n_bytes > y->text.n_bytes ? -1 : 1;
    return x->id < y->id ? -1 : x->id > y->id;
}

static int list_specials(struct tokenizer *tokenizer)
{
    uint32_t n = 0;
    for (uint32_t id = 0; id < tokenizer->n_vocab; id++)
        n += is_cut_out(tokenizer, id);
    tokenizer->specials = calloc((size_t)n + 1, sizeof *tokenizer->specials);
    if (!tokenizer->specials)
        return -ENOMEM;
    n = 0;
    for (uint32_t id = 0; id < tokenizer->n_vocab; id++)
        if (is_cut_out(tokenizer, id))
            tokenizer->specials[n++] = (struct tokenizer_special){
                .text = tokenizer->texts[id],
                .id = id,
                .is_control = tokenizer->kinds[id] != TOKENIZER_USER_DEFINED,
            };
    qsort(tokenizer->specials, n, sizeof *tokenizer->specials, compare_specials);
    uint32_t at = 0;
    for (unsigned byte = 0; byte < 256; byte++) {
        tokenizer->special_starts[byte] = at;
        while (at < n && (unsigned char)tokenizer->specials[at].text.data[0] == byte)
            at++;
    }
    tokenizer->special_starts[256] = at;
    return 0;
}

int tokenizer_special_read(struct tokenizer *tokenizer)
{
    struct string_map *spellings = string_map_new(tokenizer->n_vocab);
    if (!spellings)
        return -ENOMEM;
    /* Backwards: of two tokens spelled alike the last one counts. */
    for (uint32_t id = tokenizer->n_vocab; id-- > 0;)
        string_map_add(spellings, tokenizer->texts[id].data, tokenizer->texts[id].n_bytes, id);
    mark_ends(tokenizer, spellings);
    string_map_free(spellings);
    return list_specials(tokenizer);
}

struct matches {
    struct tokenizer_match *list;
    size_t n, capacity;
};

static int add_match(struct matches *matches, struct tokenizer_match match)
{
    if (matches->n == matches->capacity) {
        size_t larger = matches->capacity ? 2 * matches->capacity : 16;
        struct tokenizer_match *moved = reallocarray(matches->list, larger, sizeof *moved);
        if (!moved)
            return -ENOMEM;
        matches->list = moved;
        matches->capacity = larger;
    }
    matches->list[matches->n++] = match;
    return 0;
}

/* Longest first; equal ones by id and then from left to right. */
static int compare_lengths(const void *a, const void *b)
{
    const struct tokenizer_match *x = a, *y = b;
    if (x->n_bytes != y->n_bytes)
        return x->n_bytes > y->n_bytes ? -1 : 1;
    if (x->id != y->id)
        return x->id < y->id ? -1 : 1;
    return x->start < y->start ? -1 : x->start > y->start;
}

static int compare_starts(const void *a, const void *b)
{
    const struct tokenizer_match *x = a, *y = b;
    return x->start < y->start ? -1 : x->start > y->start;
}

/* Drops matches that overlap a longer one. A longer one that overlaps covers the first or the last byte. */
static int drop_overlaps(struct matches *matches, size_t n_bytes)
{
    size_t n = 0;
    bool *is_taken = calloc(n_bytes + 1, sizeof *is_taken);
    if (!is_taken)
        return -ENOMEM;
    qsort(matches->list, matches->n, sizeof *matches->list, compare_lengths);
    for (size_t i = 0; i < matches->n; i++) {
        struct tokenizer_match match = matches->list[i];
        if (is_taken[match.start] || is_taken[match.start + match.n_bytes - 1])
            continue;
        memset(is_taken + match.start, true, match.n_bytes);
        matches->list[n++] = match;
    }
    free(is_taken);
    matches->n = n;
    qsort(matches->list, n, sizeof *matches->list, compare_starts);
    return 0;
}

int tokenizer_special_find(const struct tokenizer *tokenizer, const char *text, const struct tokenizer_part *parts,
                           size_t n_parts, struct tokenizer_match **ret_matches, size_t *ret_n)
{
    struct matches matches = {0};
    size_t n_bytes = 0, start = 0;
    int r = 0;
    for (size_t i = 0; i < n_parts; i++)
        n_bytes += parts[i].n_bytes;
    for (size_t i = 0; i < n_parts; i++) {
        size_t end = start + parts[i].n_bytes;
        for (size_t at = start; at < end; at++) {
            unsigned char byte = (unsigned char)text[at];
            for (uint32_t k = tokenizer->special_starts[byte]; k < tokenizer->special_starts[byte + 1]; k++) {
                const struct tokenizer_special *special = &tokenizer->specials[k];
                size_t limit = special->is_control ? end : n_bytes;
                if (special->is_control && !parts[i].parse_special)
                    continue;
                if (special->text.n_bytes > limit - at ||
                    memcmp(text + at, special->text.data, special->text.n_bytes) != 0)
                    continue;
                r = add_match(&matches,
                              (struct tokenizer_match){(uint32_t)at, (uint32_t)special->text.n_bytes, special->id});
                if (r)
                    goto fail;
            }
        }
        start = end;
    }
    if (matches.n > 1 && (r = drop_overlaps(&matches, n_bytes)))
        goto fail;
    *ret_matches = matches.list;
    *ret_n = matches.n;
    return 0;
fail:
    free(matches.list);
    return r;
}
