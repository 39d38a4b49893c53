/*
 * test_bad_input.c - garbage on every socket of a running service: raw bytes, broken ZeroMQ, damaged messages, strangers
 * on inner sockets. After each volley it answers as before, in the same processes, with nothing leaked.
 */
#include "tests/system/service.h"
#include "tests/system/volley.h"

#include <fcntl.h>
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
enum { N_FUZZ = 600 };
#else
enum { N_FUZZ = 3000 };
#endif
static struct service service;
static struct volley volley;

static const char *const streams[] = {"client.sock", "work.sock", "data.sock"};

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

/* ---- messages with bits of sense ---- */

static struct volley_client *client;

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
    Hcattn__Request request = HCATTN__REQUEST__INIT;
    Hcattn__Generate body = HCATTN__GENERATE__INIT;
    request.request_case = HCATTN__REQUEST__REQUEST_GENERATE;
    request.generate = &body;
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
        cmocka_unit_test(raw_bytes),        cmocka_unit_test(broken_zeromq), cmocka_unit_test(silent_connections),
        cmocka_unit_test(damaged_requests), cmocka_unit_test(strangers),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
