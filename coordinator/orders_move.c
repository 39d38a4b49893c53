/* orders_move.c - what a move of lanes asks of the stores: orders that count for the move and not for the session. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "coordinator/state.h"

static void add_to_move(struct server *server, struct session *session, struct order *order)
{
    order->move = session->move->id;
    session->move->n_pending++;
    orders_enlist(server, order);
}

int orders_move_open(struct server *server, struct session *session, uint64_t stores, bool commits)
{
    for (uint8_t store = 0; store < SERVER_MAX_STORES; store++) {
        struct order *order;
        if (!(stores >> store & 1u))
            continue;
        int result = orders_new(server, ORDER_OPEN, store, session, &order);
        if (result != 0)
            return result;
        order->commits = commits;
        add_to_move(server, session, order);
    }
    return 0;
}

static int new_lists(struct order *order, uint32_t n)
{
    order->numbers = malloc(n * sizeof(uint32_t));
    order->blocks = malloc(n * sizeof(struct placed_block));
    order->others = malloc(n * sizeof(struct placed_block));
    return order->numbers && order->blocks && order->others ? 0 : -ENOMEM;
}

/* Where the block will be, or is if it stays; generation 0: there is none of that number. */
static struct placed_block place_after(const struct session *session, uint32_t number)
{
    const struct move *move = session->move;
    if (number < move->n_staged && move->staged[number].to.handle.generation != 0)
        return move->staged[number].to;
    if (number < session->n_blocks)
        return (struct placed_block){session->blocks[number].handle, session->blocks[number].store};
    return (struct placed_block){{0, 0}, 0};
}

int orders_move_reserve(struct server *server, struct session *session, uint32_t from_number)
{
    const struct move *move = session->move;
    for (uint8_t store = 0; store < SERVER_MAX_STORES; store++) {
        uint32_t number = from_number;
        while (number < move->n_staged) {
            struct order *order = NULL;
            int result = orders_new(server, ORDER_RESERVE, store, session, &order);
            if (result == 0)
                result = new_lists(order, RESERVE_MAX);
            for (; result == 0 && number < move->n_staged && order->n < RESERVE_MAX; number++) {
                struct placed_block to = move->staged[number].to;
                if (to.handle.generation == 0 || to.store != store)
                    continue;
                order->blocks[order->n] = to;
                order->others[order->n] =
                    number > 0 ? place_after(session, number - 1) : (struct placed_block){{0, 0}, 0};
                order->numbers[order->n++] = number;
            }
            if (result == 0 && order->n > 0) {
                add_to_move(server, session, order);
                continue;
            }
            if (order)
                orders_free(order);
            if (result != 0)
                return result;
        }
    }
    return 0;
}

/* Is there something to copy, and all of it? */
static bool is_filled(const struct server *server, const struct session *session, uint32_t number, bool *ret_sealed)
{
    const struct session_block *block = &session->blocks[number];
    const struct segment_view *view = descriptors_view(server->descriptors, block->store);
    if (!view || block->handle.index >= view->header.n_blocks)
        return false;
    const struct block_header *header = descriptors_block(view, block->handle.index);
    *ret_sealed = atomic_load_explicit(&header->state, memory_order_acquire) == BLOCK_SEALED;
    return *ret_sealed || atomic_load_explicit(&header->n_ids, memory_order_acquire) > 0;
}

int orders_move_import(struct server *server, struct session *session, bool all)
{
    struct move *move = session->move;
    for (uint8_t store = 0; store < SERVER_MAX_STORES; store++) {
        uint32_t number = 0;
        while (number < move->n_staged) {
            struct order *order = NULL;
            int result = orders_new(server, ORDER_IMPORT, store, session, &order);
            if (result == 0)
                result = new_lists(order, COPY_MAX);
            for (; result == 0 && number < move->n_staged && order->n < COPY_MAX; number++) {
                struct staged_block *staged = &move->staged[number];
                bool sealed = false;
                if (staged->to.handle.generation == 0 || staged->to.store != store || staged->whole ||
                    !is_filled(server, session, number, &sealed) || !(sealed || all))
                    continue;
                staged->whole = sealed;
                order->blocks[order->n] =
                    (struct placed_block){session->blocks[number].handle, session->blocks[number].store};
                order->others[order->n] = staged->to;
                order->numbers[order->n++] = number;
            }
            if (result == 0 && order->n > 0) {
                order->from_store = move->from;
                add_to_move(server, session, order);
                continue;
            }
            if (order)
                orders_free(order);
            if (result != 0)
                return result;
        }
    }
    return 0;
}

int orders_move_release(struct server *server, const struct session *session, uint32_t store, uint32_t lanes,
                        const struct placed_block *blocks, uint32_t n_blocks)
{
    struct order *order;
    int result = orders_new_release(server, (uint8_t)store, session, blocks, n_blocks, &order);
    if (result != 0)
        return result;
    order->move = UINT64_MAX; /* of none that waits for it */
    order->lanes = lanes;
    orders_enlist(server, order);
    return 0;
}
