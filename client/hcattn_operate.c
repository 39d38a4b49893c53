/*
 * hcattn_operate.c - see hcattn.h: a store that leaves while sessions run.
 *
 * Owner      what progress is told points into the message. Nothing is kept between calls.
 * Invariant  the drain belongs to the service: a coordinator that was lost is asked again and goes on with what is left, so
 *            that what the caller hears of moved bytes may begin anew.
 */
#include "client/call.h"
#include "client/hcattn.h"
#include "client/message.h"

struct drain {
    int (*progress)(void *context, const struct hcattn_store_drain *drain);
    void *context;
    struct hcattn_store_drained drained;
};

static enum call_step on_reply(void *context, Hcattn__Reply *reply)
{
    struct drain *drain = context;
    if (reply->reply_case == HCATTN__REPLY__REPLY_STORE_DRAINED) {
        drain->drained = (struct hcattn_store_drained){.n_sessions = reply->store_drained->n_sessions,
                                                       .bytes_moved = reply->store_drained->bytes_moved};
        return CALL_FINISHED;
    }
    if (reply->reply_case != HCATTN__REPLY__REPLY_STORE_DRAIN_PROGRESS)
        return CALL_MALFORMED;
    if (!drain->progress)
        return CALL_GOES_ON;
    const Hcattn__StoreDrainProgress *from = reply->store_drain_progress;
    struct hcattn_store_drain told = {.n_sessions_left = from->n_sessions_left,
                                      .bytes_left = from->bytes_left,
                                      .bytes_moved = from->bytes_moved,
                                      .waits = from->waits};
    return drain->progress(drain->context, &told) ? CALL_STOPPED : CALL_GOES_ON;
}

int hcattn_drain_store(struct hcattn *client, uint32_t store, bool resume,
                       int (*progress)(void *context, const struct hcattn_store_drain *drain), void *context,
                       uint32_t timeout_ms, struct hcattn_store_drained *ret_drained, struct hcattn_error *ret_error)
{
    Hcattn__DrainStore body = HCATTN__DRAIN_STORE__INIT;
    body.store = store;
    body.resume = resume;
    struct drain drain = {.progress = progress, .context = context};
    struct call call = {
        .request = HCATTN__REQUEST__INIT, .on_reply = on_reply, .context = &drain, .timeout_ms = timeout_ms};
    call.request.request_case = HCATTN__REQUEST__REQUEST_DRAIN_STORE;
    call.request.drain_store = &body;
    int result = call_run(client, &call, ret_error);
    if (result == 0 && ret_drained)
        *ret_drained = drain.drained;
    return result;
}
