/*
 * fastgen_kinds.h - which ids of a vocabulary are special, which are punctuation and white space only. Internal to this folder.
 *
 * Threads: any.
 */
#pragma once

#include "gpu-worker/model/tokenizer.h"

enum fastgen_kind { FASTGEN_KIND_WORD, FASTGEN_KIND_SPECIAL, FASTGEN_KIND_PUNCTUATION };

/*
 * kinds [n_vocab], the caller frees them. Punctuation: pieces of nothing but Unicode punctuation, ASCII punctuation (which
 * Unicode calls symbols in part) and white space; half a character is none. A millisecond for 50,000 ids. -ENOMEM.
 */
int fastgen_kinds(const struct tokenizer *tokenizer, uint8_t **ret_kinds);
