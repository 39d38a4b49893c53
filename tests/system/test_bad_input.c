/*
 * test_bad_input.c - garbage on every socket of a running service: raw bytes, broken ZeroMQ, malformed and absurd messages,
 * peers that lie. After each volley it answers as before, in the same processes, with nothing leaked.
 */
#include "tests/system/service.h"
#include "tests/system/volley.h"

#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "proto/descriptor.h"
#include "proto/layout.h"

#ifdef HCATTN_SANITIZED
enum { LONG_MS = 120000, N_FUZZ = 600 };
#else
enum { LONG_MS = 20000, N_FUZZ = 3000 };
#endif
enum { N_STORES = 2 };

static struct service service;
static struct volley volley;

static const char *const streams[] = {"client.sock", "work.sock", "data.sock"};

static int set_up(void **state)
{
    (void)state;
    service_start(&service,
                  (const char *const[]){"--model", service_tiny_model(""), "--stores", "2", "--memory", "64MiB", NULL},
                  NULL);
    volley_begin(&volley, &service, N_STORES);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    volley_end(&volley);
    service_stop(&service);
    return 0;
}

/* ---- ZeroMQ sockets: bytes that are no ZeroMQ, and ZeroMQ that is no message of ours ---- */

static void raw_bytes(void **state)
{
    (void)state;
    uint64_t seed = 1;
    uint8_t bytes[4096];
    static const uint8_t first_protocol[] = {1, 0, 9, 0, 'x', 0x7f, 0xff, 0xff}; /* of 2010: no greeting */
    for (size_t k = 0; k < 3; k++) {
        for (int i = 0; i < 60; i++) {
            int fd = volley_connect(&volley, streams[k], SOCK_STREAM);
            size_t n = 1 + volley_random(&seed, sizeof(bytes));
            volley_random_bytes(&seed, bytes, n);
            if (i % 3 == 1)
                memcpy(bytes, "\xff\0\0\0\0\0\0\0\1\x7f\3", 11 < n ? 11 : n); /* begins like a greeting */
            if (i % 3 == 2)
                memcpy(bytes, first_protocol, sizeof(first_protocol) < n ? sizeof(first_protocol) : n);
            volley_send(fd, bytes, n);
            close(fd);
        }
        int fd = volley_connect(&volley, streams[k], SOCK_STREAM);
        volley_send(fd, "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", 35);
        close(fd);
    }
    volley_assert_well(&volley);
}

static void broken_zeromq(void **state)
{
    (void)state;
    uint8_t id[255], body[300];
    uint64_t seed = 2;
    volley_random_bytes(&seed, body, sizeof(body));
    memset(id, 'i', sizeof(id));
    static const uint8_t id_sizes[] = {0, 1, 4, 8, 9, 32, 33, 200, 255};
    static const uint64_t lengths[] = {UINT64_MAX, INT64_MAX, UINT64_C(1) << 40, (UINT64_C(64) << 20) + 1};
    for (size_t k = 0; k < 3; k++) {
        for (size_t i = 0; i < sizeof(id_sizes); i++) { /* a body of nothing, of one byte, of garbage; of many frames */
            int fd = volley_connect(&volley, streams[k], SOCK_STREAM);
            volley_greet(fd, id, id_sizes[i]);
            volley_frame(fd, 0, 0, NULL, 0);
            volley_frame(fd, 0, 1, body, 1);
            volley_frame(fd, 2, sizeof(body), body, sizeof(body));
            for (int n = 2; n < 40; n += 7) {
                for (int j = 0; j < n; j++)
                    volley_frame(fd, 1, 3, body, 3);
                volley_frame(fd, 0, 2, body, 2);
            }
            close(fd);
        }
        for (size_t i = 0; i < sizeof(lengths) / sizeof(lengths[0]); i++) { /* claims much, sends little */
            int fd = volley_connect(&volley, streams[k], SOCK_STREAM);
            volley_greet(fd, id, 8);
            volley_frame(fd, 2, lengths[i], body, sizeof(body));
            close(fd);
        }
        for (uint8_t flags = 4; flags < 8; flags++) { /* commands that nobody knows, or out of place */
            int fd = volley_connect(&volley, streams[k], SOCK_STREAM);
            volley_greet(fd, id, 8);
            volley_frame(fd, flags, 200, body, 200);
            volley_frame(fd, 4, 6, "\5READY", 6);
            volley_frame(fd, 4, 5, "\4PING", 5);
            close(fd);
        }
        int fd = volley_connect(&volley, streams[k], SOCK_STREAM); /* a message that never ends */
        volley_greet(fd, id, 8);
        volley_frame(fd, 3, 100, body, 100);
        volley_frame(fd, 2, 1000000, body, sizeof(body));
        close(fd);
    }
    volley_assert_well(&volley);
}

