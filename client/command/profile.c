/* profile.c - see profile.h. */
#include "client/command/profile.h"
#include "client/command/command.h"
#include "client/command/output.h"
#include "client/command/profile_report.h"
#include "client/command/share.h"
#include "proto/policy.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define NAME     "hcattn profile"
#define CLOSE_MS 5000u
#define ASK_MS   10000u

static const struct option_spec specs[] = {
    {.name = "text", .kind = OPTION_STRING, .metavar = "FILE", .help = "the prompt ('-': standard input), UTF-8"},
    {.name = "recovery",
     .kind = OPTION_FLOAT,
     .default_text = "0.98",
     .minimum = 0,
     .maximum = 1,
     .help = "share of a head's attention mass that a fixed set must keep"},
    {.name = "policy",
     .kind = OPTION_STRING,
     .default_text = "default",
     .metavar = "POLICY",
     .help = "of the session, without fastgen"},
    {.name = "json", .kind = OPTION_FLAG, .help = "one JSON object"},
    {.name = "out",
     .kind = OPTION_STRING,
     .metavar = "DIR",
     .help = "write profile.json and profile.svg there (the plot needs python3-matplotlib)"},
    COMMAND_CLIENT_OPTIONS,
};

static const struct options_table table = {
    .program = NAME,
    .summary = "Shows for each layer and KV head the cheapest fixed set of tokens that keeps enough of its attention\n"
               "(FastGen): special tokens, punctuation, frequent ones, local ones, or all.",
    .specs = specs,
    .n_specs = sizeof(specs) / sizeof(specs[0]),
    .other_names = option_names_all,
};

static int on_progress(void *context, uint64_t n_done, uint64_t n_total)
{
    (void)context;
    if (output_is_terminal())
        output_progress(false, "prefill: %llu of %llu tokens", (unsigned long long)n_done, (unsigned long long)n_total);
    return 0;
}

/* The prompt, and two tokens: the first comes of the prefill, the second of a step before which the heads are looked at. */
static int fill(struct hcattn *client, uint64_t session, const char *text, struct hcattn_error *error)
{
    struct hcattn_input input = {.text = text};
    struct hcattn_events events = {.progress = on_progress};
    struct hcattn_appended appended;
    struct hcattn_finished finished;
    int result = hcattn_append(client, session, &input, 0, &events, 0, &appended, error);
    output_progress(false, "%s", "");
    if (result < 0)
        return result;
    struct hcattn_generate generate = {.session = session, .at = appended.n_tokens, .max_tokens = 2};
    generate.ignore_end = true;
    return hcattn_generate(client, &generate, NULL, 0, &finished, error);
}

static int write_folder(const char *folder, const json_t *json)
{
    char path[4096];
    if (mkdir(folder, 0777) < 0 && errno != EEXIST)
        return command_fail(COMMAND_ERROR, NAME, "cannot make the folder %s: %s", folder, strerror(errno));
    int n = snprintf(path, sizeof(path), "%s/profile.json", folder);
    errno = 0;
    if (n < 0 || (size_t)n >= sizeof(path) ||
        json_dump_file(json, path, JSON_INDENT(2) | JSON_PRESERVE_ORDER | JSON_REAL_PRECISION(9)) < 0)
        return command_fail(COMMAND_ERROR, NAME, "cannot write %s: %s", path, strerror(errno ? errno : ENAMETOOLONG));
    return share_plot(NAME, path, folder);
}

static int show(const struct options *options, const struct hcattn_description *description)
{
    if (!description->profiled)
        return command_fail(COMMAND_ERROR, NAME,
                            "the session was not profiled: is the text longer than sinks and window?");
    const char *folder = options_string(options, "out");
    int status = 0;
    json_t *json = profile_report_json(description);
    if (!json)
        return command_fail(COMMAND_ERROR, NAME, "no memory");
    if (folder)
        status = write_folder(folder, json);
    if (options_flag(options, "json"))
        output_json(json_incref(json));
    else
        profile_report_table(description);
    json_decref(json);
    return status ? status : output_status();
}

static int profile(struct hcattn *client, const struct options *options, const char *policy, const char *text)
{
    /* Exact tokens would put the profile off: nothing is old yet. */
    struct hcattn_session_config config = {.policy = policy, .exact_tokens = HCATTN_EXACT_NONE, .ephemeral = true};
    struct hcattn_session session;
    struct hcattn_error error, ignored;
    int result = hcattn_open_session(client, &config, 0, &session, &error);
    if (result < 0)
        return command_call_failed(NAME, result, &error);
    struct hcattn_description description = {.n_layers = 0};
    result = fill(client, session.session, text, &error);
    if (!result)
        result = hcattn_describe_session(client, session.session, ASK_MS, &description, &error);
    int status = result < 0 ? command_call_failed(NAME, result, &error) : show(options, &description);
    hcattn_description_free(&description);
    output_flush();
    hcattn_close_session(client, session.session, CLOSE_MS, NULL, &ignored);
    return status;
}

int profile_command(int argc, char **argv)
{
    int status = 0;
    struct options *options = command_options(&table, argc, argv, &status);
    if (!options)
        return status;
    struct policy_terms terms;
    char policy[160], sentence[OPTIONS_ERROR_SIZE];
    char *text = NULL;
    snprintf(policy, sizeof(policy), "%.100s,fastgen=%.20s", options_string(options, "policy"),
             options_text(options, "recovery"));
    if (!options_string(options, "text"))
        status = command_fail(COMMAND_USAGE, NAME, "a text is needed: --text FILE");
    else if (policy_parse(policy, &terms, sentence, sizeof(sentence)) < 0)
        status = command_fail(COMMAND_USAGE, NAME, "%s", sentence);
    else
        text = command_text(NAME, options_string(options, "text"), true, &status);
    if (text) {
        struct hcattn *client = command_connect(NAME, options, &status);
        if (client)
            status = profile(client, options, policy, text);
        command_disconnect(client);
    }
    free(text);
    options_free(options);
    return status;
}
