/* server.c - sockets, the poll loop and its timers. */
#include "coordinator/server.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/log.h"
#include "common/peer.h"
#include "common/signals.h"
#include "coordinator/client_keys.h"
#include "coordinator/state.h"

#define TICK_US          200000u /* deadlines and health are looked at this often */
#define RATE_US          1000000u
#define FLUSH_US         150000u /* for last replies before the sockets close */
#define MAX_SETTLE       64      /* rounds of moves that follow from each other, before the loop polls again */
#define REGISTRY_ENTRIES (2 * MAX_PEERS)

const char *const server_transport_names[] = {"ring", "routed", "direct", NULL};

bool server_rate(struct server *server, struct rate *rate, uint64_t *ret_n_quiet)
{
    if (rate->last_us != 0 && server->now_us - rate->last_us < RATE_US) {
        rate->n_quiet++;
        return false;
    }
    *ret_n_quiet = rate->n_quiet;
    rate->n_quiet = 0;
    rate->last_us = server->now_us;
    return true;
}

/* ---- start and end ---- */

static int new_parts(struct server *server)
{
    int result = registry_new(REGISTRY_ENTRIES, &server->registry);
    if (result == 0)
        result = descriptors_new(&server->descriptors);
    if (result == 0)
        result = placement_new(&server->placement);
    if (result == 0)
        result = sessions_new(server->options.max_sessions, &server->sessions);
    if (result == 0)
        result = requests_new(server->options.max_requests, &server->requests);
    if (result == 0)
        result = router_new(&server->router);
    if (result == 0)
        result = socket_context_new(&server->context);
    server->receive_buffer = malloc(PEER_MAX_MESSAGE);
    return result == 0 && !server->receive_buffer ? -ENOMEM : result;
}

static int bind_router(struct server *server, const char *path, uint32_t high_water, struct socket **ret_socket)
{
    char endpoint[160];
    int result = socket_new_router(server->context, high_water, ret_socket);
    if (result != 0)
        return result;
    snprintf(endpoint, sizeof(endpoint), "ipc://%s", path);
    return socket_bind(*ret_socket, endpoint);
}

static struct socket *unbind(struct socket *socket, const char *path)
{
    char bound[160];
    if (socket && socket_endpoint(socket, bound, sizeof(bound)) == 0)
        (void)unlink(path);
    return socket_free(socket);
}

static int complain(int result, const char *what, char error[SERVER_ERROR_BYTES])
{
    if (result == -EADDRINUSE)
        snprintf(error, SERVER_ERROR_BYTES, "%s is in use: another coordinator is alive there", what);
    else if (result != 0)
        snprintf(error, SERVER_ERROR_BYTES, "cannot listen on %s: %s", what, strerror(-result));
    return result;
}

/* After client.sock: keys are needed where it is bound from then on. */
static int bind_extra(struct server *server, char error[SERVER_ERROR_BYTES])
{
    const struct server_options *options = &server->options;
    if (options->client_secret) {
        int result =
            client_keys_new(server->context, options->client_secret, options->client_keys, error, &server->client_keys);
        if (result != 0)
            return result;
        result =
            complain(client_keys_guard(server->client_keys, server->client_socket), options->client_endpoint, error);
        if (result != 0)
            return result;
    }
    int result =
        complain(socket_bind(server->client_socket, options->client_endpoint), options->client_endpoint, error);
    if (result == 0)
        (void)socket_endpoint(server->client_socket, server->extra_endpoint, sizeof(server->extra_endpoint));
    return result;
}

static int bind_all(struct server *server, char error[SERVER_ERROR_BYTES])
{
    /* The peer socket first: whoever has it is the coordinator of this directory. */
    int result = complain(peer_listen(server->peer_path, &server->listener), server->peer_path, error);
    if (result == 0)
        result = complain(bind_router(server, server->data_path, 0, &server->data_socket), server->data_path, error);
    if (result == 0)
        result = complain(bind_router(server, server->work_path, 0, &server->work_socket), server->work_path, error);
    if (result == 0)
        result = complain(bind_router(server, server->client_path, CLIENT_HIGH_WATER, &server->client_socket),
                          server->client_path, error);
    return result == 0 && server->options.client_endpoint ? bind_extra(server, error) : result;
}

