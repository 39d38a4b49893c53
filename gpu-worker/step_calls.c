/*
 * step_calls.c - the calls of a half: sent by ring or as descriptors, answered, and sent again when a store is lost.
 *
 * Both halves may have calls out; whoever waits takes the answers of both. An answer shows in the reply's `answered`; by ring
 * that is looked at, otherwise the descriptor that comes back says when, or that the request could not be delivered.
 */
#include <errno.h>
#include <string.h>

#include "common/clock.h"
#include "gpu-worker/step.h"

enum { RETRY_US = 2000 };

/* ---- sending ---- */

/* Sends a call if its store can take it now; otherwise it stays unsent and is tried again by step_collect(). */
static int try_send(struct step *step, struct step_half *half, struct step_call *call)
{
    struct link *link = step->link;
    struct store *store = stores_get(step->stores, call->store);
    if (store == NULL || !store->is_ready || (call->retry_us != 0 && clock_now_us() < call->retry_us))
        return 0;
    uint64_t request = link->next_request++;
    uint32_t slot, n_bytes;
    if (stores_take_slot(store, request, &slot) < 0) { /* all quarantined: one comes back, or the store does */
        call->retry_us = clock_deadline_us(RETRY_US);
        return 0;
    }
    int r = step_write(step, half, call, store, slot, request, &n_bytes);
    if (r == 0 && store->has_ring)
        stores_post(store, slot, request, n_bytes);
    else if (r == 0)
        r = link_send(link, store->route, request, slot, n_bytes);
    if (r < 0) {
        stores_free_slot(store, slot);
        call->retry_us = clock_deadline_us(RETRY_US);
        return r == -EAGAIN || r == -ENOTCONN ? 0 : r;
    }
    call->is_sent = true;
    call->by_ring = store->has_ring;
    call->slot = slot;
    call->route = store->route;
    call->request = request;
    call->deadline_us = clock_deadline_us(link->request_timeout_us);
    return 0;
}

int step_send(struct step *step, struct step_half *half, uint32_t first_layer, uint32_t n_layers)
{
    half->first_layer = first_layer;
    half->n_layers = n_layers;
    int r = step_plan(step, half);
    half->is_waiting = true;
    for (uint32_t i = 0; r == 0 && i < half->n_calls; i++)
        r = try_send(step, half, &half->calls[i]);
    return r;
}

/* ---- answers ---- */

static void take_partials(struct step *step, const struct step_call *call, const struct reply_header *reply)
{
    uint32_t n_kv = step->shape.n_kv_heads;
    size_t partials = step_group(step) * KERNELS_PARTIAL_FLOATS(step->shape.head_dim);
    for (uint32_t item = 0; item < call->n_items; item++) {
        const struct step_row *row = &step->rows[call->item_row[item]];
        const float *result = (const void *)((const uint8_t *)reply + call->item_result[item]);
        const float **lanes = step->lane_partials + ((size_t)row->decode_index * n_kv + item % n_kv) * LAYOUT_N_LANES;
        for (uint32_t lane = 0; lane < LAYOUT_N_LANES; lane++) {
            if ((call->item_lanes[item] & 1u << lane) == 0)
                continue;
            lanes[lane] = result;
            result += partials;
        }
    }
}

/* A refusal fails the run that the entry belongs to; the rest is sent again without it. */
static void refuse(struct step *step, struct step_call *call, int32_t status, uint32_t entry)
{
    uint32_t kind = entry >> 30, index = entry & 0x3fffffffu;
    struct run *run = NULL;
    if (kind == REPLY_ENTRY_APPEND && index < call->n_appends)
        run = call->append_owner[index];
    else if (kind == REPLY_ENTRY_AGGREGATE && index < call->n_items)
        run = step->rows[call->item_row[index]].run;
    if (run != NULL) {
        run_fail(run, status, "store %u refused %s of the session: %s", call->store,
                 kind == REPLY_ENTRY_APPEND ? "an append" : "an aggregate", strerror(-status));
        return;
    }
    for (uint32_t i = 0; i < call->n_appends; i++)
        run_fail(call->append_owner[i], status, "store %u refused a request: %s", call->store, strerror(-status));
    for (uint32_t i = 0; i < call->n_items; i++)
        run_fail(step->rows[call->item_row[i]].run, status, "store %u refused a request: %s", call->store,
                 strerror(-status));
}

