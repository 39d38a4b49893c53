/* socket_internal.h - what socket.c and socket_keys.c share; nobody else includes it. */
#pragma once

#include "common/socket_keys.h"

struct socket_context {
    void *zmq;
};

struct socket {
    void *zmq;
    void *monitor; /* PAIR that tells how connecting goes; NULL: not watched */
    enum socket_state state;
};

/* ZeroMQ has errno values of its own above ZMQ_HAUSNUMERO; those that can reach us become plain ones. */
int socket_last_error(void);

int socket_set_int(struct socket *socket, int option, int value);
