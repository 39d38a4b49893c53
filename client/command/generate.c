/* generate.c - see generate.h. */
#include "client/command/generate.h"
#include "client/command/answer.h"
#include "client/command/command.h"
#include "client/command/opening.h"
#include "client/command/output.h"
#include "client/command/sampling.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NAME     "hcattn generate"
#define CLOSE_MS 5000u /* for letting go of a session at the end */
#define LEAVE_MS 500u  /* the same where nobody seems to be there */

static const struct option_spec specs[] = {
    {.name = "raw", .kind = OPTION_FLAG, .help = "the prompt as it is, not as a user's message to a chat model"},
    {.name = "parse-special",
     .kind = OPTION_FLAG,
     .help = "special tokens written in a raw prompt are tokens; otherwise they are text"},
    {.name = "bos",
     .kind = OPTION_FLAG,
     .default_text = "yes",
     .help = "start with the begin-of-sequence token if the model asks for it"},
    {.name = "system", .kind = OPTION_STRING, .metavar = "TEXT", .help = "system message before the prompt"},
    SAMPLING_OPTIONS,
    {.name = "stop", .kind = OPTION_STRING, .metavar = "TEXT", .help = "end before this text"},
    {.name = "ignore-end", .kind = OPTION_FLAG, .help = "go on after the model's end-of-generation token"},
    {.name = "logprobs", .kind = OPTION_FLAG, .help = "show the log-probability of every token after the text"},
    {.name = "top-logprobs",
     .kind = OPTION_U32,
     .minimum = 0,
     .maximum = 20,
     .metavar = "N",
     .help = "and those of the N most likely tokens"},
    {.name = "json", .kind = OPTION_FLAG, .help = "one JSON object with ids, log-probabilities, text and timings"},
    {.name = "session",
     .kind = OPTION_STRING,
     .metavar = "ID",
     .help = "go on with this session (16 hex digits), or 'new': a session that stays, its id is shown on stderr"},
    OPENING_OPTIONS,
    COMMAND_CLIENT_OPTIONS,
};

static const struct options_table table = {
    .program = NAME,
    .usage = "PROMPT|-",
    .summary = "Completes a prompt ('-': read from standard input) and writes the text as it comes.",
    .specs = specs,
    .n_specs = sizeof(specs) / sizeof(specs[0]),
    .other_names = option_names_all,
    .max_positional = 1,
};

/* Finds or opens the session. *ret_at: what it holds, *ret_close: it ends with us. */
static int get_session(struct hcattn *client, const struct options *options, uint64_t *ret_session, uint64_t *ret_at,
                       bool *ret_close, struct hcattn_error *error)
{
    const char *given = options_string(options, "session");
    bool stays = given && strcmp(given, "new") == 0;
    if (given && !stays) {
        command_session_id(given, ret_session); /* checked before */
        *ret_at = HCATTN_AT_ANY;
        *ret_close = false;
        return 0;
    }
    struct hcattn_session_config config;
    struct hcattn_session session;
    char policy[HCATTN_POLICY_SIZE];
    int result = opening_config(options, client, policy, &config, error);
    if (result < 0)
        return result;
    config.ephemeral = !stays;
    result = hcattn_open_session(client, &config, 0, &session, error);
    if (result < 0)
        return result;
    if (stays)
        fprintf(stderr, "session %016" PRIx64 "\n", session.session);
    *ret_session = session.session;
    *ret_at = 0;
    *ret_close = !stays;
    return 0;
}

static void show_logprobs(const struct answer *answer)
{
    size_t i;
    json_t *logprob;
    json_array_foreach(answer->logprobs, i, logprob)
    {
        output_format("%6lld %9.4f", (long long)json_integer_value(json_array_get(answer->tokens, i)),
                      json_is_real(logprob) ? json_real_value(logprob) : -HUGE_VAL);
        size_t j;
        json_t *top;
        json_array_foreach(json_array_get(answer->top_logprobs, i), j, top)
            output_format("  %lld:%.4f", (long long)json_integer_value(json_object_get(top, "id")),
                          json_number_value(json_object_get(top, "logprob")));
        output_text("\n");
    }
}

