/* socket.c - zmq.h behind frames and negative errno. */
#include "common/socket.h"
#include "common/socket_internal.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>
#include <zmq.h>

#define DEFAULT_HIGH_WATER 1000
#define RECONNECT_MS       20   /* a restarted process is back within moments on the same host */
#define RECONNECT_MAX_MS   500  /* while it is away for long */
#define MAX_ITEMS          1024 /* of socket_poll() */
#define HEARTBEAT_MS       2000 /* over TCP */
#define CONNECT_MS         3000 /* of an attempt over TCP; the kernel alone would wait for two minutes */

#ifdef __SANITIZE_THREAD__
/* libzmq is not instrumented: the sanitizer sees neither its atomics nor, therefore, the order they make. */
const char *__tsan_default_suppressions(void);

const char *__tsan_default_suppressions(void)
{
    return "called_from_lib:libzmq.so\nrace:libzmq.so\n";
}
#endif

struct owned_message {
    struct socket_message public; /* first: what callers see */
    struct frame frames[SOCKET_MAX_FRAMES];
    zmq_msg_t parts[SOCKET_MAX_FRAMES];
};

int socket_last_error(void)
{
    int number = zmq_errno();
    switch (number) {
    case ETERM:
    case ENOTSOCK:
        return -EBADF;
    case EFSM:
    case ENOCOMPATPROTO:
        return -EPROTO;
    case EMTHREAD:
        return -EMFILE;
    case ENOTSUP:
        return -EOPNOTSUPP;
    default:
        return number > 0 ? -number : -EIO;
    }
}

int socket_context_new(struct socket_context **ret_context)
{
    struct socket_context *context = calloc(1, sizeof(*context));
    if (!context)
        return -ENOMEM;
    context->zmq = zmq_ctx_new();
    if (!context->zmq) {
        int error = socket_last_error();
        free(context);
        return error;
    }
    *ret_context = context;
    return 0;
}

struct socket_context *socket_context_free(struct socket_context *context)
{
    if (!context)
        return NULL;
    while (zmq_ctx_term(context->zmq) < 0 && zmq_errno() == EINTR)
        ;
    free(context);
    return NULL;
}

int socket_set_int(struct socket *socket, int option, int value)
{
    return zmq_setsockopt(socket->zmq, option, &value, sizeof(value)) < 0 ? socket_last_error() : 0;
}

static int new_socket(struct socket_context *context, int type, uint32_t high_water, struct socket **ret_socket)
{
    if (high_water > INT32_MAX)
        return -EINVAL;
    int messages = high_water ? (int)high_water : DEFAULT_HIGH_WATER;
    struct socket *socket = calloc(1, sizeof(*socket));
    if (!socket)
        return -ENOMEM;
    socket->zmq = zmq_socket(context->zmq, type);
    if (!socket->zmq) {
        int error = socket_last_error();
        free(socket);
        return error;
    }
    int64_t frame_limit = (int64_t)SOCKET_MAX_FRAME_BYTES;
    int error = 0;
    if (zmq_setsockopt(socket->zmq, ZMQ_MAXMSGSIZE, &frame_limit, sizeof(frame_limit)) < 0)
        error = socket_last_error();
    if (!error)
        error = socket_set_int(socket, ZMQ_LINGER, 0);
    if (!error)
        error = socket_set_int(socket, ZMQ_SNDHWM, messages);
    if (!error)
        error = socket_set_int(socket, ZMQ_RCVHWM, messages);
    if (!error)
        error = socket_set_int(socket, ZMQ_RECONNECT_IVL, RECONNECT_MS);
    if (!error)
        error = socket_set_int(socket, ZMQ_RECONNECT_IVL_MAX, RECONNECT_MAX_MS);
    if (error) {
        socket_free(socket);
        return error;
    }
    *ret_socket = socket;
    return 0;
}

int socket_new_router(struct socket_context *context, uint32_t high_water, struct socket **ret_socket)
{
    struct socket *socket = NULL;
    int error = new_socket(context, ZMQ_ROUTER, high_water, &socket);
    if (error)
        return error;
    error = socket_set_int(socket, ZMQ_ROUTER_MANDATORY, 1);
    if (error) {
        socket_free(socket);
        return error;
    }
    *ret_socket = socket;
    return 0;
}

int socket_new_dealer(struct socket_context *context, uint64_t routing_id, uint32_t high_water,
                      struct socket **ret_socket)
{
    if (routing_id == 0)
        return -EINVAL;
    struct socket *socket = NULL;
    int error = new_socket(context, ZMQ_DEALER, high_water, &socket);
    if (error)
        return error;
    if (zmq_setsockopt(socket->zmq, ZMQ_ROUTING_ID, &routing_id, sizeof(routing_id)) < 0) {
        error = socket_last_error();
        socket_free(socket);
        return error;
    }
    *ret_socket = socket;
    return 0;
}

