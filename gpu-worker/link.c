#include "gpu-worker/link.h"

#include <errno.h>
#include <unistd.h>

#include "common/clock.h"

int link_open(struct link *link, uint64_t route, const char *endpoint)
{
    link_close(link);
    struct socket *socket;
    int r = socket_new_dealer(link->context, route, 0, &socket);
    if (r < 0)
        return r;
    r = socket_connect(socket, endpoint);
    if (r < 0) {
        socket_free(socket);
        return r;
    }
    link->socket = socket;
    link->route = route;
    return 0;
}

void link_close(struct link *link)
{
    link->socket = socket_free(link->socket);
}

int link_send(struct link *link, uint64_t to, uint64_t request, uint32_t slot, uint32_t n_bytes)
{
    if (link->socket == NULL)
        return -ENOTCONN;
    struct descriptor descriptor = {
        .magic = DESCRIPTOR_MAGIC,
        .version = DESCRIPTOR_VERSION,
        .kind = DESCRIPTOR_REQUEST,
        .to = to,
        .from = link->route,
        .request = request,
        .worker = link->worker,
        .slot = slot,
        .n_bytes = n_bytes,
        .remaining_us = (uint32_t)link->request_timeout_us,
    };
    struct frame frame = {.data = &descriptor, .n_bytes = sizeof(descriptor)};
    return socket_send(link->socket, &frame, 1, false);
}

static int receive(struct link *link, struct descriptor *ret_descriptor)
{
    struct socket_message *message;
    int r = socket_receive(link->socket, false, &message);
    if (r < 0)
        return 0; /* none, or nothing that could be for us */
    r = message->n_frames == 1 ? descriptor_check(message->frames[0].data, message->frames[0].n_bytes, ret_descriptor)
                               : -EPROTO;
    socket_message_free(message);
    return r == 0 && ret_descriptor->kind == DESCRIPTOR_REPLY;
}

int link_wait(struct link *link, uint64_t deadline_us, struct descriptor *ret_descriptor)
{
    if (link->socket != NULL && receive(link, ret_descriptor) == 1)
        return 1;
    struct socket_item items[2] = {
        {.fd = link->wake_fd, .events = SOCKET_READABLE},
        {.socket = link->socket, .fd = -1, .events = SOCKET_READABLE},
    };
    int n = socket_poll(items, 2, clock_remaining_ms(deadline_us));
    if (n <= 0)
        return 0;
    if ((items[0].ready & SOCKET_READABLE) != 0) {
        uint64_t count;
        if (read(link->wake_fd, &count, sizeof(count)) < 0 && errno != EAGAIN)
            return -errno;
        int r = link->control(link->engine);
        if (r < 0)
            return r;
    }
    if (link->socket == NULL || (items[1].ready & SOCKET_READABLE) == 0)
        return 0;
    return receive(link, ret_descriptor);
}

int link_wait_bell(struct link *link, struct bell *bell, const _Atomic uint64_t *answered, uint64_t request,
                   uint64_t deadline_us, struct descriptor *ret_descriptor)
{
    enum { SLICE_US = 5000 }; /* asleep on the bell, between looks at what else may have come */
    uint32_t seen = bell_count(bell);
    uint64_t slice = clock_deadline_us(SLICE_US);
    if (atomic_load_explicit(answered, memory_order_acquire) == request)
        return 0;
    int r = bell_wait(bell, seen, deadline_us < slice ? deadline_us : slice, link->spin_us);
    if (r == 0 && !atomic_load_explicit(link->has_control, memory_order_relaxed))
        return 0;
    return link_wait(link, 0, ret_descriptor);
}
