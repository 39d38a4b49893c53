/* stores.c - the life of a store's segment: formatted, adopted, found again, told to the workers, taken away. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/log.h"
#include "coordinator/rebuild.h"
#include "coordinator/state.h"

struct process *stores_ready(const struct server *server, uint32_t store)
{
    struct process *process = registry_find(server->registry, PROCESS_STORE, store);
    return process && process->state == PROCESS_READY ? process : NULL;
}

uint64_t stores_ready_mask(const struct server *server)
{
    uint64_t mask = 0;
    for (uint32_t i = 0; i < SERVER_MAX_STORES; i++)
        if (stores_ready(server, i))
            mask |= UINT64_C(1) << i;
    return mask;
}

bool stores_all_ready(const struct server *server)
{
    return (server->members & ~server->leaving & ~stores_ready_mask(server)) == 0;
}

static int add_to_placement(struct server *server, uint32_t store)
{
    const struct segment_view *view = descriptors_view(server->descriptors, store);
    uint32_t *generations = calloc(view->header.n_blocks + 1u, sizeof(uint32_t));
    if (!generations)
        return -ENOMEM;
    for (uint32_t i = 0; i < view->header.n_blocks; i++)
        generations[i] = descriptors_block(view, i)->handle.generation;
    int result =
        placement_add_store(server->placement, store, view->header.n_blocks, view->header.block_bytes, generations);
    free(generations);
    return result;
}

static void tell_worker(struct server *server, struct process *worker, uint32_t store)
{
    struct peer *peer = peers_of(worker);
    int fd;
    if (!peer)
        return;
    int result = descriptors_readonly(server->descriptors, store, &fd);
    if (result != 0) {
        LOG_ERROR("value-store %u: its segment cannot be opened for worker %u: %s", store, worker->index,
                  strerror(-result));
        return;
    }
    control_store_up(server, peer, store, server->stores[store].incarnation, server->stores[store].route, fd);
}

void stores_tell_worker(struct server *server, struct process *worker)
{
    for (uint32_t i = 0; i < SERVER_MAX_STORES; i++)
        if (stores_ready(server, i))
            tell_worker(server, worker, i);
}

/* ---- sessions in a segment ---- */

void stores_close_broken(struct server *server, struct session *session, const char *reason)
{
    LOG_WARNING("session %016llx is broken and will be closed: %s", (unsigned long long)session->id, reason);
    session->close_wanted = true;
    session->close_why = "broken";
    if (session->request)
        flow_session_lost(server, session->request, reason);
    server->dirty = true;
}

/* Records that say where lanes were before a move are written anew; what lies in other stores than it should is freed. */
static int tidy(struct server *server, const struct rebuild_verdict *verdict)
{
    struct session *session = verdict->session;
    uint64_t stores = sessions_lane_stores(session->terms.lane_store);
    int result = 0;
    if (session->outdated & stores)
        result = orders_open(server, session);
    for (uint32_t store = 0; result == 0 && store < SERVER_MAX_STORES; store++) {
        uint32_t lanes = verdict->stray_lanes[store];
        if (!(stores >> store & 1u) ? !((session->records >> store & 1u) || lanes) : !lanes)
            continue;
        result = orders_move_release(server, session, store, stores >> store & 1u ? lanes : 0, verdict->strays,
                                     verdict->n_strays);
    }
    session->records &= stores;
    session->outdated = 0;
    return result;
}

