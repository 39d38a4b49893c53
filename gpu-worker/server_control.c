/* server_control.c - registration, health, and what the coordinator says of the stores, on the peer socket. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/log.h"
#include "common/peer.h"
#include "gpu-worker/server_private.h"
#include "proto/control.pb-c.h"

static int send_control(struct server *server, const Hcattn__Control__Control *control, const int *fds, size_t n_fds)
{
    size_t n_bytes = hcattn__control__control__get_packed_size(control);
    uint8_t bytes[4096];
    if (n_bytes > sizeof(bytes))
        return -EMSGSIZE;
    hcattn__control__control__pack(control, bytes);
    return peer_send(server->peer_fd, bytes, n_bytes, fds, n_fds);
}

int server_control_hello(struct server *server)
{
    const struct model_shape *shape = &server->model->shape;
    Hcattn__Control__RowShape rows = HCATTN__CONTROL__ROW_SHAPE__INIT;
    rows.n_layers = shape->n_layers;
    rows.n_kv_heads = shape->n_kv_heads;
    rows.head_dim = shape->head_dim;
    rows.codec = server->options->row_codec;
    Hcattn__Control__Hello hello = HCATTN__CONTROL__HELLO__INIT;
    hello.layout = LAYOUT_VERSION;
    hello.version = HCATTN_VERSION;
    hello.role = HCATTN__CONTROL__ROLE__GPU_WORKER;
    hello.index = server->options->index;
    hello.incarnation = server->options->incarnation;
    hello.pid = (uint32_t)getpid();
    hello.data_route = server->data_route;
    hello.work_route = server->work_route;
    hello.achieved = (char *)(uintptr_t)server->options->achieved;
    hello.numa_node = -1;
    hello.shape = &rows;
    hello.model_name = (char *)(uintptr_t)server->model->name;
    memcpy(&hello.model_hash_low, server->model->hash, 8);
    memcpy(&hello.model_hash_high, server->model->hash + 8, 8);
    hello.n_ctx = server->options->n_ctx;
    hello.weight_bytes = server->options->weight_bytes;
    hello.device_bytes_per_token = server->options->device_bytes_per_token;
    hello.device_budget_bytes = server->options->device_memory;
    hello.device_base_bytes = engine_device_bytes(server->engine);
    hello.default_policy = (char *)(uintptr_t)server->options->policy;
    Hcattn__Control__Control control = HCATTN__CONTROL__CONTROL__INIT;
    control.message_case = HCATTN__CONTROL__CONTROL__MESSAGE_HELLO;
    control.hello = &hello;
    return send_control(server, &control, NULL, 0);
}

int server_control_heartbeat(struct server *server)
{
    Hcattn__Control__Heartbeat heartbeat = HCATTN__CONTROL__HEARTBEAT__INIT;
    heartbeat.progress = engine_progress(server->engine);
    heartbeat.busy = engine_busy(server->engine);
    heartbeat.tokens = engine_n_tokens(server->engine);
    heartbeat.device_bytes = engine_device_bytes(server->engine);
    heartbeat.phase = (char *)(uintptr_t)engine_phase(server->engine);
    Hcattn__Control__Control control = HCATTN__CONTROL__CONTROL__INIT;
    control.message_case = HCATTN__CONTROL__CONTROL__MESSAGE_HEARTBEAT;
    control.heartbeat = &heartbeat;
    return send_control(server, &control, NULL, 0);
}

void server_control_exchange(struct server *server, const struct engine_event *event)
{
    Hcattn__Control__Exchange exchange = HCATTN__CONTROL__EXCHANGE__INIT;
    exchange.store = event->store;
    exchange.worker_incarnation = server->options->incarnation;
    exchange.store_incarnation = event->incarnation;
    Hcattn__Control__Control control = HCATTN__CONTROL__CONTROL__INIT;
    control.message_case = HCATTN__CONTROL__CONTROL__MESSAGE_EXCHANGE;
    control.exchange = &exchange;
    int r = send_control(server, &control, &event->fd, 1);
    if (r < 0) /* a hang-up; the poll loop sees it too */
        LOG_DEBUG("exchange for store %u not sent: %s", event->store, strerror(-r));
}

void server_control_ring_used(struct server *server, const struct engine_event *event)
{
    Hcattn__Control__Done done = HCATTN__CONTROL__DONE__INIT;
    done.sequence = event->work;
    done.status = event->error;
    Hcattn__Control__Control control = HCATTN__CONTROL__CONTROL__INIT;
    control.message_case = HCATTN__CONTROL__CONTROL__MESSAGE_DONE;
    control.done = &done;
    int r = send_control(server, &control, NULL, 0);
    if (r < 0)
        LOG_DEBUG("answer to an order about rings not sent: %s", strerror(-r));
}

static struct engine_command *new_command(enum engine_command_kind kind)
{
    struct engine_command *command = calloc(1, sizeof(*command));
    if (command == NULL)
        abort(); /* a few hundred bytes: nothing could go on */
    command->kind = kind;
    command->fd = -1;
    return command;
}

