/* fake_store.c - see fakes.h. */
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/random.h"
#include "tests/unit/coordinator/fake_peers.h"

void fake_store_register(struct fakes *fakes, uint32_t index, bool holds_segment)
{
    struct fake_store *store = &fakes->stores[index];
    store->fd = fakes_connect(fakes);
    store->route = random_u64();
    store->hung_up = false;
    store->refused[0] = 0;
    Hcattn__Control__Hello hello = fake_peers_greeting(HCATTN__CONTROL__ROLE__VALUE_STORE, index, store->incarnation);
    hello.data_route = store->route;
    hello.holds_segment = holds_segment;
    hello.numa_node = -1;
    CONTROL(HELLO, hello, &hello);
    fakes_say(store->fd, &control, holds_segment ? store->segment.fd : -1);
}

void fake_store_hang_up(struct fake_store *store)
{
    store->data = socket_free(store->data);
    if (store->fd >= 0)
        close(store->fd);
    store->fd = -1;
}

void fake_store_rebirth(struct fake_store *store)
{
    fake_store_hang_up(store);
    segments_drop(&store->segment);
    store->has_segment = false;
    store->silent = false;
    store->incarnation = random_u64();
}

static void say_segment_ready(struct fake_store *store, int32_t status)
{
    Hcattn__Control__SegmentReady ready = HCATTN__CONTROL__SEGMENT_READY__INIT;
    static char sentence[] = "a reason";
    ready.status = status;
    ready.numa_node = -1;
    ready.sentence = status != 0 ? sentence : ready.sentence;
    if (status == 0) {
        ready.n_bytes = store->segment.mapping.n_bytes;
        ready.n_blocks = store->segment.header->n_blocks;
    }
    CONTROL(SEGMENT_READY, segment_ready, &ready);
    fakes_say(store->fd, &control, status == 0 ? store->segment.fd : -1);
}

static void format(struct fake_store *store, const Hcattn__Control__Format *message)
{
    struct row_shape shape = {message->shape->n_layers, message->shape->n_kv_heads, message->shape->head_dim,
                              message->shape->codec};
    segments_drop(&store->segment);
    segments_make(&store->segment, store->index, store->incarnation, store->n_blocks, &shape);
    store->has_segment = true;
    store->n_formats++;
    say_segment_ready(store, 0);
}

static void adopt(struct fake_store *store, const Hcattn__Control__Adopt *message, int fd)
{
    store->n_adopts++;
    store->previous = message->previous;
    if (store->adopt_status != 0 || fd < 0) {
        if (fd >= 0)
            close(fd);
        say_segment_ready(store, store->adopt_status ? store->adopt_status : -9);
        return;
    }
    segments_drop(&store->segment);
    store->segment.fd = fd;
    int result = segment_map(fd, 0, true, &store->segment.mapping); /* fails unless it was handed over writable */
    assert(result == 0);
    (void)result;
    store->segment.header = store->segment.mapping.address;
    store->segment.header->incarnation = store->incarnation;
    store->has_segment = true;
    say_segment_ready(store, 0);
}

static void say_done(struct fake_store *store, uint64_t sequence, int32_t status)
{
    Hcattn__Control__Done done = HCATTN__CONTROL__DONE__INIT;
    done.sequence = sequence;
    done.status = status;
    CONTROL(DONE, done, &done);
    if (!store->silent)
        fakes_say(store->fd, &control, -1);
}

static void open_session(struct fake_store *store, const Hcattn__Control__SessionOpen *message)
{
    store->n_opens++;
    assert(message->lane_store.len == LAYOUT_N_LANES);
    uint32_t slot = 0;
    while (atomic_load(&segments_record(&store->segment, slot)->state) != SESSION_RECORD_FREE &&
           segments_record(&store->segment, slot)->session != message->session)
        slot++;
    segments_write_record(&store->segment, slot, message->session, message->model_hash_low, message->lane_store.data,
                          message->flags);
    say_done(store, message->sequence, 0);
}

static void reserve(struct fake_store *store, const Hcattn__Control__Reserve *message)
{
    store->n_reserves++;
    if (store->reserve_status != 0 || store->silent) {
        say_done(store, message->sequence, store->reserve_status);
        return;
    }
    for (size_t i = 0; i < message->n_blocks; i++) {
        const Hcattn__Control__Reservation *block = message->blocks[i];
        const struct block_header *header = segments_block(&store->segment, block->handle->index);
        struct block_handle handle = {block->handle->index, block->handle->generation};
        struct block_handle previous = {block->previous ? block->previous->index : 0,
                                        block->previous ? block->previous->generation : 0};
        bool again = header->session == message->session && header->handle.generation == handle.generation;
        assert(again || atomic_load(&header->state) == BLOCK_FREE);
        assert(again || handle.generation > header->handle.generation);
        if (!again)
            segments_write_block(&store->segment, handle, message->session, block->number, previous,
                                 block->previous_store, 0);
    }
    say_done(store, message->sequence, 0);
}

