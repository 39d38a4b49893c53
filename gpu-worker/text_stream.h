/*
 * text_stream.h - generated tokens to text: whole characters only, held back while they could begin a stop string.
 *
 * A pure function of the tokens fed: a stream fed with the same tokens after a recovery goes on where the old one was.
 * Owner and thread: the engine's.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "gpu-worker/model/tokenizer.h"

struct text_stream;

int text_stream_new(const struct tokenizer *tokenizer, const char *const *stop, uint32_t n_stop,
                    struct text_stream **ret_stream);             /* tokenizer and stop stay the caller's; -ENOMEM */
struct text_stream *text_stream_free(struct text_stream *stream); /* accepts NULL, returns NULL */

/* Text that a token completes: malloc'd, zero-terminated, the caller's. *ret_stopped: a stop string is complete; the text
 * ends before it. -ENOMEM. */
int text_stream_feed(struct text_stream *stream, uint32_t id, char **ret_text, bool *ret_stopped);
/* What was held back, at the end of a generation that no stop string ended. */
int text_stream_flush(struct text_stream *stream, char **ret_text);
