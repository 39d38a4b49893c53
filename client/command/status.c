/* status.c - see status.h. */
#include "client/command/status.h"
#include "client/command/command.h"
#include "client/command/output.h"
#include "client/command/report.h"

#define NAME       "hcattn status"
#define TIMEOUT_MS 5000u /* the coordinator answers these at once, whatever it does */

static const struct option_spec specs[] = {
    {.name = "json", .kind = OPTION_FLAG, .help = "one JSON object"},
    COMMAND_SERVICE_OPTIONS,
    {.name = "connect-timeout",
     .kind = OPTION_DURATION,
     .default_text = "1s",
     .minimum = 1,
     .maximum = 3600000,
     .help = "how long to wait for a coordinator's first answer"},
};

static const struct options_table table = {
    .program = NAME,
    .summary = "Shows the processes of the service and its sessions. Exit status 1: it does not run.",
    .specs = specs,
    .n_specs = sizeof(specs) / sizeof(specs[0]),
    .other_names = option_names_all,
};

int status_command(int argc, char **argv)
{
    int status = 0;
    struct options *options = command_options(&table, argc, argv, &status);
    if (!options)
        return status;
    struct hcattn *client = command_connect(NAME, options, &status);
    if (client) {
        struct hcattn_health health;
        struct hcattn_stats stats;
        struct hcattn_error error;
        int result = hcattn_health(client, TIMEOUT_MS, &health, &error);
        if (!result)
            result = hcattn_stats(client, TIMEOUT_MS, &stats, &error);
        if (result < 0) {
            status = command_call_failed(NAME, result, &error);
        } else {
            if (options_flag(options, "json"))
                output_json(report_json(&health, &stats));
            else
                report_table(&health, &stats);
            hcattn_stats_free(&stats);
            status = output_status();
        }
    }
    command_disconnect(client);
    options_free(options);
    return status;
}
