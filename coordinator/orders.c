/*
 * orders.c - what the session table asks of the stores: write a record, open blocks, copy blocks, free blocks.
 *
 * An order stays in the list until its store says Done; it is sent again to the life of the store that comes next. All
 * orders can be repeated without harm, and those of one store stay in their order.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "common/log.h"
#include "coordinator/state.h"

void orders_free(struct order *order)
{
    free(order->numbers);
    free(order->blocks);
    free(order->others);
    free(order);
}

int orders_new(struct server *server, enum order_kind kind, uint8_t store, const struct session *session,
               struct order **ret_order)
{
    struct order *order = calloc(1, sizeof(*order));
    if (!order)
        return -ENOMEM;
    order->kind = kind;
    order->store = store;
    order->session = session->id;
    order->sequence = ++server->next_sequence;
    *ret_order = order;
    return 0;
}

void orders_enlist(struct server *server, struct order *order)
{
    if (server->last_order)
        server->last_order->next = order;
    else
        server->first_order = order;
    server->last_order = order;
    orders_send(server, order);
}

static void add(struct server *server, struct session *session, struct order *order)
{
    session->n_pending++;
    orders_enlist(server, order);
}

int orders_open(struct server *server, struct session *session)
{
    uint64_t stores = sessions_stores(session);
    for (uint8_t store = 0; store < SERVER_MAX_STORES; store++) {
        struct order *order;
        if (!(stores >> store & 1u))
            continue;
        int result = orders_new(server, ORDER_OPEN, store, session, &order);
        if (result != 0)
            return result;
        add(server, session, order);
    }
    return 0;
}

int orders_reserve(struct server *server, struct session *session, uint32_t from_number)
{
    for (uint8_t store = 0; store < SERVER_MAX_STORES; store++) {
        uint32_t number = from_number;
        while (number < session->n_blocks) {
            struct order *order;
            int result = orders_new(server, ORDER_RESERVE, store, session, &order);
            if (result != 0)
                return result;
            order->numbers = malloc(RESERVE_MAX * sizeof(uint32_t));
            if (!order->numbers) {
                orders_free(order);
                return -ENOMEM;
            }
            for (; number < session->n_blocks && order->n < RESERVE_MAX; number++)
                if (session->blocks[number].store == store)
                    order->numbers[order->n++] = number;
            if (order->n == 0) {
                orders_free(order);
                break;
            }
            add(server, session, order);
        }
    }
    return 0;
}

/* The next COPY_MAX blocks of the store, from *number on; NULL with *ret_result 0: there are none. */
static struct order *next_copy(struct server *server, struct session *session, const struct session *from,
                               uint8_t store, uint32_t n_blocks, uint32_t *number, int *ret_result)
{
    struct order *order;
    *ret_result = orders_new(server, ORDER_COPY, store, session, &order);
    if (*ret_result != 0)
        return NULL;
    order->from = from->id;
    order->numbers = malloc(COPY_MAX * sizeof(uint32_t));
    order->blocks = malloc(COPY_MAX * sizeof(struct placed_block));
    if (!order->numbers || !order->blocks)
        *ret_result = -ENOMEM;
    for (; *ret_result == 0 && *number < n_blocks && order->n < COPY_MAX; ++*number) {
        if (from->blocks[*number].store != store)
            continue;
        order->blocks[order->n] = (struct placed_block){from->blocks[*number].handle, store};
        order->numbers[order->n++] = *number;
    }
    if (*ret_result == 0 && order->n > 0)
        return order;
    orders_free(order);
    return NULL;
}

int orders_copy(struct server *server, struct session *session, const struct session *from, uint32_t n_blocks)
{
    for (uint8_t store = 0; store < SERVER_MAX_STORES; store++) {
        struct order *order;
        uint32_t number = 0;
        int result;
        while ((order = next_copy(server, session, from, store, n_blocks, &number, &result)))
            add(server, session, order);
        if (result != 0)
            return result;
    }
    return 0;
}