int server_new(const struct server_options *options, char error[SERVER_ERROR_BYTES], struct server **ret_server)
{
    struct server *server = calloc(1, sizeof(*server));
    if (!server) {
        snprintf(error, SERVER_ERROR_BYTES, "out of memory");
        return -ENOMEM;
    }
    server->options = *options;
    server->transport = options->transport;
    snprintf(server->policy, sizeof(server->policy), "%s", options->policy);
    server->listener = -1;
    server->started_us = server->now_us = clock_now_us();
    snprintf(server->peer_path, sizeof(server->peer_path), "%s/peer.sock", options->runtime_dir);
    snprintf(server->data_path, sizeof(server->data_path), "%s/data.sock", options->runtime_dir);
    snprintf(server->work_path, sizeof(server->work_path), "%s/work.sock", options->runtime_dir);
    snprintf(server->client_path, sizeof(server->client_path), "%s/client.sock", options->runtime_dir);
    int result = new_parts(server);
    if (result == 0)
        membership_load(server);
    if (result != 0)
        snprintf(error, SERVER_ERROR_BYTES, "cannot start: %s", strerror(-result));
    else
        result = bind_all(server, error);
    if (result != 0) {
        server_free(server);
        return result;
    }
    *ret_server = server;
    return 0;
}

struct server *server_free(struct server *server)
{
    if (!server)
        return NULL;
    if (server->listener >= 0)
        server->listener = peer_unlisten(server->listener, server->peer_path);
    peers_close_all(server);
    orders_free_all(server);
    rings_free_all(server);
    workers_drop_packets(server, 0);
    server->client_socket = unbind(server->client_socket, server->client_path);
    server->work_socket = unbind(server->work_socket, server->work_path);
    server->data_socket = unbind(server->data_socket, server->data_path);
    server->client_keys = client_keys_free(server->client_keys);
    server->context = socket_context_free(server->context);
    router_free(server->router);
    requests_free(server->requests);
    moves_free_all(server);
    sessions_free(server->sessions);
    placement_free(server->placement);
    descriptors_free(server->descriptors);
    registry_free(server->registry);
    free(server->receive_buffer);
    free(server);
    return NULL;
}

const char *server_describe(const struct server *server, char *text, uint32_t text_size)
{
    const struct server_options *options = &server->options;
    char who[64] = "";
    if (server->client_keys)
        snprintf(who, sizeof(who), " (CURVE; client keys: %zu)", client_keys_count(server->client_keys));
    else if (server->extra_endpoint[0])
        snprintf(who, sizeof(who), " (no authentication, not encrypted)");
    snprintf(
        text, text_size,
        "sockets in %s%s%s%s; expects %u value-store%s and %u gpu-worker%s; at most %u sessions and %u requests, %u of "
        "them waiting for room for %g s; %u tokens by default, policy %s, %u exact tokens, transport %s; fences after "
        "%g s, waits %g s for lost processes",
        options->runtime_dir, server->extra_endpoint[0] ? " and " : "", server->extra_endpoint, who, options->n_stores,
        options->n_stores == 1 ? "" : "s", options->n_workers, options->n_workers == 1 ? "" : "s",
        options->max_sessions, options->max_requests, options->max_queued, (double)options->queue_timeout_us / 1e6,
        options->default_max_tokens, server->policy, options->exact_tokens, server_transport_names[server->transport],
        (double)options->hang_timeout_us / 1e6, (double)options->recovery_timeout_us / 1e6);
    return text;
}

/* ---- the loop ---- */

enum { ITEM_SIGNAL, ITEM_LISTENER, ITEM_DATA, ITEM_WORK, ITEM_CLIENT, ITEM_CLIENT_KEYS, ITEM_FIRST_PEER };
#define MAX_ITEMS (ITEM_FIRST_PEER + MAX_PEERS + REGISTRY_ENTRIES)

struct round {
    struct socket_item items[MAX_ITEMS];
    size_t n_items;
    uint32_t n_peers;                        /* items[ITEM_FIRST_PEER + i] is that of server->peers[i] */
    uint64_t incarnations[REGISTRY_ENTRIES]; /* whose pidfd comes next */
    enum process_role roles[REGISTRY_ENTRIES];
    uint32_t n_pidfds;
};

static void add_item(struct round *round, struct socket *socket, int fd, int events)
{
    round->items[round->n_items++] = (struct socket_item){.socket = socket, .fd = fd, .events = events};
}

