/* control.c - see control.h. */
#include "value-store/control.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MESSAGE(member, MEMBER, value)                                                                                 \
    (Hcattn__Control__Control)                                                                                         \
    {                                                                                                                  \
        .base = PROTOBUF_C_MESSAGE_INIT(&hcattn__control__control__descriptor),                                        \
        .message_case = HCATTN__CONTROL__CONTROL__MESSAGE_##MEMBER, .member = (value)                                  \
    }

int control_hello(struct control *control, uint64_t data_route)
{
    struct store *store = control->store;
    char achieved[CONTROL_TEXT];
    Hcattn__Control__Hello hello = HCATTN__CONTROL__HELLO__INIT;
    hello.layout = LAYOUT_VERSION;
    hello.version = (char *)(uintptr_t)HCATTN_VERSION;
    hello.role = HCATTN__CONTROL__ROLE__VALUE_STORE;
    hello.index = store->config.index;
    hello.incarnation = store->config.incarnation;
    hello.pid = (uint32_t)getpid();
    hello.data_route = data_route;
    hello.achieved = (char *)(uintptr_t)store_describe(store, achieved, sizeof(achieved));
    hello.memory_bytes = store->config.memory_bytes;
    hello.holds_segment = store->blocks != NULL;
    hello.numa_node = store_numa_node(store);
    hello.home_node = store_home_node(store);
    hello.node_cores = store_node_cores(store);
    Hcattn__Control__Control message = MESSAGE(hello, HELLO, &hello);
    return link_send(control->link, &message, store->segment_fd);
}

/* ---- segment ---- */

static int send_segment_ready(struct control *control, int status, const char *sentence)
{
    struct store *store = control->store;
    char achieved[CONTROL_TEXT];
    Hcattn__Control__SegmentReady ready = HCATTN__CONTROL__SEGMENT_READY__INIT;
    ready.status = status;
    ready.sentence = (char *)(uintptr_t)sentence;
    ready.achieved = (char *)(uintptr_t)store_describe(store, achieved, sizeof(achieved));
    ready.numa_node = store_numa_node(store);
    if (status == 0) {
        ready.n_bytes = store->mapping.n_bytes;
        ready.n_blocks = blocks_count(store->blocks).n_blocks;
    }
    Hcattn__Control__Control message = MESSAGE(segment_ready, SEGMENT_READY, &ready);
    return link_send(control->link, &message, status == 0 ? store->segment_fd : -1);
}

static int handle_format(struct control *control, const Hcattn__Control__Format *order, struct control_event *event)
{
    char sentence[STORE_SENTENCE] = "";
    struct row_shape shape = {0};
    if (order->shape) {
        shape = (struct row_shape){.n_layers = order->shape->n_layers,
                                   .n_kv_heads = order->shape->n_kv_heads,
                                   .head_dim = order->shape->head_dim,
                                   .codec = order->shape->codec};
    }
    exchanges_revoke_all(control->exchanges);
    store_begin_turn(control->store, "formatting");
    int status = store_format(control->store, &shape, sentence);
    store_end_turn(control->store);
    event->is_warning = status < 0;
    if (status < 0)
        snprintf(event->text, sizeof(event->text), "not formatted: %s", sentence);
    else
        store_describe(control->store, event->text, sizeof(event->text));
    return send_segment_ready(control, status, sentence);
}

static int handle_adopt(struct control *control, const Hcattn__Control__Adopt *order, int *fd,
                        struct control_event *event)
{
    char sentence[STORE_SENTENCE] = "the order to adopt came without a descriptor", described[CONTROL_TEXT / 2];
    struct blocks_adoption adoption = {0};
    exchanges_revoke_all(control->exchanges);
    store_begin_turn(control->store, "adopting");
    int status = *fd < 0 ? -EBADF : store_adopt(control->store, *fd, &adoption, sentence);
    store_end_turn(control->store);
    if (status < 0) {
        event->is_warning = true;
        snprintf(event->text, sizeof(event->text), "not adopted: %s", sentence);
        return send_segment_ready(control, status, sentence);
    }
    *fd = -1; /* the store's now */
    struct blocks_counts counts = blocks_count(control->store->blocks);
    event->is_warning = adoption.n_quarantined + adoption.n_orphans + adoption.n_records_dropped > 0;
    snprintf(event->text, sizeof(event->text),
             "adopted the segment of %016lx: %u sessions, %u blocks open, %u sealed; %u quarantined, %u without "
             "session, %u records dropped, %u layers summed again, %u sealed now; %s",
             (unsigned long)order->previous, counts.n_sessions, counts.n_open, counts.n_sealed, adoption.n_quarantined,
             adoption.n_orphans, adoption.n_records_dropped, adoption.n_layers_summed, adoption.n_sealed,
             store_describe(control->store, described, sizeof(described)));
    return send_segment_ready(control, 0, "");
}

