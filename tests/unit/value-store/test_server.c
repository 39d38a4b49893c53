/*
 * test_server.c - a real hc-value-store: registers, formats, takes rows, answers; is killed, and its successor gives the same
 * answers from the same segment; loses its coordinator and comes back; is told garbage and goes on.
 */
#include "tests/unit/value-store/fixture.h"
#include "tests/unit/value-store/peers.h"
#include "common/clock.h"
#include "common/peer.h"

#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#define N_TOKENS     (64u + 64u + 20u)
#define N_BLOCKS     3u
#define N_QUERIES    3u
#define HEAD_DIM     8u
#define FETCH_BYTES  (20u * 4u * HEAD_DIM)
#define RESULT_BYTES (3u * N_QUERIES * (2u + HEAD_DIM) * 4u) /* three lanes */

static const char *const small[] = {"--memory", "4MiB", "--reconnect-timeout", "20s", NULL};
static const struct fixture rows_of = {.shape = {.n_layers = 3, .n_kv_heads = 2, .head_dim = 8, .codec = 1}};

struct answers {
    uint8_t partials[RESULT_BYTES];
    uint8_t fetched[FETCH_BYTES];
};

static bool by_ring; /* requests are posted instead of sent; needs a grant */

static int set_up(void **state)
{
    struct peers *peers = malloc(sizeof(*peers));
    assert_non_null(peers);
    peers_open(peers);
    by_ring = false;
    *state = peers;
    return 0;
}

static int tear_down(void **state)
{
    peers_close(*state);
    free(*state);
    return 0;
}

static void register_new(struct peers *peers)
{
    int fd;
    peers_spawn(peers, small);
    peers_register(peers, &fd);
    assert_int_equal(fd, -1);
}

static int format(struct peers *peers, uint32_t head_dim, int *ret_fd)
{
    Hcattn__Control__RowShape shape = HCATTN__CONTROL__ROW_SHAPE__INIT;
    Hcattn__Control__Format order = HCATTN__CONTROL__FORMAT__INIT;
    Hcattn__Control__Control message = HCATTN__CONTROL__CONTROL__INIT;
    shape.n_layers = rows_of.shape.n_layers;
    shape.n_kv_heads = rows_of.shape.n_kv_heads;
    shape.head_dim = head_dim;
    shape.codec = rows_of.shape.codec;
    order.shape = &shape;
    message.message_case = HCATTN__CONTROL__CONTROL__MESSAGE_FORMAT;
    message.format = &order;
    peers_send(peers, &message, -1);
    Hcattn__Control__Control *answer = peers_receive(peers, HCATTN__CONTROL__CONTROL__MESSAGE_SEGMENT_READY, ret_fd);
    int status = answer->segment_ready->status;
    assert_true((status == 0) == (answer->segment_ready->sentence[0] == 0));
    assert_true((status == 0) == (*ret_fd >= 0));
    hcattn__control__control__free_unpacked(answer, NULL);
    return status;
}

static int adopt(struct peers *peers, int fd)
{
    int new_fd;
    Hcattn__Control__Adopt order = HCATTN__CONTROL__ADOPT__INIT;
    Hcattn__Control__Control message = HCATTN__CONTROL__CONTROL__INIT;
    message.message_case = HCATTN__CONTROL__CONTROL__MESSAGE_ADOPT;
    message.adopt = &order;
    peers_send(peers, &message, fd);
    Hcattn__Control__Control *answer = peers_receive(peers, HCATTN__CONTROL__CONTROL__MESSAGE_SEGMENT_READY, &new_fd);
    int status = answer->segment_ready->status;
    hcattn__control__control__free_unpacked(answer, NULL);
    if (new_fd >= 0)
        close(new_fd);
    return status;
}

/* ---- requests ---- */

static void *at(struct peers *peers, uint32_t slot, uint32_t offset)
{
    return peers_request(peers, slot) + offset;
}

static struct request_header *begin(struct peers *peers, uint32_t slot, uint32_t layer)
{
    struct request_header *header = at(peers, slot, 0);
    *header = (struct request_header){
        .magic = REQUEST_MAGIC, .n_bytes = 4096, .request = peers_next_request(peers), .layer = layer};
    return header;
}

