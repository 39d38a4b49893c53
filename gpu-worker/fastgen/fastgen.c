/*
 * fastgen.c - column sums of sampled attention rows, and what they say of each set.
 *
 * Rows go into an earlier and a later half. What a set of frequent tokens keeps is judged by the rows that did not choose it, each
 * half by the other's choice, as rows that come after the prompt will: the few rows that are looked at would otherwise find their
 * own neighbours frequent. (Measured, T 0.98, 3,072 tokens of a licence: heads promised 0.987 of the mass and kept 0.917 of it in
 * the 1,024 rows that followed; with halves in turn 0.986 and 0.975, with an earlier and a later half 0.988 and 0.992.)
 *
 * What a set loses is its complement's column sum; the local tokens of each row are left out of a second sum, so that the loss
 * of a set with them is its complement's sum there. Nothing else of a row is kept. Losses are compared, not recoveries: what
 * keeps everything has lost 0 exactly, however the sums were rounded.
 */
#include "gpu-worker/fastgen/fastgen.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "gpu-worker/fastgen/fastgen_kinds.h"
#include "gpu-worker/policy/exact_set.h"

struct head {
    float *sums[2];     /* of each half of the rows [n_tokens]: of the weights; NULL when decided */
    float *far[2];      /* the same without each row's local tokens; all four lie together, sums[0] first */
    uint64_t *frequent; /* [n_blocks]: the set of classes with frequent tokens; NULL when decided otherwise */
    uint32_t n_rows;
    enum fastgen_class class;
    float kept;
};

struct fastgen_profile {
    uint32_t n_tokens, n_blocks, n_heads, n_kv_heads, n_vocab;
    float recovery;
    bool keeps_exact;
    uint32_t exact_tokens;
    uint8_t *kinds;                  /* [n_vocab] */
    uint64_t *special, *punctuation; /* [n_blocks] of the prompt */
    bool *absent;                    /* [n_heads] */
    struct head *heads;              /* [n_layers][n_kv_heads] */
};

/* ---- which rows ---- */

uint32_t fastgen_sample(uint32_t n_tokens, uint32_t positions[FASTGEN_MAX_ROWS])
{
    uint32_t first = n_tokens / 2, n_seen = n_tokens - first, n = n_tokens / FASTGEN_TOKENS_A_ROW;
    n = n < FASTGEN_MIN_ROWS ? FASTGEN_MIN_ROWS : n > FASTGEN_MAX_ROWS ? FASTGEN_MAX_ROWS : n;
    n = n < n_seen ? n : n_seen;
    for (uint32_t i = 0; i < n; i++)
        positions[i] = first + (uint32_t)((uint64_t)n_seen * (i + 1) / n) - 1;
    return n;
}

static bool is_decoded(uint64_t (*decoded)(void *context, uint32_t block), void *context, uint32_t token)
{
    return decoded(context, token / LAYOUT_BLOCK_TOKENS) >> (token % LAYOUT_BLOCK_TOKENS) & 1;
}

uint32_t fastgen_profile_point(uint64_t (*decoded)(void *context, uint32_t block), void *context, uint32_t n_tokens)
{
    uint32_t end = n_tokens; /* of the run that is being walked through, backwards */
    uint32_t first_end = 0;  /* of the earliest run so far */
    for (uint32_t token = n_tokens; token > 0;) {
        uint64_t bits = decoded(context, (token - 1) / LAYOUT_BLOCK_TOKENS);
        if (token % LAYOUT_BLOCK_TOKENS == 0 && (bits == 0 || ~bits == 0)) { /* a block that is all of a kind */
            if (bits != 0)
                end = token - LAYOUT_BLOCK_TOKENS;
            token -= LAYOUT_BLOCK_TOKENS;
        } else {
            token--;
            if (is_decoded(decoded, context, token))
                end = token;
        }
        if (token < end) {
            first_end = end;
            if (end - token >= FASTGEN_MIN_APPEND)
                return end;
        }
    }
    return first_end;
}

/* ---- life ---- */

struct fastgen_profile *fastgen_profile_free(struct fastgen_profile *profile)
{
    if (profile == NULL)
        return NULL;
    for (uint32_t i = 0; profile->heads != NULL && i < profile->n_heads; i++) {
        free(profile->heads[i].sums[0]);
        free(profile->heads[i].frequent);
    }
    free(profile->heads);
    free(profile->absent);
    free(profile->special);
    free(profile->punctuation);
    free(profile->kinds);
    free(profile);
    return NULL;
}

