/*
 * question.h - calls that are one question and one answer. Internal to libhcattn.
 *
 * Threads    as call.h. Such questions do no harm when they are asked twice, so they are sent again whenever their
 *            coordinator was lost.
 */
#pragma once

#include "client/call.h"

struct question {
    Hcattn__Reply__ReplyCase wanted;
    bool again; /* it was sent more than once */
};

/* The answer is the caller's to free; NULL: *ret_result says why, as call_run() does. `call` has its request and timeout. */
Hcattn__Reply *question_ask(struct hcattn *client, struct call *call, struct question *question, int *ret_result,
                            struct hcattn_error *ret_error);