void stores_judge(struct server *server)
{
    struct rebuild_verdict verdict;
    int result;
    if (!server->stores_given && (server->members & ~server->seen) != 0)
        return; /* a store that is still to come may know of a move that those here have not been told of */
    while ((result = rebuild_judge(server->sessions, stores_ready_mask(server),
                                   (server->members & ~stores_ready_mask(server)) == 0, &verdict)) == 0) {
        struct session *session = verdict.session;
        session->active_us = server->now_us;
        if (verdict.broken) {
            stores_close_broken(server, session, verdict.reason);
        } else {
            LOG_INFO("session %016llx found again: %llu tokens in %u blocks", (unsigned long long)session->id,
                     (unsigned long long)sessions_n_tokens(session, server->descriptors), session->n_blocks);
            if ((verdict.n_cut > 0 &&
                 orders_release_cut(server, session, verdict.release_from, verdict.cut, verdict.n_cut) != 0) ||
                tidy(server, &verdict) != 0)
                stores_close_broken(server, session, "out of memory");
        }
        free(verdict.cut);
        free(verdict.strays);
    }
    if (result == -ENOMEM)
        LOG_ERROR("out of memory while sessions were read from the stores");
}

/* A store came late with something of sessions that live without it (what a move left there, say): it is freed. */
static int release_leftovers(struct server *server, uint32_t store)
{
    uint32_t cursor = 0;
    int result = 0;
    for (struct session *session; result == 0 && (session = sessions_next(server->sessions, &cursor));) {
        if (session->state == SESSION_RECOVERING || (session->n_found == 0 && !(session->records >> store & 1u)))
            continue;
        struct placed_block *blocks = calloc(session->n_found + 1u, sizeof(*blocks));
        if (!blocks)
            return -ENOMEM;
        for (uint32_t i = 0; i < session->n_found; i++)
            blocks[i] = (struct placed_block){session->found[i].handle, session->found[i].store};
        result = orders_move_release(server, session, store, 0, blocks, session->n_found);
        free(blocks);
        session->n_found = 0;
        session->records &= ~(UINT64_C(1) << store);
    }
    return result;
}

/* Sessions of another model, or with rows of another shape, than the workers': they cannot use these rows and have to leave. */
static void check_model(struct server *server)
{
    uint64_t model[2];
    if (!server->model.known || !sessions_model(server->sessions, model) ||
        (memcmp(model, server->model.hash, sizeof(model)) == 0 &&
         !stores_sessions_of_other_shape(server, &server->model.shape)))
        return;
    uint32_t cursor = 0;
    for (struct process *worker; (worker = registry_next(server->registry, &cursor));) {
        struct peer *peer = worker->role == PROCESS_WORKER ? peers_of(worker) : NULL;
        char sentence[REGISTRY_ERROR_BYTES];
        snprintf(sentence, sizeof(sentence),
                 "model %s: the value-stores hold sessions of another model, or with rows of another shape or codec",
                 worker->model_name);
        if (!peer)
            continue;
        LOG_WARNING("gpu-worker %u is refused: %s", worker->index, sentence);
        control_refused(server, peer, sentence);
    }
    server->model.known = false;
}

static bool holds_sessions(const struct server *server, uint32_t store)
{
    uint32_t cursor = 0;
    for (struct session *session; (session = sessions_next(server->sessions, &cursor));)
        if (session->state != SESSION_CLOSING && session->state != SESSION_CLOSED &&
            sessions_stores(session) >> store & 1u)
            return true;
    return false;
}

bool stores_sessions_of_other_shape(const struct server *server, const struct row_shape *shape)
{
    for (uint32_t i = 0; i < SERVER_MAX_STORES; i++) {
        const struct segment_view *view = descriptors_view(server->descriptors, i);
        if (view && memcmp(&view->header.shape, shape, sizeof(*shape)) != 0 && holds_sessions(server, i))
            return true;
    }
    return false;
}

static bool in_use(const struct server *server, uint32_t store)
{
    uint32_t cursor = 0;
    for (struct session *session; (session = sessions_next(server->sessions, &cursor));)
        if (session->state != SESSION_CLOSED && (sessions_stores(session) >> store & 1u || moves_go_to(session, store)))
            return true;
    return false;
}

