#include "gpu-worker/call.h"

#include <errno.h>
#include <stddef.h>

#include "common/clock.h"

enum { RETRY_US = 2000 };

struct store *call_store(const struct call *call, struct stores *stores)
{
    struct store *store = stores_get(stores, call->store);
    return store != NULL && store->route == call->route ? store : NULL;
}

int call_send(struct call *call, struct stores *stores, struct link *link, call_write *write, void *context)
{
    struct store *store = stores_get(stores, call->store);
    if (store == NULL || !store->is_ready || (call->retry_us != 0 && clock_now_us() < call->retry_us))
        return 0;
    uint64_t request = link->next_request++;
    uint32_t slot, n_bytes;
    if (stores_take_slot(store, request, &slot) < 0) { /* all quarantined: one comes back, or the store does */
        call->retry_us = clock_deadline_us(RETRY_US);
        return 0;
    }
    int r = write(context, store, slot, request, &n_bytes);
    if (r == 0 && store->has_ring)
        stores_post(store, slot, request, n_bytes);
    else if (r == 0)
        r = link_send(link, store->route, request, slot, n_bytes);
    if (r < 0) {
        stores_free_slot(store, slot);
        call->retry_us = clock_deadline_us(RETRY_US);
        return r == -EAGAIN || r == -ENOTCONN ? 0 : r;
    }
    call->state = CALL_SENT;
    call->by_ring = store->has_ring;
    call->slot = slot;
    call->route = store->route;
    call->request = request;
    call->deadline_us = clock_deadline_us(link->request_timeout_us);
    return 0;
}

/* `status`: what the descriptor says; 0: look at the reply. */
static void take_answer(struct call *call, struct store *store, int32_t status)
{
    const struct reply_header *reply = stores_reply(store, call->slot);
    call->entry = 0;
    if (status == 0 && (!stores_is_answered(store, call->slot, call->request) || reply->magic != REPLY_MAGIC))
        status = -EPROTO;
    if (status == 0) {
        status = reply->status;
        call->entry = reply->entry;
    }
    if (status == -EHOSTUNREACH || status == -ENOENT) {
        /* not there yet, or not any more: the coordinator's StoreUp and the deadline decide */
        stores_free_slot(store, call->slot);
        call->state = CALL_UNSENT;
        call->retry_us = clock_deadline_us(RETRY_US);
        return;
    }
    call->status = status <= 0 ? status : -EPROTO;
    call->state = CALL_ANSWERED;
}

void call_look(struct call *call, struct stores *stores)
{
    struct store *store = call_store(call, stores);
    if (call->state == CALL_UNSENT)
        return;
    if (store == NULL) { /* answered or not, the exchange it lay in is gone */
        call->state = CALL_UNSENT;
        call->retry_us = 0;
    } else if (call->state == CALL_SENT && stores_is_answered(store, call->slot, call->request)) {
        take_answer(call, store, 0);
    } else if (call->state == CALL_SENT && clock_now_us() >= call->deadline_us) {
        call_free(call, stores);
    }
}

void call_take(struct call *call, struct stores *stores, const struct descriptor *descriptor)
{
    struct store *store = call_store(call, stores);
    if (call->state == CALL_SENT && store != NULL && call->request == descriptor->request)
        take_answer(call, store, descriptor->status);
}

int call_wait(const struct call *call, struct stores *stores, struct link *link, uint64_t give_up_us,
              struct descriptor *ret_descriptor)
{
    struct store *store = call_store(call, stores);
    uint64_t due = call->state == CALL_SENT ? call->deadline_us : clock_deadline_us(RETRY_US);
    due = due < give_up_us ? due : give_up_us;
    if (call->state == CALL_SENT && call->by_ring && store != NULL)
        return link_wait_bell(link, &stores_ring(store)->replies, &stores_reply(store, call->slot)->answered,
                              call->request, due, ret_descriptor);
    return link_wait(link, due, ret_descriptor);
}

void call_free(struct call *call, struct stores *stores)
{
    struct store *store = call_store(call, stores);
    if (store != NULL && call->state == CALL_ANSWERED)
        stores_free_slot(store, call->slot);
    else if (store != NULL && call->state == CALL_SENT)
        stores_quarantine_slot(store, call->slot);
    call->state = CALL_UNSENT;
    call->retry_us = 0;
}