static int ask(struct peers *peers, uint32_t slot, uint32_t n_bytes)
{
    struct request_header *header = at(peers, slot, 0);
    header->n_bytes = n_bytes;
    if (by_ring)
        return peers_post(peers, slot, n_bytes, 10000000);
    struct descriptor reply = peers_ask(peers, PEERS_WORKER, slot, n_bytes);
    assert_int_equal(reply.status, 0);
    assert_true(atomic_load(&peers_reply(peers, slot)->answered) == reply.request);
    assert_int_equal(reply.n_bytes, peers_reply(peers, slot)->n_bytes);
    return peers_reply(peers, slot)->status;
}

/* Appends one block's tokens to one layer. */
static int append(struct peers *peers, uint32_t number, uint32_t n, uint32_t layer)
{
    uint32_t slot = layer % PEERS_N_SLOTS;
    struct request_header *header = begin(peers, slot, layer);
    header->n_appends = 1;
    header->appends_offset = 64;
    *(struct append_entry *)at(peers, slot, 64) = (struct append_entry){
        .session = FIXTURE_SESSION,
        .handle = {.index = number, .generation = 1},
        .layer = layer,
        .n_tokens = n,
        .flags = layer == 0 ? APPEND_IDS | APPEND_ROWS : APPEND_ROWS,
        .ids_offset = 128,
        .rows_offset = 1024,
    };
    void *rows = fixture_rows(&rows_of, FIXTURE_SESSION, number * 64, n, layer);
    uint32_t n_bytes = n * 2 * 4 * HEAD_DIM;
    memcpy(at(peers, slot, 1024), rows, n_bytes);
    free(rows);
    for (uint32_t i = 0; i < n; i++)
        ((uint32_t *)at(peers, slot, 128))[i] = fixture_id(FIXTURE_SESSION, number * 64 + i);
    return ask(peers, slot, 1024 + n_bytes);
}

static void append_all(struct peers *peers)
{
    for (uint32_t number = 0; number < N_BLOCKS; number++) {
        for (uint32_t layer = 0; layer < rows_of.shape.n_layers; layer++)
            assert_int_equal(append(peers, number, number == 2 ? 20 : 64, layer), 0);
    }
}

/* One aggregate over everything and one fetch. */
static int read_back(struct peers *peers, struct answers *ret_answers)
{
    const uint32_t slot = 1, result_offset = 64, fetch_offset = 2048;
    struct request_header *header = begin(peers, slot, 1);
    struct block_handle *handles = at(peers, slot, 256);
    uint64_t *masks = at(peers, slot, 320);
    float *q = at(peers, slot, 512);
    for (uint32_t i = 0; i < N_BLOCKS; i++)
        handles[i] = (struct block_handle){i, 1}, masks[i] = i == 2 ? 0xfffff : 0xf0f0f0f0f0f0f0f0u;
    for (uint32_t i = 0; i < N_QUERIES * HEAD_DIM; i++)
        q[i] = (float)i * 0.05f - 0.4f;
    *(struct aggregate_item *)at(peers, slot, 128) = (struct aggregate_item){
        .session = FIXTURE_SESSION,
        .kv_head = 1,
        .mode = AGGREGATE_RESCORE,
        .n_queries = N_QUERIES,
        .q_offset = 512,
        .n_blocks = N_BLOCKS,
        .masks_offset = 320,
        .lanes = 7,
        .scale = 0.3f,
        .result_offset = result_offset,
    };
    *(struct fetch_entry *)at(peers, slot, 64) = (struct fetch_entry){
        .session = FIXTURE_SESSION,
        .handle = {.index = 2, .generation = 1},
        .layer = 2,
        .n_tokens = 20,
        .result_offset = fetch_offset,
    };
    header->n_items = 1, header->items_offset = 128;
    header->n_blocks = N_BLOCKS, header->blocks_offset = 256;
    header->n_fetches = 1, header->fetches_offset = 64;
    memset(peers_reply(peers, slot), 0, PEERS_REPLY_BYTES);
    int status = ask(peers, slot, 512 + N_QUERIES * HEAD_DIM * 4);
    const uint8_t *reply = (const uint8_t *)peers_reply(peers, slot);
    memcpy(ret_answers->partials, reply + result_offset, sizeof(ret_answers->partials));
    memcpy(ret_answers->fetched, reply + fetch_offset, sizeof(ret_answers->fetched));
    return status;
}

