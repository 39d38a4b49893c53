/* fork.c - see fork.h. */
#include "client/command/fork.h"
#include "client/command/command.h"
#include "client/command/output.h"
#include "client/command/report.h"

#include <inttypes.h>

#define NAME "hcattn fork"

static const struct option_spec specs[] = {
    {.name = "tokens",
     .kind = OPTION_U64,
     .minimum = 1,
     .maximum = 9e15,
     .metavar = "N",
     .help = "take the first N tokens, rounded down to whole blocks of 64; all complete blocks if not given"},
    {.name = "json", .kind = OPTION_FLAG, .help = "one JSON object"},
    COMMAND_CLIENT_OPTIONS,
};

static const struct options_table table = {
    .program = NAME,
    .usage = "ID",
    .summary = "Opens a session that begins with the tokens of another, which may be running. Shows its id.",
    .specs = specs,
    .n_specs = sizeof(specs) / sizeof(specs[0]),
    .other_names = option_names_all,
    .max_positional = 1,
};

static int make(struct hcattn *client, const struct options *options, uint64_t session)
{
    struct hcattn_fork fork = {.session = session, .n_tokens = options_u64(options, "tokens")};
    struct hcattn_forked forked;
    struct hcattn_error error;
    int result = hcattn_fork(client, &fork, 0, &forked, &error);
    if (result < 0)
        return command_call_failed(NAME, result, &error);
    if (options_flag(options, "json"))
        output_json(json_pack("{s:o,s:I}", "session", report_hex(forked.session), "tokens", //
                              (json_int_t)forked.n_tokens));
    else
        output_format("session %016" PRIx64 " holds %" PRIu64 " tokens\n", forked.session, forked.n_tokens);
    return output_status();
}

int fork_command(int argc, char **argv)
{
    int status = 0;
    struct options *options = command_options(&table, argc, argv, &status);
    if (!options)
        return status;
    uint64_t session = 0;
    struct hcattn *client = NULL;
    if (options_n_positional(options) != 1)
        status = command_fail(COMMAND_USAGE, NAME, "the id of a session is needed");
    else if (command_session_id(options_positional(options, 0), &session) < 0)
        status = command_fail(COMMAND_USAGE, NAME, "a session's id has 16 hex digits; '%s' is none",
                              options_positional(options, 0));
    else
        client = command_connect(NAME, options, &status);
    if (client)
        status = make(client, options, session);
    command_disconnect(client);
    options_free(options);
    return status;
}
