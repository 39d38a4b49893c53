#include "coordinator/router.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>

struct held {
    struct descriptor descriptor;
    uint64_t expires_us;
};

struct router {
    uint32_t n_routes;
    struct {
        uint64_t route;
        enum router_side side;
    } routes[ROUTER_MAX_ROUTES];
    uint32_t first_held, n_held; /* a ring, oldest first */
    struct held held[ROUTER_MAX_HELD];
};

int router_new(struct router **ret_router)
{
    struct router *router = calloc(1, sizeof(*router));
    if (!router)
        return -ENOMEM;
    *ret_router = router;
    return 0;
}

struct router *router_free(struct router *router)
{
    free(router);
    return NULL;
}

static bool find(const struct router *router, uint64_t route, enum router_side *ret_side)
{
    for (uint32_t i = 0; i < router->n_routes; i++)
        if (router->routes[i].route == route) {
            *ret_side = router->routes[i].side;
            return true;
        }
    return false;
}

int router_add(struct router *router, uint64_t route, enum router_side side)
{
    enum router_side other;
    if (route == 0)
        return -EINVAL;
    if (find(router, route, &other))
        return -EEXIST;
    if (router->n_routes == ROUTER_MAX_ROUTES)
        return -ENOSPC;
    router->routes[router->n_routes].route = route;
    router->routes[router->n_routes++].side = side;
    return 0;
}

void router_remove(struct router *router, uint64_t route)
{
    for (uint32_t i = 0; i < router->n_routes; i++)
        if (router->routes[i].route == route) {
            router->routes[i] = router->routes[--router->n_routes];
            return;
        }
}

enum router_verdict router_judge(const struct router *router, uint64_t from, const void *bytes, size_t n_bytes,
                                 struct descriptor *ret_descriptor)
{
    enum router_side sender, receiver;
    if (!find(router, from, &sender))
        return ROUTER_DROP_STRANGER;
    struct descriptor descriptor;
    if (descriptor_check(bytes, n_bytes, &descriptor) != 0 || descriptor.from != from)
        return ROUTER_DROP_GARBAGE;
    bool is_request = descriptor.kind == DESCRIPTOR_REQUEST;
    if (is_request != (sender == ROUTER_WORKER))
        return ROUTER_DROP_GARBAGE;
    *ret_descriptor = descriptor;
    if (!find(router, descriptor.to, &receiver))
        return is_request ? ROUTER_RETURN : ROUTER_DROP_LATE;
    return receiver != sender ? ROUTER_FORWARD : ROUTER_DROP_GARBAGE;
}

struct descriptor router_returned(const struct descriptor *request, int32_t status)
{
    struct descriptor reply = *request;
    reply.kind = DESCRIPTOR_REPLY;
    reply.to = request->from;
    reply.from = request->to;
    reply.n_bytes = 0;
    reply.remaining_us = 0;
    reply.status = status;
    return reply;
}

int router_hold(struct router *router, const struct descriptor *descriptor, uint64_t now_us)
{
    if (router->n_held == ROUTER_MAX_HELD)
        return -ENOSPC;
    uint64_t patience_us = ROUTER_HOLD_US;
    if (descriptor->kind == DESCRIPTOR_REQUEST && descriptor->remaining_us < patience_us)
        patience_us = descriptor->remaining_us;
    router_put_back(router, descriptor, now_us + patience_us);
    return 0;
}

uint32_t router_n_held(const struct router *router)
{
    return router->n_held;
}

bool router_take_held(struct router *router, uint64_t now_us, struct descriptor *ret_descriptor, bool *ret_expired,
                      uint64_t *ret_expires_us)
{
    if (router->n_held == 0)
        return false;
    const struct held *held = &router->held[router->first_held];
    enum router_side side;
    *ret_descriptor = held->descriptor;
    *ret_expires_us = held->expires_us;
    *ret_expired = held->expires_us <= now_us || !find(router, held->descriptor.to, &side);
    router->first_held = (router->first_held + 1) % ROUTER_MAX_HELD;
    router->n_held--;
    return true;
}

void router_put_back(struct router *router, const struct descriptor *descriptor, uint64_t expires_us)
{
    assert(router->n_held < ROUTER_MAX_HELD); /* one was taken out before, or there was room */
    uint32_t last = (router->first_held + router->n_held) % ROUTER_MAX_HELD;
    router->held[last] = (struct held){*descriptor, expires_us};
    router->n_held++;
}
