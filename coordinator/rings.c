/*
 * rings.c - pairs of a worker and a store that do without the coordinator: granted, used, given up and revoked.
 *
 * A pair takes one step at a time, in this order: RingGrant (store), RingUse (worker); back: RingUse off (worker), RingRevoke
 * (store). So a worker never posts to a store that does not look, and nothing that was posted is left behind. Where a pair
 * stands is in `granted` and `used`; where it should be is the server's transport; it turns back half-way if that changes.
 *
 * Invariant  one entry a pair of lives whose exchange is ready; it goes with either of them, and late answers name nothing.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/log.h"
#include "coordinator/state.h"

enum step { STEP_NONE, STEP_GRANT, STEP_USE, STEP_GIVE_UP, STEP_REVOKE };

struct ring {
    struct ring *next;
    uint64_t worker, store_incarnation;
    uint32_t store;
    bool granted, used;
    bool refused; /* a step towards the ring failed: stays routed until the transport is set again */
    bool stuck;   /* a step away from it failed: stays where it is until then */
    enum step step;
    uint64_t sequence; /* of the step */
    char trouble[160];
};

static const struct {
    const char *words;
    bool at_worker;
} steps[] = {
    [STEP_NONE] = {"does nothing", false},           [STEP_GRANT] = {"look at the ring", false},
    [STEP_USE] = {"post to the ring", true},         [STEP_GIVE_UP] = {"give the ring up", true},
    [STEP_REVOKE] = {"leave the ring alone", false},
};

static struct process *worker_of(const struct server *server, const struct ring *ring)
{
    return registry_find_incarnation(server->registry, PROCESS_WORKER, ring->worker);
}

static void send_step(struct server *server, struct ring *ring)
{
    Hcattn__Control__RingGrant grant = HCATTN__CONTROL__RING_GRANT__INIT;
    Hcattn__Control__RingRevoke revoke = HCATTN__CONTROL__RING_REVOKE__INIT;
    Hcattn__Control__RingUse use = HCATTN__CONTROL__RING_USE__INIT;
    Hcattn__Control__Control control = HCATTN__CONTROL__CONTROL__INIT;
    struct peer *peer =
        peers_of(steps[ring->step].at_worker ? worker_of(server, ring) : stores_ready(server, ring->store));
    switch (ring->step) {
    case STEP_GRANT:
        grant.sequence = ring->sequence;
        grant.worker_incarnation = ring->worker;
        control.message_case = HCATTN__CONTROL__CONTROL__MESSAGE_RING_GRANT;
        control.ring_grant = &grant;
        break;
    case STEP_REVOKE:
        revoke.sequence = ring->sequence;
        revoke.worker_incarnation = ring->worker;
        control.message_case = HCATTN__CONTROL__CONTROL__MESSAGE_RING_REVOKE;
        control.ring_revoke = &revoke;
        break;
    default:
        use.sequence = ring->sequence;
        use.store = ring->store;
        use.store_incarnation = ring->store_incarnation;
        use.ring = ring->step == STEP_USE;
        control.message_case = HCATTN__CONTROL__CONTROL__MESSAGE_RING_USE;
        control.ring_use = &use;
        break;
    }
    control_send(server, peer, &control, -1); /* without a peer the pair is about to go, too */
}

static enum step next_step(const struct server *server, const struct ring *ring)
{
    if (ring->stuck)
        return STEP_NONE;
    if (server->transport == SERVER_RING && !ring->refused)
        return !ring->granted ? STEP_GRANT : !ring->used ? STEP_USE : STEP_NONE;
    return ring->used ? STEP_GIVE_UP : ring->granted ? STEP_REVOKE : STEP_NONE;
}

static void advance(struct server *server, struct ring *ring)
{
    if (ring->step != STEP_NONE)
        return;
    ring->step = next_step(server, ring);
    if (ring->step == STEP_NONE)
        return;
    ring->sequence = ++server->next_sequence;
    send_step(server, ring);
}

