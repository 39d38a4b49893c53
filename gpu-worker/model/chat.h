/*
 * chat.h - conversations as the text and tokens a model was trained on.
 *
 * Owner      the worker; points into the GGUF mapping and to the tokenizer, which must live as long.
 * Threads    immutable after chat_new(), any thread.
 * Invariant  what users write is text: only the template's own words become special tokens.
 * Templates  files carry a program (Jinja); it is not run but recognised as one of the families below by what it
 *            contains. Its default system message, trimming and BOS are read from it. Others are refused.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "gpu-worker/model/gguf.h"
#include "gpu-worker/model/tokenizer.h"

struct chat;

struct chat_message {
    const char *role; /* "system", "user", "assistant"; ChatML also "tool" */
    const char *content;
    size_t n_content_bytes;
};

/* On failure `error` holds one line. -ENOENT: no template in the file; -ENOTSUP: of no known family; -ENOMEM. */
int chat_new(const struct gguf *gguf, const struct tokenizer *tokenizer, struct chat **ret_chat, char *error,
             size_t error_size);
struct chat *chat_free(struct chat *chat); /* accepts NULL, returns NULL */

const char *chat_family(const struct chat *chat); /* "ChatML", "Llama-2", "Llama-3", "Zephyr", "Gemma" */

/*
 * Ids of a conversation, BOS included where model or template want it, never twice. The caller frees *ret_ids.
 * add_generation_prompt: ends where the assistant's answer starts.
 * -EINVAL: no messages, an unknown role, or an order the family does not have (`error` says which); -EILSEQ: not UTF-8;
 * -E2BIG; -ENOMEM.
 */
int chat_encode(const struct chat *chat, const struct chat_message *messages, size_t n_messages,
                bool add_generation_prompt, uint32_t **ret_ids, size_t *ret_n_ids, char *error, size_t error_size);

/* The same as text, without the BOS that TOKENIZER_ADD_BOS adds; terminated, the caller frees it. */
int chat_render(const struct chat *chat, const struct chat_message *messages, size_t n_messages,
                bool add_generation_prompt, char **ret_text, size_t *ret_n_bytes, char *error, size_t error_size);