/* The whole exchange on an open client. Returns an exit status. */
static int complete(struct hcattn *client, const struct options *options, const char *prompt)
{
    bool json = options_flag(options, "json");
    bool logprobs = options_flag(options, "logprobs") || options_u32(options, "top-logprobs") > 0;
    struct hcattn_error error;
    uint64_t session = 0, at = 0;
    bool close_session = false;
    int result = get_session(client, options, &session, &at, &close_session, &error);
    if (result < 0)
        return command_call_failed(NAME, result, &error);

    struct answer answer;
    if (answer_init(&answer, !json, json || logprobs) < 0)
        return command_fail(COMMAND_ERROR, NAME, "no memory");
    struct hcattn_message messages[2];
    size_t n_messages = 0;
    const char *stop = options_string(options, "stop");
    const char *system = options_string(options, "system");
    if (system)
        messages[n_messages++] = (struct hcattn_message){"system", system};
    messages[n_messages++] = (struct hcattn_message){"user", prompt};
    struct hcattn_generate generate = {
        .session = session,
        .at = at,
        .max_tokens = options_u32(options, "max-tokens"),
        .sampling = sampling_from(options),
        .logprobs = json || logprobs,
        .top_logprobs = options_u32(options, "top-logprobs"),
        .ignore_end = options_flag(options, "ignore-end"),
        .stop = &stop,
        .n_stop = stop ? 1 : 0,
        .input = {.parse_special = options_flag(options, "parse-special"), .no_bos = !options_flag(options, "bos")},
    };
    if (options_flag(options, "raw")) {
        generate.input.text = prompt;
    } else {
        generate.input.messages = messages;
        generate.input.n_messages = n_messages;
        generate.input.continued = at == HCATTN_AT_ANY;
    }
    struct hcattn_events events = answer_events(&answer);
    struct hcattn_finished finished;
    result = hcattn_generate(client, &generate, &events, 0, &finished, &error);
    output_progress(false, "%s", "");
    if (!json && answer.any_text && answer.last != '\n')
        output_text("\n");
    int status = 0;
    if (result < 0) {
        output_flush();
        status = command_call_failed(NAME, result, &error);
    } else if (json) {
        output_json(answer_json(&answer, &finished, options_u32(options, "top-logprobs") > 0));
    } else if (logprobs) {
        show_logprobs(&answer);
    }
    answer_fini(&answer);
    output_flush();
    struct hcattn_error ignored; /* what cannot be closed now closes by itself: it is ephemeral */
    if (close_session)
        hcattn_close_session(client, session, result == -ENOTCONN ? LEAVE_MS : CLOSE_MS, NULL, &ignored);
    return status ? status : output_status();
}

int generate_command(int argc, char **argv)
{
    int status = 0;
    struct options *options = command_options(&table, argc, argv, &status);
    if (!options)
        return status;
    const char *given = options_string(options, "session");
    uint64_t session;
    char *prompt = NULL;
    if (options_n_positional(options) != 1)
        status = command_fail(COMMAND_USAGE, NAME, "a prompt is needed (one argument, or '-' for standard input)");
    else if (given && strcmp(given, "new") != 0 && command_session_id(given, &session) < 0)
        status = command_fail(COMMAND_USAGE, NAME, "--session takes 16 hex digits or 'new', not '%s'", given);
    else if (options_flag(options, "raw") && options_string(options, "system"))
        status = command_fail(COMMAND_USAGE, NAME, "--system has no meaning with --raw");
    else
        prompt = command_text(NAME, options_positional(options, 0), false, &status);
    /* A session that holds tokens can go on without new ones; a chat template would make a prompt of nothing. */
    bool goes_on = given && strcmp(given, "new") != 0 && options_flag(options, "raw");
    if (prompt && *prompt == '\0' && !goes_on)
        status = command_fail(COMMAND_ERROR, NAME, "the prompt is empty");
    else if (prompt) {
        struct hcattn *client = command_connect(NAME, options, &status);
        if (client)
            status = complete(client, options, prompt);
        command_disconnect(client);
    }
    free(prompt);
    options_free(options);
    return status;
}
