/* transport.c - see transport.h. */
#include "client/command/transport.h"
#include "client/command/command.h"
#include "client/command/output.h"

#include <string.h>

#define NAME       "hcattn transport"
#define TIMEOUT_MS 60000u

static const struct option_spec specs[] = {COMMAND_CLIENT_OPTIONS};

static const struct options_table table = {
    .program = NAME,
    .usage = "ring|routed",
    .summary = "Sets how requests travel from the workers to the stores: through rings in shared memory, or through\n"
               "the coordinator. Running generations go on.",
    .specs = specs,
    .n_specs = sizeof(specs) / sizeof(specs[0]),
    .other_names = option_names_all,
    .max_positional = 1,
};

static int set(struct hcattn *client, const char *transport)
{
    struct hcattn_error error;
    int result = hcattn_set_transport(client, transport, TIMEOUT_MS, &error);
    if (result < 0)
        return command_call_failed(NAME, result, &error);
    output_format("transport: %s\n", transport);
    return output_status();
}

int transport_command(int argc, char **argv)
{
    int status = 0;
    struct options *options = command_options(&table, argc, argv, &status);
    if (!options)
        return status;
    const char *transport = options_n_positional(options) ? options_positional(options, 0) : "";
    struct hcattn *client = NULL;
    if (strcmp(transport, "ring") != 0 && strcmp(transport, "routed") != 0)
        status = command_fail(COMMAND_USAGE, NAME, "the transport is 'ring' or 'routed'");
    else
        client = command_connect_one(NAME, options, &status);
    if (client)
        status = set(client, transport);
    command_disconnect(client);
    options_free(options);
    return status;
}