static enum fastgen_kind kind_of(const struct fastgen_profile *profile, uint32_t id)
{
    return id < profile->n_vocab ? (enum fastgen_kind)profile->kinds[id] : FASTGEN_KIND_WORD;
}

static uint64_t bit_of(uint32_t token)
{
    return (uint64_t)1 << (token % LAYOUT_BLOCK_TOKENS);
}

int fastgen_profile_new(const struct tokenizer *tokenizer, const uint32_t *ids, uint32_t n_tokens, uint32_t n_layers,
                        uint32_t n_kv_heads, float recovery, struct fastgen_profile **ret_profile)
{
    assert(n_tokens > 0);
    struct fastgen_profile *profile = calloc(1, sizeof(*profile));
    if (profile == NULL)
        return -ENOMEM;
    profile->n_tokens = n_tokens;
    profile->n_blocks = (n_tokens - 1) / LAYOUT_BLOCK_TOKENS + 1;
    profile->n_heads = n_layers * n_kv_heads;
    profile->n_kv_heads = n_kv_heads;
    profile->n_vocab = tokenizer_n_vocab(tokenizer);
    profile->recovery = recovery;
    profile->heads = calloc(profile->n_heads, sizeof(*profile->heads));
    profile->absent = calloc(profile->n_heads, sizeof(*profile->absent));
    profile->special = calloc(profile->n_blocks, sizeof(*profile->special));
    profile->punctuation = calloc(profile->n_blocks, sizeof(*profile->punctuation));
    bool is_there = profile->heads != NULL && profile->absent != NULL && profile->special != NULL &&
                    profile->punctuation != NULL && fastgen_kinds(tokenizer, &profile->kinds) == 0;
    for (uint32_t i = 0; is_there && i < profile->n_heads; i++) {
        struct head *head = &profile->heads[i];
        head->kept = 1;
        head->sums[0] = calloc(4 * (size_t)n_tokens, sizeof(float));
        head->frequent = calloc(profile->n_blocks, sizeof(*head->frequent));
        is_there = head->sums[0] != NULL && head->frequent != NULL;
        for (uint32_t part = 1; is_there && part < 4; part++)
            *(part == 1 ? &head->sums[1] : &head->far[part - 2]) = head->sums[0] + (size_t)part * n_tokens;
    }
    if (!is_there) {
        fastgen_profile_free(profile);
        return -ENOMEM;
    }
    for (uint32_t token = 0; token < n_tokens; token++) {
        enum fastgen_kind kind = kind_of(profile, ids[token]);
        if (kind == FASTGEN_KIND_SPECIAL)
            profile->special[token / LAYOUT_BLOCK_TOKENS] |= bit_of(token);
        else if (kind == FASTGEN_KIND_PUNCTUATION)
            profile->punctuation[token / LAYOUT_BLOCK_TOKENS] |= bit_of(token);
    }
    *ret_profile = profile;
    return 0;
}

void fastgen_profile_keep_exact(struct fastgen_profile *profile, uint32_t exact_tokens)
{
    profile->keeps_exact = true;
    profile->exact_tokens = exact_tokens;
}

/* ---- rows ---- */

static struct head *head_of(const struct fastgen_profile *profile, uint32_t layer, uint32_t kv_head)
{
    uint32_t index = layer * profile->n_kv_heads + kv_head;
    assert(kv_head < profile->n_kv_heads && index < profile->n_heads);
    return &profile->heads[index];
}

/* The first of the last share of n_seen tokens. */
static uint32_t first_local(uint32_t n_seen)
{
    uint32_t n = (uint32_t)(FASTGEN_LOCAL * n_seen + 0.5);
    return n_seen - (n > 0 ? n : 1);
}

/* The rows in two halves as fastgen_sample() spreads them: those of the third quarter of the prompt, and of the last. */
static bool is_late(const struct fastgen_profile *profile, uint32_t position)
{
    return position >= profile->n_tokens - profile->n_tokens / 4;
}

