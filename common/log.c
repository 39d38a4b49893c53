/* log.c - one line is built on the stack and written by one write(2). */
#include "common/log.h"

#include "common/utf8.h"

#include <errno.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

const char *const log_level_names[] = {"error", "warning", "info", "debug", NULL};

static char program_name[64] = "hcattn";
static char process_id[64];
static _Atomic int highest_level = LOG_LEVEL_INFO;

void log_open(const char *program, enum log_level level)
{
    snprintf(program_name, sizeof(program_name), "%s", program);
    atomic_store_explicit(&highest_level, (int)level, memory_order_relaxed);
}

void log_set_id(const char *id)
{
    snprintf(process_id, sizeof(process_id), "%s", id ? id : "");
}

bool log_enabled(enum log_level level)
{
    return (int)level <= atomic_load_explicit(&highest_level, memory_order_relaxed);
}

/* Everything before the message. Returns its length. */
static size_t write_head(char *line, size_t size, enum log_level level)
{
    struct timespec now;
    struct tm utc;
    clock_gettime(CLOCK_REALTIME, &now);
    gmtime_r(&now.tv_sec, &utc);
    size_t n = strftime(line, size, "%Y-%m-%dT%H:%M:%S", &utc);
    int more = snprintf(line + n, size - n, ".%03ldZ %-7s %s[%d%s%s] ", now.tv_nsec / 1000000, log_level_names[level],
                        program_name, (int)getpid(), process_id[0] ? "/" : "", process_id);
    return n + (size_t)(more > 0 ? more : 0); /* at most 64 + 64 + 60 bytes: always fits */
}

void log_write(enum log_level level, const char *format, ...)
{
    if (!log_enabled(level))
        return;
    int saved = errno;
    char line[LOG_LINE_BYTES];
    size_t room = sizeof(line) - 1; /* for the newline */
    size_t head = write_head(line, room, level);

    va_list arguments;
    va_start(arguments, format);
    errno = saved; /* for %m */
    int length = vsnprintf(line + head, room - head, format, arguments);
    va_end(arguments);

    size_t n = head;
    if (length > 0)
        n += (size_t)length;
    if (n >= room) {
        n = utf8_complete_bytes(line, room - 4);
        memcpy(line + n, "...", 3);
        n += 3;
    }
    for (size_t i = head; i < n; i++) {
        if ((unsigned char)line[i] < 0x20 || line[i] == 0x7F)
            line[i] = '?';
    }
    line[n++] = '\n';
    ssize_t written;
    do
        written = write(STDERR_FILENO, line, n);
    while (written < 0 && errno == EINTR); /* nothing else can be done about a log that cannot be written */
    errno = saved;
}
