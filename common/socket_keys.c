/* socket_keys.c - see socket_keys.h. */
#include "common/socket_keys.h"
#include "common/socket_internal.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <zmq.h>

#define GATE_ENDPOINT "inproc://zeromq.zap.01"
#define KEY_BYTES     32

bool socket_has_keys(void)
{
    return zmq_has("curve") == 1;
}

bool socket_is_key(const char *text)
{
    uint8_t bytes[KEY_BYTES];
    return strlen(text) == SOCKET_KEY_SIZE - 1 && zmq_z85_decode(bytes, text) != NULL;
}

int socket_make_keys(char ret_public[SOCKET_KEY_SIZE], char ret_secret[SOCKET_KEY_SIZE])
{
    char public[SOCKET_KEY_SIZE], secret[SOCKET_KEY_SIZE];
    if (zmq_curve_keypair(public, secret) < 0)
        return socket_last_error();
    memcpy(ret_public, public, sizeof(public));
    memcpy(ret_secret, secret, sizeof(secret));
    return 0;
}

int socket_public_key(const char *secret, char ret_public[SOCKET_KEY_SIZE])
{
    char public[SOCKET_KEY_SIZE];
    if (!socket_is_key(secret))
        return -EINVAL;
    if (zmq_curve_public(public, secret) < 0)
        return socket_last_error();
    memcpy(ret_public, public, sizeof(public));
    return 0;
}

static int set_key(struct socket *socket, int option, const char *key)
{
    return zmq_setsockopt(socket->zmq, option, key, SOCKET_KEY_SIZE) < 0 ? socket_last_error() : 0;
}

int socket_serve_keys(struct socket *socket, const char *secret)
{
    if (!socket_is_key(secret))
        return -EINVAL;
    int error = socket_set_int(socket, ZMQ_CURVE_SERVER, 1);
    return error ? error : set_key(socket, ZMQ_CURVE_SECRETKEY, secret);
}

int socket_use_keys(struct socket *socket, const char *server_public, const char *secret)
{
    char public[SOCKET_KEY_SIZE];
    if (!socket_is_key(server_public))
        return -EINVAL;
    int error = socket_public_key(secret, public);
    if (!error)
        error = set_key(socket, ZMQ_CURVE_SERVERKEY, server_public);
    if (!error)
        error = set_key(socket, ZMQ_CURVE_PUBLICKEY, public);
    return error ? error : set_key(socket, ZMQ_CURVE_SECRETKEY, secret);
}

int socket_new_gate(struct socket_context *context, struct socket **ret_gate)
{
    struct socket *gate = NULL;
    int error = socket_new_router(context, 0, &gate);
    if (!error)
        error = socket_bind(gate, GATE_ENDPOINT);
    if (error) {
        socket_free(gate);
        return error;
    }
    *ret_gate = gate;
    return 0;
}

static bool frame_is(const struct frame *frame, const char *text)
{
    return frame->n_bytes == strlen(text) && memcmp(frame->data, text, frame->n_bytes) == 0;
}

/* A request of RFC 27 as a ROUTER sees it, and the places of its frames in the answer. */
enum {
    GATE_ROUTE,
    GATE_EMPTY,
    GATE_VERSION,
    GATE_REQUEST,
    GATE_DOMAIN,
    GATE_ADDRESS,
    GATE_ID,
    GATE_MECHANISM,
    GATE_KEY
};

