/* test_socket_keys.c - who gets in over TCP with keys, who does not, and what each end knows of it. */
#include "common/socket_keys.h"

#include "common/clock.h"
#include "tests/unit/common/helpers.h"

#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define PATIENCE_US 20000000u

struct server {
    struct socket_context *context;
    struct socket *gate; /* NULL: without keys */
    struct socket *router;
    char endpoint[200], ipc[300];
    char public[SOCKET_KEY_SIZE], secret[SOCKET_KEY_SIZE];
    char admitted[SOCKET_KEY_SIZE]; /* the only client */
    unsigned n_admitted, n_refused;
};

static bool admits(void *context, const char *key, const char *address)
{
    struct server *server = context;
    assert_string_equal(address, "127.0.0.1");
    assert_true(socket_is_key(key));
    bool admitted = strcmp(key, server->admitted) == 0;
    server->n_admitted += admitted;
    server->n_refused += !admitted;
    return admitted;
}

/* On ipc without keys, then on tcp with them. */
static void open_server(struct server *server, void **state, bool keys)
{
    memset(server, 0, sizeof(*server));
    snprintf(server->ipc, sizeof(server->ipc), "ipc://%s", helpers_path(state, "ipc"));
    assert_int_equal(socket_context_new(&server->context), 0);
    assert_int_equal(socket_make_keys(server->public, server->secret), 0);
    assert_int_equal(socket_new_router(server->context, 0, &server->router), 0);
    assert_int_equal(socket_bind(server->router, server->ipc), 0);
    if (keys) {
        assert_int_equal(socket_new_gate(server->context, &server->gate), 0);
        assert_int_equal(socket_serve_keys(server->router, server->secret), 0);
    }
    assert_int_equal(socket_bind(server->router, "tcp://127.0.0.1:*"), 0);
    assert_int_equal(socket_endpoint(server->router, server->endpoint, sizeof(server->endpoint)), 0);
}

static void close_server(struct server *server)
{
    socket_free(server->router);
    socket_free(server->gate);
    socket_context_free(server->context);
}

/* Serves: what comes goes back. */
static void serve(struct server *server)
{
    struct socket_message *message = NULL;
    if (server->gate)
        assert_int_equal(socket_gate(server->gate, admits, server), 0);
    while (socket_receive(server->router, false, &message) == 0) {
        socket_send(server->router, message->frames, message->n_frames, false);
        socket_message_free(message);
    }
}

struct client {
    struct socket_context *context;
    struct socket *dealer;
};

static void open_client(struct client *client, const char *endpoint, const char *server_public, const char *secret)
{
    assert_int_equal(socket_context_new(&client->context), 0);
    assert_int_equal(socket_new_dealer(client->context, 7, 0, &client->dealer), 0);
    if (secret)
        assert_int_equal(socket_use_keys(client->dealer, server_public, secret), 0);
    assert_int_equal(socket_watch(client->context, client->dealer), 0);
    assert_int_equal(socket_connect(client->dealer, endpoint), 0);
    const struct frame hello = {"hello", 5};
    assert_int_equal(socket_send(client->dealer, &hello, 1, false), 0);
}

static void close_client(struct client *client)
{
    socket_free(client->dealer);
    socket_context_free(client->context);
}

/* Until the client's message is back (true), or its socket has that state and nothing comes for a while. */
static bool echoes(struct server *server, struct client *client, enum socket_state state)
{
    uint64_t deadline_us = clock_deadline_us(PATIENCE_US), quiet_us = CLOCK_NEVER;
    struct socket_message *message = NULL;
    while (clock_now_us() < deadline_us && clock_now_us() < quiet_us) {
        serve(server);
        if (socket_receive(client->dealer, false, &message) == 0) {
            socket_message_free(message);
            return true;
        }
        if (quiet_us == CLOCK_NEVER && socket_state(client->dealer) == state)
            quiet_us = clock_deadline_us(300000);
        clock_sleep_us(5000);
    }
    assert_int_equal(socket_state(client->dealer), state);
    return false;
}

static void test_keys(void **state)
{
    (void)state;
    char public[SOCKET_KEY_SIZE], secret[SOCKET_KEY_SIZE], again[SOCKET_KEY_SIZE];
    assert_true(socket_has_keys());
    assert_int_equal(socket_make_keys(public, secret), 0);
    assert_true(socket_is_key(public) && socket_is_key(secret));
    assert_int_equal(socket_public_key(secret, again), 0);
    assert_string_equal(again, public);
    assert_false(socket_is_key(""));
    assert_false(socket_is_key("hello"));
    secret[0] = '"';
    assert_false(socket_is_key(secret));
    assert_int_equal(socket_public_key(secret, again), -EINVAL);
}

static void test_the_right_key(void **state)
{
    struct server server;
    struct client client;
    char secret[SOCKET_KEY_SIZE];
    open_server(&server, state, true);
    assert_int_equal(socket_make_keys(server.admitted, secret), 0);
    open_client(&client, server.endpoint, server.public, secret);
    assert_true(echoes(&server, &client, SOCKET_REFUSED));
    assert_int_equal(socket_state(client.dealer), SOCKET_GREETED);
    assert_int_equal(server.n_admitted, 1);
    assert_int_equal(server.n_refused, 0);
    close_client(&client);
    close_server(&server);
}

