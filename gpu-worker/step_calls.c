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

/* ---- sending ---- */

struct writing {
    struct step *step;
    struct step_half *half;
    struct step_call *call;
};

static int write_request(void *context, const struct store *store, uint32_t slot, uint64_t request,
                         uint32_t *ret_n_bytes)
{
    const struct writing *writing = context;
    return step_write(writing->step, writing->half, writing->call, store, slot, request, ret_n_bytes);
}

/* Sends a call if its store can take it now; otherwise it stays unsent and is tried again by step_collect(). */
static int try_send(struct step *step, struct step_half *half, struct step_call *call)
{
    struct writing writing = {.step = step, .half = half, .call = call};
    return call_send(&call->call, step->stores, step->link, write_request, &writing);
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
        run_fail(run, status, "store %u refused %s of the session: %s", call->call.store,
                 kind == REPLY_ENTRY_APPEND ? "an append" : "an aggregate", strerror(-status));
        return;
    }
    for (uint32_t i = 0; i < call->n_appends; i++)
        run_fail(call->append_owner[i], status, "store %u refused a request: %s", call->call.store, strerror(-status));
    for (uint32_t i = 0; i < call->n_items; i++)
        run_fail(step->rows[call->item_row[i]].run, status, "store %u refused a request: %s", call->call.store,
                 strerror(-status));
}

/* The call is answered. */
static void take_answer(struct step *step, struct step_call *call)
{
    const struct store *store = call_store(&call->call, step->stores);
    if (call->call.status == 0) {
        take_partials(step, call, stores_reply(store, call->call.slot));
        call->is_done = true; /* the slot is kept until the partials have been read */
        return;
    }
    call_free(&call->call, step->stores);
    refuse(step, call, call->call.status, call->call.entry);
}

void step_take_descriptor(struct step *step, const struct descriptor *descriptor)
{
    for (uint32_t h = 0; h < step->n_halves; h++)
        for (uint32_t i = 0; i < step->halves[h].n_calls; i++) {
            struct step_call *call = &step->halves[h].calls[i];
            if (!step->halves[h].is_waiting || call->call.state != CALL_SENT ||
                call->call.request != descriptor->request)
                continue;
            call_take(&call->call, step->stores, descriptor);
            if (call->call.state == CALL_ANSWERED)
                take_answer(step, call);
            return;
        }
}

/* Brings a half's unsent, lost, answered and overdue calls forward. */
static int advance(struct step *step, struct step_half *half, struct step_call **ret_waits, bool *ret_is_done)
{
    bool done = true;
    *ret_waits = NULL;
    for (uint32_t i = 0; i < half->n_calls; i++) {
        struct step_call *call = &half->calls[i];
        const bool was_answered = call->call.state == CALL_ANSWERED;
        call_look(&call->call, step->stores);
        if (was_answered && call->call.state != CALL_ANSWERED)
            call->is_done = false;
        if (!call->is_done && call->call.state == CALL_ANSWERED)
            take_answer(step, call);
        if (call->is_done)
            continue;
        const bool is_sent = call->call.state == CALL_SENT;
        if (!is_sent && !step_has_work(step, half, call)) {
            call->is_done = true;
            continue;
        }
        if (!is_sent) {
            int r = try_send(step, half, call);
            if (r < 0)
                return r;
        }
        done = false;
        if (*ret_waits == NULL || (!call->call.by_ring && call->call.state == CALL_SENT))
            *ret_waits = call;
    }
    *ret_is_done = done;
    return 0;
}

/* Waits until something may have happened to `call`. */
static int wait_for(struct step *step, const struct step_call *call, uint64_t give_up_us)
{
    struct descriptor descriptor;
    int r = call_wait(&call->call, step->stores, step->link, give_up_us, &descriptor);
    if (r == 1)
        step_take_descriptor(step, &descriptor);
    return r < 0 ? r : 0;
}

int step_poll(struct step *step, struct step_half *half, bool *ret_is_done)
{
    struct step_call *call;
    int r = advance(step, half, &call, ret_is_done);
    if (r < 0 || *ret_is_done || call->call.by_ring)
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
    for (uint32_t i = 0; i < half->n_calls; i++)
        call_free(&half->calls[i].call, step->stores);
    half->is_waiting = false;
    half->n_calls = 0;
}
