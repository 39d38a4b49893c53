/*
 * call.h - one request on its way: sent, waited for, sent again when its coordinator was lost. Internal to libhcattn.
 *
 * Owner      struct hcattn owns the sockets of its hosts; a call borrows one until it ends.
 * Threads    one call at a time (the client's mutex, taken in call_run()); call_cancel() from any thread or signal handler.
 * Invariant  a request has one id for all its attempts. Health replies judge only attempts that were sent before the
 *            question: messages of one client are taken in order, so an answer that does not list the request and
 *            comes before the request's last reply means that this attempt is lost.
 */
#pragma once

#include "client/hcattn.h"
#include "client/hosts.h"
#include "common/socket.h"
#include "proto/hcattn.pb-c.h"

#include <pthread.h>
#include <stdatomic.h>

struct hcattn {
    pthread_mutex_t mutex; /* held during a call */
    uint64_t connect_timeout_us;
    uint64_t lost_timeout_us;
    int cancel_fd; /* eventfd: wakes the call that waits */
    _Atomic bool cancelled;
    struct hosts hosts; /* under the mutex only */
};

enum call_step {
    CALL_GOES_ON = 0,
    CALL_FINISHED,    /* that was the last reply */
    CALL_KEPT,        /* the same, and it is the callback's to free */
    CALL_STOPPED,     /* the caller's callback wants no more */
    CALL_OUT_OF_STEP, /* replies are missing: ask again from where we are */
    CALL_MALFORMED,   /* no answer to this request */
};

struct call {
    Hcattn__Request request; /* request_id is filled in by call_run() */
    /* Sees every reply that is no Error. */
    enum call_step (*on_reply)(void *context, Hcattn__Reply *reply);
    /* Before the request is sent again: what is to change in it (resume_from ...). `lost`: another coordinator answers now.
     * false: it cannot be sent again. NULL: it is the same each time. */
    bool (*prepare_again)(void *context, bool lost);
    /* Told about once a second what the service says of itself; false ends the call as CALL_STOPPED does. NULL: not asked. */
    bool (*on_stats)(void *context, const Hcattn__StatsReply *stats);
    void *context;
    uint32_t timeout_ms; /* 0: none */
    bool extends;        /* every reply to the request begins timeout_ms anew */
    size_t host;         /* out: where it ran */
};

int call_run(struct hcattn *client, struct call *call, struct hcattn_error *ret_error);

/* Why a call ended, as far as the host is concerned. */
enum call_line {
    CALL_LINE_GOOD,
    CALL_LINE_SILENT, /* nothing came from it in time */
    CALL_LINE_LOST,   /* it answered, and then no longer */
};

/* For hosts_run(): the call at one host, with the mutex held. patience_us: for its first answer. */
int call_on(struct hcattn *client, struct host *host, struct call *call, uint64_t patience_us, uint64_t deadline_us,
            enum call_line *ret_line, struct hcattn_error *error);

/* -EAGAIN: not now; -EMSGSIZE; -ENOMEM. */
int call_send(struct host *host, const Hcattn__Request *request);

void call_cancel(struct hcattn *client);

/* Fills an error and returns the errno of its code. ret_error may be NULL. */
int call_fail(struct hcattn_error *ret_error, enum hcattn_code code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
