/* validate.c - what a client may ask: every value checked before anything is done, each refusal with one sentence. */
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "common/utf8.h"
#include "coordinator/state.h"
#include "proto/policy.h"

#define MAX_TOP_LOGPROBS 20u
#define MAX_STOP         16u
#define MAX_STOP_BYTES   1024u
#define MAX_BIAS         1024u
#define MAX_WINDOW       4096u /* of penalties: their time grows with its square, and all streams wait for it */
#define MAX_MESSAGES     4096u

#define MAX_JOB_TEXTS      256u
#define MAX_JOB_NAME       255u
#define MAX_JOB_BYTES      (UINT64_C(48) << 20) /* of all texts; what goes to the worker must stay below 64 MiB */
#define MAX_JOB_PRESETS    64u
#define MAX_JOB_ITERATIONS 100000u

/*
 * Bytes of text or number of ids in one input. A worker makes ids of text between two steps: an input without a bound would
 * let all streams wait, and the ids and pieces of more than MAX_AMOUNT could not be sent back.
 */
#define MIN_AMOUNT            (UINT64_C(1) << 20)
#define MAX_AMOUNT            (UINT64_C(8) << 20)
#define INPUT_BYTES_PER_TOKEN 16u

static Hcattn__ErrorCode refuse(char *sentence, Hcattn__ErrorCode code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
static Hcattn__ErrorCode refuse(char *sentence, Hcattn__ErrorCode code, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(sentence, SERVER_ERROR_BYTES, format, arguments);
    va_end(arguments);
    for (char *c = sentence; *c != '\0'; c++) /* what a client said stays one line */
        *c = *c < ' ' || *c > '~' ? '?' : *c;
    return code;
}

#define INVALID(...) refuse(sentence, HCATTN__ERROR_CODE__INVALID_ARGUMENT, __VA_ARGS__)

bool validate_input_empty(const Hcattn__Input *input)
{
    if (!input)
        return true;
    switch (input->input_case) {
    case HCATTN__INPUT__INPUT_TEXT:
        return input->text[0] == 0;
    case HCATTN__INPUT__INPUT_TOKENS:
        return input->tokens->n_ids == 0;
    case HCATTN__INPUT__INPUT_CHAT:
        return input->chat->n_messages == 0;
    default:
        return true;
    }
}

static uint64_t input_limit(const struct server *server)
{
    uint64_t limit = (uint64_t)server->model.n_ctx * INPUT_BYTES_PER_TOKEN;
    return limit < MIN_AMOUNT ? MIN_AMOUNT : limit > MAX_AMOUNT ? MAX_AMOUNT : limit;
}

static Hcattn__ErrorCode check_amount(const struct server *server, uint64_t n, const char *what, char *sentence)
{
    uint64_t limit = input_limit(server);
    if (n > limit)
        return INVALID("%llu %s in one request; at most %llu with a context of %u tokens", (unsigned long long)n, what,
                       (unsigned long long)limit, server->model.n_ctx);
    return HCATTN__ERROR_CODE__OK;
}

static Hcattn__ErrorCode check_text(const char *text, const char *what, char *sentence)
{
    size_t offset;
    if (utf8_check(text, strlen(text), &offset) != 0)
        return INVALID("the %s is not UTF-8: byte %zu begins no character", what, offset);
    return HCATTN__ERROR_CODE__OK;
}

static Hcattn__ErrorCode check_input(const struct server *server, const Hcattn__Input *input, char *sentence)
{
    uint64_t n_bytes = 0;
    Hcattn__ErrorCode code;
    if (!input)
        return HCATTN__ERROR_CODE__OK;
    switch (input->input_case) {
    case HCATTN__INPUT__INPUT_TEXT:
        code = check_amount(server, strlen(input->text), "bytes of text", sentence);
        return code != HCATTN__ERROR_CODE__OK ? code : check_text(input->text, "prompt", sentence);
    case HCATTN__INPUT__INPUT_TOKENS:
        return check_amount(server, input->tokens->n_ids, "token ids", sentence);
    case HCATTN__INPUT__INPUT_CHAT:
        break;
    default:
        return HCATTN__ERROR_CODE__OK;
    }
    if (input->chat->n_messages > MAX_MESSAGES)
        return INVALID("%zu messages; at most %u", input->chat->n_messages, MAX_MESSAGES);
    for (size_t i = 0; i < input->chat->n_messages; i++)
        n_bytes += strlen(input->chat->messages[i]->role) + strlen(input->chat->messages[i]->content);
    code = check_amount(server, n_bytes, "bytes of messages", sentence);
    for (size_t i = 0; code == HCATTN__ERROR_CODE__OK && i < input->chat->n_messages; i++) {
        code = check_text(input->chat->messages[i]->role, "role of a message", sentence);
        if (code == HCATTN__ERROR_CODE__OK)
            code = check_text(input->chat->messages[i]->content, "content of a message", sentence);
    }
    return code;
}

static bool in_range(float value, float low, float high)
{
    return isfinite(value) && value >= low && value <= high;
}

static Hcattn__ErrorCode check_sampling(const Hcattn__Sampling *sampling, char *sentence)
{
    if (!sampling)
        return HCATTN__ERROR_CODE__OK;
    if (!in_range(sampling->temperature, 0, 100))
        return INVALID("temperature %g; 0 (greedy) to 100", (double)sampling->temperature);
    if (!in_range(sampling->top_p, 0, 1))
        return INVALID("top_p %g; 0 (off) to 1", (double)sampling->top_p);
    if (!in_range(sampling->min_p, 0, 1))
        return INVALID("min_p %g; 0 (off) to 1", (double)sampling->min_p);
    if (!in_range(sampling->repeat_penalty, 0, 100))
        return INVALID("repeat_penalty %g; 0 or 1 (off) to 100", (double)sampling->repeat_penalty);
    if (!in_range(sampling->presence_penalty, -100, 100) || !in_range(sampling->frequency_penalty, -100, 100))
        return INVALID("presence_penalty %g, frequency_penalty %g; -100 to 100", (double)sampling->presence_penalty,
                       (double)sampling->frequency_penalty);
    if (sampling->penalty_window > MAX_WINDOW)
        return INVALID("penalty_window %u; at most %u", sampling->penalty_window, MAX_WINDOW);
    if (sampling->n_logit_bias > MAX_BIAS)
        return INVALID("%zu logit biases; at most %u", sampling->n_logit_bias, MAX_BIAS);
    for (size_t i = 0; i < sampling->n_logit_bias; i++) {
        float bias = sampling->logit_bias[i]->bias;
        if (isnan(bias) || bias > 1e6f)
            return INVALID("logit bias %g of token %u; a number, or -inf to forbid it", (double)bias,
                           sampling->logit_bias[i]->id);
    }
    return HCATTN__ERROR_CODE__OK;
}

static Hcattn__ErrorCode check_generate(const struct server *server, const Hcattn__Generate *generate, char *sentence)
{
    if (generate->top_logprobs > MAX_TOP_LOGPROBS)
        return INVALID("top_logprobs %u; at most %u", generate->top_logprobs, MAX_TOP_LOGPROBS);
    if (generate->n_stop > MAX_STOP)
        return INVALID("%zu stop strings; at most %u", generate->n_stop, MAX_STOP);
    for (size_t i = 0; i < generate->n_stop; i++) {
        size_t n_bytes = strlen(generate->stop[i]);
        if (n_bytes == 0 || n_bytes > MAX_STOP_BYTES)
            return INVALID("a stop string of %zu bytes; 1 to %u", n_bytes, MAX_STOP_BYTES);
        Hcattn__ErrorCode code = check_text(generate->stop[i], "stop string", sentence);
        if (code != HCATTN__ERROR_CODE__OK)
            return code;
    }
    Hcattn__ErrorCode code = check_sampling(generate->sampling, sentence);
    return code != HCATTN__ERROR_CODE__OK ? code : check_input(server, generate->input, sentence);
}

static Hcattn__ErrorCode check_policy(const char *policy, char *sentence)
{
    struct policy_terms terms;
    return policy_parse(policy, &terms, sentence, SERVER_ERROR_BYTES) == 0 ? HCATTN__ERROR_CODE__OK
                                                                           : HCATTN__ERROR_CODE__NOT_SUPPORTED;
}

static Hcattn__ErrorCode check_open(const Hcattn__OpenSession *open, char *sentence)
{
    if (open->exact && open->exact->n_tokens > SERVER_MAX_EXACT_TOKENS)
        return INVALID("%u exact tokens; at most %u", open->exact->n_tokens, SERVER_MAX_EXACT_TOKENS);
    return open->policy[0] ? check_policy(open->policy, sentence) : HCATTN__ERROR_CODE__OK;
}

static Hcattn__ErrorCode need_session(uint64_t session, char *sentence)
{
    return session == 0 ? INVALID("session 0 is none") : HCATTN__ERROR_CODE__OK;
}

static Hcattn__ErrorCode need_input(const struct server *server, const Hcattn__Input *input, char *sentence)
{
    return validate_input_empty(input) ? INVALID("the prompt is empty") : check_input(server, input, sentence);
}

/* ---- jobs ---- */

static Hcattn__ErrorCode check_texts(Hcattn__NamedText *const *texts, size_t n_texts, char *sentence)
{
    uint64_t n_bytes = 0;
    if (n_texts > MAX_JOB_TEXTS)
        return INVALID("%zu texts in one job; at most %u", n_texts, MAX_JOB_TEXTS);
    for (size_t i = 0; i < n_texts; i++) {
        size_t n_name = strlen(texts[i]->name), n_text = strlen(texts[i]->text);
        if (n_name == 0 || n_name > MAX_JOB_NAME)
            return INVALID("a text's name of %zu bytes; 1 to %u", n_name, MAX_JOB_NAME);
        if (n_text == 0)
            return INVALID("text \"%s\" is empty", texts[i]->name);
        n_bytes += n_text;
    }
    if (n_bytes > MAX_JOB_BYTES)
        return INVALID("%llu bytes of text in one job; at most %llu", (unsigned long long)n_bytes,
                       (unsigned long long)MAX_JOB_BYTES);
    Hcattn__ErrorCode code = HCATTN__ERROR_CODE__OK;
    for (size_t i = 0; code == HCATTN__ERROR_CODE__OK && i < n_texts; i++) {
        size_t offset;
        code = check_text(texts[i]->name, "name of a text", sentence);
        if (code == HCATTN__ERROR_CODE__OK && utf8_check(texts[i]->text, strlen(texts[i]->text), &offset) != 0)
            code = INVALID("text \"%s\" is not UTF-8: byte %zu begins no character", texts[i]->name, offset);
    }
    return code;
}

static Hcattn__ErrorCode check_evaluate(const struct server *server, const Hcattn__Evaluate *evaluate, char *sentence)
{
    uint32_t context = evaluate->context, tail = evaluate->tail;
    if (evaluate->n_texts == 0)
        return INVALID("there is no text to evaluate on");
    if (context == 0 || context % LAYOUT_BLOCK_TOKENS != 0)
        return INVALID("a context of %u tokens; a multiple of %u", context, LAYOUT_BLOCK_TOKENS);
    if (tail == 0 || tail % LAYOUT_BLOCK_TOKENS != 0 || tail >= context)
        return INVALID("a tail of %u tokens; a multiple of %u, less than the context of %u", tail, LAYOUT_BLOCK_TOKENS,
                       context);
    if (server->model.known && context > server->model.n_ctx)
        return INVALID("a context of %u tokens; the service's is %u", context, server->model.n_ctx);
    if (evaluate->n_presets == 0 || evaluate->n_presets > MAX_JOB_PRESETS)
        return INVALID("%zu presets to evaluate; 1 to %u", evaluate->n_presets, MAX_JOB_PRESETS);
    for (size_t i = 0; i < evaluate->n_presets; i++) {
        size_t n_bytes = strlen(evaluate->presets[i]);
        if (n_bytes == 0 || n_bytes >= LAYOUT_POLICY_BYTES)
            return INVALID("a preset's name of %zu bytes; 1 to %u", n_bytes, LAYOUT_POLICY_BYTES - 1);
        Hcattn__ErrorCode code = check_text(evaluate->presets[i], "name of a preset", sentence);
        if (code != HCATTN__ERROR_CODE__OK)
            return code; /* which presets there are is the worker's to say: baselines exist only there */
    }
    return check_texts(evaluate->texts, evaluate->n_texts, sentence);
}

static Hcattn__ErrorCode check_codebook(const Hcattn__TrainCodebook *train, char *sentence)
{
    uint32_t c = train->n_centroids;
    if (train->n_dims != 2 && train->n_dims != 4 && train->n_dims != 8)
        return INVALID("sub-spaces of %u dimensions; 2, 4 or 8", train->n_dims);
    if (c < 256 || c > 4096 || (c & (c - 1)) != 0)
        return INVALID("%u centroids; 256 to 4096, a power of two", c);
    if (train->max_iterations > MAX_JOB_ITERATIONS)
        return INVALID("%u iterations; at most %u", train->max_iterations, MAX_JOB_ITERATIONS);
    return check_texts(train->texts, train->n_texts, sentence);
}

static Hcattn__ErrorCode check_job(const struct server *server, const Hcattn__RunJob *job, char *sentence)
{
    switch (job->job_case) {
    case HCATTN__RUN_JOB__JOB_EVALUATE:
        return check_evaluate(server, job->evaluate, sentence);
    case HCATTN__RUN_JOB__JOB_TRAIN_CODEBOOK:
        return check_codebook(job->train_codebook, sentence);
    case HCATTN__RUN_JOB__JOB_GATHER_STATISTICS:
        return check_texts(job->gather_statistics->texts, job->gather_statistics->n_texts, sentence);
    default:
        return INVALID("a job without content, or of a kind that this version does not know");
    }
}

/* ---- by kind ---- */

static Hcattn__ErrorCode first_error(Hcattn__ErrorCode a, Hcattn__ErrorCode b)
{
    return a != HCATTN__ERROR_CODE__OK ? a : b;
}

Hcattn__ErrorCode validate_request(const struct server *server, const Hcattn__Request *request,
                                   char sentence[SERVER_ERROR_BYTES])
{
    switch (request->request_case) {
    case HCATTN__REQUEST__REQUEST_OPEN_SESSION:
        return check_open(request->open_session, sentence);
    case HCATTN__REQUEST__REQUEST_CLOSE_SESSION:
        return need_session(request->close_session->session, sentence);
    case HCATTN__REQUEST__REQUEST_APPEND:
        return first_error(need_session(request->append->session, sentence),
                           need_input(server, request->append->input, sentence));
    case HCATTN__REQUEST__REQUEST_GENERATE:
        return first_error(need_session(request->generate->session, sentence),
                           check_generate(server, request->generate, sentence));
    case HCATTN__REQUEST__REQUEST_SCORE:
        if (request->score->from == 0)
            return INVALID("from 0: the first token has nothing before it; at least 1");
        if (request->score->top_logprobs > MAX_TOP_LOGPROBS)
            return INVALID("top_logprobs %u; at most %u", request->score->top_logprobs, MAX_TOP_LOGPROBS);
        return first_error(need_session(request->score->session, sentence),
                           need_input(server, request->score->input, sentence));
    case HCATTN__REQUEST__REQUEST_FORK:
        if (request->fork->new_session != 0 && request->fork->new_session == request->fork->session)
            return INVALID("session %016llx cannot be a copy of itself", (unsigned long long)request->fork->session);
        return first_error(need_session(request->fork->session, sentence),
                           request->fork->policy[0] ? check_policy(request->fork->policy, sentence)
                                                    : HCATTN__ERROR_CODE__OK);
    case HCATTN__REQUEST__REQUEST_SET_POLICY:
        return check_policy(request->set_policy->policy, sentence);
    case HCATTN__REQUEST__REQUEST_DESCRIBE_SESSION:
        return need_session(request->describe_session->session, sentence);
    case HCATTN__REQUEST__REQUEST_SET_TRANSPORT:
        if (strcmp(request->set_transport->transport, server_transport_names[SERVER_RING]) != 0 &&
            strcmp(request->set_transport->transport, server_transport_names[SERVER_ROUTED]) != 0)
            return INVALID("transport \"%.32s\" is none that can be set; there is: ring, routed",
                           request->set_transport->transport);
        return HCATTN__ERROR_CODE__OK;
    case HCATTN__REQUEST__REQUEST_DRAIN_STORE:
        if (request->drain_store->store >= SERVER_MAX_STORES)
            return INVALID("value-store %u; their numbers are 0 to %u", request->drain_store->store,
                           SERVER_MAX_STORES - 1);
        return HCATTN__ERROR_CODE__OK;
    case HCATTN__REQUEST__REQUEST_RUN_JOB:
        return check_job(server, request->run_job, sentence);
    case HCATTN__REQUEST__REQUEST_TOKENIZE:
        if (!request->tokenize->input || request->tokenize->input->input_case == HCATTN__INPUT__INPUT__NOT_SET)
            return INVALID("there is no input to tokenize");
        return check_input(server, request->tokenize->input, sentence);
    case HCATTN__REQUEST__REQUEST_DETOKENIZE:
        return check_amount(server, request->detokenize->n_ids, "token ids", sentence);
    case HCATTN__REQUEST__REQUEST__NOT_SET:
        return INVALID("a request without content, or of a kind that this version does not know");
    default:
        return HCATTN__ERROR_CODE__OK;
    }
}
