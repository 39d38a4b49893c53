#include "gpu-worker/server.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/log.h"
#include "common/peer.h"
#include "common/random.h"
#include "common/signals.h"
#include "gpu-worker/server_private.h"

enum { HEARTBEAT_US = 1000000, RECONNECT_US = 200000 };

static void disconnect(struct server *server)
{
    if (server->peer_fd >= 0)
        close(server->peer_fd);
    server->peer_fd = -1;
    server->work = socket_free(server->work);
    if (!server->is_welcome)
        return;
    server->is_welcome = false;
    server->lost_us = clock_now_us();
    struct engine_command *command = calloc(1, sizeof(*command));
    if (command == NULL)
        abort();
    command->kind = ENGINE_COORDINATOR_DOWN;
    engine_command(server->engine, command);
    if (!server->is_refused && !server->is_leaving)
        LOG_WARNING("the coordinator is gone; trying again for %llu s",
                    (unsigned long long)(server->options->reconnect_timeout_us / 1000000));
}

/* One try to reach the coordinator. */
static void try_connect(struct server *server)
{
    char path[128];
    snprintf(path, sizeof(path), "%s/peer.sock", server->options->runtime_dir);
    if (peer_connect(path, 0, &server->peer_fd) < 0) {
        server->peer_fd = -1;
        return;
    }
    server->epoch++;
    server->data_route = random_u64();
    server->work_route = random_u64();
    if (server_control_hello(server) < 0)
        disconnect(server);
}

static void take_events(struct server *server)
{
    uint64_t count;
    if (read(engine_event_fd(server->engine), &count, sizeof(count)) < 0 && errno != EAGAIN)
        LOG_WARNING("event descriptor: %s", strerror(errno));
    struct engine_event *event;
    while ((event = engine_event(server->engine)) != NULL) {
        if (event->kind == ENGINE_WARNING)
            LOG_WARNING("%s", event->text == NULL ? "out of memory" : event->text);
        else if (event->kind == ENGINE_DEVICE_LOST) {
            LOG_ERROR("the device is lost: %s", event->text == NULL ? "out of memory" : event->text);
            server->has_lost_device = true;
        } else if (event->epoch == server->epoch && server->is_welcome) {
            if (event->kind == ENGINE_EXCHANGE)
                server_control_exchange(server, event);
            else if (event->kind == ENGINE_RING_USED)
                server_control_ring_used(server, event);
            else
                server_work_event(server, event);
        }
        engine_event_free(event);
    }
}

static int poll_once(struct server *server, int signal_fd, uint64_t due_us)
{
    struct socket_item items[] = {
        {.fd = signal_fd, .events = SOCKET_READABLE},
        {.fd = server->peer_fd, .events = SOCKET_READABLE},
        {.fd = engine_event_fd(server->engine), .events = SOCKET_READABLE},
        {.socket = server->work, .fd = -1, .events = SOCKET_READABLE},
    };
    int n = socket_poll(items, sizeof(items) / sizeof(items[0]), clock_remaining_ms(due_us));
    if (n < 0)
        return n == -EINTR ? 0 : n;
    int signal;
    if (items[0].ready != 0 && signals_read(signal_fd, &signal) == 0)
        return 1;
    if (items[1].ready != 0 && server_control_receive(server) < 0)
        disconnect(server);
    if (items[2].ready != 0)
        take_events(server);
    if (server->work != NULL && items[3].socket == server->work && items[3].ready != 0)
        server_work_receive(server);
    if (server->is_stuck)
        disconnect(server);
    server->is_stuck = false;
    return 0;
}

int server_run(const struct server_options *options, struct engine *engine, struct socket_context *sockets,
               const struct model *model, const struct tokenizer *tokenizer, const struct chat *chat,
               const char *chat_error, int signal_fd)
{
    struct server server = {
        .options = options,
        .engine = engine,
        .sockets = sockets,
        .model = model,
        .tokenizer = tokenizer,
        .chat = chat,
        .chat_error = chat_error,
        .peer_fd = -1,
        .lost_us = clock_now_us(),
    };
    uint64_t heartbeat_us = 0, connect_us = 0;
    int r = 0;
    while (r == 0) {
        uint64_t now = clock_now_us();
        if (server.peer_fd < 0 && now >= connect_us) {
            try_connect(&server);
            connect_us = now + RECONNECT_US;
        }
        if (server.is_welcome && now >= heartbeat_us) {
            if (server_control_heartbeat(&server) < 0)
                disconnect(&server);
            heartbeat_us = now + HEARTBEAT_US;
        }
        if (!server.is_welcome && now - server.lost_us > options->reconnect_timeout_us) {
            LOG_ERROR("no coordinator in %s within %llu s", options->runtime_dir,
                      (unsigned long long)(options->reconnect_timeout_us / 1000000));
            r = -ECONNABORTED;
        } else
            r = poll_once(&server, signal_fd, server.is_welcome ? heartbeat_us : connect_us);
        if (server.is_refused)
            r = -EPERM;
        if (server.has_lost_device)
            r = -ENODEV;
    }
    server.is_leaving = true;
    disconnect(&server);
    return r > 0 ? 0 : r;
}
