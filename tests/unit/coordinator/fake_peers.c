/* fake_peers.c - see fakes.h. */
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/random.h"
#include "tests/unit/coordinator/fakes.h"

#define CONTROL(NAME, field, value)                                                                                    \
    Hcattn__Control__Control control = HCATTN__CONTROL__CONTROL__INIT;                                                 \
    control.message_case = HCATTN__CONTROL__CONTROL__MESSAGE_##NAME;                                                   \
    control.field = (value)

static Hcattn__Control__Hello greeting(Hcattn__Control__Role role, uint32_t index, uint64_t incarnation)
{
    static char version[] = HCATTN_VERSION, achieved[] = "a fake";
    Hcattn__Control__Hello hello = HCATTN__CONTROL__HELLO__INIT;
    hello.layout = LAYOUT_VERSION;
    hello.version = version;
    hello.role = role;
    hello.index = index;
    hello.incarnation = incarnation;
    hello.pid = (uint32_t)getpid();
    hello.achieved = achieved;
    return hello;
}

static struct socket *dealer(struct fakes *fakes, const char *path, uint64_t route)
{
    char endpoint[160];
    struct socket *socket;
    int result = socket_new_dealer(fakes->context, route, 0, &socket);
    assert(result == 0);
    snprintf(endpoint, sizeof(endpoint), "ipc://%s", path);
    result = socket_connect(socket, endpoint);
    assert(result == 0);
    (void)result;
    return socket;
}

static void copy_sentence(char target[512], const char *sentence)
{
    snprintf(target, 512, "%s", sentence);
}

/* ---- store ---- */

