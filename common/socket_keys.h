/*
 * socket_keys.h - CURVE of ZeroMQ (libsodium): both ends of a TCP connection prove that they have their secret keys, and what
 * travels is encrypted. And how connecting went, which with keys can fail for reasons of its own.
 *
 * Keys       Z85 text, as ZeroMQ's own tools write them.
 * Gate       a server with keys asks it whether it admits a client (ZAP, RFC 27); whoever has none waits until it is judged.
 * Threads    as socket.h.
 */
#pragma once

#include "common/socket.h"

#define SOCKET_KEY_SIZE 41 /* 32 bytes as text, and NUL */

bool socket_has_keys(void);           /* libzmq was built with CURVE */
bool socket_is_key(const char *text); /* 40 characters of Z85 */
int socket_make_keys(char ret_public[SOCKET_KEY_SIZE], char ret_secret[SOCKET_KEY_SIZE]); /* -EOPNOTSUPP */
int socket_public_key(const char *secret, char ret_public[SOCKET_KEY_SIZE]);              /* -EINVAL; -EOPNOTSUPP */

/* Of what is bound or connected from then on. -EINVAL: no key. */
int socket_serve_keys(struct socket *socket, const char *secret);
int socket_use_keys(struct socket *socket, const char *server_public, const char *secret);

/* Tells who connects to a server with keys in the same context. Bind it before the server; there is one a context.
 * A client waits until socket_gate() has judged it. */
int socket_new_gate(struct socket_context *context, struct socket **ret_gate);
/* Judges all that wait: `admits` sees the client's public key and its address. 0 or negative errno. */
int socket_gate(struct socket *gate, bool (*admits)(void *context, const char *key, const char *address),
                void *context);

/* How connecting went so far, of a socket with one peer; after socket_watch(), which comes before socket_connect(). */
enum socket_state {
    SOCKET_UNREACHED, /* nothing known */
    SOCKET_NOBODY,    /* nobody listened there last; it is tried again */
    SOCKET_REACHED,   /* connected, not greeted yet */
    SOCKET_GREETED,   /* all is well */
    SOCKET_REFUSED,   /* the server does not know our key */
    SOCKET_MISMATCH,  /* one end uses keys, the other does not */
    SOCKET_HUNG_UP,   /* without a word: it has another key than we think, or is no ZeroMQ peer */
};
int socket_watch(struct socket_context *context, struct socket *socket);
enum socket_state socket_state(struct socket *socket);
