/* fake_store.c - see fakes.h. */
#include <assert.h>
#include <errno.h>
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
    memset(store->granted, 0, sizeof(store->granted));
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
    store->ignored = store->unanswered = 0;
    store->held = 0;
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
    if (store->slow)
        return;
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

void fake_store_say_done(struct fake_store *store, uint64_t sequence, int32_t status)
{
    Hcattn__Control__Done done = HCATTN__CONTROL__DONE__INIT;
    done.sequence = sequence;
    done.status = status;
    CONTROL(DONE, done, &done);
    fakes_say(store->fd, &control, -1);
}

static void say_done(struct fake_store *store, uint64_t sequence, int32_t status)
{
    if (!store->silent)
        fake_store_say_done(store, sequence, status);
}

/* Of an order that it may have been told not to answer. */
static void answer(struct fake_store *store, uint32_t order, uint64_t sequence, int32_t status)
{
    if (store->unanswered & order) {
        store->held = sequence;
        if (store->stalls)
            store->unanswered = UINT32_MAX;
    } else {
        say_done(store, sequence, status);
    }
}

static bool ignores(struct fake_store *store, uint32_t order)
{
    if (store->stalls && store->ignored & order)
        store->ignored = UINT32_MAX;
    return store->ignored & order;
}

void fake_store_go_on(struct fake_store *store)
{
    store->unanswered = store->ignored = 0;
    if (store->held != 0 && store->fd >= 0)
        fake_store_say_done(store, store->held, 0);
    store->held = 0;
}

/* The live record of a session; NULL: none. *ret_free: the first slot that is free. */
static struct session_record *record_of(struct fake_store *store, uint64_t session, uint32_t *ret_free)
{
    *ret_free = UINT32_MAX;
    for (uint32_t i = 0; i < store->segment.header->session_capacity; i++) {
        struct session_record *record = segments_record(&store->segment, i);
        if (atomic_load(&record->state) == SESSION_RECORD_FREE)
            *ret_free = *ret_free == UINT32_MAX ? i : *ret_free;
        else if (record->session == session)
            return record;
    }
    return NULL;
}

/* The lanes of a record that is there. */
static int32_t move_record(struct session_record *record, const Hcattn__Control__SessionOpen *message)
{
    uint32_t moves = atomic_load(&record->moves);
    if (message->moves < moves)
        return -ESTALE;
    if (message->moves == moves)
        return memcmp(record->lane_store[moves % 2], message->lane_store.data, LAYOUT_N_LANES) == 0 ? 0 : -EEXIST;
    memcpy(record->lane_store[message->moves % 2], message->lane_store.data, LAYOUT_N_LANES);
    atomic_store(&record->moves, message->moves);
    return 0;
}

/* As a store does: the same record again is fine, one that moved is taken, another one under the same id is not. */
static void open_session(struct fake_store *store, const Hcattn__Control__SessionOpen *message)
{
    uint32_t slot;
    assert(message->lane_store.len == LAYOUT_N_LANES);
    snprintf(store->policy, sizeof(store->policy), "%s", message->policy);
    store->exact_tokens = message->exact_tokens;
    struct session_record *record = record_of(store, message->session, &slot);
    bool commits = record && message->moves > atomic_load(&record->moves);
    int32_t status = commits ? store->commit_status : store->open_status;
    store->n_opens += !commits;
    store->n_commits += commits;
    if (ignores(store, commits ? FAKE_COMMIT : FAKE_OPEN))
        return;
    if (status != 0 || store->silent) {
        say_done(store, message->sequence, status);
        return;
    }
    if (record) {
        bool same = strcmp(record->policy, message->policy) == 0 && record->exact_tokens == message->exact_tokens &&
                    record->flags == message->flags && record->opened_unix_s == message->opened_unix_s;
        answer(store, commits ? FAKE_COMMIT : FAKE_OPEN, message->sequence,
               same ? move_record(record, message) : -EEXIST);
        return;
    }
    assert(slot != UINT32_MAX);
    segments_write_record(&store->segment, slot, message->session, message->model_hash_low, message->lane_store.data,
                          message->flags);
    record = segments_record(&store->segment, slot);
    snprintf(record->policy, sizeof(record->policy), "%s", message->policy);
    record->exact_tokens = message->exact_tokens;
    record->opened_unix_s = message->opened_unix_s;
    memcpy(record->lane_store[message->moves % 2], message->lane_store.data, LAYOUT_N_LANES);
    atomic_store(&record->moves, message->moves);
    answer(store, FAKE_OPEN, message->sequence, 0);
}