/* ---- exchanges ---- */

static int handle_exchange(struct control *control, const Hcattn__Control__Exchange *order, int fd,
                           struct control_event *event)
{
    uint64_t own = control->store->config.incarnation;
    int status = fd < 0 ? -EBADF : 0;
    if (status == 0 && order->store_incarnation != own)
        status = -ESTALE;
    if (status == 0)
        status = exchanges_add(control->exchanges, order->worker_incarnation, own, fd);
    if (status < 0) {
        event->is_warning = true;
        snprintf(event->text, sizeof(event->text), "exchange of worker %016lx refused: %s",
                 (unsigned long)order->worker_incarnation, strerror(-status));
    }
    Hcattn__Control__ExchangeReady ready = HCATTN__CONTROL__EXCHANGE_READY__INIT;
    ready.store = control->store->config.index;
    ready.worker_incarnation = order->worker_incarnation;
    ready.store_incarnation = order->store_incarnation;
    ready.status = status;
    Hcattn__Control__Control message = MESSAGE(exchange_ready, EXCHANGE_READY, &ready);
    return link_send(control->link, &message, -1);
}

static int send_done(struct control *control, uint64_t sequence, int status, const char *sentence)
{
    Hcattn__Control__Done done = HCATTN__CONTROL__DONE__INIT;
    done.sequence = sequence;
    done.status = status;
    done.sentence = (char *)(uintptr_t)sentence;
    Hcattn__Control__Control message = MESSAGE(done, DONE, &done);
    return link_send(control->link, &message, -1);
}

static int handle_ring(struct control *control, uint64_t sequence, uint64_t worker, bool grant,
                       struct control_event *event)
{
    char sentence[STORE_SENTENCE] = "";
    int status = 0;
    if (!grant)
        exchanges_revoke(control->exchanges, worker);
    else if (!control->store->blocks)
        status = -ENODEV;
    else
        status = exchanges_grant(control->exchanges, worker, control->store);
    if (status < 0)
        snprintf(sentence, sizeof(sentence), "no ring for worker %016lx: %s", (unsigned long)worker,
                 status == -ENODEV   ? "this store has no segment"
                 : status == -ENOENT ? "its exchange is not known"
                                     : strerror(-status));
    event->is_warning = status < 0;
    snprintf(event->text, sizeof(event->text), "%s", sentence);
    return send_done(control, sequence, status, sentence);
}

/* ---- sessions and blocks ---- */

static int open_session(struct blocks *blocks, const Hcattn__Control__SessionOpen *order, char sentence[STORE_SENTENCE])
{
    struct session_record record = {
        .session = order->session,
        .model = {order->model_hash_low, order->model_hash_high},
        .opened_unix_s = order->opened_unix_s,
        .exact_tokens = order->exact_tokens,
        .flags = order->flags,
        .idle_timeout_s = order->idle_timeout_s,
    };
    int status = -EINVAL;
    if (order->lane_store.len != LAYOUT_N_LANES) {
        snprintf(sentence, STORE_SENTENCE, "%zu lanes instead of %u", order->lane_store.len, LAYOUT_N_LANES);
        return status;
    }
    atomic_store_explicit(&record.moves, order->moves, memory_order_relaxed);
    memcpy(record.lane_store[order->moves % 2], order->lane_store.data, LAYOUT_N_LANES);
    if (strlen(order->policy) >= sizeof(record.policy)) {
        snprintf(sentence, STORE_SENTENCE, "the policy's name is longer than %zu", sizeof(record.policy) - 1);
        return status;
    }
    strcpy(record.policy, order->policy);
    status = blocks_session_open(blocks, &record);
    if (status == -ENOSPC)
        snprintf(sentence, STORE_SENTENCE, "all %u session records are in use", BLOCKS_SESSION_CAPACITY);
    else if (status == -ESTALE)
        snprintf(sentence, STORE_SENTENCE, "session %016lx has been moved more often than %u times",
                 (unsigned long)order->session, order->moves);
    else if (status < 0)
        snprintf(sentence, STORE_SENTENCE, "session %016lx: %s", (unsigned long)order->session, strerror(-status));
    return status;
}

static struct block_handle to_handle(const Hcattn__Control__Handle *handle)
{
    if (!handle)
        return (struct block_handle){0};
    return (struct block_handle){.index = handle->index, .generation = handle->generation};
}

