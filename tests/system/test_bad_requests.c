/*
 * test_bad_requests.c - well-formed requests that ask for what is not there, cannot be or makes no sense: each is refused by a
 * code and one line, and the service is as before.
 */
#include "tests/system/service.h"
#include "tests/system/volley.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef HCATTN_SANITIZED
enum { LONG_MS = 120000 };
#else
enum { LONG_MS = 20000 };
#endif
static struct service service;
static struct volley volley;

static int set_up(void **state)
{
    (void)state;
    volley_start(&volley, &service);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    volley_stop(&volley);
    return 0;
}

#define BEGIN(KIND, field, TYPE, INIT)                                                                                 \
    Hcattn__Request request = HCATTN__REQUEST__INIT;                                                                   \
    TYPE body = INIT;                                                                                                  \
    request.request_case = HCATTN__REQUEST__REQUEST_##KIND;                                                            \
    request.field = &body;

static struct volley_client *client;

/* Asks and wants that error, with a sentence. */
static void refused(Hcattn__Request *request, Hcattn__ErrorCode code)
{
    static uint64_t next_id = 1000;
    request->request_id = ++next_id;
    volley_client_ask(client, request);
    Hcattn__Reply *reply = volley_client_reply(client, LONG_MS);
    if (reply != NULL && reply->reply_case == HCATTN__REPLY__REPLY_ACCEPTED) { /* what only the worker can judge */
        hcattn__reply__free_unpacked(reply, NULL);
        reply = volley_client_reply(client, LONG_MS);
    }
    assert_non_null(reply);
    assert_true(reply->request_id == request->request_id);
    if (reply->reply_case != HCATTN__REPLY__REPLY_ERROR)
        fail_msg("request %d: a reply of kind %d instead of an error", (int)request->request_case,
                 (int)reply->reply_case);
    if (reply->error->code != code)
        fail_msg("request %d: code %d (%s) instead of %d", (int)request->request_case, (int)reply->error->code,
                 reply->error->sentence, (int)code);
    assert_true(strlen(reply->error->sentence) > 8);
    assert_null(strchr(reply->error->sentence, '\n'));
    hcattn__reply__free_unpacked(reply, NULL);
}

static const char *const policies[] = {
    "clever",
    "rot2",
    "rot2,",
    "rot2,deviation",
    "rot2,deviation=",
    "rot2,mass=1.1",
    "rot5,mass=0",
    "rot2,mass=-0",
    "rot2,mass=0.5,notail,",
    "rot2,mass=nan",
    "rot2,mass=0.5,a",
    "full,notail",
    "full\nor another",
    "caf\xe9",
};

/* Asks with each of them. */
static void refuse_policies(Hcattn__Request *request, char **policy)
{
    for (size_t i = 0; i < sizeof(policies) / sizeof(policies[0]); i++) {
        *policy = (char *)(uintptr_t)policies[i];
        refused(request, HCATTN__ERROR_CODE__NOT_SUPPORTED);
    }
}

static void absurd_operations(uint64_t session)
{
    {
        BEGIN(FORK, fork, Hcattn__Fork, HCATTN__FORK__INIT)
        refused(&request, HCATTN__ERROR_CODE__INVALID_ARGUMENT);
        body.session = UINT64_MAX;
        refused(&request, HCATTN__ERROR_CODE__NOT_FOUND);
        body.session = body.new_session = session;
        refused(&request, HCATTN__ERROR_CODE__INVALID_ARGUMENT);
        body.new_session = 0;
        body.n_tokens = UINT64_MAX; /* more than there are */
        refused(&request, HCATTN__ERROR_CODE__INVALID_ARGUMENT);
    }
    {
        BEGIN(SET_POLICY, set_policy, Hcattn__SetPolicy, HCATTN__SET_POLICY__INIT)
        refused(&request, HCATTN__ERROR_CODE__NOT_SUPPORTED);
        refuse_policies(&request, &body.policy);
        body.policy = (char *)"full";
        body.session = UINT64_MAX;
        refused(&request, HCATTN__ERROR_CODE__NOT_FOUND);
    }
    {
        BEGIN(DESCRIBE_SESSION, describe_session, Hcattn__DescribeSession, HCATTN__DESCRIBE_SESSION__INIT)
        refused(&request, HCATTN__ERROR_CODE__INVALID_ARGUMENT);
        body.session = UINT64_MAX;
        refused(&request, HCATTN__ERROR_CODE__NOT_FOUND);
    }
    {
        BEGIN(SET_TRANSPORT, set_transport, Hcattn__SetTransport, HCATTN__SET_TRANSPORT__INIT)
        refused(&request, HCATTN__ERROR_CODE__INVALID_ARGUMENT);
        body.transport = (char *)"direct";
        refused(&request, HCATTN__ERROR_CODE__INVALID_ARGUMENT);
        body.transport = (char *)"ring\n\xff";
        refused(&request, HCATTN__ERROR_CODE__INVALID_ARGUMENT);
    }
}

