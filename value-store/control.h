/*
 * control.h - the coordinator's orders: read, carried out, answered.
 *
 * Owner      the working thread, not in its turn: orders about blocks take it. Messages and descriptors of peers stop here: further in there are blocks and errno.
 * Trust      a message that cannot be read, or makes no sense here, is CONTROL_GARBAGE and nothing happens. Descriptors that
 *            came with it and were not wanted are closed.
 */
#pragma once

#include "value-store/copying.h"
#include "value-store/exchanges.h"
#include "value-store/link.h"
#include "value-store/store.h"

#include <sys/un.h>

#define CONTROL_TEXT         640
#define CONTROL_MAX_RESERVED 1024u /* blocks in one Reserve */
#define CONTROL_MAX_COPIED   256u  /* blocks in one Copy or Import */

struct control {
    struct store *store;
    struct exchanges *exchanges;
    struct link *link;
    struct copying *copying; /* an order that is under way; NULL: none */
};

enum control_kind {
    CONTROL_DONE,    /* carried out, or refused with an answer */
    CONTROL_WELCOME, /* registered: `text` is the path of the data socket */
    CONTROL_REFUSED, /* not registered: `text` says why */
    CONTROL_LEAVE,   /* nothing will come any more */
    CONTROL_GARBAGE, /* `text` says what was wrong */
};

struct control_event {
    enum control_kind kind;
    bool is_warning;         /* of the line in `text` */
    char text[CONTROL_TEXT]; /* CONTROL_DONE: a line for the log, or empty */
};

/* The first message of a connection; shows the segment when there is one. Errors of link_send(). */
int control_hello(struct control *control, uint64_t data_route);

/* One message and its descriptors, which are taken over; not while an order is under way. An error is link_send()'s: the answer could not be sent. */
int control_handle(struct control *control, const void *bytes, size_t n_bytes, const int *fds, size_t n_fds,
                   struct control_event *ret_event);

/* The next block of the order that is under way. The same error. */
int control_step(struct control *control, struct control_event *ret_event);

/* Ends the connection, an order that is under way and all exchanges. */
void control_hang_up(struct control *control);
