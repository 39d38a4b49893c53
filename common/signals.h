/*
 * signals.h - signals as messages: a descriptor in the poll loop instead of handlers.
 *
 * Call signals_open() in the main thread before any other thread starts: the mask is inherited. SIGPIPE is ignored from
 * then on. A child that is to run another program calls signals_restore() between fork and exec.
 */
#pragma once

#include <pthread.h>
#include <stdbool.h>

/* Blocks SIGTERM and SIGINT (and SIGCHLD) and returns a non-blocking, close-on-exec descriptor for them. */
int signals_open(bool with_children, int *ret_fd);
int signals_close(int fd); /* fd < 0 is fine; the signals stay blocked; returns -1 */

int signals_read(int fd, int *ret_signal); /* the next pending one; -EAGAIN: none */

/* Starts a thread that takes no signals: those belong to the thread that has the descriptor. -EAGAIN. */
int signals_start_thread(pthread_t *ret_thread, void *(*run)(void *context), void *context);

void signals_restore(void); /* async-signal-safe: empty mask, SIGPIPE default again */
