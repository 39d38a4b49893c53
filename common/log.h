/*
 * log.h - lines on stderr: time (UTC, ms), level, program[pid/id], message.
 *
 *     2025-01-31T09:41:07.123Z info    hc-value-store[4711/1] node 0, 2 cpus, bound
 *
 * Who        main.c and server.c of a process; library code logs at debug level at most.
 * Threads    log_open() and log_set_id() before threads start; the macros from any thread.
 * Invariant  one line is one write(2), at most LOG_LINE_BYTES long: lines of threads and processes never mix. Control
 *            characters in a message are written as '?': a peer's text cannot forge a line.
 */
#pragma once

#include <stdbool.h>

#define LOG_LINE_BYTES 2048 /* longer lines are cut and end in "..." */

enum log_level {
    LOG_LEVEL_ERROR,
    LOG_LEVEL_WARNING,
    LOG_LEVEL_INFO,
    LOG_LEVEL_DEBUG,
};

/* Names in the order of enum log_level and a closing NULL: the choices of an option `--log-level`. */
extern const char *const log_level_names[];

/* Both keep a copy (cut to 63 bytes). Before log_open() the program is "hcattn" and the level info. */
void log_open(const char *program, enum log_level level);
void log_set_id(const char *id); /* index of this process among its like ("0"), or NULL for none */

bool log_enabled(enum log_level level);

/* errno is the same before and after. */
void log_write(enum log_level level, const char *format, ...) __attribute__((format(printf, 2, 3)));

#define LOG_ERROR(...)   log_write(LOG_LEVEL_ERROR, __VA_ARGS__)
#define LOG_WARNING(...) log_write(LOG_LEVEL_WARNING, __VA_ARGS__)
#define LOG_INFO(...)    log_write(LOG_LEVEL_INFO, __VA_ARGS__)
#define LOG_DEBUG(...)                                                                                                 \
    do {                                                                                                               \
        if (log_enabled(LOG_LEVEL_DEBUG))                                                                              \
            log_write(LOG_LEVEL_DEBUG, __VA_ARGS__);                                                                   \
    } while (0)
