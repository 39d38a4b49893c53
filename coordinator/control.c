/* control.c - messages to peers: packed, sent at once or queued. */
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#include "common/log.h"
#include "common/peer.h"
#include "coordinator/state.h"

static void free_packet(struct packet *packet)
{
    if (packet->fd >= 0)
        close(packet->fd);
    free(packet);
}

void control_drop_packets(struct peer *peer)
{
    while (peer->first) {
        struct packet *packet = peer->first;
        peer->first = packet->next;
        free_packet(packet);
    }
    peer->last = NULL;
    peer->n_packets = 0;
}

void control_flush(struct peer *peer)
{
    while (peer->first && !peer->gone) {
        struct packet *packet = peer->first;
        int result = peer_try_send(peer->fd, packet->bytes, packet->n_bytes, &packet->fd, packet->fd >= 0 ? 1 : 0);
        if (result == -EAGAIN)
            return;
        if (result != 0) {
            peer->gone = true;
            break;
        }
        peer->first = packet->next;
        if (!peer->first)
            peer->last = NULL;
        peer->n_packets--;
        free_packet(packet);
    }
    if (peer->drain && !peer->first)
        peer->gone = true;
}

void control_send(struct server *server, struct peer *peer, const Hcattn__Control__Control *message, int fd)
{
    (void)server;
    size_t n_bytes = hcattn__control__control__get_packed_size(message);
    struct packet *packet = NULL;
    if (peer && !peer->gone && n_bytes <= PEER_MAX_MESSAGE && peer->n_packets < MAX_PACKETS)
        packet = malloc(sizeof(*packet) + n_bytes);
    if (!packet) {
        if (fd >= 0)
            close(fd);
        if (peer && !peer->gone) {
            LOG_ERROR("%s %u does not read its messages: cut off",
                      peer->process ? registry_role_name(peer->process->role) : "a peer",
                      peer->process ? peer->process->index : 0);
            peer->gone = true;
        }
        return;
    }
    packet->next = NULL;
    packet->fd = fd;
    packet->n_bytes = hcattn__control__control__pack(message, packet->bytes);
    if (peer->last)
        peer->last->next = packet;
    else
        peer->first = packet;
    peer->last = packet;
    peer->n_packets++;
    control_flush(peer);
}

#define CONTROL(NAME, field, value)                                                                                    \
    Hcattn__Control__Control control = HCATTN__CONTROL__CONTROL__INIT;                                                 \
    control.message_case = HCATTN__CONTROL__CONTROL__MESSAGE_##NAME;                                                   \
    control.field = (value)

void control_welcome(struct server *server, struct peer *peer)
{
    Hcattn__Control__Welcome welcome = HCATTN__CONTROL__WELCOME__INIT;
    welcome.coordinator = server->options.incarnation;
    welcome.data_socket = server->data_path;
    welcome.work_socket = server->work_path;
    CONTROL(WELCOME, welcome, &welcome);
    control_send(server, peer, &control, -1);
}

void control_refused(struct server *server, struct peer *peer, const char *sentence)
{
    Hcattn__Control__Refused refused = HCATTN__CONTROL__REFUSED__INIT;
    refused.sentence = (char *)(uintptr_t)sentence;
    CONTROL(REFUSED, refused, &refused);
    control_send(server, peer, &control, -1);
    peer->drain = true;
    if (!peer->first)
        peer->gone = true;
}

void control_format(struct server *server, struct peer *peer, const struct row_shape *shape)
{
    Hcattn__Control__RowShape row_shape = HCATTN__CONTROL__ROW_SHAPE__INIT;
    row_shape.n_layers = shape->n_layers;
    row_shape.n_kv_heads = shape->n_kv_heads;
    row_shape.head_dim = shape->head_dim;
    row_shape.codec = shape->codec;
    Hcattn__Control__Format format = HCATTN__CONTROL__FORMAT__INIT;
    format.shape = &row_shape;
    CONTROL(FORMAT, format, &format);
    control_send(server, peer, &control, -1);
}

void control_adopt(struct server *server, struct peer *peer, uint64_t previous, int fd)
{
    Hcattn__Control__Adopt adopt = HCATTN__CONTROL__ADOPT__INIT;
    adopt.previous = previous;
    CONTROL(ADOPT, adopt, &adopt);
    control_send(server, peer, &control, fd);
}

void control_store_up(struct server *server, struct peer *peer, uint32_t store, uint64_t incarnation, uint64_t route,
                      int fd)
{
    Hcattn__Control__StoreUp up = HCATTN__CONTROL__STORE_UP__INIT;
    up.store = store;
    up.incarnation = incarnation;
    up.route = route;
    CONTROL(STORE_UP, store_up, &up);
    control_send(server, peer, &control, fd);
}

void control_store_down(struct server *server, struct peer *peer, uint32_t store, uint64_t incarnation, bool for_good)
{
    Hcattn__Control__StoreDown down = HCATTN__CONTROL__STORE_DOWN__INIT;
    down.store = store;
    down.incarnation = incarnation;
    down.for_good = for_good;
    CONTROL(STORE_DOWN, store_down, &down);
    control_send(server, peer, &control, -1);
}

void control_exchange(struct server *server, struct peer *peer, const Hcattn__Control__Exchange *exchange, int fd)
{
    Hcattn__Control__Exchange copy = *exchange;
    CONTROL(EXCHANGE, exchange, &copy);
    control_send(server, peer, &control, fd);
}

void control_exchange_ready(struct server *server, struct peer *peer, uint32_t store, uint64_t worker_incarnation,
                            uint64_t store_incarnation, int32_t status)
{
    Hcattn__Control__ExchangeReady ready = HCATTN__CONTROL__EXCHANGE_READY__INIT;
    ready.store = store;
    ready.worker_incarnation = worker_incarnation;
    ready.store_incarnation = store_incarnation;
    ready.status = status;
    CONTROL(EXCHANGE_READY, exchange_ready, &ready);
    control_send(server, peer, &control, -1);
}

void control_worker_gone(struct server *server, struct peer *peer, uint64_t incarnation)
{
    Hcattn__Control__WorkerGone gone = HCATTN__CONTROL__WORKER_GONE__INIT;
    gone.worker_incarnation = incarnation;
    CONTROL(WORKER_GONE, worker_gone, &gone);
    control_send(server, peer, &control, -1);
}

void control_leave(struct server *server, struct peer *peer)
{
    Hcattn__Control__Leave leave = HCATTN__CONTROL__LEAVE__INIT;
    CONTROL(LEAVE, leave, &leave);
    control_send(server, peer, &control, -1);
}

void control_start(struct server *server, struct peer *peer)
{
    Hcattn__Control__Start start = HCATTN__CONTROL__START__INIT;
    CONTROL(START, start, &start);
    control_send(server, peer, &control, -1);
}

void control_fence(struct server *server, struct peer *peer, uint64_t incarnation, const char *reason)
{
    Hcattn__Control__Fence fence = HCATTN__CONTROL__FENCE__INIT;
    fence.incarnation = incarnation;
    fence.reason = (char *)(uintptr_t)reason;
    CONTROL(FENCE, fence, &fence);
    control_send(server, peer, &control, -1);
}
