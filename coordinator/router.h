/*
 * router.h - the data plane: may this descriptor travel, and where to?
 *
 * Owner      the server's thread; it sends. Only workers ask, only stores answer, only under the route they registered.
 * Invariant  a request is delivered, returned to its sender as a reply, or dropped because it is not one. Held
 *            descriptors (the target is registered and not reachable yet) are bounded in number and in time.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/descriptor.h"

#define ROUTER_MAX_ROUTES 256u
#define ROUTER_MAX_HELD   1024u
#define ROUTER_HOLD_US    2000000u /* longest; less where the sender's patience is less */

enum router_side { ROUTER_WORKER, ROUTER_STORE };

enum router_verdict {
    ROUTER_FORWARD, /* to descriptor.to */
    ROUTER_RETURN,  /* a request for nobody: answer the sender */
    ROUTER_DROP_GARBAGE,
    ROUTER_DROP_STRANGER, /* the sender is not registered */
    ROUTER_DROP_LATE,     /* a reply to a worker that is gone */
};

struct router;

int router_new(struct router **ret_router);
struct router *router_free(struct router *router); /* accepts NULL, returns NULL */

int router_add(struct router *router, uint64_t route, enum router_side side); /* -EEXIST, -ENOSPC, -EINVAL route 0 */
void router_remove(struct router *router, uint64_t route);

enum router_verdict router_judge(const struct router *router, uint64_t from, const void *bytes, size_t n_bytes,
                                 struct descriptor *ret_descriptor);

/* The reply that says that `request` could not be delivered. */
struct descriptor router_returned(const struct descriptor *request, int32_t status);

/* Keeps a descriptor to be tried again. -ENOSPC. */
int router_hold(struct router *router, const struct descriptor *descriptor, uint64_t now_us);
uint32_t router_n_held(const struct router *router);
/* Takes the oldest held one out; *ret_expired: its time is over (or its target is gone). false: none. */
bool router_take_held(struct router *router, uint64_t now_us, struct descriptor *ret_descriptor, bool *ret_expired,
                      uint64_t *ret_expires_us);
/* Puts it back, to expire as before. */
void router_put_back(struct router *router, const struct descriptor *descriptor, uint64_t expires_us);
