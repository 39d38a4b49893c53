/* drain.c - see drain.h. */
#include "client/command/drain.h"
#include "client/command/command.h"
#include "client/command/output.h"
#include "client/command/report.h"
#include "common/clock.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NAME     "hcattn drain"
#define N_STORES 64u /* numbers that stores may have */

static const struct option_spec specs[] = {
    {.name = "resume", .kind = OPTION_FLAG, .help = "end a drain: take sessions and requests again"},
    {.name = "timeout",
     .kind = OPTION_DURATION,
     .default_text = "0",
     .maximum = UINT32_MAX,
     .help = "how long to wait for the end; 0: as long as it takes. The drain goes on in any case"},
    COMMAND_CLIENT_OPTIONS,
};

static const struct options_table table = {
    .program = NAME,
    .usage = "[STORE]",
    .summary = "Lets the service refuse new sessions and requests, and waits until all that run have ended.\n"
               "With a number: moves what value-store STORE holds to the other stores while sessions run, and lets it\n"
               "leave; with --resume it comes back.",
    .specs = specs,
    .n_specs = sizeof(specs) / sizeof(specs[0]),
    .other_names = option_names_all,
    .max_positional = 1,
};

static int show_progress(void *context, uint32_t n_running, uint32_t n_queued)
{
    (void)context;
    output_progress(false, "draining: %" PRIu32 " running, %" PRIu32 " queued", n_running, n_queued);
    return 0;
}

static int drain(struct hcattn *client, bool resume, uint32_t timeout_ms)
{
    struct hcattn_drained drained;
    struct hcattn_error error;
    int result = hcattn_drain(client, resume, resume ? NULL : show_progress, NULL, timeout_ms, &drained, &error);
    output_progress(false, "%s", "");
    if (result < 0) {
        int status = command_call_failed(NAME, result, &error);
        if (!resume && (result == -ECANCELED || result == -ETIMEDOUT))
            command_fail(status, NAME, "the service goes on draining; 'hcattn drain --resume' ends that");
        return status;
    }
    if (resume)
        output_format("requests are taken again; %" PRIu32 " sessions are open\n", drained.n_sessions);
    else
        output_format("drained: %" PRIu32 " requests have ended, %" PRIu32 " sessions are open\n", drained.n_finished,
                      drained.n_sessions);
    return output_status();
}

/* ---- one store ---- */

struct rate {
    uint32_t store;
    bool resume;
    uint64_t at_us; /* of the last progress; 0: none yet */
    uint64_t bytes_moved;
};

/* "n sessions" */
static const char *sessions(uint32_t n, char text[32])
{
    snprintf(text, 32, "%" PRIu32 " session%s", n, n == 1 ? "" : "s");
    return text;
}

static int show_store(void *context, const struct hcattn_store_drain *drain)
{
    struct rate *rate = context;
    char left[32], rest[REPORT_SIZE_TEXT], moved[REPORT_SIZE_TEXT], per_s[REPORT_SIZE_TEXT];
    char waits[128] = "";
    uint64_t now = clock_now_us();
    uint64_t bytes = 0; /* a coordinator that came back counts anew */
    if (rate->at_us && now > rate->at_us && drain->bytes_moved > rate->bytes_moved)
        bytes = (uint64_t)((double)(drain->bytes_moved - rate->bytes_moved) * 1e6 / (double)(now - rate->at_us));
    rate->at_us = now;
    rate->bytes_moved = drain->bytes_moved;
    if (drain->waits && drain->waits[0])
        snprintf(waits, sizeof(waits), "; waits: %s", drain->waits);
    for (char *c = waits; *c; c++)
        *c = (unsigned char)*c < 0x20 || *c == 0x7f ? ' ' : *c; /* it stays one line */
    if (rate->resume)
        output_progress(false, "value-store %" PRIu32 " comes back%s", rate->store, waits);
    else
        output_progress(false, "value-store %" PRIu32 ": %s and %s left, %s moved, %s/s%s", rate->store,
                        sessions(drain->n_sessions_left, left), report_size(drain->bytes_left, rest),
                        report_size(drain->bytes_moved, moved), report_size(bytes, per_s), waits);
    return 0;
}

static int drain_store(struct hcattn *client, uint32_t store, bool resume, uint32_t timeout_ms)
{
    struct rate rate = {.store = store, .resume = resume};
    struct hcattn_store_drained drained;
    struct hcattn_error error;
    int result = hcattn_drain_store(client, store, resume, show_store, &rate, timeout_ms, &drained, &error);
    output_progress(false, "%s", "");
    if (result < 0) {
        int status = command_call_failed(NAME, result, &error);
        if (!resume && (result == -ECANCELED || result == -ETIMEDOUT))
            command_fail(status, NAME,
                         "value-store %" PRIu32 " goes on draining; 'hcattn drain --resume %" PRIu32 "' ends that",
                         store, store);
        return status;
    }
    char moved[32], size[REPORT_SIZE_TEXT];
    if (resume)
        output_format("value-store %" PRIu32 " takes sessions again\n", store);
    else
        output_format("value-store %" PRIu32 " has left: %s, %s moved\n", store, sessions(drained.n_sessions, moved),
                      report_size(drained.bytes_moved, size));
    return output_status();
}

/* -EINVAL */
static int store_number(const char *text, uint32_t *ret_store)
{
    size_t n = strspn(text, "0123456789");
    if (n == 0 || n > 2 || text[n] || strtoul(text, NULL, 10) >= N_STORES)
        return -EINVAL;
    *ret_store = (uint32_t)strtoul(text, NULL, 10);
    return 0;
}

int drain_command(int argc, char **argv)
{
    int status = 0;
    struct options *options = command_options(&table, argc, argv, &status);
    if (!options)
        return status;
    bool resume = options_flag(options, "resume");
    uint32_t timeout_ms = (uint32_t)options_duration_ms(options, "timeout"), store = 0;
    const char *number = options_n_positional(options) ? options_positional(options, 0) : NULL;
    struct hcattn *client = NULL;
    if (number && store_number(number, &store) < 0)
        status = command_fail(COMMAND_USAGE, NAME, "a store's number is 0 to %u; '%s' is none", N_STORES - 1, number);
    else
        client = command_connect_one(NAME, options, &status);
    if (client)
        status = number ? drain_store(client, store, resume, timeout_ms) : drain(client, resume, timeout_ms);
    command_disconnect(client);
    options_free(options);
    return status;
}
