/* answer.c - see answer.h. */
#include "client/command/answer.h"
#include "client/command/output.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

int answer_init(struct answer *answer, bool stream, bool keep)
{
    *answer = (struct answer){.stream = stream, .keep = keep};
    answer->prompt_tokens = json_array();
    answer->tokens = json_array();
    answer->logprobs = json_array();
    answer->top_logprobs = json_array();
    answer->text = calloc(1, 1);
    if (answer->prompt_tokens && answer->tokens && answer->logprobs && answer->top_logprobs && answer->text)
        return 0;
    answer_fini(answer);
    return -ENOMEM;
}

void answer_fini(struct answer *answer)
{
    json_decref(answer->prompt_tokens);
    json_decref(answer->tokens);
    json_decref(answer->logprobs);
    json_decref(answer->top_logprobs);
    free(answer->text);
    *answer = (struct answer){.stream = false};
}

json_t *answer_logprob(float logprob)
{
    return isfinite(logprob) ? json_real((double)logprob) : json_null();
}

static int on_accepted(void *context, const struct hcattn_accepted *accepted)
{
    struct answer *answer = context;
    if (!answer->keep)
        return 0;
    for (size_t i = 0; i < accepted->n_prompt_ids; i++)
        json_array_append_new(answer->prompt_tokens, json_integer(accepted->prompt_ids[i]));
    return 0;
}

static int on_progress(void *context, uint64_t n_done, uint64_t n_total)
{
    const struct answer *answer = context;
    /* For people who wait; a file of it helps nobody. */
    if (!answer->any_text && answer->n_tokens == 0 && output_is_terminal())
        output_progress(false, "prefill: %llu of %llu tokens", (unsigned long long)n_done, (unsigned long long)n_total);
    return 0;
}

static json_t *top_json(const struct hcattn_logprobs *logprobs)
{
    json_t *list = json_array();
    for (size_t i = 0; i < logprobs->n_top; i++)
        json_array_append_new(list, json_pack("{s:I,s:o}", "id", (json_int_t)logprobs->top[i].id, "logprob",
                                              answer_logprob(logprobs->top[i].logprob)));
    return list;
}

static int keep_text(struct answer *answer, const char *text, size_t n_bytes)
{
    char *grown = realloc(answer->text, answer->text_bytes + n_bytes + 1);
    if (!grown)
        return -ENOMEM;
    memcpy(grown + answer->text_bytes, text, n_bytes + 1);
    answer->text = grown;
    answer->text_bytes += n_bytes;
    return 0;
}

static int on_generated(void *context, const struct hcattn_generated *generated)
{
    struct answer *answer = context;
    if (answer->n_tokens == 0)
        output_progress(false, "%s", "");
    answer->n_tokens += generated->n_ids;
    if (generated->text_bytes) {
        answer->any_text = true;
        answer->last = generated->text[generated->text_bytes - 1];
    }
    if (answer->stream && generated->text_bytes) {
        output_bytes(generated->text, generated->text_bytes);
        if (output_flush() < 0)
            return -1; /* nobody reads any more */
    }
    if (!answer->keep)
        return 0;
    for (size_t i = 0; i < generated->n_ids; i++) {
        json_array_append_new(answer->tokens, json_integer(generated->ids[i]));
        if (!generated->logprobs)
            continue;
        json_array_append_new(answer->logprobs, answer_logprob(generated->logprobs[i].logprob));
        json_array_append_new(answer->top_logprobs, top_json(&generated->logprobs[i]));
    }
    return keep_text(answer, generated->text, generated->text_bytes);
}

struct hcattn_events answer_events(struct answer *answer)
{
    return (struct hcattn_events){
        .context = answer, .accepted = on_accepted, .progress = on_progress, .generated = on_generated};
}

static double per_second(uint64_t n, uint64_t us)
{
    return us ? (double)n * 1e6 / (double)us : 0.0;
}

json_t *answer_timings(const struct hcattn_timings *timings)
{
    return json_pack("{s:f,s:f,s:f,s:I,s:I,s:f,s:f,s:f}",                                              //
                     "queued_ms", (double)timings->queued_us / 1e3,                                    //
                     "prefill_ms", (double)timings->prefill_us / 1e3,                                  //
                     "decode_ms", (double)timings->decode_us / 1e3,                                    //
                     "n_prefill", (json_int_t)timings->n_prefill,                                      //
                     "n_decode", (json_int_t)timings->n_decode,                                        //
                     "prefill_tokens_per_second", per_second(timings->n_prefill, timings->prefill_us), //
                     "decode_tokens_per_second", per_second(timings->n_decode, timings->decode_us),    //
                     "store_wait_ms", (double)timings->store_wait_us / 1e3);
}

json_t *answer_json(const struct answer *answer, const struct hcattn_finished *finished, bool with_top)
{
    json_t *json = json_object();
    json_object_set(json, "prompt_tokens", answer->prompt_tokens);
    json_object_set(json, "tokens", answer->tokens);
    json_object_set(json, "logprobs", answer->logprobs);
    if (with_top)
        json_object_set(json, "top_logprobs", answer->top_logprobs);
    json_object_set_new(json, "text", output_json_text(answer->text, answer->text_bytes));
    json_object_set_new(json, "finish_reason", json_string(hcattn_finish_name(finished->reason)));
    json_object_set_new(json, "session_tokens", json_integer((json_int_t)finished->n_tokens));
    json_object_set_new(json, "timings", answer_timings(&finished->timings));
    return json;
}