/* Many connections that say nothing, on all sockets at once, do not keep others from being served. */
static void silent_connections(void **state)
{
    (void)state;
    enum { N = 100 };
    int fds[3 * N];
    for (int i = 0; i < 3 * N; i++) {
        fds[i] = volley_connect(&volley, streams[i % 3], SOCK_STREAM);
        if (i % 2)
            volley_greet(fds[i], &i, sizeof(i));
    }
    struct answer answer = {0};
    uint32_t ids[] = {1, 2, 3};
    service_generate_ids(service.client, ids, 3, 4, &answer);
    assert_int_equal(answer.n, 4);
    service_answer_free(&answer);
    for (int i = 0; i < 3 * N; i++)
        close(fds[i]);
    volley_assert_well(&volley);
}

/* ---- requests ---- */

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
    "rot2,mass=1e0",
};

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
        for (size_t i = 0; i < sizeof(policies) / sizeof(policies[0]); i++) {
            body.policy = (char *)(uintptr_t)policies[i];
            refused(&request, HCATTN__ERROR_CODE__NOT_SUPPORTED);
        }
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
        for (size_t i = 0; i < sizeof(policies) / sizeof(policies[0]); i++) {
            body.policy = (char *)(uintptr_t)policies[i];
            refused(&request, HCATTN__ERROR_CODE__NOT_SUPPORTED);
        }
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

/* A request with a bit of everything, to be damaged. */
static size_t pack_example(uint8_t *bytes, size_t size)
{
    Hcattn__ChatMessage message = HCATTN__CHAT_MESSAGE__INIT, *messages[] = {&message, &message};
    Hcattn__Chat chat = HCATTN__CHAT__INIT;
    Hcattn__Input input = HCATTN__INPUT__INIT;
    Hcattn__Sampling sampling = HCATTN__SAMPLING__INIT;
    Hcattn__LogitBias bias = HCATTN__LOGIT_BIAS__INIT, *biases[] = {&bias};
    Hcattn__At at = HCATTN__AT__INIT;
    char *stops[] = {(char *)"stop"};
    BEGIN(GENERATE, generate, Hcattn__Generate, HCATTN__GENERATE__INIT)
    message.role = (char *)"user";
    message.content = (char *)"hello";
    chat.messages = messages;
    chat.n_messages = 2;
    input.input_case = HCATTN__INPUT__INPUT_CHAT;
    input.chat = &chat;
    bias.id = 3;
    bias.bias = -1;
    sampling.temperature = 0.5f;
    sampling.logit_bias = biases;
    sampling.n_logit_bias = 1;
    at.n_tokens = 5;
    body.session = 0x1122334455667788;
    body.input = &input;
    body.sampling = &sampling;
    body.at = &at;
    body.stop = stops;
    body.n_stop = 1;
    body.max_tokens = 3;
    request.request_id = 0x99;
    assert_true(hcattn__request__get_packed_size(&request) <= size);
    return hcattn__request__pack(&request, bytes);
}

static void damage(uint64_t *seed, uint8_t *bytes, size_t n_bytes)
{
    uint32_t n = 1 + volley_random(seed, 4);
    for (uint32_t i = 0; i < n; i++)
        bytes[volley_random(seed, (uint32_t)n_bytes)] = (uint8_t)volley_random(seed, 256);
}

static void damaged_requests(void **state)
{
    (void)state;
    uint8_t whole[512], bytes[512];
    uint64_t seed = 3;
    size_t n = pack_example(whole, sizeof(whole));
    client = volley_client_new(&volley, "client.sock");
    for (size_t cut = 0; cut < n; cut++)
        volley_client_send(client, whole, cut);
    volley_client_drain(client);
    for (int i = 0; i < N_FUZZ; i++) {
        memcpy(bytes, whole, n);
        damage(&seed, bytes, n);
        volley_client_send(client, bytes, n);
        if (i % 100 == 99)
            volley_client_drain(client);
    }
    volley_client_drain(client);
    client = volley_client_free(client);
    volley_assert_well(&volley);
}

/* ---- work and data: strangers have nothing to say there ---- */

static void strangers(void **state)
{
    (void)state;
    uint64_t seed = 4;
    uint8_t bytes[512];
    size_t n = pack_example(bytes, sizeof(bytes));
    for (size_t k = 1; k < 3; k++) {
        client = volley_client_new(&volley, streams[k]);
        volley_client_send(client, bytes, n);
        volley_client_send(client, NULL, 0);
        struct descriptor descriptor = {.magic = DESCRIPTOR_MAGIC,
                                        .version = DESCRIPTOR_VERSION,
                                        .kind = DESCRIPTOR_REQUEST,
                                        .worker = volley_process(&volley, "hc-gpu-worker", 0)->incarnation,
                                        .remaining_us = UINT32_MAX};
        for (int i = 0; i < 500; i++) { /* with forged routes */
            descriptor.kind = (uint16_t)(1 + i % 3);
            volley_random_bytes(&seed, &descriptor.to, 16);
            descriptor.slot = volley_random(&seed, 100);
            volley_client_send(client, &descriptor, sizeof(descriptor));
        }
        volley_client_send(client, &descriptor, sizeof(descriptor) - 1);
        client = volley_client_free(client);
    }
    volley_assert_well(&volley);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(raw_bytes),       cmocka_unit_test(broken_zeromq),    cmocka_unit_test(silent_connections),
        cmocka_unit_test(absurd_requests), cmocka_unit_test(damaged_requests), cmocka_unit_test(strangers),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
