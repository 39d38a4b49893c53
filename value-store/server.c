/* server.c - the working thread's loop. The only file of the store that logs, beside main.c. */
#include "value-store/server.h"
#include "common/clock.h"
#include "common/log.h"
#include "common/peer.h"
#include "common/random.h"
#include "common/signals.h"
#include "common/socket.h"
#include "proto/descriptor.h"
#include "value-store/control.h"

#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define TRY_AGAIN_MS        50 /* a coordinator that is not there */
#define MESSAGES_AT_ONCE    16 /* of one socket before the others are looked at */
#define DATA_HIGH_WATER     1000
#define WARNING_INTERVAL_US UINT64_C(1000000)
#define PATH_SIZE           (OPTIONS_PATH_SIZE + 16)

struct server {
    struct server_config config;
    struct store *store;
    struct link *link;
    struct exchanges exchanges;
    struct control control;
    struct socket_context *context;
    struct socket *data;  /* NULL: not registered */
    uint64_t route;       /* of `data`; new for every registration */
    uint64_t deadline_us; /* until when a Welcome must have come; CLOCK_NEVER: it has */
    uint64_t last_warning_us;
    uint32_t n_unsaid; /* warnings since the last line */
    char peer_path[PATH_SIZE];
    uint8_t buffer[PEER_MAX_MESSAGE];
};

enum outcome { TURN_GO_ON, TURN_HANG_UP, TURN_STOP, TURN_REFUSED, TURN_LEAVE, TURN_FAILED };

/* Whatever a peer can cause as often as it likes is said once a second. */
static void warn(struct server *server, const char *line)
{
    uint64_t now = clock_now_us();
    if (server->last_warning_us != 0 && now - server->last_warning_us < WARNING_INTERVAL_US) {
        server->n_unsaid++;
        return;
    }
    if (server->n_unsaid > 0)
        LOG_WARNING("%s (and %u warnings before)", line, server->n_unsaid);
    else
        LOG_WARNING("%s", line);
    server->last_warning_us = now;
    server->n_unsaid = 0;
}

static void warn_unbound(const struct store *store)
{
    if (store->threads_bound < 0)
        LOG_WARNING("threads are not bound to node %u: %s", store_home_node(store), strerror(-store->threads_bound));
    if (store->memory_right == -EPERM)
        LOG_WARNING(
            "memory is not bound to node %u: %s: its pages come from where the threads run; " TOPOLOGY_BINDING_HELP,
            store_home_node(store), strerror(EPERM));
    else if (store->memory_right < 0)
        LOG_WARNING("memory is not bound to node %u: %s", store_home_node(store), strerror(-store->memory_right));
}

int server_new(const struct server_config *config, struct server **ret_server)
{
    char text[CONTROL_TEXT] = "";
    struct server *server = calloc(1, sizeof(*server));
    if (!server) {
        LOG_ERROR("out of memory");
        return -ENOMEM;
    }
    server->config = *config;
    snprintf(server->peer_path, sizeof(server->peer_path), "%s/peer.sock", config->runtime_dir);
    int result = store_open(&config->store, &server->store, text);
    if (result < 0)
        LOG_ERROR("%s", text);
    if (result == 0) {
        result = socket_context_new(&server->context);
        if (result == 0)
            result = link_open(&server->store->progress, &server->link);
        if (result < 0)
            LOG_ERROR("sockets could not be opened: %s", strerror(-result));
    }
    if (result < 0) {
        server_free(server);
        return result;
    }
    server->control = (struct control){
        .store = server->store,
        .exchanges = &server->exchanges,
        .link = server->link,
    };
    LOG_INFO("store %u, incarnation %016" PRIx64 ": %s; coordinator at %s", config->store.index,
             config->store.incarnation, store_describe(server->store, text, sizeof(text)), server->peer_path);
    warn_unbound(server->store);
    *ret_server = server;
    return 0;
}

static void hang_up(struct server *server)
{
    server->data = socket_free(server->data);
    control_hang_up(&server->control);
}

struct server *server_free(struct server *server)
{
    if (!server)
        return NULL;
    if (server->link)
        hang_up(server);
    link_close(server->link);
    socket_context_free(server->context);
    store_close(server->store);
    free(server);
    return NULL;
}

/* ---- requests ---- */