static void endpoint_of(const char *path, char *endpoint, size_t size)
{
    snprintf(endpoint, size, "ipc://%s", path);
}

static int take_welcome(struct server *server, const Hcattn__Control__Welcome *welcome)
{
    struct engine_command *command = new_command(ENGINE_COORDINATOR_UP);
    command->epoch = server->epoch;
    command->route = server->data_route;
    endpoint_of(welcome->data_socket, command->endpoint, sizeof(command->endpoint));
    char endpoint[128];
    endpoint_of(welcome->work_socket, endpoint, sizeof(endpoint));
    enum { MAX_REPLIES = 100000 }; /* that wait for the coordinator */
    int r = socket_new_dealer(server->sockets, server->work_route, MAX_REPLIES, &server->work);
    if (r == 0)
        r = socket_connect(server->work, endpoint);
    if (r < 0) {
        LOG_ERROR("work socket %s: %s", endpoint, strerror(-r));
        free(command);
        return r;
    }
    server->is_welcome = true;
    engine_command(server->engine, command);
    LOG_INFO("registered with coordinator %016llx; sockets %s, %s", (unsigned long long)welcome->coordinator,
             welcome->work_socket, welcome->data_socket);
    return 0;
}

static int take_control(struct server *server, const Hcattn__Control__Control *control, int *fd)
{
    struct engine_command *command;
    switch (control->message_case) {
    case HCATTN__CONTROL__CONTROL__MESSAGE_WELCOME:
        return server->is_welcome ? 0 : take_welcome(server, control->welcome);
    case HCATTN__CONTROL__CONTROL__MESSAGE_REFUSED:
        LOG_ERROR("refused by the coordinator: %s", control->refused->sentence);
        server->is_refused = true;
        return 0;
    case HCATTN__CONTROL__CONTROL__MESSAGE_STORE_UP:
        if (*fd < 0) {
            LOG_WARNING("store %u was announced without its segment", control->store_up->store);
            return 0;
        }
        command = new_command(ENGINE_STORE_UP);
        command->store = control->store_up->store;
        command->incarnation = control->store_up->incarnation;
        command->route = control->store_up->route;
        command->fd = *fd;
        *fd = -1;
        engine_command(server->engine, command);
        return 0;
    case HCATTN__CONTROL__CONTROL__MESSAGE_STORE_DOWN:
        command = new_command(control->store_down->for_good ? ENGINE_STORE_LEFT : ENGINE_STORE_DOWN);
        command->store = control->store_down->store;
        command->incarnation = control->store_down->incarnation;
        if (control->store_down->for_good)
            LOG_INFO("store %u has left", command->store);
        else
            LOG_WARNING("store %u is gone; waiting for the next", command->store);
        engine_command(server->engine, command);
        return 0;
    case HCATTN__CONTROL__CONTROL__MESSAGE_EXCHANGE_READY:
        if (control->exchange_ready->status < 0) {
            LOG_WARNING("store %u did not take the exchange: %s", control->exchange_ready->store,
                        strerror(-control->exchange_ready->status));
            return 0;
        }
        command = new_command(ENGINE_STORE_READY);
        command->store = control->exchange_ready->store;
        command->incarnation = control->exchange_ready->store_incarnation;
        LOG_INFO("store %u serves", command->store);
        engine_command(server->engine, command);
        return 0;
    case HCATTN__CONTROL__CONTROL__MESSAGE_RING_USE:
        command = new_command(ENGINE_RING_USE);
        command->work = control->ring_use->sequence;
        command->store = control->ring_use->store;
        command->incarnation = control->ring_use->store_incarnation;
        command->ring = control->ring_use->ring;
        LOG_INFO("requests to store %u go %s", command->store,
                 command->ring ? "by its ring" : "through the coordinator");
        engine_command(server->engine, command);
        return 0;
    default:
        LOG_WARNING("a message that is not for a worker from the coordinator (kind %d)", (int)control->message_case);
        return 0;
    }
}

int server_control_receive(struct server *server)
{
    static uint8_t buffer[PEER_MAX_MESSAGE];
    int fd = -1;
    size_t n_bytes, n_fds = 0;
    int r = peer_try_receive(server->peer_fd, buffer, sizeof(buffer), &n_bytes, &fd, 1, &n_fds);
    if (r == -EAGAIN || r == -EMSGSIZE)
        return 0;
    if (r < 0)
        return r;
    if (n_fds == 0)
        fd = -1;
    Hcattn__Control__Control *control = hcattn__control__control__unpack(NULL, n_bytes, buffer);
    if (control == NULL)
        LOG_WARNING("a message from the coordinator could not be read");
    else
        r = take_control(server, control, &fd);
    hcattn__control__control__free_unpacked(control, NULL);
    if (fd >= 0)
        close(fd);
    return r;
}
