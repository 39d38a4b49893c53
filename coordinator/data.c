/* data.c - the data socket: descriptors from workers to stores and back. */
#include <errno.h>

#include "common/log.h"
#include "coordinator/state.h"

#define ROUND_MESSAGES 512

static int send_to(struct server *server, uint64_t route, const struct descriptor *descriptor)
{
    struct frame frames[2] = {socket_id_frame(&route), {descriptor, sizeof(*descriptor)}};
    return socket_send(server->data_socket, frames, 2, false);
}

/* A request goes back to its sender; of a reply nobody waits for longer. */
static void give_up(struct server *server, const struct descriptor *descriptor)
{
    uint64_t n_quiet;
    if (descriptor->kind == DESCRIPTOR_REQUEST) {
        struct descriptor reply = router_returned(descriptor, -EHOSTUNREACH);
        (void)send_to(server, reply.to, &reply);
    } else if (server_rate(server, &server->late, &n_quiet)) {
        LOG_WARNING("a store's reply could not be delivered: dropped (%llu more)", (unsigned long long)n_quiet);
    }
}

static void forward(struct server *server, const struct descriptor *descriptor)
{
    if (send_to(server, descriptor->to, descriptor) != 0 &&
        router_hold(server->router, descriptor, server->now_us) != 0)
        give_up(server, descriptor);
}

static void receive_one(struct server *server, const struct socket_message *message)
{
    uint64_t from, n_quiet;
    struct descriptor descriptor;
    enum router_verdict verdict = ROUTER_DROP_GARBAGE;
    if (message->n_frames >= 1 && socket_id(&message->frames[0], &from) != 0)
        verdict = ROUTER_DROP_STRANGER;
    else if (message->n_frames == 2)
        verdict = router_judge(server->router, from, message->frames[1].data, message->frames[1].n_bytes, &descriptor);
    switch (verdict) {
    case ROUTER_FORWARD:
        forward(server, &descriptor);
        break;
    case ROUTER_RETURN:
        give_up(server, &descriptor);
        break;
    case ROUTER_DROP_LATE:
        break;
    case ROUTER_DROP_STRANGER:
        if (server_rate(server, &server->strangers, &n_quiet))
            LOG_WARNING("a message on the data socket is from no registered process: dropped (%llu more)",
                        (unsigned long long)n_quiet);
        break;
    case ROUTER_DROP_GARBAGE:
        if (server_rate(server, &server->garbage, &n_quiet))
            LOG_WARNING("a message on the data socket is no descriptor of its sender: dropped (%llu more)",
                        (unsigned long long)n_quiet);
        break;
    }
}

void data_receive(struct server *server)
{
    for (int i = 0; i < ROUND_MESSAGES; i++) {
        struct socket_message *message;
        int result = socket_receive(server->data_socket, false, &message);
        if (result == -EMSGSIZE)
            continue;
        if (result != 0)
            return;
        receive_one(server, message);
        socket_message_free(message);
    }
}

void data_retry(struct server *server)
{
    for (uint32_t n = router_n_held(server->router); n > 0; n--) {
        struct descriptor descriptor;
        uint64_t expires_us;
        bool expired;
        if (!router_take_held(server->router, server->now_us, &descriptor, &expired, &expires_us))
            return;
        if (expired)
            give_up(server, &descriptor);
        else if (send_to(server, descriptor.to, &descriptor) != 0)
            router_put_back(server->router, &descriptor, expires_us);
    }
}