struct socket *socket_free(struct socket *socket)
{
    if (!socket)
        return NULL;
    if (socket->monitor) {
        zmq_socket_monitor(socket->zmq, NULL, 0);
        zmq_close(socket->monitor);
    }
    zmq_close(socket->zmq);
    free(socket);
    return NULL;
}

static const char *ipc_path(const char *endpoint)
{
    return strncmp(endpoint, "ipc://", 6) == 0 ? endpoint + 6 : NULL;
}

/* ZeroMQ removes whatever file is in its way before it binds, a live process' socket included. So ask first. */
static int check_free(const char *path)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct stat status;
    if (strlen(path) >= sizeof(address.sun_path))
        return -ENAMETOOLONG;
    strcpy(address.sun_path, path);
    if (lstat(path, &status) < 0)
        return errno == ENOENT ? 0 : -errno;
    if (!S_ISSOCK(status.st_mode))
        return -EEXIST;
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return -errno;
    int result = connect(fd, (const struct sockaddr *)&address, sizeof(address)) < 0 ? errno : 0;
    close(fd);
    return result == ECONNREFUSED || result == ENOENT ? 0 : -EADDRINUSE;
}

/* A cut link says nothing by itself. Options hold for what is bound or connected after them. */
static int set_patience(struct socket *socket, const char *endpoint, int silence_ms)
{
    if (strncmp(endpoint, "tcp://", 6) != 0)
        return 0;
    int error = socket_set_int(socket, ZMQ_HEARTBEAT_IVL, HEARTBEAT_MS);
    if (!error)
        error = socket_set_int(socket, ZMQ_HEARTBEAT_TIMEOUT, silence_ms);
    if (!error)
        error = socket_set_int(socket, ZMQ_CONNECT_TIMEOUT, CONNECT_MS);
    if (!error)
        error = socket_set_int(socket, ZMQ_HANDSHAKE_IVL, SOCKET_SILENCE_MS);
    return error;
}

int socket_bind(struct socket *socket, const char *endpoint)
{
    const char *path = ipc_path(endpoint);
    /* Less than the other end has: a peer that comes again under its routing id must find the place free. */
    int error = path ? check_free(path) : set_patience(socket, endpoint, SOCKET_SILENCE_MS / 2);
    if (error)
        return error;
    if (zmq_bind(socket->zmq, endpoint) < 0)
        return socket_last_error();
    if (path && chmod(path, 0600) < 0) {
        error = -errno;
        zmq_unbind(socket->zmq, endpoint);
        return error;
    }
    return 0;
}

int socket_connect(struct socket *socket, const char *endpoint)
{
    const char *path = ipc_path(endpoint);
    if (path && strlen(path) >= sizeof(((struct sockaddr_un *)NULL)->sun_path))
        return -ENAMETOOLONG;
    int error = set_patience(socket, endpoint, SOCKET_SILENCE_MS);
    if (error)
        return error;
    return zmq_connect(socket->zmq, endpoint) < 0 ? socket_last_error() : 0;
}

int socket_disconnect(struct socket *socket, const char *endpoint)
{
    return zmq_disconnect(socket->zmq, endpoint) < 0 ? socket_last_error() : 0;
}

int socket_endpoint(const struct socket *socket, char *ret_text, size_t size)
{
    char text[256];
    size_t length = sizeof(text);
    if (zmq_getsockopt(socket->zmq, ZMQ_LAST_ENDPOINT, text, &length) < 0)
        return socket_last_error();
    if (length > size) /* length counts the closing NUL */
        return -ENAMETOOLONG;
    memcpy(ret_text, text, length);
    return 0;
}

int socket_send(struct socket *socket, const struct frame *frames, size_t n_frames, bool wait)
{
    if (n_frames == 0 || n_frames > SOCKET_MAX_FRAMES)
        return -EINVAL;
    for (size_t i = 0; i < n_frames; i++)
        if (frames[i].n_bytes > SOCKET_MAX_FRAME_BYTES)
            return -EMSGSIZE; /* the receiver would cut the connection, and lose what else is on its way */
    /* ZeroMQ judges room and route at the first frame; once that is taken the others are. */
    for (size_t i = 0; i < n_frames; i++) {
        int flags = (wait ? 0 : ZMQ_DONTWAIT) | (i + 1 < n_frames ? ZMQ_SNDMORE : 0);
        int result;
        do
            result = zmq_send(socket->zmq, frames[i].data, frames[i].n_bytes, flags);
        while (result < 0 && zmq_errno() == EINTR && i > 0);
        if (result < 0)
            return socket_last_error();
    }
    return 0;
}

