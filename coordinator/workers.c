/* workers.c - workers: their model, their exchanges with the stores, work sent to them and what they answer. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/log.h"
#include "coordinator/state.h"

#define ROUND_MESSAGES 256 /* before the data plane has its turn */

/* ---- registration ---- */

static bool same_model(const struct process *a, const uint64_t hash[2], const struct row_shape *shape)
{
    return memcmp(a->model, hash, sizeof(a->model)) == 0 && memcmp(&a->shape, shape, sizeof(a->shape)) == 0;
}

bool workers_accept_model(struct server *server, const struct process *given, char error[REGISTRY_ERROR_BYTES])
{
    uint64_t hash[2];
    if (sessions_model(server->sessions, hash) && memcmp(hash, given->model, sizeof(hash)) != 0) {
        snprintf(
            error, REGISTRY_ERROR_BYTES,
            "gpu-worker %u has model %.100s, but %u sessions of another model live in the value-stores: close them "
            "first",
            given->index, given->model_name, sessions_count(server->sessions));
        return false;
    }
    if (stores_sessions_of_other_shape(server, &given->shape)) {
        snprintf(
            error, REGISTRY_ERROR_BYTES,
            "gpu-worker %u has model %.100s with rows of another shape or codec than those of the %u sessions that "
            "live in the value-stores: close them first",
            given->index, given->model_name, sessions_count(server->sessions));
        return false;
    }
    uint32_t cursor = 0;
    for (struct process *other; (other = registry_next(server->registry, &cursor));) {
        if (other->role != PROCESS_WORKER || other->index == given->index || other->state == PROCESS_DEAD ||
            same_model(other, given->model, &given->shape))
            continue;
        if (memcmp(other->model, given->model, sizeof(other->model)) == 0)
            snprintf(error, REGISTRY_ERROR_BYTES,
                     "gpu-worker %u has model %.100s with rows of another shape or codec than gpu-worker %u has",
                     given->index, given->model_name, other->index);
        else
            snprintf(error, REGISTRY_ERROR_BYTES,
                     "gpu-worker %u has model %.100s, but gpu-worker %u serves %.100s: one model at a time",
                     given->index, given->model_name, other->index, other->model_name);
        return false;
    }
    return true;
}

static void take_model(struct server *server, const struct process *worker)
{
    struct model *model = &server->model;
    bool same = model->known && memcmp(model->hash, worker->model, sizeof(model->hash)) == 0;
    bool alone = true;
    uint32_t cursor = 0;
    for (struct process *other; (other = registry_next(server->registry, &cursor));)
        alone = alone && (other == worker || other->role != PROCESS_WORKER || other->state == PROCESS_DEAD);
    uint32_t n_ctx = same && !alone && model->n_ctx < worker->n_ctx ? model->n_ctx : worker->n_ctx;
    *model = (struct model){.known = true,
                            .shape = worker->shape,
                            .hash = {worker->model[0], worker->model[1]},
                            .n_ctx = n_ctx,
                            .device_bytes_per_token = worker->device_bytes_per_token};
    snprintf(model->name, sizeof(model->name), "%s", worker->model_name);
}

void workers_registered(struct server *server, struct process *process)
{
    flow_worker_lost(server, process->incarnation, false); /* an earlier connection's runs were dropped by it */
    take_model(server, process);
    process->pairs = 0;
    stores_reformat(server);
    stores_tell_worker(server, process);
}

/* ---- exchanges ---- */

static uint32_t n_ready(const struct server *server)
{
    uint32_t n = 0, cursor = 0;
    for (const struct process *worker; (worker = registry_next(server->registry, &cursor));)
        n += worker->role == PROCESS_WORKER && worker->state == PROCESS_READY;
    return n;
}