/* `status`: what the descriptor says; 0: look at the reply. */
static void take_answer(struct step *step, struct step_call *call, int32_t status)
{
    struct store *store = stores_get(step->stores, call->store);
    const struct reply_header *reply = stores_reply(store, call->slot);
    uint32_t entry = 0;
    if (status == -EHOSTUNREACH || status == -ENOENT) {
        /* not there yet, or not any more: the coordinator's StoreUp and the deadline decide */
        stores_free_slot(store, call->slot);
        call->is_sent = false;
        call->retry_us = clock_deadline_us(RETRY_US);
        return;
    }
    if (status == 0 && (!stores_is_answered(store, call->slot, call->request) || reply->magic != REPLY_MAGIC))
        status = -EPROTO;
    if (status == 0) {
        status = reply->status;
        entry = reply->entry;
    }
    if (status == 0) {
        take_partials(step, call, reply);
        call->is_done = true; /* the slot is kept until the partials have been read */
        return;
    }
    stores_free_slot(store, call->slot);
    call->is_sent = false;
    call->retry_us = 0;
    refuse(step, call, status < 0 ? status : -EPROTO, entry);
}

void step_take_descriptor(struct step *step, const struct descriptor *descriptor)
{
    for (uint32_t h = 0; h < step->n_halves; h++)
        for (uint32_t i = 0; i < step->halves[h].n_calls; i++) {
            struct step_call *call = &step->halves[h].calls[i];
            if (step->halves[h].is_waiting && call->is_sent && !call->is_done && call->request == descriptor->request) {
                take_answer(step, call, descriptor->status);
                return;
            }
        }
}

/* Brings a half's unsent, lost, answered and overdue calls forward. */
static int advance(struct step *step, struct step_half *half, struct step_call **ret_waits, bool *ret_is_done)
{
    bool done = true;
    *ret_waits = NULL;
    for (uint32_t i = 0; i < half->n_calls; i++) {
        struct step_call *call = &half->calls[i];
        struct store *store = stores_get(step->stores, call->store);
        if (call->is_sent && store->route != call->route) {
            /* answered or not, the exchange it lay in is gone */
            call->is_sent = call->is_done = false;
            call->retry_us = 0;
        }
        if (call->is_done)
            continue;
        if (call->is_sent && call->by_ring && stores_is_answered(store, call->slot, call->request)) {
            take_answer(step, call, 0);
            if (call->is_done)
                continue;
        }
        if (call->is_sent && clock_now_us() >= call->deadline_us) {
            stores_quarantine_slot(store, call->slot);
            call->is_sent = false;
            call->retry_us = 0;
        }
        if (!call->is_sent && !step_has_work(step, half, call)) {
            call->is_done = true;
            continue;
        }
        if (!call->is_sent) {
            int r = try_send(step, half, call);
            if (r < 0)
                return r;
        }
        done = false;
        if (*ret_waits == NULL || (!call->by_ring && call->is_sent))
            *ret_waits = call;
    }
    *ret_is_done = done;
    return 0;
}

/* Waits until something may have happened to `call`. */
static int wait_for(struct step *step, struct step_call *call, uint64_t give_up_us)
{
    struct link *link = step->link;
    uint64_t due = call->is_sent ? call->deadline_us : clock_deadline_us(RETRY_US);
    due = due < give_up_us ? due : give_up_us;
    struct descriptor descriptor;
    int r;
    if (call->is_sent && call->by_ring) {
        struct store *store = stores_get(step->stores, call->store);
        r = link_wait_bell(link, &stores_ring(store)->replies, &stores_reply(store, call->slot)->answered,
                           call->request, due, &descriptor);
    } else {
        r = link_wait(link, due, &descriptor);
    }
    if (r == 1)
        step_take_descriptor(step, &descriptor);
    return r < 0 ? r : 0;
}

int step_poll(struct step *step, struct step_half *half, bool *ret_is_done)
{
    struct step_call *call;
    int r = advance(step, half, &call, ret_is_done);
    if (r < 0 || *ret_is_done || call->by_ring)
        return r;
    r = wait_for(step, call, 0);
    return r < 0 ? r : advance(step, half, &call, ret_is_done);
}

int step_collect(struct step *step, struct step_half *half)
{
    uint64_t start = clock_now_us(), give_up = clock_deadline_us(step->link->recovery_timeout_us);
    for (;;) {
        struct step_call *call;
        bool done;
        int r = advance(step, half, &call, &done);
        if (r < 0)
            return r;
        if (done)
            break;
        if (clock_now_us() >= give_up)
            return -ETIMEDOUT;
        r = wait_for(step, call, give_up);
        if (r < 0)
            return r;
    }
    step->wait_us += clock_now_us() - start;
    return 0;
}

void step_release(struct step *step, struct step_half *half)
{
    for (uint32_t i = 0; i < half->n_calls; i++) {
        struct step_call *call = &half->calls[i];
        struct store *store = stores_get(step->stores, call->store);
        if (!call->is_sent || store == NULL || store->route != call->route)
            continue;
        if (call->is_done)
            stores_free_slot(store, call->slot);
        else
            stores_quarantine_slot(store, call->slot);
        call->is_sent = false;
    }
    half->is_waiting = false;
    half->n_calls = 0;
}