static void expect_fetched(const struct answers *answers)
{
    for (uint32_t i = 0; i < 20; i++) {
        uint16_t row[2 * HEAD_DIM];
        fixture_row(&rows_of, FIXTURE_SESSION, 128 + i, 2, 0, row);
        assert_memory_equal(answers->fetched + i * sizeof(row), row, sizeof(row));
    }
}

/* A store with three blocks of a session in it. */
static int fill(struct peers *peers, struct answers *ret_answers)
{
    int segment_fd;
    register_new(peers);
    assert_int_equal(format(peers, HEAD_DIM, &segment_fd), 0);
    assert_int_equal(peers_exchange(peers, peers->incarnation), 0);
    assert_int_equal(peers_session(peers, FIXTURE_SESSION), 0);
    for (uint32_t number = 0; number < N_BLOCKS; number++)
        assert_int_equal(peers_reserve(peers, FIXTURE_SESSION, number, 1, number), 0);
    append_all(peers);
    assert_int_equal(read_back(peers, ret_answers), 0);
    expect_fetched(ret_answers);
    return segment_fd;
}

static void stop(struct peers *peers)
{
    assert_int_equal(kill(peers->pid, SIGTERM), 0);
    assert_int_equal(peers_wait(peers), 0); /* leaks and sanitizer reports are other statuses */
}

/* ---- tests ---- */

static void killed_store_is_replaced(void **state)
{
    struct peers *peers = *state;
    struct answers before, after;
    struct segment_mapping segment;
    int fd, segment_fd = fill(peers, &before);
    assert_int_equal(segment_map(segment_fd, 0, false, &segment), 0);
    const struct segment_header *header = segment.address;
    assert_int_equal(layout_check_segment(segment.address, segment.n_bytes), 0);
    assert_true(header->incarnation == peers->incarnation && segment.n_bytes <= 4 << 20);
    assert_int_equal(atomic_load(&layout_block(header, 0)->state), BLOCK_SEALED);
    assert_int_equal(atomic_load(&layout_block(header, 2)->n_rows[2]), 20);

    assert_int_equal(kill(peers->pid, SIGKILL), 0);
    assert_int_equal(peers_wait(peers), -SIGKILL);
    close(peers->fd);
    uint64_t first = peers->incarnation;
    peers_spawn(peers, small);
    peers_register(peers, &fd);
    assert_true(fd == -1 && peers->incarnation != first);
    assert_int_equal(adopt(peers, segment_fd), 0);
    assert_true(header->incarnation == peers->incarnation);
    assert_int_equal(peers_exchange(peers, first), -ESTALE);
    assert_int_equal(peers_exchange(peers, peers->incarnation), 0);
    append_all(peers); /* as a worker does that repeats its step */
    assert_int_equal(read_back(peers, &after), 0);
    assert_memory_equal(&before, &after, sizeof(before));

    assert_int_equal(peers_release(peers, FIXTURE_SESSION, 2), 0);
    assert_int_equal(read_back(peers, &after), -ESTALE);
    assert_int_equal(peers_reply(peers, 1)->entry, REPLY_ENTRY(REPLY_ENTRY_AGGREGATE, 0));
    assert_int_equal(peers_release(peers, FIXTURE_SESSION, 0), 0);
    segment_unmap(&segment);
    close(segment_fd);
    stop(peers);
}

