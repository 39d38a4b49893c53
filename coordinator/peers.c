/* peers.c - connections of the peer socket: who may register, what they say, and the news of their death. */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common/log.h"
#include "common/peer.h"
#include "coordinator/state.h"

#define ROUND_MESSAGES  64 /* of one peer before the others have their turn */
#define ACCEPT_PAUSE_US 200000u

static const char *name_of(const struct process *process, char text[64])
{
    enum process_role role = process->role == PROCESS_SUPERVISOR ? process->supervises : process->role;
    snprintf(text, 64, "%s%s %u [%016llx]", process->role == PROCESS_SUPERVISOR ? "supervisor of " : "",
             registry_role_name(role), process->index, (unsigned long long)process->incarnation);
    return text;
}

struct peer *peers_of(const struct process *process)
{
    return process ? process->connection : NULL;
}

void peers_accept(struct server *server)
{
    int fd, result;
    while ((result = peer_accept(server->listener, &fd)) == 0) {
        pid_t pid = 0;
        uid_t uid = (uid_t)-1;
        struct peer *peer = NULL;
        if (peer_credentials(fd, &pid, &uid) != 0 || (uid != geteuid() && uid != 0))
            LOG_WARNING("a peer of uid %u is not let in", (unsigned)uid);
        else if (server->n_peers == MAX_PEERS)
            LOG_WARNING("%u peers are connected: another one is not let in", MAX_PEERS);
        else
            peer = calloc(1, sizeof(*peer));
        if (!peer) {
            close(fd);
            continue;
        }
        peer->fd = fd;
        peer->pid = pid;
        peer->since_us = server->now_us;
        server->peers[server->n_peers++] = peer;
    }
    if (result != -EAGAIN) /* no descriptors left: not again in a tight loop */
        server->accept_us = server->now_us + ACCEPT_PAUSE_US;
}

/* ---- death ---- */

static void process_died(struct server *server, struct process *process, const char *evidence)
{
    char name[64];
    LOG_WARNING("%s (pid %u) is dead: %s", name_of(process, name), process->own_pid, evidence);
    struct peer *peer = peers_of(process);
    if (peer) {
        peer->process = NULL;
        peer->gone = true;
        process->connection = NULL;
    }
    if (process->role == PROCESS_STORE)
        stores_died(server, process);
    else if (process->role == PROCESS_WORKER)
        workers_died(server, process);
    server->dirty = true;
    if (process->replaced) {
        registry_remove(server->registry, process);
        stores_check_all(server);
    }
}

static void tell_hung_up(struct server *server, struct process *process)
{
    if (process->role == PROCESS_STORE)
        stores_hung_up(server, process);
    else if (process->role == PROCESS_WORKER)
        workers_hung_up(server, process);
    server->dirty = true;
}

static void process_hung_up(struct server *server, struct process *process)
{
    char name[64];
    enum process_state before = process->state;
    enum process_state state = registry_hang_up(server->registry, process, server->now_us);
    if (state != PROCESS_DEAD && before != PROCESS_FENCING)
        LOG_INFO("%s hung up", name_of(process, name));
    tell_hung_up(server, process);
    if (process->role == PROCESS_SUPERVISOR) /* it tells everything again when it comes back */
        registry_remove(server->registry, process);
    else if (state == PROCESS_DEAD)
        process_died(server, process, "its connection hung up");
    for (struct process *orphan; (orphan = registry_next_orphan(server->registry, server->now_us));)
        process_died(server, orphan, "its connection and its supervisor's hung up");
}

void peers_check_pidfds(struct server *server, struct process *process)
{
    struct pollfd item = {.fd = process->pidfd, .events = POLLIN};
    if (process->pidfd < 0 || poll(&item, 1, 0) <= 0)
        return;
    close(process->pidfd);
    process->pidfd = -1;
    if (process->role == PROCESS_SUPERVISOR) { /* its hang-up says the same */
        struct peer *peer = peers_of(process);
        if (peer)
            peer->gone = true;
        else
            registry_remove(server->registry, process);
        return;
    }
    if (registry_died(process, server->now_us))
        process_died(server, process, "the process has ended");
}

