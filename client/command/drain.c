/* drain.c - see drain.h. */
#include "client/command/drain.h"
#include "client/command/command.h"
#include "client/command/output.h"

#include <errno.h>
#include <inttypes.h>

#define NAME "hcattn drain"

static const struct option_spec specs[] = {
    {.name = "resume", .kind = OPTION_FLAG, .help = "take sessions and requests again"},
    {.name = "timeout",
     .kind = OPTION_DURATION,
     .default_text = "0",
     .maximum = UINT32_MAX,
     .help = "how long to wait for what runs; 0: until it has ended. The service goes on draining in any case"},
    COMMAND_CLIENT_OPTIONS,
};

static const struct options_table table = {
    .program = NAME,
    .summary = "Lets the service refuse new sessions and requests, and waits until all that run have ended.",
    .specs = specs,
    .n_specs = sizeof(specs) / sizeof(specs[0]),
    .other_names = option_names_all,
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

int drain_command(int argc, char **argv)
{
    int status = 0;
    struct options *options = command_options(&table, argc, argv, &status);
    if (!options)
        return status;
    struct hcattn *client = command_connect(NAME, options, &status);
    if (client)
        status = drain(client, options_flag(options, "resume"), (uint32_t)options_duration_ms(options, "timeout"));
    command_disconnect(client);
    options_free(options);
    return status;
}