static void lost_coordinator_is_found_again(void **state)
{
    struct peers *peers = *state;
    struct answers before, after;
    struct segment_mapping segment;
    int fd, segment_fd = fill(peers, &before);
    uint64_t incarnation = peers->incarnation, route = peers->route;
    close(segment_fd);
    close(peers->fd);
    peers_register(peers, &fd);
    assert_true(fd >= 0 && peers->incarnation == incarnation && peers->route != route);
    assert_int_equal(segment_map(fd, 0, true, &segment), 0);
    assert_true(((const struct segment_header *)segment.address)->incarnation == incarnation);
    segment_unmap(&segment);
    close(fd);
    /* Exchanges of the time before are forgotten: their workers must show them again. */
    assert_int_equal(peers_ask(peers, PEERS_WORKER, 0, 64).status, -ENOENT);
    assert_int_equal(peers_exchange(peers, incarnation), 0);
    assert_int_equal(read_back(peers, &after), 0);
    assert_memory_equal(&before, &after, sizeof(before));
    stop(peers);
}

static void strangers_and_garbage_do_no_harm(void **state)
{
    struct peers *peers = *state;
    struct answers before, after;
    uint8_t noise[3000];
    close(fill(peers, &before));
    assert_int_equal(peers_ask(peers, 12345, 0, 64).status, -ENOENT);
    assert_int_equal(peers_ask(peers, PEERS_WORKER, PEERS_N_SLOTS, 64).status, -EINVAL);
    assert_int_equal(peers_ask(peers, PEERS_WORKER, UINT32_MAX, 64).status, -EINVAL);
    assert_int_equal(peers_ask(peers, PEERS_WORKER, 0, PEERS_REQUEST_BYTES + 1).status, -EINVAL);
    srand(5);
    for (uint32_t round = 0; round < 300; round++) {
        size_t n_bytes = 1 + (size_t)rand() % (round % 2 ? 64 : sizeof(noise));
        for (size_t i = 0; i < n_bytes; i++)
            noise[i] = (uint8_t)rand();
        const struct frame frames[3] = {socket_id_frame(&peers->route), {noise, n_bytes}, {noise, 64}};
        assert_int_equal(socket_send(peers->data, frames, 2 + round % 2, true), 0);
        assert_int_equal(peer_send(peers->fd, noise, n_bytes, &peers->exchange_fd, round % 2), 0);
    }
    assert_int_equal(peers_session(peers, 0), -EINVAL);
    assert_int_equal(peers_reserve(peers, FIXTURE_OTHER, 5, 1, 0), -ENOENT);
    assert_int_equal(peers_reserve(peers, FIXTURE_SESSION, 0, 9, 0), -EBUSY);
    assert_int_equal(peers_reserve(peers, FIXTURE_SESSION, 1u << 30, 9, 0), -EINVAL);
    assert_int_equal(adopt(peers, -1), -EBADF);
    assert_int_equal(adopt(peers, peers->exchange_fd), -EPROTO);
    assert_int_equal(adopt(peers, peers->listen_fd), -EBADMSG);
    assert_int_equal(read_back(peers, &after), 0);
    assert_memory_equal(&before, &after, sizeof(before));
    stop(peers);
}