/* A store's segment is given up: what lay in it is gone. */
static void give_up_segment(struct server *server, uint32_t store, const char *reason)
{
    uint32_t cursor = 0;
    for (struct session *session; (session = sessions_next(server->sessions, &cursor));) {
        if (session->state != SESSION_CLOSING && session->state != SESSION_CLOSED && !session->close_wanted &&
            !moves_have_left(session, store) && sessions_stores(session) >> store & 1u)
            stores_close_broken(server, session, reason);
        sessions_forget_store(session, store);
        moves_forget_store(session, store);
    }
    orders_forget_store(server, store);
    placement_remove_store(server->placement, store);
    descriptors_drop(server->descriptors, store);
}

/* ---- states ---- */

void stores_check_table(struct server *server)
{
    /* a session may live in nothing but a store that is being drained */
    if (server->table_complete || !stores_all_ready(server) ||
        (!server->stores_given && server->members & ~server->seen))
        return;
    server->table_complete = true;
    server->dirty = true;
}

static void order_format(struct server *server, struct process *process)
{
    struct store *store = &server->stores[process->index];
    /* it is a later life than the one that left, also to a coordinator that finds it with what it makes now */
    membership_set(server, server->members, server->leaving, server->left & ~(UINT64_C(1) << process->index));
    store->order = ORDER_FORMAT;
    store->ordered = process->incarnation;
    control_format(server, peers_of(process), &server->model.shape);
}

static void serve(struct server *server, struct process *process)
{
    uint32_t number = process->index;
    struct store *store = &server->stores[number];
    const struct segment_view *view = descriptors_view(server->descriptors, number);
    store->trouble[0] = 0;
    if (server->model.known && memcmp(&view->header.shape, &server->model.shape, sizeof(struct row_shape)) != 0 &&
        !holds_sessions(server, number)) {
        give_up_segment(server, number, "its rows have another shape than the model");
        order_format(server, process);
        return;
    }
    (void)registry_move(process, PROCESS_READY, server->now_us);
    store->incarnation = store->told = process->incarnation;
    store->route = process->data_route;
    LOG_INFO("value-store %u is ready: %u blocks of %llu bytes, %u free", number, view->header.n_blocks,
             (unsigned long long)view->header.block_bytes, placement_n_free(server->placement, number));
    uint32_t cursor = 0;
    for (struct process *worker; (worker = registry_next(server->registry, &cursor));)
        if (worker->role == PROCESS_WORKER)
            tell_worker(server, worker, number);
    orders_resend(server, number);
    membership_promote(server);
    stores_check_table(server);
    stores_judge(server);
    check_model(server);
    server->dirty = true;
}

int stores_registered(struct server *server, struct process *process, bool holds_segment, int fd,
                      char error[REGISTRY_ERROR_BYTES])
{
    uint32_t number = process->index;
    if (!holds_segment) {
        if (fd >= 0)
            close(fd);
        membership_seen(server, number, false);
        stores_judge(server); /* some may have waited for what it would bring */
        return 0;
    }
    bool known = fd >= 0 && descriptors_same(server->descriptors, number, fd);
    int result = fd >= 0 ? 0 : -EPROTO;
    if (result == 0 && !known && descriptors_view(server->descriptors, number) && in_use(server, number))
        result = -EEXIST;
    if (result == 0 && registry_predecessor_alive(server->registry, process))
        result = -EBUSY;
    if (result == 0)
        result = descriptors_keep(server->descriptors, number, process->incarnation, fd);
    if (result != 0) {
        if (fd >= 0)
            close(fd);
        snprintf(error, REGISTRY_ERROR_BYTES, "value-store %u: its segment is not taken: %s", number,
                 result == -EEXIST                         ? "another one is in use for this store"
                 : result == -EBUSY                        ? "an earlier life of this store is not known dead"
                 : result == -EPROTO || result == -EBADMSG ? "it is none, or of another layout, store or owner"
                                                           : strerror(-result));
        return result;
    }
    if (server->left >> number & 1u) /* it was not told any more that it may go: nothing in it counts */
        server->stores[number].left = 0;
    else if (!known) {
        result = add_to_placement(server, number);
        if (result == 0)
            result = rebuild_store(server->sessions, server->placement, number,
                                   descriptors_view(server->descriptors, number));
        if (result == 0)
            result = release_leftovers(server, number);
        if (result != 0) {
            snprintf(error, REGISTRY_ERROR_BYTES, "value-store %u: its segment cannot be read: %s", number,
                     strerror(-result));
            return result;
        }
    }
    membership_seen(server, number, true);
    return 0;
}

