/*
 * call.h - one request to a store: sent when the store can take it, answered, and to be sent again when the answer is lost.
 *
 * Answers    show in the reply's `answered`, which is looked at; without a ring a descriptor says when to look, or that the request
 *            could not be delivered. Nothing is kept of an exchange that a store's next life has replaced, nor of a request
 *            whose deadline has passed: its slot is quarantined, and the call is unsent again.
 *
 * Owner      who asks. Threads: the engine thread.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "gpu-worker/link.h"
#include "gpu-worker/stores.h"

enum call_state { CALL_UNSENT, CALL_SENT, CALL_ANSWERED };

struct call {
    uint32_t store; /* number */
    enum call_state state;
    bool by_ring;
    int32_t status; /* answered: 0, or why the store refused; then `entry` is the reply's */
    uint32_t entry;
    uint32_t slot; /* sent, answered */
    uint64_t route, request;
    uint64_t deadline_us; /* of the answer */
    uint64_t retry_us;    /* not sent before; 0: at once */
};

/* Writes a request into a slot. An error is the call's. */
typedef int call_write(void *context, const struct store *store, uint32_t slot, uint64_t request,
                       uint32_t *ret_n_bytes);

/* Sends an unsent call if its store can take it now. Errors of write(), and of link_send() but that there is no room now. */
int call_send(struct call *call, struct stores *stores, struct link *link, call_write *write, void *context);
/* How a call stands now: answered, lost, or as before. */
void call_look(struct call *call, struct stores *stores);
/* The same upon the descriptor of a sent one. */
void call_take(struct call *call, struct stores *stores, const struct descriptor *descriptor);
/* Waits until something may have happened to it. 1: *ret_descriptor has come, for whomever; else as link_wait(). */
int call_wait(const struct call *call, struct stores *stores, struct link *link, uint64_t give_up_us,
              struct descriptor *ret_descriptor);
/* The store in whose exchange a sent or answered call lies; NULL: that exchange is gone. */
struct store *call_store(const struct call *call, struct stores *stores);
/* Gives its slot back, or quarantines it if there is no answer. It is unsent then. */
void call_free(struct call *call, struct stores *stores);