/* Posts get the same bits as descriptors; whatever ends an exchange ends its ring. */
static void rings_are_granted_and_revoked(void **state)
{
    struct peers *peers = *state;
    struct answers before, after;
    register_new(peers);
    assert_int_equal(peers_ring(peers, PEERS_WORKER, true), -ENODEV);
    assert_int_equal(peers_ring(peers, PEERS_WORKER, false), 0);
    stop(peers);
    close(peers->fd);
    close(fill(peers, &before));
    assert_int_equal(peers_ring(peers, PEERS_WORKER + 1, true), -ENOENT);
    for (uint32_t round = 0; round < 20; round++) {
        const struct exchange_ring *ring = layout_ring(peers->exchange.address);
        assert_int_equal(peers_ring(peers, PEERS_WORKER, true), 0);
        assert_int_equal(atomic_load(&ring->serving), 1);
        by_ring = true;
        append_all(peers);
        for (uint32_t i = 0; i < 10; i++) {
            memset(&after, 0, sizeof(after));
            assert_int_equal(read_back(peers, &after), 0);
            assert_memory_equal(&before, &after, sizeof(before));
            assert_int_equal(peers_session(peers, FIXTURE_SESSION), 0); /* orders go on meanwhile */
        }
        by_ring = false;
        assert_int_equal(read_back(peers, &after), 0); /* descriptors too */
        assert_memory_equal(&before, &after, sizeof(before));
        switch (round % 4) {
        case 0:
            peers_worker_gone(peers);
            break;
        case 1:
            break; /* replaced as it is */
        default:
            assert_int_equal(peers_ring(peers, PEERS_WORKER, false), 0);
            assert_int_equal(atomic_load(&ring->serving), 0);
            assert_int_equal(peers_post(peers, 0, 64, 20000), -ETIMEDOUT);
        }
        assert_int_equal(peers_exchange(peers, peers->incarnation), 0);
    }
    /* A new segment: what a worker posts for the old one is not served until the ring is granted again. */
    int fd;
    assert_int_equal(peers_ring(peers, PEERS_WORKER, true), 0);
    assert_int_equal(format(peers, HEAD_DIM, &fd), 0);
    close(fd);
    assert_int_equal(atomic_load(&((struct exchange_ring *)layout_ring(peers->exchange.address))->serving), 0);
    assert_int_equal(peers_ring(peers, PEERS_WORKER, true), 0);
    by_ring = true;
    assert_int_equal(read_back(peers, &after), -ESTALE);
    /* The coordinator goes: rings are stopped, and the store comes back. */
    close(peers->fd);
    peers_register(peers, &fd);
    close(fd);
    assert_int_equal(atomic_load(&((struct exchange_ring *)layout_ring(peers->exchange.address))->serving), 0);
    stop(peers);
}

static void forks_are_copied(void **state)
{
    struct peers *peers = *state;
    const uint64_t from = FIXTURE_SESSION, to = FIXTURE_OTHER;
    struct answers answers;
    struct segment_mapping segment;
    int segment_fd = fill(peers, &answers); /* 0 and 1 sealed, 2 open */
    assert_int_equal(segment_map(segment_fd, 0, false, &segment), 0);
    const struct block_header *copies[2] = {layout_block(segment.address, 10), layout_block(segment.address, 11)};
    assert_int_equal(peers_session(peers, to), 0);
    for (uint32_t number = 0; number < N_BLOCKS; number++)
        assert_int_equal(peers_reserve(peers, to, 10 + number, 1, number), 0);
    assert_int_equal(peers_copy(peers, from, to, 0, 10, 0), 0);
    assert_int_equal(peers_copy(peers, from, to, 0, 10, 3), -ENODATA);
    assert_int_equal(peers_copy(peers, from, to, 0, 11, 1), -EINVAL);
    assert_int_equal(peers_copy(peers, from, to, 0, 10, 257), -EINVAL);
    assert_int_equal(peers_copy(peers, from, to, 0, 20, 1), -ESTALE);
    assert_int_equal(peers_copy(peers, from, 77, 0, 10, 2), -ESTALE);
    assert_int_equal(atomic_load(&copies[0]->n_ids), 0); /* nothing by halves */
    for (uint32_t round = 0; round < 2; round++)
        assert_int_equal(peers_copy(peers, from, to, 0, 10, 2), 0);
    uint64_t rows_offset = layout_rows_offset(&rows_of.shape);
    for (uint32_t i = 0; i < 2; i++) {
        const struct block_header *source = layout_block(segment.address, i);
        assert_int_equal(atomic_load(&copies[i]->state), BLOCK_SEALED);
        assert_int_equal(copies[i]->checksum, source->checksum);
        assert_memory_equal(copies[i]->ids, source->ids, sizeof(source->ids));
        assert_memory_equal((const uint8_t *)copies[i] + rows_offset, (const uint8_t *)source + rows_offset,
                            rows_of.shape.n_layers * rows_of.shape.n_kv_heads * layout_head_rows_bytes(&rows_of.shape));
    }
    segment_unmap(&segment);
    close(segment_fd);
    stop(peers);
}

