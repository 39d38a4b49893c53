/* sessions.c - see sessions.h. */
#include "client/command/sessions.h"
#include "client/command/command.h"
#include "client/command/each_host.h"
#include "client/command/output.h"
#include "client/command/report.h"

#define NAME       "hcattn sessions"
#define TIMEOUT_MS 10000u /* the worker is asked between two steps */

static const struct option_spec specs[] = {
    {.name = "json", .kind = OPTION_FLAG, .help = "one JSON object"},
    COMMAND_CLIENT_OPTIONS,
};

static const struct options_table table = {
    .program = NAME,
    .usage = "[ID]",
    .summary = "Shows the open sessions; or one of them in detail: which share of its old tokens was read,\n"
               "from where, and what took the time.",
    .specs = specs,
    .n_specs = sizeof(specs) / sizeof(specs[0]),
    .other_names = option_names_all,
    .max_positional = 1,
};

static int list(struct hcattn *client, json_t **ret_json, struct hcattn_error *error)
{
    struct hcattn_sessions sessions;
    int result = hcattn_list_sessions(client, TIMEOUT_MS, &sessions, error);
    if (result < 0)
        return result;
    if (ret_json)
        *ret_json = json_pack("{s:o}", "sessions", report_session_list(sessions.sessions, sessions.n_sessions));
    else if (sessions.n_sessions)
        report_session_table(sessions.sessions, sessions.n_sessions);
    else
        output_text("no session is open\n");
    hcattn_sessions_free(&sessions);
    return 0;
}

static int describe(struct hcattn *client, uint64_t session, bool json)
{
    struct hcattn_description description;
    struct hcattn_error error;
    int result = hcattn_describe_session(client, session, TIMEOUT_MS, &description, &error);
    if (result < 0)
        return command_call_failed(NAME, result, &error);
    if (json)
        output_json(report_session_json(&description));
    else
        report_session_details(&description);
    hcattn_description_free(&description);
    return output_status();
}

int sessions_command(int argc, char **argv)
{
    int status = 0;
    struct options *options = command_options(&table, argc, argv, &status);
    if (!options)
        return status;
    bool json = options_flag(options, "json");
    const char *id = options_n_positional(options) ? options_positional(options, 0) : NULL;
    uint64_t session = 0;
    struct hcattn *client = NULL;
    if (id && command_session_id(id, &session) < 0)
        status = command_fail(COMMAND_USAGE, NAME, "a session's id has 16 hex digits; '%s' is none", id);
    else if (!id)
        status = each_host_run(NAME, options, json, list);
    else
        client = command_connect(NAME, options, &status);
    if (client)
        status = describe(client, session, json);
    command_disconnect(client);
    options_free(options);
    return status;
}
