/* peers.c - see peers.h. */
#include "tests/unit/value-store/peers.h"
#include "common/clock.h"
#include "common/options.h"
#include "common/peer.h"

#include <errno.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#define PATIENCE_US (10 * UINT64_C(1000000))

void peers_open(struct peers *peers)
{
    char endpoint[128];
    memset(peers, 0, sizeof(*peers));
    strcpy(peers->directory, "/tmp/hcattn-store-test-XXXXXX");
    assert_non_null(mkdtemp(peers->directory));
    snprintf(peers->peer_path, sizeof(peers->peer_path), "%s/peer.sock", peers->directory);
    snprintf(peers->data_path, sizeof(peers->data_path), "%s/data.sock", peers->directory);
    snprintf(endpoint, sizeof(endpoint), "ipc://%s", peers->data_path);
    peers->fd = peers->exchange_fd = -1;
    peers->next_request = 77;
    assert_int_equal(peer_listen(peers->peer_path, &peers->listen_fd), 0);
    assert_int_equal(socket_context_new(&peers->context), 0);
    assert_int_equal(socket_new_router(peers->context, 0, &peers->data), 0);
    assert_int_equal(socket_bind(peers->data, endpoint), 0);
}

void peers_close(struct peers *peers)
{
    if (peers->pid > 0) {
        kill(peers->pid, SIGKILL);
        waitpid(peers->pid, NULL, 0);
    }
    if (peers->fd >= 0)
        close(peers->fd);
    if (peers->exchange_fd >= 0)
        close(peers->exchange_fd);
    segment_unmap(&peers->exchange);
    peer_unlisten(peers->listen_fd, peers->peer_path);
    socket_free(peers->data);
    socket_context_free(peers->context);
    unlink(peers->data_path);
    rmdir(peers->directory);
}

void peers_spawn(struct peers *peers, const char *const *options)
{
    char program[512];
    const char *bin = options_environment("HCATTN_BIN");
    assert_non_null(bin);
    snprintf(program, sizeof(program), "%s/hc-value-store", bin);
    const char *arguments[32] = {program, "--runtime-dir", peers->directory, "--isa", "plain", "--threads", "3"};
    size_t n = 7;
    for (size_t i = 0; options && options[i]; i++)
        arguments[n++] = options[i];
    arguments[n] = NULL;
    peers->pid = fork();
    assert_true(peers->pid >= 0);
    if (peers->pid == 0) {
        execv(program, (char *const *)(uintptr_t)arguments);
        _exit(127);
    }
}