/* Store 1 takes over what store 0 has, gives the same answers, and store 0 leaves. */
static void lanes_move_to_another_store(void **state)
{
    struct peers *peers = *state;
    const char *const second[] = {"--index", "1", "--memory", "4MiB", NULL};
    const uint64_t session = FIXTURE_SESSION;
    struct answers before, after;
    int fd, segment_fd = fill(peers, &before);
    assert_int_equal(peers_move(peers, session, 1, 1), 0);
    assert_int_equal(peers_move(peers, session, 0, 0), -ESTALE);
    assert_int_equal(peers_release_lanes(peers, session, 0, 1u << 12), -EINVAL);
    assert_int_equal(peers_release_lanes(peers, session, 0, 1u << 5), 0);
    assert_int_equal(peers_import(peers, session, 0, segment_fd, 0, 0, 1), -ELOOP);
    peers_leave(peers);
    assert_int_equal(peers_wait(peers), 3); /* its segment lives as long as we hold it */
    close(peers->fd);

    peers_spawn(peers, second);
    peers_register(peers, &fd);
    assert_int_equal(peers_import(peers, session, 0, segment_fd, 0, 0, 3), -ENODEV);
    assert_int_equal(format(peers, HEAD_DIM, &fd), 0);
    assert_int_equal(peers_exchange(peers, peers->incarnation), 0);
    assert_int_equal(peers_import(peers, session, 0, segment_fd, 0, 0, 3), -ESTALE); /* the target is not reserved */
    assert_int_equal(peers_session(peers, session), 0);
    for (uint32_t number = 0; number <= N_BLOCKS; number++)
        assert_int_equal(peers_reserve(peers, session, number, 1, number), 0);
    assert_int_equal(peers_import(peers, session, 0, -1, 0, 0, 3), -EBADF);
    assert_int_equal(peers_import(peers, session, 0, peers->exchange_fd, 0, 0, 3), -EPROTO);
    assert_int_equal(peers_import(peers, session, 0, peers->listen_fd, 0, 0, 3), -EBADMSG);
    assert_int_equal(peers_import(peers, session, 2, segment_fd, 0, 0, 3), -EXDEV);
    assert_int_equal(peers_import(peers, session, 0, segment_fd, 0, 0, 257), -EINVAL);
    assert_int_equal(peers_import(peers, session, 0, segment_fd, 0, 1, 1), -EINVAL);
    assert_int_equal(peers_import(peers, session, 0, segment_fd, 1, 1, 3), -ENOENT);
    assert_int_equal(peers_import(peers, session, 0, segment_fd, 0, 0, 0), 0);
    uint64_t sequences[3];
    for (uint32_t i = 0; i < 3; i++) /* sent at once; each is done block by block, in their order */
        sequences[i] = peers_begin_import(peers, session, 0, segment_fd, 0, 0, 3);
    assert_int_equal(peers_done(peers, sequences[0]), 0);
    assert_int_equal(read_back(peers, &after), 0);
    assert_int_equal(peers_done(peers, sequences[1]), 0);
    assert_int_equal(peers_done(peers, sequences[2]), 0);
    assert_int_equal(peers_move(peers, session, 1, 1), 0);
    assert_memory_equal(&before, &after, sizeof(before));
    close(fd);
    close(segment_fd);
    stop(peers);
}

static void what_cannot_be_formatted_is_said(void **state)
{
    struct peers *peers = *state;
    int fd;
    register_new(peers);
    assert_int_equal(peers_session(peers, FIXTURE_SESSION), -ENODEV);
    assert_int_equal(format(peers, 7, &fd), -EINVAL);
    assert_int_equal(format(peers, HEAD_DIM, &fd), 0);
    close(fd);
    assert_int_equal(format(peers, 64, &fd), 0); /* another shape, in place of the first */
    struct segment_mapping segment;
    assert_int_equal(segment_map(fd, 0, false, &segment), 0);
    assert_int_equal(((const struct segment_header *)segment.address)->shape.head_dim, 64);
    segment_unmap(&segment);
    close(fd);
    stop(peers);

    const char *const tiny[] = {"--memory", "64KiB", NULL};
    close(peers->fd);
    peers_spawn(peers, tiny);
    peers_register(peers, &fd);
    assert_int_equal(format(peers, HEAD_DIM, &fd), -ENOSPC);
    stop(peers);
}