/* Serves what the descriptor points at and makes the reply of it. */
static void serve_request(struct server *server, struct descriptor *descriptor)
{
    struct store *store = server->store;
    const struct exchange *exchange = exchanges_find(&server->exchanges, descriptor->worker);
    struct request_result result;
    char line[128];
    int status = 0;
    if (!exchange || !store->blocks)
        status = -ENOENT;
    else if (descriptor->slot >= exchange->header.n_slots || descriptor->n_bytes > exchange->header.request_bytes)
        status = -EINVAL;
    if (status < 0) {
        snprintf(line, sizeof(line), "request %016" PRIx64 " of worker %016" PRIx64 ", slot %u: %s",
                 descriptor->request, descriptor->worker, descriptor->slot,
                 status == -ENOENT ? "no such exchange" : "no such slot");
        warn(server, line);
        descriptor->n_bytes = 0;
    } else {
        const struct request_slot slot = {
            .request = descriptor->request,
            .n_bytes = descriptor->n_bytes,
            .request_area = exchanges_request_area(exchange, descriptor->slot),
            .request_bytes = exchange->header.request_bytes,
            .reply_area = exchanges_reply_area(exchange, descriptor->slot),
            .reply_bytes = exchange->header.reply_bytes,
        };
        store_serve(store, &slot, &result);
        descriptor->n_bytes = result.n_bytes;
        if (result.status < 0)
            LOG_DEBUG("request %016" PRIx64 ": %s, entry %08x", descriptor->request, strerror(-result.status),
                      result.entry);
    }
    uint64_t to = descriptor->from;
    descriptor->from = server->route;
    descriptor->to = to;
    descriptor->kind = DESCRIPTOR_REPLY;
    descriptor->remaining_us = 0;
    descriptor->status = status;
}

static void serve_message(struct server *server, const struct socket_message *message)
{
    struct descriptor descriptor;
    char line[128];
    if (message->n_frames != 1 ||
        descriptor_check(message->frames[0].data, message->frames[0].n_bytes, &descriptor) != 0 ||
        descriptor.kind != DESCRIPTOR_REQUEST || descriptor.to != server->route) {
        snprintf(line, sizeof(line), "a message on the data socket is no request (%zu frames, the first of %zu bytes)",
                 message->n_frames, message->frames[0].n_bytes);
        warn(server, line);
        return;
    }
    serve_request(server, &descriptor);
    const struct frame frame = {.data = &descriptor, .n_bytes = sizeof(descriptor)};
    int result = socket_send(server->data, &frame, 1, false);
    if (result < 0) { /* the answer lies in the slot; the worker's patience decides */
        snprintf(line, sizeof(line), "the reply to request %016" PRIx64 " could not be sent: %s", descriptor.request,
                 strerror(-result));
        warn(server, line);
    }
}

static void serve_data(struct server *server)
{
    for (int i = 0; i < MESSAGES_AT_ONCE; i++) {
        struct socket_message *message;
        int result = socket_receive(server->data, false, &message);
        if (result == -EMSGSIZE)
            warn(server, "a message of too many frames on the data socket");
        if (result == -EMSGSIZE || result == -EINTR)
            continue;
        if (result < 0)
            return;
        serve_message(server, message);
        socket_message_free(message);
    }
}

/* ---- the coordinator ---- */

static enum outcome welcomed(struct server *server, const char *data_path)
{
    char endpoint[PATH_SIZE];
    if (strlen(data_path) + sizeof("ipc://") > sizeof(endpoint)) {
        LOG_ERROR("the coordinator's data socket has too long a path: %s", data_path);
        return TURN_FAILED;
    }
    snprintf(endpoint, sizeof(endpoint), "ipc://%.*s", OPTIONS_PATH_SIZE, data_path);
    server->data = socket_free(server->data);
    int result = socket_new_dealer(server->context, server->route, DATA_HIGH_WATER, &server->data);
    if (result == 0)
        result = socket_connect(server->data, endpoint);
    if (result < 0) {
        LOG_ERROR("%s: %s", endpoint, strerror(-result));
        return TURN_FAILED;
    }
    server->deadline_us = CLOCK_NEVER;
    link_registered(server->link);
    LOG_INFO("registered; data at %s, route %016" PRIx64 "%s", endpoint, server->route,
             server->store->blocks ? ", segment kept" : "");
    return TURN_GO_ON;
}

/* What became of a message or of a step; `result` is of sending the answer. */
static enum outcome handle_event(struct server *server, const struct control_event *event, int result)
{
    switch (event->kind) {
    case CONTROL_WELCOME:
        return welcomed(server, event->text);
    case CONTROL_REFUSED:
        LOG_ERROR("refused by the coordinator: %s", event->text);
        return TURN_REFUSED;
    case CONTROL_LEAVE:
        return TURN_LEAVE;
    case CONTROL_GARBAGE:
        warn(server, event->text);
        break;
    case CONTROL_DONE:
        if (event->text[0])
            log_write(event->is_warning ? LOG_LEVEL_WARNING : LOG_LEVEL_INFO, "%s", event->text);
        break;
    }
    return result < 0 ? TURN_HANG_UP : TURN_GO_ON;
}

/* A block of a copy or import that is under way: requests are served before the next one. */
static enum outcome step(struct server *server)
{
    struct control_event event;
    int result = control_step(&server->control, &event);
    return handle_event(server, &event, result);
}

static enum outcome serve_peer(struct server *server)
{
    enum outcome turn = TURN_GO_ON;
    for (int i = 0; i < MESSAGES_AT_ONCE && turn == TURN_GO_ON && !server->control.copying; i++) {
        struct control_event event;
        int fds[LINK_MAX_FDS];
        size_t n_bytes, n_fds;
        int result = link_receive(server->link, server->buffer, sizeof(server->buffer), &n_bytes, fds, &n_fds);
        if (result == -EAGAIN)
            return TURN_GO_ON;
        if (result == -EMSGSIZE)
            warn(server, "a message from the coordinator is too long or brings too many descriptors");
        else if (result < 0)
            return TURN_HANG_UP;
        else {
            result = control_handle(&server->control, server->buffer, n_bytes, fds, n_fds, &event);
            turn = handle_event(server, &event, result);
        }
    }
    return turn;
}