static int judge(struct socket *gate, const struct frame *asked, size_t n_asked,
                 bool (*admits)(void *context, const char *key, const char *address), void *context)
{
    char key[SOCKET_KEY_SIZE], address[64];
    if (n_asked <= GATE_REQUEST)
        return 0;
    bool admitted = false;
    if (n_asked == GATE_KEY + 1 && frame_is(&asked[GATE_MECHANISM], "CURVE") && asked[GATE_KEY].n_bytes == KEY_BYTES &&
        zmq_z85_encode(key, asked[GATE_KEY].data, KEY_BYTES)) {
        snprintf(address, sizeof(address), "%.*s",
                 (int)(asked[GATE_ADDRESS].n_bytes < 63 ? asked[GATE_ADDRESS].n_bytes : 63),
                 (const char *)asked[GATE_ADDRESS].data);
        admitted = admits(context, key, address);
    }
    const struct frame answer[] = {
        asked[GATE_ROUTE],
        asked[GATE_EMPTY],
        asked[GATE_VERSION],
        asked[GATE_REQUEST],
        {admitted ? "200" : "400", 3},
        {"", 0},
        {"", 0},
        {"", 0}, /* status, its text, user, metadata */
    };
    return socket_send(gate, answer, sizeof(answer) / sizeof(answer[0]), false);
}

int socket_gate(struct socket *gate, bool (*admits)(void *context, const char *key, const char *address), void *context)
{
    for (;;) {
        struct socket_message *message = NULL;
        int error = socket_receive(gate, false, &message);
        if (error == -EAGAIN)
            return 0;
        if (error == -EMSGSIZE || error == -EINTR)
            continue;
        if (!error)
            error = judge(gate, message->frames, message->n_frames, admits, context);
        socket_message_free(message);
        if (error && error != -EHOSTUNREACH && error != -EAGAIN) /* these: who asked is gone */
            return error;
    }
}

int socket_watch(struct socket_context *context, struct socket *socket)
{
    const int events = ZMQ_EVENT_CONNECTED | ZMQ_EVENT_CONNECT_RETRIED | ZMQ_EVENT_HANDSHAKE_SUCCEEDED |
                       ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL | ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL |
                       ZMQ_EVENT_HANDSHAKE_FAILED_AUTH;
    char endpoint[64];
    if (socket->monitor)
        return -EALREADY;
    snprintf(endpoint, sizeof(endpoint), "inproc://watch-%p", (void *)socket);
    if (zmq_socket_monitor(socket->zmq, endpoint, events) < 0)
        return socket_last_error();
    socket->monitor = zmq_socket(context->zmq, ZMQ_PAIR);
    if (socket->monitor && zmq_connect(socket->monitor, endpoint) == 0)
        return 0;
    int error = socket_last_error();
    if (socket->monitor)
        zmq_close(socket->monitor);
    socket->monitor = NULL;
    zmq_socket_monitor(socket->zmq, NULL, 0);
    return error;
}

static enum socket_state state_after(enum socket_state state, uint16_t event, uint32_t value)
{
    switch (event) {
    case ZMQ_EVENT_CONNECTED: /* the next attempt has not failed for the reason of the last one yet */
        return state == SOCKET_UNREACHED || state == SOCKET_NOBODY ? SOCKET_REACHED : state;
    case ZMQ_EVENT_CONNECT_RETRIED:
        return state == SOCKET_UNREACHED || state == SOCKET_GREETED ? SOCKET_NOBODY : state;
    case ZMQ_EVENT_HANDSHAKE_SUCCEEDED:
        return SOCKET_GREETED;
    case ZMQ_EVENT_HANDSHAKE_FAILED_AUTH:
        return SOCKET_REFUSED;
    case ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL:
        return value == ZMQ_PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH ? SOCKET_MISMATCH : SOCKET_HUNG_UP;
    default: /* who hung up before it was heard to speak another language may have spoken it the last time */
        return state == SOCKET_MISMATCH ? state : SOCKET_HUNG_UP;
    }
}

enum socket_state socket_state(struct socket *socket)
{
    struct socket monitor = {.zmq = socket->monitor};
    struct socket_message *message = NULL;
    while (monitor.zmq && socket_receive(&monitor, false, &message) == 0) {
        uint16_t event;
        uint32_t value;
        const struct frame *first = &message->frames[0]; /* the second is the endpoint */
        if (first->n_bytes == sizeof(event) + sizeof(value)) {
            memcpy(&event, first->data, sizeof(event));
            memcpy(&value, (const char *)first->data + sizeof(event), sizeof(value));
            socket->state = state_after(socket->state, event, value);
        }
        socket_message_free(message);
    }
    return socket->state;
}
