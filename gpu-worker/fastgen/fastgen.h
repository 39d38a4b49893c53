/*
 * fastgen.h - FastGen (2310.01801, section 3): which fixed set of tokens is enough for a head, found after the prefill.
 *
 * For each (layer, KV head) the cheapest of these whose recovery reaches T:
 *     special                special tokens
 *     + punctuation          and tokens of punctuation and white space only
 *     + frequent             and the FASTGEN_FREQUENT share of tokens with the largest sum of attention over the prompt
 *     + local                and the last FASTGEN_LOCAL share of the tokens
 *     full                   everything
 * Recovery: the attention mass that the set keeps, averaged over sampled rows of the prompt and over the query heads of the KV
 * head. (With A' = A restricted to the set, the mass lost in a row is its |A - A'|_1, so a recovery of T is a mean
 * |A - A'|_1 of 1 - T: the paper's bound on the attention map, in L1 by rows.) A set with frequent tokens is judged by the rows
 * that did not choose it, the earlier half by the later one's choice and the other way round; the set that is kept is all rows'
 * choice.
 *
 * Rows       fastgen_sample() says which positions of a prompt are looked at: one in 256, at least 8 and at most 32, evenly
 *            spread over its second half - rows that see about as much as those of the decode steps they stand for (64 rows
 *            tell no more than 16: of the heads promised 0.98, 1 to 3 of 50 keep less later, by 0.004 at most). They are a
 *            function of the prompt's length alone, so a rebuilt session finds the same.
 * Ties       go to the earlier token; a row's local tokens are the last FASTGEN_LOCAL of its own length, rounded, at least one.
 *
 * Owner      a session or an evaluation. Threads: add_row of different heads may run at the same time; else one.
 * Memory     four floats a head and token of the prompt until fastgen_profile_finish(), then a bit a token of those heads that
 *            keep a frequent set, and a byte an id of the vocabulary.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "gpu-worker/model/tokenizer.h"

#define FASTGEN_FREQUENT 0.3
#define FASTGEN_LOCAL    0.3
enum { FASTGEN_MAX_ROWS = 32, FASTGEN_MIN_ROWS = 8, FASTGEN_TOKENS_A_ROW = 256, FASTGEN_MIN_APPEND = 512 };

enum fastgen_class { FASTGEN_FULL, FASTGEN_SPECIAL, FASTGEN_PUNCTUATION, FASTGEN_FREQUENT_CLASS, FASTGEN_LOCAL_CLASS };

struct fastgen_profile;

/*
 * Tokens that the profile of a session covers, from its journal alone, so that a rebuilt session finds the same: up to the end of
 * the last run of at least FASTGEN_MIN_APPEND prefilled tokens, or of the first run whatever its length; 0: nothing was
 * prefilled. decoded(context, block): the `decoded` bits of a block's header (proto/layout.h). n_tokens: of the journal.
 */
uint32_t fastgen_profile_point(uint64_t (*decoded)(void *context, uint32_t block), void *context, uint32_t n_tokens);

/* Positions of a prompt of n_tokens to be looked at, growing; returns how many (<= FASTGEN_MAX_ROWS). */
uint32_t fastgen_sample(uint32_t n_tokens, uint32_t positions[FASTGEN_MAX_ROWS]);

/* ids [n_tokens], n_tokens >= 1: the prompt; looked at here only. -ENOMEM. */
int fastgen_profile_new(const struct tokenizer *tokenizer, const uint32_t *ids, uint32_t n_tokens, uint32_t n_layers,
                        uint32_t n_kv_heads, float recovery, struct fastgen_profile **ret_profile);
struct fastgen_profile *fastgen_profile_free(struct fastgen_profile *profile); /* accepts NULL, returns NULL */

/*
 * For who keeps and reads the exact set of a session (policy/exact_set.h) whatever the profile says: its tokens, row by row,
 * count as kept by every class, and a row that sees old tokens for less than half says nothing of them and is left out. Without
 * this call they do not, as published. Before the first row.
 */
void fastgen_profile_keep_exact(struct fastgen_profile *profile, uint32_t exact_tokens);

/* weights [position + 1]: softmax weights of the row at `position`, averaged over the query heads. Rows in order of position. */
void fastgen_profile_add_row(struct fastgen_profile *profile, uint32_t layer, uint32_t kv_head, uint32_t position,
                             const float *weights);
/* All rows are in: decides, once. A head without rows is full. */
void fastgen_profile_finish(struct fastgen_profile *profile);

uint32_t fastgen_profile_n_tokens(const struct fastgen_profile *profile);
float fastgen_profile_recovery(const struct fastgen_profile *profile);
enum fastgen_class fastgen_profile_class(const struct fastgen_profile *profile, uint32_t layer, uint32_t kv_head);
/* Mass that the head's class keeps; full: 1. */
float fastgen_profile_kept(const struct fastgen_profile *profile, uint32_t layer, uint32_t kv_head);
/* [n_layers x n_kv_heads]: true where a head keeps no keys. */
const bool *fastgen_profile_absent(const struct fastgen_profile *profile);

/*
 * Masks [n_blocks] of a head for a query at `position`: tokens of its class up to `position` among blocks [0, n_blocks); of a
 * full head all. Special and punctuation tokens behind the prompt count too (ids [position + 1]); frequent ones are of the prompt
 * alone. Who has exact tokens apart takes them out.
 */
void fastgen_profile_masks(const struct fastgen_profile *profile, uint32_t layer, uint32_t kv_head, const uint32_t *ids,
                           uint32_t position, uint32_t n_blocks, uint64_t *masks);