static void child_dead(struct server *server, struct process *supervisor, const Hcattn__Control__ChildDead *message)
{
    if (supervisor->child == message->incarnation)
        supervisor->child = 0;
    struct process *process = registry_find_incarnation(server->registry, supervisor->supervises, message->incarnation);
    if (!process || process->index != supervisor->index)
        return; /* it never said Hello to this coordinator */
    char evidence[64];
    snprintf(evidence, sizeof(evidence), "its supervisor says so (wait status %d)", message->exit_status);
    if (registry_died(process, server->now_us))
        process_died(server, process, evidence);
}

/* ---- registration ---- */

static bool role_of(Hcattn__Control__Role role, enum process_role *ret_role)
{
    switch (role) {
    case HCATTN__CONTROL__ROLE__VALUE_STORE:
        *ret_role = PROCESS_STORE;
        return true;
    case HCATTN__CONTROL__ROLE__GPU_WORKER:
        *ret_role = PROCESS_WORKER;
        return true;
    case HCATTN__CONTROL__ROLE__SUPERVISOR:
        *ret_role = PROCESS_SUPERVISOR;
        return true;
    case HCATTN__CONTROL__ROLE__COORDINATOR:
        *ret_role = PROCESS_COORDINATOR;
        return true;
    default:
        return false;
    }
}

/* 0, or -EINVAL with what is wrong with it. */
static int read_hello(const struct peer *peer, const Hcattn__Control__Hello *hello, struct process *ret_given,
                      char error[REGISTRY_ERROR_BYTES])
{
    struct process given = {.index = hello->index,
                            .incarnation = hello->incarnation,
                            .pid = peer->pid,
                            .own_pid = hello->pid,
                            .pidfd = -1,
                            .data_route = hello->data_route,
                            .work_route = hello->work_route,
                            .numa_node = hello->numa_node,
                            .memory_bytes = hello->memory_bytes,
                            .home_node = hello->home_node,
                            .node_cores = hello->node_cores,
                            .model = {hello->model_hash_low, hello->model_hash_high},
                            .n_ctx = hello->n_ctx,
                            .weight_bytes = hello->weight_bytes,
                            .device_bytes_per_token = hello->device_bytes_per_token,
                            .device_budget_bytes = hello->device_budget_bytes,
                            .device_bytes = hello->device_base_bytes};
    snprintf(given.achieved, sizeof(given.achieved), "%s", hello->achieved);
    snprintf(given.model_name, sizeof(given.model_name), "%s", hello->model_name);
    if (hello->layout != LAYOUT_VERSION || strcmp(hello->version, HCATTN_VERSION) != 0) {
        snprintf(error, REGISTRY_ERROR_BYTES,
                 "program version %.32s with memory layout %u; this coordinator is version %s with layout %u",
                 hello->version, hello->layout, HCATTN_VERSION, LAYOUT_VERSION);
        return -EINVAL;
    }
    bool sound = role_of(hello->role, &given.role) && given.role != PROCESS_COORDINATOR;
    if (sound && given.role == PROCESS_SUPERVISOR)
        sound = role_of(hello->supervises, &given.supervises) && given.supervises != PROCESS_SUPERVISOR;
    if (sound && given.role == PROCESS_STORE)
        sound = given.data_route != 0;
    if (sound && given.role == PROCESS_WORKER) {
        sound = given.data_route != 0 && given.work_route != 0 && hello->shape != NULL && given.n_ctx > 0;
        if (hello->shape)
            given.shape = (struct row_shape){hello->shape->n_layers, hello->shape->n_kv_heads, hello->shape->head_dim,
                                             hello->shape->codec};
        sound = sound && layout_check_shape(&given.shape) == 0;
    }
    if (!sound) {
        snprintf(error, REGISTRY_ERROR_BYTES, "a Hello whose role, routes or row shape make no sense");
        return -EINVAL;
    }
    if (given.role == PROCESS_STORE && given.index >= SERVER_MAX_STORES) {
        snprintf(error, REGISTRY_ERROR_BYTES, "value-store %u: their numbers are 0 to %u", given.index,
                 SERVER_MAX_STORES - 1);
        return -EINVAL;
    }
    *ret_given = given;
    return 0;
}

