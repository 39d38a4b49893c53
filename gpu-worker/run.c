#include "gpu-worker/run.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct run_request *run_request_free(struct run_request *request)
{
    if (request == NULL)
        return NULL;
    free(request->blocks);
    free(request->input_ids);
    free(request->sampling.biases);
    for (uint32_t i = 0; i < request->n_stop; i++)
        free(request->stop[i]);
    free(request->stop);
    free(request);
    return NULL;
}

bool run_wants_logits(const struct run_request *request)
{
    return request->score || request->logprobs || request->top_logprobs > 0;
}

void run_logprobs_fini(struct run_logprobs *logprobs)
{
    free(logprobs->top);
    free(logprobs->all);
    *logprobs = (struct run_logprobs){0};
}

/* What a request says about itself, before any memory is spent on it. */
static int check(const struct run_request *request, char *sentence, size_t sentence_size)
{
    uint64_t n_tokens = request->at + request->n_input + request->max_tokens;
    if (n_tokens == 0 || n_tokens > (uint64_t)request->n_blocks * LAYOUT_BLOCK_TOKENS) {
        snprintf(sentence, sentence_size, "%llu tokens do not fit into %u reserved blocks",
                 (unsigned long long)n_tokens, request->n_blocks);
        return -EINVAL;
    }
    if (request->at + request->n_input == 0) {
        snprintf(sentence, sentence_size, "the prompt is empty");
        return -EINVAL;
    }
    if (request->score && (request->score_from == 0 || request->score_from < request->at ||
                           request->score_from > request->at + request->n_input)) {
        snprintf(sentence, sentence_size,
                 "score from position %llu: must be at least 1 and lie in the input, %llu to %llu",
                 (unsigned long long)request->score_from, (unsigned long long)request->at,
                 (unsigned long long)(request->at + request->n_input));
        return -EINVAL;
    }
    return 0;
}

int run_new(struct run_request *request, struct quantizers *quantizers, const struct tokenizer *tokenizer,
            struct run **ret_run, char *sentence, size_t sentence_size)
{
    struct policy policy;
    int r = policy_find(quantizers, request->policy, &policy, sentence, sentence_size);
    r = r == -EINVAL || r == -ENOENT ? -ENOTSUP : r;
    if (r == 0)
        r = check(request, sentence, sentence_size);
    struct run *run = r == 0 ? calloc(1, sizeof(*run)) : NULL;
    if (run == NULL) {
        run_request_free(request);
        return r < 0 ? r : -ENOMEM;
    }
    run->request = request;
    run->policy = policy;
    run->capacity = (uint32_t)(request->at + request->n_input + request->max_tokens);
    run->first_decode = request->score ? (uint32_t)request->score_from : run_input_end(run);
    run->goal = request->max_tokens > 0 ? run->capacity : run_input_end(run);
    run->ids = calloc(run->capacity, sizeof(*run->ids));
    r = run->ids == NULL ? -ENOMEM : 0;
    if (r == 0 && request->max_tokens > 0)
        r = text_stream_new(tokenizer, (const char *const *)request->stop, request->n_stop, &run->text);
    if (r < 0) {
        run_free(run);
        return r;
    }
    *ret_run = run;
    return 0;
}

struct run *run_free(struct run *run)
{
    if (run == NULL)
        return NULL;
    run_logprobs_fini(&run->pending_logprobs);
    free(run->pending_text);
    text_stream_free(run->text);
    run_request_free(run->request);
    free(run->ids);
    free(run);
    return NULL;
}

uint32_t run_input_end(const struct run *run)
{
    return (uint32_t)(run->request->at + run->request->n_input);
}

void run_fail(struct run *run, int error, const char *format, ...)
{
    if (run->error != 0)
        return;
    run->error = error;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(run->sentence, sizeof(run->sentence), format, arguments);
    va_end(arguments);
}

uint32_t run_store(const struct run *run, uint32_t block)
{
    return run->request->lane_store[block % LAYOUT_N_LANES];
}