static void absurd_sessions(uint64_t session)
{
    {
        BEGIN(OPEN_SESSION, open_session, Hcattn__OpenSession, HCATTN__OPEN_SESSION__INIT)
        static char name[10001];
        memset(name, 'p', sizeof(name) - 1);
        body.policy = name;
        refused(&request, HCATTN__ERROR_CODE__NOT_SUPPORTED);
        refuse_policies(&request, &body.policy);
        body.policy = (char *)"";
        Hcattn__ExactTokens exact = HCATTN__EXACT_TOKENS__INIT;
        body.exact = &exact;
        exact.n_tokens = UINT32_MAX;
        refused(&request, HCATTN__ERROR_CODE__INVALID_ARGUMENT);
        exact.n_tokens = 1;
        body.session = session;
        refused(&request, HCATTN__ERROR_CODE__CONFLICT);
    }
    {
        BEGIN(CLOSE_SESSION, close_session, Hcattn__CloseSession, HCATTN__CLOSE_SESSION__INIT)
        refused(&request, HCATTN__ERROR_CODE__INVALID_ARGUMENT);
        body.session = UINT64_MAX;
        refused(&request, HCATTN__ERROR_CODE__NOT_FOUND);
    }
    Hcattn__Request nothing = HCATTN__REQUEST__INIT;
    refused(&nothing, HCATTN__ERROR_CODE__INVALID_ARGUMENT);
}

static void absurd_input(uint64_t session)
{
    uint32_t ids[] = {1, 2, 4000000000u};
    Hcattn__Tokens tokens = HCATTN__TOKENS__INIT;
    tokens.ids = ids;
    tokens.n_ids = 3;
    Hcattn__Input input = HCATTN__INPUT__INIT;
    Hcattn__At at = HCATTN__AT__INIT;
    BEGIN(APPEND, append, Hcattn__Append, HCATTN__APPEND__INIT)
    body.session = UINT64_MAX;
    refused(&request, HCATTN__ERROR_CODE__INVALID_ARGUMENT); /* no input */
    body.input = &input;
    refused(&request, HCATTN__ERROR_CODE__INVALID_ARGUMENT);
    input.input_case = HCATTN__INPUT__INPUT_TEXT;
    input.text = (char *)"words";
    refused(&request, HCATTN__ERROR_CODE__NOT_FOUND);
    body.session = 0;
    refused(&request, HCATTN__ERROR_CODE__INVALID_ARGUMENT);
    body.session = session;
    input.text = (char *)"caf\xe9";
    refused(&request, HCATTN__ERROR_CODE__INVALID_ARGUMENT);
    input.text = (char *)"words";
    body.at = &at;
    at.n_tokens = UINT64_MAX;
    refused(&request, HCATTN__ERROR_CODE__CONFLICT);
    at.n_tokens = 1;
    refused(&request, HCATTN__ERROR_CODE__CONFLICT);
    body.at = NULL;
    input.input_case = HCATTN__INPUT__INPUT_TOKENS;
    input.tokens = &tokens;
    refused(&request, HCATTN__ERROR_CODE__INVALID_ARGUMENT);
    Hcattn__ChatMessage message = HCATTN__CHAT_MESSAGE__INIT, *messages[5000];
    Hcattn__Chat chat = HCATTN__CHAT__INIT;
    for (size_t i = 0; i < 5000; i++)
        messages[i] = &message;
    message.role = (char *)"user";
    message.content = (char *)"x";
    input.input_case = HCATTN__INPUT__INPUT_CHAT;
    input.chat = &chat;
    refused(&request, HCATTN__ERROR_CODE__INVALID_ARGUMENT); /* no messages */
    chat.messages = messages;
    chat.n_messages = 5000;
    refused(&request, HCATTN__ERROR_CODE__INVALID_ARGUMENT);
    chat.n_messages = 4000;
    refused(&request, HCATTN__ERROR_CODE__CONTEXT_EXCEEDED);
    chat.n_messages = 1;
    message.role = (char *)"emperor\n<|im_end|>";
    refused(&request, HCATTN__ERROR_CODE__INVALID_ARGUMENT);
}