void workers_exchange(struct server *server, struct process *worker, const Hcattn__Control__Exchange *message, int fd)
{
    struct process *store = stores_ready(server, message->store);
    if (fd < 0 || !store || store->incarnation != message->store_incarnation ||
        worker->incarnation != message->worker_incarnation) {
        LOG_DEBUG("gpu-worker %u sent an exchange for a life of value-store %u that is over", worker->index,
                  message->store);
        if (fd >= 0)
            close(fd);
        return; /* StoreDown or another StoreUp is on its way to the worker */
    }
    control_exchange(server, peers_of(store), message, fd);
}

void workers_exchange_ready(struct server *server, struct process *store, const Hcattn__Control__ExchangeReady *message)
{
    struct process *worker = registry_find_incarnation(server->registry, PROCESS_WORKER, message->worker_incarnation);
    if (!worker || !peers_of(worker) || store->state != PROCESS_READY ||
        message->store_incarnation != store->incarnation)
        return;
    if (message->status != 0)
        LOG_ERROR("value-store %u did not take the exchange of gpu-worker %u: %s", store->index, worker->index,
                  strerror(message->status < 0 && message->status > -4096 ? -message->status : EPROTO));
    control_exchange_ready(server, peers_of(worker), store->index, worker->incarnation, store->incarnation,
                           message->status);
    if (message->status != 0)
        return;
    worker->pairs |= UINT64_C(1) << store->index;
    rings_pair(server, worker, store);
    membership_promote(server);
    workers_judge(server);
    server->dirty = true;
}

void workers_judge(struct server *server)
{
    uint32_t cursor = 0;
    for (struct process *worker; (worker = registry_next(server->registry, &cursor));) {
        if (worker->role != PROCESS_WORKER || worker->state != PROCESS_STARTING || !worker->pairs ||
            server->members & ~server->leaving & ~worker->pairs)
            continue;
        (void)registry_move(worker, PROCESS_READY, server->now_us);
        LOG_INFO("gpu-worker %u is ready (%u of %u): model %s, %d stores", worker->index, n_ready(server),
                 server->options.n_workers, worker->model_name, __builtin_popcountll(server->members));
    }
}

/* ---- death ---- */

void workers_hung_up(struct server *server, struct process *process)
{
    router_remove(server->router, process->data_route);
    workers_drop_packets(server, process->work_route);
    process->pairs = 0;
    for (uint32_t i = 0; i < SERVER_MAX_STORES; i++)
        rings_drop(server, process->incarnation, i);
    flow_worker_hung_up(server, process->incarnation);
}

void workers_died(struct server *server, struct process *process)
{
    workers_hung_up(server, process);
    for (uint32_t i = 0; i < SERVER_MAX_STORES; i++) {
        struct peer *peer = peers_of(registry_find(server->registry, PROCESS_STORE, i));
        if (peer)
            control_worker_gone(server, peer, process->incarnation);
    }
    flow_worker_lost(server, process->incarnation, true);
    membership_promote(server); /* it may have been the one that had not reached a store */
}

/* ---- work ---- */

bool workers_serves(const struct process *worker)
{
    return worker->role == PROCESS_WORKER && worker->state == PROCESS_READY && peers_of(worker) &&
           !peers_of(worker)->gone;
}

struct process *workers_pick(const struct server *server)
{
    struct process *best = NULL;
    uint32_t best_load = 0, cursor = 0;
    for (struct process *worker; (worker = registry_next(server->registry, &cursor));) {
        uint32_t load = workers_serves(worker) ? requests_count_at(server->requests, worker->incarnation) : 0;
        if (!workers_serves(worker) || (best && load >= best_load))
            continue;
        best = worker;
        best_load = load;
    }
    return best;
}

struct process *workers_holding(const struct server *server, const struct session *session)
{
    struct process *worker =
        session->worker ? registry_find_incarnation(server->registry, PROCESS_WORKER, session->worker) : NULL;
    return worker && !worker->replaced && worker->state != PROCESS_DEAD && worker->state != PROCESS_FENCING ? worker
                                                                                                            : NULL;
}