static void test_ipc_needs_none(void **state)
{
    struct server server;
    struct client client;
    open_server(&server, state, true);
    open_client(&client, server.ipc, NULL, NULL);
    assert_true(echoes(&server, &client, SOCKET_MISMATCH));
    assert_int_equal(server.n_admitted + server.n_refused, 0);
    close_client(&client);
    close_server(&server);
}

static void test_wrong_keys(void **state)
{
    struct server server;
    struct client client;
    char public[SOCKET_KEY_SIZE], secret[SOCKET_KEY_SIZE];
    open_server(&server, state, true);
    assert_int_equal(socket_make_keys(server.admitted, secret), 0);
    assert_int_equal(socket_make_keys(public, secret), 0);
    open_client(&client, server.endpoint, server.public, secret);
    assert_false(echoes(&server, &client, SOCKET_REFUSED));
    assert_int_equal(server.n_admitted, 0);
    assert_true(server.n_refused > 0);
    close_client(&client);

    open_client(&client, server.endpoint, public, secret); /* not that server's key */
    assert_false(echoes(&server, &client, SOCKET_HUNG_UP));
    close_client(&client);

    open_client(&client, server.endpoint, NULL, NULL);
    assert_false(echoes(&server, &client, SOCKET_MISMATCH));
    close_client(&client);
    close_server(&server);

    open_server(&server, state, false);
    open_client(&client, server.endpoint, server.public, secret);
    assert_false(echoes(&server, &client, SOCKET_MISMATCH));
    close_client(&client);
    close_server(&server);
}

static void test_nobody_there(void **state)
{
    struct server server;
    struct client client;
    struct server gone;
    open_server(&gone, state, false);
    assert_int_equal(unlink(helpers_path(state, "ipc")), 0);
    open_server(&server, state, false);
    close_server(&gone); /* nothing listens any more when its context is gone */
    open_client(&client, gone.endpoint, NULL, NULL);
    assert_false(echoes(&server, &client, SOCKET_NOBODY));
    close_client(&client);
    close_server(&server);
}

/* Peers of ZeroMQ's first protocol prove nothing: a socket with keys takes none of them, nor anything else. */
static void test_strangers(void **state)
{
    static const char first_protocol[] = "\x01\x00\x06\x00hello";
    char garbage[600];
    struct server server;
    unsigned port = 0;
    open_server(&server, state, true);
    assert_int_equal(sscanf(server.endpoint, "tcp://127.0.0.1:%u", &port), 1);
    for (size_t i = 0; i < sizeof(garbage); i++)
        garbage[i] = (char)(i * 37 + 11);
    for (int i = 0; i < 3; i++) {
        const char *bytes = i == 0 ? first_protocol : i == 1 ? garbage : "GET / HTTP/1.1\r\n\r\n";
        size_t n_bytes = i == 0 ? sizeof(first_protocol) - 1 : i == 1 ? sizeof(garbage) : strlen(bytes);
        struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
        address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        assert_true(fd >= 0);
        assert_int_equal(connect(fd, (const struct sockaddr *)&address, sizeof(address)), 0);
        assert_int_equal(send(fd, bytes, n_bytes, MSG_NOSIGNAL), (ssize_t)n_bytes);
        struct socket_item item = {.socket = server.router, .fd = -1, .events = SOCKET_READABLE};
        assert_int_equal(socket_poll(&item, 1, 200), 0);
        close(fd);
    }
    close_server(&server);
}

static void test_what_is_no_key(void **state)
{
    struct server server;
    char public[SOCKET_KEY_SIZE], secret[SOCKET_KEY_SIZE];
    open_server(&server, state, false);
    assert_int_equal(socket_make_keys(public, secret), 0);
    assert_int_equal(socket_serve_keys(server.router, "hello"), -EINVAL);
    assert_int_equal(socket_use_keys(server.router, "hello", secret), -EINVAL);
    assert_int_equal(socket_use_keys(server.router, public, ""), -EINVAL);
    struct socket *gate = NULL, *second = NULL;
    assert_int_equal(socket_new_gate(server.context, &gate), 0);
    assert_int_equal(socket_new_gate(server.context, &second), -EADDRINUSE);
    socket_free(gate);
    close_server(&server);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_keys),
        cmocka_unit_test_setup_teardown(test_the_right_key, helpers_folder, helpers_remove_folder),
        cmocka_unit_test_setup_teardown(test_ipc_needs_none, helpers_folder, helpers_remove_folder),
        cmocka_unit_test_setup_teardown(test_wrong_keys, helpers_folder, helpers_remove_folder),
        cmocka_unit_test_setup_teardown(test_nobody_there, helpers_folder, helpers_remove_folder),
        cmocka_unit_test_setup_teardown(test_strangers, helpers_folder, helpers_remove_folder),
        cmocka_unit_test_setup_teardown(test_what_is_no_key, helpers_folder, helpers_remove_folder),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