void fake_store_register(struct fakes *fakes, uint32_t index, bool holds_segment)
{
    struct fake_store *store = &fakes->stores[index];
    store->fd = fakes_connect(fakes);
    store->route = random_u64();
    store->hung_up = false;
    store->refused[0] = 0;
    Hcattn__Control__Hello hello = greeting(HCATTN__CONTROL__ROLE__VALUE_STORE, index, store->incarnation);
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
        store->data = dealer(fakes, message->welcome->data_socket, store->route);
        break;
    case HCATTN__CONTROL__CONTROL__MESSAGE_REFUSED:
        copy_sentence(store->refused, message->refused->sentence);
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

static void take_descriptors(struct socket *socket, struct descriptor *last, uint32_t *n)
{
    struct socket_message *message;
    while (socket && socket_receive(socket, false, &message) == 0) {
        int result = descriptor_check(message->frames[0].data, message->frames[0].n_bytes, last);
        assert(result == 0 && message->n_frames == 1);
        (void)result;
        (*n)++;
        socket_message_free(message);
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
    take_descriptors(store->data, &store->last, &store->n_descriptors);
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

/* ---- worker ---- */

void fake_worker_register(struct fakes *fakes, uint32_t index)
{
    struct fake_worker *worker = &fakes->workers[index];
    static char name[] = "tiny";
    worker->fd = fakes_connect(fakes);
    worker->data_route = random_u64();
    worker->work_route = random_u64();
    worker->n_exchange_ready = worker->n_store_up = worker->n_store_down = 0;
    worker->hung_up = false;
    worker->refused[0] = 0;
    Hcattn__Control__Hello hello = greeting(HCATTN__CONTROL__ROLE__GPU_WORKER, index, worker->incarnation);
    Hcattn__Control__RowShape shape = HCATTN__CONTROL__ROW_SHAPE__INIT;
    shape.n_layers = worker->shape.n_layers;
    shape.n_kv_heads = worker->shape.n_kv_heads;
    shape.head_dim = worker->shape.head_dim;
    shape.codec = worker->shape.codec;
    hello.shape = &shape;
    hello.data_route = worker->data_route;
    hello.work_route = worker->work_route;
    hello.model_name = name;
    hello.model_hash_low = hello.model_hash_high = worker->model;
    hello.n_ctx = worker->n_ctx;
    CONTROL(HELLO, hello, &hello);
    fakes_say(worker->fd, &control, -1);
}

void fake_worker_hang_up(struct fake_worker *worker)
{
    worker->data = socket_free(worker->data);
    worker->work = socket_free(worker->work);
    for (uint32_t i = 0; i < worker->n_queue; i++)
        hcattn__work__work_request__free_unpacked(worker->queue[i], NULL);
    worker->n_queue = 0;
    if (worker->fd >= 0)
        close(worker->fd);
    worker->fd = -1;
}

void fake_worker_rebirth(struct fake_worker *worker)
{
    fake_worker_hang_up(worker);
    worker->incarnation = random_u64();
}

static void store_up(struct fake_worker *worker, const Hcattn__Control__StoreUp *message, int fd)
{
    struct segment_mapping mapping = {0};
    worker->segment_writable = segment_map(fd, 0, true, &mapping) == 0;
    segment_unmap(&mapping);
    int result = segment_map(fd, 0, false, &mapping);
    assert(result == 0);
    segment_unmap(&mapping);
    close(fd);
    worker->n_store_up++;
    worker->store_route[message->store] = message->route;
    worker->store_incarnation[message->store] = message->incarnation;
    int memory;
    result = segment_create("exchange", 4096, &memory);
    assert(result == 0);
    (void)result;
    Hcattn__Control__Exchange exchange = HCATTN__CONTROL__EXCHANGE__INIT;
    exchange.store = message->store;
    exchange.worker_incarnation = worker->incarnation;
    exchange.store_incarnation = message->incarnation;
    CONTROL(EXCHANGE, exchange, &exchange);
    fakes_say(worker->fd, &control, memory);
    close(memory);
}

static void worker_hears(struct fakes *fakes, struct fake_worker *worker, Hcattn__Control__Control *message, int fd)
{
    switch (message->message_case) {
    case HCATTN__CONTROL__CONTROL__MESSAGE_WELCOME:
        worker->data = socket_free(worker->data);
        worker->work = socket_free(worker->work);
        worker->data = dealer(fakes, message->welcome->data_socket, worker->data_route);
        worker->work = dealer(fakes, message->welcome->work_socket, worker->work_route);
        break;
    case HCATTN__CONTROL__CONTROL__MESSAGE_REFUSED:
        copy_sentence(worker->refused, message->refused->sentence);
        break;
    case HCATTN__CONTROL__CONTROL__MESSAGE_STORE_UP:
        store_up(worker, message->store_up, fd);
        break;
    case HCATTN__CONTROL__CONTROL__MESSAGE_STORE_DOWN:
        worker->n_store_down++;
        break;
    case HCATTN__CONTROL__CONTROL__MESSAGE_EXCHANGE_READY:
        worker->n_exchange_ready += message->exchange_ready->status == 0;
        break;
    default:
        assert(!"a message that no worker should get");
    }
}

void fake_worker_answer(struct fake_worker *worker, Hcattn__Work__WorkReply *reply)
{
    size_t n = hcattn__work__work_reply__get_packed_size(reply);
    uint8_t *bytes = malloc(n + 1);
    assert(bytes);
    struct frame frame = {bytes, hcattn__work__work_reply__pack(reply, bytes)};
    int result = socket_send(worker->work, &frame, 1, true);
    assert(result == 0);
    (void)result;
    free(bytes);
}

static void prepare(struct fake_worker *worker, const Hcattn__Work__WorkRequest *request)
{
    Hcattn__Work__Prepared prepared = HCATTN__WORK__PREPARED__INIT;
    Hcattn__Work__WorkReply reply = HCATTN__WORK__WORK_REPLY__INIT;
    const Hcattn__Input *input = request->prepare->input;
    uint32_t ids[4096];
    prepared.ids = ids;
    if (input->input_case == HCATTN__INPUT__INPUT_TEXT)
        for (const char *at = input->text; *at; at++)
            ids[prepared.n_ids++] = (uint8_t)*at;
    reply.work = request->work;
    reply.reply_case = HCATTN__WORK__WORK_REPLY__REPLY_PREPARED;
    reply.prepared = &prepared;
    fake_worker_answer(worker, &reply);
}

void fake_worker_pump(struct fakes *fakes, struct fake_worker *worker)
{
    Hcattn__Control__Control *message;
    struct socket_message *work;
    int fd;
    while ((message = fakes_hear(worker->fd, &fd))) {
        worker_hears(fakes, worker, message, fd);
        hcattn__control__control__free_unpacked(message, NULL);
    }
    if (fd == -2) {
        worker->hung_up = true;
        fake_worker_hang_up(worker);
    }
    while (worker->work && worker->n_queue < FAKE_QUEUE && socket_receive(worker->work, false, &work) == 0) {
        Hcattn__Work__WorkRequest *request =
            hcattn__work__work_request__unpack(NULL, work->frames[0].n_bytes, work->frames[0].data);
        assert(request && work->n_frames == 1);
        if (request->request_case == HCATTN__WORK__WORK_REQUEST__REQUEST_PREPARE && !worker->mute) {
            prepare(worker, request);
            hcattn__work__work_request__free_unpacked(request, NULL);
        } else {
            worker->queue[worker->n_queue++] = request;
        }
        socket_message_free(work);
    }
    take_descriptors(worker->data, &worker->last, &worker->n_descriptors);
}

void fake_worker_beat(struct fake_worker *worker, uint64_t progress, bool busy, const char *phase)
{
    Hcattn__Control__Heartbeat beat = HCATTN__CONTROL__HEARTBEAT__INIT;
    beat.progress = progress;
    beat.busy = busy;
    beat.phase = (char *)(uintptr_t)phase;
    CONTROL(HEARTBEAT, heartbeat, &beat);
    fakes_say(worker->fd, &control, -1);
}

static Hcattn__Work__WorkRequest *shift(struct fake_worker *worker)
{
    Hcattn__Work__WorkRequest *first = worker->queue[0];
    worker->n_queue--;
    memmove(&worker->queue[0], &worker->queue[1], worker->n_queue * sizeof(worker->queue[0]));
    return first;
}

Hcattn__Work__WorkRequest *fake_worker_take(struct fakes *fakes, struct fake_worker *worker,
                                            Hcattn__Work__WorkRequest__RequestCase kind)
{
    for (;;) {
        FAKES_WAIT(fakes, worker->n_queue > 0);
        Hcattn__Work__WorkRequest *request = shift(worker);
        if (request->request_case == kind)
            return request;
        hcattn__work__work_request__free_unpacked(request, NULL);
    }
}

void fake_worker_generated(struct fake_worker *worker, uint64_t work, uint32_t first, uint32_t n)
{
    Hcattn__Generated generated = HCATTN__GENERATED__INIT;
    Hcattn__Work__WorkReply reply = HCATTN__WORK__WORK_REPLY__INIT;
    uint32_t ids[64];
    assert(n <= 64);
    for (uint32_t i = 0; i < n; i++)
        ids[i] = 500 + first + i;
    generated.first = first;
    generated.n_ids = n;
    generated.ids = ids;
    reply.work = work;
    reply.reply_case = HCATTN__WORK__WORK_REPLY__REPLY_GENERATED;
    reply.generated = &generated;
    fake_worker_answer(worker, &reply);
}

void fake_worker_scored(struct fake_worker *worker, uint64_t work, uint64_t first, size_t n)
{
    Hcattn__Scored scored = HCATTN__SCORED__INIT;
    Hcattn__Work__WorkReply reply = HCATTN__WORK__WORK_REPLY__INIT;
    Hcattn__TokenLogprobs values[64], *pointers[64];
    assert(n <= 64);
    for (size_t i = 0; i < n; i++) {
        hcattn__token_logprobs__init(&values[i]);
        values[i].logprob = -(float)(first + i);
        pointers[i] = &values[i];
    }
    scored.first = first;
    scored.n_scores = n;
    scored.scores = pointers;
    reply.work = work;
    reply.reply_case = HCATTN__WORK__WORK_REPLY__REPLY_SCORED;
    reply.scored = &scored;
    fake_worker_answer(worker, &reply);
}

void fake_worker_finished(struct fake_worker *worker, uint64_t work, uint32_t n_generated, uint64_t n_tokens)
{
    Hcattn__Work__Finished finished = HCATTN__WORK__FINISHED__INIT;
    Hcattn__Work__WorkReply reply = HCATTN__WORK__WORK_REPLY__INIT;
    finished.reason = HCATTN__FINISH_REASON__FINISH_LENGTH;
    finished.n_generated = n_generated;
    finished.n_tokens = n_tokens;
    reply.work = work;
    reply.reply_case = HCATTN__WORK__WORK_REPLY__REPLY_FINISHED;
    reply.finished = &finished;
    fake_worker_answer(worker, &reply);
}

void fake_worker_error(struct fake_worker *worker, uint64_t work, Hcattn__ErrorCode code)
{
    Hcattn__Error error = HCATTN__ERROR__INIT;
    Hcattn__Work__WorkReply reply = HCATTN__WORK__WORK_REPLY__INIT;
    static char sentence[] = "the worker says so";
    error.code = code;
    error.sentence = sentence;
    reply.work = work;
    reply.reply_case = HCATTN__WORK__WORK_REPLY__REPLY_ERROR;
    reply.error = &error;
    fake_worker_answer(worker, &reply);
}

void fake_worker_progress(struct fake_worker *worker, uint64_t work, uint64_t n_done)
{
    Hcattn__Progress progress = HCATTN__PROGRESS__INIT;
    Hcattn__Work__WorkReply reply = HCATTN__WORK__WORK_REPLY__INIT;
    progress.n_done = n_done;
    progress.n_total = 1000;
    reply.work = work;
    reply.reply_case = HCATTN__WORK__WORK_REPLY__REPLY_PROGRESS;
    reply.progress = &progress;
    fake_worker_answer(worker, &reply);
}

/* ---- supervisor ---- */

void fake_supervisor_register(struct fakes *fakes, struct fake_supervisor *supervisor, Hcattn__Control__Role role,
                              uint32_t index)
{
    *supervisor = (struct fake_supervisor){.incarnation = random_u64(), .fd = fakes_connect(fakes)};
    Hcattn__Control__Hello hello = greeting(HCATTN__CONTROL__ROLE__SUPERVISOR, index, supervisor->incarnation);
    hello.supervises = role;
    CONTROL(HELLO, hello, &hello);
    fakes_say(supervisor->fd, &control, -1);
}

void fake_supervisor_child_dead(struct fake_supervisor *supervisor, uint64_t incarnation)
{
    Hcattn__Control__ChildDead dead = HCATTN__CONTROL__CHILD_DEAD__INIT;
    dead.incarnation = incarnation;
    dead.exit_status = 9;
    CONTROL(CHILD_DEAD, child_dead, &dead);
    fakes_say(supervisor->fd, &control, -1);
}

void fake_supervisor_pump(struct fake_supervisor *supervisor)
{
    Hcattn__Control__Control *message;
    int fd;
    while ((message = fakes_hear(supervisor->fd, &fd))) {
        if (message->message_case == HCATTN__CONTROL__CONTROL__MESSAGE_FENCE) {
            supervisor->fenced = message->fence->incarnation;
            snprintf(supervisor->reason, sizeof(supervisor->reason), "%s", message->fence->reason);
        }
        hcattn__control__control__free_unpacked(message, NULL);
    }
    if (fd == -2) {
        close(supervisor->fd);
        supervisor->fd = -1;
    }
}
