/* orders_send.c - an order of orders.c as a message. */
#include "coordinator/state.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "common/log.h"

static void send_open(struct server *server, struct peer *peer, const struct order *order,
                      const struct session *session)
{
    Hcattn__Control__SessionOpen open = HCATTN__CONTROL__SESSION_OPEN__INIT;
    struct session_terms terms = session->terms;
    if (order->commits && session->move) {
        memcpy(terms.lane_store, session->move->lane_store, sizeof(terms.lane_store));
        terms.moves++;
    }
    open.sequence = order->sequence;
    open.session = session->id;
    open.model_hash_low = terms.model[0];
    open.model_hash_high = terms.model[1];
    open.opened_unix_s = terms.opened_unix_s;
    open.exact_tokens = terms.exact_tokens;
    open.flags = terms.flags;
    open.idle_timeout_s = terms.idle_timeout_s;
    open.lane_store = (ProtobufCBinaryData){LAYOUT_N_LANES, terms.lane_store};
    open.policy = terms.policy;
    open.moves = terms.moves;
    Hcattn__Control__Control control = HCATTN__CONTROL__CONTROL__INIT;
    control.message_case = HCATTN__CONTROL__CONTROL__MESSAGE_SESSION_OPEN;
    control.session_open = &open;
    control_send(server, peer, &control, -1);
}

static Hcattn__Control__Handle handle_of(struct block_handle handle)
{
    Hcattn__Control__Handle message = HCATTN__CONTROL__HANDLE__INIT;
    message.index = handle.index;
    message.generation = handle.generation;
    return message;
}

/* The i-th block of a reservation, and the one before it in the session. False: it was cut off meanwhile. */
static bool block_of(const struct order *order, const struct session *session, uint32_t i,
                     struct placed_block *ret_block, struct placed_block *ret_before)
{
    uint32_t number = order->numbers[i];
    struct placed_block none = {{0, 0}, 0};
    if (order->blocks) {
        *ret_block = order->blocks[i];
        *ret_before = order->others[i];
        return true;
    }
    if (number >= session->n_blocks)
        return false;
    const struct session_block *blocks = session->blocks;
    *ret_block = (struct placed_block){blocks[number].handle, blocks[number].store};
    *ret_before = number > 0 ? (struct placed_block){blocks[number - 1].handle, blocks[number - 1].store} : none;
    return true;
}

static void send_reserve(struct server *server, struct peer *peer, const struct order *order,
                         const struct session *session)
{
    static Hcattn__Control__Reservation reservations[RESERVE_MAX]; /* one thread; too large for the stack */
    static Hcattn__Control__Handle handles[RESERVE_MAX], previous[RESERVE_MAX];
    static Hcattn__Control__Reservation *pointers[RESERVE_MAX];
    Hcattn__Control__Reserve reserve = HCATTN__CONTROL__RESERVE__INIT;
    for (uint32_t i = 0; i < order->n; i++) {
        uint32_t number = order->numbers[i];
        struct placed_block block, before;
        if (!block_of(order, session, i, &block, &before))
            continue;
        size_t j = reserve.n_blocks++;
        hcattn__control__reservation__init(&reservations[j]);
        handles[j] = handle_of(block.handle);
        previous[j] = handle_of(before.handle);
        reservations[j].previous_store = before.store;
        reservations[j].handle = &handles[j];
        reservations[j].previous = &previous[j];
        reservations[j].number = number;
        pointers[j] = &reservations[j];
    }
    reserve.sequence = order->sequence;
    reserve.session = session->id;
    reserve.blocks = pointers;
    Hcattn__Control__Control control = HCATTN__CONTROL__CONTROL__INIT;
    control.message_case = HCATTN__CONTROL__CONTROL__MESSAGE_RESERVE;
    control.reserve = &reserve;
    control_send(server, peer, &control, -1);
}

