#include "gpu-worker/train/train_texts.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpu-worker/model/tokenizer.h"
#include "gpu-worker/network.h"
#include "gpu-worker/train/train.h"
#include "proto/layout.h"

struct encoded {
    uint32_t *ids;
    size_t n, n_taken;
};

struct train_texts *train_texts_free(struct train_texts *texts)
{
    if (texts == NULL)
        return NULL;
    for (uint32_t i = 0; i < texts->n_contexts; i++)
        free(texts->contexts[i].ids);
    free(texts->contexts);
    free(texts);
    return NULL;
}

static int encode(const struct job_tools *tools, const char *name, const char *text, struct encoded *encoded,
                  char *sentence)
{
    int r = tokenizer_encode(tools->tokenizer, text, strlen(text), 0, &encoded->ids, &encoded->n);
    if (r == -EILSEQ)
        snprintf(sentence, JOB_SENTENCE_SIZE, "%.100s is not UTF-8", name);
    else if (r == -E2BIG)
        snprintf(sentence, JOB_SENTENCE_SIZE, "%.100s is too large: a text may have %d bytes", name,
                 TOKENIZER_MAX_TEXT_BYTES);
    return r == -EILSEQ || r == -E2BIG ? -EINVAL : r;
}

/* FNV-1a, 64 bits. */
static uint64_t hash_ids(uint64_t hash, const uint32_t *ids, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t byte = 0; byte < 4; byte++)
            hash = (hash ^ (ids[i] >> 8 * byte & 0xff)) * UINT64_C(0x100000001b3);
    return hash;
}

/* Up to n tokens more of one text. */
static int take_context(struct train_texts *texts, const struct tokenizer *tokenizer, struct encoded *encoded,
                        uint32_t n)
{
    bool bos = tokenizer_adds_bos(tokenizer) && tokenizer_bos(tokenizer) != TOKENIZER_NO_TOKEN;
    uint32_t n_wanted = n - bos;
    n_wanted = encoded->n - encoded->n_taken < n_wanted ? (uint32_t)(encoded->n - encoded->n_taken) : n_wanted;
    struct train_context *contexts = realloc(texts->contexts, (texts->n_contexts + 1) * sizeof(*contexts));
    if (contexts == NULL)
        return -ENOMEM;
    texts->contexts = contexts;
    struct train_context *context = &contexts[texts->n_contexts];
    context->n = n_wanted + bos;
    context->ids = malloc(context->n * sizeof(*context->ids));
    if (context->ids == NULL)
        return -ENOMEM;
    texts->n_contexts++;
    if (bos)
        context->ids[0] = tokenizer_bos(tokenizer);
    memcpy(context->ids + bos, encoded->ids + encoded->n_taken, n_wanted * sizeof(*context->ids));
    encoded->n_taken += n_wanted;
    texts->n_tokens += context->n;
    texts->hash = hash_ids(texts->hash, context->ids, context->n);
    return 0;
}

static uint32_t context_length(const struct job_tools *tools, uint32_t n)
{
    uint32_t n_train = tools->network->shape.n_ctx_train;
    n = tools->n_ctx > 0 && tools->n_ctx < n ? tools->n_ctx : n;
    n = n_train > 0 && n_train < n ? n_train : n;
    return n < LAYOUT_BLOCK_TOKENS ? LAYOUT_BLOCK_TOKENS : n;
}

/* Rounds over the texts. What is left of a text, or of max_tokens, counts only if it is a whole block. */
static int cut(struct train_texts *texts, const struct job_tools *tools, struct encoded *encoded, uint32_t n_texts,
               uint32_t max_context, uint64_t max_tokens)
{
    uint32_t length = context_length(tools, max_context);
    for (uint32_t before = UINT32_MAX; before != texts->n_contexts;) {
        before = texts->n_contexts;
        for (uint32_t i = 0; i < n_texts; i++) {
            uint64_t room = max_tokens - texts->n_tokens;
            if (room < LAYOUT_BLOCK_TOKENS || encoded[i].n - encoded[i].n_taken < LAYOUT_BLOCK_TOKENS)
                continue;
            int r = take_context(texts, tools->tokenizer, &encoded[i], room < length ? (uint32_t)room : length);
            if (r < 0)
                return r;
        }
    }
    return 0;
}

uint32_t train_texts_n_offsets(const struct train_texts *texts, const struct job_tools *tools)
{
    uint32_t longest = 0, n_ctx = tools->network->shape.n_ctx_train;
    n_ctx = tools->n_ctx > n_ctx ? tools->n_ctx : n_ctx;
    for (uint32_t i = 0; i < texts->n_contexts; i++)
        longest = texts->contexts[i].n > longest ? texts->contexts[i].n : longest;
    return n_ctx > longest ? n_ctx - longest + 1 : 1;
}

int train_texts_new(const struct job_tools *tools, const struct job_text *given, uint32_t n_given, uint32_t max_context,
                    uint64_t max_tokens, struct train_texts **ret_texts, char *sentence)
{
    struct train_texts *texts = calloc(1, sizeof(*texts));
    uint32_t n = n_given == 0 ? 1 : n_given;
    struct encoded *encoded = calloc(n, sizeof(*encoded));
    int r = texts == NULL || encoded == NULL ? -ENOMEM : 0;
    if (r == 0 && n_given == 0)
        r = encode(tools, "the worker's own text", train_own_text(), &encoded[0], sentence);
    for (uint32_t i = 0; r == 0 && i < n_given; i++)
        r = encode(tools, given[i].name, given[i].text, &encoded[i], sentence);
    if (r == 0) {
        texts->hash = UINT64_C(0xcbf29ce484222325);
        r = cut(texts, tools, encoded, n, max_context, max_tokens);
    }
    if (r == 0 && texts->n_contexts == 0) {
        snprintf(sentence, JOB_SENTENCE_SIZE, "no text is as long as a block of %u tokens", LAYOUT_BLOCK_TOKENS);
        r = -E2BIG;
    }
    for (uint32_t i = 0; encoded != NULL && i < n; i++)
        free(encoded[i].ids);
    free(encoded);
    if (r < 0) {
        train_texts_free(texts);
        return r;
    }
    *ret_texts = texts;
    return 0;
}