struct process *workers_bind(struct server *server, struct session *session)
{
    struct process *worker = workers_holding(server, session);
    if (worker)
        return workers_serves(worker) ? worker : NULL; /* it comes back, or its death is what is awaited */
    uint32_t best_load = 0, cursor = 0;
    for (struct process *other; (other = registry_next(server->registry, &cursor));) {
        uint32_t load = workers_serves(other) ? sessions_bound_to(server->sessions, other->incarnation) : 0;
        if (!workers_serves(other) ||
            (worker && (load > best_load || (load == best_load && other->index > worker->index))))
            continue;
        worker = other;
        best_load = load;
    }
    if (worker)
        session->worker = worker->incarnation;
    return worker;
}

static int send_bytes(struct server *server, uint64_t route, const void *bytes, size_t n_bytes)
{
    struct frame frames[2] = {socket_id_frame(&route), {bytes, n_bytes}};
    return socket_send(server->work_socket, frames, 2, false);
}

static bool has_packets(const struct server *server, uint64_t route)
{
    for (const struct work_packet *packet = server->first_work; packet; packet = packet->next)
        if (packet->route == route)
            return true;
    return false;
}

void workers_send(struct server *server, struct process *worker, const Hcattn__Work__WorkRequest *message)
{
    size_t n_bytes = hcattn__work__work_request__get_packed_size(message);
    struct work_packet *packet = malloc(sizeof(*packet) + n_bytes);
    if (!packet || server->n_work_packets >= MAX_WORK_PACKETS || server->n_work_bytes >= MAX_WORK_BYTES) {
        /* It looks like a worker that does not answer, and is treated so: cut off, and its work goes elsewhere. */
        LOG_ERROR("gpu-worker %u: no room for more work", worker->index);
        free(packet);
        if (peers_of(worker))
            peers_of(worker)->gone = true;
        return;
    }
    hcattn__work__work_request__pack(message, packet->bytes);
    int result = has_packets(server, worker->work_route)
                     ? -EAGAIN
                     : send_bytes(server, worker->work_route, packet->bytes, n_bytes);
    if (result == 0) {
        free(packet);
        return;
    }
    packet->next = NULL;
    packet->route = worker->work_route;
    packet->n_bytes = n_bytes;
    if (server->last_work)
        server->last_work->next = packet;
    else
        server->first_work = packet;
    server->last_work = packet;
    server->n_work_packets++;
    server->n_work_bytes += n_bytes;
}

void workers_retry(struct server *server)
{
    struct work_packet *before = NULL;
    uint64_t blocked[8];
    uint32_t n_blocked = 0;
    for (struct work_packet *packet = server->first_work, *next; packet; packet = next) {
        next = packet->next;
        bool is_blocked = n_blocked == 8; /* enough for one round */
        for (uint32_t i = 0; i < n_blocked; i++)
            is_blocked = is_blocked || blocked[i] == packet->route;
        if (is_blocked || send_bytes(server, packet->route, packet->bytes, packet->n_bytes) != 0) {
            if (!is_blocked)
                blocked[n_blocked++] = packet->route;
            before = packet;
            continue;
        }
        if (before)
            before->next = next;
        else
            server->first_work = next;
        if (server->last_work == packet)
            server->last_work = before;
        server->n_work_packets--;
        server->n_work_bytes -= packet->n_bytes;
        free(packet);
    }
}

void workers_drop_packets(struct server *server, uint64_t route)
{
    struct work_packet *before = NULL;
    for (struct work_packet *packet = server->first_work, *next; packet; packet = next) {
        next = packet->next;
        if (route != 0 && packet->route != route) {
            before = packet;
            continue;
        }
        if (before)
            before->next = next;
        else
            server->first_work = next;
        if (server->last_work == packet)
            server->last_work = before;
        server->n_work_packets--;
        server->n_work_bytes -= packet->n_bytes;
        free(packet);
    }
}