static void send_copy(struct server *server, struct peer *peer, const struct order *order,
                      const struct session *session)
{
    Hcattn__Control__CopyBlock blocks[COPY_MAX], *pointers[COPY_MAX];
    Hcattn__Control__Handle from[COPY_MAX], to[COPY_MAX];
    Hcattn__Control__Copy copy = HCATTN__CONTROL__COPY__INIT;
    for (uint32_t i = 0; i < order->n; i++) {
        uint32_t number = order->numbers[i];
        if (number >= session->n_blocks)
            continue;
        size_t j = copy.n_blocks++;
        hcattn__control__copy_block__init(&blocks[j]);
        from[j] = handle_of(order->blocks[i].handle);
        to[j] = handle_of(session->blocks[number].handle);
        blocks[j].from = &from[j];
        blocks[j].to = &to[j];
        pointers[j] = &blocks[j];
    }
    copy.sequence = order->sequence;
    copy.from_session = order->from;
    copy.to_session = session->id;
    copy.blocks = pointers;
    Hcattn__Control__Control control = HCATTN__CONTROL__CONTROL__INIT;
    control.message_case = HCATTN__CONTROL__CONTROL__MESSAGE_COPY;
    control.copy = &copy;
    control_send(server, peer, &control, -1);
}

/* The store whose blocks are copied must not be writing: it serves, and its session is parked where that matters, or is dead. */
static bool send_import(struct server *server, struct peer *peer, const struct order *order)
{
    Hcattn__Control__CopyBlock blocks[COPY_MAX], *pointers[COPY_MAX];
    Hcattn__Control__Handle from[COPY_MAX], to[COPY_MAX];
    Hcattn__Control__Import import = HCATTN__CONTROL__IMPORT__INIT;
    int fd;
    if (!stores_ready(server, order->from_store) && !descriptors_owner_is_dead(server->descriptors, order->from_store))
        return false;
    int result = descriptors_readonly(server->descriptors, order->from_store, &fd);
    if (result != 0) {
        LOG_ERROR("value-store %u: its segment cannot be opened for value-store %u: %s", order->from_store,
                  order->store, strerror(-result));
        return false;
    }
    for (uint32_t i = 0; i < order->n; i++) {
        hcattn__control__copy_block__init(&blocks[i]);
        from[i] = handle_of(order->blocks[i].handle);
        to[i] = handle_of(order->others[i].handle);
        blocks[i].from = &from[i];
        blocks[i].to = &to[i];
        pointers[i] = &blocks[i];
    }
    import.sequence = order->sequence;
    import.session = order->session;
    import.from_store = order->from_store;
    import.n_blocks = order->n;
    import.blocks = pointers;
    Hcattn__Control__Control control = HCATTN__CONTROL__CONTROL__INIT;
    control.message_case = HCATTN__CONTROL__CONTROL__MESSAGE_IMPORT;
    control.import = &import;
    control_send(server, peer, &control, fd);
    return true;
}

static void send_release(struct server *server, struct peer *peer, const struct order *order)
{
    Hcattn__Control__Release release = HCATTN__CONTROL__RELEASE__INIT;
    release.sequence = order->sequence;
    release.session = order->session;
    release.from_number = order->from_number;
    release.lanes = order->lanes;
    Hcattn__Control__Control control = HCATTN__CONTROL__CONTROL__INIT;
    control.message_case = HCATTN__CONTROL__CONTROL__MESSAGE_RELEASE;
    control.release = &release;
    control_send(server, peer, &control, -1);
}

void orders_send(struct server *server, struct order *order)
{
    struct peer *peer = peers_of(stores_ready(server, order->store));
    const struct session *session = sessions_find(server->sessions, order->session);
    if (!peer || (!session && order->kind != ORDER_RELEASE))
        return;
    order->sent = true;
    switch (order->kind) {
    case ORDER_OPEN:
        send_open(server, peer, order, session);
        break;
    case ORDER_RESERVE:
        send_reserve(server, peer, order, session);
        break;
    case ORDER_COPY:
        send_copy(server, peer, order, session);
        break;
    case ORDER_IMPORT:
        order->sent = send_import(server, peer, order);
        break;
    default:
        send_release(server, peer, order);
        break;
    }
}
