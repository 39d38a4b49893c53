/* main.c - hc-coordinator: options, sockets, serve until a signal. Exit status 0: asked to stop; 1: failed; 2: bad start. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/log.h"
#include "common/option_names.h"
#include "common/options.h"
#include "common/random.h"
#include "common/signals.h"
#include "coordinator/accept4.h"
#include "coordinator/server.h"
#include "proto/layout.h"
#include "proto/policy.h"

static const struct option_spec specs[] = {
    {.name = "runtime-dir", .kind = OPTION_STRING, .help = "Directory of the sockets.", .metavar = "DIR"},
    {.name = "stores",
     .kind = OPTION_U32,
     .default_text = "1",
     .help = "Value-stores to expect, numbered from 0.",
     .minimum = 1,
     .maximum = SERVER_MAX_STORES},
    {.name = "workers",
     .kind = OPTION_U32,
     .default_text = "1",
     .help = "Workers to expect, for what is said while they start; one is enough to serve.",
     .minimum = 1,
     .maximum = 64},
    {.name = "incarnation",
     .kind = OPTION_STRING,
     .metavar = "HEX",
     .help = "Names this life. Given by a supervisor; default: random."},
    {.name = "log-level",
     .kind = OPTION_CHOICE,
     .default_text = "info",
     .help = "Least important lines that are shown.",
     .choices = log_level_names},
    {.name = "hang-timeout",
     .kind = OPTION_DURATION,
     .default_text = "60s",
     .help =
         "A process that is busy without progress, or silent, for this long is ended by its supervisor; ten times as "
         "long while it loads.",
     .minimum = 100,
     .maximum = 86400000},
    {.name = "recovery-timeout",
     .kind = OPTION_DURATION,
     .default_text = "120s",
     .help = "How long requests wait for a lost worker or store to come back.",
     .minimum = 100,
     .maximum = 86400000},
    {.name = "max-sessions",
     .kind = OPTION_U32,
     .default_text = "1024",
     .help = "Sessions at a time; a store has records for 1024.",
     .minimum = 1,
     .maximum = 65536},
    {.name = "max-requests",
     .kind = OPTION_U32,
     .default_text = "1024",
     .help = "Requests in progress at a time.",
     .minimum = 1,
     .maximum = 65536},
    {.name = "default-max-tokens",
     .kind = OPTION_U32,
     .default_text = "256",
     .help = "Tokens to generate where a client does not say; room for them is reserved.",
     .minimum = 1,
     .maximum = 1048576},
    {.name = "client-endpoint",
     .kind = OPTION_STRING,
     .help = "Serve clients here too, for example tcp://127.0.0.1:7070. Without keys there is no authentication and no "
             "encryption.",
     .metavar = "ENDPOINT"},
    {.name = "client-secret",
     .kind = OPTION_STRING,
     .help = "Secret key of that endpoint ('hcattn keys' makes a pair): only clients in --client-keys may connect.",
     .metavar = "FILE"},
    {.name = "client-keys",
     .kind = OPTION_STRING,
     .help = "Public keys of clients that may connect, one a line; it may change at any time.",
     .metavar = "FILE"},
    {.name = "max-queue",
     .kind = OPTION_U32,
     .default_text = "64",
     .help = "Requests that may wait for room in the stores; 0: what does not fit now is refused.",
     .minimum = 0,
     .maximum = 65536},
    {.name = "queue-timeout",
     .kind = OPTION_DURATION,
     .default_text = "30s",
     .help = "How long a request waits for room before it is refused.",
     .minimum = 1,
     .maximum = 86400000},
    {.name = "policy",
     .kind = OPTION_STRING,
     .default_text = "default",
     .help = "Policy of sessions that name none: full, default, quality, or CODEC,SELECTOR=NUMBER[,weights][,notail]."},
    {.name = "exact-tokens",
     .kind = OPTION_U32,
     .default_text = "1024",
     .help = "Sessions that name no number keep all tokens exactly on the device while they have at most this many.",
     .minimum = 0,
     .maximum = SERVER_MAX_EXACT_TOKENS},
    {.name = "transport",
     .kind = OPTION_CHOICE,
     .default_text = "ring",
     .help = "How requests travel to the stores; ring and routed can be changed while everything runs.",
     .choices = server_transport_names},
};

static const struct options_table table = {
    .program = "hc-coordinator",
    .summary = "Serves clients and keeps the table of sessions, blocks and processes. Touches no model data.",
    .specs = specs,
    .n_specs = sizeof(specs) / sizeof(specs[0]),
    .other_names = option_names_all,
};

static int fail(int status, const char *sentence)
{
    LOG_ERROR("%s", sentence);
    return status;
}

static int serve(const struct options *options)
{
    char runtime_dir[OPTIONS_PATH_SIZE], error[SERVER_ERROR_BYTES], text[1024];
    struct server *server = NULL;
    int signal_fd = -1;
    log_open("hc-coordinator", (enum log_level)options_choice(options, "log-level"));
    if (options_runtime_dir(options_string(options, "runtime-dir"), runtime_dir, error) != 0)
        return fail(2, error);
    struct policy_terms terms;
    const char *policy = options_string(options, "policy");
    if (policy_parse(policy, &terms, error, sizeof(error)) != 0) {
        snprintf(text, sizeof(text), "--policy: %s", error);
        return fail(2, text);
    }
    uint64_t incarnation;
    if (random_incarnation(options_string(options, "incarnation"), &incarnation) != 0)
        return fail(2, "--incarnation: not a hexadecimal number above 0");
    const char *endpoint = options_string(options, "client-endpoint");
    const char *secret = options_string(options, "client-secret"), *keys = options_string(options, "client-keys");
    if (!secret != !keys || (secret && (!endpoint || strncmp(endpoint, "tcp://", 6) != 0)))
        return fail(2, "--client-secret, --client-keys and a --client-endpoint tcp://... belong together");
    struct server_options server_options = {
        .runtime_dir = runtime_dir,
        .client_endpoint = endpoint,
        .client_secret = secret,
        .client_keys = keys,
        .policy = policy,
        .transport = (enum server_transport)options_choice(options, "transport"),
        .incarnation = incarnation,
        .n_stores = options_u32(options, "stores"),
        .n_workers = options_u32(options, "workers"),
        .max_sessions = options_u32(options, "max-sessions"),
        .max_requests = options_u32(options, "max-requests"),
        .max_queued = options_u32(options, "max-queue"),
        .exact_tokens = options_u32(options, "exact-tokens"),
        .default_max_tokens = options_u32(options, "default-max-tokens"),
        .hang_timeout_us = options_duration_ms(options, "hang-timeout") * 1000u,
        .recovery_timeout_us = options_duration_ms(options, "recovery-timeout") * 1000u,
        .queue_timeout_us = options_duration_ms(options, "queue-timeout") * 1000u,
    };
    if (signals_open(false, &signal_fd) != 0)
        return fail(1, "cannot receive signals");
    uint64_t n_descriptors = accept4_prepare();
    LOG_DEBUG("at most %llu descriptors", (unsigned long long)n_descriptors);
    if (server_new(&server_options, error, &server) != 0) {
        signals_close(signal_fd);
        return fail(2, error);
    }
    LOG_INFO("serving: %s", server_describe(server, text, sizeof(text)));
    int result = server_run(server, signal_fd);
    LOG_INFO("stopped%s%s", result != 0 ? ": " : "", result != 0 ? strerror(-result) : "");
    server_free(server);
    signals_close(signal_fd);
    return result == 0 ? 0 : 1;
}

int main(int argc, char *argv[])
{
    struct options *options;
    char error[OPTIONS_ERROR_SIZE];
    if (options_parse(&table, argc, argv, &options, error) != 0) {
        fprintf(stderr, "%s\n", error);
        return 2;
    }
    int status = 0;
    if (options_help_wanted(options)) {
        char *help = options_help(&table, options);
        printf("%s", help ? help : "");
        free(help);
    } else if (options_version_wanted(options)) {
        printf("hc-coordinator %s\n", HCATTN_VERSION);
    } else {
        status = serve(options);
    }
    options_free(options);
    return status;
}