/* A life that is in the way may be over already: its pidfd and socket say so before their turn in the loop comes. */
static void look_at_earlier_life(struct server *server, const struct process *given)
{
    uint32_t cursor = 0;
    for (struct process *other; (other = registry_next(server->registry, &cursor));) {
        if (other->role != given->role || other->index != given->index || other->incarnation == given->incarnation ||
            (other->role == PROCESS_SUPERVISOR && other->supervises != given->supervises))
            continue;
        struct peer *peer = peers_of(other);
        struct pollfd item = {.fd = peer ? peer->fd : -1, .events = POLLRDHUP};
        if (peer && (peer->gone || (poll(&item, 1, 0) > 0 && item.revents & (POLLRDHUP | POLLHUP | POLLERR)))) {
            peers_read(server, peer); /* its last words come first */
            peer->gone = true;
            peer->process = NULL;
            process_hung_up(server, other); /* may remove it: the walk goes on by cursor */
            look_at_earlier_life(server, given);
            return;
        }
        peers_check_pidfds(server, other);
    }
}

static int register_process(struct server *server, struct peer *peer, const Hcattn__Control__Hello *message,
                            const struct process *given, int *fd, char error[REGISTRY_ERROR_BYTES])
{
    struct process *process;
    struct process *before = registry_find_incarnation(server->registry, given->role, given->incarnation);
    if (before && before->pid > 0 && given->pid > 0 && before->pid != given->pid && before->state != PROCESS_DEAD) {
        snprintf(error, REGISTRY_ERROR_BYTES, "%s %u: its incarnation is that of pid %d",
                 registry_role_name(given->role), given->index, (int)before->pid);
        return -EEXIST;
    }
    if (before && peers_of(before)) { /* the same life on a new connection: alive, so the old one is just over */
        struct peer *old = peers_of(before);
        old->gone = true;
        old->process = NULL;
        before->connection = NULL;
        (void)registry_move(before, PROCESS_LOST, server->now_us);
        tell_hung_up(server, before);
    }
    if (given->role == PROCESS_WORKER && !workers_accept_model(server, given, error))
        return -EINVAL;
    enum router_side side = given->role == PROCESS_STORE ? ROUTER_STORE : ROUTER_WORKER;
    if (given->role != PROCESS_SUPERVISOR && router_add(server->router, given->data_route, side) != 0) {
        snprintf(error, REGISTRY_ERROR_BYTES, "its route on the data socket is taken");
        return -EEXIST;
    }
    struct process copy = *given;
    copy.connection = peer;
    if (peer->pid > 0)
        (void)peer_pidfd(peer->pid, &copy.pidfd);
    int result = registry_add(server->registry, &copy, server->now_us, &process, error);
    if (result != 0) {
        if (copy.pidfd >= 0)
            close(copy.pidfd);
        if (given->role != PROCESS_SUPERVISOR)
            router_remove(server->router, given->data_route);
        return result;
    }
    peer->process = process;
    if (given->role != PROCESS_STORE)
        return 0;
    int segment = *fd;
    *fd = -1;
    result = stores_registered(server, process, message->holds_segment, segment, error);
    if (result != 0) {
        router_remove(server->router, given->data_route);
        peer->process = NULL;
        process->connection = NULL;
        (void)registry_died(process, server->now_us);
    }
    return result;
}