static int reserve(struct blocks *blocks, const Hcattn__Control__Reserve *order, char sentence[STORE_SENTENCE])
{
    if (order->n_blocks > CONTROL_MAX_RESERVED) {
        snprintf(sentence, STORE_SENTENCE, "%zu blocks in one order; at most %u", order->n_blocks,
                 CONTROL_MAX_RESERVED);
        return -EINVAL;
    }
    uint32_t n = (uint32_t)order->n_blocks, failed = 0;
    struct blocks_reservation *reservations = calloc(n ? n : 1, sizeof(*reservations));
    if (!reservations)
        return -ENOMEM;
    for (uint32_t i = 0; i < n; i++) {
        const Hcattn__Control__Reservation *block = order->blocks[i];
        reservations[i] = (struct blocks_reservation){
            .handle = to_handle(block->handle),
            .previous = to_handle(block->previous),
            .previous_store = block->previous_store,
            .number = block->number,
        };
    }
    int status = blocks_reserve(blocks, order->session, reservations, n, &failed);
    if (status == -ENOENT)
        snprintf(sentence, STORE_SENTENCE, "session %016lx is not open here", (unsigned long)order->session);
    else if (status < 0)
        snprintf(sentence, STORE_SENTENCE, "block %u, generation %u, as number %u: %s",
                 reservations[failed].handle.index, reservations[failed].handle.generation, reservations[failed].number,
                 strerror(-status));
    free(reservations);
    return status;
}

/* Begins what control_step() goes on with. */
static int begin_copying(struct control *control, struct copying_order *order, Hcattn__Control__CopyBlock **list,
                         char sentence[STORE_SENTENCE])
{
    struct blocks_copy blocks[CONTROL_MAX_COPIED];
    if (order->n_blocks > CONTROL_MAX_COPIED) {
        snprintf(sentence, STORE_SENTENCE, "%zu blocks in one order; at most %u", order->n_blocks, CONTROL_MAX_COPIED);
        return -EINVAL;
    }
    for (size_t i = 0; i < order->n_blocks; i++)
        blocks[i] = (struct blocks_copy){.from = to_handle(list[i]->from), .to = to_handle(list[i]->to)};
    order->blocks = blocks;
    return copying_begin(control->store, order, &control->copying, sentence);
}

static int copy(struct control *control, const Hcattn__Control__Copy *message, char sentence[STORE_SENTENCE])
{
    struct copying_order order = {.sequence = message->sequence,
                                  .from_session = message->from_session,
                                  .session = message->to_session,
                                  .segment_fd = -1,
                                  .n_blocks = message->n_blocks};
    return begin_copying(control, &order, message->blocks, sentence);
}

static int import(struct control *control, const Hcattn__Control__Import *message, int fd,
                  char sentence[STORE_SENTENCE])
{
    struct copying_order order = {.sequence = message->sequence,
                                  .imports = true,
                                  .from_store = message->from_store,
                                  .segment_fd = fd,
                                  .session = message->session,
                                  .n_blocks = message->n_blocks};
    return begin_copying(control, &order, message->blocks, sentence);
}

static int release(struct store *store, const Hcattn__Control__Release *order, char sentence[STORE_SENTENCE])
{
    if (order->lanes >> LAYOUT_N_LANES != 0) {
        snprintf(sentence, STORE_SENTENCE, "lanes %x: there are %u", order->lanes, LAYOUT_N_LANES);
        return -EINVAL;
    }
    store_begin_turn(store, "releasing");
    blocks_release(store->blocks, order->session, order->from_number, order->lanes);
    store_end_turn(store);
    return 0;
}

static int answer_order(struct control *control, uint64_t sequence, int status, const char *sentence,
                        struct control_event *event)
{
    if (status < 0) {
        event->is_warning = true;
        snprintf(event->text, sizeof(event->text), "order refused: %s", sentence[0] ? sentence : strerror(-status));
    }
    return send_done(control, sequence, status, sentence);
}

/* Orders about sessions need a segment; all are answered by Done. */
static int handle_order(struct control *control, const Hcattn__Control__Control *message, int fd,
                        struct control_event *event)
{
    struct blocks *blocks = control->store->blocks;
    char sentence[STORE_SENTENCE] = "";
    uint64_t sequence;
    int status = blocks ? 0 : -ENODEV;
    switch (message->message_case) {
    case HCATTN__CONTROL__CONTROL__MESSAGE_SESSION_OPEN:
        sequence = message->session_open->sequence;
        if (blocks) {
            store_begin_turn(control->store, "reserving");
            status = open_session(blocks, message->session_open, sentence);
            store_end_turn(control->store);
        }
        break;
    case HCATTN__CONTROL__CONTROL__MESSAGE_RESERVE:
        sequence = message->reserve->sequence;
        if (blocks) {
            store_begin_turn(control->store, "reserving");
            status = reserve(blocks, message->reserve, sentence);
            store_end_turn(control->store);
        }
        break;
    case HCATTN__CONTROL__CONTROL__MESSAGE_COPY:
        sequence = message->copy->sequence;
        if (blocks)
            status = copy(control, message->copy, sentence);
        break;
    case HCATTN__CONTROL__CONTROL__MESSAGE_IMPORT:
        sequence = message->import->sequence;
        if (blocks)
            status = import(control, message->import, fd, sentence);
        break;
    default:
        sequence = message->release->sequence;
        if (blocks)
            status = release(control->store, message->release, sentence);
        break;
    }
    if (!blocks)
        snprintf(sentence, sizeof(sentence), "this store has no segment");
    if (control->copying)
        return 0; /* answered when it has ended */
    return answer_order(control, sequence, status, sentence, event);
}