int peers_wait(struct peers *peers)
{
    int status;
    assert_int_equal(waitpid(peers->pid, &status, 0), peers->pid);
    peers->pid = 0;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

static void wait_for(int fd)
{
    struct pollfd item = {.fd = fd, .events = POLLIN};
    if (poll(&item, 1, (int)(PATIENCE_US / 1000)) <= 0)
        fail_msg("the store is silent");
}

void peers_accept(struct peers *peers)
{
    wait_for(peers->listen_fd);
    assert_int_equal(peer_accept(peers->listen_fd, &peers->fd), 0);
}

Hcattn__Control__Control *peers_receive(struct peers *peers, Hcattn__Control__Control__MessageCase kind, int *ret_fd)
{
    static uint8_t buffer[PEER_MAX_MESSAGE];
    for (;;) {
        size_t n_bytes, n_fds;
        int fd = -1;
        wait_for(peers->fd);
        int result = peer_receive(peers->fd, buffer, sizeof(buffer), &n_bytes, &fd, 1, &n_fds);
        if (result < 0)
            fail_msg("the store hung up: %s", strerror(-result));
        Hcattn__Control__Control *message = hcattn__control__control__unpack(NULL, n_bytes, buffer);
        assert_non_null(message);
        if (message->message_case == HCATTN__CONTROL__CONTROL__MESSAGE_HEARTBEAT && kind != message->message_case) {
            hcattn__control__control__free_unpacked(message, NULL);
            continue;
        }
        assert_int_equal(message->message_case, kind);
        if (ret_fd)
            *ret_fd = n_fds > 0 ? fd : -1;
        else
            assert_int_equal(n_fds, 0);
        return message;
    }
}

void peers_send(struct peers *peers, const Hcattn__Control__Control *message, int fd)
{
    uint8_t buffer[16384];
    assert_true(hcattn__control__control__get_packed_size(message) <= sizeof(buffer));
    size_t n_bytes = hcattn__control__control__pack(message, buffer);
    assert_int_equal(peer_send(peers->fd, buffer, n_bytes, &fd, fd >= 0 ? 1 : 0), 0);
}

void peers_register(struct peers *peers, int *ret_fd)
{
    peers_accept(peers);
    Hcattn__Control__Control *message = peers_receive(peers, HCATTN__CONTROL__CONTROL__MESSAGE_HELLO, ret_fd);
    const Hcattn__Control__Hello *hello = message->hello;
    assert_int_equal(hello->layout, LAYOUT_VERSION);
    assert_string_equal(hello->version, HCATTN_VERSION);
    assert_int_equal(hello->role, HCATTN__CONTROL__ROLE__VALUE_STORE);
    assert_int_equal(hello->pid, peers->pid);
    assert_true(hello->incarnation != 0 && hello->data_route != 0 && hello->achieved[0]);
    assert_int_equal(hello->holds_segment, *ret_fd >= 0);
    peers->incarnation = hello->incarnation;
    peers->route = hello->data_route;
    hcattn__control__control__free_unpacked(message, NULL);

    Hcattn__Control__Welcome welcome = HCATTN__CONTROL__WELCOME__INIT;
    Hcattn__Control__Control answer = HCATTN__CONTROL__CONTROL__INIT;
    welcome.coordinator = 5;
    welcome.data_socket = peers->data_path;
    answer.message_case = HCATTN__CONTROL__CONTROL__MESSAGE_WELCOME;
    answer.welcome = &welcome;
    peers_send(peers, &answer, -1);
}

int peers_done(struct peers *peers, uint64_t sequence)
{
    Hcattn__Control__Control *message = peers_receive(peers, HCATTN__CONTROL__CONTROL__MESSAGE_DONE, NULL);
    int status = message->done->status;
    assert_true(message->done->sequence == sequence);
    assert_true((status == 0) == (message->done->sentence[0] == 0));
    hcattn__control__control__free_unpacked(message, NULL);
    return status;
}

int peers_move(struct peers *peers, uint64_t session, uint32_t moves, uint8_t store)
{
    uint8_t lanes[LAYOUT_N_LANES];
    Hcattn__Control__SessionOpen order = HCATTN__CONTROL__SESSION_OPEN__INIT;
    Hcattn__Control__Control message = HCATTN__CONTROL__CONTROL__INIT;
    memset(lanes, store, sizeof(lanes));
    order.sequence = ++peers->next_request;
    order.session = session;
    order.model_hash_low = 7;
    order.lane_store = (ProtobufCBinaryData){.data = lanes, .len = sizeof(lanes)};
    order.policy = (char *)(uintptr_t) "full";
    order.moves = moves;
    message.message_case = HCATTN__CONTROL__CONTROL__MESSAGE_SESSION_OPEN;
    message.session_open = &order;
    peers_send(peers, &message, -1);
    return peers_done(peers, order.sequence);
}

int peers_session(struct peers *peers, uint64_t session)
{
    return peers_move(peers, session, 0, 0);
}

int peers_reserve(struct peers *peers, uint64_t session, uint32_t index, uint32_t generation, uint32_t number)
{
    Hcattn__Control__Handle handle = HCATTN__CONTROL__HANDLE__INIT, previous = HCATTN__CONTROL__HANDLE__INIT;
    Hcattn__Control__Reservation block = HCATTN__CONTROL__RESERVATION__INIT, *blocks = &block;
    Hcattn__Control__Reserve order = HCATTN__CONTROL__RESERVE__INIT;
    Hcattn__Control__Control message = HCATTN__CONTROL__CONTROL__INIT;
    handle.index = index;
    handle.generation = generation;
    previous.generation = number > 0;
    block.handle = &handle;
    block.previous = number > 0 ? &previous : NULL;
    block.number = number;
    order.sequence = ++peers->next_request;
    order.session = session;
    order.n_blocks = 1;
    order.blocks = &blocks;
    message.message_case = HCATTN__CONTROL__CONTROL__MESSAGE_RESERVE;
    message.reserve = &order;
    peers_send(peers, &message, -1);
    return peers_done(peers, order.sequence);
}

int peers_release(struct peers *peers, uint64_t session, uint32_t from_number)
{
    return peers_release_lanes(peers, session, from_number, 0);
}

int peers_release_lanes(struct peers *peers, uint64_t session, uint32_t from_number, uint32_t lanes)
{
    Hcattn__Control__Release order = HCATTN__CONTROL__RELEASE__INIT;
    Hcattn__Control__Control message = HCATTN__CONTROL__CONTROL__INIT;
    order.sequence = ++peers->next_request;
    order.session = session;
    order.from_number = from_number;
    order.lanes = lanes;
    message.message_case = HCATTN__CONTROL__CONTROL__MESSAGE_RELEASE;
    message.release = &order;
    peers_send(peers, &message, -1);
    return peers_done(peers, order.sequence);
}

int peers_ring(struct peers *peers, uint64_t worker, bool grant)
{
    Hcattn__Control__RingGrant granted = HCATTN__CONTROL__RING_GRANT__INIT;
    Hcattn__Control__RingRevoke revoked = HCATTN__CONTROL__RING_REVOKE__INIT;
    Hcattn__Control__Control message = HCATTN__CONTROL__CONTROL__INIT;
    granted.sequence = revoked.sequence = ++peers->next_request;
    granted.worker_incarnation = revoked.worker_incarnation = worker;
    if (grant) {
        message.message_case = HCATTN__CONTROL__CONTROL__MESSAGE_RING_GRANT;
        message.ring_grant = &granted;
    } else {
        message.message_case = HCATTN__CONTROL__CONTROL__MESSAGE_RING_REVOKE;
        message.ring_revoke = &revoked;
    }
    peers_send(peers, &message, -1);
    return peers_done(peers, granted.sequence);
}

/* Pairs of handles as Copy and Import carry them. */
struct pairs {
    Hcattn__Control__Handle *handles;
    Hcattn__Control__CopyBlock *blocks, **list;
};

static struct pairs make_pairs(uint32_t from, uint32_t to, uint32_t n)
{
    struct pairs pairs = {.handles = calloc(2 * n + 1, sizeof(*pairs.handles)),
                          .blocks = calloc(n + 1, sizeof(*pairs.blocks)),
                          .list = calloc(n + 1, sizeof(*pairs.list))};
    assert_true(pairs.handles && pairs.blocks && pairs.list);
    for (uint32_t i = 0; i < 2 * n; i++) {
        hcattn__control__handle__init(&pairs.handles[i]);
        pairs.handles[i].index = i < n ? from + i : to + i - n;
        pairs.handles[i].generation = 1;
    }
    for (uint32_t i = 0; i < n; i++) {
        hcattn__control__copy_block__init(&pairs.blocks[i]);
        pairs.blocks[i].from = &pairs.handles[i];
        pairs.blocks[i].to = &pairs.handles[n + i];
        pairs.list[i] = &pairs.blocks[i];
    }
    return pairs;
}

static void free_pairs(struct pairs *pairs)
{
    free(pairs->handles);
    free(pairs->blocks);
    free(pairs->list);
}

int peers_copy(struct peers *peers, uint64_t from_session, uint64_t to_session, uint32_t from, uint32_t to, uint32_t n)
{
    struct pairs pairs = make_pairs(from, to, n);
    Hcattn__Control__Copy order = HCATTN__CONTROL__COPY__INIT;
    Hcattn__Control__Control message = HCATTN__CONTROL__CONTROL__INIT;
    order.sequence = ++peers->next_request;
    order.from_session = from_session;
    order.to_session = to_session;
    order.n_blocks = n;
    order.blocks = pairs.list;
    message.message_case = HCATTN__CONTROL__CONTROL__MESSAGE_COPY;
    message.copy = &order;
    peers_send(peers, &message, -1);
    free_pairs(&pairs);
    return peers_done(peers, order.sequence);
}

uint64_t peers_begin_import(struct peers *peers, uint64_t session, uint32_t store, int segment_fd, uint32_t from,
                            uint32_t to, uint32_t n)
{
    struct pairs pairs = make_pairs(from, to, n);
    Hcattn__Control__Import order = HCATTN__CONTROL__IMPORT__INIT;
    Hcattn__Control__Control message = HCATTN__CONTROL__CONTROL__INIT;
    order.sequence = ++peers->next_request;
    order.session = session;
    order.from_store = store;
    order.n_blocks = n;
    order.blocks = pairs.list;
    message.message_case = HCATTN__CONTROL__CONTROL__MESSAGE_IMPORT;
    message.import = &order;
    peers_send(peers, &message, segment_fd);
    free_pairs(&pairs);
    return order.sequence;
}

int peers_import(struct peers *peers, uint64_t session, uint32_t store, int segment_fd, uint32_t from, uint32_t to,
                 uint32_t n)
{
    return peers_done(peers, peers_begin_import(peers, session, store, segment_fd, from, to, n));
}

void peers_leave(struct peers *peers)
{
    Hcattn__Control__Leave order = HCATTN__CONTROL__LEAVE__INIT;
    Hcattn__Control__Control message = HCATTN__CONTROL__CONTROL__INIT;
    message.message_case = HCATTN__CONTROL__CONTROL__MESSAGE_LEAVE;
    message.leave = &order;
    peers_send(peers, &message, -1);
}

void peers_worker_gone(struct peers *peers)
{
    Hcattn__Control__WorkerGone order = HCATTN__CONTROL__WORKER_GONE__INIT;
    Hcattn__Control__Control message = HCATTN__CONTROL__CONTROL__INIT;
    order.worker_incarnation = PEERS_WORKER;
    message.message_case = HCATTN__CONTROL__CONTROL__MESSAGE_WORKER_GONE;
    message.worker_gone = &order;
    peers_send(peers, &message, -1);
}

int peers_post(struct peers *peers, uint32_t slot, uint32_t n_bytes, uint64_t timeout_us)
{
    struct exchange_ring *ring = layout_ring(peers->exchange.address);
    const struct reply_header *reply = peers_reply(peers, slot);
    uint64_t id = ++peers->next_request, deadline_us = clock_deadline_us(timeout_us);
    ring->posts[slot].n_bytes = n_bytes;
    atomic_store_explicit(&ring->posts[slot].request, id, memory_order_release);
    bell_ring(&ring->requests);
    for (;;) {
        uint32_t seen = bell_count(&ring->replies);
        if (atomic_load_explicit(&reply->answered, memory_order_acquire) == id)
            return reply->status;
        if (bell_wait(&ring->replies, seen, deadline_us, 0) == -ETIMEDOUT)
            return -ETIMEDOUT;
    }
}

int peers_exchange(struct peers *peers, uint64_t store_incarnation)
{
    uint64_t n_bytes = LAYOUT_PAGE_BYTES + PEERS_N_SLOTS * (PEERS_REQUEST_BYTES + PEERS_REPLY_BYTES);
    segment_unmap(&peers->exchange);
    if (peers->exchange_fd >= 0)
        close(peers->exchange_fd);
    assert_int_equal(segment_create("test-exchange", n_bytes, &peers->exchange_fd), 0);
    assert_int_equal(segment_map(peers->exchange_fd, n_bytes, true, &peers->exchange), 0);
    *(struct exchange_header *)peers->exchange.address = (struct exchange_header){
        .magic = EXCHANGE_MAGIC,
        .layout = LAYOUT_VERSION,
        .n_bytes = n_bytes,
        .worker = PEERS_WORKER,
        .store = store_incarnation,
        .n_slots = PEERS_N_SLOTS,
        .request_bytes = PEERS_REQUEST_BYTES,
        .reply_bytes = PEERS_REPLY_BYTES,
        .ready = 1,
    };
    Hcattn__Control__Exchange order = HCATTN__CONTROL__EXCHANGE__INIT;
    Hcattn__Control__Control message = HCATTN__CONTROL__CONTROL__INIT;
    order.worker_incarnation = PEERS_WORKER;
    order.store_incarnation = store_incarnation;
    message.message_case = HCATTN__CONTROL__CONTROL__MESSAGE_EXCHANGE;
    message.exchange = &order;
    peers_send(peers, &message, peers->exchange_fd);
    Hcattn__Control__Control *answer = peers_receive(peers, HCATTN__CONTROL__CONTROL__MESSAGE_EXCHANGE_READY, NULL);
    int status = answer->exchange_ready->status;
    assert_true(answer->exchange_ready->worker_incarnation == PEERS_WORKER);
    assert_true(answer->exchange_ready->store_incarnation == store_incarnation);
    hcattn__control__control__free_unpacked(answer, NULL);
    return status;
}

uint8_t *peers_request(const struct peers *peers, uint32_t slot)
{
    return (uint8_t *)peers->exchange.address + layout_request_offset(peers->exchange.address, slot);
}

struct reply_header *peers_reply(const struct peers *peers, uint32_t slot)
{
    uint8_t *bytes = (uint8_t *)peers->exchange.address + layout_reply_offset(peers->exchange.address, slot);
    return (struct reply_header *)(void *)bytes;
}

uint64_t peers_next_request(const struct peers *peers)
{
    return peers->next_request + 1;
}

struct descriptor peers_ask(struct peers *peers, uint64_t worker, uint32_t slot, uint32_t n_bytes)
{
    const uint64_t own_route = 99;
    struct descriptor sent = {
        .magic = DESCRIPTOR_MAGIC,
        .version = DESCRIPTOR_VERSION,
        .kind = DESCRIPTOR_REQUEST,
        .to = peers->route,
        .from = own_route,
        .request = ++peers->next_request,
        .worker = worker,
        .slot = slot,
        .n_bytes = n_bytes,
        .remaining_us = 1000000,
    };
    const struct frame frames[2] = {socket_id_frame(&peers->route), {.data = &sent, .n_bytes = sizeof(sent)}};
    struct socket_message *message;
    struct descriptor reply;
    uint64_t route, deadline_us = clock_deadline_us(PATIENCE_US);
    int result;
    while ((result = socket_send(peers->data, frames, 2, false)) == -EHOSTUNREACH && clock_remaining_us(deadline_us))
        clock_sleep_us(1000); /* it connects in its own time */
    assert_int_equal(result, 0);
    struct socket_item item = {.socket = peers->data, .fd = -1, .events = SOCKET_READABLE};
    if (socket_poll(&item, 1, (int)(PATIENCE_US / 1000)) <= 0)
        fail_msg("no reply to request %lu", (unsigned long)sent.request);
    assert_int_equal(socket_receive(peers->data, false, &message), 0);
    assert_int_equal(message->n_frames, 2);
    assert_int_equal(socket_id(&message->frames[0], &route), 0);
    assert_int_equal(descriptor_check(message->frames[1].data, message->frames[1].n_bytes, &reply), 0);
    assert_true(route == peers->route && reply.kind == DESCRIPTOR_REPLY && reply.to == own_route);
    assert_true(reply.from == peers->route && reply.request == sent.request && reply.worker == worker);
    assert_int_equal(reply.slot, slot);
    assert_int_equal(reply.remaining_us, 0);
    socket_message_free(message);
    return reply;
}