int orders_new_release(struct server *server, uint8_t store, const struct session *session,
                       const struct placed_block *blocks, uint32_t n_blocks, struct order **ret_order)
{
    struct order *order;
    int result = orders_new(server, ORDER_RELEASE, store, session, &order);
    if (result != 0)
        return result;
    order->blocks = calloc(n_blocks + 1u, sizeof(struct placed_block));
    if (!order->blocks) {
        orders_free(order);
        return -ENOMEM;
    }
    for (uint32_t i = 0; i < n_blocks; i++)
        if (blocks[i].store == store)
            order->blocks[order->n++] = blocks[i];
    *ret_order = order;
    return 0;
}

int orders_release_cut(struct server *server, struct session *session, uint32_t from_number,
                       const struct placed_block *cut, uint32_t n_cut)
{
    uint64_t stores = sessions_stores(session);
    for (uint32_t i = 0; i < n_cut; i++)
        stores |= UINT64_C(1) << (cut[i].store & 63u);
    for (uint8_t store = 0; store < SERVER_MAX_STORES; store++) {
        struct order *order;
        if (!(stores >> store & 1u))
            continue;
        int result = orders_new_release(server, store, session, cut, n_cut, &order);
        if (result != 0)
            return result;
        order->from_number = from_number;
        add(server, session, order);
    }
    return 0;
}

int orders_release(struct server *server, struct session *session, uint32_t from_number)
{
    uint32_t n_cut = session->n_blocks > from_number ? session->n_blocks - from_number : 0;
    struct placed_block *cut = calloc(n_cut + 1u, sizeof(*cut));
    if (!cut)
        return -ENOMEM;
    for (uint32_t i = 0; i < n_cut; i++)
        cut[i] = (struct placed_block){session->blocks[from_number + i].handle, session->blocks[from_number + i].store};
    int result = orders_release_cut(server, session, from_number, cut, n_cut);
    if (result == 0)
        sessions_cut_blocks(session, from_number);
    free(cut);
    return result;
}

int orders_open_again(struct server *server, struct session *session)
{
    int result = orders_release(server, session, 0);
    return result != 0 ? result : orders_open(server, session);
}

void orders_roll_back(struct server *server, struct session *session)
{
    uint32_t from = sessions_first_unconfirmed(session);
    for (uint32_t i = from; i < session->n_blocks; i++) {
        struct session_block *block = &session->blocks[i];
        const struct segment_view *view = descriptors_view(server->descriptors, block->store);
        if (!view || block->handle.index >= view->header.n_blocks)
            continue;
        const struct block_header *header = descriptors_block(view, block->handle.index);
        placement_raise(server->placement, block->store, block->handle.index, header->handle.generation);
        if (atomic_load_explicit(&header->state, memory_order_acquire) == BLOCK_FREE || header->session == session->id)
            continue;
        LOG_ERROR("block %u of value-store %u belongs to session %016llx, which is not known to hold it: left alone",
                  block->handle.index, block->store, (unsigned long long)header->session);
        block->handle.generation = 0; /* names nothing: it is not given out again */
    }
    session->reserve_status = 0;
    /* A release from the first block on takes the record, too. */
    if ((from == 0 ? orders_open_again(server, session) : orders_release(server, session, from)) != 0)
        LOG_ERROR("session %016llx: out of memory", (unsigned long long)session->id);
}

/* ---- answers ---- */

static void confirm(const struct order *order, struct session *session)
{
    for (uint32_t i = 0; i < order->n; i++)
        if (order->numbers[i] < session->n_blocks)
            session->blocks[order->numbers[i]].confirmed = true;
}

static void freed(struct server *server, const struct order *order, struct session *session)
{
    for (uint32_t i = 0; i < order->n; i++)
        if (placement_release(server->placement, order->blocks[i].store, order->blocks[i].handle) == 0 && session)
            session->freed_bytes += placement_block_bytes(server->placement, order->store);
}