int control_step(struct control *control, struct control_event *ret_event)
{
    struct control_event event = {.kind = CONTROL_DONE};
    char sentence[STORE_SENTENCE] = "";
    int result = 0, status = copying_step(control->copying, sentence);
    if (status <= 0) {
        uint64_t sequence = copying_sequence(control->copying);
        control->copying = copying_end(control->copying);
        if (status == 0) {
            snprintf(event.text, sizeof(event.text), "%s", sentence);
            sentence[0] = 0;
        }
        result = answer_order(control, sequence, status, sentence, &event);
    }
    *ret_event = event;
    return result;
}

void control_hang_up(struct control *control)
{
    control->copying = copying_end(control->copying);
    link_detach(control->link);
    exchanges_clear(control->exchanges);
}

/* ---- dispatch ---- */

static int handle_message(struct control *control, const Hcattn__Control__Control *message, int *fd,
                          struct control_event *event)
{
    switch (message->message_case) {
    case HCATTN__CONTROL__CONTROL__MESSAGE_WELCOME:
        event->kind = CONTROL_WELCOME;
        snprintf(event->text, sizeof(event->text), "%s", message->welcome->data_socket);
        return 0;
    case HCATTN__CONTROL__CONTROL__MESSAGE_REFUSED:
        event->kind = CONTROL_REFUSED;
        snprintf(event->text, sizeof(event->text), "%s", message->refused->sentence);
        return 0;
    case HCATTN__CONTROL__CONTROL__MESSAGE_FORMAT:
        return handle_format(control, message->format, event);
    case HCATTN__CONTROL__CONTROL__MESSAGE_ADOPT:
        return handle_adopt(control, message->adopt, fd, event);
    case HCATTN__CONTROL__CONTROL__MESSAGE_EXCHANGE:
        return handle_exchange(control, message->exchange, *fd, event);
    case HCATTN__CONTROL__CONTROL__MESSAGE_WORKER_GONE:
        exchanges_remove(control->exchanges, message->worker_gone->worker_incarnation);
        return 0;
    case HCATTN__CONTROL__CONTROL__MESSAGE_RING_GRANT:
        return handle_ring(control, message->ring_grant->sequence, message->ring_grant->worker_incarnation, true,
                           event);
    case HCATTN__CONTROL__CONTROL__MESSAGE_RING_REVOKE:
        return handle_ring(control, message->ring_revoke->sequence, message->ring_revoke->worker_incarnation, false,
                           event);
    case HCATTN__CONTROL__CONTROL__MESSAGE_SESSION_OPEN:
    case HCATTN__CONTROL__CONTROL__MESSAGE_RESERVE:
    case HCATTN__CONTROL__CONTROL__MESSAGE_RELEASE:
    case HCATTN__CONTROL__CONTROL__MESSAGE_COPY:
    case HCATTN__CONTROL__CONTROL__MESSAGE_IMPORT:
        return handle_order(control, message, *fd, event);
    case HCATTN__CONTROL__CONTROL__MESSAGE_LEAVE:
        event->kind = CONTROL_LEAVE;
        return 0;
    default:
        event->kind = CONTROL_GARBAGE;
        snprintf(event->text, sizeof(event->text), "the coordinator sent a message of kind %d, which is not for stores",
                 (int)message->message_case);
        return 0;
    }
}

int control_handle(struct control *control, const void *bytes, size_t n_bytes, const int *fds, size_t n_fds,
                   struct control_event *ret_event)
{
    struct control_event event = {.kind = CONTROL_DONE};
    int fd = n_fds > 0 ? fds[0] : -1;
    int result = 0;
    Hcattn__Control__Control *message = hcattn__control__control__unpack(NULL, n_bytes, bytes);
    if (message) {
        result = handle_message(control, message, &fd, &event);
        hcattn__control__control__free_unpacked(message, NULL);
    } else {
        event.kind = CONTROL_GARBAGE;
        snprintf(event.text, sizeof(event.text), "%zu bytes from the coordinator are no message", n_bytes);
    }
    if (fd >= 0)
        close(fd);
    for (size_t i = 1; i < n_fds; i++)
        close(fds[i]);
    *ret_event = event;
    return result;
}
