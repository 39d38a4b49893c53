/*
 * tokenizer_encode.c - text to ids: special tokens are cut out first, what lies between goes to BPE or SentencePiece.
 *
 * Threads    any; everything a call writes lies in its session.
 */
#include "gpu-worker/model/tokenizer_private.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "common/utf8.h"

int tokenizer_emit(struct tokenizer_session *session, uint32_t id)
{
    if (session->n_ids == session->ids_capacity) {
        size_t larger = session->ids_capacity ? 2 * session->ids_capacity : 64;
        uint32_t *moved = reallocarray(session->ids, larger, sizeof *moved);
        if (!moved)
            return -ENOMEM;
        session->ids = moved;
        session->ids_capacity = larger;
    }
    session->ids[session->n_ids++] = id;
    return 0;
}

static int encode_plain(struct tokenizer_session *session, const char *text, size_t n_bytes)
{
    if (n_bytes == 0)
        return 0;
    int r = session->tokenizer->is_spm ? tokenizer_spm_encode(session, text, n_bytes)
                                       : tokenizer_bpe_encode(session, text, n_bytes);
    session->is_after_special = false;
    return r;
}

static int encode_text(struct tokenizer_session *session, const char *text, size_t n_bytes,
                       const struct tokenizer_part *parts, size_t n_parts)
{
    struct tokenizer_match *matches = NULL;
    size_t n_matches = 0, at = 0;
    int r = tokenizer_special_find(session->tokenizer, text, parts, n_parts, &matches, &n_matches);
    for (size_t i = 0; r == 0 && i < n_matches; i++) {
        r = encode_plain(session, text + at, matches[i].start - at);
        if (r == 0)
            r = tokenizer_emit(session, matches[i].id);
        session->is_after_special = true;
        at = (size_t)matches[i].start + matches[i].n_bytes;
    }
    if (r == 0)
        r = encode_plain(session, text + at, n_bytes - at);
    free(matches);
    return r;
}

/* Checks all parts and joins them; one part is used where it lies (*ret_joined is NULL then). */
static int join_parts(const struct tokenizer_part *parts, size_t n_parts, char **ret_joined, size_t *ret_n_bytes)
{
    size_t n_bytes = 0;
    for (size_t i = 0; i < n_parts; i++) {
        if (parts[i].n_bytes > TOKENIZER_MAX_TEXT_BYTES - n_bytes)
            return -E2BIG;
        if (utf8_check(parts[i].text, parts[i].n_bytes, NULL))
            return -EILSEQ;
        n_bytes += parts[i].n_bytes;
    }
    *ret_n_bytes = n_bytes;
    if (n_parts <= 1)
        return 0;
    char *joined = malloc(n_bytes + 1), *at = joined;
    if (!joined)
        return -ENOMEM;
    for (size_t i = 0; i < n_parts; i++) {
        if (parts[i].n_bytes)
            memcpy(at, parts[i].text, parts[i].n_bytes);
        at += parts[i].n_bytes;
    }
    *ret_joined = joined;
    return 0;
}

int tokenizer_encode_parts(const struct tokenizer *tokenizer, const struct tokenizer_part *parts, size_t n_parts,
                           unsigned flags, uint32_t **ret_ids, size_t *ret_n_ids)
{
    struct tokenizer_session session = {.tokenizer = tokenizer, .is_after_special = true};
    char *joined = NULL;
    size_t n_bytes = 0;
    int r = join_parts(parts, n_parts, &joined, &n_bytes);
    if (r)
        return r;
    const char *text = joined ? joined : n_bytes ? parts[0].text : "";
    session.ids_capacity = 16 + n_bytes / 4;
    session.ids = malloc(session.ids_capacity * sizeof *session.ids);
    if (!session.ids)
        r = -ENOMEM;
    if (r == 0 && (flags & TOKENIZER_ADD_BOS) && tokenizer->adds_bos)
        r = tokenizer_emit(&session, tokenizer->bos);
    if (r == 0)
        r = encode_text(&session, text, n_bytes, parts, n_parts);
    merger_fini(&session.merger);
    pretokenizer_scratch_free(session.scratch);
    free(session.escaped);
    free(joined);
    if (r) {
        free(session.ids);
        return r;
    }
    *ret_ids = session.ids;
    *ret_n_ids = session.n_ids;
    return 0;
}

int tokenizer_encode(const struct tokenizer *tokenizer, const char *text, size_t n_bytes, unsigned flags,
                     uint32_t **ret_ids, size_t *ret_n_ids)
{
    struct tokenizer_part part = {text, n_bytes, (flags & TOKENIZER_PARSE_SPECIAL) != 0};
    return tokenizer_encode_parts(tokenizer, &part, 1, flags, ret_ids, ret_n_ids);
}