static void complete(struct server *server, struct order *order, int status, const char *sentence)
{
    struct session *session = sessions_find(server->sessions, order->session);
    server->dirty = true;
    if (order->move != 0 && order->kind != ORDER_RELEASE) {
        if (session)
            moves_done(server, session, order, status, sentence);
        return;
    }
    if (!session && order->move == 0)
        return;
    if (order->move == 0)
        session->n_pending--;
    if (order->kind == ORDER_RELEASE) {
        /* What a store could not free stays used: it is never given out while somebody may hold it. */
        if (status == 0 || status == -ENOENT)
            freed(server, order, session);
        else
            LOG_ERROR("value-store %u did not free blocks of session %016llx: %s", order->store,
                      (unsigned long long)order->session, sentence);
        return;
    }
    if (status == 0) {
        if (order->kind == ORDER_RESERVE)
            confirm(order, session);
        return;
    }
    if (session->reserve_status != 0)
        return; /* what follows from the first one */
    LOG_ERROR("value-store %u did not take an order of session %016llx: %s (%s)", order->store,
              (unsigned long long)order->session, sentence, strerror(status < 0 && status > -4096 ? -status : EPROTO));
    session->reserve_status = status < 0 ? status : -EPROTO;
}

static void remove_order(struct server *server, struct order *before, struct order *order)
{
    if (before)
        before->next = order->next;
    else
        server->first_order = order->next;
    if (server->last_order == order)
        server->last_order = before;
}

void orders_done(struct server *server, uint32_t store, const Hcattn__Control__Done *message)
{
    struct order *before = NULL;
    for (struct order *order = server->first_order; order; before = order, order = order->next) {
        if (order->sequence != message->sequence || order->store != store || !order->sent)
            continue;
        remove_order(server, before, order);
        complete(server, order, message->status, message->sentence);
        orders_free(order);
        return;
    }
}

void orders_resend(struct server *server, uint32_t store)
{
    for (struct order *order = server->first_order; order; order = order->next)
        if ((order->store == store || (order->kind == ORDER_IMPORT && order->from_store == store)) && !order->sent)
            orders_send(server, order);
}

void orders_unsent(struct server *server, uint32_t store)
{
    for (struct order *order = server->first_order; order; order = order->next)
        if (order->store == store)
            order->sent = false;
}

void orders_forget_store(struct server *server, uint32_t store)
{
    struct order *before = NULL;
    for (struct order *order = server->first_order, *next; order; order = next) {
        next = order->next;
        if (order->store != store && (order->kind != ORDER_IMPORT || order->from_store != store)) {
            before = order;
            continue;
        }
        remove_order(server, before, order);
        complete(server, order, order->kind == ORDER_RELEASE ? 0 : -ENODEV, "its segment is gone");
        orders_free(order);
    }
}

void orders_free_all(struct server *server)
{
    while (server->first_order) {
        struct order *order = server->first_order;
        server->first_order = order->next;
        orders_free(order);
    }
    server->last_order = NULL;
}

/* Orders of a move that was given up and that its store never got: there is nothing to do any more but to free. */
static void forget_session(struct server *server, uint64_t session)
{
    struct order *before = NULL;
    for (struct order *order = server->first_order, *next; order; order = next) {
        next = order->next;
        if (order->session != session || order->kind == ORDER_RELEASE) {
            before = order;
            continue;
        }
        remove_order(server, before, order);
        orders_free(order);
    }
}

/* ---- closing ---- */

static void begin_close(struct server *server, struct session *session)
{
    session->freed_bytes = 0;
    workers_forget(server, session->id);
    if (sessions_move(session, SESSION_CLOSING) != 0 || orders_release(server, session, 0) != 0) {
        LOG_ERROR("session %016llx cannot be closed now", (unsigned long long)session->id);
        return;
    }
    const char *why = session->close_why ? session->close_why : "asked for";
    server->closed[server->n_closed++ % MAX_CLOSED] = (struct closed_session){session->id, why};
    LOG_INFO("session %016llx is closing: %s", (unsigned long long)session->id, why);
}

void orders_settle(struct server *server)
{
    uint32_t cursor = 0;
    for (struct session *session; (session = sessions_next(server->sessions, &cursor));) {
        bool may_close = session->state == SESSION_READY || session->state == SESSION_RECOVERING ||
                         (session->state == SESSION_OPENING && session->n_pending == 0);
        if (session->close_wanted && !session->request && may_close && !session->move)
            begin_close(server, session);
        if (session->state == SESSION_CLOSING && session->n_pending == 0) {
            (void)sessions_move(session, SESSION_CLOSED);
            flow_closed(server, session);
            forget_session(server, session->id);
            sessions_remove(server->sessions, session);
            cursor--;
            server->dirty = true;
        }
    }
}
