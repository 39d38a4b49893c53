/*
 * answer.h - a generation as it arrives: text to the reader at once, the rest kept for the JSON object.
 *
 * Owner      the subcommand; answer_init() .. answer_fini(). Threads: the main thread.
 */
#pragma once

#include "client/hcattn.h"

#include <jansson.h>

struct answer {
    bool stream; /* text goes to standard output as it comes */
    bool keep;   /* ids, log-probabilities and text are kept */
    bool show_logprobs;
    bool any_text;
    char last; /* byte of the text */
    json_t *prompt_tokens;
    json_t *tokens;
    json_t *logprobs;
    json_t *top_logprobs;
    char *text;
    size_t text_bytes;
    size_t n_tokens;
};

int answer_init(struct answer *answer, bool stream, bool keep); /* -ENOMEM */
void answer_fini(struct answer *answer);

struct hcattn_events answer_events(struct answer *answer);

/* The object of --json; a new reference, NULL when out of memory. */
json_t *answer_json(const struct answer *answer, const struct hcattn_finished *finished, bool with_top);

json_t *answer_timings(const struct hcattn_timings *timings);
json_t *answer_logprob(float logprob); /* JSON has no infinities: null */
