/* chat.c - see chat.h. */
#include "client/command/chat.h"
#include "client/command/answer.h"
#include "client/command/command.h"
#include "client/command/opening.h"
#include "client/command/output.h"
#include "client/command/sampling.h"
#include "common/utf8.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define NAME     "hcattn chat"
#define CLOSE_MS 5000u
#define IDLE_S   86400u /* of a conversation whose terminal was lost */

static const struct option_spec specs[] = {
    {.name = "system", .kind = OPTION_STRING, .metavar = "TEXT", .help = "system message at the start"},
    SAMPLING_OPTIONS,
    OPENING_OPTIONS,
    COMMAND_CLIENT_OPTIONS,
};

static const struct options_table table = {
    .program = NAME,
    .summary = "Talks to the model: one line is one message, /quit ends. Ctrl-C stops an answer.",
    .specs = specs,
    .n_specs = sizeof(specs) / sizeof(specs[0]),
    .other_names = option_names_all,
};

struct chat {
    struct hcattn *client;
    const struct options *options;
    uint64_t session;
    uint64_t at;  /* tokens it holds; HCATTN_AT_ANY after an answer that was stopped */
    bool started; /* it holds messages */
};

/* One message and its answer. Returns an exit status; *ret_over: it makes no sense to go on. */
static int say(struct chat *chat, const char *line, bool *ret_over)
{
    struct answer answer;
    if (answer_init(&answer, true, false) < 0)
        return command_fail(COMMAND_ERROR, NAME, "no memory");
    struct hcattn_message messages[2];
    size_t n_messages = 0;
    const char *system = options_string(chat->options, "system");
    if (system && !chat->started)
        messages[n_messages++] = (struct hcattn_message){"system", system};
    messages[n_messages++] = (struct hcattn_message){"user", line};
    struct hcattn_generate generate = {
        .session = chat->session,
        .at = chat->at,
        .max_tokens = options_u32(chat->options, "max-tokens"),
        .sampling = sampling_from(chat->options),
        .input = {.messages = messages, .n_messages = n_messages, .continued = chat->started},
    };
    struct hcattn_events events = answer_events(&answer);
    struct hcattn_finished finished;
    struct hcattn_error error;
    int result = hcattn_generate(chat->client, &generate, &events, 0, &finished, &error);
    output_progress(false, "%s", "");
    if (answer.any_text && answer.last != '\n')
        output_text("\n");
    output_flush();
    bool any = answer.n_tokens > 0;
    answer_fini(&answer);
    if (result == 0) {
        chat->started = true;
        chat->at = finished.n_tokens;
        return 0;
    }
    *ret_over = output_closed();
    if (result == -ECANCELED && !*ret_over) {
        command_clear_interrupt();
        chat->at = HCATTN_AT_ANY;
        chat->started |= any;
        fprintf(stderr, "[stopped]\n");
        return 0;
    }
    /* A full context, a lost service: the conversation cannot go on. Others were refused before anything happened. */
    *ret_over |= result == -ENOENT || result == -ENOTCONN || result == -E2BIG || result == -ESTALE || result == -EPROTO;
    return command_call_failed(NAME, result, &error);
}

static int talk(struct chat *chat)
{
    bool terminal = isatty(STDIN_FILENO);
    char *line = NULL;
    size_t size = 0;
    int status = 0;
    bool over = false;
    while (!over && !command_interrupted()) {
        if (terminal) {
            output_text("> ");
            output_flush();
        }
        errno = 0;
        ssize_t n = getline(&line, &size, stdin);
        if (n < 0)
            break;
        while (n > 0 && (line[n - 1] == '\n' || line[n - 1] == '\r'))
            line[--n] = '\0';
        if (strcmp(line, "/quit") == 0)
            break;
        if (n == 0)
            continue;
        int result;
        if (memchr(line, 0, (size_t)n))
            result = command_fail(COMMAND_ERROR, NAME, "the message holds a NUL character");
        else if (utf8_check(line, (size_t)n, NULL) < 0)
            result = command_fail(COMMAND_ERROR, NAME, "the message is not UTF-8");
        else
            result = say(chat, line, &over);
        /* A person has seen it and gone on; a script asks for the status only. */
        if (terminal || !status)
            status = result;
    }
    if (terminal)
        output_text("\n");
    free(line);
    return status;
}

int chat_command(int argc, char **argv)
{
    int status = 0;
    struct options *options = command_options(&table, argc, argv, &status);
    if (!options)
        return status;
    struct chat chat = {.options = options, .client = command_connect(NAME, options, &status)};
    if (chat.client) {
        struct hcattn_session_config config;
        struct hcattn_session session;
        struct hcattn_error error;
        char policy[HCATTN_POLICY_SIZE];
        int result = opening_config(options, chat.client, policy, &config, &error);
        config.idle_timeout_s = IDLE_S;
        if (!result)
            result = hcattn_open_session(chat.client, &config, 0, &session, &error);
        if (result < 0) {
            status = command_call_failed(NAME, result, &error);
        } else {
            chat.session = session.session;
            status = talk(&chat);
            hcattn_close_session(chat.client, chat.session, CLOSE_MS, NULL, &error);
        }
    }
    command_disconnect(chat.client);
    options_free(options);
    return status ? status : output_status();
}
