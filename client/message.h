/*
 * message.h - between the structures of hcattn.h and the messages of proto/hcattn.proto. Internal to libhcattn.
 *
 * Owner      what message_set_input() fills points into the caller's input and into allocations freed by
 *            message_unset_input(). Threads: any.
 */
#pragma once

#include "client/hcattn.h"
#include "proto/hcattn.pb-c.h"

int message_errno(enum hcattn_code code);

/* Copies an Error; returns its errno. ret_error may be NULL. */
int message_error(const Hcattn__Error *message, struct hcattn_error *ret_error);

bool message_is_last(const Hcattn__Reply *reply); /* ends its request */

struct message_input {
    Hcattn__Input input;
    Hcattn__Tokens tokens;
    Hcattn__Chat chat;
    Hcattn__ChatMessage *messages;
    Hcattn__ChatMessage **pointers;
};

/* -ENOMEM, or -EINVAL with the reason in `error`: text that is no UTF-8. */
int message_set_input(struct message_input *message, const struct hcattn_input *input, struct hcattn_error *error);
void message_unset_input(struct message_input *message);

/* n sessions in one allocation, to free; they point into it and into the messages. NULL: no memory. */
struct hcattn_session_stats *message_sessions(Hcattn__SessionStats *const *messages, size_t n);

struct hcattn_timings message_timings(const Hcattn__Timings *timings); /* NULL: zeroes */

/* Log-probabilities of several tokens: one allocation, NULL when out of memory or n == 0. `all` points into the message. */
struct hcattn_logprobs *message_logprobs(Hcattn__TokenLogprobs *const *messages, size_t n);
