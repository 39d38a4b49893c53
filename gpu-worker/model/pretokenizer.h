/*
 * pretokenizer.h - cuts text into the words that byte-level BPE works on, as the model's tokenizer.ggml.pre asks.
 *
 * Owner      a tokenizer; immutable after pretokenizer_new(), any thread.
 * Source     patterns of the tokenizers of GPT-2, SmolLM, Llama 3 and Qwen2; Unicode classes from PCRE2.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "gpu-worker/model/gguf.h"

struct pretokenizer;

/* `name`: a value of tokenizer.ggml.pre. -ENOTSUP: not one of ours; -ENOMEM. */
int pretokenizer_new(struct gguf_string name, struct pretokenizer **ret_pretokenizer);
struct pretokenizer *pretokenizer_free(struct pretokenizer *pretokenizer);

/* Names for a message: "smollm, gpt-2, ..." */
const char *pretokenizer_supported(void);

/* Rules that go with the pattern in llama.cpp: a word that is a token needs no merges; BOS is added by default. */
bool pretokenizer_takes_whole_words(const struct pretokenizer *pretokenizer);
bool pretokenizer_adds_bos(const struct pretokenizer *pretokenizer);

/* What one call needs for itself, so that threads share a pretokenizer. NULL: no memory. */
struct pretokenizer_scratch;
struct pretokenizer_scratch *pretokenizer_scratch_new(const struct pretokenizer *pretokenizer);
struct pretokenizer_scratch *pretokenizer_scratch_free(struct pretokenizer_scratch *scratch);

/*
 * Length in bytes (>= 1) of the word that starts at text + offset. text must be valid UTF-8, offset < n_bytes at a
 * character's start; only text decides, so every word boundary of a text follows from its beginning.
 */
size_t pretokenizer_next(const struct pretokenizer *pretokenizer, struct pretokenizer_scratch *scratch,
                         const char *text, size_t n_bytes, size_t offset);