void fastgen_profile_add_row(struct fastgen_profile *profile, uint32_t layer, uint32_t kv_head, uint32_t position,
                             const float *weights)
{
    struct head *head = head_of(profile, layer, kv_head);
    assert(position < profile->n_tokens && head->sums[0] != NULL);
    uint32_t first = 0, end = position + 1, local = first_local(position + 1);
    if (profile->keeps_exact) {
        if (2 * exact_set_n_old_tokens(position, profile->exact_tokens) <= position)
            return;
        first = LAYOUT_N_SINKS;
        end = exact_set_n_old_blocks(position, profile->exact_tokens) * LAYOUT_BLOCK_TOKENS;
    }
    uint32_t half = is_late(profile, position);
    head->n_rows++;
    float *restrict sums = head->sums[half], *restrict far = head->far[half];
    for (uint32_t j = first; j < end; j++)
        sums[j] += weights[j];
    for (uint32_t j = first; j < end && j < local; j++)
        far[j] += weights[j];
}

/* ---- the decision ---- */

static double sum_outside(const float *sums, uint32_t n_tokens, const uint64_t *set)
{
    double sum = 0;
    for (uint32_t first = 0; first < n_tokens; first += LAYOUT_BLOCK_TOKENS) {
        uint64_t inside = set[first / LAYOUT_BLOCK_TOKENS];
        uint32_t n = n_tokens - first < LAYOUT_BLOCK_TOKENS ? n_tokens - first : LAYOUT_BLOCK_TOKENS;
        for (uint32_t j = 0; j < n; j++)
            sum += inside >> j & 1 ? 0.0 : (double)sums[first + j];
    }
    return sum;
}

/* Floats that are not negative are in the order of their bits. */
static uint32_t order_of(float sum)
{
    uint32_t bits;
    memcpy(&bits, &sum, sizeof(bits));
    return bits;
}

/* The n-th largest (n >= 1) of the sums, digit by digit; *ret_n_equal: how many that are equal to it are among the n largest. */
static uint32_t nth_largest(const float *sums, uint32_t n_sums, uint32_t n, uint32_t *ret_n_equal)
{
    uint32_t known = 0;
    for (uint32_t shift = 32; shift > 0;) {
        uint32_t counts[256] = {0}, digit = 255;
        uint32_t above = shift == 32 ? 0 : ~(uint32_t)0 << shift;
        shift -= 8;
        for (uint32_t i = 0; i < n_sums; i++)
            if ((order_of(sums[i]) & above) == known)
                counts[order_of(sums[i]) >> shift & 255]++;
        for (; counts[digit] < n; digit--)
            n -= counts[digit];
        known |= digit << shift;
    }
    *ret_n_equal = n;
    return known;
}

/* set |= the share of tokens with the largest sums. */
static void add_frequent(const struct fastgen_profile *profile, const float *sums, uint64_t *set)
{
    uint32_t n = (uint32_t)(FASTGEN_FREQUENT * profile->n_tokens + 0.5), n_equal;
    uint32_t limit = nth_largest(sums, profile->n_tokens, n > 0 ? n : 1, &n_equal);
    for (uint32_t token = 0; token < profile->n_tokens; token++) {
        uint32_t order = order_of(sums[token]);
        if (order > limit || (order == limit && n_equal > 0))
            set[token / LAYOUT_BLOCK_TOKENS] |= bit_of(token);
        n_equal -= order == limit && n_equal > 0;
    }
}

/* set: special tokens and, where wanted, punctuation. */
static void set_marks(const struct fastgen_profile *profile, bool punctuation, uint64_t *set)
{
    for (uint32_t b = 0; b < profile->n_blocks; b++)
        set[b] = profile->special[b] | (punctuation ? profile->punctuation[b] : 0);
}

/* The cheapest class of a head; *ret_loss of it. head->frequent: to work in; then the set of a class with frequent tokens. */
static enum fastgen_class cheapest(const struct fastgen_profile *profile, struct head *head, double *ret_loss)
{
    uint32_t n = profile->n_tokens;
    uint64_t *set = head->frequent;
    double most = (1.0 - (double)profile->recovery) * head->n_rows, frequent = 0, local = 0;
    for (uint32_t marks = 0; marks < 2; marks++) {
        set_marks(profile, marks == 1, set);
        *ret_loss = sum_outside(head->sums[0], n, set) + sum_outside(head->sums[1], n, set);
        if (*ret_loss <= most)
            return marks == 1 ? FASTGEN_PUNCTUATION : FASTGEN_SPECIAL;
    }
    for (uint32_t half = 0; half < 2; half++) {
        set_marks(profile, true, set);
        add_frequent(profile, head->sums[half], set);
        frequent += sum_outside(head->sums[1 - half], n, set);
        local += sum_outside(head->far[1 - half], n, set);
    }
    *ret_loss = 0;
    if (local > most)
        return FASTGEN_FULL;
    for (uint32_t token = 0; token < n; token++)
        head->sums[0][token] += head->sums[1][token];
    set_marks(profile, true, set);
    add_frequent(profile, head->sums[0], set);
    *ret_loss = frequent <= most ? frequent : local;
    return frequent <= most ? FASTGEN_FREQUENT_CLASS : FASTGEN_LOCAL_CLASS;
}

