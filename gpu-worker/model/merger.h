/*
 * merger.h - joins neighbouring symbols of a word, best pair first: the loop that BPE and SentencePiece share.
 *
 * Owner      one call of tokenizer_encode_parts(); its memory serves word after word.
 * Threads    one at a time.
 * Invariant  symbols are a list in text order; n_bytes 0 marks one that was joined to its left neighbour.
 *            n symbols take O(n log n) time, however long the word.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { MERGER_NONE = UINT32_MAX };

struct merger_symbol {
    uint32_t start, n_bytes; /* in the word */
    uint32_t id;             /* token; MERGER_NONE: no token has this text */
    uint32_t previous, next; /* MERGER_NONE at the ends */
};

struct merger_pair {
    uint32_t priority; /* lowest first, then leftmost */
    uint32_t left, right;
    uint32_t n_bytes; /* of both when the pair was noted; any other value later means it is out of date */
    uint32_t id;      /* token of the joined text */
};

struct merger {
    struct merger_symbol *symbols;
    size_t n_symbols, symbols_capacity;
    struct merger_pair *heap;
    size_t n_pairs, heap_capacity;
};

/* Whether two neighbours may be joined, how soon, and to which token. */
typedef bool (*merger_rule)(const void *context, const char *word, const struct merger_symbol *left,
                            const struct merger_symbol *right, uint32_t *ret_priority, uint32_t *ret_id);

void merger_fini(struct merger *merger);

/* Starts a word. */
void merger_clear(struct merger *merger);

/* The next symbol of the word. -ENOMEM. */
int merger_add(struct merger *merger, uint32_t n_bytes, uint32_t id);

/* Joins until no rule applies; symbols with n_bytes > 0 are the result. -ENOMEM. */
int merger_run(struct merger *merger, const char *word, merger_rule rule, const void *context);
