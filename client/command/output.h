/*
 * output.h - everything that goes to standard output, and the progress line on standard error.
 *
 * A reader that has gone (EPIPE) is no error: from then on nothing is written and the command ends quietly. Other
 * errors (a full disk) are told once.
 *
 * Threads    the main thread only. SIGPIPE must be ignored (main.c).
 */
#pragma once

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>

/* 0, or -EPIPE and others when nothing can be written any more. */
int output_bytes(const void *bytes, size_t n_bytes);
int output_text(const char *text);
int output_format(const char *format, ...) __attribute__((format(printf, 1, 2)));
int output_json(json_t *json); /* one object, indented, newline; takes the reference; NULL: no memory */
int output_flush(void);

bool output_closed(void); /* nothing can be written any more */
int output_status(void);  /* exit status of a command that has only its output to worry about: 0 or 1 */

/* A JSON string of bytes that may be no UTF-8: what is not becomes U+FFFD. */
json_t *output_json_text(const void *bytes, size_t n_bytes);

/* Replaces the line that is shown on stderr: on a terminal in place; otherwise a line each time it changes (quiet: not at
 * all). An empty text takes it away. */
void output_progress(bool quiet, const char *format, ...) __attribute__((format(printf, 2, 3)));
bool output_is_terminal(void); /* does the progress line reach a person? */