/* Takes the rest of a message off the socket. */
static void drop_rest(struct socket *socket, bool more)
{
    while (more) {
        zmq_msg_t part;
        zmq_msg_init(&part);
        if (zmq_msg_recv(&part, socket->zmq, ZMQ_DONTWAIT) < 0)
            more = zmq_errno() == EINTR;
        else
            more = zmq_msg_more(&part);
        zmq_msg_close(&part);
    }
}

int socket_receive(struct socket *socket, bool wait, struct socket_message **ret_message)
{
    struct owned_message *message = malloc(sizeof(*message));
    if (!message)
        return -ENOMEM;
    message->public = (struct socket_message){.n_frames = 0, .frames = message->frames};
    bool more = true;
    while (more) {
        size_t n = message->public.n_frames;
        if (n == SOCKET_MAX_FRAMES) {
            drop_rest(socket, true);
            socket_message_free(&message->public);
            return -EMSGSIZE;
        }
        zmq_msg_t *part = &message->parts[n];
        zmq_msg_init(part);
        /* A message arrives whole: only the first frame can be absent or interrupted. */
        if (zmq_msg_recv(part, socket->zmq, wait ? 0 : ZMQ_DONTWAIT) < 0) {
            int error = socket_last_error();
            zmq_msg_close(part);
            if (error == -EINTR && n > 0)
                continue;
            socket_message_free(&message->public);
            return error;
        }
        message->frames[n] = (struct frame){.data = zmq_msg_data(part), .n_bytes = zmq_msg_size(part)};
        message->public.n_frames = n + 1;
        more = zmq_msg_more(part);
    }
    *ret_message = &message->public;
    return 0;
}

struct socket_message *socket_message_free(struct socket_message *message)
{
    if (!message)
        return NULL;
    struct owned_message *owned = (struct owned_message *)message;
    for (size_t i = 0; i < message->n_frames; i++)
        zmq_msg_close(&owned->parts[i]);
    free(owned);
    return NULL;
}

struct frame socket_id_frame(const uint64_t *id)
{
    return (struct frame){.data = id, .n_bytes = sizeof(*id)};
}

int socket_id(const struct frame *frame, uint64_t *ret_id)
{
    uint64_t id;
    if (frame->n_bytes != sizeof(id))
        return -EBADMSG;
    memcpy(&id, frame->data, sizeof(id));
    if (id == 0)
        return -EBADMSG;
    *ret_id = id;
    return 0;
}

int socket_poll(struct socket_item *items, size_t n_items, int timeout_ms)
{
    if (n_items > MAX_ITEMS)
        return -EINVAL;
    zmq_pollitem_t list[n_items + 1];
    size_t n_list = 0;
    for (size_t i = 0; i < n_items; i++) {
        items[i].ready = 0;
        if (!items[i].socket && items[i].fd < 0)
            continue;
        int events = items[i].events;
        list[n_list++] = (zmq_pollitem_t){
            .socket = items[i].socket ? items[i].socket->zmq : NULL,
            .fd = items[i].socket ? 0 : items[i].fd,
            .events = (short)((events & SOCKET_READABLE ? ZMQ_POLLIN : 0) |
                              (events & SOCKET_WRITABLE ? ZMQ_POLLOUT : 0) | (items[i].socket ? 0 : ZMQ_POLLERR)),
        };
    }
    int n_ready = zmq_poll(list, (int)n_list, timeout_ms);
    if (n_ready < 0)
        return socket_last_error();
    for (size_t i = 0, k = 0; i < n_items; i++) {
        if (!items[i].socket && items[i].fd < 0)
            continue;
        short got = list[k++].revents;
        items[i].ready = (got & ZMQ_POLLIN ? SOCKET_READABLE : 0) | (got & ZMQ_POLLOUT ? SOCKET_WRITABLE : 0) |
                         (got & ZMQ_POLLERR ? SOCKET_ERROR : 0);
    }
    return n_ready;
}

int socket_fd(const struct socket *socket, int *ret_fd)
{
    int fd;
    size_t size = sizeof(fd);
    if (zmq_getsockopt(socket->zmq, ZMQ_FD, &fd, &size) < 0)
        return socket_last_error();
    *ret_fd = fd;
    return 0;
}

int socket_events(const struct socket *socket, int *ret_events)
{
    int events;
    size_t size = sizeof(events);
    if (zmq_getsockopt(socket->zmq, ZMQ_EVENTS, &events, &size) < 0)
        return socket_last_error();
    *ret_events = (events & ZMQ_POLLIN ? SOCKET_READABLE : 0) | (events & ZMQ_POLLOUT ? SOCKET_WRITABLE : 0);
    return 0;
}
