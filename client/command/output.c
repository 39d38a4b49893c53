/* output.c - see output.h. */
#include "client/command/output.h"
#include "common/utf8.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int output_error; /* negative errno of the first write that failed */
static char progress_shown[256];

static int note(bool done)
{
    if (done || output_error)
        return output_error;
    output_error = errno ? -errno : -EIO;
    if (output_error != -EPIPE)
        fprintf(stderr, "hcattn: cannot write to standard output: %s\n", strerror(-output_error));
    return output_error;
}

int output_bytes(const void *bytes, size_t n_bytes)
{
    if (output_error)
        return output_error;
    errno = 0;
    return note(fwrite(bytes, 1, n_bytes, stdout) == n_bytes);
}

int output_text(const char *text)
{
    return output_bytes(text, strlen(text));
}

int output_format(const char *format, ...)
{
    if (output_error)
        return output_error;
    va_list arguments;
    va_start(arguments, format);
    errno = 0;
    int n = vprintf(format, arguments);
    va_end(arguments);
    return note(n >= 0);
}

int output_json(json_t *json)
{
    char *text = json ? json_dumps(json, JSON_INDENT(2) | JSON_PRESERVE_ORDER | JSON_REAL_PRECISION(9)) : NULL;
    json_decref(json);
    if (!text) {
        errno = ENOMEM;
        return note(false);
    }
    output_text(text);
    free(text);
    return output_text("\n");
}

int output_flush(void)
{
    if (output_error)
        return output_error;
    errno = 0;
    return note(fflush(stdout) == 0);
}

bool output_closed(void)
{
    return output_error != 0;
}

int output_status(void)
{
    output_flush();
    return output_error && output_error != -EPIPE ? 1 : 0;
}

json_t *output_json_text(const void *bytes, size_t n_bytes)
{
    static const char replacement[] = "\xEF\xBF\xBD";
    const char *from = bytes;
    char *text = malloc(3 * n_bytes + 1);
    if (!text)
        return NULL;
    size_t n = 0;
    while (n_bytes) {
        size_t good = n_bytes;
        if (utf8_check(from, n_bytes, &good) == 0)
            good = n_bytes;
        memcpy(text + n, from, good);
        n += good;
        from += good;
        n_bytes -= good;
        if (n_bytes) {
            memcpy(text + n, replacement, 3);
            n += 3;
            from++;
            n_bytes--;
        }
    }
    json_t *json = json_stringn(text, n);
    free(text);
    return json;
}

void output_progress(bool quiet, const char *format, ...)
{
    char text[sizeof(progress_shown)];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    if (strcmp(text, progress_shown) == 0)
        return;
    bool terminal = isatty(STDERR_FILENO);
    if (terminal && !quiet)
        fprintf(stderr, "\r\033[K%s", text);
    else if (!quiet && text[0])
        fprintf(stderr, "%s\n", text);
    memcpy(progress_shown, text, sizeof(text));
}

bool output_is_terminal(void)
{
    return isatty(STDERR_FILENO);
}