void fastgen_profile_finish(struct fastgen_profile *profile)
{
    for (uint32_t i = 0; i < profile->n_heads; i++) {
        struct head *head = &profile->heads[i];
        if (head->n_rows > 0) {
            double loss;
            head->class = cheapest(profile, head, &loss);
            head->kept = (float)(1.0 - loss / head->n_rows);
            profile->absent[i] = head->class != FASTGEN_FULL;
        }
        if (head->class != FASTGEN_FREQUENT_CLASS && head->class != FASTGEN_LOCAL_CLASS) {
            free(head->frequent);
            head->frequent = NULL;
        }
        free(head->sums[0]);
        head->sums[0] = NULL;
    }
}

/* ---- what it says ---- */

uint32_t fastgen_profile_n_tokens(const struct fastgen_profile *profile)
{
    return profile->n_tokens;
}

float fastgen_profile_recovery(const struct fastgen_profile *profile)
{
    return profile->recovery;
}

enum fastgen_class fastgen_profile_class(const struct fastgen_profile *profile, uint32_t layer, uint32_t kv_head)
{
    return head_of(profile, layer, kv_head)->class;
}

float fastgen_profile_kept(const struct fastgen_profile *profile, uint32_t layer, uint32_t kv_head)
{
    return head_of(profile, layer, kv_head)->kept;
}

const bool *fastgen_profile_absent(const struct fastgen_profile *profile)
{
    return profile->absent;
}

/* Bits of a block for tokens from `first` on. */
static uint64_t bits_from(uint32_t block, uint32_t first)
{
    uint32_t begin = block * LAYOUT_BLOCK_TOKENS;
    return first <= begin ? ~(uint64_t)0 : first - begin >= LAYOUT_BLOCK_TOKENS ? 0 : ~(uint64_t)0 << (first - begin);
}

/* Special tokens of a block, and punctuation. */
static uint64_t marks_of(const struct fastgen_profile *profile, const uint32_t *ids, uint32_t position, uint32_t block,
                         bool punctuation)
{
    uint64_t marks = 0;
    uint32_t begin = block * LAYOUT_BLOCK_TOKENS, end = begin + LAYOUT_BLOCK_TOKENS;
    if (block < profile->n_blocks)
        marks = profile->special[block] | (punctuation ? profile->punctuation[block] : 0);
    for (uint32_t token = begin > profile->n_tokens ? begin : profile->n_tokens; token < end && token <= position;
         token++) {
        enum fastgen_kind kind = kind_of(profile, ids[token]);
        if (kind == FASTGEN_KIND_SPECIAL || (punctuation && kind == FASTGEN_KIND_PUNCTUATION))
            marks |= bit_of(token);
    }
    return marks;
}

void fastgen_profile_masks(const struct fastgen_profile *profile, uint32_t layer, uint32_t kv_head, const uint32_t *ids,
                           uint32_t position, uint32_t n_blocks, uint64_t *masks)
{
    const struct head *head = head_of(profile, layer, kv_head);
    uint32_t local = first_local(position + 1);
    for (uint32_t b = 0; b < n_blocks; b++) {
        uint64_t mask = ~(uint64_t)0;
        if (head->class != FASTGEN_FULL) {
            mask = marks_of(profile, ids, position, b, head->class != FASTGEN_SPECIAL);
            if (head->frequent != NULL && b < profile->n_blocks)
                mask |= head->frequent[b];
            if (head->class == FASTGEN_LOCAL_CLASS)
                mask |= bits_from(b, local);
        }
        masks[b] = mask & ~bits_from(b, position + 1);
    }
}
