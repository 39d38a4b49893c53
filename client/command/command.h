/*
 * command.h - what the subcommands of `hcattn` share: the table of them, options, errors, the connection.
 *
 * Exit status  0 done; 1 it did not work (typed errors of the service, no connection ...); 2 used wrongly (unknown option,
 *              bad value, missing file, somebody else's service is running); 130 ended by Ctrl-C.
 * Threads      the main thread only.
 */
#pragma once

#include "client/hcattn.h"
#include "common/option_names.h"
#include "common/options.h"

#include <stdint.h>

#define COMMAND_ERROR       1
#define COMMAND_USAGE       2
#define COMMAND_INTERRUPTED 130

struct command {
    const char *name;
    const char *summary;               /* one line of `hcattn --help` */
    int (*run)(int argc, char **argv); /* argv[0]: the subcommand's name; returns an exit status */
};

/* In every table of a subcommand that talks to a coordinator. */
#define COMMAND_RUNTIME_DIR_OPTION                                                                                     \
    {                                                                                                                  \
        .name = "runtime-dir", .kind = OPTION_STRING, .metavar = "DIR",                                                \
        .help = "directory of the service's sockets; by default $XDG_RUNTIME_DIR/hcattn or /tmp/hcattn-UID"            \
    }
#define COMMAND_SERVICE_OPTIONS                                                                                        \
    COMMAND_RUNTIME_DIR_OPTION,                                                                                        \
        {.name = "endpoint",                                                                                           \
         .kind = OPTION_STRING,                                                                                        \
         .metavar = "ENDPOINT,...",                                                                                    \
         .help = "instead of the runtime directory: tcp://HOST:PORT or ipc:///PATH, or several with commas between; "  \
                 "tcp://HOST:PORT#FILE has a server key of its own"},                                                  \
        {.name = "server-key",                                                                                         \
         .kind = OPTION_STRING,                                                                                        \
         .metavar = "FILE",                                                                                            \
         .help = "public key of the coordinator at tcp://HOST:PORT, if it takes only clients with keys"},              \
        {.name = "key",                                                                                                \
         .kind = OPTION_STRING,                                                                                        \
         .metavar = "FILE",                                                                                            \
         .help = "secret key of ours, for such coordinators"},                                                         \
    {                                                                                                                  \
        .name = "lost-timeout", .kind = OPTION_DURATION, .default_text = "90s", .minimum = 100, .maximum = 86400000,   \
        .help = "without any answer for so long a coordinator that did answer is given up"                             \
    }
#define COMMAND_CLIENT_OPTIONS                                                                                         \
    COMMAND_SERVICE_OPTIONS,                                                                                           \
    {                                                                                                                  \
        .name = "connect-timeout", .kind = OPTION_DURATION, .default_text = "5s", .minimum = 1, .maximum = 3600000,    \
        .help = "how long to wait for a coordinator's first answer"                                                    \
    }

/* Parses. Returns the options, or NULL when the command is over (help shown, version shown, error told) with its exit
 * status in *ret_status. */
struct options *command_options(const struct options_table *table, int argc, char **argv, int *ret_status);

/* One line on stderr: "hcattn generate: ...". Returns `status`. */
int command_fail(int status, const char *name, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* Tells a call's error; an interrupted one is told shortly. Returns the exit status. */
int command_call_failed(const char *name, int result, const struct hcattn_error *error);

/* A client as the options of COMMAND_CLIENT_OPTIONS say, or NULL (told, *ret_status set). Ctrl-C and SIGTERM cancel its calls from
 * then on. */
struct hcattn *command_connect(const char *name, const struct options *options, int *ret_status);
/* The same for what concerns a host as a whole: an endpoint that names several is used wrongly. */
struct hcattn *command_connect_one(const char *name, const struct options *options, int *ret_status);
size_t command_n_hosts(const struct options *options); /* that the endpoint names */
/* The same with an endpoint of its own; NULL: of the runtime directory. */
struct hcattn *command_connect_to(const char *name, const struct options *options, const char *endpoint,
                                  int *ret_status);
struct hcattn *command_disconnect(struct hcattn *client); /* accepts NULL, returns NULL */
bool command_interrupted(void);                           /* a signal asked for the end */
void command_clear_interrupt(void);

/* A session's id as it is shown: up to 16 hex digits, not 0. -EINVAL */
int command_session_id(const char *text, uint64_t *ret_session);

/* The text of an argument, of stdin for "-", or of a file: malloc'd, checked to be UTF-8 without NUL. NULL: told,
 * *ret_status set. */
char *command_text(const char *name, const char *argument, bool is_file, int *ret_status);
