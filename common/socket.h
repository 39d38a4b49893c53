/*
 * socket.h - ZeroMQ, thinly: routed messages of several frames. Only this and socket_keys.c see zmq.h.
 *
 * Peers of ours connect a DEALER whose routing id is the 8 bytes of its incarnation to a ROUTER; the ROUTER sees that id
 * as the first frame of everything it receives and writes it as the first frame of everything it sends. Foreign clients
 * may have ids of other lengths.
 *
 * Threads    a socket belongs to the thread that uses it; a context to any.
 * Limits     a frame of more than SOCKET_MAX_FRAME_BYTES closes the connection it came from; a message of more than
 *            SOCKET_MAX_FRAMES frames is dropped whole (-EMSGSIZE).
 * Strangers  ZeroMQ still accepts peers of its first protocol, which has no greeting: garbage on an endpoint can arrive
 *            as a message, with any routing id of 1 to 255 bytes. Receivers check every frame.
 * Closing    does not linger: what was not sent by then is lost.
 * TCP        a peer that is silent for SOCKET_SILENCE_MS (half of it, for who is bound), as behind a cut link, counts as gone.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SOCKET_MAX_FRAMES      16
#define SOCKET_MAX_FRAME_BYTES ((size_t)64 << 20)
#define SOCKET_SILENCE_MS      10000

struct socket_context;
struct socket;

struct frame {
    const void *data;
    size_t n_bytes;
};

struct socket_message {
    size_t n_frames;            /* >= 1 */
    const struct frame *frames; /* owned by the message */
};

/* high_water: messages kept per peer and direction before a send says -EAGAIN; 0: 1000. */
int socket_context_new(struct socket_context **ret_context); /* -ENOMEM, -EMFILE */
struct socket_context *
socket_context_free(struct socket_context *context); /* all sockets closed before; accepts NULL */

int socket_new_router(struct socket_context *context, uint32_t high_water, struct socket **ret_socket);
int socket_new_dealer(struct socket_context *context, uint64_t routing_id, uint32_t high_water,
                      struct socket **ret_socket); /* routing_id != 0 */
struct socket *socket_free(struct socket *socket); /* accepts NULL, returns NULL */

/* endpoint: "ipc:///path" or "tcp://host:port" ("tcp://127.0.0.1:*" picks a port). An ipc file is made with mode 0600;
 * one that nobody listens on any more is replaced. -EADDRINUSE: somebody does; -ENAMETOOLONG; -EINVAL; -EADDRNOTAVAIL. */
int socket_bind(struct socket *socket, const char *endpoint);
int socket_connect(struct socket *socket,
                   const char *endpoint); /* returns at once; connects and reconnects by itself */
int socket_disconnect(struct socket *socket, const char *endpoint);
int socket_endpoint(const struct socket *socket, char *ret_text, size_t size); /* last bound, port filled in */

/* All frames or nothing. Without `wait`: -EAGAIN when the peer's queue is full (a DEALER: or there is no peer yet). With
 * it: until there is room. -EHOSTUNREACH: a ROUTER knows no such peer; -EINVAL: no frames, or too many;
 * -EMSGSIZE: a frame of more than SOCKET_MAX_FRAME_BYTES. Copies the data. */
int socket_send(struct socket *socket, const struct frame *frames, size_t n_frames, bool wait);

/* The next message. -EAGAIN: none (without `wait`); -EMSGSIZE: too many frames, dropped. -EINTR: a signal. */
int socket_receive(struct socket *socket, bool wait, struct socket_message **ret_message);
struct socket_message *socket_message_free(struct socket_message *message); /* accepts NULL, returns NULL */

/* Routing ids of our peers: 8 bytes as a frame. */
struct frame socket_id_frame(const uint64_t *id);           /* points at *id */
int socket_id(const struct frame *frame, uint64_t *ret_id); /* -EBADMSG: not 8 bytes, or 0 */

#define SOCKET_READABLE 1
#define SOCKET_WRITABLE 2
#define SOCKET_ERROR    4 /* plain descriptors: hang-up or error; always reported */

struct socket_item {
    struct socket *socket; /* NULL: `fd` is meant */
    int fd;                /* -1 with no socket: the item is skipped */
    int events;            /* SOCKET_READABLE | SOCKET_WRITABLE */
    int ready;             /* out */
};

/* Waits for any item, at most timeout_ms (-1: for ever). Returns how many are ready (0: time is up). -EINTR: a signal. */
int socket_poll(struct socket_item *items, size_t n_items, int timeout_ms);

/* For another poll loop: a descriptor that becomes readable (edge-triggered!) when socket_events() may have changed. */
int socket_fd(const struct socket *socket, int *ret_fd);
int socket_events(const struct socket *socket, int *ret_events); /* SOCKET_READABLE | SOCKET_WRITABLE */