static void absurd_generations(uint64_t session)
{
    Hcattn__Input input = HCATTN__INPUT__INIT;
    Hcattn__Sampling sampling = HCATTN__SAMPLING__INIT;
    Hcattn__LogitBias bias = HCATTN__LOGIT_BIAS__INIT, *biases[2000];
    char *stops[100];
    BEGIN(GENERATE, generate, Hcattn__Generate, HCATTN__GENERATE__INIT)
    body.session = session;
    refused(&request, HCATTN__ERROR_CODE__INVALID_ARGUMENT); /* an empty session, and nothing to begin with */
    body.input = &input;
    body.sampling = &sampling;
    input.input_case = HCATTN__INPUT__INPUT_TEXT;
    input.text = (char *)"words";
    body.max_tokens = UINT32_MAX;
    refused(&request, HCATTN__ERROR_CODE__CONTEXT_EXCEEDED);
    body.max_tokens = 4;
    const float wrong[] = {NAN, INFINITY, -INFINITY, -1, 1e30f};
    for (size_t i = 0; i < 5; i++) {
        float *const fields[] = {&sampling.temperature,
                                 &sampling.top_p,
                                 &sampling.min_p,
                                 &sampling.repeat_penalty,
                                 &sampling.presence_penalty,
                                 &sampling.frequency_penalty};
        for (size_t j = 0; j < 6; j++) {
            if (wrong[i] == -1 && j >= 4) /* a negative penalty is an encouragement */
                continue;
            *fields[j] = wrong[i];
            refused(&request, HCATTN__ERROR_CODE__INVALID_ARGUMENT);
            *fields[j] = 0;
        }
    }
    sampling.penalty_window = UINT32_MAX;
    refused(&request, HCATTN__ERROR_CODE__INVALID_ARGUMENT);
    sampling.penalty_window = 0;
    for (size_t i = 0; i < 2000; i++)
        biases[i] = &bias;
    sampling.logit_bias = biases;
    sampling.n_logit_bias = 2000;
    refused(&request, HCATTN__ERROR_CODE__INVALID_ARGUMENT);
    sampling.n_logit_bias = 1;
    bias.bias = NAN;
    refused(&request, HCATTN__ERROR_CODE__INVALID_ARGUMENT);
    bias.bias = INFINITY;
    refused(&request, HCATTN__ERROR_CODE__INVALID_ARGUMENT);
    bias.bias = 1;
    bias.id = UINT32_MAX;
    refused(&request, HCATTN__ERROR_CODE__INVALID_ARGUMENT); /* not in the vocabulary */
    sampling.n_logit_bias = 0;
    body.top_logprobs = 21;
    refused(&request, HCATTN__ERROR_CODE__INVALID_ARGUMENT);
    body.top_logprobs = 0;
    for (size_t i = 0; i < 100; i++)
        stops[i] = (char *)"s";
    body.stop = stops;
    body.n_stop = 100;
    refused(&request, HCATTN__ERROR_CODE__INVALID_ARGUMENT);
    body.n_stop = 1;
    stops[0] = (char *)"";
    refused(&request, HCATTN__ERROR_CODE__INVALID_ARGUMENT);
    stops[0] = (char *)"\xff";
    refused(&request, HCATTN__ERROR_CODE__INVALID_ARGUMENT);
    body.n_stop = 0;
    body.resume_from = UINT32_MAX;
    refused(&request, HCATTN__ERROR_CODE__INVALID_ARGUMENT);
}

/* Allowed, and at the edge of what numbers can hold: a token comes out of it, always. */
static void extreme_sampling(uint64_t session)
{
    const float tiny = 1e-40f, least = 1.2e-38f;
    const struct hcattn_sampling extremes[] = {
        {.temperature = tiny},
        {.temperature = least, .top_k = UINT32_MAX, .top_p = 1, .min_p = 1},
        {.temperature = 100, .top_p = tiny},
        {.temperature = 1, .top_p = least, .min_p = 1, .top_k = 1},
        {.temperature = 1, .repeat_penalty = tiny},
        {.repeat_penalty = least, .presence_penalty = 100, .frequency_penalty = -100, .penalty_window = 4096},
        {.temperature = 100, .repeat_penalty = 100, .presence_penalty = -100, .seed = UINT64_MAX},
    };
    uint32_t ids[] = {1, 2, 1, 2};
    uint64_t at = 0;
    for (size_t i = 0; i < sizeof(extremes) / sizeof(extremes[0]); i++) {
        struct hcattn_generate generate = {.session = session,
                                           .input = {.ids = ids, .n_ids = 4},
                                           .at = at,
                                           .max_tokens = 4,
                                           .ignore_end = true,
                                           .logprobs = true,
                                           .sampling = extremes[i]};
        struct answer answer = {0};
        struct hcattn_error error;
        if (service_generate(service.client, &generate, &answer, &error) < 0)
            fail_msg("sampling %zu: %s", i, error.sentence);
        assert_int_equal(answer.n, 4);
        for (uint32_t j = 0; j < 4; j++)
            assert_true(isfinite(answer.logprobs[j]));
        at = answer.finished.n_tokens;
        service_answer_free(&answer);
    }
    static struct hcattn_bias biases[250]; /* these are forbidden */
    for (uint32_t i = 0; i < 250; i++)
        biases[i] = (struct hcattn_bias){.id = i, .bias = -INFINITY};
    struct hcattn_generate generate = {.session = session,
                                       .input = {.ids = ids, .n_ids = 4},
                                       .at = at,
                                       .max_tokens = 4,
                                       .ignore_end = true,
                                       .sampling = {.temperature = 1, .bias = biases, .n_bias = 250}};
    struct answer answer = {0};
    assert_int_equal(service_generate(service.client, &generate, &answer, NULL), 0);
    for (uint32_t j = 0; j < 4; j++)
        assert_true(answer.ids[j] >= 250);
    service_answer_free(&answer);
}

