/* policy.c - see policy.h. */
#include "client/command/policy.h"
#include "client/command/command.h"
#include "client/command/opening.h"
#include "client/command/output.h"

#include <inttypes.h>

#define NAME       "hcattn policy"
#define TIMEOUT_MS 60000u

static const struct option_spec specs[] = {
    {.name = "session",
     .kind = OPTION_STRING,
     .metavar = "ID",
     .help = "of this session (16 hex digits), which must not hold tokens yet; otherwise of sessions that name none"},
    COMMAND_CLIENT_OPTIONS,
};

static const struct options_table table = {
    .program = NAME,
    .usage = "NAME",
    .summary = "Sets the policy of new sessions, or of one that is empty. There is:\n  " OPENING_PRESETS
               ",\n  " OPENING_GRAMMAR,
    .specs = specs,
    .n_specs = sizeof(specs) / sizeof(specs[0]),
    .other_names = option_names_all,
    .max_positional = 1,
};

static int set(struct hcattn *client, uint64_t session, const char *policy)
{
    char understood[HCATTN_POLICY_SIZE];
    struct hcattn_error error;
    int result = hcattn_set_policy(client, session, policy, TIMEOUT_MS, understood, &error);
    if (result < 0)
        return command_call_failed(NAME, result, &error);
    if (session)
        output_format("policy of session %016" PRIx64 ": %s\n", session, understood);
    else
        output_format("policy of new sessions: %s\n", understood);
    return output_status();
}

int policy_command(int argc, char **argv)
{
    int status = 0;
    struct options *options = command_options(&table, argc, argv, &status);
    if (!options)
        return status;
    const char *id = options_string(options, "session");
    uint64_t session = 0;
    struct hcattn *client = NULL;
    if (options_n_positional(options) != 1)
        status = command_fail(COMMAND_USAGE, NAME, "the name of a policy is needed: " OPENING_POLICIES);
    else if (id && command_session_id(id, &session) < 0)
        status = command_fail(COMMAND_USAGE, NAME, "--session takes 16 hex digits, not '%s'", id);
    else
        client = id ? command_connect(NAME, options, &status) : command_connect_one(NAME, options, &status);
    if (client)
        status = set(client, session, options_positional(options, 0));
    command_disconnect(client);
    options_free(options);
    return status;
}