void stores_check(struct server *server, struct process *process)
{
    uint32_t number = process->index;
    struct store *store = &server->stores[number];
    if (process->state != PROCESS_STARTING || store->order != ORDER_NONE || !peers_of(process))
        return;
    if (registry_predecessor_alive(server->registry, process)) {
        snprintf(store->trouble, sizeof(store->trouble), "waits until its earlier life is known dead");
        return;
    }
    uint64_t owner = descriptors_owner(server->descriptors, number);
    if (store->left == process->incarnation)
        return; /* it ends */
    if (server->left >> number & 1u && owner == process->incarnation) {
        stores_leave(server, number);
        return;
    }
    if (owner == process->incarnation) {
        serve(server, process); /* it came with its segment */
        return;
    }
    if (owner != 0) {
        int fd;
        int result = descriptors_hand_over(server->descriptors, number, &fd);
        if (result != 0) {
            snprintf(store->trouble, sizeof(store->trouble), "its segment cannot be handed over: %s",
                     strerror(-result));
            return;
        }
        store->order = ORDER_ADOPT;
        store->ordered = process->incarnation;
        snprintf(store->trouble, sizeof(store->trouble), "adopts its segment");
        control_adopt(server, peers_of(process), owner, fd);
    } else if (server->model.known) {
        snprintf(store->trouble, sizeof(store->trouble), "formats its segment");
        order_format(server, process);
    } else {
        snprintf(store->trouble, sizeof(store->trouble), "waits for a worker's row shape");
    }
}

void stores_check_all(struct server *server)
{
    for (uint32_t i = 0; i < SERVER_MAX_STORES; i++) {
        struct process *process = registry_find(server->registry, PROCESS_STORE, i);
        if (process)
            stores_check(server, process);
    }
}

static void order_failed(struct server *server, struct process *process, enum store_order order, const char *sentence)
{
    uint32_t number = process->index;
    struct store *store = &server->stores[number];
    LOG_ERROR("value-store %u could not %s its segment: %s", number, order == ORDER_FORMAT ? "make" : "adopt",
              sentence);
    snprintf(store->trouble, sizeof(store->trouble), "%s", sentence);
    if (order == ORDER_FORMAT)
        return;
    give_up_segment(server, number, "its segment could not be adopted");
    stores_check(server, process);
    server->dirty = true;
}

static void check_adopted(struct server *server, uint32_t number)
{
    const struct segment_view *view = descriptors_view(server->descriptors, number);
    for (uint32_t i = 0; i < view->header.n_blocks; i++) /* a store that mends headers raises generations */
        placement_raise(server->placement, number, i, descriptors_block(view, i)->handle.generation);
    uint32_t cursor = 0;
    for (struct session *session; (session = sessions_next(server->sessions, &cursor));)
        if ((session->state == SESSION_READY || session->state == SESSION_RUNNING) && !session->close_wanted) {
            if (!moves_have_left(session, number) && !rebuild_still_whole(session, number, view))
                stores_close_broken(server, session, "the store that adopted its blocks found them damaged");
        }
}