/* Those that a later life has replaced have no purpose any more. */
static void forget_dead_lives(struct server *server)
{
    uint32_t cursor = 0;
    for (struct process *process; (process = registry_next(server->registry, &cursor));)
        if (process->replaced && process->state == PROCESS_DEAD)
            registry_remove(server->registry, process);
}

static void hello(struct server *server, struct peer *peer, const Hcattn__Control__Hello *message, int *fd)
{
    struct process given;
    char error[REGISTRY_ERROR_BYTES], name[64];
    int result = read_hello(peer, message, &given, error);
    if (result == 0) {
        look_at_earlier_life(server, &given);
        result = register_process(server, peer, message, &given, fd, error);
    }
    if (result != 0) {
        LOG_WARNING("refused a peer (pid %u): %s", message->pid, error);
        control_refused(server, peer, error);
        forget_dead_lives(server);
        return;
    }
    struct process *process = peer->process;
    LOG_INFO("%s registered (pid %u)%s%s", name_of(process, name), process->own_pid, process->achieved[0] ? ": " : "",
             process->achieved);
    control_welcome(server, peer);
    if (process->role == PROCESS_WORKER)
        workers_registered(server, process);
    else if (process->role == PROCESS_STORE)
        stores_check(server, process);
    forget_dead_lives(server);
    server->dirty = true;
}

/* ---- messages ---- */

static void heartbeat(struct server *server, struct process *process, const Hcattn__Control__Heartbeat *message)
{
    struct heartbeat heard = {.progress = message->progress,
                              .busy = message->busy,
                              .bytes_served = message->bytes_served,
                              .n_requests = message->requests,
                              .n_tokens = message->tokens,
                              .device_bytes = message->device_bytes,
                              .bytes_resident = message->bytes_resident,
                              .bytes_local = message->bytes_local,
                              .phase = message->phase};
    registry_heard(process, &heard, server->now_us);
}

static bool from_supervisor(struct server *server, struct process *process, const Hcattn__Control__Control *message)
{
    if (process->role != PROCESS_SUPERVISOR)
        return false;
    switch (message->message_case) {
    case HCATTN__CONTROL__CONTROL__MESSAGE_CHILD_STARTED:
        process->child = message->child_started->incarnation;
        process->n_starts = message->child_started->n_starts;
        return true;
    case HCATTN__CONTROL__CONTROL__MESSAGE_CHILD_DEAD:
        child_dead(server, process, message->child_dead);
        return true;
    default:
        return false;
    }
}

/* Takes *fd over by setting it to -1. False: this process has no business to say that. */
static bool handle(struct server *server, struct process *process, const Hcattn__Control__Control *message, int *fd)
{
    int taken = *fd;
    switch (message->message_case) {
    case HCATTN__CONTROL__CONTROL__MESSAGE_HEARTBEAT:
        heartbeat(server, process, message->heartbeat);
        return true;
    case HCATTN__CONTROL__CONTROL__MESSAGE_SEGMENT_READY:
        if (process->role != PROCESS_STORE)
            return false;
        *fd = -1;
        stores_segment_ready(server, process, message->segment_ready, taken);
        return true;
    case HCATTN__CONTROL__CONTROL__MESSAGE_DONE:
        if (process->role != PROCESS_STORE && process->role != PROCESS_WORKER)
            return false;
        if (!rings_done(server, process, message->done) && process->role == PROCESS_STORE)
            orders_done(server, process->index, message->done);
        return true;
    case HCATTN__CONTROL__CONTROL__MESSAGE_EXCHANGE:
        if (process->role != PROCESS_WORKER)
            return false;
        *fd = -1;
        workers_exchange(server, process, message->exchange, taken);
        return true;
    case HCATTN__CONTROL__CONTROL__MESSAGE_EXCHANGE_READY:
        if (process->role != PROCESS_STORE)
            return false;
        workers_exchange_ready(server, process, message->exchange_ready);
        return true;
    default:
        return from_supervisor(server, process, message);
    }
}