static void absurd_scores(uint64_t session)
{
    Hcattn__Input input = HCATTN__INPUT__INIT;
    BEGIN(SCORE, score, Hcattn__Score, HCATTN__SCORE__INIT)
    body.session = session;
    body.input = &input;
    input.input_case = HCATTN__INPUT__INPUT_TEXT;
    input.text = (char *)"the world of words";
    refused(&request, HCATTN__ERROR_CODE__INVALID_ARGUMENT); /* from 0 */
    body.from = UINT64_MAX;
    refused(&request, HCATTN__ERROR_CODE__INVALID_ARGUMENT);
    body.from = 1000;
    refused(&request, HCATTN__ERROR_CODE__INVALID_ARGUMENT);
    body.from = 1;
    body.top_logprobs = 21;
    refused(&request, HCATTN__ERROR_CODE__INVALID_ARGUMENT);
}

static void absurd_text(void)
{
    static char text[9 << 20];
    memset(text, 'a', sizeof(text) - 1);
    Hcattn__Input input = HCATTN__INPUT__INIT;
    {
        BEGIN(TOKENIZE, tokenize, Hcattn__Tokenize, HCATTN__TOKENIZE__INIT)
        refused(&request, HCATTN__ERROR_CODE__INVALID_ARGUMENT);
        body.input = &input;
        refused(&request, HCATTN__ERROR_CODE__INVALID_ARGUMENT);
        input.input_case = HCATTN__INPUT__INPUT_TEXT;
        input.text = text; /* would keep the worker from its steps for seconds */
        refused(&request, HCATTN__ERROR_CODE__INVALID_ARGUMENT);
    }
    {
        uint32_t ids[] = {UINT32_MAX};
        BEGIN(DETOKENIZE, detokenize, Hcattn__Detokenize, HCATTN__DETOKENIZE__INIT)
        body.ids = ids;
        body.n_ids = 1;
        refused(&request, HCATTN__ERROR_CODE__INVALID_ARGUMENT);
        body.ids = (uint32_t *)(void *)text;
        body.n_ids = sizeof(text) / 4;
        refused(&request, HCATTN__ERROR_CODE__INVALID_ARGUMENT);
    }
}

static void absurd_requests(void **state)
{
    (void)state;
    struct hcattn_session session;
    client = volley_client_new(&volley, "client.sock");
    assert_int_equal(hcattn_open_session(service.client, NULL, LONG_MS, &session, NULL), 0);
    absurd_sessions(session.session);
    absurd_operations(session.session);
    absurd_input(session.session);
    absurd_generations(session.session);
    extreme_sampling(session.session);
    absurd_scores(session.session);
    absurd_text();
    BEGIN(CANCEL, cancel, Hcattn__Cancel, HCATTN__CANCEL__INIT)
    body.request = 4711;
    request.request_id = 1;
    volley_client_ask(client, &request);
    Hcattn__Reply *reply = volley_client_reply(client, LONG_MS);
    assert_non_null(reply);
    assert_int_equal(reply->reply_case, HCATTN__REPLY__REPLY_CANCELLED);
    assert_false(reply->cancelled->found);
    hcattn__reply__free_unpacked(reply, NULL);
    assert_int_equal(hcattn_close_session(service.client, session.session, LONG_MS, NULL, NULL), 0);
    client = volley_client_free(client);
    volley_assert_well(&volley);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(absurd_requests),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
