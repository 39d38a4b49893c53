/* command.c - see command.h. */
#include "client/command/command.h"
#include "client/command/output.h"
#include "common/utf8.h"

#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TEXT_MAX_BYTES ((size_t)64 << 20) /* of a request */

static _Atomic(struct hcattn *) interrupt_client;
static volatile sig_atomic_t interrupted;

struct options *command_options(const struct options_table *table, int argc, char **argv, int *ret_status)
{
    struct options *options = NULL;
    char error[OPTIONS_ERROR_SIZE];
    int result = options_parse(table, argc, argv, &options, error);
    if (result < 0) {
        *ret_status =
            command_fail(COMMAND_USAGE, table->program, "%s", result == -ENOMEM ? "no memory for the options" : error);
        return NULL;
    }
    if (options_help_wanted(options)) {
        char *help = options_help(table, options);
        *ret_status = help && output_text(help) == 0 ? 0 : output_status();
        free(help);
        return options_free(options);
    }
    if (options_version_wanted(options)) {
        output_format("hcattn %s\n", HCATTN_VERSION);
        *ret_status = output_status();
        return options_free(options);
    }
    return options;
}

int command_fail(int status, const char *name, const char *format, ...)
{
    char line[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line, sizeof(line), format, arguments);
    va_end(arguments);
    for (char *c = line; *c; c++) {
        if ((unsigned char)*c < 0x20 || *c == 0x7f)
            *c = ' '; /* one line, and a peer's text does nothing to the terminal */
    }
    output_flush();
    fprintf(stderr, "%s: %s\n", name, line);
    return status;
}

int command_call_failed(const char *name, int result, const struct hcattn_error *error)
{
    if (result == -ECANCELED && interrupted) {
        command_fail(COMMAND_INTERRUPTED, name, "interrupted");
        return COMMAND_INTERRUPTED;
    }
    if (result == -ECANCELED && output_closed())
        return output_status();
    return command_fail(COMMAND_ERROR, name, "%s", error->sentence);
}

static void on_signal(int number)
{
    (void)number;
    interrupted = 1;
    struct hcattn *client = atomic_load(&interrupt_client);
    if (client)
        hcattn_cancel(client);
}

struct hcattn *command_connect_to(const char *name, const struct options *options, const char *endpoint,
                                  int *ret_status)
{
    char directory[OPTIONS_PATH_SIZE], reason[OPTIONS_ERROR_SIZE];
    struct hcattn_config config = {.endpoint = endpoint,
                                   .connect_timeout_ms = (uint32_t)options_duration_ms(options, "connect-timeout"),
                                   .lost_timeout_ms = (uint32_t)options_duration_ms(options, "lost-timeout"),
                                   .server_key = options_string(options, "server-key"),
                                   .key = options_string(options, "key")};
    if (!config.endpoint) {
        if (options_runtime_dir(options_string(options, "runtime-dir"), directory, reason) < 0) {
            *ret_status = command_fail(COMMAND_USAGE, name, "%s", reason);
            return NULL;
        }
        config.runtime_dir = directory;
    }
    struct hcattn *client = NULL;
    struct hcattn_error error;
    int result = hcattn_open(&config, &client, &error);
    if (result < 0) {
        *ret_status = command_fail(result == -EINVAL ? COMMAND_USAGE : COMMAND_ERROR, name, "%s", error.sentence);
        return NULL;
    }
    atomic_store(&interrupt_client, client);
    struct sigaction action = {.sa_handler = on_signal}; /* no SA_RESTART: reading stdin ends too */
    sigemptyset(&action.sa_mask);
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    return client;
}

struct hcattn *command_connect(const char *name, const struct options *options, int *ret_status)
{
    return command_connect_to(name, options, options_string(options, "endpoint"), ret_status);
}

size_t command_n_hosts(const struct options *options)
{
    const char *endpoint = options_string(options, "endpoint");
    size_t n = 1;
    for (; endpoint && (endpoint = strchr(endpoint, ',')); endpoint++)
        n++;
    return n;
}

struct hcattn *command_connect_one(const char *name, const struct options *options, int *ret_status)
{
    if (command_n_hosts(options) > 1) {
        *ret_status =
            command_fail(COMMAND_USAGE, name, "this is about one host, and --endpoint names several: name one of them");
        return NULL;
    }
    return command_connect(name, options, ret_status);
}

struct hcattn *command_disconnect(struct hcattn *client)
{
    if (!client)
        return NULL;
    atomic_store(&interrupt_client, NULL);
    return hcattn_close(client);
}

bool command_interrupted(void)
{
    return interrupted;
}

void command_clear_interrupt(void)
{
    interrupted = 0;
}

int command_session_id(const char *text, uint64_t *ret_session)
{
    size_t n = strspn(text, "0123456789abcdefABCDEF");
    uint64_t session = n > 0 && n <= 16 && text[n] == '\0' ? strtoull(text, NULL, 16) : 0;
    if (!session)
        return -EINVAL;
    *ret_session = session;
    return 0;
}

/* Reads to the end. -EFBIG, -ENOMEM, -EINTR, errors of read. */
static int read_all(FILE *file, char **ret_text, size_t *ret_n_bytes)
{
    size_t n = 0, size = 64 << 10;
    char *text = malloc(size);
    while (text) {
        n += fread(text + n, 1, size - 1 - n, file);
        if (ferror(file)) {
            int error = errno ? -errno : -EIO;
            free(text);
            return error;
        }
        if (feof(file)) {
            text[n] = '\0';
            *ret_text = text;
            *ret_n_bytes = n;
            return 0;
        }
        if (n < size - 1)
            continue;
        if (size > TEXT_MAX_BYTES) {
            free(text);
            return -EFBIG;
        }
        size *= 2;
        char *grown = realloc(text, size);
        if (!grown)
            free(text);
        text = grown;
    }
    return -ENOMEM;
}

char *command_text(const char *name, const char *argument, bool is_file, int *ret_status)
{
    char *text = NULL;
    size_t n_bytes = 0, offset = 0;
    int error = 0;
    bool from_stdin = strcmp(argument, "-") == 0;
    if (!from_stdin && !is_file) {
        n_bytes = strlen(argument);
        text = strdup(argument);
        error = text ? 0 : -ENOMEM;
    } else {
        FILE *file = from_stdin ? stdin : fopen(argument, "rb");
        if (!file) {
            *ret_status = command_fail(COMMAND_USAGE, name, "cannot read %s: %s", argument, strerror(errno));
            return NULL;
        }
        error = read_all(file, &text, &n_bytes);
        if (!from_stdin)
            fclose(file);
    }
    const char *shown = from_stdin ? "standard input" : is_file ? argument : "the text";
    if (error == -EFBIG)
        *ret_status = command_fail(COMMAND_ERROR, name, "%s is larger than 64 MiB", shown);
    else if (error)
        *ret_status = command_fail(COMMAND_ERROR, name, "cannot read %s: %s", shown, strerror(-error));
    else if (utf8_check(text, n_bytes, &offset) < 0)
        *ret_status = command_fail(COMMAND_ERROR, name, "%s is not UTF-8 (at byte %zu)", shown, offset);
    else if (memchr(text, 0, n_bytes))
        *ret_status = command_fail(COMMAND_ERROR, name, "%s holds a NUL character", shown);
    else
        return text;
    free(text);
    return NULL;
}