/* Also while nothing else is to be sent; counters move with requests. */
static void heartbeats_come(void **state)
{
    struct peers *peers = *state;
    struct answers answers;
    uint64_t progress = 0;
    close(fill(peers, &answers));
    uint64_t started_us = clock_now_us();
    for (uint32_t i = 0; i < 2; i++) {
        Hcattn__Control__Control *message = peers_receive(peers, HCATTN__CONTROL__CONTROL__MESSAGE_HEARTBEAT, NULL);
        const Hcattn__Control__Heartbeat *heartbeat = message->heartbeat;
        assert_true(heartbeat->progress >= progress && heartbeat->progress > 0);
        assert_false(heartbeat->busy);
        assert_string_equal(heartbeat->phase, "idle");
        progress = heartbeat->progress;
        if (i == 1) {
            assert_int_equal(heartbeat->requests, 3 * N_BLOCKS + 1);
            assert_int_equal(heartbeat->bytes_served, (20 + 32 + 32 + 20) * 4 * HEAD_DIM);
        }
        hcattn__control__control__free_unpacked(message, NULL);
    }
    assert_true(clock_now_us() - started_us > 900000);
    stop(peers);
}

static void refusal_is_status_2(void **state)
{
    struct peers *peers = *state;
    int fd;
    peers_spawn(peers, small);
    peers_accept(peers);
    hcattn__control__control__free_unpacked(peers_receive(peers, HCATTN__CONTROL__CONTROL__MESSAGE_HELLO, &fd), NULL);
    Hcattn__Control__Refused refused = HCATTN__CONTROL__REFUSED__INIT;
    Hcattn__Control__Control message = HCATTN__CONTROL__CONTROL__INIT;
    refused.sentence = (char *)(uintptr_t) "there is a store 0 already";
    message.message_case = HCATTN__CONTROL__CONTROL__MESSAGE_REFUSED;
    message.refused = &refused;
    peers_send(peers, &message, -1);
    assert_int_equal(peers_wait(peers), 2);
}

static void coordinator_that_stays_away_is_status_1(void **state)
{
    struct peers *peers = *state;
    const char *const options[] = {"--reconnect-timeout", "400ms", NULL};
    int fd;
    peers_spawn(peers, options);
    peers_register(peers, &fd);
    assert_int_equal(peers_session(peers, 1), -ENODEV); /* it is registered */
    peers->listen_fd = peer_unlisten(peers->listen_fd, peers->peer_path);
    close(peers->fd);
    peers->fd = -1;
    assert_int_equal(peers_wait(peers), 1);
    peers_spawn(peers, options);
    assert_int_equal(peers_wait(peers), 1);
}

static void bad_options_are_status_2(void **state)
{
    struct peers *peers = *state;
    const char *const bad[][3] = {{"--incarnation", "0"}, {"--incarnation", "12x"}, {"--node", "99"},
                                  {"--memory", "lots"},   {"--colour", "red"},      {"--spin-us", "1001"}};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        peers_spawn(peers, bad[i]);
        assert_int_equal(peers_wait(peers), 2);
    }
    const char *const given[] = {"--incarnation", "00000000deadbeef", NULL};
    int fd;
    peers_spawn(peers, given);
    peers_register(peers, &fd);
    assert_true(peers->incarnation == 0xdeadbeef);
    stop(peers);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
    const struct CMUnitTest tests[] = {
        TEST(killed_store_is_replaced),
        TEST(lost_coordinator_is_found_again),
        TEST(strangers_and_garbage_do_no_harm),
        TEST(rings_are_granted_and_revoked),
        TEST(forks_are_copied),
        TEST(lanes_move_to_another_store),
        TEST(what_cannot_be_formatted_is_said),
        TEST(heartbeats_come),
        TEST(refusal_is_status_2),
        TEST(coordinator_that_stays_away_is_status_1),
        TEST(bad_options_are_status_2),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