void rings_pair(struct server *server, const struct process *worker, const struct process *store)
{
    rings_drop(server, worker->incarnation, store->index);
    struct ring *ring = calloc(1, sizeof(*ring));
    if (!ring) {
        LOG_ERROR("gpu-worker %u and value-store %u stay routed: out of memory", worker->index, store->index);
        return;
    }
    ring->worker = worker->incarnation;
    ring->store = store->index;
    ring->store_incarnation = store->incarnation;
    ring->next = server->first_ring;
    server->first_ring = ring;
    advance(server, ring);
}

void rings_drop(struct server *server, uint64_t worker, uint32_t store)
{
    for (struct ring **at = &server->first_ring; *at; at = &(*at)->next) {
        struct ring *ring = *at;
        if (ring->worker != worker || ring->store != store)
            continue;
        *at = ring->next;
        free(ring);
        server->dirty = true; /* a SetTransport may have waited for it */
        return;
    }
}

static void took(struct ring *ring)
{
    switch (ring->step) {
    case STEP_GRANT:
        ring->granted = true;
        break;
    case STEP_USE:
        ring->used = true;
        break;
    case STEP_GIVE_UP:
        ring->used = false;
        break;
    default:
        ring->granted = false;
        break;
    }
}

static void refused(const struct server *server, struct ring *ring, const Hcattn__Control__Done *message)
{
    const struct process *worker = worker_of(server, ring);
    int status = message->status;
    bool forth = ring->step == STEP_GRANT || ring->step == STEP_USE;
    ring->refused = ring->refused || forth;
    ring->stuck = ring->stuck || !forth;
    snprintf(ring->trouble, sizeof(ring->trouble), "gpu-worker %u and value-store %u: the %s did not %s: %s",
             worker ? worker->index : 0, ring->store, steps[ring->step].at_worker ? "worker" : "store",
             steps[ring->step].words,
             message->sentence[0] ? message->sentence : strerror(status < 0 && status > -4096 ? -status : EPROTO));
    LOG_ERROR("%s", ring->trouble);
}

bool rings_done(struct server *server, const struct process *process, const Hcattn__Control__Done *message)
{
    for (struct ring *ring = server->first_ring; ring; ring = ring->next) {
        bool by_worker = steps[ring->step].at_worker;
        if (ring->step == STEP_NONE || ring->sequence != message->sequence ||
            (by_worker ? process->role != PROCESS_WORKER || process->incarnation != ring->worker
                       : process->role != PROCESS_STORE || process->index != ring->store ||
                             process->incarnation != ring->store_incarnation))
            continue;
        if (message->status == 0)
            took(ring);
        else
            refused(server, ring, message);
        ring->step = STEP_NONE;
        advance(server, ring);
        server->dirty = true;
        return true;
    }
    return false;
}

void rings_follow(struct server *server)
{
    for (struct ring *ring = server->first_ring; ring; ring = ring->next) {
        ring->refused = ring->stuck = false;
        ring->trouble[0] = 0;
        advance(server, ring);
    }
    server->dirty = true;
}

bool rings_settled(const struct server *server, char *sentence, size_t sentence_size)
{
    for (const struct ring *ring = server->first_ring; ring; ring = ring->next) {
        const struct process *worker = worker_of(server, ring);
        if (ring->step == STEP_NONE)
            continue;
        snprintf(sentence, sentence_size, "gpu-worker %u and value-store %u: the %s did not %s yet",
                 worker ? worker->index : 0, ring->store, steps[ring->step].at_worker ? "worker" : "store",
                 steps[ring->step].words);
        return false;
    }
    return true;
}

bool rings_failed(const struct server *server, char *sentence, size_t sentence_size)
{
    for (const struct ring *ring = server->first_ring; ring; ring = ring->next)
        if (ring->refused || ring->stuck) {
            snprintf(sentence, sentence_size, "%s", ring->trouble);
            return true;
        }
    return false;
}

void rings_free_all(struct server *server)
{
    while (server->first_ring) {
        struct ring *ring = server->first_ring;
        server->first_ring = ring->next;
        free(ring);
    }
}