/* True: a signal came, or comes within the time. */
static bool signal_within(int signal_fd, int timeout_ms)
{
    struct pollfd item = {.fd = signal_fd, .events = POLLIN};
    return poll(&item, 1, timeout_ms) > 0;
}

/* Connects and says hello; goes on until the deadline while nobody is there. */
static enum outcome connect_to_coordinator(struct server *server, int signal_fd)
{
    pid_t pid;
    uid_t uid;
    int fd;
    for (;;) {
        if (signal_within(signal_fd, 0))
            return TURN_STOP;
        int result = peer_connect(server->peer_path, clock_now_us(), &fd);
        if (result == 0)
            break;
        bool is_away = result == -ENOENT || result == -ECONNREFUSED || result == -EAGAIN || result == -ETIMEDOUT;
        if (!is_away || clock_remaining_us(server->deadline_us) == 0) {
            LOG_ERROR("no coordinator at %s: %s", server->peer_path, strerror(-result));
            return TURN_FAILED;
        }
        if (signal_within(signal_fd, TRY_AGAIN_MS))
            return TURN_STOP;
    }
    link_attach(server->link, fd);
    if (peer_credentials(fd, &pid, &uid) < 0 || (uid != geteuid() && uid != 0)) {
        LOG_ERROR("%s belongs to another user", server->peer_path);
        return TURN_FAILED;
    }
    server->route = random_u64();
    return control_hello(&server->control, server->route) < 0 ? TURN_HANG_UP : TURN_GO_ON;
}

/* One connection, from Hello until it ends. */
static enum outcome serve_connection(struct server *server, int signal_fd)
{
    enum outcome turn = TURN_GO_ON;
    while (turn == TURN_GO_ON) {
        bool is_copying = server->control.copying; /* then nobody waits, and the next order does */
        struct socket_item items[] = {
            {.fd = signal_fd, .events = SOCKET_READABLE},
            {.fd = link_fd(server->link), .events = is_copying ? 0 : SOCKET_READABLE},
            {.socket = server->data, .fd = -1, .events = SOCKET_READABLE},
        };
        int timeout_ms = is_copying ? 0 : clock_remaining_ms(server->deadline_us);
        int result = socket_poll(items, sizeof(items) / sizeof(items[0]), timeout_ms);
        if (result == -EINTR)
            continue;
        if (result < 0) {
            LOG_ERROR("waiting for messages: %s", strerror(-result));
            return TURN_FAILED;
        }
        if (items[0].ready)
            turn = TURN_STOP;
        if (turn == TURN_GO_ON && is_copying)
            turn = step(server);
        else if (turn == TURN_GO_ON && items[1].ready)
            turn = serve_peer(server);
        if (turn == TURN_GO_ON && items[2].ready && server->data)
            serve_data(server);
        if (turn == TURN_GO_ON && clock_remaining_us(server->deadline_us) == 0) {
            LOG_ERROR("the coordinator at %s does not answer", server->peer_path);
            turn = TURN_FAILED;
        }
    }
    return turn;
}

static void say_leaving(const struct store *store)
{
    struct blocks_counts counts = {0};
    if (store->blocks)
        counts = blocks_count(store->blocks);
    LOG_INFO("leaves: the coordinator has taken it out of service; in its segment are %u sessions, %u blocks",
             counts.n_sessions, counts.n_open + counts.n_sealed);
}

enum server_status server_run(struct server *server, int signal_fd)
{
    int signal_number;
    server->store->stop_fd = signal_fd;
    server->deadline_us = clock_deadline_us(server->config.reconnect_timeout_ms * 1000);
    for (;;) {
        enum outcome turn = connect_to_coordinator(server, signal_fd);
        if (turn == TURN_GO_ON)
            turn = serve_connection(server, signal_fd);
        bool was_registered = server->deadline_us == CLOCK_NEVER;
        hang_up(server);
        switch (turn) {
        case TURN_STOP:
            LOG_INFO("signal %d: leaving", signals_read(signal_fd, &signal_number) == 0 ? signal_number : 0);
            return SERVER_OK;
        case TURN_REFUSED:
            return SERVER_REFUSED;
        case TURN_LEAVE:
            say_leaving(server->store);
            return SERVER_LEFT;
        case TURN_FAILED:
            return SERVER_FAILED;
        default:
            break;
        }
        if (was_registered) {
            server->deadline_us = clock_deadline_us(server->config.reconnect_timeout_ms * 1000);
            LOG_WARNING("the coordinator hung up; trying again for %" PRIu64 " s",
                        server->config.reconnect_timeout_ms / 1000);
        }
        if (signal_within(signal_fd, TRY_AGAIN_MS)) /* not in a tight loop with one that hangs up at once */
            continue;
    }
}