void stores_segment_ready(struct server *server, struct process *process, const Hcattn__Control__SegmentReady *message,
                          int fd)
{
    uint32_t number = process->index;
    struct store *store = &server->stores[number];
    enum store_order order = store->order;
    if (order == ORDER_NONE || store->ordered != process->incarnation || process->state != PROCESS_STARTING) {
        LOG_WARNING("value-store %u says that a segment is ready that nobody asked for", number);
        if (fd >= 0)
            close(fd);
        return;
    }
    store->order = ORDER_NONE;
    int result = message->status != 0 ? message->status : fd < 0 ? -EPROTO : 0;
    if (result == 0)
        result = descriptors_keep(server->descriptors, number, process->incarnation, fd);
    if (result != 0) {
        if (fd >= 0)
            close(fd);
        char sentence[256];
        if (message->sentence[0])
            snprintf(sentence, sizeof(sentence), "%s", message->sentence);
        else
            snprintf(sentence, sizeof(sentence), "%s", strerror(result < 0 && result > -4096 ? -result : EPROTO));
        order_failed(server, process, order, sentence);
        return;
    }
    if (order == ORDER_FORMAT && (result = add_to_placement(server, number)) != 0) {
        descriptors_drop(server->descriptors, number);
        order_failed(server, process, order, strerror(-result));
        return;
    }
    process->numa_node = message->numa_node;
    if (message->achieved[0])
        snprintf(process->achieved, sizeof(process->achieved), "%s", message->achieved);
    if (order == ORDER_ADOPT)
        check_adopted(server, number);
    serve(server, process);
}

/* Nothing may be sent to it any more. for_good: nor will anything in its segment be read. */
static void down(struct server *server, uint32_t number, bool for_good)
{
    struct store *store = &server->stores[number];
    uint32_t cursor = 0;
    for (struct process *worker; (worker = registry_next(server->registry, &cursor));) {
        if (worker->role != PROCESS_WORKER)
            continue;
        worker->pairs &= ~(UINT64_C(1) << number);
        rings_drop(server, worker->incarnation, number);
        if ((store->route != 0 || for_good) && peers_of(worker))
            control_store_down(server, peers_of(worker), number, store->told, for_good);
    }
    store->route = store->incarnation = 0;
    orders_unsent(server, number);
    moves_store_down(server, number);
}

void stores_hung_up(struct server *server, struct process *process)
{
    struct store *store = &server->stores[process->index];
    router_remove(server->router, process->data_route);
    if (store->ordered == process->incarnation)
        store->order = ORDER_NONE;
    if (store->incarnation == process->incarnation)
        down(server, process->index, false);
}

void stores_died(struct server *server, struct process *process)
{
    stores_hung_up(server, process);
    descriptors_owner_died(server->descriptors, process->index, process->incarnation);
    orders_resend(server, process->index); /* what others copy from it may be copied now */
    stores_check_all(server);
}

void stores_leave(struct server *server, uint32_t number)
{
    struct store *store = &server->stores[number];
    struct process *process = registry_find(server->registry, PROCESS_STORE, number);
    bool lives = process && process->state != PROCESS_DEAD;
    down(server, number, true);
    orders_forget_store(server, number);
    placement_remove_store(server->placement, number);
    descriptors_drop(server->descriptors, number);
    store->order = ORDER_NONE;
    store->left = lives ? process->incarnation : 0;
    store->trouble[0] = 0;
    if (lives && process->state == PROCESS_READY)
        (void)registry_move(process, PROCESS_STARTING, server->now_us);
    /* The supervisor first: it must not start a process again that is killed while it leaves. */
    const struct process self = {.role = PROCESS_STORE, .index = number};
    struct peer *supervisor = peers_of(registry_supervisor_of(server->registry, &self));
    if (supervisor)
        control_leave(server, supervisor);
    if (lives && peers_of(process))
        control_leave(server, peers_of(process));
    server->dirty = true;
}

void stores_reformat(struct server *server)
{
    for (uint32_t i = 0; i < SERVER_MAX_STORES; i++) {
        const struct segment_view *view = descriptors_view(server->descriptors, i);
        if (!view || memcmp(&view->header.shape, &server->model.shape, sizeof(struct row_shape)) == 0)
            continue;
        struct process *process = registry_find(server->registry, PROCESS_STORE, i);
        if (process && process->state == PROCESS_READY) {
            down(server, i, false);
            (void)registry_move(process, PROCESS_STARTING, server->now_us);
        }
        give_up_segment(server, i, "the model has another row shape");
    }
    stores_check_all(server);
}