static void release(struct fake_store *store, const Hcattn__Control__Release *message)
{
    store->n_releases++;
    if (store->silent)
        return;
    for (uint32_t i = 0; i < store->segment.header->n_blocks; i++) {
        struct block_header *header = segments_block(&store->segment, i);
        if (header->session == message->session && header->number >= message->from_number)
            atomic_store(&header->state, BLOCK_FREE);
    }
    for (uint32_t i = 0; message->from_number == 0 && i < store->segment.header->session_capacity; i++)
        if (segments_record(&store->segment, i)->session == message->session)
            atomic_store(&segments_record(&store->segment, i)->state, SESSION_RECORD_FREE);
    say_done(store, message->sequence, 0);
}

static void exchange(struct fake_store *store, const Hcattn__Control__Exchange *message, int fd)
{
    Hcattn__Control__ExchangeReady ready = HCATTN__CONTROL__EXCHANGE_READY__INIT;
    assert(fd >= 0);
    close(fd);
    ready.store = message->store;
    ready.worker_incarnation = message->worker_incarnation;
    ready.store_incarnation = message->store_incarnation;
    CONTROL(EXCHANGE_READY, exchange_ready, &ready);
    fakes_say(store->fd, &control, -1);
}

static void store_hears(struct fakes *fakes, struct fake_store *store, Hcattn__Control__Control *message, int fd)
{
    switch (message->message_case) {
    case HCATTN__CONTROL__CONTROL__MESSAGE_WELCOME:
        store->data = socket_free(store->data);
        store->data = fake_peers_dealer(fakes, message->welcome->data_socket, store->route);
        break;
    case HCATTN__CONTROL__CONTROL__MESSAGE_REFUSED:
        fake_peers_copy(store->refused, message->refused->sentence);
        break;
    case HCATTN__CONTROL__CONTROL__MESSAGE_FORMAT:
        format(store, message->format);
        break;
    case HCATTN__CONTROL__CONTROL__MESSAGE_ADOPT:
        adopt(store, message->adopt, fd);
        break;
    case HCATTN__CONTROL__CONTROL__MESSAGE_SESSION_OPEN:
        open_session(store, message->session_open);
        break;
    case HCATTN__CONTROL__CONTROL__MESSAGE_RESERVE:
        reserve(store, message->reserve);
        break;
    case HCATTN__CONTROL__CONTROL__MESSAGE_RELEASE:
        release(store, message->release);
        break;
    case HCATTN__CONTROL__CONTROL__MESSAGE_EXCHANGE:
        exchange(store, message->exchange, fd);
        break;
    case HCATTN__CONTROL__CONTROL__MESSAGE_WORKER_GONE:
        store->worker_gone = message->worker_gone->worker_incarnation;
        break;
    default:
        assert(!"a message that no store should get");
    }
}

void fake_store_pump(struct fakes *fakes, struct fake_store *store)
{
    Hcattn__Control__Control *message;
    int fd;
    while ((message = fakes_hear(store->fd, &fd))) {
        store_hears(fakes, store, message, fd);
        hcattn__control__control__free_unpacked(message, NULL);
    }
    if (fd == -2) {
        store->hung_up = true;
        fake_store_hang_up(store);
    }
    fake_peers_beat(store->fd, &store->beat_us, 0, false, NULL);
    fake_peers_take_descriptors(store->data, &store->last, &store->n_descriptors);
}

static struct block_header *find_block(struct fakes *fakes, uint64_t session, uint32_t number)
{
    for (uint32_t i = 0; i < fakes->n_stores; i++)
        for (uint32_t j = 0; fakes->stores[i].has_segment && j < fakes->stores[i].segment.header->n_blocks; j++) {
            struct block_header *header = segments_block(&fakes->stores[i].segment, j);
            if (header->session == session && header->number == number && atomic_load(&header->state) != BLOCK_FREE)
                return header;
        }
    return NULL;
}

void fake_store_journal(struct fakes *fakes, uint64_t session, uint64_t n_tokens)
{
    for (uint32_t number = 0; n_tokens > 0; number++) {
        struct block_header *header = find_block(fakes, session, number);
        uint32_t n = n_tokens < LAYOUT_BLOCK_TOKENS ? (uint32_t)n_tokens : LAYOUT_BLOCK_TOKENS;
        assert(header);
        atomic_store(&header->n_ids, n);
        n_tokens -= n;
    }
}

uint64_t fake_store_held(const struct fake_store *store, uint64_t session)
{
    uint64_t n = 0;
    for (uint32_t i = 0; store->has_segment && i < store->segment.header->n_blocks; i++) {
        const struct block_header *header = layout_block(store->segment.mapping.address, i);
        n += header->session == session && atomic_load(&header->state) != BLOCK_FREE;
    }
    return n;
}