static void message_of(struct server *server, struct peer *peer, size_t n_bytes, int *fd)
{
    Hcattn__Control__Control *message = hcattn__control__control__unpack(NULL, n_bytes, server->receive_buffer);
    uint64_t n_quiet;
    bool sound = message != NULL;
    if (sound && !peer->process) {
        sound = message->message_case == HCATTN__CONTROL__CONTROL__MESSAGE_HELLO;
        if (sound)
            hello(server, peer, message->hello, fd);
        else
            peer->gone = true;
    } else if (sound) {
        sound = handle(server, peer->process, message, fd);
    } else if (!peer->process) {
        peer->gone = true;
    }
    if (!sound && server_rate(server, &server->garbage, &n_quiet))
        LOG_WARNING("a peer (pid %d) sent what is no message of its role: dropped (%llu more since the last such line)",
                    peer->pid, (unsigned long long)n_quiet);
    if (message)
        hcattn__control__control__free_unpacked(message, NULL);
}

void peers_read(struct server *server, struct peer *peer)
{
    for (int i = 0; i < ROUND_MESSAGES && !peer->gone && !peer->drain; i++) {
        int fds[1] = {-1};
        size_t n_bytes = 0, n_fds = 0;
        int result = peer_try_receive(peer->fd, server->receive_buffer, PEER_MAX_MESSAGE, &n_bytes, fds, 1, &n_fds);
        if (result == -EAGAIN)
            return;
        if (result == -EMSGSIZE)
            continue;
        if (result != 0) {
            peer->gone = true;
            return;
        }
        int fd = n_fds > 0 ? fds[0] : -1;
        message_of(server, peer, n_bytes, &fd);
        if (fd >= 0)
            close(fd);
    }
}

void peers_sweep(struct server *server)
{
    for (uint32_t i = 0; i < server->n_peers;) {
        struct peer *peer = server->peers[i];
        if (!peer->gone) {
            i++;
            continue;
        }
        server->peers[i] = server->peers[--server->n_peers];
        struct process *process = peer->process;
        control_drop_packets(peer);
        close(peer->fd);
        free(peer);
        if (process)
            process_hung_up(server, process);
    }
}

void peers_close_all(struct server *server)
{
    for (uint32_t i = 0; i < server->n_peers; i++) {
        control_drop_packets(server->peers[i]);
        close(server->peers[i]->fd);
        free(server->peers[i]);
    }
    server->n_peers = 0;
}

static void fence(struct server *server, struct process *process, const char *reason)
{
    char name[64];
    struct process *supervisor = registry_supervisor_of(server->registry, process);
    struct peer *peer = peers_of(supervisor);
    if (!peer) {
        LOG_ERROR("%s: %s (phase \"%s\"), and it has no supervisor that could end it: end pid %u by hand",
                  name_of(process, name), reason, process->phase, process->own_pid);
        process->heard_us = process->progress_us = process->changed_us = server->now_us; /* says so again later */
        return;
    }
    LOG_ERROR("%s: %s (phase \"%s\"): fenced", name_of(process, name), reason, process->phase);
    control_fence(server, peer, process->incarnation, reason);
    (void)registry_move(process, PROCESS_FENCING, server->now_us);
    tell_hung_up(server, process);
}

void peers_tick(struct server *server)
{
    uint32_t cursor = 0;
    for (struct process *process; (process = registry_next(server->registry, &cursor));) {
        const char *reason = registry_judge(process, server->now_us, server->options.hang_timeout_us);
        if (reason)
            fence(server, process, reason);
    }
    for (uint32_t i = 0; i < server->n_peers; i++) {
        struct peer *peer = server->peers[i];
        if ((!peer->process || peer->drain) && server->now_us - peer->since_us > HELLO_TIMEOUT_US)
            peer->gone = true;
    }
}