void workers_forget(struct server *server, uint64_t session)
{
    uint32_t cursor = 0;
    for (struct process *worker; (worker = registry_next(server->registry, &cursor));) {
        if (worker->role != PROCESS_WORKER || !peers_of(worker))
            continue;
        Hcattn__Work__Forget forget = HCATTN__WORK__FORGET__INIT;
        forget.session = session;
        Hcattn__Work__WorkRequest message = HCATTN__WORK__WORK_REQUEST__INIT;
        message.work = ++server->next_work;
        message.request_case = HCATTN__WORK__WORK_REQUEST__REQUEST_FORGET;
        message.forget = &forget;
        workers_send(server, worker, &message);
    }
}

void workers_count(struct server *server, struct process *worker, struct request *request)
{
    Hcattn__Work__Count count = HCATTN__WORK__COUNT__INIT;
    count.session = request->session_id;
    Hcattn__Work__WorkRequest message = HCATTN__WORK__WORK_REQUEST__INIT;
    flow_at_worker(server, request, worker, &message);
    message.request_case = HCATTN__WORK__WORK_REQUEST__REQUEST_COUNT;
    message.count = &count;
    workers_send(server, worker, &message);
}

void workers_stop(struct server *server, struct request *request)
{
    struct process *worker = registry_find_incarnation(server->registry, PROCESS_WORKER, request->worker);
    if (!worker || request->work == 0)
        return;
    Hcattn__Work__Stop stop = HCATTN__WORK__STOP__INIT;
    stop.work = request->work;
    Hcattn__Work__WorkRequest message = HCATTN__WORK__WORK_REQUEST__INIT;
    message.work = ++server->next_work;
    message.request_case = HCATTN__WORK__WORK_REQUEST__REQUEST_STOP;
    message.stop = &stop;
    workers_send(server, worker, &message);
}

/* ---- replies ---- */

static struct process *by_route(const struct server *server, uint64_t route)
{
    uint32_t cursor = 0;
    for (struct process *worker; (worker = registry_next(server->registry, &cursor));)
        if (worker->role == PROCESS_WORKER && worker->work_route == route && peers_of(worker))
            return worker;
    return NULL;
}

static void receive_one(struct server *server, const struct socket_message *message)
{
    uint64_t route, n_quiet;
    struct process *worker = NULL;
    if (message->n_frames == 2 && socket_id(&message->frames[0], &route) == 0)
        worker = by_route(server, route);
    if (!worker) {
        if (server_rate(server, &server->strangers, &n_quiet))
            LOG_WARNING("a message on the work socket is from no registered worker: dropped (%llu more)",
                        (unsigned long long)n_quiet);
        return;
    }
    Hcattn__Work__WorkReply *reply =
        hcattn__work__work_reply__unpack(NULL, message->frames[1].n_bytes, message->frames[1].data);
    if (!reply || reply->reply_case == HCATTN__WORK__WORK_REPLY__REPLY__NOT_SET) {
        if (server_rate(server, &server->garbage, &n_quiet))
            LOG_WARNING("gpu-worker %u sent what is no WorkReply: dropped (%llu more)", worker->index,
                        (unsigned long long)n_quiet);
    } else {
        struct request *request = requests_find_work(server->requests, worker->incarnation, reply->work);
        if (request)
            flow_work_reply(server, request, reply); /* otherwise it is late: of work that was given up */
    }
    if (reply)
        hcattn__work__work_reply__free_unpacked(reply, NULL);
}

void workers_receive(struct server *server)
{
    for (int i = 0; i < ROUND_MESSAGES; i++) {
        struct socket_message *message;
        int result = socket_receive(server->work_socket, false, &message);
        if (result == -EMSGSIZE)
            continue;
        if (result != 0)
            return;
        receive_one(server, message);
        socket_message_free(message);
    }
}
