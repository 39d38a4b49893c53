/* status.c - see status.h. */
#include "client/command/status.h"
#include "client/command/command.h"
#include "client/command/each_host.h"
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
    .summary =
        "Shows the processes of the service and its sessions. Exit status 1: it does not run, or one of several\n"
        "hosts does not.",
    .specs = specs,
    .n_specs = sizeof(specs) / sizeof(specs[0]),
    .other_names = option_names_all,
};

static int show(struct hcattn *client, json_t **ret_json, struct hcattn_error *error)
{
    struct hcattn_health health;
    struct hcattn_stats stats;
    int result = hcattn_health(client, TIMEOUT_MS, &health, error);
    if (!result)
        result = hcattn_stats(client, TIMEOUT_MS, &stats, error);
    if (result < 0)
        return result;
    if (ret_json)
        *ret_json = report_json(&health, &stats);
    else
        report_table(&health, &stats);
    hcattn_stats_free(&stats);
    return 0;
}

int status_command(int argc, char **argv)
{
    int status = 0;
    struct options *options = command_options(&table, argc, argv, &status);
    if (!options)
        return status;
    status = each_host_run(NAME, options, options_flag(options, "json"), show);
    options_free(options);
    return status;
}