static void reserve(struct fake_store *store, const Hcattn__Control__Reserve *message)
{
    uint32_t slot;
    store->n_reserves++;
    if (ignores(store, FAKE_RESERVE))
        return;
    if (store->reserve_status != 0 || store->silent) {
        say_done(store, message->sequence, store->reserve_status);
        return;
    }
    if (!record_of(store, message->session, &slot)) {
        say_done(store, message->sequence, -ENOENT);
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
    answer(store, FAKE_RESERVE, message->sequence, 0);
}

/* Blocks that are sealed, into open ones that are empty; what is there already stays. */
static void copy(struct fake_store *store, const Hcattn__Control__Copy *message)
{
    store->n_copies++;
    if (store->copy_status != 0 || store->silent) {
        say_done(store, message->sequence, store->copy_status);
        return;
    }
    store->max_copied = message->n_blocks > store->max_copied ? (uint32_t)message->n_blocks : store->max_copied;
    assert(message->n_blocks > 0 && message->n_blocks <= 256);
    uint32_t before = 0;
    for (size_t i = 0; i < message->n_blocks && !(store->copy_half && i > 0); i++) {
        const struct block_header *from = segments_block(&store->segment, message->blocks[i]->from->index);
        struct block_header *to = segments_block(&store->segment, message->blocks[i]->to->index);
        if (to->session != message->to_session) { /* its reservation was refused */
            say_done(store, message->sequence, -ESTALE);
            return;
        }
        assert(from->session == message->from_session);
        assert(from->handle.generation == message->blocks[i]->from->generation);
        assert(to->handle.generation == message->blocks[i]->to->generation);
        assert(atomic_load(&from->state) == BLOCK_SEALED && from->number == to->number);
        assert(i == 0 || to->number > before);
        before = to->number;
        memcpy(to->ids, from->ids, sizeof(to->ids));
        atomic_store(&to->n_ids, atomic_load(&from->n_ids));
        atomic_store(&to->state, BLOCK_SEALED);
        store->n_copied++;
    }
    say_done(store, message->sequence, 0);
}

static bool is_of(const struct block_header *header, uint64_t session, const Hcattn__Control__Handle *handle)
{
    return atomic_load(&header->state) != BLOCK_FREE && header->session == session &&
           header->handle.generation == handle->generation;
}

/* Ids of blocks of another segment; what is there already stays. */
static int32_t import_blocks(struct fake_store *store, const Hcattn__Control__Import *message, void *segment)
{
    uint32_t before = 0;
    assert(message->n_blocks > 0 && message->n_blocks <= 256);
    for (size_t i = 0; i < message->n_blocks; i++) {
        const struct block_header *from = layout_block(segment, message->blocks[i]->from->index);
        struct block_header *to = segments_block(&store->segment, message->blocks[i]->to->index);
        if (!is_of(from, message->session, message->blocks[i]->from) ||
            !is_of(to, message->session, message->blocks[i]->to)) {
            store->n_stale++;
            return -ESTALE;
        }
        uint32_t n_ids = atomic_load(&from->n_ids);
        assert(from->number == to->number && (i == 0 || to->number > before));
        assert(n_ids > 0 && n_ids >= atomic_load(&to->n_ids));
        before = to->number;
        memcpy(to->ids, from->ids, sizeof(to->ids));
        atomic_store(&to->n_ids, n_ids);
        atomic_store(&to->state, atomic_load(&from->state));
        store->n_imported++;
    }
    return 0;
}

static void import(struct fake_store *store, const Hcattn__Control__Import *message, int fd)
{
    struct segment_mapping mapping = {0};
    assert(fd >= 0);
    int result = segment_map(fd, 0, true, &mapping);
    assert(result != 0); /* it may only read there */
    result = segment_map(fd, 0, false, &mapping);
    assert(result == 0);
    (void)result;
    close(fd);
    assert(((const struct segment_header *)mapping.address)->store == message->from_store);
    store->n_imports++;
    if (store->import_status != 0 || store->silent)
        say_done(store, message->sequence, store->import_status);
    else if (!ignores(store, FAKE_IMPORT))
        answer(store, FAKE_IMPORT, message->sequence, import_blocks(store, message, mapping.address));
    segment_unmap(&mapping);
}

/* Nothing of a session may be left in it that is not somewhere else. */
static void leave(struct fakes *fakes, struct fake_store *store)
{
    store->n_leaves++;
    if (store->stays)
        return;
    fake_store_hang_up(store);
    segments_drop(&store->segment);
    store->has_segment = false;
    if (fakes->store_supervisor[store->index].fd >= 0)
        fake_supervisor_child_dead(&fakes->store_supervisor[store->index], store->incarnation);
}

static void ring_order(struct fakes *fakes, struct fake_store *store, uint64_t worker, uint64_t sequence, bool grant)
{
    store->n_grants += grant;
    store->n_revokes += !grant;
    store->ring_sequence = sequence;
    for (uint32_t i = 0; i < FAKE_WORKERS; i++) /* nobody posts before the store looks, or after it has stopped */
        assert(fakes->workers[i].incarnation != worker || !fakes->workers[i].ring[store->index]);
    assert(fake_store_granted(store, worker) != grant);
    for (uint32_t i = 0; i < FAKE_WORKERS && store->ring_status == 0; i++)
        if (store->granted[i] == (grant ? 0 : worker)) {
            store->granted[i] = grant ? worker : 0;
            break;
        }
    if (!store->ring_silent)
        say_done(store, sequence, store->ring_status);
}

bool fake_store_granted(const struct fake_store *store, uint64_t worker)
{
    for (uint32_t i = 0; i < FAKE_WORKERS; i++)
        if (store->granted[i] == worker)
            return true;
    return false;
}

static void forget_grant(struct fake_store *store, uint64_t worker)
{
    for (uint32_t i = 0; i < FAKE_WORKERS; i++)
        if (store->granted[i] == worker)
            store->granted[i] = 0;
}

static void release(struct fake_store *store, const Hcattn__Control__Release *message)
{
    uint32_t lanes = message->lanes ? message->lanes : UINT32_MAX;
    store->n_releases++;
    store->release_lanes = message->lanes;
    if (store->silent || ignores(store, FAKE_RELEASE))
        return;
    for (uint32_t i = 0; i < store->segment.header->n_blocks; i++) {
        struct block_header *header = segments_block(&store->segment, i);
        if (header->session == message->session && header->number >= message->from_number &&
            lanes >> header->number % LAYOUT_N_LANES & 1u)
            atomic_store(&header->state, BLOCK_FREE);
    }
    bool all = message->from_number == 0 && message->lanes == 0;
    for (uint32_t i = 0; all && i < store->segment.header->session_capacity; i++)
        if (segments_record(&store->segment, i)->session == message->session)
            atomic_store(&segments_record(&store->segment, i)->state, SESSION_RECORD_FREE);
    answer(store, FAKE_RELEASE, message->sequence, 0);
}

static void exchange(struct fake_store *store, const Hcattn__Control__Exchange *message, int fd)
{
    Hcattn__Control__ExchangeReady ready = HCATTN__CONTROL__EXCHANGE_READY__INIT;
    assert(fd >= 0);
    close(fd);
    forget_grant(store, message->worker_incarnation); /* it was for another exchange */
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
        forget_grant(store, store->worker_gone);
        break;
    case HCATTN__CONTROL__CONTROL__MESSAGE_COPY:
        copy(store, message->copy);
        break;
    case HCATTN__CONTROL__CONTROL__MESSAGE_IMPORT:
        import(store, message->import, fd);
        break;
    case HCATTN__CONTROL__CONTROL__MESSAGE_LEAVE:
        leave(fakes, store);
        break;
    case HCATTN__CONTROL__CONTROL__MESSAGE_RING_GRANT:
        ring_order(fakes, store, message->ring_grant->worker_incarnation, message->ring_grant->sequence, true);
        break;
    case HCATTN__CONTROL__CONTROL__MESSAGE_RING_REVOKE:
        ring_order(fakes, store, message->ring_revoke->worker_incarnation, message->ring_revoke->sequence, false);
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
    fake_peers_beat(store->fd, &store->beat_us, 0, false, NULL, 0);
    fake_peers_take_descriptors(store->data, &store->last, &store->n_descriptors);
}

bool fake_store_lanes(struct fakes *fakes, uint64_t session, uint8_t ret_lane_store[LAYOUT_N_LANES])
{
    uint32_t slot;
    const struct session_record *newest = NULL;
    for (uint32_t i = 0; i < FAKE_STORES; i++) {
        const struct session_record *record =
            fakes->stores[i].has_segment ? record_of(&fakes->stores[i], session, &slot) : NULL;
        if (record && (!newest || atomic_load(&record->moves) > atomic_load(&newest->moves)))
            newest = record;
    }
    if (newest)
        memcpy(ret_lane_store, newest->lane_store[atomic_load(&newest->moves) % 2], LAYOUT_N_LANES);
    return newest != NULL;
}

static struct block_header *find_block(struct fakes *fakes, uint64_t session, uint32_t number)
{
    uint8_t lane_store[LAYOUT_N_LANES];
    if (!fake_store_lanes(fakes, session, lane_store))
        return NULL;
    struct fake_store *store = &fakes->stores[lane_store[number % LAYOUT_N_LANES]];
    for (uint32_t j = 0; store->has_segment && j < store->segment.header->n_blocks; j++) {
        struct block_header *header = segments_block(&store->segment, j);
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
        for (uint32_t i = 0; i < n; i++)
            header->ids[i] = number * LAYOUT_BLOCK_TOKENS + i;
        if (n == LAYOUT_BLOCK_TOKENS)
            atomic_store(&header->state, BLOCK_SEALED);
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