static void collect(const struct server *server, int signal_fd, struct round *round)
{
    round->n_items = 0;
    round->n_pidfds = 0;
    round->n_peers = server->n_peers;
    add_item(round, NULL, signal_fd, SOCKET_READABLE);
    add_item(round, NULL, server->n_peers < MAX_PEERS && server->now_us >= server->accept_us ? server->listener : -1,
             SOCKET_READABLE);
    add_item(round, server->data_socket, -1, SOCKET_READABLE);
    add_item(round, server->work_socket, -1, SOCKET_READABLE);
    add_item(round, server->client_socket, -1, SOCKET_READABLE);
    add_item(round, client_keys_socket(server->client_keys), -1, SOCKET_READABLE);
    for (uint32_t i = 0; i < server->n_peers; i++)
        add_item(round, NULL, server->peers[i]->fd, SOCKET_READABLE | (server->peers[i]->first ? SOCKET_WRITABLE : 0));
    uint32_t cursor = 0;
    for (struct process *process; (process = registry_next(server->registry, &cursor));)
        if (process->pidfd >= 0 && process->state != PROCESS_DEAD) {
            round->incarnations[round->n_pidfds] = process->incarnation;
            round->roles[round->n_pidfds++] = process->role;
            add_item(round, NULL, process->pidfd, SOCKET_READABLE);
        }
}

static int timeout_ms(const struct server *server)
{
    uint64_t until_us = server->tick_us;
    if ((server->first_work || router_n_held(server->router) > 0) && server->retry_us < until_us)
        until_us = server->retry_us;
    return server->dirty ? 0 : clock_remaining_ms(until_us);
}

/* What waits for something that has come: moves until nothing moves. */
static void settle(struct server *server)
{
    for (int i = 0; server->dirty && i < MAX_SETTLE; i++) {
        server->dirty = false;
        flow_advance(server);
        drain_store_advance(server);
        orders_settle(server);
        peers_sweep(server);
    }
}

static void read_peers(struct server *server, const struct round *round)
{
    for (uint32_t i = 0; i < round->n_peers; i++) {
        struct peer *peer = server->peers[i]; /* none is removed before peers_sweep() */
        int ready = round->items[ITEM_FIRST_PEER + i].ready;
        if (ready & SOCKET_WRITABLE)
            control_flush(peer);
        if (ready & (SOCKET_READABLE | SOCKET_ERROR)) {
            peers_read(server, peer);
            if (peer->drain && ready & SOCKET_ERROR)
                peer->gone = true;
        }
    }
}

static void handle(struct server *server, const struct round *round)
{
    data_receive(server); /* first: a step of every session waits for it */
    workers_receive(server);
    client_keys_decide(server->client_keys);
    rpc_receive(server);
    read_peers(server, round);
    if (round->items[ITEM_LISTENER].ready)
        peers_accept(server);
    for (uint32_t i = 0; i < round->n_pidfds; i++) {
        if (!round->items[ITEM_FIRST_PEER + round->n_peers + i].ready)
            continue;
        struct process *process = registry_find_incarnation(server->registry, round->roles[i], round->incarnations[i]);
        if (process)
            peers_check_pidfds(server, process);
    }
    if (server->now_us >= server->retry_us) {
        server->retry_us = server->now_us + RETRY_US;
        workers_retry(server);
        data_retry(server);
    }
    if (server->now_us >= server->tick_us) {
        server->tick_us = server->now_us + TICK_US;
        peers_tick(server);
        flow_tick(server);
        membership_tick(server);
        server->dirty = true;
    }
    peers_sweep(server);
    settle(server);
}

static bool stop_asked(int signal_fd)
{
    int number;
    while (signals_read(signal_fd, &number) == 0)
        if (number == SIGTERM || number == SIGINT)
            return true;
    return false;
}

int server_run(struct server *server, int signal_fd)
{
    struct round *round = malloc(sizeof(*round));
    int result = round ? 0 : -ENOMEM;
    while (result == 0) {
        collect(server, signal_fd, round);
        result = socket_poll(round->items, round->n_items, timeout_ms(server));
        server->now_us = clock_now_us();
        if (result == -EINTR)
            result = 0;
        if (result < 0)
            break;
        result = 0;
        if (round->items[ITEM_SIGNAL].ready && stop_asked(signal_fd))
            break;
        handle(server, round);
    }
    free(round);
    server->stopping = true;
    if (requests_count(server->requests) > 0) {
        flow_end_all(server);
        clock_sleep_us(FLUSH_US);
    }
    return result;
}
